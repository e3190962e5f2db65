"""Who feeds whom: heads in two columns, joined by lines as wide as the effect."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import LEGEND_ABOVE, THEMES, blank_figure

WIDEST = 12.0  # pixels of the largest effect
LABELS_AT = 0.74  # of a line's way, where the lines of one sender have parted


def circuit_view(
    senders: Mapping[str, str],
    receivers: Mapping[str, str],
    effects: np.ndarray,
    *,
    named: Mapping[str, np.ndarray],
    rest: str,
    hover: str,
    theme: str = "light",
) -> go.Figure:
    """Senders at the left, receivers at the right, a line for each pair that has an effect.

    Args:
        senders, receivers: name → a word on it, in small letters below.
        effects: [receiver, sender]; NaN draws no line.
        named: kind → bool [receiver, sender], the pairs whose lines are coloured and carry their effect as a number.
        rest: what all other pairs are called; their lines are grey.
        hover: what an effect is.
    """
    style = THEMES[theme]
    rows = max(len(senders), len(receivers))
    figure = blank_figure(theme, height=max(320, 56 * rows + 90))
    places = {
        side: [(x, rows * (1 - (place + 0.5) / len(names))) for place in range(len(names))]
        for side, x, names in (("left", 0.0, senders), ("right", 1.0, receivers))
    }
    largest = float(np.nanmax(np.abs(effects), initial=0.0)) or 1.0
    others = np.isfinite(effects) & ~np.any([*named.values()], axis=0)
    groups = {rest: (others, style.masked)}
    groups |= {name: (pairs, style.series[place]) for place, (name, pairs) in enumerate(named.items())}
    for name, (pairs, colour) in groups.items():
        for first, (receiver, sender) in enumerate(np.argwhere(pairs).tolist()):
            start, end, effect = places["left"][sender], places["right"][receiver], effects[receiver, sender]
            figure.add_trace(
                go.Scatter(
                    x=np.linspace(start[0], end[0], 21), y=np.linspace(start[1], end[1], 21), mode="lines",
                    line={"width": max(1.0, WIDEST * abs(effect) / largest), "color": colour},
                    name=name, legendgroup=name, showlegend=first == 0, legendrank=2000 if name == rest else 1000,
                    hovertemplate=f"{list(senders)[sender]} → {list(receivers)[receiver]}<br>{hover}: {effect:+.3f}"
                    "<extra></extra>",
                )
            )  # fmt: skip
            if name != rest:
                figure.add_annotation(
                    x=start[0] + LABELS_AT * (end[0] - start[0]), y=start[1] + LABELS_AT * (end[1] - start[1]),
                    text=f"{effect:+.2f}", showarrow=False, font_size=11, bgcolor=style.paper, borderpad=1,
                )  # fmt: skip
    for side, names in (("left", senders), ("right", receivers)):
        x, y = zip(*places[side], strict=True)
        figure.add_trace(
            go.Scatter(
                x=x, y=y, mode="markers", showlegend=False, hoverinfo="skip",
                marker={"size": 13, "color": style.paper, "line": {"width": 2, "color": style.text}},
            )
        )  # fmt: skip
        for (at, height), (name, words) in zip(places[side], names.items(), strict=True):
            beside = {"xanchor": "right", "xshift": -14} if side == "left" else {"xanchor": "left", "xshift": 14}
            beside |= {"x": at, "y": height, "showarrow": False}
            figure.add_annotation(text=f"<b>{name}</b>", yshift=7, **beside)
            figure.add_annotation(text=words, font_size=10, yshift=-8, **beside)
    figure.update_xaxes(visible=False, range=[-0.5, 1.6], fixedrange=True)
    figure.update_yaxes(visible=False, range=[0, rows], fixedrange=True)
    return figure.update_layout(showlegend=True, legend=LEGEND_ABOVE, margin={"l": 10, "r": 10, "t": 40, "b": 10})
