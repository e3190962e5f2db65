"""Figures at the sizes of print: laid out anew for a width in inches, with type that stays readable there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

import plotly.graph_objects as go

from workbench.analyses.figures.captions import (
    CAPTION_SIZE,
    TITLE_SIZE,
    caption_room,
    recaptioned,
    visible_width,
    wrapped,
)
from workbench.analyses.figures.style import FONT_SIZE, LEGEND_ABOVE


@dataclass(frozen=True)
class Preset:
    """A width and a size of type."""

    inches: float  # how wide the figure is
    points: float  # size of ordinary type; nothing is smaller than ``LEAST_POINTS``
    tallest: float = 9.0  # inches; what needs more height than this leaves labels out

    @property
    def pixels_per_inch(self) -> float:
        """Of the layout, in which ordinary type always has the house style's size."""
        return 72 / self.points * FONT_SIZE


PRESETS = {
    "one-column": Preset(3.3, 8),
    "two-column": Preset(6.9, 8),
    "slide": Preset(10, 14, tallest=5.6),
}
LEAST_POINTS = 7
ASPECT = 0.78  # height over width of what has no rows
LETTER, LINE = 0.54, 1.2  # mean width and height of a line of type, in its size
ROW = 13.5  # pixels that a label needs along an axis
STEPS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 256, 512)
NARROW = 500  # pixels of layout: no room for a legend beside the plot


def on_paper(figure: go.Figure, preset: Preset) -> go.Figure:
    """A copy as wide as the preset, its text wrapped or thinned to what fits and its height what that needs.

    What would be illegible is left out: the numbers on cells that have no room for them, and labels between others.
    """
    figure = go.Figure(figure)
    figure.update_layout(width=preset.inches * preset.pixels_per_inch)
    _enlarge_small_type(figure, LEAST_POINTS / preset.points * FONT_SIZE)
    recaptioned(
        figure, _letters(figure.layout.width - 28, TITLE_SIZE), _letters(figure.layout.width - 28, CAPTION_SIZE)
    )
    caption = caption_room(figure)
    _wrap_row_labels(figure)
    height = _height(figure, figure.layout.height - caption, preset)
    legend = _fit_legend(figure)
    plot = _Plot(figure, height)
    for axis in figure.select_xaxes():
        _fit_axis(figure, axis, plot.share(axis) * plot.width)
    for axis in figure.select_yaxes():
        _fit_axis(figure, axis, plot.share(axis) * plot.height)
    _fit_colourbars(figure, plot)
    _fit_annotations(figure, plot)
    figure.update_layout(height=height + caption + legend)
    if caption:
        figure.update_layout(margin_t=figure.layout.margin.t + legend)
    return figure


class _Plot:
    """The size of the area that the axes span, by estimate: what stands around it depends on text."""

    def __init__(self, figure: go.Figure, height: float) -> None:
        margin, least = figure.layout.margin, figure.layout.template.layout.margin
        labels = max((_label_width(figure, axis) for axis in figure.select_yaxes()), default=0)
        self.width = figure.layout.width - max(least.l, labels + 30) - (margin.r if margin.r is not None else least.r)
        self.height = height - least.t - least.b

    @staticmethod
    def share(axis: Any) -> float:
        low, high = axis.domain or (0.0, 1.0)
        return high - low


def _letters(pixels: float, size: float = FONT_SIZE) -> int:
    return max(8, int(pixels / (LETTER * size)))


def _width(text: str, size: float = FONT_SIZE) -> float:
    return LETTER * size * visible_width(text)


def _traces(figure: go.Figure, axis: Any) -> Iterator[Any]:
    """Those drawn on an axis."""
    side, name = axis.plotly_name[0], axis.plotly_name.replace("axis", "")
    return (trace for trace in figure.data if (trace[f"{side}axis"] or side) == name)


def _entries(figure: go.Figure, axis: Any) -> list[str]:
    """The categories along an axis, or the numbers of a map's rows or columns; empty along other axes."""
    side = axis.plotly_name[0]
    for trace in _traces(figure, axis):
        labels = trace[side]
        if labels is not None and len(labels) and isinstance(labels[0], str):
            return list(dict.fromkeys(label for each in _traces(figure, axis) for label in each[side]))
        if trace.type == "heatmap":
            return [str(place) for place in range(len(trace.z) if side == "y" else len(trace.z[0]))]
    return []


def _is_text(figure: go.Figure, axis: Any) -> bool:
    return any(not entry.isdigit() for entry in _entries(figure, axis)[:1])


def _label_width(figure: go.Figure, axis: Any) -> float:
    texts = axis.ticktext or (_entries(figure, axis) if _is_text(figure, axis) else ["0.00"])
    return max((_width(str(text), axis.tickfont.size or FONT_SIZE) for text in texts), default=0.0)


def _n_labels(figure: go.Figure, axis: Any) -> int:
    """How many labels there are to be along an axis whose labels do not thin themselves."""
    if axis.showticklabels is False or axis.matches and not axis.title.text:
        return 0
    if axis.tickvals is not None:
        return sum(str(text).count("<br>") + 1 for text in axis.ticktext or axis.tickvals)
    return min(len(_entries(figure, axis)), axis.nticks or 10**6)


