"""Predictions along the depth: the logit lens, and which parts push one answer against another."""

from __future__ import annotations

from typing import Any

import dash_mantine_components as dmc
import numpy as np
from dash import ClientsideFunction, Dash, Input, Output, html

from workbench.app.components import (
    card,
    empty_figure,
    graph,
    number,
    on_card,
    plain_table,
    tiles,
    typed_field,
)
from workbench.app.jobs import Task
from workbench.app.messages import error_message
from workbench.app.pages.pattern import visible
from workbench.app.recipes import Recipe, Shown, chosen_head
from workbench.app.selection import CHOSEN, LAYER_HEIGHT, choose_on_click
from workbench.app.services import Services, when_drawn
from workbench.app.state import MAX_WORD, View

NAME, TITLE = "lens", "Logit lens"
EXPLANATION = (
    "What the model would predict if it stopped after each layer: the stream at every depth, read with the final norm "
    "and the unembedding. Early layers need not write in that language, so a wrong word there is no sign of ignorance. "
    "Below: which heads and MLPs push the right word, and which another one."
)
CONTROLS = {
    "lens_position": ("lens-position", "value"),
    "target": ("target", "value"),
    "foil": ("foil", "value"),
}
DEFINITIONS = (
    (
        "Depth",
        "How many layers have been applied: 0 is the embedding, the last is the model's output (nostalgebraist 2020).",
    ),
    ("Rank", "Of the token that follows in the text among all of the vocabulary; 1 is the most likely."),
    ("KL", "KL(model's prediction ‖ that of this depth), in nats."),
    ("Settled", "The first depth from which on the final prediction stays the most likely one."),
    (
        "Direct logit attribution",
        "logit(target) − logit(foil) as the sum of what the embedding, every head, every MLP and the biases wrote, "
        "with the final norm's scale held at its value here (Elhage et al. 2021). The parts add up exactly. What a "
        "part made later layers write is theirs: ablation tells what it does in all.",
    ),
    (
        "Target, foil",
        "Words of one token. Without others, the target is the token that follows, or the likeliest where none does, "
        "and the foil the likeliest other one. A word typed without a space before it may be meant with one; the "
        "likelier of both counts.",
    ),
)
TALL = 400
SHOWN = 12  # tokens that a map can name, one column each
PARTS_TALL, SHOWN_PARTS = 520, 5


def layout(view: View) -> list[Any]:
    lens = card(
        "Most likely next token at every depth",
        graph("lens-map", "Most likely next token and its probability, by depth and position", TALL),
        note=html.Span("", id="lens-note"),
        className="wide",
    )
    curves = card(
        "What is known at every depth",
        graph("lens-curves", "Loss, KL to the final prediction and entropy, by depth", TALL),
        note="Means over all positions of the text.",
    )
    rank = card(
        html.Span("One token along the layers", id="lens-title"),
        html.Div(id="lens-ranks", className="scrolling"),
        controls=[
            number("lens-position", "After token", view.lens_position, high=10**7, width=110, placeholder="last known")
        ],
    )
    answers = html.Div(
        [_word("target", "Target", view.target), _word("foil", "Foil", view.foil)], className="card-controls"
    )
    parts = card(
        html.Span("What pushes the target, and what the foil", id="direct-title"),
        html.Div(id="direct-message"),
        graph("direct-parts", "The largest parts of the logit difference, one after the other", PARTS_TALL),
        controls=[answers],
        note=html.Span("", id="direct-note"),
    )
    heads = card(
        "Every head",
        graph("direct-map", "What every head adds to the logit difference", TALL),
        html.Div(id="direct-table"),
        note="Red pushes the target, blue the foil. Click a head to choose it.",
    )
    return [html.Div(id="lens-tiles"), html.Div([lens, curves, rank, parts, heads], className="columns")]


def _word(id: str, label: str, value: str) -> html.Label:
    """A word of one token; it counts once nothing has been typed for a moment."""
    field = dmc.TextInput(
        id=id,
        value=value,
        placeholder="by itself",
        debounce=700,
        size="xs",
        w=110,
        inputProps={"maxLength": MAX_WORD},
        spellCheck=False,
        **{"aria-label": label},
    )
    return typed_field(label, field)


LENS = Recipe("logit_lens", "Logit lens")


def figures(view: View) -> dict[str, Shown]:
    def part(result: Any) -> dict[str, int]:
        first = first_shown(result, chosen_position(result, view))
        return {"first": first, "last": first + SHOWN}

    direct = parts_of(view)
    return {
        "lens-map": Shown(LENS, "map", part),
        "lens-curves": Shown(LENS, "curves"),
        "direct-parts": Shown(direct, "parts"),
        "direct-map": Shown(direct, "map", {"chosen": chosen_head(view)}),
    }


def parts_of(view: View) -> Recipe:
    """What the prediction after the chosen token is made of."""
    options = {"position": view.lens_position, "target": view.target or None, "foil": view.foil or None}
    return Recipe("direct_logit_attribution", "Direct logit attribution", options=options)


def tasks(services: Services, view: View) -> list[Task]:
    return [services.task(view, LENS), services.task(view, parts_of(view), optional=True)]


