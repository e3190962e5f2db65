"""The numbers that a figure draws, as a table."""

from __future__ import annotations

import html
import re
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench.analyses.figures.captions import TAG


def numbers_of(figure: go.Figure) -> pd.DataFrame:
    """One row per cell, point or bar, in columns that bear the names of axes and colour bar.

    Several series are told apart by the column ``series``. Left out are the margins of a map, and lines that only guide
    the eye: those that have no name and show nothing under the pointer.
    """
    drawn = [trace for trace in figure.data if trace.hoverinfo != "skip" or trace.name]
    maps = [trace for trace in drawn if trace.type == "heatmap"]
    parts = [_cells(figure, trace) for trace in maps] or [_points(figure, trace) for trace in drawn]
    table = pd.concat(parts, ignore_index=True)
    unnamed = "series" in table and bool(table["series"].isna().all())
    return table.drop(columns="series") if unnamed else table


def _cells(figure: go.Figure, trace: Any) -> pd.DataFrame:
    z = np.asarray(trace.z, dtype=float)
    if trace.customdata is not None and np.ndim(trace.customdata) == 3:
        return _panels(trace, z)
    rows, columns = (_along(trace, side, size) for side, size in zip("yx", z.shape, strict=True))
    # A map coloured by something else than its values keeps them beside the colours, to be shown under the pointer.
    shown = z if trace.customdata is None else np.asarray(trace.customdata)
    is_text = shown.dtype.kind not in "fiu"
    values = z if is_text else shown
    table: dict[str, Any] = {
        "series": _plain(trace.name) if trace.name else None,
        _title(figure, trace, "y"): np.repeat(rows, z.shape[1]),
        _title(figure, trace, "x"): np.tile(columns, len(z)),
        _plain(trace.colorbar.title.text): values.reshape(-1),
    }
    if is_text:
        table["label"] = _plain_all(shown.reshape(-1))
    return pd.DataFrame(table)


def _panels(trace: Any, z: np.ndarray) -> pd.DataFrame:
    """Of a map in panels: what each cell stands for is beside it, negative between the panels."""
    about, names = np.asarray(trace.customdata), list(trace.meta)
    is_cell = (about[..., :3] >= 0).all(axis=-1)
    table: dict[str, Any] = {name: about[is_cell][:, i].astype(int) for i, name in enumerate(names[:3])}
    table[_plain(trace.colorbar.title.text)] = about[is_cell][:, 3] if len(names) > 3 else z[is_cell]
    return pd.DataFrame(table)


def _points(figure: go.Figure, trace: Any) -> pd.DataFrame:
    table: dict[str, Any] = {"series": _plain(trace.name) if trace.name else None}
    for side in "xy":
        title, values, error = _title(figure, trace, side), _plain_all(trace[side]), trace[f"error_{side}"]
        table[title] = values
        if error.array is not None:
            below = error.array if error.arrayminus is None else error.arrayminus
            table |= {f"{title}, low": values - np.asarray(below), f"{title}, high": values + np.asarray(error.array)}
    if trace.customdata is not None:
        custom = np.asarray(trace.customdata, dtype=object).reshape(len(trace.x), -1)
        for name, column in zip(trace.meta or ["label"], custom.T, strict=True):
            table[name] = _plain_all(column)
    return pd.DataFrame(table, index=range(len(trace.x)))


def _along(trace: Any, side: str, size: int) -> np.ndarray:
    """What a map's rows or columns are called."""
    if trace[side] is not None:
        return _plain_all(trace[side])
    first, step = trace[f"{side}0"] or 0, trace[f"d{side}"] or 1
    return first + step * np.arange(size)


def _title(figure: go.Figure, trace: Any, side: str) -> str:
    """The title of a trace's axis, or of the axis that it shares its range with."""
    axis = figure.layout[(trace[f"{side}axis"] or side).replace(side, f"{side}axis", 1)]
    if not axis.title.text and axis.matches:
        axis = figure.layout[axis.matches.replace(side, f"{side}axis", 1)]
    return _plain(axis.title.text or side)


def _plain(text: str) -> str:
    """A label without markup, and without what it says of the scale."""
    text = html.unescape(re.sub(TAG, lambda found: " " if found[0] == "<br>" else "", text))
    return re.sub(r" \((√ colour|log scale|[^)]*first column apart[^)]*)\)|, log scale", "", text)


def _plain_all(values: Any) -> np.ndarray:
    values = np.asarray(values)
    if values.dtype.kind in "UO" and all(isinstance(value, str) for value in values):
        return np.array([_plain(value) for value in values], dtype=object)
    return values
