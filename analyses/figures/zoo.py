"""Figures of all heads at once, what kind each is and which are alike, and of pairs of tokens in one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import COLOURBAR_ROOM, LEGEND_ABOVE, THEMES, blank_figure, colours

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross")


def head_kinds(kinds: np.ndarray, names: Sequence[str], *, theme: str = "light") -> go.Figure:
    """Layer × head map of what kind each head is: a colour and a symbol per kind, a dot for the last of them.

    Args:
        kinds: text [layer, head].
        names: of all kinds, six and what remains at most; a legend shows those that there are.
    """
    n_layers, n_heads = kinds.shape
    figure = blank_figure(theme, height=max(300, 19 * n_layers + 110))
    style = THEMES[theme]
    for place, name in enumerate(names):
        layers, heads = np.nonzero(kinds == name)
        is_rest = place == len(names) - 1
        figure.add_trace(
            go.Scatter(
                x=heads,
                y=layers,
                name=name,
                mode="markers",
                customdata=[f"L{layer}H{head}" for layer, head in zip(layers, heads, strict=True)],
                marker={
                    "color": style.masked if is_rest else style.series[place],
                    "symbol": "circle" if is_rest else SYMBOLS[place],
                    "size": 4 if is_rest else 11,
                },
                hovertemplate="%{customdata}: " + name + "<extra></extra>",
                showlegend=len(layers) > 0,
            )
        )
    figure.update_xaxes(title="head", dtick=1 if n_heads <= 32 else 4, range=[-0.6, n_heads - 0.4], zeroline=False)
    figure.update_yaxes(title="layer", dtick=1 if n_layers <= 40 else 4, range=[n_layers - 0.4, -0.6], zeroline=False)
    return figure.update_layout(showlegend=True, legend=LEGEND_ABOVE)


def head_pairs(
    values: np.ndarray, names: Sequence[str], *, n_heads: int, label: str, theme: str = "light"
) -> go.Figure:
    """Signed values from −1 to 1 of every pair of heads, [head a, head b]; NaN is grey, lines part the layers.

    Args:
        names: of the heads, L0H0 and on, of which the first of each layer is written.
        n_heads: of a layer.
    """
    figure = blank_figure(theme, height=640, masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    scale = colours(values, label, None, True) | {"zmin": -1.0, "zmax": 1.0}
    hover = "%{y} and %{x}: %{z:+.3f}<extra></extra>"
    figure.add_trace(go.Heatmap(z=values, x=list(names), y=list(names), hovertemplate=hover, **scale))
    for edge in range(n_heads, len(names), n_heads):
        line = {"color": THEMES[theme].grid, "width": 1}
        figure.add_hline(y=edge - 0.5, line=line)
        figure.add_vline(x=edge - 0.5, line=line)
    every = names if len(names) <= 24 else names[::n_heads]
    axis = {"title": "head", "type": "category", "tickvals": list(every), "showgrid": False}
    figure.update_xaxes(**axis, tickangle=-60, constrain="domain")
    figure.update_yaxes(**axis, autorange="reversed", scaleanchor="x", constrain="domain")
    return figure


def token_pairs(
    values: np.ndarray, tokens: Sequence[str], *, y_label: str, x_label: str, label: str, theme: str = "light"
) -> go.Figure:
    """Signed values of every pair of some tokens, [token, token]; ``tokens`` are their labels, all different."""
    figure = blank_figure(theme, height=max(360, 18 * len(tokens) + 150), masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    hover = "%{y} → %{x}: %{z:+.3f}<extra></extra>"
    figure.add_trace(
        go.Heatmap(z=values, x=list(tokens), y=list(tokens), hovertemplate=hover, **colours(values, label, None, True))
    )
    figure.update_xaxes(title=x_label, type="category", tickangle=-60, showgrid=False)
    figure.update_yaxes(title=y_label, type="category", autorange="reversed", showgrid=False)
    return figure
