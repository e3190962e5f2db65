"""What a view asks for that its model does not have, and what is shown in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dash import no_update

from workbench.app.components import message
from workbench.app.pages import compare, generation, lens, what_if
from workbench.app.recipes import HEAD_STATISTICS
from workbench.app.selection import first_head
from workbench.app.services import Services
from workbench.app.state import View


@dataclass(frozen=True)
class Correction:
    """Fields of the view and what they become, and a notice that says so where that needs words."""

    fields: dict[str, Any]
    notice: Any = no_update


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


def by_results(services: Services, view: View) -> Correction | None:
    """What the results tell, as far as they are there: the head to begin with, the nearest that the other model has,
    and the last step or token in place of one beyond it. None where the view has that."""
    found: dict[str, Any] = {}
    notice: Any = no_update
    if not view.has_head and (scores := services.jobs.result(HEAD_STATISTICS.key(view))) is not None:
        found["layer"], found["head"] = first_head(scores)
    if view.page == generation.NAME:
        generated = services.jobs.result(generation.generation(view).key(view))
        found |= {} if generated is None else {"step": generation.shown_step(generated, view)}
    if view.page == lens.NAME and view.lens_position is not None:
        read = services.jobs.result(lens.LENS.key(view))
        found |= {} if read is None else {"lens_position": lens.chosen_position(read, view)}
    if view.page == compare.NAME and (nearest := compare.missing_head(services, view)) is not None:
        found["other_layer"], found["other_head"] = nearest
        notice = compare.no_such_head(view, nearest)
    differing = {field: value for field, value in found.items() if value != getattr(view, field)}
    return Correction(differing, notice) if differing else None
