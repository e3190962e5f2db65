"""Ablation versus attention: do the heads and tokens that are attended decide the answer?"""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
import numpy as np
from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html

from workbench.analyses.labels import ABLATIONS, ATTENTION_MEASURES, TASKS
from workbench.app.components import card, graph, number, on_card, plain_table, select, tiles
from workbench.app.jobs import Task
from workbench.app.recipes import Recipe, Shown, chosen_head
from workbench.app.selection import LAYER_HEIGHT, choose_on_click
from workbench.app.services import Services, when_drawn
from workbench.app.state import OWN_PROMPTS, View

NAME, TITLE = "attribution", "Attribution"
EXPLANATION = (
    "Attention is evidence, ablation is the test: on prompts with a known answer, how much each head and each token is "
    "attended, beside what the answer loses without it. The prompts are made of words that the model has as one token."
)
CONTROLS = {
    "task": ("task", "value"),
    "own_prompts": ("own-prompts", "data"),
    "measure": ("measure", "value"),
    "ablation": ("ablation", "value"),
    "prompt": ("prompt", "value"),
}
DEFINITIONS = (
    (
        "Effect",
        "Logit difference of the right answer and a wrong one with the head ablated, less that of the model as it is. "
        "Ablated heads write zeros, their mean over corrupted prompts at each position, or their output on another.",
    ),
    (
        "Agreement",
        "Kendall's τ-b between a measure and |effect| over heads, mean over prompts, with a bootstrap interval. "
        "Filled points: p < 0.05 after shuffling heads within layers, corrected for many tests by the largest |τ|.",
    ),
    (
        "Verdicts",
        "Heads are chosen on one half of the prompts and tested on the other. Attended: in the top quarter of heads. "
        "Decisive: its ablation takes at least 5 % of what the answer has above chance; inert: surely below 2 %.",
    ),
    (
        "Knock-out of a token",
        "No query reads it in any layer, and other tokens share its weight (Geva et al. 2023). The first token is left "
        "out: attention that is not needed goes there.",
    ),
    (
        "Deletion curves",
        "Probability of the answer lost without the first tokens of a ranking (comprehensiveness), or with only them "
        "(sufficiency; DeYoung et al. 2020).",
    ),
)
TALL, SCATTER_TALL = 400, 520
NAMED = {
    "unattended, decisive": "Decide, and hardly attend",
    "attended, inert": "Attend, and change nothing",
    "attended, decisive": "Attend and decide",
}
EXAMPLE = (
    '{"prompt": "The capital of Veld is", "target": "Talvik", "foil": "Besko", "corrupted": "The capital of Lorne is"}'
)


