"""The attention pattern of one head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analyses.figures.style import COLOURBAR_ROOM, SCORE_SCALE, THEMES, apply_style, colourbar

LABELS_THAT_FIT = 48  # so many tokens all get their label
# plotly drops cells where there are more of them than pixels: a figure with more cells a side than these is as large as
# they need with what stands around them, which for 512 is within a page of 900 pixels.
CELLS_THAT_FIT, AROUND = 420, 350
LEAST_RANGE = 0.1  # of the axis of the bars, in nats or in queries


def pattern_map(
    cells: np.ndarray,
    *,
    query_labels: Sequence[str],
    key_labels: Sequence[str],
    query_marginal: np.ndarray,
    key_marginal: np.ndarray,
    query_marginal_label: str,
    key_marginal_label: str,
    label: str,
    block: tuple[int, int] = (1, 1),
    scale: str = "linear",
    theme: str = "light",
) -> go.Figure:
    """One head's attention with a bar strip per key above and per query on the right.

    Args:
        cells: [query, key], NaN where the mask hides the whole cell; the figure grows until each has a pixel.
        query_labels, key_labels: unique, one per row and column.
        query_marginal, key_marginal: a number per row and per column.
        block: queries and keys of a cell.
        scale: "sqrt" colours by the square root, which shows what a dominant sink column hides.
    """
    if scale not in ("linear", "sqrt"):
        raise ValueError(f"scale must be 'linear' or 'sqrt', got {scale!r}")
    figure = make_subplots(
        rows=2, cols=2, row_heights=[0.12, 0.88], column_widths=[0.88, 0.12], shared_xaxes=True, shared_yaxes=True,
        horizontal_spacing=0.015, vertical_spacing=0.015,
    )  # fmt: skip
    apply_style(figure, theme, height=660)
    figure.update_layout(margin=COLOURBAR_ROOM)
    query, key = ("query" if block[0] == 1 else "queries"), ("key" if block[1] == 1 else "keys")
    bars = {"marker": {"color": THEMES[theme].series[0], "line_width": 0}}
    of_key = f"{key} %{{x}}<br>{key_marginal_label}: %{{y:.4f}}<extra></extra>"
    of_query = f"{query} %{{y}}<br>{query_marginal_label}: %{{x:.4f}}<extra></extra>"
    figure.add_trace(go.Bar(x=list(key_labels), y=key_marginal, hovertemplate=of_key, **bars), 1, 1)
    figure.add_trace(
        go.Bar(x=query_marginal, y=list(query_labels), orientation="h", hovertemplate=of_query, **bars), 2, 2
    )
    ticks = np.array([0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0] if scale == "sqrt" else [0, 0.2, 0.4, 0.6, 0.8, 1.0])
    heatmap = go.Heatmap(
        z=np.sqrt(cells) if scale == "sqrt" else cells,
        x=list(key_labels),
        y=list(query_labels),
        colorscale=SCORE_SCALE,
        zmin=0,
        zmax=1,
        colorbar=colourbar(f"{label} (√ colour)" if scale == "sqrt" else label)
        | {"tickvals": np.sqrt(ticks) if scale == "sqrt" else ticks, "ticktext": ticks},
        hovertemplate=f"{query} %{{y}}<br>{key} %{{x}}<br>%{{z:.4f}}<extra></extra>",
    )
    if scale == "sqrt":
        heatmap.update(customdata=cells, hovertemplate=heatmap.hovertemplate.replace("%{z", "%{customdata"))
    figure.add_trace(heatmap, 2, 1)
    longest = max(len(query_labels), len(key_labels))
    if longest > CELLS_THAT_FIT:
        figure.update_layout(width=longest + AROUND, height=longest + AROUND - 40)
    small = {"tickfont_size": min(11, max(8, 420 // longest))}
    few = {"nticks": 3, "tickfont_size": 10}
    if longest <= LABELS_THAT_FIT:
        figure.update_xaxes(dtick=1, row=2, col=1)
        figure.update_yaxes(dtick=1, row=2, col=1)
    figure.update_layout(bargap=0)
    figure.update_xaxes(type="category", showgrid=False, nticks=12 if longest > 64 else None, col=1)
    figure.update_yaxes(
        type="category", showgrid=False, nticks=24 if longest > 64 else None, autorange="reversed", row=2
    )
    figure.update_xaxes(title="key (source)", tickangle=90, **small, row=2, col=1)
    figure.update_yaxes(title="query (destination)", **small, row=2, col=1)
    key_axis = {"title": {"text": key_marginal_label, "font_size": 10}, "range": _bar_range(key_marginal)}
    query_axis = {"title": {"text": query_marginal_label, "font_size": 10}, "range": _bar_range(query_marginal)}
    figure.update_yaxes(**key_axis, **few, row=1, col=1)
    figure.update_xaxes(**query_axis, **few, row=2, col=2)
    figure.add_shape(
        type="rect", xref="x3 domain", yref="y3 domain", x0=0, x1=1, y0=0, y1=1, layer="below", line_width=0,
        fillcolor=THEMES[theme].masked,
    )  # fmt: skip
    return figure


def _bar_range(values: np.ndarray) -> tuple[float, float]:
    """From 0 to a little above the longest bar, so that what is 0 but for rounding has none."""
    return 0.0, 1.05 * max(float(np.nanmax(values)), LEAST_RANGE)
