"""Attention sinks: keys that take much of the attention whatever the text says."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Output, html, no_update

from workbench.analyses.labels import SINK_SCORES
from workbench.app.components import card, empty_figure, graph, on_card, plain_table, tiles
from workbench.app.jobs import Task
from workbench.app.on_demand import OnDemand
from workbench.app.recipes import SINK_LENGTH, Recipe, Shown, chosen_head
from workbench.app.selection import choose_on_click, map_card, map_outputs, score_map
from workbench.app.services import Services, when_drawn
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
    (
        "Massive activations",
        "Elements of the residual stream with |x| > 100 and > 1000 × the median |x| of their depth (Sun et al. 2024); "
        "depth 0 is the embedding.",
    ),
    (
        "Streaming",
        "Loss when only so many tokens are remembered: the last ones (window), the first 4 and the last (sink tokens + "
        "recent; Xiao et al. 2023), as many tokens from the middle in place of the first (the control), or the window "
        "read anew for every query. Excess is the loss less that with sink tokens.",
    ),
    (
        "What the sink is for",
        "Later queries lose the edge to the sink, its value, or get the value’s mean over other texts. No-op: dropping "
        "the value changes nothing. Implicit bias: dropping it does, the constant does not (Sun et al. 2024). Carries "
        "information: both do. The same edits of a key beside it are the control.",
    ),
)
TALL = 400
WINDOW, STREAMED = 64, 257  # tokens that are remembered, and that are read
EDITED = (20, SINK_LENGTH)  # sequences, as many as intervals need, and tokens of each
MASSIVE = OnDemand(
    "massive",
    "What makes it a sink",
    "Look for massive activations",
    "The largest elements of the residual stream at every depth, at the sink and elsewhere. One run over the "
    "sequences, one at a time.",
)
STREAMING = OnDemand(
    "streaming",
    "Forgetting, with and without the sink",
    "Run the streaming experiment",
    f"The loss while only {WINDOW} tokens are remembered, in four ways, and with all of them. The first {STREAMED} "
    "tokens are read; of a shorter text, over and over. Some 600 runs of one token, with as many keys and values in "
    "memory: seconds on the demo model, a minute or more on larger ones.",
)
PURPOSE = OnDemand(
    "purpose",
    "What the sink is for",
    "Cut the sink",
    f"What the loss becomes without the sink’s edges, without its value, or with a constant instead, in {EDITED[0]} "
    f"sequences of {EDITED[1]} tokens; a shorter text is taken over and over. Some 50 runs over them: seconds on the "
    "demo model, minutes on larger ones.",
)


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
    on_demand = [
        asked.card(graph(f"sinks-{asked.name}", asked.title, TALL), note=html.Span("", id=f"{asked.name}-note"))
        for asked in (MASSIVE, STREAMING, PURPOSE)
    ]
    cards = [heads, positions, norms, kinds, *on_demand]
    return [html.Div(id="sinks-tiles"), html.Div(cards, className="columns")]


SINKS = Recipe("attention_sinks", "Attention sinks", reads="sequences", options={"n_tokens": SINK_LENGTH})
ACTIVATIONS = Recipe("massive_activations", "Massive activations", reads="sequences")
FORGETTING = Recipe(
    "streaming_perplexity",
    "Streaming",
    reads="filled",
    filling=(1, STREAMED),
    options={"window": WINDOW, "recompute_every": 4},
)
EDITS = Recipe("sink_interventions", "Cutting the sink", reads="filled", filling=EDITED, options={"n_heads": 4})


def figures(view: View) -> dict[str, Shown]:
    return {
        "sinks-map": Shown(SINKS, "map", {"score": view.sink_score, "chosen": chosen_head(view)}),
        "sinks-positions": Shown(SINKS, "positions"),
        "sinks-norms": Shown(SINKS, "norms"),
        "sinks-massive": Shown(ACTIVATIONS, "magnitudes"),
        "sinks-streaming": Shown(FORGETTING, "curves"),
        "sinks-purpose": Shown(EDITS, "heads"),
    }


def tasks(services: Services, view: View) -> list[Task]:
    shown = figures(view)
    further = [
        task
        for asked in (MASSIVE, STREAMING, PURPOSE)
        for task in asked.tasks(services, view, shown[f"sinks-{asked.name}"].recipe)
    ]
    return [services.task(view, SINKS), *further]


def register(app: Dash, services: Services) -> None:
    @app.callback(
        *map_outputs(NAME),
        Output("sinks-positions", "figure"),
        Output("sinks-positions-note", "children"),
        Output("sinks-norms", "figure"),
        Output("sinks-tiles", "children"),
        Output("sinks-kinds", "children"),
        Output("sink-score", "data"),
        *when_drawn(NAME),
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

    for asked in (MASSIVE, STREAMING, PURPOSE):
        _register_on_demand(app, services, asked)
    choose_on_click(app, ("sinks-map", "clickData"), ("sinks-norms", "clickData"))


def _register_on_demand(app: Dash, services: Services, asked: OnDemand) -> None:
    name = f"sinks-{asked.name}"

    @app.callback(
        *asked.outputs,
        Output(name, "figure"),
        Output(f"{asked.name}-note", "children"),
        *when_drawn(NAME),
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        shown = figures(view)[name]
        state, result = asked.state(services, view, shown.recipe)
        if result is None:
            return *state, no_update, no_update
        about = purposes(result) if asked is PURPOSE else in_words(result)
        return *state, on_card(shown.draw(result, scheme), TALL, revision=name), about

    asked.register(app)


def purposes(result: Any) -> list[Any]:
    """What the sink is for, in all layers and by head."""
    heads = [f"{verdict}: {', '.join(names)}" for verdict, names in result.heads_by_verdict().items()]
    lines = f"All layers: {result.verdict('all layers')}.", f"By head: {'; '.join(heads)}."
    return [html.Div(f"Of {result.provenance.inputs}."), *(html.Div(line) for line in lines)]


def in_words(result: Any) -> list[Any]:
    """What a result says of itself, one sentence a line."""
    lines = result.summary().splitlines()[1:]  # the first is the provenance
    return [html.Div(f"Of {result.provenance.inputs}."), *(html.Div(line) for line in lines)]


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
    others, ratio = np.delete(rate, position), result["output_norm_ratio"]
    median_ratio = f"× {np.nanmedian(ratio):.2f}" if np.isfinite(ratio).any() else "–"
    return tiles(
        ("Highest sink rate", f"{rate[position]:.0%}", f"of sequences × heads, at position {position}"),
        ("At any other position", f"{np.nanmax(others):.0%}" if np.isfinite(others).any() else "–", "at most"),
        ("Weight on it", f"{np.nanmean(weight):.2f}", "mean over all heads"),
        ("Most of all in", f"L{layer}H{head}", f"{weight[layer, head]:.2f} of its weight"),
        ("Norm of what it adds", median_ratio, "of the median key's, median head"),
    )


def kind_table(result: Any) -> Any:
    """Sink rate by kind of token, where the model has a tokenizer to tell kinds."""
    if "sink_rate_by_kind" not in result:
        return html.P("This model has no tokenizer, so its tokens have no kinds.", className="empty")
    counted = zip(result.coordinates["kind"], result["sink_rate_by_kind"], result["n_keys_by_kind"], strict=True)
    rows = [(kind.capitalize(), f"{rate:.1%}", f"{n:,}") for kind, rate, n in counted if n]
    return plain_table(("Kind of token", "Sink rate", "Keys counted"), rows)