def layout(view: View) -> list[Any]:
    tasks = TASKS | {OWN_PROMPTS: "Your own prompts"}
    task = html.Div(
        select("task", "The task", view.task, tasks), className="toolbar", role="group", **{"aria-label": "The prompts"}
    )
    own = html.Div(
        card(
            "Your own prompts",
            dmc.Textarea(
                id="prompts-text",
                placeholder=EXAMPLE,
                autosize=True,
                minRows=4,
                maxRows=12,
                size="sm",
                spellCheck=False,
                **{"aria-label": "Your own prompts, one JSON object a line"},
            ),
            controls=[dmc.Button("Use these prompts", id="use-prompts", n_clicks=0, size="compact-sm")],
            note="One JSON object a line, all with the same fields: prompt, target (the right next token), and perhaps "
            "foil (a wrong one) and corrupted (a prompt of the same length that calls for another answer). Without "
            "foils the answer’s log-probability counts, without corrupted prompts heads are ablated to zero only. "
            "Intervals and verdicts take 20 prompts.",
        ),
        id="own-prompts-card",
        className="above",
        hidden=view.task != OWN_PROMPTS,
    )
    scatter = card(
        "Every head",
        graph("attribution-scatter", "Attention of every head against the effect of its ablation", SCATTER_TALL),
        controls=[
            select("measure", "Measure of attention", view.measure, ATTENTION_MEASURES),
            select("ablation", "Kind of ablation", view.ablation, ABLATIONS, width=150),
        ],
        note="Click a point to choose its head. Beyond the dashed lines a head counts as attended, or as decisive; "
        "before the dotted ones as unattended, or as inert.",
    )
    agreement = card(
        "Does a measure rank heads as ablation does?",
        graph("attribution-agreement", "Rank agreement of every measure with ablation", SCATTER_TALL),
        note=html.Span("", id="attribution-note"),
    )
    effects = card(
        "What ablation does",
        graph("attribution-map", "Effect of ablating every head", TALL),
        note="Blue: the answer loses. Red: it gains.",
    )
    named = card("Heads that stand out", html.Div(id="attribution-named"))
    sources = card(
        "Which tokens of a prompt",
        graph("sources-prompt", "Measures of every token of one prompt beside its knock-out", TALL),
        controls=[number("prompt", "Prompt", view.prompt, high=9999)],
        className="wide",
    )
    ranks = card(
        "Does a measure rank tokens as knock-out does?",
        graph("sources-agreement", "Rank agreement of every measure of tokens with knock-out", SCATTER_TALL),
        note="Recency is the distance from the end: what a measure must beat.",
    )
    curves = card(
        "Without the first tokens, and with only them",
        graph("sources-deletion", "Deletion curves of every ranking of tokens", SCATTER_TALL),
        note="A good ranking loses much at the left and little at the right.",
    )
    return [
        dcc.Store(id="own-prompts", data=view.own_prompts),
        dcc.Store(id="typed-prompts", data=""),
        task,
        own,
        html.Div(id="attribution-tiles"),
        html.Div([scatter, agreement, effects, named, sources, ranks, curves], className="columns"),
    ]


HEADS = Recipe("attribution_agreement", "Ablation of every head", reads="task")
TOKENS = Recipe("source_attribution", "Knock-out of every token", reads="task")


def figures(view: View) -> dict[str, Shown]:
    def prompt(result: Any) -> dict[str, int]:
        return {"prompt": shown_prompt(result, view)}

    def compared(result: Any) -> dict[str, Any]:
        return {"measure": view.measure, "ablation": shown_ablation(result, view)}

    def effects(result: Any) -> dict[str, Any]:
        return {"ablation": shown_ablation(result, view), "chosen": chosen_head(view)}

    return {
        "attribution-scatter": Shown(HEADS, "scatter", compared),
        "attribution-agreement": Shown(HEADS, "agreement"),
        "attribution-map": Shown(HEADS, "map", effects),
        "sources-prompt": Shown(TOKENS, "prompt", prompt),
        "sources-agreement": Shown(TOKENS, "agreement"),
        "sources-deletion": Shown(TOKENS, "deletion"),
    }


def shown_prompt(result: Any, view: View) -> int:
    """The prompt that is looked at: the view's, or the last where there are not so many."""
    return min(view.prompt, len(result["baseline"]) - 1)


def shown_ablation(result: Any, view: View) -> str:
    """The view's, or zero ablation where there are no other prompts to take a head's output from."""
    return view.ablation if view.ablation in result.ablations else result.ablations[0]


def tasks(services: Services, view: View) -> list[Task]:
    return [services.task(view, recipe) for recipe in (HEADS, TOKENS)]


