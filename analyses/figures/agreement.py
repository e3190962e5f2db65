"""Figures that hold what is read off a model against what is done to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.analyses.figures.heads import label_places
from workbench.analyses.figures.style import (
    COLOURBAR_ROOM,
    LEGEND_ABOVE,
    SCORE_SCALE,
    THEMES,
    apply_style,
    blank_figure,
    colourbar,
)

BINS = 24  # of each marginal
DECADES = 3.5  # of effects that the axis spans below the largest; smaller ones stand at its end
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x")


def quadrants(
    x: np.ndarray,
    y: np.ndarray,
    *,
    groups: Mapping[str, np.ndarray],
    named: Mapping[str, np.ndarray],
    thresholds: tuple[float, float, float, float],
    x_label: str,
    y_label: str,
    note: str,
    n_labels: int = 5,
    theme: str = "light",
) -> go.Figure:
    """One point per head, and the distributions of both axes beside them; x and y ≥ 0 are [layer, head].

    The y axis is logarithmic.

    Args:
        groups: name → bool [layer, head], drawn in this order with a colour and a symbol each; those of the last are
            grey.
        named: name of a group → [layer, head], the heads with the largest values are named, as far as there is room.
        thresholds: what is low and what is high on x, and what is low and what is high on y, as lines.
        note: a line of text within the plot.
        n_labels: so many heads of a group are named.
    """
    colours, style = THEMES[theme].series, THEMES[theme]
    largest = float(np.nanmax(y)) or 1.0
    lowest = np.log10(largest) - DECADES
    heights = np.log10(np.maximum(y, 10**lowest))
    figure = make_subplots(
        rows=2, cols=2, row_heights=[0.14, 0.86], column_widths=[0.88, 0.12], shared_xaxes=True, shared_yaxes=True,
        horizontal_spacing=0.02, vertical_spacing=0.02,
    )  # fmt: skip
    apply_style(figure, theme, height=540)
    names = np.array([[f"L{layer}H{head}" for head in range(x.shape[1])] for layer in range(x.shape[0])])
    flat = {name: np.flatnonzero(chosen) for name, chosen in groups.items()}
    *_, rest = flat
    first = [flat[name][np.argsort(-by.flat[flat[name]], kind="stable")[:n_labels]] for name, by in named.items()]
    order = [int(turn[i]) for i in range(n_labels) for turn in first if i < len(turn)]
    sides = label_places(np.stack([x.reshape(-1), heights.reshape(-1)]), np.array(order, dtype=int), right=1.02)
    for place, name in reversed(list(enumerate(flat))):
        points = flat[name]
        figure.add_trace(
            go.Scatter(
                x=x.flat[points],
                y=10 ** heights.flat[points],
                name=f"{name} ({len(points)})",
                customdata=np.stack([names.flat[points].astype(object), y.flat[points]], axis=-1),
                meta=["head", y_label],
                mode="markers+text",
                text=[names.flat[point] if point in sides else "" for point in points],
                textposition=[sides.get(int(point), "top right") for point in points],
                textfont={"size": 11},
                marker={
                    "color": style.masked if name == rest else colours[place],
                    "symbol": SYMBOLS[place],
                    "size": 7 if name == rest else 9,
                    "line": {"width": 0.6, "color": style.text},
                },
                hovertemplate=f"%{{customdata[0]}}<br>{x_label}: %{{x:.4f}}<br>{y_label}: %{{customdata[1]:.4g}}",
                hoverlabel_namelength=0,
                cliponaxis=False,
                legendrank=place,
            ),
            2,
            1,
        )
    _marginals(figure, x, heights, lowest, style.series[0])
    _threshold_lines(figure, thresholds, lowest, style.text)
    figure.add_annotation(
        text=note, xref="x3 domain", yref="y3 domain", x=0.995, y=0.01, xanchor="right", yanchor="bottom",
        showarrow=False, font_size=11, bgcolor=style.paper,
    )  # fmt: skip
    figure.update_xaxes(title=x_label, row=2, col=1)
    ticks = [float(f"1e{power}") for power in range(int(np.floor(lowest)), int(np.log10(largest)) + 2)]
    figure.update_yaxes(
        title=f"{y_label}, log scale", type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks],
        range=[lowest - 0.12, np.log10(largest) + 0.25], row=2,
    )  # fmt: skip
    count = {"showgrid": False, "tickfont_size": 9, "title": {"text": "heads", "font_size": 10}}
    figure.update_yaxes(**count, tickvals=[max(figure.data[-2].y)], row=1, col=1)
    figure.update_xaxes(**count, tickvals=[max(figure.data[-1].x)], row=2, col=2)
    figure.update_yaxes(title="", row=2, col=2)
    return figure.update_layout(showlegend=True, legend=LEGEND_ABOVE | {"y": 1.01}, bargap=0, margin_t=54)


def _marginals(figure: go.Figure, x: np.ndarray, heights: np.ndarray, lowest: float, colour: str) -> None:
    bars = {"marker": {"color": colour, "line_width": 0}, "showlegend": False, "hoverinfo": "skip"}
    counts, edges = np.histogram(x[np.isfinite(x)], bins=BINS)
    figure.add_trace(go.Bar(x=(edges[1:] + edges[:-1]) / 2, y=counts, width=np.diff(edges), **bars), 1, 1)
    counts, edges = np.histogram(heights[np.isfinite(heights)], bins=BINS, range=(lowest, float(np.nanmax(heights))))
    # On a logarithmic axis a bar's width is not what it is given as, so the distribution is an outline of steps.
    figure.add_trace(
        go.Scatter(
            x=np.repeat(counts, 2), y=10 ** np.repeat(edges, 2)[1:-1], mode="lines", line={"width": 0},
            fill="tozerox", fillcolor=colour, showlegend=False, hoverinfo="skip",
        ), 2, 2,
    )  # fmt: skip


def _threshold_lines(
    figure: go.Figure, thresholds: tuple[float, float, float, float], lowest: float, colour: str
) -> None:
    low_x, high_x, low_y, high_y = thresholds
    for value, dash in ((low_x, "dot"), (high_x, "dash")):
        figure.add_vline(x=value, line={"color": colour, "width": 1, "dash": dash}, row=2, col=1)
    for value, dash in ((low_y, "dot"), (high_y, "dash")):
        if value > 10**lowest:
            figure.add_hline(y=value, line={"color": colour, "width": 1, "dash": dash}, row=2, col=1)


def agreement_dots(
    names: Sequence[str],
    series: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    *,
    filled: Sequence[np.ndarray],
    x_label: str,
    theme: str = "light",
) -> go.Figure:
    """Coefficients between −1 and 1: a row per name, a marker with its interval per series.

    Args:
        series: name → (values, lower ends, upper ends), each [name]; NaN ends draw no interval.
        filled: for each series bool [name]; the others are hollow.
    """
    figure = blank_figure(theme, height=max(260, 46 * len(names) + 110))
    figure.add_vline(x=0, line={"color": THEMES[theme].text, "width": 1})
    for place, (name, (values, low, high)) in enumerate(series.items()):
        colour, symbol = THEMES[theme].series[place], SYMBOLS[place]
        figure.add_trace(
            go.Scatter(
                x=values,
                y=list(names),
                name=name,
                mode="markers",
                orientation="h",
                marker={
                    "color": colour,
                    "size": 9,
                    "symbol": [symbol if fill else f"{symbol}-open" for fill in filled[place]],
                    "line": {"width": 1.6, "color": colour},
                },
                error_x={
                    "array": np.nan_to_num(high - values), "arrayminus": np.nan_to_num(values - low),
                    "thickness": 1.4, "width": 3,
                },
                customdata=np.stack([low, high], axis=-1),
                meta=[f"{x_label}, low", f"{x_label}, high"],
                hovertemplate="%{y}, " + name + ": %{x:+.3f} [%{customdata[0]:+.3f}, %{customdata[1]:+.3f}]",
                hoverlabel_namelength=0,
            )
        )  # fmt: skip
    ends = np.nan_to_num([end for values in series.values() for end in values])  # 0 is always in sight
    figure.update_xaxes(title=x_label, zeroline=False, range=[float(ends.min()) - 0.05, float(ends.max()) + 0.05])
    figure.update_yaxes(autorange="reversed", type="category")
    return figure.update_layout(scattermode="group", scattergap=0.4, showlegend=True, legend=LEGEND_ABOVE)


def diagonal(
    x: np.ndarray,
    y: np.ndarray,
    *,
    names: Sequence[str],
    x_label: str,
    y_label: str,
    note: str = "",
    n_labels: int = 8,
    theme: str = "light",
) -> go.Figure:
    """One point per component around the line y = x; those furthest from it are named.

    Args:
        x, y: of the same shape; components without a value are left out.
        names: of the components, in order.
        note: a line of text within the plot.
    """
    points = np.stack([x.reshape(-1), y.reshape(-1)])
    known = np.isfinite(points).all(axis=0)
    points, shown = points[:, known], [name for name, is_known in zip(names, known, strict=True) if is_known]
    distances = np.abs(points[1] - points[0])
    furthest = np.argsort(-distances, kind="stable")[:n_labels]
    style, ends = THEMES[theme], [float(points.min()), float(points.max())]
    with_line = np.hstack([points, [ends, ends]])
    sides = label_places(with_line, furthest[distances[furthest] > distances.max() / 20])
    figure = blank_figure(theme, height=460)
    line = {"color": style.text, "width": 1, "dash": "dot"}
    figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip"))
    figure.add_trace(
        go.Scatter(
            x=points[0],
            y=points[1],
            customdata=shown,
            mode="markers+text",
            text=[name if place in sides else "" for place, name in enumerate(shown)],
            textposition=[sides.get(place, "top right") for place in range(len(shown))],
            marker={"color": style.series[0], "size": 8, "line": {"width": 0.5, "color": style.text}},
            hovertemplate=f"%{{customdata}}<br>{x_label}: %{{x:+.4f}}<br>{y_label}: %{{y:+.4f}}<extra></extra>",
            cliponaxis=False,
        )
    )
    if note:
        figure.add_annotation(
            text=note, xref="x domain", yref="y domain", x=0.995, y=0.01, xanchor="right", yanchor="bottom",
            showarrow=False, font_size=11, bgcolor=style.paper,
        )  # fmt: skip
    room = ends[1] - ends[0] or 1.0  # on the right for labels, which stand beside their points
    figure.update_xaxes(title=x_label, range=[ends[0] - 0.05 * room, ends[1] + 0.12 * room])
    figure.update_yaxes(title=y_label)
    return figure


def deletion(
    names: Sequence[str],
    shares: np.ndarray,
    panels: Mapping[str, np.ndarray],
    *,
    y_label: str,
    theme: str = "light",
) -> go.Figure:
    """Curves over the share of items, a panel per entry of ``panels`` → [name, share], a line per name in each."""
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, subplot_titles=list(panels))
    figure.update_annotations(font_size=12)
    apply_style(figure, theme, height=430)
    colours, dashes = THEMES[theme].series, ("solid", "dash", "dot")
    for column, (panel, values) in enumerate(panels.items(), start=1):
        for place, name in enumerate(names):
            figure.add_trace(
                go.Scatter(
                    x=100 * shares,
                    y=values[place],
                    name=name,
                    mode="lines+markers",
                    line={"color": colours[place % len(colours)], "width": 2, "dash": dashes[place // len(colours)]},
                    marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 7},
                    legendgroup=name,
                    showlegend=column == 1,
                    customdata=[panel] * len(shares),
                    meta=["panel"],
                    hovertemplate=name + ", %{x:g} %: %{y:.4f}<extra></extra>",
                ),
                1,
                column,
            )
    figure.update_xaxes(title="tokens (%)", type="log", tickvals=100 * shares)
    figure.update_yaxes(title=y_label, col=1)
    return figure.update_layout(showlegend=True, legend={"x": 1.02, "y": 1}, margin_r=20)


def source_map(values: np.ndarray, *, names: Sequence[str], tokens: Sequence[str], theme: str = "light") -> go.Figure:
    """A row per measure over source tokens, each row over its largest value; values ≥ 0 are [name, token]."""
    largest = np.nanmax(values, axis=1, keepdims=True)
    figure = blank_figure(theme, height=30 * len(names) + 150, masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    figure.add_trace(
        go.Heatmap(
            z=values / np.where(largest > 0, largest, 1),
            x=list(tokens),
            y=list(names),
            customdata=values,
            colorscale=SCORE_SCALE,
            zmin=0,
            zmax=1,
            colorbar=colourbar("share of the row's largest"),
            hovertemplate="%{x}<br>%{y}: %{customdata:.4g}<extra></extra>",
        )
    )
    figure.update_xaxes(title="source token and its position", type="category", showgrid=False, tickangle=90, dtick=1)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return figure
