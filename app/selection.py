"""Choosing a head: the maps of all heads, what a click means, and how the chosen head is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, html

from workbench.analyses.labels import HEAD_SCORES
from workbench.app.components import about_score, card, graph, on_card, select
from workbench.app.recipes import Shown

# Where what is chosen otherwise than in its control goes, as field of the view → value.
CHOSEN = Output("chosen", "data", allow_duplicate=True)
LAYER_HEIGHT = 16  # pixels of a map's row: its label and its number can be read


def map_card(page: str, control: str, score: str, scores: Mapping[str, str], height: int) -> html.Section:
    """A page's map of all heads, with the choice of its score; ``map_outputs`` fills it."""
    return card(
        "All heads",
        graph(f"{page}-map", "Map of all heads by layer and head, coloured by the chosen score", height),
        controls=[select(control, "Score shown in the map", score, scores, width=210)],
        note=html.Span("", id=f"{page}-note"),
    )


def map_outputs(page: str) -> tuple[Output, Output, Output]:
    """What ``score_map`` returns goes here."""
    return Output(f"{page}-map", "figure"), Output(f"{page}-map", "style"), Output(f"{page}-note", "children")


def score_map(result: Any, shown: Shown, scores: Mapping[str, str], scheme: str, height: int) -> tuple:
    """The map of a score as (figure, style, note). It is as high as its layers need, and at least ``height``."""
    score = shown.options_for(result)["score"]
    tall = max(height, LAYER_HEIGHT * len(result[score]) + 90)
    figure = on_card(shown.draw(result, scheme), tall, revision="map")
    note = [*about_score(scores[score], result.quantities[score]), rows_used(result, score)]
    return figure, {"height": f"{tall}px"}, note


def rows_used(result: Any, score: str) -> str:
    """Over how many queries the mean of a score is taken, where the result says so."""
    if score not in result.coverage:
        return ""
    n_tokens = result.provenance.n_tokens
    used = result.coverage[score] * n_tokens
    by_layer = "" if math.isclose(used, round(used)) else ", mean over layers"  # whose windows differ
    return f" Over {round(used):,} of {n_tokens:,} queries{by_layer}."


def choose_on_click(app: Dash, *sources: tuple[str, str]) -> None:
    """A click on a map, a scatter's point or a table's row, each given as (component, property), chooses its head."""
    app.clientside_callback(
        ClientsideFunction("choose", "head"),
        CHOSEN,
        *(Input(*source) for source in sources),
    )


def first_head(result: Any) -> tuple[int, int]:
    """The head to begin with: the one with the largest of the first score that has a value on the text."""
    score = next(name for name in HEAD_SCORES if name in result.score_names)
    return result.top(score, 1)[0]
