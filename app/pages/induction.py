"""Induction heads: the attention that suggests them, the loss that needs them, and the ablation that tests them."""

from __future__ import annotations

from typing import Any

import numpy as np
from dash import Dash, Output, html, no_update

from workbench.analyses.labels import COPYING_SCORES, INDUCTION_SCORES
from workbench.app.components import about_score, card, graph, number, on_card, plain_table, tiles
from workbench.app.jobs import Task
from workbench.app.on_demand import OnDemand
from workbench.app.recipes import Recipe, Shown, chosen_head
from workbench.app.selection import LAYER_HEIGHT, choose_on_click, map_card, map_outputs, score_map
from workbench.app.services import Services, when_drawn
from workbench.app.state import View

NAME, TITLE = "induction", "Induction"
EXPLANATION = (
    "Heads that continue a pattern: after A B … A they look back at B. They are searched on random tokens that come "
    "twice, where nothing else helps, and tested by switching them off."
)
CONTROLS = {
    "induction_score": ("induction-score", "value"),
    "length": ("length", "value"),
    "sequences": ("sequences", "value"),
    "seed": ("seed", "value"),
}
DEFINITIONS = (
    (
        "Prefix matching",
        "Weight on all tokens that followed an earlier occurrence of the query's token, mean over queries with one "
        "(Olsson et al. 2022). “Latest” counts the latest occurrence only; “per entry” divides by their number.",
    ),
    (
        "Loss by copy",
        "Next-token loss at each place of a copy, with its standard error over sequences. Only tokens whose "
        "predecessor repeats as well can be predicted by copying, and only these count.",
    ),
    (
        "Ablation",
        "Change of the repeated tokens' loss when a head's output is replaced by its mean per position on as many "
        "other sequences (those of the next seed), or by zeros. Random heads of the same layers are the controls.",
    ),
    (
        "Direct path, patterns kept",
        "Parts of the effect of mean ablation. Direct path: what the head does past all later heads and MLPs, which "
        "write what they wrote. Patterns kept: what is left when all attention stays as it was (Olsson et al. 2022); "
        "the effect less that is what the head does by telling others where to look.",
    ),
    (
        "After its peers",
        "The loss with all heads of the pattern ablated, less that with all but this one: what the head does once "
        "nobody can stand in for it.",
    ),
    (
        "Verdict",
        "An effect counts when it is two standard errors beyond the largest of a control, or beyond 0.01 nats where "
        "that is more. Induction: ablating the head alone costs so much. Redundant: it does once its peers are gone. "
        "Anti-induction: ablating it helps so much. Pattern only: it attends like one, and has no such effect. No "
        "pattern: its prefix matching is below 0.3.",
    ),
    (
        "Circuit",
        "An induction head finds a token whose predecessor was the present one, so an earlier head must have written "
        "there what the predecessor was. Each of the heads with the highest previous-token score is taken out of the "
        "keys of each induction head alone (path patching; Goldowsky-Dill et al. 2023), and prefix matching falls "
        "where it feeds them. Controls are heads that do not look at the previous token.",
    ),
    (
        "Copying",
        "The logit that a head’s output gives to the tokens it attends to, by their weights, less the mean over the "
        "vocabulary; in the second copy of the random tokens.",
    ),
)
TALL = 400
PASSED, FAILED = ("induction", "redundant"), ("anti-induction", "pattern only")  # verdicts of a test that was made


def layout(view: View) -> list[Any]:
    options = html.Div(
        [
            number("length", "Random tokens", view.length, low=4, high=4096),
            number("sequences", "Sequences", view.sequences, low=1, high=512),
            number("seed", "Seed", view.seed, high=2**31 - 1),
        ],
        className="toolbar",
        role="group",
        **{"aria-label": "The random tokens"},
    )
    scores = map_card(NAME, "induction-score", view.induction_score, INDUCTION_SCORES, TALL)
    loss = card(
        "Loss along the copies",
        graph("induction-loss", "Next-token loss at each place of the first and the second copy", TALL),
        note="A model that copies predicts the second copy far better than the first.",
    )
    ablation = card(
        "The test: switching heads off",
        graph("induction-ablation", "Change of the repeated tokens' loss when a head is ablated", TALL),
        note=html.Span("", id="induction-ablation-note"),
    )
    verdicts = card("Verdicts", html.Div(id="induction-verdicts", className="narrow-cells"))
    circuit = CIRCUIT.card(
        graph("induction-circuit", "Previous-token heads at the left, induction heads at the right", TALL),
        note=html.Span("", id="circuit-note"),
    )
    copying = COPYING.card(
        graph("induction-copying", "Map of all heads, coloured by how much they raise the tokens they attend to", TALL),
        note=html.Span("", id="copying-note"),
    )
    return [
        options,
        html.Div(id="induction-tiles"),
        html.Div([scores, loss, ablation, verdicts, circuit, copying], className="columns"),
    ]


CIRCUIT = OnDemand(
    "circuit",
    "The circuit",
    "Trace the circuit",
    "Which earlier heads tell the induction heads where to look: each is taken out of their keys in turn. Some twenty "
    "runs over the random tokens above: seconds on the demo model, minutes where there are hundreds of heads.",
)
COPYING = OnDemand(
    "copying",
    "Do heads copy what they look at?",
    "Measure copying",
    "How much each head raises the logits of the tokens that it attends to. One run over the random tokens, and a pass "
    "over the vocabulary.",
)


def heads_on_random_tokens(view: View) -> Recipe:
    return on_random_tokens("induction_heads", "Induction heads", view)


def on_random_tokens(analysis: str, title: str, view: View) -> Recipe:
    options = {"length": view.length, "n_sequences": view.sequences, "seed": view.seed}
    return Recipe(analysis, title, reads="nothing", options=options)


