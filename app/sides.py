"""The two sides of a comparison: A is the view, B is what it is compared with."""

from __future__ import annotations

import dataclasses

from workbench.app.recipes import HEAD_STATISTICS, Compared, Recipe, chosen_head, pattern_of
from workbench.app.state import View

MOST_CELLS = 200  # of a pattern, a side: each gets a pixel in half a window


def other_of(recipe: Recipe, view: View) -> Recipe:
    """The recipe as B has it."""
    model = None if view.other_model in ("", view.model) else view.other_model
    return dataclasses.replace(recipe, model=model, text=view.other_text or None, shuffled=is_shuffled(view))


def is_shuffled(view: View) -> bool:
    """Whether B reads the text's words in another order, as nothing else would tell it from A."""
    same_head = not view.has_head or head_of_b(view) == chosen_head(view)
    return not view.other_text and view.other_model in ("", view.model) and same_head


def head_of_b(view: View) -> tuple[int, int]:
    """(layer, head) that is looked at in B: A's where none is chosen. The view has a head."""
    assert view.layer is not None and view.head is not None
    return (
        view.layer if view.other_layer is None else view.other_layer,
        view.head if view.other_head is None else view.other_head,
    )


def heads_of(view: View) -> Compared:
    """All heads of both."""
    return Compared("compare_heads", "Heads of both", (HEAD_STATISTICS, other_of(HEAD_STATISTICS, view)))


def patterns_of(view: View) -> Compared:
    """The whole patterns of both heads. The view has a head."""
    layer, head = head_of_b(view)
    whole = dataclasses.replace(view, queries=None, keys=None)
    of_b = dataclasses.replace(whole, layer=layer, head=head)
    patterns = pattern_of(whole, MOST_CELLS), other_of(pattern_of(of_b, MOST_CELLS), view)
    return Compared("compare_patterns", "Patterns of both", patterns)
