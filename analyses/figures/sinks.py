"""Figures of what sinks are for and what carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import LEGEND_ABOVE, THEMES, blank_figure

SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x", "cross")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def sink_effects(
    names: Sequence[str],
    series: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    *,
    x_label: str,
    theme: str = "light",
) -> go.Figure:
    """A row per name; per kind of edit a marker with ± standard error, and hollow the same edit of a control.

    Args:
        series: edit → (effects, standard errors, effects on the control), each [name].
    """
    figure = blank_figure(theme, height=max(300, 44 * len(names) + 140))
    figure.add_vline(x=0, line={"color": THEMES[theme].text, "width": 1})
    for place, (edit, (values, errors, control)) in enumerate(series.items()):
        colour = THEMES[theme].series[place]
        for which, of_key in (("sink", values), ("control", control)):
            figure.add_trace(
                go.Scatter(
                    x=of_key,
                    y=list(names),
                    name=edit,
                    legendgroup=edit,
                    offsetgroup=edit,
                    showlegend=which == "sink",
                    mode="markers",
                    orientation="h",
                    marker={
                        "color": colour,
                        "symbol": SYMBOLS[place] + ("" if which == "sink" else "-open"),
                        "size": 9 if which == "sink" else 8,
                    },
                    error_x={"array": errors, "thickness": 1.2, "width": 3, "visible": which == "sink"},
                    hovertemplate="%{y}<br>" + f"{edit}, {which}: " + "%{x:+.4f}<extra></extra>",
                )
            )
    figure.update_xaxes(title=x_label, zeroline=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=True)
    return figure.update_layout(scattermode="group", scattergap=0.4, showlegend=True, legend=LEGEND_ABOVE)


def binned_curves(
    series: Mapping[str, np.ndarray],
    *,
    width: int,
    marked: Mapping[int, str],
    x_label: str,
    y_label: str,
    theme: str = "light",
) -> go.Figure:
    """Named lines over 0, 1, 2, …, each point the mean of the known values among ``width`` positions.

    Args:
        series: name → [position]; NaN are left out of the means, and points without any are bridged up to the last.
        marked: positions with a line and what it says.
    """
    figure = blank_figure(theme, height=420)
    for place, (name, values) in enumerate(series.items()):
        padded = np.pad(values, (0, -len(values) % width), constant_values=np.nan).reshape(-1, width)
        known = np.isfinite(padded)
        n = known.sum(axis=1)
        figure.add_trace(
            go.Scatter(
                x=np.arange(len(padded)) * width + (width - 1) / 2,
                y=np.where(known, padded, 0.0).sum(axis=1) / np.where(n > 0, n, np.nan),
                name=name,
                mode="lines",
                connectgaps=True,
                line={"color": THEMES[theme].series[place], "width": 2, "dash": DASHES[place]},
                hovertemplate="%{y:.3f}",
            )
        )
    for at, text in marked.items():
        figure.add_vline(
            x=at, line={"color": THEMES[theme].text, "width": 1, "dash": "dot"}, annotation_text=text,
            annotation_position="bottom right",
        )  # fmt: skip
    figure.update_xaxes(title=x_label)
    figure.update_yaxes(title=y_label)
    return figure.update_layout(hovermode="x unified", showlegend=True, legend=LEGEND_ABOVE)


def dots(
    series: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    names: Sequence[str],
    *,
    x_label: str,
    theme: str = "light",
) -> go.Figure:
    """A row per name with the value and interval of each series; NaN has no mark.

    Args:
        series: name → (values, lower ends, upper ends), each [name].
    """
    figure = blank_figure(theme, height=max(240, 34 * len(names) + 120))
    for place, (label, (values, low, high)) in enumerate(series.items()):
        figure.add_trace(
            go.Scatter(
                x=values,
                y=list(names),
                name=label,
                mode="markers",
                marker={"color": THEMES[theme].series[place], "symbol": SYMBOLS[place], "size": 10},
                error_x={"array": high - values, "arrayminus": values - low, "symmetric": False, "thickness": 1.2},
                hovertemplate="%{y}, " + label + ": %{x:.4f}<extra></extra>",
            )
        )
    figure.update_xaxes(title=x_label)
    figure.update_yaxes(autorange="reversed", type="category", categoryarray=list(names), categoryorder="array")
    return figure.update_layout(showlegend=len(series) > 1, legend=LEGEND_ABOVE)
