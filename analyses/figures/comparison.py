"""Two results side by side, on one colour scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analyses.figures.heads import printed
from workbench.analyses.figures.pattern import LABELS_THAT_FIT
from workbench.analyses.figures.style import (
    COLOURBAR_ROOM,
    SCORE_SCALE,
    THEMES,
    VERMILLION,
    apply_style,
    colourbar,
    colours,
    escaped,
)

Pair = tuple[np.ndarray, np.ndarray]
Heads = tuple[tuple[int, int] | None, tuple[int, int] | None]
MOST_LETTERS = 32  # of a panel's name: what fits above it in a narrow window
CELLS_WITH_TEXT = 144  # a panel with at most so many cells prints its values


def head_map_pair(
    values: Pair,
    *,
    names: tuple[str, str],
    label: str,
    upper: float | None = None,
    signed: bool = False,
    chosen: Heads = (None, None),
    theme: str = "light",
) -> go.Figure:
    """Two layer × head maps of one score, whatever their sizes.

    Args:
        values: each [layer, head]; NaN cells are grey.
        names: of the two panels.
        upper, signed: of the colour range that both share, as for ``head_map``.
        chosen: a head of each to put a frame around.
    """
    scale = colours(np.concatenate([side.reshape(-1) for side in values]), label, upper, signed)
    height = max(300, 19 * max(len(side) for side in values) + 110)
    figure = _panels(names, theme, height)
    for place, (side, name, head) in enumerate(zip(values, names, chosen, strict=True)):
        at = {"row": 1, "col": place + 1}
        n_layers, n_heads = side.shape
        heads = [[f"L{layer}H{h}" for h in range(n_heads)] for layer in range(n_layers)]
        hover = "%{customdata}: %{z:.4f}<extra>" + escaped(_short(name)) + "</extra>"
        figure.add_trace(
            go.Heatmap(z=side, name=name, customdata=heads, hovertemplate=hover, showscale=place == 1, **scale), **at
        )
        if side.size <= CELLS_WITH_TEXT:
            for number in printed(side, scale):
                figure.add_annotation(number, **at)
        if head is not None:
            layer, column = head
            corners = {"x0": column - 0.5, "x1": column + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
            for colour, width in (("#ffffff", 5.0), (VERMILLION, 2.5)):
                figure.add_shape(type="rect", line={"color": colour, "width": width}, **corners, **at)
        # A frame at the edge would widen ranges that are left to plotly.
        figure.update_xaxes(title="head", dtick=1 if n_heads <= 16 else 4, range=(-0.5, n_heads - 0.5), **at)
        figure.update_yaxes(
            title="layer", dtick=1 if n_layers <= 40 else 4, range=(n_layers - 0.5, -0.5), autorange=False, **at
        )
    return figure


def pattern_pair(
    cells: Pair,
    *,
    names: tuple[str, str],
    labels: tuple[tuple[Sequence[str], Sequence[str]], tuple[Sequence[str], Sequence[str]]],
    label: str,
    upper: float | None = 1.0,
    scale: str = "linear",
    theme: str = "light",
) -> go.Figure:
    """Two attention patterns.

    Args:
        cells: each [query, key], NaN where the mask hides the whole cell.
        names: of the two panels.
        labels: of each, (of its queries, of its keys), unique.
        upper: end of the colour range, which starts at 0; None means the largest value of both.
        scale: "sqrt" colours by the square root.

    Raises:
        ValueError: an unknown scale.
    """
    if scale not in ("linear", "sqrt"):
        raise ValueError(f"scale must be 'linear' or 'sqrt', got {scale!r}")
    known = np.concatenate([side[np.isfinite(side)] for side in cells])
    end = upper if upper is not None else float(known.max(initial=0.0)) or 1.0
    ticks = end * (np.array([0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0]) if scale == "sqrt" else np.linspace(0, 1, 6))
    places = np.sqrt(ticks) if scale == "sqrt" else ticks
    bar = colourbar(f"{label} (√ colour)" if scale == "sqrt" else label)
    figure = _panels(names, theme, 470, between=0.16)  # room for the tokens of the second panel's queries
    for place, (side, name, (queries, keys)) in enumerate(zip(cells, names, labels, strict=True)):
        shown = np.sqrt(side) if scale == "sqrt" else side
        figure.add_trace(
            go.Heatmap(
                z=shown, x=list(keys), y=list(queries), name=name, customdata=side, colorscale=SCORE_SCALE, zmin=0,
                zmax=places[-1], showscale=place == 1,
                colorbar=bar | {"tickvals": places, "ticktext": [f"{tick:.3g}" for tick in ticks]},
                hovertemplate="query %{y}<br>key %{x}<br>%{customdata:.4f}<extra>" + escaped(_short(name)) + "</extra>",
            ),
            row=1, col=place + 1,
        )  # fmt: skip
        longest = max(side.shape)
        small = {"tickfont_size": min(10, max(8, 300 // longest)), "dtick": 1 if longest <= LABELS_THAT_FIT else None}
        at = {"row": 1, "col": place + 1}
        figure.update_xaxes(type="category", tickangle=90, nticks=10, title="key (source)", **small, **at)
        title = "query (destination)" if place == 0 else None
        figure.update_yaxes(type="category", nticks=16, autorange="reversed", title=title, **small, **at)
    return figure


def _panels(names: tuple[str, str], theme: str, height: int, between: float = 0.1) -> go.Figure:
    """Two empty panels, whose ground is that of cells without a value, ``between`` of the width apart."""
    titles = [escaped(_short(name)) for name in names]
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=between)
    apply_style(figure, theme, height=height)
    figure.update_annotations(font_size=12)
    figure.update_layout(plot_bgcolor=THEMES[theme].masked, margin={**COLOURBAR_ROOM, "t": 40})
    return figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False)


def _short(name: str) -> str:
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"
