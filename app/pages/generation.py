"""Generation: a continuation token by token, what each step predicted, and where every head looked in it."""

from __future__ import annotations

import math
from typing import Any

import dash_mantine_components as dmc
import numpy as np
from dash import ClientsideFunction, Dash, Input, Output, html

from workbench.analyses.labels import GENERATION_SCORES
from workbench.app.components import about_score, card, graph, number, on_card, select, tiles, typed_field
from workbench.app.jobs import Task
from workbench.app.pages.pattern import visible
from workbench.app.recipes import HEAD_STATISTICS, Recipe, Shown, chosen_head
from workbench.app.selection import CHOSEN, LAYER_HEIGHT, choose_on_click
from workbench.app.services import Services, when_drawn
from workbench.app.state import MOST_DECIMALS, MOST_NEW, MOST_TEMPERATURE, View

NAME, TITLE = "generation", "Generation"
EXPLANATION = (
    "The model continues the text. Step through the tokens that it generates and see, for each, what it predicted and "
    "where every head looked. It goes on behind an end-of-text token, where a new text begins."
)
CONTROLS = {
    "new_tokens": ("new-tokens", "value"),
    "temperature": ("temperature", "value"),
    "draw": ("draw", "value"),
    "step": ("step", "value"),
    "step_score": ("step-score", "value"),
}
DEFINITIONS = (
    (
        "Step",
        "Step s has read the prompt and the s tokens generated before. The last token that it reads is its query, "
        "whose attention is shown; what it predicts is the token after it.",
    ),
    (
        "Probability, surprise",
        "Of the model's own prediction, whatever the temperature. Surprise is −log p of the generated token, entropy "
        "−Σ p log p over the vocabulary, both in nats.",
    ),
    (
        "Temperature",
        "0 takes the likeliest token; above, logits are divided by it and a token is drawn, the same for one seed.",
    ),
    (
        "On the prompt, on generated tokens",
        "Sums of the query's weights over the tokens of either part; with a learned sink they add up to less than 1.",
    ),
    (
        "Prefix matching",
        "Weight on all tokens that follow an earlier occurrence of the query's token (Olsson et al. 2022). Without one "
        "there is no value, which is grey.",
    ),
    (
        "One pass",
        "The numbers of all steps come from one pass over the whole text. In a causal model it equals generating token "
        "by token, up to rounding, because no token depends on later ones.",
    ),
)
TALL = 400
MOST_SHOWN = 400  # tokens of the prompt
LEAST_WEIGHT = 0.005  # a key with less is not named
STRONG = 0.4  # from this weight on a token's ground is dark enough for white letters


def layout(view: View) -> list[Any]:
    options = html.Div(
        [
            number("new-tokens", "New tokens", view.new_tokens, low=1, high=MOST_NEW, wait=500),
            _temperature(view.temperature),
            number("draw", "Seed", view.draw, high=2**31 - 1),
        ],
        className="toolbar",
        role="group",
        **{"aria-label": "How the text is continued"},
    )
    text = card(
        html.Span("Step by step", id="step-title"),
        html.Div(id="step-text", className="tokens", tabIndex="0", role="listbox", **{"aria-label": _STRIP}),
        html.Div("", id="step-line", className="token-line", role="status"),
        controls=[
            html.Div([_button("step-back", "← Back"), _button("step-on", "Next →")], className="buttons"),
            number("step", "Step", view.step, high=MOST_NEW),
            html.Div(
                dmc.Slider(
                    id="step-slider",
                    value=view.step,
                    min=0,
                    max=max(view.new_tokens - 1, 1),
                    step=1,
                    size="sm",
                    thumbLabel="Step",
                    label=None,
                ),
                className="step-slider",
            ),
        ],
        note="Behind the bar: generated. Framed: the token that this step generates; its query is the one before. "
        "Click a generated token, or use the arrow keys.",
        className="wide",
    )
    prediction = card(
        "Prediction of this step",
        graph("step-prediction", "Probability of the likeliest next tokens in this step", TALL),
        note=html.Span("", id="step-prediction-note"),
    )
    heads = card(
        "All heads in this step",
        graph("step-map", "Map of all heads by layer and head, coloured by the chosen share in this step", TALL),
        controls=[select("step-score", "What of a head's attention is shown", view.step_score, GENERATION_SCORES, 210)],
        note=html.Span("", id="step-map-note"),
    )
    head = card(
        html.Span("The chosen head in every step", id="step-head-title"),
        graph("step-head", "Where the chosen head looks in every step", TALL),
        note="Click a column to go to its step. Grey: no value.",
    )
    along = card(
        "How sure every step was",
        graph("step-curves", "Surprise and entropy of the prediction in every step", TALL),
        note="Click a point to go to its step.",
    )
    return [
        options,
        html.Div(id="step-tiles"),
        html.Div([text, prediction, heads, head, along], className="columns"),
    ]