def register(app: Dash, services: Services) -> None:
    @app.callback(
        Output("lens-map", "figure"),
        Output("lens-map", "style"),
        Output("lens-note", "children"),
        Output("lens-curves", "figure"),
        Output("lens-tiles", "children"),
        Output("lens-title", "children"),
        Output("lens-ranks", "children"),
        *when_drawn(NAME),
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        result, shown = services.result(view, LENS), figures(view)
        place = chosen_position(result, view)
        first = first_shown(result, place)
        tall = max(TALL, 21 * len(result["rank"]) + 120)
        return (
            on_card(shown["lens-map"].draw(result, scheme), tall, revision=f"map {first}"),
            {"height": f"{tall}px"},
            shown_part(result, first),
            on_card(shown["lens-curves"].draw(result, scheme), TALL, revision="curves"),
            numbers_that_matter(result),
            f"After token {place} “{visible(result.coordinates['query'][place])}”",
            rank_table(result, place),
        )

    @app.callback(
        Output("direct-title", "children"),
        Output("direct-message", "children"),
        Output("direct-parts", "figure"),
        Output("direct-note", "children"),
        Output("direct-map", "figure"),
        Output("direct-map", "style"),
        Output("direct-table", "children"),
        *when_drawn(NAME),
    )
    def draw_parts(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        error = services.jobs.error(parts_of(view).key(view))
        if error is not None:
            nothing = empty_figure(TALL, "Nothing to draw")
            return (
                "What a prediction is made of",
                error_message(error),
                nothing,
                "",
                nothing,
                {"height": f"{TALL}px"},
                "",
            )
        result, shown = services.result(view, parts_of(view)), figures(view)
        tall = max(TALL, LAYER_HEIGHT * len(result["mlp_contribution"]) + 90)
        target, foil = (visible(str(result.settings[name])) for name in ("target", "foil"))
        return (
            f"What pushes “{target}”, and what “{foil}”, after token {result.settings['position']}",
            [],
            on_card(shown["direct-parts"].draw(result, scheme), PARTS_TALL, revision="parts"),
            about_parts(result),
            on_card(shown["direct-map"].draw(result, scheme), tall, revision="direct"),
            {"height": f"{tall}px"},
            part_table(result),
        )

    choose_on_click(app, ("direct-map", "clickData"), ("direct-parts", "clickData"))

    app.clientside_callback(
        ClientsideFunction("choose", "lens_position"),
        CHOSEN,
        Input("lens-map", "clickData"),
    )


def chosen_position(result: Any, view: View) -> int:
    """The position that is looked at: the view's, as far as the text goes, else the last one that a token follows."""
    last = len(result.coordinates["query"]) - 1
    return max(last - 1, 0) if view.lens_position is None else min(view.lens_position, last)


def first_shown(result: Any, place: int) -> int:
    """The first column of the map: a page of the text that holds ``place``."""
    return max(0, min(place - SHOWN // 2, len(result.coordinates["query"]) - SHOWN))


def shown_part(result: Any, first: int) -> str:
    n = len(result.coordinates["query"])
    if n <= SHOWN:
        return "Click a column to follow its prediction through the layers."
    return f"Tokens {first} to {first + SHOWN - 1} of {n:,}; choose another token at the card below to move on."


def numbers_that_matter(result: Any) -> html.Div:
    ranks, depth = result["rank"][:, :-1], len(result["rank"]) - 1  # nothing follows the last token
    if ranks.size:
        half_way, at_end = (f"{np.median(ranks[at]):,.0f}" for at in (depth // 2, -1))
        right = f"{np.mean(ranks[-1] == 1):.0%}"
    else:
        half_way = at_end = right = "–"
    return tiles(
        ("Median rank, half-way", half_way, f"of the next token, depth {depth // 2}"),
        ("Median rank, at the end", at_end, "of the next token"),
        ("Predicted right", right, "of the text's tokens"),
        ("Settled at depth", f"{np.median(result.first_right):.0f}", f"of {depth}, median"),
    )


def rank_table(result: Any, place: int) -> html.Table:
    """How the prediction after one token changes from depth to depth; ↑ is a better rank than the depth before."""
    ranks = result["rank"][:, place]
    rows = []
    for depth, rank in enumerate(ranks):
        moved = "" if depth == 0 or np.isnan(rank) else _moved(ranks[depth - 1] - rank)
        rows.append(
            (
                str(depth),
                f"“{visible(str(result['top_token'][depth, place]))}”",
                f"{result['top_probability'][depth, place]:.3f}",
                "–" if np.isnan(rank) else f"{rank:,.0f} {moved}",
                f"{result['kl_to_final'][depth, place]:.2f}",
            )
        )
    texts = result.coordinates["query"]
    following = texts[place + 1] if place + 1 < len(texts) else None
    caption = f"Rank of “{visible(following)}”, the token that follows." if following else "Nothing follows here."
    return plain_table(("Depth", "Most likely", "Probability", "Rank of what follows", "KL (nats)"), rows, caption)


def about_parts(result: Any) -> str:
    whole, gap = float(result["logit_difference"][0]), float(abs(result["gap"][0]))
    parts = result.parts()
    return (
        f"L2H1 is a head, M2 an MLP, L2 bias what attention adds whatever it reads. The {len(parts)} parts add up to "
        f"{sum(parts.values()):+.4f}; the model’s own logit difference is {whole:+.4f}, {gap:.0e} away (rounding)."
    )


def part_table(result: Any) -> html.Table:
    """The parts that push the target most, beside those that push the foil most."""
    parts = [*result.parts().items()]
    rows = [
        (str(place), name, f"{value:+.3f}", other, f"{opposed:+.3f}")
        for place, ((name, value), (other, opposed)) in enumerate(
            zip(parts[:SHOWN_PARTS], parts[::-1][:SHOWN_PARTS], strict=True), start=1
        )
    ]
    titles = ("", "Most for the target", "Logits", "Most for the foil", "Logits")
    return plain_table(titles, rows)


def _moved(by: float) -> str:
    return "" if by == 0 else f"↑{by:,.0f}" if by > 0 else f"↓{-by:,.0f}"
