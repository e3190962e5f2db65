"""Figures of pairs of heads."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import COLOURBAR_ROOM, THEMES, blank_figure, colours

HEADS_WITH_LABELS = 24  # of more heads than these, the first of each layer is named


def pair_map(values: np.ndarray, *, n_heads: int, label: str, theme: str = "light") -> go.Figure:
    """Every head against every head of earlier layers, signed about 0; layers are parted by lines.

    Args:
        values: [reader, source], heads counted through all layers, ``n_heads`` in each; NaN is grey.
    """
    n = len(values)
    names = [f"L{place // n_heads}H{place % n_heads}" for place in range(n)]
    ticks = names if n <= HEADS_WITH_LABELS else names[:: n_heads * max(1, n // n_heads // 15)]
    figure = blank_figure(theme, height=min(760, max(420, 16 * n + 110)), masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    figure.add_trace(
        go.Heatmap(
            z=values, x=names, y=names, hovertemplate="%{x} → %{y}: %{z:+.4f}<extra></extra>",
            **colours(values, label, None, True),
        )
    )  # fmt: skip
    for boundary in range(n_heads, n, n_heads):
        line = {"color": THEMES[theme].paper, "width": 1 if n <= HEADS_WITH_LABELS * 4 else 0.4}
        figure.add_hline(y=boundary - 0.5, line=line)
        figure.add_vline(x=boundary - 0.5, line=line)
    figure.update_xaxes(
        title="head that writes", type="category", tickvals=ticks, tickangle=-90, showgrid=False, constrain="domain"
    )
    figure.update_yaxes(
        title="head that reads", type="category", tickvals=ticks, autorange="reversed", showgrid=False,
        scaleanchor="x", constrain="domain",
    )  # fmt: skip
    return figure
