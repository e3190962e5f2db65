"""Figures along positions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import COLOURBAR_ROOM, LEGEND_ABOVE, SCORE_SCALE, THEMES, blank_figure, colourbar

ROWS_WITH_LABELS = 40  # of more heads than these, the first of each layer is named
ROOT_TICKS = (0, *(digit / power for power in (10000, 1000, 100, 10) for digit in (1, 2, 5)), 1)


def position_map(values: np.ndarray, *, label: str, missing: str = "no value", theme: str = "light") -> go.Figure:
    """A row per head over key positions, coloured by the square root of the value: a peak leaves the rest visible.

    Args:
        values: [layer, head, key]; NaN is grey, and a legend says that there is ``missing``. Where there are more keys
            than pixels, the largest value of a run of them is what is drawn.
    """
    n_layers, n_heads, n_keys = values.shape
    names = [f"L{layer}H{head}" for layer in range(n_layers) for head in range(n_heads)]
    pooled, width = _pool_columns(values.reshape(len(names), n_keys), 512)
    largest = float(np.nanmax(pooled, initial=0.0)) or 1.0
    ticks = np.array([tick for tick in ROOT_TICKS if largest / 100 <= tick <= largest or tick == 0])
    every_row = len(names) <= ROWS_WITH_LABELS
    figure = blank_figure(theme, height=max(280, (19 if every_row else 9) * len(names) + 90))
    figure.update_layout(margin=COLOURBAR_ROOM)
    figure.add_trace(
        go.Heatmap(
            z=np.sqrt(pooled),
            y=names,
            x0=(width - 1) / 2,
            dx=width,
            customdata=pooled,
            hovertemplate="%{y}, key %{x}: %{customdata:.4f}<extra></extra>",
            colorscale=SCORE_SCALE,
            zmin=0,
            zmax=np.sqrt(largest),
            colorbar=colourbar(f"{label} (√ colour)") | {"tickvals": np.sqrt(ticks), "ticktext": ticks},
        )
    )
    for layer in range(1, n_layers):
        figure.add_hline(y=layer * n_heads - 0.5, line={"color": THEMES[theme].paper, "width": 1})
    _mark_missing(figure, np.isnan(values).all(axis=(0, 1)), missing, theme)
    suffix = "" if width == 1 else f" (maximum of {width} at a time)"
    figure.update_xaxes(title="key position" + suffix, showgrid=False, range=[-0.5, n_keys - 0.5])
    figure.update_yaxes(
        title="head", type="category", tickvals=names if every_row else names[::n_heads], autorange="reversed",
        showgrid=False,
    )  # fmt: skip
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
    longest = max(len(values) for values in series.values())
    figure.update_xaxes(title=x_label, dtick=1 if longest <= 12 else None)  # nothing lies between two of few places
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
    _mark_missing(figure, np.isnan(values), missing, theme)
    figure.update_xaxes(title=x_label, range=[-0.5, len(values) - 0.5], showgrid=False)
    figure.update_yaxes(title=y_label, rangemode="tozero")
    return figure


def _mark_missing(figure: go.Figure, is_missing: np.ndarray, name: str, theme: str) -> None:
    """Makes the ground grey where a position, bool [position], has no value, with a legend that names it."""
    edges = np.diff(is_missing, prepend=False, append=False).nonzero()[0].reshape(-1, 2)  # of each run
    for place, (first, end) in enumerate(edges):
        figure.add_vrect(
            x0=first - 0.5, x1=end - 0.5, fillcolor=THEMES[theme].masked, line_width=0, layer="below",
            name=name, showlegend=place == 0,
        )  # fmt: skip
    figure.update_layout(showlegend=len(edges) > 0, legend=LEGEND_ABOVE)


def _pool_columns(values: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Maxima over runs of columns, so that no one-column-wide feature falls between two pixels; and the run's width."""
    width = -(-values.shape[1] // most)
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % width)), constant_values=np.nan)
    return np.fmax.reduce(padded.reshape(len(values), -1, width), axis=2), width
