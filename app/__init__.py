"""The dashboard: a Dash app on top of the analyses, with no mathematics of its own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.app.inline import show as show
    from workbench.app.main import create_app as create_app

_MODULE_OF = {"create_app": "main", "show": "inline"}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
