"""The attention pattern of one head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    names: tuple[str, str] = ("query", "key"),
    edges: tuple[Sequence[int], Sequence[int]] | None = None,
    upper: float | None = 1.0,
    first_apart: bool = False,
    scale: str = "linear",
    bars: bool = True,
    theme: str = "light",
) -> go.Figure:
    """One head's attention with a bar strip per key above and per query on the right.

    Args:
        cells: [query, key], NaN where the mask hides the whole cell; the figure grows until each has a pixel.
        query_labels, key_labels: unique, one per row and column.
        query_marginal, key_marginal: a number per row and per column.
        names: what a row and a column is.
        edges: the positions at which rows and columns begin, and the last ones end; kept for who zooms in.
        upper: end of the colour range, which starts at 0; None means the largest value.
        first_apart: the first column, which may outshine all others, is coloured on a range of its own: to 1 where
            ``upper`` is 1, else to its largest value; and the others to theirs.
        scale: "sqrt" colours by the square root, which shows what a dominant sink column hides.
        bars: False leaves out the bars and the labels of rows and columns, for a map that is glanced at.

    Raises:
        ValueError: an unknown scale.
    """
    figure = make_subplots(
        rows=2, cols=2, row_heights=[0.12, 0.88], column_widths=[0.88, 0.12], shared_xaxes=True, shared_yaxes=True,
        horizontal_spacing=0.015, vertical_spacing=0.015,
    )  # fmt: skip
    apply_style(figure, theme, height=660)
    figure.update_layout(margin=COLOURBAR_ROOM)
    query, key = names
    drawn_as = {"marker": {"color": THEMES[theme].series[0], "line_width": 0}}
    of_key = f"{key} %{{x}}<br>{key_marginal_label}: %{{y:.4f}}<extra></extra>"
    of_query = f"{query} %{{y}}<br>{query_marginal_label}: %{{x:.4f}}<extra></extra>"
    figure.add_trace(go.Bar(x=list(key_labels), y=key_marginal, hovertemplate=of_key, **drawn_as), 1, 1)
    figure.add_trace(
        go.Bar(x=query_marginal, y=list(query_labels), orientation="h", hovertemplate=of_query, **drawn_as), 2, 2
    )
    figure.add_trace(_heatmap(cells, query_labels, key_labels, label, names, edges, upper, first_apart, scale), 2, 1)
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
    figure.update_xaxes(**query_axis, **few, side="top", row=2, col=2)  # below, it would meet the last key's label
    figure.add_shape(
        type="rect", xref="x3 domain", yref="y3 domain", x0=0, x1=1, y0=0, y1=1, layer="below", line_width=0,
        fillcolor=THEMES[theme].masked,
    )  # fmt: skip
    return figure if bars else _without_bars(figure)


def _heatmap(
    cells: np.ndarray, query_labels: Sequence[str], key_labels: Sequence[str], label: str, names: tuple[str, str],
    edges: tuple[Sequence[int], Sequence[int]] | None, upper: float | None, first_apart: bool, scale: str,
) -> go.Heatmap:  # fmt: skip
    colour = coloured(cells, label, upper, first_apart, scale)
    heatmap = go.Heatmap(
        x=list(key_labels),
        y=list(query_labels),
        hovertemplate=f"{names[0]} %{{y}}<br>{names[1]} %{{x}}<br>%{{z:.4f}}<extra></extra>",
        meta=None if edges is None else {"queries": list(edges[0]), "keys": list(edges[1])},
        **colour,
    )
    if colour["z"] is not cells:
        heatmap.update(customdata=cells, hovertemplate=heatmap.hovertemplate.replace("%{z", "%{customdata"))
    return heatmap


def coloured(cells: np.ndarray, label: str, upper: float | None, first_apart: bool, scale: str) -> dict[str, Any]:
    """How cells [… , key] are coloured, as options of a heat map; ``z`` are the cells themselves where it can be.

    The arguments are as in ``pattern_map``.

    Raises:
        ValueError: an unknown scale.
    """
    if scale not in ("linear", "sqrt"):
        raise ValueError(f"scale must be 'linear' or 'sqrt', got {scale!r}")
    z, limit, remarks = cells, upper, ["√ colour"] if scale == "sqrt" else []
    if first_apart and cells.shape[-1] > 1:
        of_first, limit = upper or _largest(cells[..., :1]), _largest(cells[..., 1:])
        z = np.concatenate((cells[..., :1] * (limit / of_first), cells[..., 1:]), axis=-1)
        remarks.append(f"first column apart: 0 to {of_first:.3g}")
    limit = limit or _largest(cells)
    ticks = _ticks(limit, scale)
    return {
        "z": np.sqrt(z) if scale == "sqrt" else z,
        "colorscale": SCORE_SCALE,
        "zmin": 0,
        "zmax": limit**0.5 if scale == "sqrt" else limit,
        "colorbar": colourbar(f"{label} ({'; '.join(remarks)})" if remarks else label)
        | {"tickvals": np.sqrt(ticks) if scale == "sqrt" else ticks, "ticktext": [f"{tick:.4g}" for tick in ticks]},
    }


def _largest(values: np.ndarray) -> float:
    """The largest value, and 1 where there is none above 0, so that it can end a colour range."""
    return float(np.nan_to_num(values).max(initial=0.0)) or 1.0


def _ticks(limit: float, scale: str) -> np.ndarray:
    """Round numbers from 0 to the end of a colour range; with a square root, one more near 0."""
    step = 10.0 ** np.floor(np.log10(limit / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if limit / (step * factor) <= 5.0001)
    ticks = step * np.arange(np.floor(limit / step * 1.0001) + 1)
    return np.concatenate((ticks[:1], [step / 4], ticks[1:])) if scale == "sqrt" else ticks


def _without_bars(figure: go.Figure) -> go.Figure:
    figure.data = [trace for trace in figure.data if trace.type == "heatmap"]
    for name in ("xaxis", "yaxis", "xaxis2", "yaxis2", "xaxis4", "yaxis4"):
        figure.layout[name] = None
    figure.update_xaxes(domain=(0, 1), showticklabels=False, ticks="", row=2, col=1)
    return figure.update_yaxes(domain=(0, 1), showticklabels=False, ticks="", row=2, col=1)


def _bar_range(values: np.ndarray) -> tuple[float, float]:
    """From 0 to a little above the longest bar, if there is any, so that what is 0 but for rounding has none."""
    return 0.0, 1.05 * max(float(np.nan_to_num(values).max()), LEAST_RANGE)