def register(app: Dash, services: Services) -> None:
    drawn = when_drawn(NAME)

    @app.callback(
        Output("attribution-scatter", "figure"),
        Output("attribution-agreement", "figure"),
        Output("attribution-note", "children"),
        Output("attribution-map", "figure"),
        Output("attribution-map", "style"),
        Output("attribution-named", "children"),
        Output("attribution-tiles", "children"),
        *drawn,
    )
    def draw_heads(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, HEADS), figures(view)
        scatter = shown["attribution-scatter"].draw(result, scheme)
        tall = max(TALL, LAYER_HEIGHT * len(result["verdict"]) + 90)
        return (
            on_card(scatter, SCATTER_TALL, revision=f"{view.task} {view.measure} {view.ablation}"),
            on_card(shown["attribution-agreement"].draw(result, scheme), SCATTER_TALL, revision="agreement"),
            f"{result.provenance.inputs[:1].upper()}{result.provenance.inputs[1:]}.",
            on_card(shown["attribution-map"].draw(result, scheme), tall, revision="map"),
            {"height": f"{tall}px"},
            named_heads(result),
            numbers_that_matter(result),
        )

    @app.callback(
        Output("sources-prompt", "figure"),
        Output("sources-agreement", "figure"),
        Output("sources-deletion", "figure"),
        *drawn,
    )
    def draw_sources(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, TOKENS), figures(view)
        prompt = str(shown_prompt(result, view))
        return (
            on_card(shown["sources-prompt"].draw(result, scheme), TALL, revision=prompt),
            on_card(shown["sources-agreement"].draw(result, scheme), SCATTER_TALL, revision="agreement"),
            on_card(shown["sources-deletion"].draw(result, scheme), SCATTER_TALL, revision="deletion"),
        )

    @app.callback(Output("own-prompts-card", "hidden"), Input("task", "value"))
    def show_own_prompts(task: str) -> bool:
        return task != OWN_PROMPTS

    # The browser reads the field itself: what it reports to callbacks can be a keystroke behind.
    app.clientside_callback(
        ClientsideFunction("workbench", "typedText"),
        Output("typed-prompts", "data"),
        Input("use-prompts", "n_clicks"),
        State("prompts-text", "id"),
    )

    @app.callback(Output("own-prompts", "data", allow_duplicate=True), Input("typed-prompts", "data"))
    def use_prompts(typed: str) -> str:
        return services.texts.put(typed)

    @app.callback(Output("prompts-text", "value"), Input("own-prompts", "data"), prevent_initial_call=False)
    def show_prompts(stored: str) -> str:
        return services.texts.get(stored)

    choose_on_click(app, ("attribution-scatter", "clickData"), ("attribution-map", "clickData"))


def named_heads(result: Any) -> Any:
    """The heads of each verdict, with what they attend and what they are worth; or why there are none."""
    if result.settings["untested"]:
        return html.P(f"No head is named: {result.settings['untested']}.", className="empty")
    measure, ablation = result.settings["verdict_measure"], result.ablations[0]
    rows = []
    for verdict, words in NAMED.items():
        for layer, head in result.heads(verdict)[:6]:
            weight, effect = result[measure][layer, head], result[f"{ablation}_effect"][layer, head]
            rows.append((f"L{layer}H{head}", f"{weight:.2f}", f"{effect:+.3f}", words))
    if not rows:
        return html.P("No head attends and decides, and none of the disagreements was found.", className="empty")
    titles = ("Head", ATTENTION_MEASURES[measure], f"{ABLATIONS[ablation]} ({result.settings['unit']})", "")
    return plain_table(titles, rows, caption="Up to six heads of each kind, those with the largest effect first.")


def numbers_that_matter(result: Any) -> html.Div:
    over_foil = result.settings["metric"] == "logit_difference"
    measured = "logits over the wrong one" if over_foil else "nats of log-probability"
    tau, low, high = (result[name][:, 0] for name in ("tau", "tau_low", "tau_high"))
    weight = result.measures.index("max_weight")
    if np.isfinite(tau).any():
        best = int(np.nanargmax(tau))
        best_tau, best_name = f"{tau[best]:+.2f}", ATTENTION_MEASURES[result.measures[best]]
    else:
        best_tau, best_name = "–", "no measure differs between heads"
    n = len(result["baseline"])
    counts = [str(len(result.heads(verdict))) if not result.settings["untested"] else "–" for verdict in NAMED]
    return tiles(
        ("The answer has", f"{result['baseline'].mean():+.2f}", f"{measured}, {n} prompt{'s' * (n != 1)}"),
        (
            "τ of the largest weight",
            "–" if np.isnan(tau[weight]) else f"{tau[weight]:+.2f}",
            _interval(low[weight], high[weight]),
        ),
        ("Best measure", best_tau, best_name),
        ("Decide, hardly attend", counts[0], "heads"),
        ("Attend, change nothing", counts[1], "heads"),
    )


def _interval(low: float, high: float) -> str:
    return f"95 % interval {low:+.2f} to {high:+.2f}" if np.isfinite(low) else "too few prompts for an interval"
