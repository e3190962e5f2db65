"""A sum and its parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import LEGEND_ABOVE, THEMES, blank_figure


def part_bars(parts: Mapping[str, float], total: float, *, n_parts: int, label: str, theme: str = "light") -> go.Figure:
    """A bar for each of the largest parts, each from where the one above it ends; the last is their sum.

    Args:
        parts: name → value; all of them add up to ``total``. Those beyond the ``n_parts`` of the largest magnitude are
            one bar.
        label: of the axis, which is what the parts add up to.
    """
    kept = sorted(sorted(parts, key=lambda name: -abs(parts[name]))[:n_parts], key=lambda name: -parts[name])
    shown = {name: parts[name] for name in kept}
    if len(parts) > len(kept):
        shown[f"{len(parts) - len(kept)} others"] = sum(parts.values()) - sum(shown.values())
    values = np.array([*shown.values()])
    starts = np.concatenate(([0.0], values.cumsum()[:-1]))
    style = THEMES[theme]
    figure = blank_figure(theme, height=24 * len(shown) + 150)
    groups = {
        "towards the target": (values >= 0, style.series[1]),  # red and blue, as in maps of signed values
        "towards the foil": (values < 0, style.series[0]),
    }
    for name, (chosen, colour) in groups.items():
        names = [part for part, is_chosen in zip(shown, chosen, strict=True) if is_chosen]
        _add_bars(figure, name, names, values[chosen], starts[chosen], colour)
    _add_bars(figure, "sum", ["sum"], np.array([total]), np.zeros(1), style.text)
    ends = np.concatenate((starts, starts + values, [0.0, total]))
    low, high = float(ends.min()), float(ends.max())
    room = 0.12 * (high - low or 1.0)  # for the numbers
    figure.add_vline(x=0, line={"color": style.text, "width": 1})
    figure.update_xaxes(title=f"{label} (logits)", range=(low - room, high + room))
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=[*shown, "sum"], autorange="reversed", dtick=1,
        showgrid=False,
    )  # fmt: skip
    return figure.update_layout(bargap=0.3, barmode="overlay", showlegend=True, legend=LEGEND_ABOVE)


def _add_bars(
    figure: go.Figure, name: str, names: list[str], values: np.ndarray, starts: np.ndarray, colour: str
) -> None:
    figure.add_trace(
        go.Bar(
            x=values,
            base=starts,
            y=names,
            customdata=names,
            name=name,
            orientation="h",
            marker={"color": colour, "line_width": 0},
            text=[f"{value:+.2f}" for value in values],
            textposition="outside",
            textfont_size=10,
            cliponaxis=False,
            hovertemplate="%{customdata}: %{text}<extra></extra>",
        )
    )