def _enlarge_small_type(figure: go.Figure, least: float) -> None:
    fonts = [annotation.font for annotation in figure.layout.annotations]
    for axis in (*figure.select_xaxes(), *figure.select_yaxes()):
        fonts += [axis.tickfont, axis.title.font]
    fonts += [trace.textfont for trace in figure.data if trace.type == "scatter"]
    for font in fonts:
        if isinstance(font.size, int | float) and font.size < least:
            font.size = least


def _wrap_row_labels(figure: go.Figure) -> None:
    """Rows' names take at most a third of the width, and as many lines as that needs."""
    most = figure.layout.width / 3
    for axis in figure.select_yaxes():
        if axis.tickvals is None and _is_text(figure, axis) and _label_width(figure, axis) > most:
            names = _entries(figure, axis)
            axis.update(tickvals=names, ticktext=[wrapped(name, _letters(most)) for name in names])


def _height(figure: go.Figure, designed: float, preset: Preset) -> float:
    """The least that the shape and the rows' labels allow, at most what the figure was designed with."""
    rows = max((_n_labels(figure, axis) for axis in figure.select_yaxes()), default=0)
    wanted = max(ASPECT * figure.layout.width, ROW * rows + 100)
    return min(wanted, max(designed, ROW * rows + 100), preset.tallest * preset.pixels_per_inch)


def _fit_legend(figure: go.Figure) -> float:
    """Puts the legend above a narrow plot; the height that it takes beyond one row."""
    if not figure.layout.showlegend:
        return 0.0
    if figure.layout.legend.orientation != "h" and figure.layout.width < NARROW:
        titled = any(note.yref == "paper" for note in figure.layout.annotations)
        figure.update_layout(legend=LEGEND_ABOVE | ({"y": 1.08} if titled else {}))
    elif figure.layout.legend.orientation != "h":
        return 0.0
    shown = [item for item in (*figure.data, *figure.layout.shapes) if item.name and item.showlegend is not False]
    names = [item.name for item in shown if item in figure.data or item.showlegend]
    widths = [_width(name) + 46 for name in names]
    room = figure.layout.width - 60
    if not widths or sum(widths) <= room:
        return 0.0
    rows = ceil(len(widths) / max(1, room // max(widths)))
    return 19.0 * (rows - 1)


def _fit_axis(figure: go.Figure, axis: Any, length: float) -> None:
    if axis.title.text:
        size = axis.title.font.size or FONT_SIZE
        axis.title.text = wrapped(axis.title.text, _letters(length + 20, size))
    entries = _entries(figure, axis)
    if axis.dtick == 1 and entries:
        upright = axis.plotly_name[0] == "x" and not axis.tickangle
        need = _width(entries[-1]) + 6 if upright else ROW
        axis.dtick = next((step for step in STEPS if step >= len(entries) * need / length), len(entries))
    elif axis.tickvals is not None and axis.plotly_name[0] == "x" and axis.type == "log":
        _thin(axis, length)


def _thin(axis: Any, length: float) -> None:
    """Every second tick, or every third, …, as far as a logarithmic axis has more than it has room for."""
    step = next(step for step in STEPS if len(axis.tickvals) / step * 34 <= length)
    for name in ("tickvals", "ticktext"):
        if axis[name] is not None:
            axis[name] = axis[name][::step]


def _fit_colourbars(figure: go.Figure, plot: _Plot) -> None:
    for trace in figure.data:
        bar = trace.colorbar if trace.type == "heatmap" else trace.marker.colorbar
        if bar.title.text:
            bar.title.text = wrapped(bar.title.text, _letters(plot.height))


def _fit_annotations(figure: go.Figure, plot: _Plot) -> None:
    kept, cell = [], _cell(figure, plot)
    for note in figure.layout.annotations:
        size = note.font.size or FONT_SIZE
        if (note.xref or "x") == "x" and (note.yref or "y") == "y":
            if cell is None or (_width(note.text, size) <= cell[0] and size <= cell[1]):
                kept.append(note)
        else:
            note.text = wrapped(note.text, _letters(0.94 * plot.width * _span(figure, note.xref), size))
            kept.append(note)
    figure.layout.annotations = kept


def _cell(figure: go.Figure, plot: _Plot) -> tuple[float, float] | None:
    """Width and height of the cells of a map."""
    for trace in figure.data:
        if trace.type == "heatmap":
            return plot.width / len(trace.z[0]), plot.height / len(trace.z)
    return None


def _span(figure: go.Figure, reference: str | None) -> float:
    """The share of the plot's width that an annotation's axis takes; a panel's title belongs to one of the panels."""
    found = re.fullmatch(r"x(\d*) domain", reference or "")
    axes = [figure.layout[f"xaxis{found[1]}"]] if found else list(figure.select_xaxes())
    return min(_Plot.share(axis) for axis in axes)