_STRIP = "The text; arrow keys go from one generated token to the next"


def _button(id: str, text: str) -> dmc.Button:
    return dmc.Button(text, id=id, n_clicks=0, size="compact-sm", variant="default")


def _temperature(value: float) -> html.Label:
    field = dmc.NumberInput(
        id="temperature",
        value=value,
        min=0,
        max=MOST_TEMPERATURE,
        step=0.1,
        decimalScale=MOST_DECIMALS,
        clampBehavior="strict",
        debounce=500,
        size="xs",
        w=84,
        **{"aria-label": "Temperature"},
    )
    return typed_field("Temperature", field)


def generation(view: View) -> Recipe:
    options = {
        "n_tokens": view.new_tokens,
        "temperature": view.temperature or None,
        "seed": view.draw if view.temperature else None,
        "stop_at_eos": False,
    }
    return Recipe("generation_statistics", "Generation", options=options)


def figures(view: View) -> dict[str, Shown]:
    recipe, chosen = generation(view), chosen_head(view)

    def at_step(**more: Any) -> Any:
        return lambda result: {"step": shown_step(result, view), **more}

    shown = {
        "step-prediction": Shown(recipe, "prediction", at_step()),
        "step-map": Shown(
            recipe, "map", lambda result: at_step(score=shown_score(result, view), chosen=chosen)(result)
        ),
        "step-curves": Shown(recipe, "steps", at_step()),
    }
    if chosen is not None:
        shown["step-head"] = Shown(recipe, "head", at_step(layer=chosen[0], head=chosen[1]))
    return shown


def tasks(services: Services, view: View) -> list[Task]:
    recipes = [generation(view)] if view.has_head else [generation(view), HEAD_STATISTICS]
    return [services.task(view, recipe) for recipe in recipes]


