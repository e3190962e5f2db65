"""What a view asks for that its model does not have, and what is shown in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.app.components import message
from workbench.app.pages import what_if
from workbench.app.services import Services
from workbench.app.state import View


@dataclass(frozen=True)
class Correction:
    """Fields of the view and what they become, and a notice that says so."""

    fields: dict[str, Any]
    notice: Any


def needed(services: Services, view: View) -> Correction | None:
    """The first correction that a view needs; None as long as its model is not in memory to tell."""
    if (nearest := services.nearest_head(view)) is not None:
        layer, head = nearest
        text = f"{view.model} has no L{view.layer}H{view.head}; this is L{layer}H{head}, the nearest that it has."
        return Correction({"layer": layer, "head": head}, message("notice", "There is no such head", text))
    if view.page == what_if.NAME and (refused := what_if.names_refused(services, view)):
        off = [name for name in view.off if name not in refused]
        return Correction({"off": off}, message("notice", "Not switched off", "\n".join(refused.values())))
    return None
