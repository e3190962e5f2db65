"""Figures of what gradients attribute to components and to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.analyses.figures.style import (
    COLOURBAR_ROOM,
    SIGNED_SCALE,
    THEMES,
    blank_figure,
    colour_of_text,
    colours,
    show_token,
    token_labels,
)

CELLS_WITH_TEXT = 600
SHOWN_CHARACTERS = 8


def layer_position_map(values: np.ndarray, *, label: str, theme: str = "light") -> go.Figure:
    """Signed values of every layer at every position, [layer, position]; NaN is grey."""
    n_layers, n_positions = values.shape
    figure = blank_figure(theme, height=max(280, 19 * n_layers + 90), masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    hover = "layer %{y}, position %{x}: %{z:.4f}<extra></extra>"
    figure.add_trace(go.Heatmap(z=values, hovertemplate=hover, **colours(values, label, None, True)))
    figure.update_xaxes(title="position", dtick=1 if n_positions <= 32 else 8, showgrid=False)
    figure.update_yaxes(title="layer", dtick=1 if n_layers <= 40 else 4, autorange="reversed", showgrid=False)
    return figure


def token_bars(values: np.ndarray, tokens: Sequence[str], *, y_label: str, theme: str = "light") -> go.Figure:
    """One bar per token of a text; values are [position]."""
    figure = blank_figure(theme, height=380)
    style = THEMES[theme]
    figure.add_trace(
        go.Bar(
            x=token_labels(tokens),
            y=values,
            marker={"color": [style.series[0] if value >= 0 else style.series[1] for value in values], "line_width": 0},
            hovertemplate="%{x}: %{y:+.4f}<extra></extra>",
        )
    )
    figure.add_hline(y=0, line={"color": style.text, "width": 1})
    figure.update_xaxes(title="text", type="category", tickangle=-60, showgrid=False)
    figure.update_yaxes(title=y_label)
    return figure


def token_map(values: np.ndarray, tokens: np.ndarray, *, label: str, theme: str = "light") -> go.Figure:
    """Signed values of every token of several texts, a row each, with the tokens as text where there is room.

    Args:
        values: [prompt, position]; NaN is grey.
        tokens: text [prompt, position].
    """
    n_prompts, n_positions = values.shape
    scale = colours(values, label, None, True)
    figure = blank_figure(theme, height=max(260, 22 * n_prompts + 110), masked=True)
    figure.update_layout(margin=COLOURBAR_ROOM)
    figure.add_trace(
        go.Heatmap(
            z=values,
            customdata=np.vectorize(show_token, otypes=[object])(tokens),
            hovertemplate="prompt %{y}, %{customdata} at %{x}: %{z:+.4f}<extra></extra>",
            **scale,
        )
    )
    if values.size <= CELLS_WITH_TEXT and n_positions <= 24:
        shares = (values + scale["zmax"]) / (2 * scale["zmax"])
        figure.update_layout(
            annotations=[
                {
                    "x": place,
                    "y": prompt,
                    "text": _short(str(tokens[prompt, place])),
                    "showarrow": False,
                    "font": {"size": 9, "color": colour_of_text(SIGNED_SCALE, float(shares[prompt, place]))},
                }
                for prompt, place in np.argwhere(np.isfinite(values)).tolist()
            ]
        )
    figure.update_xaxes(title="position", dtick=1 if n_positions <= 32 else 8, showgrid=False)
    figure.update_yaxes(
        title="prompt", dtick=1 if n_prompts <= 40 else 10, autorange="reversed", showgrid=False, zeroline=False
    )
    return figure


def _short(text: str) -> str:
    """A token on a cell; the space before a word goes, as the cells stand apart."""
    text = text.removeprefix(" ") or text
    return show_token(text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…")
