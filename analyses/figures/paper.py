"""Figures at the sizes of print: laid out anew for a width in inches, with type that stays readable there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import radians, sin
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.captions import (
    CAPTION_SIZE,
    LEGEND_ROOM,
    TITLE_SIZE,
    caption_room,
    recaptioned,
    visible_width,
    wrapped,
)
from workbench.analyses.figures.heads import label_places
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
    "slide": Preset(10, 12, tallest=5.6),
}
LEAST_POINTS = 7
ASPECT = 0.78  # height over width of what has no rows
SPREAD = 0.9  # of an axis that points take
KEY = 46  # pixels that an entry of a legend takes beside its text
MARGIN, MARGIN_WIDTH = 0.2, 50  # bars beside a plot take a smaller share than this; and pixels that their title needs
LETTER, LINE = 0.54, 1.2  # mean width and height of a line of type, in its size
BESIDE = ("right", "left")  # anchors of text to the left and to the right of a point
ROW = 16  # pixels that a label needs along an axis
STEPS = (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 64, 100, 128, 200, 256, 512)
NARROW = 500  # pixels of layout: no room for a legend beside the plot, nor for a label in every row


def on_paper(figure: go.Figure, preset: Preset) -> go.Figure:
    """A copy as wide as the preset, its text wrapped or thinned to what fits and its height what that needs.

    What would be illegible is left out: the numbers on cells that have no room for them, and labels between others.
    """
    figure = go.Figure(figure)
    figure.update_layout(width=preset.inches * preset.pixels_per_inch)
    _enlarge_small_type(figure, LEAST_POINTS / preset.points * FONT_SIZE)
    room = figure.layout.width - 28
    recaptioned(figure, _letters(room, TITLE_SIZE), _letters(room, CAPTION_SIZE))
    _wrap_row_labels(figure)
    width = _plot_width(figure)
    _widen_margin(figure, MARGIN_WIDTH / width)
    _make_room_beside(figure, width)
    for axis in figure.select_xaxes():
        _fit_axis(figure, axis, _share(axis) * width)
    _fit_notes(figure, width)
    caption, legend = caption_room(figure), _fit_legend(figure)
    above, below = figure.layout.template.layout.margin.t + legend, _room_below(figure)
    height = _plot_height(figure, preset, figure.layout.height - caption, above + below)
    if caption and legend:
        caption -= LEGEND_ROOM
    for axis in figure.select_yaxes():
        _fit_axis(figure, axis, _share(axis) * height)
    _fit_colourbars(figure, height)
    _fit_cells(figure, width, height)
    _place_labels(figure, width, height)
    if figure.layout.legend.orientation == "h" and any(note.yref == "paper" for note in figure.layout.annotations):
        titles = max(note.text.count("<br>") + 1 for note in figure.layout.annotations if note.yref == "paper")
        figure.update_layout(legend_y=1 + (LINE * FONT_SIZE * titles + 6) / height)
    if caption:
        figure.update_layout(margin_t=caption + above)
    return figure.update_layout(height=height + above + below + caption)


def _plot_width(figure: go.Figure) -> float:
    """Of the area that the axes span, by estimate: what stands around it depends on text."""
    margin, least = figure.layout.margin, figure.layout.template.layout.margin
    labels = max((_label_width(figure, axis) for axis in figure.select_yaxes()), default=0)
    return figure.layout.width - max(least.l, labels + 30) - (least.r if margin.r is None else margin.r)


def _plot_height(figure: go.Figure, preset: Preset, designed: float, around: float) -> float:
    """What the shape and the rows' labels ask for, at most what the figure was designed with."""
    margin = figure.layout.template.layout.margin
    rows = ROW * max((_n_lines(figure, axis) / _share(axis) for axis in figure.select_yaxes()), default=0)
    wanted = max(ASPECT * figure.layout.width - margin.t - margin.b, rows)
    most = preset.tallest * preset.pixels_per_inch - around
    return min(wanted, max(designed - margin.t - margin.b, rows), most)


def _room_below(figure: go.Figure) -> float:
    """What labels and title of the axis below the plot need."""
    rooms = [figure.layout.template.layout.margin.b]
    for axis in figure.select_xaxes():
        turned = axis.tickangle and _is_text(figure, axis)
        labels = _label_width(figure, axis) * sin(radians(abs(axis.tickangle))) if turned else LINE * FONT_SIZE
        rooms.append(labels + LINE * FONT_SIZE * ((axis.title.text or "").count("<br>") + 1) + 22)
    return max(rooms)


