"""The attention patterns of all heads of a layer, as the panels of one map."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.pattern import coloured
from workbench.analyses.figures.style import COLOURBAR_ROOM, THEMES, VERMILLION, blank_figure

SIDE = 420  # cells a side that have a pixel each in a narrow window, those between the panels included
LABEL, GAP = 16, 6  # pixels above a panel for its head's name, and to its right
HEIGHT, AROUND = 680, 110  # pixels; the second is what stands above and below the panels


def cells_of_a_panel(n_heads: int) -> int:
    """How many cells a side each of so many heads can have."""
    return max(8, SIDE // ceil(sqrt(n_heads)) - LABEL)


def layer_mosaic(
    cells: np.ndarray,
    *,
    edges: tuple[Sequence[int], Sequence[int]],
    label: str,
    upper: float | None = 1.0,
    first_apart: bool = False,
    chosen: int | None = None,
    scale: str = "linear",
    theme: str = "light",
) -> go.Figure:
    """Patterns of heads side by side, in rows from the left to the right, each with its name above it.

    ``customdata`` of a cell are its head, and the first query and key that it stands for, −1 between panels.

    Args:
        cells: [head, query, key], NaN where the mask hides the whole cell.
        edges: the positions at which rows and columns begin, and the last ones end.
        chosen: a head to put a frame around.
        The others are those of ``pattern_map``.

    Raises:
        ValueError: an unknown scale, or there is no such head.
    """
    n_heads, n_rows, n_columns = cells.shape
    if chosen is not None and not 0 <= chosen < n_heads:
        raise ValueError(f"there is no head {chosen} among {n_heads}")
    across = ceil(sqrt(n_heads))
    down = ceil(n_heads / across)
    above = _between(n_rows, down, LABEL)
    beside, below = _between(n_columns, across, GAP), _between(n_rows, down, GAP) / 2
    pitch = n_rows + above, n_columns + beside
    colour = coloured(cells, label, upper, first_apart, scale)
    places = [(head // across * pitch[0] + above, head % across * pitch[1]) for head in range(n_heads)]
    z = np.full((down * pitch[0], across * pitch[1]), np.nan, dtype=np.float32)
    about = np.full((*z.shape, 3), -1, dtype=np.int16 if edges[0][-1] < 2**15 > edges[1][-1] else np.int32)
    values = np.full_like(z, np.nan)
    for head, (row, column) in enumerate(places):
        panel = slice(row, row + n_rows), slice(column, column + n_columns)
        z[panel], values[panel] = colour["z"][head], cells[head]
        about[row - above : row + n_rows, column : column + pitch[1], 0] = head
        about[(*panel, 1)], about[(*panel, 2)] = np.array(edges[0][:-1])[:, None], edges[1][:-1]
    names, shown = ["head", "query", "key"], "%{z:.4f}"
    if colour["z"] is not cells:
        about = np.concatenate((about.astype(np.float32), values[..., None]), axis=-1)
        names, shown = [*names, label], "%{customdata[3]:.4f}"
    figure = blank_figure(theme, height=HEIGHT)
    figure.update_layout(margin=COLOURBAR_ROOM)
    first = "" if len(edges[0]) == n_rows + 1 and edges[0][-1] - edges[0][0] == n_rows else "from "
    where = f"query {first}%{{customdata[1]}}, key {first}%{{customdata[2]}}"
    hover = f"H%{{customdata[0]}}<br>{where}<br>{shown}<extra></extra>"
    figure.add_trace(go.Heatmap(**(colour | {"z": z}), customdata=about, meta=names, hovertemplate=hover))
    ranges = (-beside / 2 - 0.5, z.shape[1] - 0.5), (z.shape[0] - 0.5 + below, -0.5)
    _label_panels(figure, places, (n_rows, n_columns), ranges, theme)
    if chosen is not None:
        row, column = places[chosen]
        _frame(figure, (row - below, row + n_rows + below), (column - beside / 2, column + n_columns + beside / 2))
    axis = {"showgrid": False, "zeroline": False, "showticklabels": False, "ticks": ""}
    figure.update_xaxes(title="key (source), in each panel", range=ranges[0], **axis)
    figure.update_yaxes(title="query (destination), in each panel", range=ranges[1], autorange=False, **axis)
    longest = max(z.shape)
    return figure.update_layout(width=longest + 250, height=longest + AROUND) if longest > SIDE + 60 else figure


def _between(n_cells: int, n_panels: int, pixels: int) -> int:
    """How many cells between panels are so many pixels, where the panels fill the figure."""
    return max(1, ceil(n_cells * pixels / max((HEIGHT - AROUND) / n_panels - pixels, pixels)))


def _label_panels(
    figure: go.Figure, places: list[tuple[int, int]], size: tuple[int, int],
    ranges: tuple[tuple[float, float], tuple[float, float]], theme: str,
) -> None:  # fmt: skip
    """Puts the colour of masked cells below each panel, and its head's name above it."""
    (left, right), (bottom, top) = ranges
    shapes, notes = [], []
    for head, (row, column) in enumerate(places):
        corners = {"x0": column - 0.5, "x1": column + size[1] - 0.5, "y0": row - 0.5, "y1": row + size[0] - 0.5}
        shapes.append({"type": "rect", "layer": "below", "line_width": 0, "fillcolor": THEMES[theme].masked} | corners)
        place = {"x": (column - 0.5 - left) / (right - left), "y": (row - 0.5 - bottom) / (top - bottom)}
        notes.append({
            "text": f"H{head}", "showarrow": False, "font_size": 11, "xanchor": "left", "yanchor": "bottom",
            "xref": "x domain", "yref": "y domain", "borderpad": 0, **place,
        })  # fmt: skip
    figure.update_layout(shapes=shapes, annotations=notes)


def _frame(figure: go.Figure, rows: tuple[float, float], columns: tuple[float, float]) -> None:
    """Beside the panel's cells, of which it must hide none."""
    corners = {"y0": rows[0] - 0.5, "y1": rows[1] - 0.5, "x0": columns[0] - 0.5, "x1": columns[1] - 0.5}
    figure.add_shape(type="rect", line={"color": VERMILLION, "width": 2.5}, **corners)
