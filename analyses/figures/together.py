"""Figures of heads ablated together."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analyses.figures.style import LEGEND_ABOVE, THEMES, apply_style, blank_figure

COLUMNS = 3
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross")


def joint_curves(
    counts: np.ndarray,
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    band: tuple[np.ndarray, np.ndarray],
    y_label: str,
    theme: str = "light",
) -> go.Figure:
    """A panel per ranking over the number of heads: ablated together, and dashed the sum of each alone.

    Args:
        counts: numbers of heads, ascending, on a logarithmic axis.
        series: name → (together, alone), each [count].
        band: ends of a grey band behind every panel, each [count].
    """
    rows = -(-len(series) // COLUMNS)
    figure = make_subplots(
        rows=rows, cols=COLUMNS, shared_xaxes=True, shared_yaxes=True, subplot_titles=list(series),
        horizontal_spacing=0.03, vertical_spacing=0.14 if rows > 1 else 0,
    )  # fmt: skip
    figure.update_annotations(font_size=12)
    apply_style(figure, theme, height=230 * rows + 110)
    style = THEMES[theme]
    low, high = band
    for place, (panel, lines) in enumerate(series.items()):
        at = {"row": place // COLUMNS + 1, "col": place % COLUMNS + 1}
        figure.add_trace(
            go.Scatter(
                x=np.concatenate((counts, counts[::-1])), y=np.concatenate((low, high[::-1])), fill="toself",
                mode="lines", fillcolor=style.masked, opacity=0.5, line={"width": 0}, hoverinfo="skip",
                name=None if place else "random orders, together", showlegend=place == 0, legendgroup="band",
                legendrank=3,
            ), **at,
        )  # fmt: skip
        for which, (name, values) in enumerate(zip(("together", "sum of each alone"), lines, strict=True)):
            figure.add_trace(
                go.Scatter(
                    x=counts,
                    y=values,
                    name=name,
                    legendgroup=name,
                    legendrank=which + 1,
                    showlegend=place == 0,
                    mode="lines+markers",
                    line={"color": style.series[which], "width": 2, "dash": ("solid", "dash")[which]},
                    marker={"symbol": SYMBOLS[which], "size": 6},
                    customdata=[panel] * len(counts),
                    meta=["panel"],
                    hovertemplate=f"%{{x}} heads, {name}: %{{y:+.3f}}<extra></extra>",
                ),
                **at,
            )
    figure.update_xaxes(type="log", tickvals=_ticks(counts), showticklabels=True)
    figure.update_xaxes(title="heads ablated", row=rows)
    figure.update_yaxes(title=y_label, col=1)
    legend = LEGEND_ABOVE | {"y": 1 + 0.1 / rows}  # above the panels' names
    return figure.update_layout(showlegend=True, margin_t=64, legend=legend)


def excess_curves(
    counts: np.ndarray,
    series: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    *,
    y_label: str,
    theme: str = "light",
) -> go.Figure:
    """A line per ranking over the number of heads, with intervals; (values, lower ends, upper ends), each [count].
    Ends that are all NaN draw no intervals."""
    figure = blank_figure(theme, height=430)
    figure.add_hline(y=0, line={"color": THEMES[theme].text, "width": 1})
    for place, (name, (values, low, high)) in enumerate(series.items()):
        colour = THEMES[theme].series[place % len(THEMES[theme].series)]
        figure.add_trace(
            go.Scatter(
                x=counts,
                y=values,
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8},
                error_y=None if np.isnan(low).all() else {
                    "array": high - values, "arrayminus": values - low, "thickness": 1, "width": 3,
                },
                hovertemplate=f"{name}, %{{x}} heads: %{{y:+.3f}}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_xaxes(title="heads ablated", type="log", tickvals=_ticks(counts))
    figure.update_yaxes(title=y_label, zeroline=False)
    return figure.update_layout(showlegend=True, legend=LEGEND_ABOVE)


def _ticks(counts: np.ndarray) -> list[int]:
    """Round numbers on a logarithmic axis, and the last."""
    last = int(counts[-1])
    return [n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n < last / 1.3] + [last]
