"""The pattern of a head, or those of a layer, at any length: pooled from afar, exact from near, read on the text."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html
from dash.exceptions import PreventUpdate

from workbench.analyses.figures import show_controls
from workbench.app.components import card, graph, number, on_card, select
from workbench.app.jobs import Task
from workbench.app.recipes import HEAD_STATISTICS, Recipe, Shown, pattern_of
from workbench.app.selection import CHOSEN
from workbench.app.services import Services, when_drawn
from workbench.app.state import Span, View
from workbench.errors import WorkbenchError

NAME, TITLE = "pattern", "Pattern"
EXPLANATION = (
    "Where a head looks: each row is a token (the query), each column a token it may look at (the key). Drag over the "
    "map to zoom in, double-click to see all of it again; or walk over it with the arrow keys, Enter and Escape."
)
CONTROLS = {
    "show": ("show", "value"),
    "pooling": ("pooling", "value"),
    "scale": ("scale", "value"),
    "first_token": ("first-token", "value"),
    "weighting": ("weighting", "value"),
    "unit": ("unit", "value"),
    "queries": ("queries", "data"),
    "keys": ("keys", "data"),
}
SHOW = {"head": "One head", "layer": "All heads of layer"}
POOLINGS = {"max": "Maximum", "mean": "Mean"}
SCALES = {"linear": "Linear colour", "sqrt": "√ colour"}
FIRST = {"kept": "Shown as it is", "apart": "Coloured apart", "left out": "Left out"}
WEIGHTINGS = {"weight": "Weight", "value": "Weight × ‖value‖"}
UNITS = {"token": "By tokens", "word": "By words"}
DEFINITIONS = (
    (
        "Weight",
        "p_ij, the share of its attention that query i gives to key j. Grey cells are hidden by the mask: tokens that "
        "come later, and in layers with a window those beyond it.",
    ),
    (
        "Weight × ‖value‖",
        "p_ij ‖v_j W_O‖, the length of what key j adds to the head's output at query i, value bias included and before "
        "any norm of that output (Kobayashi et al. 2020, equation 5). A token that gets much attention but has a small "
        "value adds little.",
    ),
    (
        "Pooled",
        "Above 320 tokens a side, a cell stands for a block of tokens. Maximum keeps stripes of one token's width "
        "visible; mean averages over the visible pairs. Zoom in until every cell is one query and one key.",
    ),
    (
        "Token 0",
        "Many heads leave most of their attention on the first token (Xiao et al. 2023). Coloured apart: its column "
        "has a colour range of its own, so that the others can be told apart. Left out: the weights on the other keys, "
        "scaled to sum to 1, in the bars too.",
    ),
    (
        "By words",
        "The sum over the keys of a word, the mean over its queries. Words begin where the tokenizer marks a space "
        "before a piece, or does not mark that it continues a word. Shown where every token would have a cell.",
    ),
    ("Bars above", "Attention received: what a key, or all keys of a block together, get from the queries shown."),
    (
        "Bars at the right",
        "Entropy of a query's weights in nats, mean over the queries of a block: 0 when it looks at one token only.",
    ),
    ("√ colour", "Colours by the square root of the weight, to see what a dominant first token outshines."),
)
TALL = 640
ENDS = ("first-query", "last-query", "first-key", "last-key")
ZOOM_IN = "Zoom in until every cell is one token to read the weights on the text."
ALL_HEADS = "Click on a head, or choose it with the arrow keys and Enter, to read it on the text."


def layout(view: View) -> list[Any]:
    pattern = card(
        html.Span("Pattern", id="pattern-title"),
        html.Div(
            [
                number("first-query", "Queries", None, wait=0, width=72),
                number("last-query", "to", None, wait=0, width=72),
                number("first-key", "Keys", None, wait=0, width=72),
                number("last-key", "to", None, wait=0, width=72),
                dmc.Button("Show", id="zoom-in", n_clicks=0, size="compact-sm", variant="default"),
                dmc.Button("Show all", id="zoom-out", n_clicks=0, size="compact-sm", variant="default"),
            ],
            className="zoom",
            role="group",
            **{"aria-label": "The part of the text that is shown"},
        ),
        html.Div(
            [
                html.Span("", id="first-share", role="status"),
                select("first-token", "What becomes of token 0", view.first_token, FIRST, width=135),
            ],
            className="zoom first-token",
        ),
        html.P("", id="pattern-part", className="card-note", role="status"),
        html.Div(
            graph("pattern-map", "Attention pattern: queries down, keys across", TALL, square=True),
            id="pattern-cells",
            tabIndex="0",
            role="application",
            **{"aria-label": "Map of the pattern. Arrow keys walk over it, Enter zooms in, Escape shows all of it."},
        ),
        html.P("", id="pattern-cell", className="cell-line", role="status"),
        controls=[
            select("show", "Whose pattern is shown", view.show, SHOW, width=150),
            select("weighting", "What the colour is", view.weighting, WEIGHTINGS, width=145),
            select("unit", "What a row is", view.unit, UNITS, width=100),
            select("pooling", "How blocks are pooled", view.pooling, POOLINGS, width=105),
            select("scale", "Colour scale", view.scale, SCALES, width=120),
        ],
        note=html.Span("", id="pattern-note"),
    )
    reading = card(
        "On the text",
        html.Div(
            id="tokens",
            className="tokens",
            tabIndex="0",
            role="listbox",
            **{"aria-label": "Tokens. Use the arrow keys to choose a query; the keys it attends to are shaded."},
        ),
        html.P("", id="tokens-hint", className="empty"),
        html.Div(id="token-line", className="token-line", role="status"),
        note="Point at a token or a row of the map, or use the arrow keys: shading shows what it attends to.",
    )
    return [
        dcc.Store(id="queries", data=view.queries),
        dcc.Store(id="keys", data=view.keys),
        dcc.Store(id="ends", data=ENDS),
        dcc.Store(id="typed-part", data=[]),
        dcc.Store(id="token-pieces", data=[]),
        dcc.Store(id="opened-head", data=None),
        html.Div([pattern, reading], className="columns pattern-columns"),
    ]


def recipe_of(view: View) -> Recipe:
    """The patterns that the page shows: the head's, or those of its layer."""
    one = pattern_of(view)
    ways = {
        "without_first": view.first_token == "left out" or None,
        "value_weighted": view.weighting == "value" or None,
    }
    if view.show == "head":
        return replace(one, options={**one.options, **ways, "words": view.unit == "word" or None})
    part = {name: one.options[name] for name in ("queries", "keys", "pooling")}
    return Recipe(
        "layer_patterns", f"Patterns of layer {view.layer}", arguments=(view.layer,), options={**part, **ways}
    )


