"""What attention weights are held against, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import COLOURBAR_ROOM, SCORE_SCALE, THEMES, blank_figure, colourbar

MANY = 400  # points, from where on they are small and translucent


def weight_scatter(
    x: np.ndarray,
    y: np.ndarray,
    *,
    layers: np.ndarray,
    names: Sequence[str],
    x_label: str,
    y_label: str,
    limit: tuple[str, float] | None = None,
    theme: str = "light",
) -> go.Figure:
    """A point per head or layer and prompt over its largest weight, coloured by layer.

    Args:
        x, y, layers, names: of every point.
        limit: name and height of a line that no point can lie above.
    """
    figure = blank_figure(theme, height=460)
    figure.update_layout(margin=COLOURBAR_ROOM)
    few = len(x) <= MANY
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            customdata=list(names),
            mode="markers",
            marker={
                "color": layers,
                "colorscale": SCORE_SCALE,
                "size": 8 if few else 5,
                "opacity": 0.9 if few else 0.6,
                "line": {"width": 0.5 if few else 0, "color": THEMES[theme].text},
                "colorbar": colourbar("layer") | {"dtick": max(1, (int(layers.max()) + 1) // 6)},
            },
            hovertemplate=f"%{{customdata}}<br>{x_label}: %{{x:.4f}}<br>{y_label}: %{{y:.4f}}<extra></extra>",
            cliponaxis=False,
        )
    )
    if limit is not None:
        name, height = limit
        figure.add_hline(
            y=height, line={"color": THEMES[theme].text, "width": 1, "dash": "dot"}, annotation_text=name,
            annotation_position="bottom left",
        )  # fmt: skip
    figure.update_xaxes(title=x_label, range=[-0.02, 1.02])
    top = max(float(np.max(y)), 0.01 if limit is None else limit[1])
    figure.update_yaxes(title=y_label, range=[-0.03 * top, 1.06 * top])
    return figure
