"""Figures with a cell, a point or a row per head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from workbench.analyses.figures.style import (
    COLOURBAR_ROOM,
    LEGEND_ABOVE,
    SCORE_SCALE,
    THEMES,
    VERMILLION,
    blank_figure,
    colour_of_text,
    colourbar,
    colours,
)

LABEL = np.array([0.13, 0.055])  # what a name takes of a plot's width and height on a page
LEFT_OF_ALL = 0.04  # so far left of all points may a name begin, in shares of what they span: there is the axis
CELLS_WITH_TEXT = 400  # a map with at most so many cells prints its values
MOST_DECIMALS = 5  # of them


def head_map(
    values: np.ndarray,
    *,
    label: str,
    upper: float | None = None,
    signed: bool = False,
    marked: Sequence[tuple[int, int]] = (),
    chosen: tuple[int, int] | None = None,
    theme: str = "light",
) -> go.Figure:
    """Layer × head map of a score.

    Args:
        values: [layer, head]; NaN cells are grey.
        upper: end of the colour range, which starts at 0; None means the largest value.
        signed: a red-blue scale, symmetric about 0, for effects.
        marked: heads (layer, head) to put a frame around.
        chosen: one head to put a wider, white-edged frame around, to be seen on every colour.

    Raises:
        ValueError: there is no such head.
    """
    n_layers, n_heads = values.shape
    heads = [[f"L{layer}H{head}" for head in range(n_heads)] for layer in range(n_layers)]
    scale = colours(values, label, upper, signed)
    figure = blank_figure(theme, height=max(280, 19 * n_layers + 90), masked=True)
    hover = "%{customdata}: %{z:.4f}<extra></extra>"
    figure.update_layout(margin=COLOURBAR_ROOM)
    figure.add_trace(go.Heatmap(z=values, customdata=heads, hovertemplate=hover, **scale))
    if values.size <= CELLS_WITH_TEXT:
        figure.update_layout(annotations=printed(values, scale))
    frames = [(head, VERMILLION, 2.0) for head in marked]
    frames += [(chosen, "#ffffff", 5.0), (chosen, VERMILLION, 2.5)] if chosen is not None else []
    for (layer, head), colour, width in frames:
        if not (0 <= layer < n_layers and 0 <= head < n_heads):
            raise ValueError(f"there is no L{layer}H{head} among {n_layers} layers of {n_heads} heads")
        corners = {"x0": head - 0.5, "x1": head + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
        figure.add_shape(type="rect", line={"color": colour, "width": width}, **corners)
    # A frame at the edge would widen ranges that are left to plotly.
    x, y = {"range": (-0.5, n_heads - 0.5)}, {"range": (n_layers - 0.5, -0.5), "autorange": False}
    figure.update_xaxes(title="head", dtick=1 if n_heads <= 32 else 4, showgrid=False, constrain="domain", **x)
    figure.update_yaxes(title="layer", dtick=1 if n_layers <= 40 else 4, showgrid=False, **y)
    return figure


def framed(chosen: tuple[int, int] | None) -> str:
    """What a caption says of the chosen head."""
    return "" if chosen is None else f" White-edged frame: L{chosen[0]}H{chosen[1]}."


def printed(values: np.ndarray, scale: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of a map as text on its cells, black or white, whichever stands out more.

    Two decimals, and more where the end of the scale would have fewer than two digits.
    """
    decimals = min(max(2, 1 - math.floor(math.log10(scale["zmax"]))), MOST_DECIMALS)
    shares = np.clip((values - scale["zmin"]) / (scale["zmax"] - scale["zmin"]), 0, 1)
    return [
        {
            "x": head,
            "y": layer,
            "text": f"{values[layer, head]:z.{decimals}f}",
            "showarrow": False,
            "font": {"size": 10, "color": colour_of_text(scale["colorscale"], shares[layer, head])},
        }
        for layer, head in np.argwhere(np.isfinite(values)).tolist()
    ]