def figures(view: View) -> dict[str, Shown]:
    recipe, chosen = heads_on_random_tokens(view), chosen_head(view)
    return {
        "induction-map": Shown(recipe, "map", {"score": view.induction_score, "chosen": chosen}),
        "induction-loss": Shown(recipe, "loss"),
        "induction-ablation": Shown(recipe, "ablation"),
        "induction-circuit": Shown(on_random_tokens("induction_circuit", "The circuit", view), "circuit"),
        "induction-copying": Shown(on_random_tokens("copying_scores", "Copying", view), "map", {"chosen": chosen}),
    }


def tasks(services: Services, view: View) -> list[Task]:
    shown = figures(view)
    return [
        services.task(view, heads_on_random_tokens(view)),
        *CIRCUIT.tasks(services, view, shown["induction-circuit"].recipe),
        *COPYING.tasks(services, view, shown["induction-copying"].recipe),
    ]


def register(app: Dash, services: Services) -> None:
    drawn = when_drawn(NAME)

    @app.callback(
        *map_outputs(NAME),
        Output("induction-loss", "figure"),
        Output("induction-ablation", "figure"),
        Output("induction-ablation-note", "children"),
        Output("induction-tiles", "children"),
        Output("induction-verdicts", "children"),
        *drawn,
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, heads_on_random_tokens(view)), figures(view)
        return (
            *score_map(result, shown["induction-map"], INDUCTION_SCORES, scheme, TALL),
            on_card(shown["induction-loss"].draw(result, scheme), TALL, revision="loss"),
            on_card(shown["induction-ablation"].draw(result, scheme), TALL, revision="ablation"),
            about_ablation(result),
            numbers_that_matter(result),
            verdict_table(result),
        )

    @app.callback(*CIRCUIT.outputs, Output("induction-circuit", "figure"), Output("circuit-note", "children"), *drawn)
    def draw_circuit(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        shown = figures(view)["induction-circuit"]
        state, result = CIRCUIT.state(services, view, shown.recipe)
        if result is None:
            return *state, no_update, no_update
        return *state, on_card(shown.draw(result, scheme), TALL, revision="circuit"), about_circuit(result)

    @app.callback(
        *COPYING.outputs,
        Output("induction-copying", "figure"),
        Output("induction-copying", "style"),
        Output("copying-note", "children"),
        *drawn,
    )
    def draw_copying(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        shown = figures(view)["induction-copying"]
        state, result = COPYING.state(services, view, shown.recipe)
        if result is None:
            return *state, no_update, no_update, no_update
        tall = max(TALL, LAYER_HEIGHT * len(result["in_situ"]) + 90)
        about = about_score(COPYING_SCORES["in_situ"], result.quantities["in_situ"])
        return *state, on_card(shown.draw(result, scheme), tall, revision="copying"), {"height": f"{tall}px"}, about

    CIRCUIT.register(app)
    COPYING.register(app)
    choose_on_click(app, ("induction-map", "clickData"), ("induction-copying", "clickData"))


def numbers_that_matter(result: Any) -> html.Div:
    (layer, head), losses = result.top(1)[0], result["copy_loss"]
    tested = [verdict for verdict in result["verdict"] if verdict in PASSED + FAILED]
    passed = sum(verdict in PASSED for verdict in tested)
    kinds = ", ".join(f"{tested.count(verdict)} {verdict}" for verdict in PASSED if verdict in tested)
    return tiles(
        ("Highest prefix matching", f"{result['prefix_matching'][layer, head]:.2f}", f"L{layer}H{head}"),
        ("Even attention would give", f"{float(result['uniform_prefix_matching']):.2f}", "the score of no pattern"),
        ("Loss at first sight", f"{losses[0]:.2f}", "nats per token"),
        ("Loss at the repetition", f"{losses[1]:.2f}", "nats per token"),
        ("Tested heads that pass", f"{passed} of {len(tested)}" if tested else "–", kinds or "heads with the pattern"),
    )


def about_ablation(result: Any) -> str:
    """What the figure of the ablations shows: the means that it replaces by, and the controls."""
    means = f"Means are those of {result.replacement_in_words()}."
    if np.isfinite(result.control_effect):
        return f"Grey: ± {result.control_effect_in_words()}. {means}"
    if set(result["verdict"]) == {"no pattern"}:
        return f"None of these heads has the pattern, so there is nothing to test and no control. {means}"
    return f"No other head of these layers is free of the pattern, so there are no controls. {means}"


def about_circuit(result: Any) -> str:
    """Who feeds whom, in the words of the result."""
    return " ".join(result.summary().splitlines()[1:])


def verdict_table(result: Any) -> Any:
    rows = []
    for place, name in enumerate(result.coordinates["ablated"]):
        layer, head = result["ablated_head"][place]
        verdict = "" if result["is_control"][place] else str(result["verdict"][place])  # the name says it of controls
        rows.append(
            (
                [name, html.Div(verdict, className="muted")],
                f"{result['prefix_matching'][layer, head]:.3f}",
                signed(result["mean_effect"][place]),
                signed(result["zero_effect"][place]),
                signed(result["direct_effect"][place]),
                signed(result["patterns_kept_effect"][place]),
                signed(result["peer_effect"][place]),
            )
        )
    effects = ("Mean ablation", "Zero ablation", "Direct path", "Patterns kept", "After its peers")
    titles = ("Head, verdict", "Prefix matching", *effects)
    return plain_table(titles, rows, caption="Effects are changes of the repeated tokens' loss, in nats per token.")


def signed(value: float) -> str:
    return "–" if np.isnan(value) else f"{value:+.3f}"
