"""Pure functions from arrays to plotly figures, in one house style. The app, notebooks and the command line share them.

Scores use cividis over a stated range, signed effects red-blue centred on 0; cells without a value are grey, which
neither scale contains. Queries run down, keys across. Titles are left to captions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
SCORE_SCALE, SIGNED_SCALE = "cividis", "RdBu_r"
# Okabe & Ito's palette: told apart with any colour vision.
BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
CELLS_WITH_TEXT = 400  # a map with at most so many cells prints its values
LABELS_THAT_FIT = 48  # so many tokens all get their label
CELLS_THAT_FIT = 420  # plotly drops cells where there are more of them than pixels; wider maps get a larger figure


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


def show_token(text: str) -> str:
    """A token's text for labels: spaces and line ends visible, markup escaped (plotly reads a little HTML)."""
    visible = text.replace(" ", "␣").replace("\n", "↵").replace("\r", "␍").replace("\t", "⇥")
    return visible.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def token_labels(tokens: Sequence[str]) -> list[str]:
    """Axis labels of tokens, made unique by their positions."""
    return [f"{show_token(token)} {position}" for position, token in enumerate(tokens)]


def axis_label(name: str, unit: str = "") -> str:
    """A quantity's name and unit as a label; shares of 1 go without a unit."""
    text = name.replace("_", " ")
    return f"{text} ({unit})" if unit and unit != "share of 1" else text