def head_scatter(
    x: np.ndarray,
    y: np.ndarray,
    *,
    x_label: str,
    y_label: str,
    ratio: bool = False,
    n_labels: int = 6,
    theme: str = "light",
) -> go.Figure:
    """One point per head, coloured by layer; x and y are [layer, head].

    The heads with the largest y are named, as far as there is room beside them.

    Args:
        ratio: x is a ratio: its axis is logarithmic, with a line at 1.
    """
    layers, heads = (part.reshape(-1) for part in np.indices(x.shape))
    names = np.array([f"L{layer}H{head}" for layer, head in zip(layers, heads, strict=True)])
    best = np.argsort(-np.nan_to_num(y, nan=-np.inf), axis=None, kind="stable")[:n_labels]
    with np.errstate(all="ignore"):
        drawn = np.stack([np.log10(x) if ratio else x, y]).reshape(2, -1)
    places = label_places(drawn, best)
    figure = blank_figure(theme, height=460)
    figure.update_layout(margin=COLOURBAR_ROOM)
    darkest = 0.0 if theme == "light" else 0.3  # what is darker is lost on a dark ground
    figure.add_trace(
        go.Scatter(
            x=x.reshape(-1),
            y=y.reshape(-1),
            customdata=names,
            mode="markers+text",
            text=[name if place in places else "" for place, name in enumerate(names)],
            textposition=[places.get(place, "top right") for place in range(x.size)],
            marker={
                "color": layers,
                "colorscale": sample_colorscale(SCORE_SCALE, np.linspace(darkest, 1, 11)),
                "size": 9,
                "line": {"width": 0.5, "color": THEMES[theme].text},
                "colorbar": colourbar("layer") | {"dtick": max(1, len(x) // 6)},
            },
            hovertemplate=f"%{{customdata}}<br>{x_label}: %{{x:.4f}}<br>{y_label}: %{{y:.4f}}<extra></extra>",
            cliponaxis=False,
        )
    )
    figure.update_xaxes(title=f"{x_label} (log scale)" if ratio else x_label)
    if ratio:
        figure.add_vline(x=1, line={"color": THEMES[theme].text, "width": 1, "dash": "dot"})
        figure.update_xaxes(type="log", tickvals=_ratio_ticks(np.append(drawn[0], 0.0)))
    figure.update_yaxes(title=y_label)
    return figure


def _ratio_ticks(logarithms: np.ndarray) -> list[float]:
    """Round numbers of every power of ten, the more of them the fewer powers the (decimal) logarithms span."""
    decades = np.ptp(logarithms[np.isfinite(logarithms)])
    digits = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9) if decades < 1 else (1, 2, 3, 5) if decades < 2 else (1, 2, 5)
    return [float(f"{digit}e{power}") for power in range(-6, 7) for digit in digits]


def label_places(
    drawn: np.ndarray, points: np.ndarray, label: np.ndarray = LABEL, right: float = np.inf
) -> dict[int, str]:
    """On which side of each of the points, as far as there is room, its label stands: it covers no other label, and as
    few points as possible.

    Args:
        drawn: [2, point], x and y as they are on the axes.
        points: the indices of the points to be named, the most important first.
        label: width and height of a label in shares of what the points span.
        right: where labels have to end, in shares of what the points span.
    """
    sides = {"top right": (0.51, 0.51), "bottom right": (0.51, -0.51), "top left": (-0.51, 0.51),
             "bottom left": (-0.51, -0.51)}  # fmt: skip
    known = np.isfinite(drawn).all(axis=0)
    spread = np.ptp(drawn[:, known], axis=1) if known.any() else np.ones(2)
    spread = np.where(spread > 0, spread, 1)
    last = drawn[0, known].max(initial=np.finfo(float).min) / spread[0] - 1 + right
    first = drawn[0, known].min(initial=np.finfo(float).max) / spread[0] - LEFT_OF_ALL
    others = drawn[:, known].T / spread
    places: dict[int, str] = {}
    middles: list[np.ndarray] = []
    for point in (int(point) for point in points if known[point]):
        room: dict[str, tuple[int, np.ndarray]] = {}
        for side, offset in sides.items():
            middle = drawn[:, point] / spread + label * offset
            fits = first <= middle[0] - label[0] / 2 and middle[0] + label[0] / 2 <= last
            if fits and all((np.abs(middle - o) >= label).any() for o in middles):
                n_covered = int((np.abs(middle - others) < label / 2).all(axis=1).sum())
                room[side] = n_covered, middle
        if room:
            places[point] = min(room, key=lambda side: room[side][0])
            middles.append(room[places[point]][1])
    return places


def effects(
    names: Sequence[str],
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    control: float,
    x_label: str,
    y_label: str = "ablated head",
    theme: str = "light",
) -> go.Figure:
    """Signed effects of named interventions: a row per name, a marker with ± standard error per kind of intervention.

    Args:
        series: kind → (effects, standard errors), each [name].
        control: the largest |effect| of a control; a grey band spans ± that.
    """
    figure = blank_figure(theme, height=max(300, max(26, 11 * len(series)) * len(names) + 130))
    if np.isfinite(control):
        figure.add_vrect(
            x0=-control, x1=control, fillcolor=THEMES[theme].masked, opacity=0.5, line_width=0, layer="below",
            name="controls", showlegend=True,
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
                    "symbol": ("circle", "diamond", "square", "triangle-up", "x")[place],
                    "size": 9,
                },
                orientation="h",
                error_x={"array": errors, "thickness": 1.2, "width": 3},
                hovertemplate="%{y}, " + kind + ": %{x:+.4f}<extra></extra>",
            )
        )
    figure.update_xaxes(title=x_label, zeroline=False)
    figure.update_yaxes(autorange="reversed", type="category", title=y_label, showgrid=True)
    return figure.update_layout(scattermode="group", scattergap=0.4, showlegend=True, legend=LEGEND_ABOVE)