def figures(view: View) -> dict[str, Shown]:
    if not view.has_head:
        return {}
    options = {"scale": view.scale, "first_apart": view.first_token == "apart" or None}
    if view.show == "layer":
        return {"pattern-map": Shown(recipe_of(view), "mosaic", options | {"chosen": view.head})}
    return {"pattern-map": Shown(recipe_of(view), "pattern", options)}


def tasks(services: Services, view: View) -> list[Task]:
    return [services.task(view, recipe_of(view) if view.has_head else HEAD_STATISTICS)]


def register(app: Dash, services: Services) -> None:
    @app.callback(
        Output("pattern-map", "figure"),
        Output("pattern-title", "children"),
        Output("first-share", "children"),
        Output("pattern-part", "children"),
        Output("pattern-note", "children"),
        Output("token-pieces", "data"),
        Output("tokens-hint", "children"),
        *(Output(end, "value") for end in ENDS),
        *when_drawn(NAME),
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        shown = figures(view)["pattern-map"] if view.has_head else None
        if shown is None:
            raise PreventUpdate
        result = services.result(view, shown.recipe)
        one = view.show == "head"
        return (
            on_card(shown.draw(result, scheme), TALL, revision=f"{view.show} {view.queries} {view.keys}"),
            f"L{view.layer}H{view.head}" if one else f"Layer {view.layer}",
            first_share(result),
            shown_part(result),
            description(result),
            token_pieces(result) if one else [],
            "" if one and reads_on_text(result) else ZOOM_IN if one else ALL_HEADS,
            *shown_ends(result),
        )

    @app.callback(
        Output("queries", "data", allow_duplicate=True),
        Output("keys", "data", allow_duplicate=True),
        Input("pattern-map", "relayoutData"),
        State("view", "data"),
    )
    def zoom(event: dict | None, query: str) -> Any:
        view = services.view_on(NAME, query)
        if view.show == "layer":
            raise PreventUpdate
        return zoomed(event or {}, services.result(view, recipe_of(view)))

    @app.callback(
        Output("queries", "data", allow_duplicate=True),
        Output("keys", "data", allow_duplicate=True),
        Input("typed-part", "data"),
        Input("zoom-out", "n_clicks"),
        State("view", "data"),
    )
    def show(typed: list, out: int, query: str) -> Any:
        if ctx.triggered_id == "zoom-out":
            return None, None
        view = services.view_on(NAME, query)
        n_tokens = services.result(view, recipe_of(view)).provenance.n_tokens
        return chosen_span("queries", typed[:2], n_tokens), chosen_span("keys", typed[2:], n_tokens)

    app.clientside_callback(
        ClientsideFunction("pattern", "openHead"),
        CHOSEN,
        Input("pattern-map", "clickData"),
        Input("opened-head", "data"),
        State("show", "value"),
    )
    app.clientside_callback(
        ClientsideFunction("pattern", "isByTokens"),
        Output("unit", "disabled"),
        Input("show", "value"),
        prevent_initial_call=False,
    )
    app.clientside_callback(ClientsideFunction("pattern", "showTokens"), Input("token-pieces", "data"))

    # The browser reads the fields itself: what they report to callbacks can be a keystroke behind.
    app.clientside_callback(
        ClientsideFunction("workbench", "typedNumbers"),
        Output("typed-part", "data"),
        Input("zoom-in", "n_clicks"),
        State("ends", "data"),
    )


def shown_ends(result: Any) -> tuple[int, int, int, int]:
    """The first and the last query and key that the map shows."""
    (first_query, end_query), (first_key, end_key) = result.settings["queries"], result.settings["keys"]
    return first_query, end_query - 1, first_key, end_key - 1


def first_share(result: Any) -> str:
    """What share of the attention is on token 0, from the result's own summary."""
    return result.summary().splitlines()[2].partition(";")[0].removesuffix(".") + "."


def shown_part(result: Any) -> str:
    """Which tokens the map shows, and how many of them are a cell."""
    first_query, last_query, first_key, last_key = shown_ends(result)
    first, last = (f"{first_query}", f"{last_query}"), (f"{first_key}", f"{last_key}")
    if "query" in result.coordinates:
        queries, keys = result.coordinates["query"], result.coordinates["key"]
        first = f"{first_query} “{visible(queries[0])}”", f"{last_query} “{visible(queries[-1])}”"
        last = f"{first_key} “{visible(keys[0])}”", f"{last_key} “{visible(keys[-1])}”"
    return (
        f"Queries {first[0]} to {first[1]}, keys {last[0]} to {last[1]}, "
        f"of {result.provenance.n_tokens:,} tokens. {resolution(result)}"
    )


def resolution(result: Any) -> str:
    """What one cell of the map stands for."""
    settings = result.settings
    if settings.get("words"):
        return "Each cell is the sum over a word's keys, the mean over its queries."
    too_long = ""
    if settings.get("words_do_not_fit"):
        too_long = f" For words, choose at most {settings['max_cells']} queries and keys."
    if result.is_exact:
        return f"Each cell is one query and one key.{too_long}"
    rows, columns = settings["block"]
    how = {"max": "maximum", "mean": "mean"}[settings["pooling"]]
    return f"Each cell is {rows} queries × {columns} keys, {how}.{too_long}"


def chosen_span(name: str, ends: list, n_tokens: int) -> Span:
    """The span of a typed range of tokens, both ends included.

    Raises:
        WorkbenchError: no range within the text.
    """
    match ends:
        case [int(first), int(last)] if 0 <= first <= last < n_tokens:
            return first, last + 1
    raise WorkbenchError(f"the {name} to show must be a range from 0 to {n_tokens - 1}, the lower end first")


def zoomed(event: dict[str, Any], result: Any) -> tuple[Span | None, Span | None]:
    """The queries and keys that a drag over the map has chosen. Raises PreventUpdate for other events."""
    if event.get("xaxis3.autorange") or event.get("yaxis3.autorange"):
        return None, None
    spans = []
    for axis, name in (("yaxis3", "query"), ("xaxis3", "key")):
        edges = result.edges(name)
        first, end = edges[0], edges[-1]
        ends = [event.get(f"{axis}.range[{side}]") for side in (0, 1)]
        cells = sorted(float(edge) for edge in ends if isinstance(edge, (int, float)))
        if len(cells) == 2:  # cell c reaches from c − ½ to c + ½
            low, high = math.floor(cells[0] + 0.5), math.ceil(cells[1] + 0.5)
            first, end = edges[min(max(low, 0), len(edges) - 1)], edges[min(max(high, 0), len(edges) - 1)]
        spans.append((first, end))
    if spans == [tuple(result.settings["queries"]), tuple(result.settings["keys"])] or any(a >= b for a, b in spans):
        raise PreventUpdate
    return spans[0], spans[1]


def description(result: Any) -> str:
    """What the pattern amounts to, from the result's own summary."""
    return " ".join(result.summary().splitlines()[3:])


def reads_on_text(result: Any) -> bool:
    """Whether rows and columns are pieces of the text."""
    return result.is_exact or result.has_words


def token_pieces(result: Any) -> list[dict[str, Any] | None]:
    """The shown tokens, or words, for pattern.js; None where some of the text is left out.

    Each has its text, whether a line ends behind it, its position, and its row and column in the map where it has them.
    """
    if not reads_on_text(result):
        return []
    rows, columns = ({first: i for i, first in enumerate(result.edges(axis)[:-1])} for axis in ("query", "key"))
    pieces: dict[Span, str] = {}
    for axis in ("key", "query"):
        edges = result.edges(axis)
        pieces |= dict(zip(pairwise(edges), result.texts(axis), strict=True))
    found: list[dict[str, Any] | None] = []
    reached = min(first for first, _ in pieces)
    for (first, end), text in sorted(pieces.items()):
        if first > reached:
            found.append(None)
        reached = end
        place = {"position": first, "q": rows.get(first), "k": columns.get(first)}
        found.append({"text": visible(text), "ends": "\n" in text} | place)
    return found


def visible(text: str) -> str:
    """A token as it is read in running text: control characters and bare spaces are shown, markup is text."""
    return show_controls(text) if text.strip(" ") else "␣" * max(len(text), 1)
