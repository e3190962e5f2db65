"""What if: parts of the model switched off, and what becomes of its predictions and of a head's pattern."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, ctx, html
from dash.exceptions import PreventUpdate

from workbench.app.components import card, graph, number, on_card, tiles
from workbench.app.jobs import Task
from workbench.app.pages.heads import preview_of
from workbench.app.pages.pattern import resolution, visible
from workbench.app.recipes import HEAD_STATISTICS, Recipe, Shown
from workbench.app.selection import CHOSEN
from workbench.app.services import Services, when_drawn
from workbench.app.state import LONGEST_NAME, MOST_OFF, View
from workbench.errors import WorkbenchError

NAME, TITLE = "what-if", "What if"
EXPLANATION = (
    "Switch heads, layers, MLPs or single edges of attention off, and see what the model predicts without them. "
    "Nothing is changed for good: the model of the other pages stays as it is."
)
CONTROLS = {"off": ("off", "value"), "position": ("position", "value")}
DEFINITIONS = (
    (
        "Switched off",
        "L3H7 is a head, L3 an attention layer, M3 an MLP: its output becomes zeros (zero ablation). "
        "L3H7:12>5 is what query 12 reads of key 5 in a head, L3:12>5 in all heads of a layer, *:12>5 in all layers; "
        "L3H7:>0 is what every query reads of key 0. Edges are cut before the softmax, so the other keys share their "
        "weight; a query that can read nothing else keeps them (Geva et al. 2023).",
    ),
    ("Loss", "Minus the log-probability of the token that follows, in nats."),
    ("KL", "Of the whole next-token distribution: KL(as it is ‖ switched off), in nats."),
)
TALL = 400
MAP_CELLS = 160  # a side; each gets a pixel at least
PATTERNS = ("before", "after")


def layout(view: View) -> list[Any]:
    switches = card(
        "Switched off",
        dmc.TagsInput(
            id="off",
            value=list(view.off),
            placeholder="Type L2H2, M3 or L1:>0 and press Enter",
            clearable=True,
            size="sm",
            splitChars=[",", " "],
            acceptValueOnBlur=True,
            maxTags=MOST_OFF,
            inputProps={"maxLength": LONGEST_NAME},
            **{"aria-label": "What is switched off"},
        ),
        controls=[
            html.Div(
                [
                    _button("off-head", "This head"),
                    _button("off-layer", "Its layer"),
                    _button("off-mlp", "Its MLP"),
                    _button("off-sink", "First token for it"),
                    _button("off-undo", "Undo"),
                ],
                className="buttons",
            )
        ],  # fmt: skip
        note=html.Span("", id="off-note", role="status"),
    )
    following = card(
        html.Span("Next token", id="following-title"),
        graph("following", "Probability of the likeliest next tokens, before and after", TALL),
        controls=[number("position", "After token", view.position, high=10**7, width=110, placeholder="most moved")],
    )
    along = card(
        "Along the text",
        graph("off-text", "Change of the loss and of the prediction at every token", TALL),
        note="Click a token to see its prediction.",
    )
    maps = [
        card(
            html.Span(f"Pattern {when}", id=f"pattern-{when}-title"),
            graph(f"pattern-{when}", f"Attention pattern of the chosen head, {when}", TALL),
            note=html.Span("", id=f"pattern-{when}-note"),
        )
        for when in PATTERNS
    ]
    code = card("The same in Python", html.Pre("", id="off-code", className="code", tabIndex="0"), className="wide")
    return [
        html.Div(switches, className="above"),
        html.Div(id="off-tiles"),
        html.Div([following, along, *maps, code], className="columns"),
    ]


def _button(id: str, text: str) -> dmc.Button:
    return dmc.Button(text, id=id, n_clicks=0, size="compact-sm", variant="default")


def predictions(view: View) -> Recipe:
    return Recipe("what_if", "What if", arguments=(list(view.off),), options={"position": view.position})


def figures(view: View) -> dict[str, Shown]:
    shown = {"following": Shown(predictions(view), "next_token"), "off-text": Shown(predictions(view), "text")}
    if view.has_head:
        shown["pattern-before"] = preview_of(view, MAP_CELLS)
        shown["pattern-after"] = preview_of(view, MAP_CELLS, view.off)
    return shown


def tasks(services: Services, view: View) -> list[Task]:
    if not view.has_head:
        return [services.task(view, predictions(view)), services.task(view, HEAD_STATISTICS)]
    patterns = [figures(view)[f"pattern-{when}"].recipe for when in PATTERNS]
    return [services.task(view, recipe) for recipe in (predictions(view), *patterns)]


def register(app: Dash, services: Services) -> None:
    drawn = when_drawn(NAME)

    @app.callback(
        Output("following", "figure"),
        Output("following-title", "children"),
        Output("off-text", "figure"),
        Output("off-tiles", "children"),
        Output("off-note", "children"),
        Output("off-code", "children"),
        *drawn,
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, predictions(view)), figures(view)
        place = result.settings["position"]
        return (
            on_card(shown["following"].draw(result, scheme), TALL, revision="next"),
            f"Next token after {place} “{visible(result.coordinates['query'][place])}”",
            on_card(shown["off-text"].draw(result, scheme), TALL, revision="text"),
            numbers_that_matter(result),
            "" if view.off else "Nothing yet: type a name, or take the head that is chosen above.",
            shown["following"].code(view, services.texts.get(view.text), result),
        )

    @app.callback(
        *(Output(f"pattern-{when}{part}", name) for when in PATTERNS for part, name in _PARTS),
        *drawn,
    )
    def draw_patterns(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        if not view.has_head:
            raise PreventUpdate
        cards: list[Any] = []
        for when in PATTERNS:
            shown = figures(view)[f"pattern-{when}"]
            result = services.result(view, shown.recipe)
            cards += [on_card(shown.draw(result, scheme), TALL)]
            cards += [f"L{view.layer}H{view.head} {when}", resolution(result)]
        return cards

    @app.callback(
        Output("off", "value", allow_duplicate=True),
        *(Input(f"off-{what}", "n_clicks") for what in ("head", "layer", "mlp", "sink")),
        State("off", "value"),
        State("view", "data"),
    )
    def switch_off(*given: Any) -> list[str]:
        off, query = given[-2:]
        return with_chosen(off or [], str(ctx.triggered_id), services.view_on(NAME, query))

    app.clientside_callback(
        ClientsideFunction("workbench", "undo"),
        Output("off", "value", allow_duplicate=True),
        Input("off-undo", "n_clicks"),
        Input("off", "value"),
        prevent_initial_call="initial_duplicate",  # what the page begins with is a state to come back to
    )

    app.clientside_callback(
        ClientsideFunction("choose", "position"),
        CHOSEN,
        Input("off-text", "clickData"),
    )


def names_refused(services: Services, view: View) -> dict[str, str]:
    """What of the view's ``off`` names nothing in its model or text → what was expected, in a sentence.

    Empty as long as the model is not in memory to tell, and where the text itself is refused.
    """
    from workbench.analyses.interventions.switches import switched_off

    model = services.models.loaded(view.model)
    if model is None or not view.off:
        return {}
    recipe, refused = predictions(view), {}
    try:
        tokens = recipe.tokens(model, view, services.text(view, recipe)) or [[]]
    except (WorkbenchError, ValueError):
        return {}
    for name in view.off:
        try:
            switched_off(model, [name], len(tokens[0]))
        except ValueError as error:
            refused[name] = f"{error}."
    return refused


_PARTS = (("", "figure"), ("-title", "children"), ("-note", "children"))


def with_chosen(off: list[str], button: str, view: View) -> list[str]:
    """What is switched off once the button has added its part of the chosen head."""
    if not view.has_head:
        raise PreventUpdate
    head = f"L{view.layer}H{view.head}"
    name = {"off-head": head, "off-layer": f"L{view.layer}", "off-mlp": f"M{view.layer}", "off-sink": f"{head}:>0"}
    if name[button] in off:
        raise PreventUpdate
    return [*off, name[button]]


def numbers_that_matter(result: Any) -> html.Div:
    losses = result.mean_losses()
    place, tokens = result.settings["position"], result.coordinates["token"]
    first, then = (int(result[f"probability_{when}"].argmax()) for when in PATTERNS)
    return tiles(
        ("Mean loss", "–" if losses is None else "{:.2f} → {:.2f}".format(*losses), "nats per token"),
        ("Prediction moves by", f"{result['kl'][place]:.2f}", f"nats KL after token {place}"),
        ("Most likely before", f"“{visible(tokens[first])}”", f"{result['probability_before'][first]:.2f}"),
        ("Most likely after", f"“{visible(tokens[then])}”", f"{result['probability_after'][then]:.2f}"),
    )
