"""Errors in words."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from workbench.app.components import message
from workbench.app.estimates import AsksFirst
from workbench.errors import WorkbenchError, ran_out_of_memory


def error_message(error: Exception | None) -> Any:
    """An error in words: what happened and what to do."""
    if isinstance(error, AsksFirst):
        return message("question", "This takes much", str(error))
    if isinstance(error, (WorkbenchError, ValueError)):
        return message("error", "This cannot be analysed", str(error) or "unknown error")
    if error is not None and ran_out_of_memory(error):
        return message("error", "Not enough memory", "Shorten the text, or choose a smaller model.")
    details = "".join(traceback.format_exception(error)) if error else ""
    logging.getLogger(__name__).error("%s", details)
    return message(
        "error",
        "Something went wrong here, not with your input",
        "Press Analyse to try again. If it happens again, please report it with the details below.",
        details=details,
    )
