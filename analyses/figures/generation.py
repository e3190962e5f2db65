"""Figures along the steps of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.positions import curves
from workbench.analyses.figures.style import COLOURBAR_ROOM, SCORE_SCALE, THEMES, VERMILLION, blank_figure, colourbar

STEPS_WITH_LABELS = 16  # of more, only some are named
X_LABEL = "step (the token that it generates)"


def step_curves(
    series: Mapping[str, np.ndarray],
    labels: Sequence[str],
    *,
    y_label: str,
    marked: int | None = None,
    theme: str = "light",
) -> go.Figure:
    """Named lines over steps, each [step].

    Args:
        labels: one per step.
        marked: a step to put a line at.
    """
    figure = curves(series, x_label=X_LABEL, y_label=y_label, theme=theme)
    figure.update_traces(mode="lines+markers", marker_size=5)
    if marked is not None:
        figure.add_vline(x=marked, line={"color": THEMES[theme].text, "width": 1.5, "dash": "dot"})
    return _name_steps(figure, labels)


def step_map(
    values: np.ndarray,
    names: Sequence[str],
    labels: Sequence[str],
    *,
    label: str,
    marked: int | None = None,
    theme: str = "light",
) -> go.Figure:
    """A row per quantity, a column per step, coloured from 0 to 1.

    Args:
        values: [quantity, step], shares of 1; grey where NaN.
        names: one per quantity.
        labels: one per step.
        marked: a step to put a frame around.
    """
    figure = blank_figure(theme, height=34 * len(names) + 150, masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    hover = "%{y}, step %{customdata}: %{z:.4f}<extra></extra>"
    figure.add_trace(
        go.Heatmap(
            z=values, y=list(names), customdata=[list(labels)] * len(names), hovertemplate=hover, ygap=2,
            colorscale=SCORE_SCALE, zmin=0, zmax=1, colorbar=colourbar(label),
        )
    )  # fmt: skip
    if marked is not None:
        frame = {"x0": marked - 0.5, "x1": marked + 0.5, "y0": -0.5, "y1": len(names) - 0.5}
        for colour, width in (("#ffffff", 5), (VERMILLION, 2.5)):
            figure.add_shape(type="rect", line={"color": colour, "width": width}, **frame)
    figure.update_xaxes(title=X_LABEL, range=(-0.5, values.shape[1] - 0.5), showgrid=False)
    figure.update_yaxes(range=(len(names) - 0.5, -0.5), autorange=False, showgrid=False)
    return _name_steps(figure, labels)


def _name_steps(figure: go.Figure, labels: Sequence[str]) -> go.Figure:
    every = -(-len(labels) // STEPS_WITH_LABELS)
    places = list(range(0, len(labels), every))
    return figure.update_xaxes(
        dtick=None, tickvals=places, ticktext=[labels[place] for place in places], tickangle=-60, tickfont_size=10
    )
