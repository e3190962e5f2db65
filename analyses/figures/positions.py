"""Figures along positions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import LEGEND_ABOVE, THEMES, blank_figure, colours


def position_map(values: np.ndarray, *, rows: str, columns: str, label: str, theme: str = "light") -> go.Figure:
    """values [row, column] over positions, from 0 to 1; the largest value of a run of columns is what is drawn."""
    pooled, width = _pool_columns(values, 512)
    figure = blank_figure(theme, height=max(280, 19 * len(values) + 90), masked=True)
    figure.add_trace(
        go.Heatmap(
            z=pooled,
            x0=(width - 1) / 2,
            dx=width,
            hovertemplate=f"{rows} %{{y}}, {columns} %{{x}}: %{{z:.4f}}<extra></extra>",
            **colours(values, label, 1.0, signed=False),
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
    figure = blank_figure(theme, height=400)
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
    return figure.update_layout(hovermode="x unified", showlegend=True, legend=LEGEND_ABOVE)


def position_bars(
    values: np.ndarray, *, x_label: str, y_label: str, missing: str = "no value", theme: str = "light"
) -> go.Figure:
    """One bar per position; the ground is grey where the value is NaN, and a legend says that there is ``missing``."""
    figure = blank_figure(theme, height=360)
    figure.add_trace(
        go.Bar(
            x=np.arange(len(values)),
            y=values,
            marker={"color": THEMES[theme].series[0], "line_width": 0},
            hovertemplate="position %{x}: %{y:.4f}<extra></extra>",
            showlegend=False,
        )
    )
    edges = np.diff(np.isnan(values), prepend=False, append=False).nonzero()[0].reshape(-1, 2)  # of each run of NaN
    for place, (first, end) in enumerate(edges):
        figure.add_vrect(
            x0=first - 0.5, x1=end - 0.5, fillcolor=THEMES[theme].masked, line_width=0, layer="below",
            name=missing, showlegend=place == 0,
        )  # fmt: skip
    figure.update_xaxes(title=x_label, range=[-0.5, len(values) - 0.5], showgrid=False)
    figure.update_yaxes(title=y_label, rangemode="tozero")
    return figure.update_layout(showlegend=len(edges) > 0, legend=LEGEND_ABOVE)


def _pool_columns(values: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Maxima over runs of columns, so that no one-column-wide feature falls between two pixels; and the run's width."""
    width = -(-values.shape[1] // most)
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % width)), constant_values=np.nan)
    return np.fmax.reduce(padded.reshape(len(values), -1, width), axis=2), width