def _widen_margin(figure: go.Figure, least: float) -> None:
    """Gives the bars beside a plot at least such a share of the width, for the sake of what is written below them."""
    margins = [axis for axis in figure.select_xaxes() if _share(axis) < min(MARGIN, least)]
    if margins:
        start = margins[0].domain[0]
        for axis in figure.select_xaxes():
            gap = start - axis.domain[1]
            axis.domain = (1 - least, 1) if axis in margins else (0, 1 - least - gap)


def _make_room_beside(figure: go.Figure, width: float) -> None:
    """Widens the range of a hidden axis, so that what stands beside its points is not cut off."""
    for axis in figure.select_xaxes():
        if axis.visible is False:
            beside = dict.fromkeys(BESIDE, 0.0)
            for note in _notes_beside(figure):
                needed = _width(note.text, note.font.size or FONT_SIZE) + abs(note.xshift)
                beside[note.xanchor] = max(beside[note.xanchor], needed)
            low, *_, high = sorted(note.x for note in _notes_beside(figure))
            scale = (high - low) / max(width - sum(beside.values()), width / 4)
            axis.range = [low - scale * beside["right"], high + scale * beside["left"]]


def _notes_beside(figure: go.Figure) -> list[Any]:
    return [note for note in figure.layout.annotations if note.xanchor in BESIDE and note.xshift]


def _share(axis: Any) -> float:
    """Of the plot's width or height that an axis spans."""
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


def _n_lines(figure: go.Figure, axis: Any) -> float:
    """How many lines the labels of a vertical axis need, those that a narrow figure can thin counted half."""
    if axis.visible is False:
        return max([note.xanchor for note in _notes_beside(figure)].count(side) for side in BESIDE)
    if axis.showticklabels is False or (axis.matches and not axis.title.text):
        return 0
    if axis.tickvals is not None and (axis.type == "category" or axis.ticktext):
        most = max(str(text).count("<br>") + 1 for text in axis.ticktext or axis.tickvals)
        return most * len(axis.tickvals)
    thinned = (axis.dtick == 1 or axis.nticks) and figure.layout.width < NARROW
    return min(len(_entries(figure, axis)), axis.nticks or 10**6) / (2 if thinned else 1)


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


def _fit_legend(figure: go.Figure) -> float:
    """Puts the legend above a narrow plot and wraps its entries; the height that it takes there."""
    layout = figure.layout
    if not layout.showlegend or (layout.legend.orientation != "h" and layout.width >= NARROW):
        return 0.0
    layout.legend.update(LEGEND_ABOVE | {"y": layout.legend.y if layout.legend.orientation == "h" else 1})
    room = layout.width - 40
    items = [trace for trace in figure.data if trace.name and trace.showlegend is not False and len(trace.x)]
    items += [shape for shape in layout.shapes if shape.showlegend]
    for item in items:
        item.name = wrapped(item.name, _letters(room - KEY))
    widths = [_width(item.name) + KEY for item in items]
    lines = max((item.name.count("<br>") + 1 for item in items), default=0)
    grouped = any(item.legendgroup for item in items)
    rows, filled = 1, 0.0
    for width in widths:  # plotly has columns of one width, but not of groups
        width = width if grouped or sum(widths) <= room else max(widths)
        rows, filled = (rows, filled + width) if filled + width <= room else (rows + 1, width)
    titles = [note.text.count("<br>") + 1 for note in layout.annotations if note.yref == "paper"]
    row = 29 if grouped else 19
    return max(0.0, row * rows + LINE * FONT_SIZE * (lines - 1 + max(titles, default=0)) - 12)


def _fit_axis(figure: go.Figure, axis: Any, length: float) -> None:
    if axis.title.text:
        size = axis.title.font.size or FONT_SIZE
        axis.title.text = wrapped(axis.title.text, _letters(length + 20, size))
    entries = _entries(figure, axis)
    if axis.dtick == 1 and entries:
        upright = axis.plotly_name[0] == "x" and not axis.tickangle
        need = _width(entries[-1]) + 6 if upright else ROW
        axis.dtick = next((step for step in STEPS if step >= len(entries) * need / length), len(entries))
    elif axis.nticks and axis.range and _share(axis) < MARGIN:  # its 0 would stand beside what the plot begins with
        axis.update(tickvals=axis.range[1:], ticktext=[f"{axis.range[1]:.2g}"])
    elif axis.nticks and entries and figure.layout.width < NARROW:
        axis.nticks = min(axis.nticks, 12)
    elif axis.tickvals is not None and axis.plotly_name[0] == "x" and axis.type == "log":
        _thin(figure, axis, length)


