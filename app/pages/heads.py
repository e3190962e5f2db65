"""Every head by every score: a map, a table and a scatter, and the pattern of the head that is clicked."""

from __future__ import annotations

import dataclasses
from typing import Any

import plotly.graph_objects as go
from dash import Dash, Output, State, dcc, html, no_update
from dash.exceptions import PreventUpdate

from workbench.analyses.labels import HEAD_SCORES
from workbench.app.components import card, empty_figure, graph, on_card, select, table
from workbench.app.jobs import Task
from workbench.app.pages.pattern import description, resolution
from workbench.app.recipes import HEAD_STATISTICS, AnyRecipe, Shown, chosen_head, pattern_of
from workbench.app.selection import choose_on_click, map_card, map_outputs, score_map
from workbench.app.services import Services, when_drawn
from workbench.app.state import View

NAME, TITLE = "heads", "Heads"
EXPLANATION = (
    "What every attention head of the model does on this text, as one number per head. Click a head in the map, the "
    "table or the scatter to see its attention pattern."
)
CONTROLS = {"score": ("score", "value"), "x": ("scatter-x", "value"), "y": ("scatter-y", "value")}
TALL = 440
DEFINITIONS = (
    (
        "Attention weight",
        "p_ij, the share of its attention that query i (a token) gives to key j: a token before it or itself, or in "
        "encoders any. The weights of a query sum to 1, less what a learned sink takes.",
    ),
    (
        "Prefix matching",
        "Weight on the tokens that followed earlier occurrences of the query's own token, mean over queries that have "
        "one. High in induction heads (Olsson et al. 2022).",
    ),
    ("Previous token", "Weight on the token right before the query."),
    ("Duplicate token", "Weight on earlier occurrences of the query's own token (Wang et al. 2022)."),
    ("Sink mass", "Weight on the first four tokens, where heads rest that have nothing to say (Xiao et al. 2023)."),
    (
        "Virtual sink mass",
        "Weight on a learned sink: a score for attending to no token that some models have (GPT-OSS).",
    ),
    (
        "Entropy",
        "−Σ_j p_ij log p_ij in nats: 0 for a query that looks at one token, log n for one that looks at n evenly. "
        "Relative entropy divides by that maximum.",
    ),
    ("Mean distance", "How far the head looks: Σ_j p_ij |i − j|, in tokens."),
    ("Key concentration", "Whether few keys get all attention: Σ_j s_j² of the shares s_j that the keys receive."),
)


def layout(view: View) -> list[Any]:
    overview = map_card(NAME, "score", view.score, HEAD_SCORES, TALL)
    detail = card(
        html.Span("Pattern", id="heads-pattern-title"),
        graph("heads-pattern", "Attention pattern of the chosen head", TALL, square=True),
        note=html.Span("", id="heads-pattern-note", role="status"),
    )
    numbers = card(
        "Every score of every head",
        table("heads-table", "Every score of every head; sort by a column's title", TALL),
        note="Click a title to sort, or a row to look at its head.",
    )
    scatter = card(
        "Two scores",
        graph("heads-scatter", "Scatter of two scores, one point per head", TALL),
        controls=[
            select("scatter-x", "Score on the horizontal axis", view.x, HEAD_SCORES, width=160),
            select("scatter-y", "Score on the vertical axis", view.y, HEAD_SCORES, width=160),
        ],
        note="The colour is the layer.",
    )
    # What the table and the scatter show, so that another head draws neither anew.
    shown = [dcc.Store(id=name, data="") for name in ("tabulated", "scattered")]
    return [*shown, _hint(), html.Div([overview, detail, numbers, scatter], className="columns")]


def _hint() -> html.Div:
    """What to do here, for who has never been here; hint.js shows it once."""
    lines = (
        "Every cell of the map is an attention head. Click one to see where it looks, and “Open pattern” to read it.",
        "Type your own text at the left, or choose another model, and press “Analyse”.",
        "The other pages ask more of the same model and text. The address holds all that you see: copy it to share it.",
    )
    close = html.Button("Got it", id="close-hint", className="text-button", type="button")
    return html.Div([html.Ol([html.Li(line) for line in lines]), close], id="hint", className="hint", hidden=True)


def figures(view: View) -> dict[str, Shown]:
    shown = {
        "heads-map": Shown(HEAD_STATISTICS, "map", {"score": view.score, "chosen": chosen_head(view)}),
        "heads-scatter": Shown(HEAD_STATISTICS, "scatter", {"x": view.x, "y": view.y}),
    }
    return shown | ({"heads-pattern": preview_of(view, 240)} if view.has_head else {})


def preview_of(view: View, max_cells: int, off: tuple[str, ...] = ()) -> Shown:
    """The whole pattern, in as many cells as a small map has pixels, without what is read on the page of its own."""
    whole = dataclasses.replace(view, queries=None, keys=None)
    return Shown(pattern_of(whole, max_cells, off), "pattern", {"bars": False})


