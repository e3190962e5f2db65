"""Figures as files: pictures for print and slides, pages to explore, and the numbers that are drawn."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from workbench.analyses.figures import browser
from workbench.analyses.figures.numbers import numbers_of
from workbench.analyses.figures.paper import PRESETS, Preset, on_paper
from workbench.analyses.files import write_together

PICTURES = ("svg", "pdf", "png")
FORMATS = (*PICTURES, "html", "csv")
PIXELS_PER_INCH = 96  # of CSS, in which SVG and PDF are measured
DPI = 300  # of PNG files, and more for maps whose cells would have fewer pixels than these, so that none is lost
CELL_PIXELS, MAP_SHARE = 2, 0.4  # the second is what a map takes of the figure's width at least


def config(filename: str = "figure") -> dict[str, Any]:
    """Plotly's ``config`` for Dash graphs, ``figure.show`` and HTML files: no logo, no upload, download as SVG."""
    return {
        "displaylogo": False,
        "showSendToCloud": False,
        "responsive": True,
        "toImageButtonOptions": {"format": "svg", "filename": filename},
    }


def write_figure(figure: go.Figure, path: str | os.PathLike, *, preset: str = "two-column") -> Path:
    """Writes a figure in the format that the path's suffix names, and returns the path.

    ``.svg``, ``.pdf`` and ``.png`` are pictures at the size of ``preset``: they need kaleido and a Chromium or Chrome.
    ``.html`` is a page to explore that needs nothing from outside, about 5 MB; ``.csv`` holds the numbers drawn.

    Args:
        preset: "one-column" (3.3 inches wide, 8 pt type), "two-column" (6.9 inches, 8 pt) or "slide" (10 inches,
            12 pt). PNG files have 300 dots per inch, and more for maps of very many cells. Pages and numbers are the
            same at every size.

    Raises:
        ValueError: another suffix, or an unknown preset.
        ExportError: a picture is asked for, and there is no browser, or it fails.
    """
    (written,) = write_figures({Path(path): figure}, preset=preset)
    return written


def write_figures(
    figures: Mapping[Path, go.Figure] | Mapping[str, go.Figure], *, preset: str = "two-column"
) -> list[Path]:
    """As ``write_figure``, for several paths. Every file is complete before any takes its name."""
    paths = [Path(path) for path in figures]
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(map(repr, PRESETS))}, got {preset!r}")
    for path in paths:
        if _format(path) not in FORMATS:
            raise ValueError(f"{path} must end in one of {', '.join(f'.{name}' for name in FORMATS)}")
    contents = _contents(dict(zip(paths, figures.values(), strict=True)), PRESETS[preset])
    write_together(dict(zip(paths, contents, strict=True)))
    return paths


def figure_file(figure: go.Figure, format: str, *, preset: str = "two-column", name: str = "figure") -> bytes:
    """What ``write_figure`` writes into a file of one of FORMATS; ``name`` is that of pictures saved from pages."""
    path = Path(f"{name}.{format}")
    if preset not in PRESETS or format not in FORMATS:
        raise ValueError(f"no format {format!r} at the size {preset!r}; there are {', '.join(FORMATS)}")
    (content,) = _contents({path: figure}, PRESETS[preset])
    return content


def picture_for_page(figure: go.Figure, format: str, preset: str) -> tuple[go.Figure, dict[str, Any]]:
    """The same picture for a page that draws by itself: what to draw, and the options of ``Plotly.toImage``."""
    drawn = on_paper(figure, PRESETS[preset])
    return drawn, _options(drawn, format, PRESETS[preset])


def _format(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")


def _contents(figures: Mapping[Path, go.Figure], preset: Preset) -> list[bytes]:
    """Of every file, in order."""
    drawn = {path: on_paper(figure, preset) for path, figure in figures.items() if _format(path) in PICTURES}
    options = [_options(figure, _format(path), preset) for path, figure in drawn.items()]
    found = dict(zip(drawn, browser.pictures(list(drawn.values()), options), strict=True)) if drawn else {}
    for path, figure in figures.items():
        if _format(path) == "html":
            page = figure.to_html(include_plotlyjs=True, config=config(path.stem), full_html=True)
            found[path] = page.encode("utf-8", "replace")
        elif _format(path) == "csv":
            found[path] = numbers_of(figure).to_csv(index=False).encode("utf-8", "replace")
    return [found[path] for path in figures]


def _options(figure: go.Figure, format: str, preset: Preset) -> dict[str, Any]:
    """What the browser is asked for: the layout's pixels, and by how much they are enlarged."""
    per_inch = PIXELS_PER_INCH
    if format == "png":
        cells = max((max(trace.z.shape) for trace in figure.data if trace.type == "heatmap"), default=0)
        per_inch = max(DPI, 100 * ceil(CELL_PIXELS * cells / (MAP_SHARE * preset.inches) / 100))
    size = {"width": figure.layout.width, "height": figure.layout.height}
    return {"format": format, **size, "scale": per_inch / preset.pixels_per_inch}