def head_map(
    values: np.ndarray,
    *,
    label: str,
    upper: float | None = None,
    signed: bool = False,
    marked: Sequence[tuple[int, int]] = (),
    theme: str = "light",
) -> go.Figure:
    """Layer × head map of a score.

    Args:
        values: [layer, head]; NaN cells are grey.
        upper: end of the colour range, which starts at 0; None means the largest value.
        signed: a red-blue scale, symmetric about 0, for effects.
        marked: heads (layer, head) to put a frame around.
    """
    n_layers, n_heads = values.shape
    heads = [[f"L{layer}H{head}" for head in range(n_heads)] for layer in range(n_layers)]
    heatmap = go.Heatmap(
        z=values,
        customdata=heads,
        hovertemplate="%{customdata}: %{z:.4f}<extra></extra>",
        **_colours(values, label, upper, signed),
    )
    if values.size <= CELLS_WITH_TEXT:
        heatmap.update(texttemplate="%{z:.2f}", textfont_size=10)
    figure = _figure(theme, height=max(280, 19 * n_layers + 90), masked=True)
    figure.add_trace(heatmap)
    for layer, head in marked:
        corners = {"x0": head - 0.5, "x1": head + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
        figure.add_shape(type="rect", line={"color": VERMILLION, "width": 2}, **corners)
    figure.update_xaxes(title="head", dtick=1 if n_heads <= 32 else 4, showgrid=False, constrain="domain")
    figure.update_yaxes(title="layer", dtick=1 if n_layers <= 40 else 4, autorange="reversed", showgrid=False)
    return figure


def head_scatter(
    x: np.ndarray,
    y: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    n_labels: int = 6,
    theme: str = "light",
) -> go.Figure:
    """One point per head, coloured by layer; x and y are [layer, head]. The heads with the largest y are named."""
    layers, heads = (part.reshape(-1) for part in np.indices(x.shape))
    names = np.array([f"L{layer}H{head}" for layer, head in zip(layers, heads, strict=True)])
    named = np.zeros(x.size, dtype=bool)
    best = np.argsort(-np.nan_to_num(y, nan=-np.inf), axis=None, kind="stable")[:n_labels]
    named[best] = True
    places = np.full(x.size, "top right", dtype=object)
    places[best[1::2]] = "bottom right"  # neighbours in height do not cover each other
    figure = _figure(theme, height=460)
    figure.add_trace(
        go.Scatter(
            x=x.reshape(-1),
            y=y.reshape(-1),
            customdata=names,
            mode="markers+text",
            text=np.where(named, names, ""),
            textposition=places,
            marker={
                "color": layers,
                "colorscale": SCORE_SCALE,
                "size": 9,
                "line": {"width": 0.5, "color": THEMES[theme].text},
                "colorbar": _colourbar("layer") | {"dtick": max(1, len(x) // 6)},
            },
            hovertemplate=f"%{{customdata}}<br>{x_label}: %{{x:.4f}}<br>{y_label}: %{{y:.4f}}<extra></extra>",
            cliponaxis=False,
        )
    )
    figure.update_xaxes(title=x_label)
    if log_x:
        figure.update_xaxes(type="log", tickvals=[d * 10.0**e for e in range(-6, 7) for d in (1, 2, 5)])
    figure.update_yaxes(title=y_label)
    return figure


def position_map(values: np.ndarray, *, rows: str, columns: str, label: str, theme: str = "light") -> go.Figure:
    """values [row, column] over positions, from 0 to 1; the largest value of a run of columns is what is drawn."""
    pooled, width = _pool_columns(values, 512)
    figure = _figure(theme, height=max(280, 19 * len(values) + 90), masked=True)
    figure.add_trace(
        go.Heatmap(
            z=pooled,
            x0=(width - 1) / 2,
            dx=width,
            hovertemplate=f"{rows} %{{y}}, {columns} %{{x}}: %{{z:.4f}}<extra></extra>",
            **_colours(values, label, 1.0, signed=False),
        )
    )
    suffix = "" if width == 1 else f" (maximum of {width} at a time)"
    figure.update_xaxes(title=columns + suffix, showgrid=False)
    figure.update_yaxes(title=rows, dtick=1, autorange="reversed", showgrid=False)
    return figure


def curves(
    series: Mapping[str, np.ndarray],
    *,
    errors: Mapping[str, np.ndarray] | None = None,
    x_label: str,
    y_label: str,
    theme: str = "light",
) -> go.Figure:
    """Named lines over 0, 1, 2, … with a band of ± error where ``errors`` has one; NaN leaves a gap."""
    figure = _figure(theme, height=400)
    dashes = ("solid", "dash", "dot", "dashdot")
    for place, (name, values) in enumerate(series.items()):
        colour = THEMES[theme].series[place % len(THEMES[theme].series)]
        x = np.arange(len(values))
        if errors and name in errors:
            known = np.isfinite(values) & np.isfinite(errors[name])
            band_x = np.concatenate((x[known], x[known][::-1]))
            band_y = np.concatenate(((values + errors[name])[known], (values - errors[name])[known][::-1]))
            figure.add_trace(
                go.Scatter(
                    x=band_x, y=band_y, fill="toself", fillcolor=colour, opacity=0.2, line_width=0,
                    hoverinfo="skip", showlegend=False,
                )
            )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=x,
                y=values,
                name=name,
                mode="lines",
                line={"color": colour, "width": 2, "dash": dashes[place % len(dashes)]},
                hovertemplate="%{x}: %{y:.3f}",
            )
        )
    figure.update_xaxes(title=x_label)
    figure.update_yaxes(title=y_label, rangemode="tozero")
    figure.update_layout(
        hovermode="x unified", showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    )
    return figure


def position_bars(values: np.ndarray, *, x_label: str, y_label: str, theme: str = "light") -> go.Figure:
    """One bar per position."""
    figure = _figure(theme, height=360)
    figure.add_trace(
        go.Bar(
            x=np.arange(len(values)),
            y=values,
            marker={"color": THEMES[theme].series[0], "line_width": 0},
            hovertemplate="position %{x}: %{y:.4f}<extra></extra>",
        )
    )
    figure.update_xaxes(title=x_label)
    figure.update_yaxes(title=y_label, rangemode="tozero")
    return figure


def effects(
    names: Sequence[str],
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    control: float,
    x_label: str,
    theme: str = "light",
) -> go.Figure:
    """Signed effects of named interventions: a row per name, a marker with ± standard error per kind of intervention.

    Args:
        series: kind → (effects, standard errors), each [name].
        control: the largest |effect| of a control; a grey band spans ± that.
    """
    figure = _figure(theme, height=max(300, 26 * len(names) + 130))
    if np.isfinite(control):
        figure.add_vrect(
            x0=-control, x1=control, fillcolor=THEMES[theme].masked, opacity=0.5, line_width=0, layer="below",
            annotation={"text": "controls", "font_size": 11, "yanchor": "bottom"}, annotation_position="top",
        )  # fmt: skip
    figure.add_vline(x=0, line={"color": THEMES[theme].text, "width": 1})
    for place, (kind, (values, errors)) in enumerate(series.items()):
        figure.add_trace(
            go.Scatter(
                x=values,
                y=list(names),
                name=kind,
                mode="markers",
                marker={
                    "color": THEMES[theme].series[place],
                    "symbol": ("circle", "diamond", "square")[place],
                    "size": 9,
                },
                error_x={"array": errors, "thickness": 1.2, "width": 3},
                hovertemplate="%{y}, " + kind + ": %{x:+.4f}<extra></extra>",
            )
        )
    figure.update_xaxes(title=x_label, zeroline=False)
    figure.update_yaxes(autorange="reversed", type="category", title="ablated head", showgrid=True)
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.08, "yanchor": "bottom", "x": 0})
    return figure


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
    scale: str = "linear",
    theme: str = "light",
) -> go.Figure:
    """One head's attention with a bar strip per key above and per query on the right.

    Args:
        cells: [query, key], NaN where the mask hides the whole cell; the figure grows until each has a pixel.
        query_labels, key_labels: unique, one per row and column.
        scale: "sqrt" colours by the square root, which shows what a dominant sink column hides.
    """
    if scale not in ("linear", "sqrt"):
        raise ValueError(f"scale must be 'linear' or 'sqrt', got {scale!r}")
    figure = make_subplots(
        rows=2, cols=2, row_heights=[0.12, 0.88], column_widths=[0.88, 0.12], shared_xaxes=True, shared_yaxes=True,
        horizontal_spacing=0.015, vertical_spacing=0.015,
    )  # fmt: skip
    _style(figure, theme, height=660)
    bars = {"marker": {"color": THEMES[theme].series[0], "line_width": 0}}
    figure.add_trace(
        go.Bar(x=list(key_labels), y=key_marginal, hovertemplate="key %{x}: %{y:.4f}<extra></extra>", **bars), 1, 1
    )
    figure.add_trace(
        go.Bar(
            x=query_marginal, y=list(query_labels), orientation="h",
            hovertemplate="query %{y}: %{x:.4f}<extra></extra>", **bars,
        ),
        2, 2,
    )  # fmt: skip
    ticks = np.array([0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0] if scale == "sqrt" else [0, 0.2, 0.4, 0.6, 0.8, 1.0])
    heatmap = go.Heatmap(
        z=np.sqrt(cells) if scale == "sqrt" else cells,
        x=list(key_labels),
        y=list(query_labels),
        colorscale=SCORE_SCALE,
        zmin=0,
        zmax=1,
        colorbar=_colourbar(f"{label} (√ colour)" if scale == "sqrt" else label)
        | {"tickvals": np.sqrt(ticks) if scale == "sqrt" else ticks, "ticktext": ticks},
        hovertemplate="query %{y}<br>key %{x}<br>%{z:.4f}<extra></extra>",
    )
    if scale == "sqrt":
        heatmap.update(customdata=cells, hovertemplate="query %{y}<br>key %{x}<br>%{customdata:.4f}<extra></extra>")
    figure.add_trace(heatmap, 2, 1)
    longest = max(len(query_labels), len(key_labels))
    if longest > CELLS_THAT_FIT:
        figure.update_layout(width=CELLS_THAT_FIT + longest, height=CELLS_THAT_FIT + longest - 60)
    small = {"tickfont_size": min(11, max(8, 420 // longest))}
    few = {"nticks": 3, "rangemode": "tozero", "tickfont_size": 10}
    if longest <= LABELS_THAT_FIT:
        figure.update_xaxes(dtick=1, tickangle=90, row=2, col=1)
        figure.update_yaxes(dtick=1, row=2, col=1)
    figure.update_layout(bargap=0)
    figure.update_xaxes(type="category", showgrid=False, nticks=12 if longest > 64 else None, col=1)
    figure.update_yaxes(
        type="category", showgrid=False, nticks=24 if longest > 64 else None, autorange="reversed", row=2
    )
    figure.update_xaxes(title="key (source)", **small, row=2, col=1)
    figure.update_yaxes(title="query (destination)", **small, row=2, col=1)
    figure.update_yaxes(title={"text": key_marginal_label, "font_size": 10}, **few, row=1, col=1)
    figure.update_xaxes(title={"text": query_marginal_label, "font_size": 10}, **few, row=2, col=2)
    figure.add_shape(
        type="rect", xref="x3 domain", yref="y3 domain", x0=0, x1=1, y0=0, y1=1, layer="below", line_width=0,
        fillcolor=THEMES[theme].masked,
    )  # fmt: skip
    return figure


def _colours(values: np.ndarray, label: str, upper: float | None, signed: bool) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    limit = (largest or 1.0) if upper is None or signed else upper
    return {
        "colorscale": SIGNED_SCALE if signed else SCORE_SCALE,
        "zmin": -limit if signed else 0.0,
        "zmax": limit,
        "colorbar": _colourbar(label),
    }


def _colourbar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "right"}, "thickness": 14, "outlinewidth": 0, "len": 1, "ypad": 0}


def _pool_columns(values: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Maxima over runs of columns, so that no one-column-wide feature falls between two pixels; and the run's width."""
    width = -(-values.shape[1] // most)
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % width)), constant_values=np.nan)
    return np.fmax.reduce(padded.reshape(len(values), -1, width), axis=2), width


def _figure(theme: str, *, height: int, masked: bool = False) -> go.Figure:
    figure = go.Figure()
    _style(figure, theme, height=height)
    if masked:
        figure.update_layout(plot_bgcolor=THEMES[theme].masked)
    return figure


def _style(figure: go.Figure, theme: str, *, height: int) -> None:
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
                "font": {"family": FONT, "size": 12, "color": colours.text},
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
