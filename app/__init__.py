"""The dashboard: a Dash app on top of the analyses, with no mathematics of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.app.main import create_app as create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from workbench.app import main

    return getattr(main, name)
