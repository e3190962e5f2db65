"""The house style: fonts, colours, axes, and how names and tokens are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
FONT_SIZE = 12  # pixels, of ordinary type
SCORE_SCALE, SIGNED_SCALE = "cividis", "RdBu_r"
# Okabe & Ito's palette: told apart with any colour vision.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
# What a colour bar takes at the right. Plotly would make room for it itself, but leaves the bar where it stood before.
COLOURBAR_ROOM = {"r": 96}  # pixels
LEGEND_ABOVE = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}


@dataclass(frozen=True)
class Theme:
    """Colours that differ between light and dark."""

    paper: str
    text: str
    grid: str
    masked: str
    series: tuple[str, ...]


THEMES = {
    "light": Theme("#ffffff", "#1f2430", "#e3e6eb", "#c9ced6", (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY)),
    "dark": Theme("#16191f", "#e6e8eb", "#2e343e", "#565d69", (SKY, ORANGE, GREEN, PURPLE, VERMILLION, BLUE)),
}


def blank_figure(theme: str, *, height: int, masked: bool = False) -> go.Figure:
    figure = go.Figure()
    apply_style(figure, theme, height=height)
    if masked:
        figure.update_layout(plot_bgcolor=THEMES[theme].masked)
    return figure


def apply_style(figure: go.Figure, theme: str, *, height: int) -> None:
    if theme not in THEMES:
        raise ValueError(f"theme must be one of {', '.join(map(repr, THEMES))}, got {theme!r}")
    colours = THEMES[theme]
    axis = {
        "gridcolor": colours.grid,
        "linecolor": colours.text,
        "zerolinecolor": colours.grid,
        "ticks": "outside",
        "ticklen": 3,
        "tickcolor": colours.text,
        "title": {"standoff": 8},
        "automargin": True,
    }
    figure.update_layout(
        template=go.layout.Template(
            layout={
                "font": {"family": FONT, "size": FONT_SIZE, "color": colours.text},
                "paper_bgcolor": colours.paper,
                "plot_bgcolor": colours.paper,
                "colorway": colours.series,
                "xaxis": axis,
                "yaxis": axis,
                "hoverlabel": {"font": {"family": FONT}},
                "showlegend": False,
                "margin": {"l": 60, "r": 20, "t": 24, "b": 50},
            }
        ),
        height=height,
    )


def colours(values: np.ndarray, label: str, upper: float | None, signed: bool) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    limit = (largest or 1.0) if upper is None or signed else upper
    return {
        "colorscale": SIGNED_SCALE if signed else SCORE_SCALE,
        "zmin": -limit if signed else 0.0,
        "zmax": limit,
        "colorbar": colourbar(label),
    }


def colourbar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "right"}, "thickness": 14, "outlinewidth": 0, "len": 1, "ypad": 0}


def colour_of_text(colorscale: str, share: float) -> str:
    """Black or white, whichever stands out more (WCAG 2.2) from the colour at ``share`` of a scale."""
    (background,) = sample_colorscale(colorscale, [share], colortype="tuple")
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in background]
    luminance = float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


def escaped(text: str) -> str:
    """Text of which plotly, which reads a little HTML, takes nothing for markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def show_controls(text: str) -> str:
    """The text with line ends, tabs and other control characters, which no SVG may hold, as characters to be seen."""
    return text.translate(_CONTROLS)


_CONTROLS = {code: 0x2400 + code for code in range(32)} | {127: "␡", ord("\n"): "↵", ord("\t"): "⇥"}


def show_token(text: str) -> str:
    """A token's text for labels, escaped: spaces and control characters are visible."""
    return escaped(show_controls(text.replace(" ", "␣")))


def token_labels(tokens: Sequence[str], first: int = 0) -> list[str]:
    """Axis labels of tokens, made unique by their positions, which count from ``first``."""
    return [f"{show_token(token)} {position}" for position, token in enumerate(tokens, start=first)]


def axis_label(name: str, unit: str = "") -> str:
    """A quantity's name and unit as a label; shares of 1 go without a unit."""
    text = name.replace("_", " ")
    return f"{text} ({unit})" if unit and unit != "share of 1" else text
