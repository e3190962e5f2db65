"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.errors import WorkbenchError


def expand_home(path: str | os.PathLike) -> Path:
    """The path with ``~`` replaced.

    Raises:
        WorkbenchError: ``~name`` of nobody who has a home folder here.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise WorkbenchError(f"{path}: there is no such home folder; write the path out") from None
