"""Figures that leave the program: with a title and what they were made from, and as files."""

from __future__ import annotations

import os
import re
import textwrap
import unicodedata
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from workbench.analyses.figures.style import escaped

TITLE_SIZE, CAPTION_SIZE = 17, 12  # pixels
TITLE_WIDTH, CAPTION_WIDTH = 66, 150  # characters: what fits on a page of 900 pixels, beside the buttons for the title


def captioned(figure: go.Figure, title: str, note: str, source: str) -> go.Figure:
    """The figure, so that it can stand by itself: a title above it, and under that in small print what one must know.

    It grows by the height of the text, of which nothing is markup. In the note v_j is written as v with an index; the
    source, which may quote a user's text, is left as it is.
    """
    title_lines = _wrapped(title, TITLE_WIDTH)
    note_lines = [re.sub(r"_(\w+)", r"<sub>\1</sub>", line) for line in _wrapped(note, CAPTION_WIDTH)]
    caption_lines = note_lines + _wrapped(source, CAPTION_WIDTH)
    legend = 26 if figure.layout.showlegend else 0
    room = 1.3 * (TITLE_SIZE * len(title_lines) + CAPTION_SIZE * len(caption_lines)) + legend + 10
    figure.update_layout(
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
            "pad": {"l": 14, "t": 12},
        },
        height=figure.layout.height + room,
        margin_t=figure.layout.template.layout.margin.t + room,
    )
    return figure


def _wrapped(text: str, width: int) -> list[str]:
    """Escaped lines of about the same length, at most so many characters, of which wide ones (Chinese) count twice."""
    filled = "".join(c + "\0" * (unicodedata.east_asian_width(c) in "WF") for c in text)
    n_lines = len(textwrap.wrap(filled, width))
    fitting = (lines for w in range(1, width + 1) if len(lines := textwrap.wrap(filled, w)) == n_lines)
    return [escaped(line.replace("\0", "")) for line in next(fitting)]


def config(filename: str = "figure") -> dict[str, Any]:
    """Plotly's ``config`` for Dash graphs, ``figure.show`` and HTML files: no logo, no upload, download as SVG."""
    return {
        "displaylogo": False,
        "showSendToCloud": False,
        "responsive": True,
        "toImageButtonOptions": {"format": "svg", "filename": filename},
    }


def write_html(figure: go.Figure, path: str | os.PathLike) -> Path:
    """Writes the figure as one HTML file that needs nothing from outside, about 5 MB. Returns its path."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.part")
    try:
        figure.write_html(temporary, include_plotlyjs=True, config=config(path.stem), full_html=True)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
