"""Titles and captions: text that stands above a figure and is as long as what must be said."""

from __future__ import annotations

import html
import re
import textwrap
import unicodedata

import plotly.graph_objects as go

from workbench.analyses.figures.style import escaped

TITLE_SIZE, CAPTION_SIZE = 17, 12  # pixels
LEGEND_ROOM = 26  # pixels, between text and plot
TITLE_WIDTH, CAPTION_WIDTH = 66, 150  # characters: what fits on a page of 900 pixels, beside the buttons for the title
TAG = r"</?(?:su[bp]|[bi])>|<br>"  # all of plotly's markup that our figures use


def captioned(figure: go.Figure, title: str, note: str, source: str) -> go.Figure:
    """The figure, so that it can stand by itself: a title above it, and under that in small print what one must know.

    It grows by the height of the text, of which nothing is markup. In the note v_j is written as v with an index; the
    source, which may quote a user's text, is left as it is.
    """
    note_lines = [indexed(escaped(line)) for line in _filled(note, CAPTION_WIDTH)]
    source_lines = [escaped(line) for line in _filled(source, CAPTION_WIDTH)]
    title_lines = [escaped(line) for line in _filled(title, TITLE_WIDTH)]
    return _set_caption(figure, title_lines, note_lines + source_lines)


def indexed(markup: str) -> str:
    """The same with v_j written as v with an index."""
    return re.sub(r"_(\w+)", r"<sub>\1</sub>", markup)


def recaptioned(figure: go.Figure, title_width: int, caption_width: int) -> go.Figure:
    """The figure with its title and caption, if it has any, in lines of at most so many characters."""
    title = figure.layout.title
    if not title.text:
        return figure
    figure.update_layout(height=figure.layout.height - caption_room(figure))
    lines = (wrapped(title.text, title_width), wrapped(title.subtitle.text, caption_width))
    return _set_caption(figure, *(text.split("<br>") for text in lines))


def caption_room(figure: go.Figure) -> float:
    """The height in pixels that title and caption have added to the figure."""
    title = figure.layout.title
    return _room(figure, title.text.count("<br>") + 1, title.subtitle.text.count("<br>") + 1) if title.text else 0.0


def wrapped(markup: str, width: int) -> str:
    """Lines of about the same length, at most ``width`` visible characters where words allow; tags stay whole."""
    words = [part for word in markup.replace("<br>", " ").split(" ") for part in _parts(word, width)]
    n_lines = len(_packed(words, width))
    fitting = (lines for w in range(1, width + 1) if len(lines := _packed(words, w)) == n_lines)
    return "<br>".join(next(fitting))


def visible_width(markup: str) -> int:
    """How many characters wide the widest line is; wide ones (Chinese) count twice."""
    lines = (html.unescape(re.sub(TAG, "", line)) for line in markup.split("<br>"))
    return max(sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in line) for line in lines)


def _parts(word: str, width: int) -> list[str]:
    """The word, cut where it is longer than a line."""
    parts = [""]
    for sign in re.findall(rf"{TAG}|&\w+;|.", word):
        if visible_width(parts[-1] + sign) > width:
            parts.append("")
        parts[-1] += sign
    return parts


def _packed(words: list[str], width: int) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        if visible_width(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _room(figure: go.Figure, n_title_lines: int, n_caption_lines: int) -> float:
    legend = LEGEND_ROOM if figure.layout.showlegend else 0
    return 1.3 * (TITLE_SIZE * n_title_lines + CAPTION_SIZE * n_caption_lines) + legend + 10


def _set_caption(figure: go.Figure, title_lines: list[str], caption_lines: list[str]) -> go.Figure:
    room = _room(figure, len(title_lines), len(caption_lines))
    above = 12 if len(title_lines) == 1 else 12 + 0.7 * TITLE_SIZE  # plotly lifts a title of several lines
    return figure.update_layout(
        title={
            "text": "<br>".join(title_lines),
            "font_size": TITLE_SIZE,
            "subtitle": {"text": "<br>".join(caption_lines), "font_size": CAPTION_SIZE},
            "xref": "container",
            "yref": "container",
            "x": 0,
            "y": 1,
            "xanchor": "left",
            "yanchor": "top",
            "pad": {"l": 14, "t": above},
        },
        height=figure.layout.height + room,
        margin_t=figure.layout.template.layout.margin.t + room,
    )


def _filled(text: str, width: int) -> list[str]:
    """Lines of about the same length, at most so many characters, of which wide ones (Chinese) count twice."""
    filled = "".join(c + "\0" * (unicodedata.east_asian_width(c) in "WF") for c in text)
    n_lines = len(textwrap.wrap(filled, width))
    fitting = (lines for w in range(1, width + 1) if len(lines := textwrap.wrap(filled, w)) == n_lines)
    return [line.replace("\0", "") for line in next(fitting)]