def register(app: Dash, services: Services) -> None:
    drawn = when_drawn(NAME)

    @app.callback(
        Output("step-prediction", "figure"),
        Output("step-prediction-note", "children"),
        Output("step-map", "figure"),
        Output("step-map", "style"),
        Output("step-map-note", "children"),
        Output("step-curves", "figure"),
        Output("step-tiles", "children"),
        Output("step-score", "data"),
        Output("step-slider", "max"),
        *drawn,
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, generation(view)), figures(view)
        step, score = shown_step(result, view), shown_score(result, view)
        tall = max(TALL, LAYER_HEIGHT * result["entropy"].shape[1] + 90)
        return (
            on_card(shown["step-prediction"].draw(result, scheme), TALL, revision=f"prediction {step}"),
            about_prediction(result, step),
            on_card(shown["step-map"].draw(result, scheme), tall, revision="map"),
            {"height": f"{tall}px"},
            about_score(GENERATION_SCORES[score], result.quantities[score]),
            on_card(shown["step-curves"].draw(result, scheme), TALL, revision="steps"),
            numbers_that_matter(result, step),
            score_options(result),
            max(result.n_steps - 1, 1),
        )

    @app.callback(
        Output("step-head", "figure"),
        Output("step-head-title", "children"),
        Output("step-text", "children"),
        Output("step-line", "children"),
        Output("step-title", "children"),
        *drawn,
    )
    def draw_head(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result = services.result(view, generation(view))
        (layer, head), step = chosen_head(view) or (0, 0), shown_step(result, view)
        name = f"L{layer}H{head}"
        weights, others = result.row(step, layer, head)
        return (
            on_card(
                figures(view)["step-head"].draw(result, scheme), TALL, revision="head"
            ) if view.has_head else {},
            f"{name} in every step",
            token_strip(result, step, weights),
            strongest_keys(result, name, weights, others),
            f"Step {step} of {result.n_steps}: where {name} looks from token {result.query(step)}",
        )  # fmt: skip

    app.clientside_callback(
        ClientsideFunction("generation", "chooseStep"),
        CHOSEN,
        Output("step-slider", "value"),
        Input("step", "value"),
        Input("step-slider", "value"),
        Input("step-back", "n_clicks"),
        Input("step-on", "n_clicks"),
        Input("step-curves", "clickData"),
        Input("step-head", "clickData"),
        prevent_initial_call="initial_duplicate",  # the step that the page begins with is one to go on from
    )
    choose_on_click(app, ("step-map", "clickData"))


def shown_step(result: Any, view: View) -> int:
    """The step that is looked at: the view's, or the last where there are not so many."""
    return min(view.step, result.n_steps - 1)


def shown_score(result: Any, view: View) -> str:
    """The view's share, or the first where this model does not have it."""
    return view.step_score if view.step_score in result else next(iter(GENERATION_SCORES))


def score_options(result: Any) -> list[dict[str, Any]]:
    """What can be shown of heads; what this model does not have cannot be chosen."""
    return [
        {"value": name, "label": label, "disabled": name not in result} for name, label in GENERATION_SCORES.items()
    ]


def about_prediction(result: Any, step: int) -> str:
    place = result.query(step)
    read = visible(str(result.coordinates["position"][place]))
    return f"After token {place} “{read}”. The arrow marks the token that was generated, “{_token(result, step)}”."


def _token(result: Any, step: int) -> str:
    return visible(str(result["token"][step]))


def numbers_that_matter(result: Any, step: int) -> html.Div:
    rank, of_heads = result["rank"][step], result["generated_mass"][step]
    layer, head = (int(place) for place in np.unravel_index(of_heads.argmax(), of_heads.shape))
    most = f"mean over heads; most in L{layer}H{head}, {of_heads[layer, head]:.2f}" if step else "nothing is, yet"
    return tiles(
        ("Generated", f"“{_token(result, step)}”", f"in step {step} of 0 to {result.n_steps - 1}"),
        ("Its probability", f"{math.exp(-result['surprise'][step]):.3f}", f"rank {rank:,}"),
        ("Surprise", f"{result['surprise'][step]:.2f}", "nats"),
        ("Entropy of the prediction", f"{result['prediction_entropy'][step]:.2f}", "nats"),
        ("On generated tokens", f"{of_heads.mean():.2f}", most),
    )


def token_strip(result: Any, step: int, weights: np.ndarray) -> list[Any]:
    """The text, each token shaded by the weight that it gets; data-step is the step that generated a token."""
    texts, n_prompt = result.coordinates["position"], int(result.settings["n_prompt"])
    first = max(0, n_prompt - MOST_SHOWN)
    spans: list[Any] = []
    if first:
        before = f"{first:,} tokens before, {weights[:first].sum():.3f} of the weight … "
        spans.append(html.Span(before, className="muted"))
    for position in range(first, len(texts)):
        text, weight = str(texts[position]), float(weights[position])
        made_in = position - n_prompt
        given: dict[str, Any] = {
            "title": f"token {position}: {weight:.3f}",
            "style": {"--w": f"{math.sqrt(weight):.3f}"},
        }
        names = ["step-token", *(["strong"] if weight > STRONG else [])]
        if position == n_prompt:
            spans.append(html.Span("", className="step-bar", role="presentation"))
        if made_in >= 0:
            names += ["generated", *(["chosen"] if made_in == step else []), *(["later"] if made_in > step else [])]
            given |= {"data-step": str(made_in), "role": "option", "aria-selected": str(made_in == step).lower()}
        spans.append(html.Span(visible(text), className=" ".join(names), **given))
        if "\n" in text:
            spans.append(html.Br())
    return spans


def strongest_keys(result: Any, name: str, weights: np.ndarray, others: float) -> list[Any]:
    """The keys that a head looks at most, in words."""
    texts = result.coordinates["position"]
    order = [int(place) for place in np.argsort(-weights, kind="stable")[:6] if weights[place] >= LEAST_WEIGHT]
    named = [f"{visible(str(texts[place])).strip()} ({place}) {weights[place]:.3f}" for place in order]
    rest = float(weights.sum() + others - weights[order].sum())
    said = [*named, *([f"other tokens {rest:.3f}"] if rest >= LEAST_WEIGHT else [])]
    return [html.B(name), " looks at " + (" · ".join(said) or "no token")]