def _thin(figure: go.Figure, axis: Any, length: float) -> None:
    """Leaves the ticks of a logarithmic axis out that stand too near to others."""
    traces = list(_traces(figure, axis)) or figure.data  # of a panel that is left empty, those of all others
    values = np.concatenate([np.asarray(trace.x, dtype=float) for trace in traces])
    low, high = np.log10([np.nanmin(values[values > 0]), np.nanmax(values)])
    kept = _apart(np.log10(axis.tickvals) * length / max(high - low, 0.1), 34)
    for name in ("tickvals", "ticktext"):
        if axis[name] is not None:
            axis[name] = [axis[name][i] for i in kept]


def _apart(places: np.ndarray, least: float) -> list[int]:
    """Indices of places, in pixels, that stand so far apart, from the last to the first."""
    kept: list[int] = []
    for i in np.argsort(places)[::-1].tolist():
        if not kept or places[kept[-1]] - places[i] >= least:
            kept.append(i)
    return kept


def _fit_colourbars(figure: go.Figure, height: float) -> None:
    for trace in figure.data:
        bar = trace.colorbar if trace.type == "heatmap" else trace.marker.colorbar
        if bar.title.text:
            bar.title.text = wrapped(bar.title.text, _letters(height))
        if bar.tickvals is not None:
            kept = _apart(np.asarray(bar.tickvals) * height / trace.zmax, ROW)
            bar.update(tickvals=[bar.tickvals[i] for i in kept], ticktext=[bar.ticktext[i] for i in kept])


def _fit_notes(figure: go.Figure, width: float) -> None:
    """Wraps what is written within the plot and above its panels."""
    for note in figure.layout.annotations:
        if not _on_a_cell(note):
            size = note.font.size or FONT_SIZE
            note.text = wrapped(note.text, _letters(0.94 * width * _span(figure, note.xref), size))


def _fit_cells(figure: go.Figure, width: float, height: float) -> None:
    """Takes text off the cells of a map that have no room for it; of numbers, all or none stay."""
    maps = [trace for trace in figure.data if trace.type == "heatmap"]
    texts = [note for note in figure.layout.annotations if _on_a_cell(note)]
    if not maps or not texts:
        return
    cell = width / len(maps[0].z[0]), height / len(maps[0].z)
    fits = [_width(note.text, note.font.size) <= cell[0] and note.font.size <= cell[1] for note in texts]
    if not all(fits):
        none = all(re.fullmatch(r"[-+.\d]+", note.text) for note in texts) or sum(fits) < len(fits) / 2
        left = [note for note, room in zip(texts, fits, strict=True) if room and not none]
        figure.layout.annotations = [note for note in figure.layout.annotations if not _on_a_cell(note)] + left


def _on_a_cell(note: Any) -> bool:
    return (note.xref or "x") == "x" and (note.yref or "y") == "y"


def _place_labels(figure: go.Figure, width: float, height: float) -> None:
    """Names of points stand anew, as far as there is room: they are larger against a small plot than on a page."""
    traces = [trace for trace in figure.data if trace.type == "scatter" and "text" in (trace.mode or "")]
    if not traces:
        return
    beside = [trace for trace in figure.data if trace.type == "scatter" and trace not in traces]
    beside = [trace for trace in beside if (trace.xaxis, trace.yaxis) == (traces[0].xaxis, traces[0].yaxis)]
    drawn = np.hstack([_drawn(figure, trace) for trace in (*traces, *beside)])  # lines take room, too
    texts = [text for trace in traces for text in trace.text]
    named = sorted((i for i, text in enumerate(texts) if text), key=lambda i: -drawn[1, i])
    widest = max((_width(text) for text in texts), default=0.0)
    around = 8  # a name stands so many pixels from its point
    shares = np.array([(widest + around) / width, (LINE * FONT_SIZE + around) / height]) / SPREAD
    sides = label_places(drawn, np.array(named, dtype=int), shares, right=1 + shares[0] / 2)
    first = 0
    for trace in traces:
        own = range(first, first := first + len(trace.text))
        trace.text = [texts[i] if i in sides else "" for i in own]
        trace.textposition = [sides.get(i, "top right") for i in own]


def _drawn(figure: go.Figure, trace: Any) -> np.ndarray:
    """[2, point], x and y as they are on their axes."""
    sides = []
    for side in "xy":
        axis = figure.layout[(trace[f"{side}axis"] or side).replace(side, f"{side}axis", 1)]
        values = np.asarray(trace[side], dtype=float)
        with np.errstate(all="ignore"):
            sides.append(np.log10(values) if axis.type == "log" else values)
    return np.stack(sides)


def _span(figure: go.Figure, reference: str | None) -> float:
    """The share of the plot's width that an annotation's axis takes; a panel's title belongs to one of the panels."""
    found = re.fullmatch(r"x(\d*) domain", reference or "")
    axes = [figure.layout[f"xaxis{found[1]}"]] if found else list(figure.select_xaxes())
    return min(_share(axis) for axis in axes)