def tasks(services: Services, view: View) -> list[Task]:
    recipes: list[AnyRecipe] = [HEAD_STATISTICS]
    if view.has_head:
        recipes.append(figures(view)["heads-pattern"].recipe)
    return [services.task(view, recipe) for recipe in recipes]


def register(app: Dash, services: Services) -> None:
    drawn = when_drawn(NAME)  # the pattern first: a click has asked for it

    def statistics(query: str) -> tuple[View, Any]:
        view = services.view_on(NAME, query)
        return view, services.result(view, HEAD_STATISTICS)

    @app.callback(
        Output("heads-pattern", "figure"),
        Output("heads-pattern-title", "children"),
        Output("heads-pattern-note", "children"),
        *drawn,
    )
    def draw_pattern(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        if not view.has_head:
            raise PreventUpdate
        shown = figures(view)["heads-pattern"]
        pattern = services.result(view, shown.recipe)
        return (
            on_card(shown.draw(pattern, scheme), TALL),
            f"Pattern of L{view.layer}H{view.head}",
            f"{resolution(pattern)} {description(pattern)}",
        )

    @app.callback(*map_outputs(NAME), Output("score", "data"), *drawn)
    def draw_map(ready: str, query: str, scheme: str) -> Any:
        view, result = statistics(query)
        return *overview_map(result, view, scheme), score_options(result)

    @app.callback(
        Output("heads-scatter", "figure"),
        Output("scatter-x", "data"),
        Output("scatter-y", "data"),
        Output("scattered", "data"),
        *drawn,
        State("scattered", "data"),
    )
    def draw_scatter(ready: str, query: str, scheme: str, scattered: str) -> Any:
        view, result = statistics(query)
        now = " ".join((HEAD_STATISTICS.key(view), view.x, view.y, scheme))
        if now == scattered:
            raise PreventUpdate
        return score_scatter(result, view, scheme), score_options(result), score_options(result), now

    @app.callback(
        Output("heads-table", "columnDefs"),
        Output("heads-table", "rowData"),
        Output("heads-table", "selectedRows"),
        Output("tabulated", "data"),
        *drawn,
        State("tabulated", "data"),
    )
    def fill_table(ready: str, query: str, scheme: str, tabulated: str) -> Any:
        view, result = statistics(query)
        now = HEAD_STATISTICS.key(view)
        table = score_table(result) if now != tabulated else (no_update, no_update)
        return *table, {"ids": [f"L{view.layer}H{view.head}"]}, now

    choose_on_click(app, ("heads-map", "clickData"), ("heads-scatter", "clickData"), ("heads-table", "cellClicked"))


def score_options(result: Any) -> list[dict[str, Any]]:
    """The scores to choose from; those that have no value on this text cannot be chosen."""
    return [
        {"value": name, "label": label, "disabled": name not in result.score_names}
        for name, label in HEAD_SCORES.items()
    ]


def overview_map(result: Any, view: View, scheme: str) -> tuple:
    if view.score not in result.score_names:
        return empty_figure(TALL, no_value(view.score)), {"height": f"{TALL}px"}, ""
    return score_map(result, figures(view)["heads-map"], HEAD_SCORES, scheme, TALL)


def score_scatter(result: Any, view: View, scheme: str) -> go.Figure:
    for score in (view.x, view.y):
        if score not in result.score_names:
            return empty_figure(TALL, no_value(score))
    return on_card(figures(view)["heads-scatter"].draw(result, scheme), TALL, revision=view.x + view.y)


def no_value(score: str) -> str:
    """Why a score has no value on a text."""
    if score == "virtual_sink_mass":
        reason = "This model has no learned sinks"
    elif score == "duplicate_token":
        reason = "No token of this text occurs twice"
    elif score.startswith("prefix_matching"):  # what follows a token that comes again at once is that token itself
        reason = "No token of this text comes again with others in between"
    else:
        reason = "This text is a single token"
    return f"{reason}, so<br>“{HEAD_SCORES[score]}” has no value. Choose another score."


def score_table(result: Any) -> tuple[list[dict], list[dict]]:
    """Columns and rows of the table: one row per head, one column per score."""
    names = [name for name in HEAD_SCORES if name in result.score_names]
    three_digits = {"function": "d3.format('.3f')(params.value)"}
    columns: list[dict] = [
        {  # sorts by layer, then head
            "field": "order",
            "headerName": "Head",
            "pinned": "left",
            "width": 84,
            "valueFormatter": {"function": "params.data.name"},
        }
    ]
    columns += [
        {
            "field": name,
            "headerName": HEAD_SCORES[name],
            "headerTooltip": result.quantities[name].definition,
            "type": "rightAligned",
            "width": 112,
            "wrapHeaderText": True,
            "valueFormatter": three_digits,
            "sortingOrder": ["desc", "asc", None],
        }
        for name in names
    ]
    n_layers, n_heads = result[names[0]].shape
    rows = [
        {"name": f"L{layer}H{head}", "order": layer * n_heads + head}
        | {name: float(result[name][layer, head]) for name in names}
        for layer in range(n_layers)
        for head in range(n_heads)
    ]
    return columns, rows
