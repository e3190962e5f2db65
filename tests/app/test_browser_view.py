"""The view in the browser: it is what the address says, whichever page is open, and clicks choose from it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from workbench.app.controls import BY_PAGE
from workbench.app.state import PAGES, View, from_query, to_query

Open = Callable[[], Any]

TEXT = "Mara met Tomas at the harbour. Mara gave Tomas a map & 10 % more? " * 3
# Each field has another value than the first; all of them make sense for the demo model and this text.
CHANGED = View(
    text=TEXT, max_tokens=40, layer=2, head=1, show="layer", score="sink_mass", x="entropy", y="previous_token",
    pooling="mean", scale="sqrt", queries=(2, 9), keys=(1, 7), first_token="apart", weighting="value", unit="word",
    induction_score="previous_token", sink_score="sink_mass",
    length=16, sequences=2, seed=3, off=("L1H2", "M0", "L2:>0"), position=4,
    lens_position=5, task="greater_than", measure="entropy", prompt=1, target=" the", foil=" a",
    new_tokens=5, temperature=0.25, draw=7, step=2, step_score="first_token", other_text="Tomas met Mara.",
    other_layer=1, other_head=3, compared_score="entropy",
)  # fmt: skip


def test_the_example_changes_what_controls_hold() -> None:
    same = {name for name, value in vars(CHANGED).items() if value == getattr(View(), name)}
    assert same == {
        "model", "page", "ablation", "own_prompts", "asked", "other_model", "opened",
    }  # fmt: skip
    held = {field for controls in BY_PAGE.values() for field in controls}
    assert set(vars(CHANGED)) - held == {"model", "text", "max_tokens", "page"}


@pytest.mark.parametrize("name", [name for name in PAGES if name != "result"])
def test_every_page_keeps_what_the_address_says(name: str, watched: Open, dashboard: str) -> None:
    view = dataclasses.replace(CHANGED, page=name)
    page = watched()
    page.goto(dashboard + to_query(view))
    page.wait_for_selector(f"#page-{name}:not([hidden]) h1")
    page.wait_for_function(
        "document.getElementById('progress').hidden && document.querySelector('#context-facts').textContent"
    )
    page.wait_for_timeout(500)  # what controls report once they are there
    assert from_query(urlsplit(page.url).query, View()) == (view, [])


def test_a_page_comes_when_it_is_opened_and_stays_with_what_was_chosen_on_it(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=1, head=2)
    page.drawn("heads-pattern")
    assert page.locator("#page-lens *").count() == 0
    page.click("#go-lens")
    page.drawn("lens-map")
    page.evaluate("document.getElementById('lens-map').mark = 'the same'")
    page.fill("#lens-position", "3")
    page.wait_for_view(**{"depth-of": "3", "page": "lens"})
    page.click("#go-heads")
    page.wait_for_selector("#heads-pattern", state="visible")
    assert page.view()["depth-of"] == "3" and page.is_hidden("#page-lens")
    assert page.get_attribute("#go-heads", "aria-current") == "page" and page.title() == "Heads · Attention Workbench"
    page.click("#go-lens")
    page.wait_for_selector("#lens-title >> text=/After token 3 /")
    assert page.evaluate("document.getElementById('lens-map').mark") == "the same"
    page.go_back()
    page.go_back()  # over the page in between to the first time on this one
    page.wait_for_view(page="lens")
    page.wait_for_selector("#lens-position", state="visible")


def test_fields_change_together_with_a_text_whichever_page_is_open(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="lens", layer=1, head=2, **{"depth-of": 3})
    page.wait_for_selector("#lens-title >> text=/After token 3 /")
    page.click("#go-heads")
    page.drawn("heads-pattern")
    page.fill("#text", "Hugo went home. Hugo went away.")
    page.click("#analyse")
    page.wait_for_view(text="Hugo went home. Hugo went away.")
    assert "depth-of" not in page.view()
    page.click("#go-lens")
    page.wait_for_selector("#lens-title >> text=/After token 1?[0-9] /")
    assert page.input_value("#lens-position") == ""


def test_back_leads_to_an_address_that_was_opened_as_a_link(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=1, head=1)
    page.drawn("heads-pattern")
    page.click("#go-sinks")
    page.wait_for_selector("#page-sinks h1")
    page.wait_for_view(page="sinks")
    page.go_back()
    page.wait_for_selector("#heads-map", state="visible")
    assert page.view()["page"] == "heads" and page.is_hidden("#page-sinks")
    page.go_forward()
    page.wait_for_selector("#page-sinks h1", state="visible")


def test_what_is_corrected_is_no_step(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="lens", layer=1, head=1)
    page.drawn("lens-map")
    page.open(dashboard, layer=99, head=-3)  # one that the model lacks, and one that is no number
    page.drawn("heads-pattern")
    page.wait_for_view(layer="2")
    page.go_back()
    page.wait_for_view(page="lens", layer="1")


def test_a_place_beyond_the_last_becomes_the_last(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="generation", layer=1, head=1, new=4, step=9)
    page.wait_for_view(step="3")
    page.wait_for_selector("#step-title >> text=/^Step 3 of 4/")
    page.open(dashboard, page="lens", layer=1, head=1, text="Mara met Mara.", **{"depth-of": 999})
    page.wait_for_selector("#lens-title >> text=/^After token [0-9] /")
    last = page.text_content("#lens-title").split()[2]
    page.wait_for_view(**{"depth-of": last})


def test_keys_that_follow_each_other_fast_lose_no_step(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="generation", layer=1, head=1, step=2, temperature=0.1234)
    page.wait_for_selector("#step-title >> text=/^Step 2 of 24/")
    page.focus("#step-text")
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    page.wait_for_view(step="12")
    page.wait_for_selector("#step-title >> text=/^Step 12 of 24/")
    page.wait_for_function("document.getElementById('step').value === '12'")
    page.focus("#temperature")
    page.keyboard.press("Shift")
    page.focus("#step-text")
    page.wait_for_timeout(1500)  # longer than any box waits
    assert page.view()["temperature"] == page.input_value("#temperature") == "0.1234"


def test_a_box_that_nobody_has_been_at_chooses_nothing(watched: Open, dashboard: str) -> None:
    """A box that is filled twice within its wait may report what it held first."""
    page = watched()
    page.open(dashboard, layer=3, head=3)
    page.drawn("heads-pattern")
    page.wait_for_timeout(600)  # longer than the wait
    page.evaluate("window.dash_clientside.set_props('layer', { value: 1 })")
    page.wait_for_timeout(900)
    page.wait_for_function("document.getElementById('layer').value === '3'")
    assert page.view()["layer"] == "3"
    page.fill("#layer", "1")
    page.wait_for_selector("#heads-pattern-title >> text=Pattern of L1H3")
    page.wait_for_view(layer="1")


def test_what_is_typed_counts_also_where_the_box_reported_it_last(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=1, head=1)
    page.drawn("heads-pattern")
    page.fill("#head", "3")
    page.wait_for_view(head="3")
    page.wait_for_timeout(600)  # longer than the wait
    page.evaluate("window.dash_clientside.set_props('chosen', { data: { head: 1 } })")
    page.wait_for_function("document.getElementById('head').value === '1'")
    page.wait_for_view(head="1")
    page.fill("#head", "3")  # within the wait: of 3, 1, 3 the box knows of no change
    page.wait_for_view(head="3")
    page.wait_for_selector("#heads-pattern-title >> text=Pattern of L1H3")
    page.fill("#layer", "")
    page.focus("#head")  # a box that is left empty gets back what it held
    page.wait_for_function("document.getElementById('layer').value === '1'")
    page.fill("#layer", "002")
    page.wait_for_view(layer="2")


def test_an_emptied_field_of_the_head_waits_and_an_empty_model_is_told(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=3, head=3)
    page.drawn("heads-pattern")
    page.fill("#layer", "")
    page.wait_for_timeout(600)  # longer than a pause in typing
    page.fill("#layer", "1")
    page.wait_for_selector("#heads-pattern-title >> text=Pattern of L1H3")
    page.fill("#model", "")
    page.click("#analyse")
    page.wait_for_selector("#alert >> text=no model is named")


def test_a_page_that_arrives_late_brings_no_old_values(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=1, head=1, **{"depth-of": 3})
    page.drawn("heads-pattern")

    held: list[Any] = []

    def hold(route: Any) -> None:
        is_mount = "missing-page" in (route.request.post_data or "")
        held.append(route) if is_mount else route.continue_()

    page.route(re.compile("_dash-update-component"), hold)
    page.click("#go-lens")
    page.fill("#text", "Hugo went home. Hugo went away.")
    page.click("#analyse")
    page.wait_for_view(text="Hugo went home. Hugo went away.", page="lens")
    page.wait_for_timeout(500)
    (route,) = held
    route.continue_()
    page.drawn("lens-map")
    assert "depth-of" not in page.view() and page.input_value("#lens-position") == ""


LATE = """
() => {
    const { view } = window.dash_clientside;
    const correction = { of: "?v=1&page=heads", layer: 0 };
    window.dash_clientside.callback_context = { triggered: [{ prop_id: "correction.data", value: correction }] };
    const fields = [{ field: "layer", name: "layer", initial: null, page: "", id: "layer", property: "value" }];
    return view.amend({}, {}, correction, {}, fields)[0] === window.dash_clientside.no_update;
}
"""


def test_a_correction_of_an_earlier_address_changes_nothing(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=3, head=3)
    page.drawn("heads-pattern")
    assert page.evaluate("window.dash_clientside.no_update") and page.view()["layer"] == "3"
    page.evaluate(LATE)
    page.wait_for_timeout(300)
    assert page.view()["layer"] == page.input_value("#layer") == "3"


CHOSEN = """
([what, event]) => {
    const context = { triggered: [{ prop_id: "map.clickData", value: event }] };
    window.dash_clientside.callback_context = context;
    const { no_update } = window.dash_clientside;
    const found = window.dash_clientside.choose[what](event);
    return found === no_update ? null : found;
}
"""


def test_a_click_names_a_head_or_a_place_or_nothing(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard)
    page.drawn("heads-map")

    def chosen(what: str, event: Any) -> dict | None:
        return page.evaluate(CHOSEN, [what, event])

    map_cell, point = {"x": 5, "y": 3}, {"x": 0.2, "y": 0.9, "customdata": "L12H7"}
    assert chosen("head", {"points": [map_cell]}) == {"layer": 3, "head": 5}
    assert chosen("head", {"points": [point]}) == {"layer": 12, "head": 7}
    assert chosen("head", {"rowId": "L4H11", "colId": "entropy"}) == {"layer": 4, "head": 11}
    of_the_second = {"points": [map_cell | {"curveNumber": 1}]}
    assert chosen("oneOfTwoHeads", {"points": [map_cell | {"curveNumber": 0}]}) == {"layer": 3, "head": 5}
    assert chosen("oneOfTwoHeads", of_the_second) == {"other_layer": 3, "other_head": 5}
    assert chosen("position", {"points": [{"x": 7, "y": 0.5}]}) == {"position": 7}
    assert chosen("lens_position", {"points": [{"x": "Mara 12", "y": "2"}]}) == {"lens_position": 12}
    assert chosen("position", {"points": [{"x": 0, "y": 1}]}) == {"position": 0}
    beside = [
        None, {}, {"points": []}, {"points": 5}, {"points": [5]}, {"points": [{"x": [], "y": {}}]},
        {"points": [{"x": "the", "y": "cat"}]}, {"rowId": "nonsense"}, {"points": [{"x": None, "y": None}]},
        {"points": [{"x": 1.5, "y": "M2", "customdata": "M2"}]},
    ]  # fmt: skip
    for event in beside:
        assert chosen("head", event) is chosen("oneOfTwoHeads", event) is None
    for event in beside[:-1]:
        assert chosen("position", event) is None
