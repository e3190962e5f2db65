"""The view beside another: another model, another text, another head."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
import numpy as np
from dash import ClientsideFunction, Dash, Input, Output, dcc, html
from dash.exceptions import PreventUpdate

from workbench.analyses.labels import HEAD_SCORES, number_or_dash
from workbench.app.components import (
    about_score,
    card,
    empty_figure,
    graph,
    message,
    number,
    on_card,
    plain_table,
    select,
)
from workbench.app.jobs import Task
from workbench.app.recipes import Recipe, Shown, chosen_head
from workbench.app.selection import CHOSEN, LAYER_HEIGHT, choose_on_click
from workbench.app.services import Services, when_drawn
from workbench.app.sides import head_of_b, heads_of, is_shuffled, other_of, patterns_of
from workbench.app.state import View, typed_model

NAME, TITLE = "compare", "Compare"
EXPLANATION = (
    "The view (A) beside another (B): another model, another text, another head, or several of these. Both are drawn "
    "on one scale. As long as nothing is chosen, B reads the words of the text in another order."
)
CONTROLS = {
    "other_model": ("chosen-other-model", "data"),
    "other_text": ("chosen-other-text", "data"),
    "other_layer": ("other-layer", "value"),
    "other_head": ("other-head", "value"),
    "compared_score": ("compared-score", "value"),
}
DEFINITIONS = (
    ("A, B", "A is what the other pages show: model, text and head at the left and above. B is chosen here."),
    ("B − A", "The score of a head in B less that of the same head in A; only for models of one shape."),
    (
        "Spearman's ρ",
        "The correlation of the ranks of all heads in A and in B: 1 where the order of heads is the same, 0 where one "
        "order says nothing of the other.",
    ),
    (
        "Loss",
        "Minus the log-probability of the token that follows, mean over the text, in nats. Of models with different "
        "tokenizers it is per token of their own, so the smaller is not the better.",
    ),
    ("Same rule", "Both patterns are pooled alike: above so many tokens a cell is the maximum, or mean, of a block."),
)
TALL = 400
LOSS = Recipe("what_if", "Loss of the text", arguments=((),))


def layout(view: View) -> list[Any]:
    other = card(
        "B",
        html.Div([*_fields(view)], className="compare-fields"),
        note=html.Span("", id="compare-what", role="status"),
    )
    facts = card("A and B in numbers", html.Div(id="compare-facts"))
    maps = card(
        "All heads of both",
        graph(
            "compare-maps", "Two maps of all heads by layer and head on one scale: A at the left, B at the right", TALL
        ),
        controls=[select("compared-score", "Score that is compared", view.compared_score, HEAD_SCORES, width=210)],
        note=html.Span("", id="compare-note"),
        className="wide",
    )
    change = card(
        "B − A",
        graph("compare-change", "Map of what the score of each head is in B less what it is in A", TALL),
        note="Red: larger in B. Blue: larger in A.",
    )
    scatter = card(
        "B against A",
        graph("compare-scatter", "Scatter of the score in B against the score in A, one point per head", TALL),
        note="On the dotted line nothing differs. The heads that differ most are named; click one to look at it.",
    )
    patterns = card(
        html.Span("Patterns of both", id="compare-patterns-title"),
        graph("compare-patterns", "Attention patterns of the chosen heads side by side on one scale", 470),
        note=html.Span("", id="compare-patterns-note"),
        className="wide",
    )
    return [
        dcc.Store(id="chosen-other-model", data=view.other_model),
        dcc.Store(id="chosen-other-text", data=view.other_text),
        dcc.Store(id="typed-other", data={}),
        html.Div([other, facts, maps, change, scatter, patterns], className="columns"),
    ]


def _fields(view: View) -> list[Any]:
    return [
        dmc.Autocomplete(
            id="other-model",
            label="Other model",
            value=view.other_model,
            placeholder="the same",
            filter={"function": "everyModel"},
            size="sm",
            inputProps={"spellCheck": False},
        ),
        dmc.Textarea(
            id="other-text",
            label="Other text",
            value="",
            placeholder="the same; or, where model and head are the same too, its words in another order",
            autosize=True,
            minRows=3,
            maxRows=8,
            size="sm",
            spellCheck=False,
        ),
        html.Div(
            [
                number("other-layer", "Layer", view.other_layer, width=84, placeholder="same"),
                number("other-head", "Head", view.other_head, width=84, placeholder="same"),
                dmc.Button("Compare", id="compare", n_clicks=0, size="compact-md"),
            ],
            className="buttons compare-buttons",
        ),
    ]


def figures(view: View) -> dict[str, Shown]:
    heads, score = heads_of(view), view.compared_score

    def framed(result: Any) -> dict[str, Any]:
        """The chosen heads, as far as there are such."""
        found = {"chosen": chosen_head(view), "other": head_of_b(view)} if view.has_head else {}
        shapes = {"chosen": result[f"{score}_a"].shape, "other": result[f"{score}_b"].shape}
        return {"score": score} | {name: head for name, head in found.items() if _is_within(head, shapes[name])}

    shown = {
        "compare-maps": Shown(heads, "maps", framed),
        "compare-change": Shown(heads, "change", {"score": score, "chosen": chosen_head(view)}),
        "compare-scatter": Shown(heads, "scatter", {"score": score}),
    }
    return shown | ({"compare-patterns": Shown(patterns_of(view), "patterns")} if view.has_head else {})


def _is_within(head: tuple[int, int] | None, shape: tuple[int, ...]) -> bool:
    return head is not None and head[0] < shape[0] and head[1] < shape[1]


def tasks(services: Services, view: View) -> list[Task]:
    """Patterns once it is known that B has such a head, and what only some models have at the end."""
    heads = heads_of(view)
    wanted = [services.task(view, recipe) for recipe in (*heads.parts, heads)]
    if not view.has_head or missing_head(services, view) is not None:
        return wanted
    if services.jobs.result(heads.key(view)) is not None:
        patterns = patterns_of(view)
        optional = (*patterns.parts, patterns, LOSS, other_of(LOSS, view))
        wanted += [services.task(view, recipe, optional=True) for recipe in optional]
    return wanted


def missing_head(services: Services, view: View) -> tuple[int, int] | None:
    """The head of B nearest to the one that is chosen, where that does not exist; None where it does."""
    found = services.jobs.result(heads_of(view).parts[1].key(view))
    if found is None or not view.has_head:
        return None
    n_layers, n_heads = found["entropy"].shape
    layer, head = head_of_b(view)
    nearest = min(layer, n_layers - 1), min(head, n_heads - 1)
    return None if nearest == (layer, head) else nearest


def register(app: Dash, services: Services) -> None:
    drawn = when_drawn(NAME)
    _register_choice(app, services)

    @app.callback(
        Output("compare-maps", "figure"),
        Output("compare-maps", "style"),
        Output("compare-note", "children"),
        Output("compare-change", "figure"),
        Output("compare-change", "style"),
        Output("compare-scatter", "figure"),
        Output("compared-score", "data"),
        *drawn,
    )
    def draw_heads(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result = services.result(view, heads_of(view))
        return *head_figures(result, view, scheme), score_options(result)

    @app.callback(
        Output("compare-patterns", "figure"),
        Output("compare-patterns-title", "children"),
        Output("compare-patterns-note", "children"),
        *drawn,
    )
    def draw_patterns(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        if not view.has_head:
            raise PreventUpdate
        (layer, head), shown = head_of_b(view), figures(view)["compare-patterns"]
        title = f"Patterns of L{view.layer}H{view.head} in A and L{layer}H{head} in B"
        if (error := services.jobs.error(shown.recipe.key(view))) is not None:
            return empty_figure(470, "There is no pattern to show."), title, str(error)
        result = services.result(view, shown.recipe)
        said = " ".join(f"{side.upper()}: {text}" for side, text in result.settings["shown"].items())
        return on_card(shown.draw(result, scheme), 470, revision="patterns"), title, said

    @app.callback(
        Output("compare-facts", "children"),
        Output("compare-what", "children"),
        *drawn,
    )
    def tell(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result = services.result(view, heads_of(view))
        losses = [services.jobs.result(recipe.key(view)) for recipe in (LOSS, other_of(LOSS, view))]
        return facts_table(result, view, losses), what_b_is(view)


def _register_choice(app: Dash, services: Services) -> None:
    """What B is: fields and clicks."""

    # The browser reads the boxes itself: what they report to callbacks can be a keystroke behind.
    app.clientside_callback(
        ClientsideFunction("compare", "typedOther"),
        Output("typed-other", "data"),
        Input("compare", "n_clicks"),
    )

    @app.callback(
        Output("chosen-other-model", "data", allow_duplicate=True),
        Output("chosen-other-text", "data", allow_duplicate=True),
        Input("typed-other", "data"),
    )
    def choose(typed: dict) -> tuple[str, str]:
        text = str(typed.get("text") or "")
        return typed_model(typed.get("model")), services.texts.put(text) if text.strip() else ""

    @app.callback(
        Output("other-model", "value"),
        Output("other-text", "value"),
        Output("other-model", "data"),
        Input("chosen-other-model", "data"),
        Input("chosen-other-text", "data"),
        prevent_initial_call=False,
    )
    def fill_boxes(model: str, text: str) -> tuple[str, str, list[str]]:
        return model, services.texts.get(text), list(services.known_models)

    app.clientside_callback(
        ClientsideFunction("choose", "oneOfTwoHeads"),
        CHOSEN,
        Input("compare-maps", "clickData"),
    )
    choose_on_click(app, ("compare-change", "clickData"), ("compare-scatter", "clickData"))


def head_figures(result: Any, view: View, scheme: str) -> tuple:
    """Both maps with their style and note, the change with its style, and the scatter."""
    score, shown = view.compared_score, figures(view)
    if score not in result.scores:
        nothing = empty_figure(TALL, f"“{HEAD_SCORES[score]}” has no value in A or in B.<br>Choose another score.")
        style = {"height": f"{TALL}px"}
        return nothing, style, "", nothing, style, nothing
    n_layers = max(len(result[f"{score}_{side}"]) for side in "ab")
    tall = max(TALL, LAYER_HEIGHT * n_layers + 110)
    style = {"height": f"{tall}px"}
    maps = on_card(shown["compare-maps"].draw(result, scheme), tall, revision="maps")
    maps.update_layout(margin_t=40)  # for the names of the panels
    note = about_score(HEAD_SCORES[score], result.about(score))
    if not result.same_shape:
        other = empty_figure(TALL, "A and B have different numbers of layers or heads,<br>so no head is in both.")
        return maps, style, note, other, {"height": f"{TALL}px"}, other
    change = on_card(shown["compare-change"].draw(result, scheme), tall, revision="change")
    return maps, style, note, change, style, on_card(shown["compare-scatter"].draw(result, scheme), TALL)


def score_options(result: Any) -> list[dict[str, Any]]:
    """The scores to choose from; those without a value on either side cannot be chosen."""
    return [
        {"value": name, "label": label, "disabled": name not in result.scores} for name, label in HEAD_SCORES.items()
    ]


def facts_table(result: Any, view: View, losses: list[Any]) -> Any:
    """What A and B are, and what the score and the loss are in them."""
    parts, score = [result.settings["about"][side] for side in "ab"], view.compared_score
    rows = [
        ("Model", *(part["model_name"] for part in parts)),
        ("Weights", *(part["weights"] for part in parts)),
        ("Text", *(part["inputs"] for part in parts)),
        ("Tokens", *(f"{part['n_tokens']:,}" for part in parts)),
        ("Layers × heads", *("{} × {}".format(*result[f"{score}_{side}"].shape) for side in "ab")),
    ]
    if any(loss is not None for loss in losses):
        rows.append(("Loss (nats per token)", *(_loss(loss) for loss in losses)))
    if score in result.scores:
        label = HEAD_SCORES[score]
        values = [result[f"{score}_{side}"] for side in "ab"]
        rows.append((f"{label}, mean", *(number_or_dash(float(np.nanmean(value))) for value in values)))
        rows.append((f"{label}, largest", *(_largest(value) for value in values)))
    caption = ""
    if score in result.scores and result.same_shape:
        (layer, head), *_ = result.most_changed(score, 1)
        rho = number_or_dash(result.rank_correlation(score), ".2f")
        moved = result[f"{score}_change"][layer, head]
        caption = f"Most changed: L{layer}H{head} by {moved:+.3f}. Order of the heads: Spearman’s ρ {rho}."
    return plain_table(("", "A", "B"), rows, caption)


def _loss(result: Any) -> str:
    losses = None if result is None else result.mean_losses()
    return "–" if losses is None else f"{losses[0]:.3f}"


def _largest(values: np.ndarray) -> str:
    layer, head = np.unravel_index(np.nanargmax(values), values.shape)
    return f"{values[layer, head]:.3f} in L{layer}H{head}"


def what_b_is(view: View) -> str:
    """In words, as long as B is not all chosen."""
    if is_shuffled(view):
        return (
            "Nothing is chosen yet, so B reads the words of the text in another order. Name a model, a text or a head."
        )
    model = "the same model" if view.other_model in ("", view.model) else view.other_model
    return f"B is {model} on {'another text' if view.other_text else 'the same text'}. Empty fields are as in A."


def no_such_head(view: View, nearest: tuple[int, int]) -> Any:
    layer, head = head_of_b(view)
    text = f"B has no L{layer}H{head}; it is compared with L{nearest[0]}H{nearest[1]}, the nearest that it has."
    return message("notice", "There is no such head in B", text)
