"""One head's attention pattern, at any length: pooled from afar, exact from near, and read on the text itself."""

from __future__ import annotations

import math
from typing import Any

import dash_mantine_components as dmc
from dash import ClientsideFunction, Dash, Input, Output, State, ctx, dcc, html
from dash.exceptions import PreventUpdate

from workbench.analyses.figures import show_controls
from workbench.app.components import card, graph, number, on_card, select
from workbench.app.jobs import Task
from workbench.app.recipes import HEAD_STATISTICS, Shown, pattern_of
from workbench.app.services import Services
from workbench.app.state import Span, View
from workbench.errors import WorkbenchError

NAME, TITLE = "pattern", "Pattern"
EXPLANATION = (
    "Where one head looks: each row is a token (the query), each column a token it may look at (the key). "
    "Drag over the map to zoom in; double-click to see all of it again."
)
CONTROLS = {
    "pooling": ("pooling", "value"),
    "scale": ("scale", "value"),
    "queries": ("queries", "data"),
    "keys": ("keys", "data"),
}
DEFINITIONS = (
    (
        "Weight",
        "p_ij, the share of its attention that query i gives to key j. Grey cells are hidden by the mask: tokens that "
        "come later, and in layers with a window those beyond it.",
    ),
    (
        "Pooled",
        "Above 320 tokens a side, a cell stands for a block of tokens. Maximum keeps stripes of one token's width "
        "visible; mean averages over the visible pairs. Zoom in until every cell is one query and one key.",
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
        html.P("", id="pattern-part", className="card-note", role="status"),
        graph("pattern-map", "Attention pattern: queries down, keys across", TALL, square=True),
        controls=[
            select("pooling", "How blocks are pooled", view.pooling, {"max": "Maximum", "mean": "Mean"}, width=110),
            select("scale", "Colour scale", view.scale, {"linear": "Linear colour", "sqrt": "√ colour"}, width=130),
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
        html.Div([pattern, reading], className="columns pattern-columns"),
    ]


def figures(view: View) -> dict[str, Shown]:
    return {"pattern-map": Shown(pattern_of(view), "pattern", {"scale": view.scale})} if view.has_head else {}


def tasks(services: Services, view: View) -> list[Task]:
    return [services.task(view, pattern_of(view) if view.has_head else HEAD_STATISTICS)]


def register(app: Dash, services: Services) -> None:
    @app.callback(
        Output("pattern-map", "figure"),
        Output("pattern-title", "children"),
        Output("pattern-part", "children"),
        Output("pattern-note", "children"),
        Output("tokens", "children"),
        Output("tokens-hint", "children"),
        *(Output(end, "value") for end in ENDS),
        Input("ready", "data"),
        Input("view", "data"),
        Input("scheme", "data"),
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result = services.result(view, pattern_of(view))
        return (
            on_card(figures(view)["pattern-map"].draw(result, scheme), TALL, revision=f"{view.queries} {view.keys}"),
            f"L{view.layer}H{view.head}",
            shown_part(result),
            description(result),
            token_spans(result),
            "" if result.is_exact else "Zoom in until every cell is one token to read the weights on the text.",
            *shown_ends(result),
        )

    @app.callback(
        Output("queries", "data", allow_duplicate=True),
        Output("keys", "data", allow_duplicate=True),
        Input("pattern-map", "relayoutData"),
        State("view", "data"),
        prevent_initial_call=True,
    )
    def zoom(event: dict | None, query: str) -> Any:
        view = services.view_on(NAME, query)
        return zoomed(event or {}, services.result(view, pattern_of(view)))

    @app.callback(
        Output("queries", "data", allow_duplicate=True),
        Output("keys", "data", allow_duplicate=True),
        Input("typed-part", "data"),
        Input("zoom-out", "n_clicks"),
        State("view", "data"),
        prevent_initial_call=True,
    )
    def show(typed: list, out: int, query: str) -> Any:
        if ctx.triggered_id == "zoom-out":
            return None, None
        view = services.view_on(NAME, query)
        result = services.result(view, pattern_of(view))
        n_tokens = result.provenance.n_tokens
        return chosen_span("queries", typed[:2], n_tokens), chosen_span("keys", typed[2:], n_tokens)

    # The browser reads the fields itself: what they report to callbacks can be a keystroke behind.
    app.clientside_callback(
        ClientsideFunction("workbench", "typedNumbers"),
        Output("typed-part", "data"),
        Input("zoom-in", "n_clicks"),
        State("ends", "data"),
        prevent_initial_call=True,
    )


def shown_ends(result: Any) -> tuple[int, int, int, int]:
    """The first and the last query and key that the map shows."""
    (first_query, end_query), (first_key, end_key) = result.settings["queries"], result.settings["keys"]
    return first_query, end_query - 1, first_key, end_key - 1


def shown_part(result: Any) -> str:
    """Which tokens the map shows, and how many of them are a cell."""
    first_query, last_query, first_key, last_key = shown_ends(result)
    queries, keys = result.coordinates["query"], result.coordinates["key"]
    return (
        f"Queries {first_query} “{visible(queries[0])}” to {last_query} “{visible(queries[-1])}”, "
        f"keys {first_key} “{visible(keys[0])}” to {last_key} “{visible(keys[-1])}”, "
        f"of {result.provenance.n_tokens:,} tokens. {resolution(result)}"
    )


def resolution(result: Any) -> str:
    """What one cell of the map stands for."""
    if result.is_exact:
        return "Each cell is one query and one key."
    rows, columns = result.settings["block"]
    how = {"max": "maximum", "mean": "mean"}[result.settings["pooling"]]
    return f"Each cell is {rows} queries × {columns} keys, {how}."


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
    block = result.settings["block"]
    spans = []
    for axis, name, size in (("yaxis3", "queries", block[0]), ("xaxis3", "keys", block[1])):
        first, end = result.settings[name]
        edges = [event.get(f"{axis}.range[{side}]") for side in (0, 1)]
        ends = [float(edge) for edge in edges if isinstance(edge, (int, float))]
        if len(ends) == 2:
            low, high = sorted(ends)  # in cells; cell c reaches from c − ½ to c + ½
            first, end = (
                max(first, first + size * math.floor(low + 0.5)),
                min(end, first + size * math.ceil(high + 0.5)),
            )
        spans.append((first, end))
    if spans == [tuple(result.settings["queries"]), tuple(result.settings["keys"])] or any(a >= b for a, b in spans):
        raise PreventUpdate
    return spans[0], spans[1]


def description(result: Any) -> str:
    """What the pattern amounts to, from the result's own summary."""
    return " ".join(result.summary().splitlines()[2:])


def token_spans(result: Any) -> list[Any]:
    """The shown tokens as text; data-q and data-k are their row and column in the map."""
    if not result.is_exact:
        return []
    (first_query, end_query), (first_key, end_key) = result.settings["queries"], result.settings["keys"]
    texts = dict(zip(range(first_key, end_key), result.coordinates["key"], strict=True))
    texts |= dict(zip(range(first_query, end_query), result.coordinates["query"], strict=True))
    spans: list[Any] = []
    for position, text in sorted(texts.items()):
        if spans and position - 1 not in texts:
            spans.append(html.Span(" … ", className="muted"))
        places = {"data-position": str(position)}
        if first_query <= position < end_query:
            places["data-q"] = str(position - first_query)
        if first_key <= position < end_key:
            places["data-k"] = str(position - first_key)
        spans.append(html.Span(visible(text), className="token", role="option", **places))
        if "\n" in text:
            spans.append(html.Br())
    return spans


def visible(text: str) -> str:
    """A token as it is read in running text: control characters and bare spaces are shown, markup is text."""
    return show_controls(text) if text.strip(" ") else "␣" * max(len(text), 1)
