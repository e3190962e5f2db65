"""Predictions: of each depth, as text on a map, and of two runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import (
    COLOURBAR_ROOM,
    LEGEND_ABOVE,
    SCORE_SCALE,
    blank_figure,
    colour_of_text,
    colourbar,
    show_token,
)

MOST_PRINTED = 1200  # cells with text
SHOWN_CHARACTERS, BESIDE_A_BAR = 6, 16  # of a token, in a cell and beside a bar


def lens_map(
    probability: np.ndarray, predicted: np.ndarray, tokens: Sequence[str], *, theme: str = "light"
) -> go.Figure:
    """Depth × position map of predictions: colour is the probability, text the token, as far as there is room.

    Args:
        probability: [depth, query].
        predicted: text [depth, query].
        tokens: labels of the positions.
    """
    n_depths, n_tokens = probability.shape
    figure = blank_figure(theme, height=max(320, 21 * n_depths + 130))
    figure.update_layout(margin=COLOURBAR_ROOM)
    shown = np.vectorize(show_token, otypes=[object])(predicted)
    figure.add_trace(
        go.Heatmap(
            z=probability,
            x=list(tokens),
            customdata=shown,
            hovertemplate="after %{y} layers, at %{x}: %{customdata}, %{z:.3f}<extra></extra>",
            colorscale=SCORE_SCALE,
            zmin=0,
            zmax=1,
            colorbar=colourbar("probability of the most likely token"),
        )
    )
    if probability.size <= MOST_PRINTED and n_tokens <= 24:
        figure.update_layout(
            annotations=[
                {
                    "x": query,
                    "y": depth,
                    "text": _short(predicted[depth, query]),
                    "showarrow": False,
                    "font": {"size": 9, "color": colour_of_text(SCORE_SCALE, float(probability[depth, query]))},
                }
                for depth in range(n_depths)
                for query in range(n_tokens)
            ]
        )
    figure.update_xaxes(title="text", type="category", tickangle=-60, showgrid=False)
    figure.update_yaxes(title="depth (layers applied)", dtick=1 if n_depths <= 40 else 4, showgrid=False)
    return figure


def paired_bars(
    series: Mapping[str, np.ndarray],
    tokens: Sequence[str],
    *,
    label: str,
    marked: int | None = None,
    theme: str = "light",
) -> go.Figure:
    """A bar for every token in each of the series, the first token on top; values are shares of 1.

    Args:
        marked: the place of a token whose name gets an arrow.
    """
    figure = blank_figure(theme, height=max(240, 30 * len(tokens) + 110))
    figure.update_layout(showlegend=len(series) > 1, legend=LEGEND_ABOVE, bargap=0.3)
    places = np.arange(len(tokens))
    names = [_short(token, BESIDE_A_BAR) for token in tokens]
    names = [f"<b>▸ {name}</b>" if place == marked else name for place, name in enumerate(names)]
    for name, values in series.items():
        figure.add_trace(
            go.Bar(
                x=values,
                y=places,
                name=name,
                orientation="h",
                customdata=[show_token(token) for token in tokens],
                marker_line_width=0,
                hovertemplate=f"%{{customdata}}<br>{name}: %{{x:.4f}}<extra></extra>",
            )
        )
    largest = max(float(np.max(values)) for values in series.values())
    figure.update_xaxes(title=label, range=(0, min(1.0, 1.05 * largest)))
    figure.update_yaxes(tickvals=places, ticktext=names, autorange="reversed", showgrid=False)
    return figure


def _short(text: str, most: int = SHOWN_CHARACTERS) -> str:
    return show_token(text if len(text) <= most else text[: most - 1] + "…")
