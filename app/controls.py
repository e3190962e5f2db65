"""Which component holds which field of the view. In the browser, view.js keeps the two the same."""

from __future__ import annotations

from typing import Any

from workbench.app import registry
from workbench.app.state import ALWAYS_WRITTEN, NAMES, View

# Field → (component, property); those of the frame, and those of each page.
OF_THE_FRAME: dict[str, tuple[str, str]] = {
    "layer": ("layer", "value"),
    "head": ("head", "value"),
    "asked": ("asked", "data"),
}
BY_PAGE = {"": OF_THE_FRAME} | {page.NAME: page.CONTROLS for page in registry.PAGES}


def fields() -> list[dict[str, Any]]:
    """Every field of the view, in the order of the address: its name there, the value that is left out there, and the
    page and component that hold it, where one does."""
    plain = View()
    held = {field: (page, *control) for page, controls in BY_PAGE.items() for field, control in controls.items()}
    found = []
    for name, field in NAMES.items():
        page, component, prop = held.get(field, ("", "", ""))
        initial = None if field in ALWAYS_WRITTEN else getattr(plain, field)
        found.append(
            {"field": field, "name": name, "initial": initial, "page": page, "id": component, "property": prop}
        )
    return found
