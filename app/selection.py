"""Choosing a head: what a click means, and how the chosen head is shown in a map."""

from __future__ import annotations

import re
from typing import Any

import plotly.graph_objects as go
from dash import Dash, Input, Output
from dash.exceptions import PreventUpdate

from workbench.analyses.figures import VERMILLION
from workbench.analyses.labels import HEAD_SCORES
from workbench.app.state import View


def choose_on_click(app: Dash, *sources: tuple[str, str]) -> None:
    """A click on a map, a scatter's point or a table's row, each given as (component, property), chooses its head."""
    for source in sources:

        @app.callback(
            Output("layer", "value", allow_duplicate=True),
            Output("head", "value", allow_duplicate=True),
            Input(*source),
            prevent_initial_call=True,
        )
        def choose(event: dict[str, Any] | None) -> tuple[int, int]:
            return clicked_head(event)


def clicked_head(event: dict[str, Any] | None) -> tuple[int, int]:
    """(layer, head) of a click. Raises PreventUpdate where it hit none."""
    point = ((event or {}).get("points") or [{}])[0]
    name = point.get("customdata") or (event or {}).get("rowId")
    if isinstance(name, str) and (match := re.fullmatch(r"L(\d+)H(\d+)", name)):
        return int(match[1]), int(match[2])
    if isinstance(point.get("x"), (int, float)) and isinstance(point.get("y"), (int, float)):  # a cell of a map
        return round(point["y"]), round(point["x"])
    raise PreventUpdate


def first_head(result: Any) -> tuple[int, int]:
    """The head to begin with: the one with the largest of the first score that has a value on the text."""
    score = next(name for name in HEAD_SCORES if name in result.score_names)
    return result.top(score, 1)[0]


def frame_head(figure: go.Figure, view: View) -> go.Figure:
    """Puts a frame around the chosen head in a layer × head map, visible on every colour of its scale."""
    if view.layer is None or view.head is None:
        return figure
    cell = {"x0": view.head - 0.5, "x1": view.head + 0.5, "y0": view.layer - 0.5, "y1": view.layer + 0.5}
    figure.add_shape(type="rect", **cell, line={"color": "#ffffff", "width": 5})
    figure.add_shape(type="rect", **cell, line={"color": VERMILLION, "width": 2.5})
    return figure
