"""Curves of what is left of a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import LEGEND_ABOVE, THEMES, blank_figure

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross")


def pruning_curves(
    kept: np.ndarray,
    series: Mapping[str, np.ndarray],
    *,
    band: tuple[str, np.ndarray, np.ndarray],
    y_label: str,
    theme: str = "light",
) -> go.Figure:
    """A line per ranking over the number of heads kept, and a grey line in a band for one of them.

    Args:
        kept: numbers of heads, ascending.
        series: name → values [kept].
        band: name of the series with a band, and the band's ends [kept].
    """
    style = THEMES[theme]
    figure = blank_figure(theme, height=430)
    name, low, high = band
    figure.add_trace(
        go.Scatter(
            x=np.concatenate((kept, kept[::-1])), y=np.concatenate((low, high[::-1])), fill="toself",
            fillcolor=style.masked, opacity=0.5, line={"width": 0}, hoverinfo="skip", legendgroup=name,
            showlegend=False,
        )
    )  # fmt: skip
    others = [one for one in series if one != name]
    for one, values in series.items():
        place = others.index(one) if one in others else 0
        colour = style.series[place % len(style.series)] if one in others else style.text
        figure.add_trace(
            go.Scatter(
                x=kept,
                y=values,
                name=one,
                legendgroup=one,
                mode="lines+markers",
                line={"color": colour, "width": 2, "dash": DASHES[place % len(DASHES)] if one in others else "solid"},
                marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7 if one in others else 4},
                hovertemplate="%{x} heads: %{y:.3f}",
            )
        )
    figure.update_xaxes(title="heads kept")
    figure.update_yaxes(title=y_label)
    return figure.update_layout(hovermode="x unified", showlegend=True, legend=LEGEND_ABOVE)
