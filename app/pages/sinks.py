"""Attention sinks: keys that take much of the attention whatever the text says."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Input, Output, html

from workbench.analyses.labels import SINK_SCORES
from workbench.app.components import card, empty_figure, graph, on_card, plain_table, tiles
from workbench.app.jobs import Task
from workbench.app.recipes import SINK_LENGTH, Recipe, Shown, chosen_head
from workbench.app.selection import choose_on_click, map_card, map_outputs, score_map
from workbench.app.services import Services
from workbench.app.state import View

NAME, TITLE = "sinks", "Sinks"
EXPLANATION = (
    "Tokens that heads look at when they have nothing else to look at, most often the first one. A text longer than "
    f"{SINK_LENGTH} tokens is cut into sequences of {SINK_LENGTH}, so that position 0 is seen many times."
)
CONTROLS = {"sink_score": ("sink-score", "value")}
DEFINITIONS = (
    (
        "α of a key",
        "The mean weight that a key gets from the queries that may see it: those at and after it, or in encoders all. "
        "Only keys that at least 16 other queries may see count.",
    ),
    ("Sink rate", "The share of sequences, layers and heads in which α is above ε = 0.3 (Gu et al. 2024)."),
    ("Sink mass", "Weight on the first four tokens of a sequence (Xiao et al. 2023)."),
    (
        "Norm ratios",
        "‖v‖, or ‖v W_O‖ after the output projection, at the sink over that of the median key. Well below 1, the head "
        "looks there and takes little from it.",
    ),
)
TALL = 400


def layout(view: View) -> list[Any]:
    heads = map_card(NAME, "sink-score", view.sink_score, SINK_SCORES, TALL)
    positions = card(
        "Where the sinks are",
        graph("sinks-positions", "Sink rate of every key position", TALL),
        note=html.Span("", id="sinks-positions-note"),
    )
    norms = card(
        "What the sink carries",
        graph("sinks-norms", "Weight on the sink against the norm of what it adds, one point per head", TALL),
        note="Left of 1: what the head reads at the sink is smaller than what it reads elsewhere.",
    )
    kinds = card("Which tokens become sinks", html.Div(id="sinks-kinds"))
    return [html.Div(id="sinks-tiles"), html.Div([heads, positions, norms, kinds], className="columns")]


SINKS = Recipe("attention_sinks", "Attention sinks", reads="sequences", options={"n_tokens": SINK_LENGTH})


def figures(view: View) -> dict[str, Shown]:
    return {
        "sinks-map": Shown(SINKS, "map", {"score": view.sink_score, "chosen": chosen_head(view)}),
        "sinks-positions": Shown(SINKS, "positions"),
        "sinks-norms": Shown(SINKS, "norms"),
    }


def tasks(services: Services, view: View) -> list[Task]:
    return [services.task(view, SINKS)]


def register(app: Dash, services: Services) -> None:
    @app.callback(
        *map_outputs(NAME),
        Output("sinks-positions", "figure"),
        Output("sinks-positions-note", "children"),
        Output("sinks-norms", "figure"),
        Output("sinks-tiles", "children"),
        Output("sinks-kinds", "children"),
        Output("sink-score", "data"),
        Input("ready", "data"),
        Input("view", "data"),
        Input("scheme", "data"),
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, SINKS), figures(view)
        return (
            *head_map(result, view, scheme),
            on_card(shown["sinks-positions"].draw(result, scheme), TALL, revision="positions"),
            f"{result.evaluated_in_words()} Of {result.provenance.inputs}.",
            on_card(shown["sinks-norms"].draw(result, scheme), TALL, revision="norms"),
            numbers_that_matter(result),
            kind_table(result),
            score_options(result),
        )

    choose_on_click(app, ("sinks-map", "clickData"), ("sinks-norms", "clickData"))


def score_options(result: Any) -> list[dict[str, Any]]:
    """The scores to choose from; those that this model does not have cannot be chosen."""
    return [{"value": name, "label": label, "disabled": name not in result} for name, label in SINK_SCORES.items()]


def head_map(result: Any, view: View, scheme: str) -> tuple:
    if view.sink_score not in result:
        label = SINK_SCORES[view.sink_score]
        why = f"This model has no learned sinks, so<br>“{label}” has no value. Choose another score."
        return empty_figure(TALL, why), {"height": f"{TALL}px"}, ""
    return score_map(result, figures(view)["sinks-map"], SINK_SCORES, scheme, TALL)


def numbers_that_matter(result: Any) -> html.Div:
    position, rate, weight = result.sink_position, result["sink_rate"], result["sink_weight"]
    layer, head = (int(place) for place in np.unravel_index(np.nanargmax(weight), weight.shape))
    others = np.delete(rate, position)
    return tiles(
        ("Highest sink rate", f"{rate[position]:.0%}", f"of sequences × heads, at position {position}"),
        ("At any other position", f"{np.nanmax(others):.0%}" if np.isfinite(others).any() else "–", "at most"),
        ("Weight on it", f"{np.nanmean(weight):.2f}", "mean over all heads"),
        ("Most of all in", f"L{layer}H{head}", f"{weight[layer, head]:.2f} of its weight"),
        (
            "Norm of what it adds",
            f"× {np.nanmedian(result['output_norm_ratio']):.2f}",
            "of the median key's, median head",
        ),
    )


def kind_table(result: Any) -> Any:
    """Sink rate by kind of token, where the model has a tokenizer to tell kinds."""
    if "sink_rate_by_kind" not in result:
        return html.P("This model has no tokenizer, so its tokens have no kinds.", className="empty")
    counted = zip(result.coordinates["kind"], result["sink_rate_by_kind"], result["n_keys_by_kind"], strict=True)
    rows = [(kind.capitalize(), f"{rate:.1%}", f"{n:,}") for kind, rate, n in counted if n]
    return plain_table(("Kind of token", "Sink rate", "Keys counted"), rows)
