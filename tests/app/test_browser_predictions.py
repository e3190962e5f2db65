"""The pages on predictions in a real Chromium: what if, and the logit lens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Open = Callable[[], Any]


def test_parts_are_switched_off_by_buttons_and_by_name_and_back_on(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="what-if", layer=2, head=2)
    page.drawn("pattern-before")
    page.drawn("pattern-after")
    page.wait_for_selector("text=Nothing yet")
    assert tile(page, "Prediction moves by") == "0.00"
    page.click("#off-head")
    page.wait_for_view(off="L2H2")
    page.wait_for_function("!document.querySelector('#off-tiles').textContent.includes('0.00nats KL')")
    page.fill("#off", "L1:>0")
    page.keyboard.press("Enter")
    page.wait_for_view(off="L2H2,L1:>0")
    page.wait_for_selector("#off-code >> text=['L2H2', 'L1:>0']")
    page.click("#off-undo")
    page.wait_for_view(off="L2H2")
    page.click("#off-undo")
    page.wait_for_function("!new URLSearchParams(location.search).has('off')")
    page.wait_for_selector("text=Nothing yet")
    page.go_back()
    page.wait_for_view(off="L2H2")
    page.reload()
    page.wait_for_selector("#off-code >> text=['L2H2']")
    page.wait_for_selector("text=L2H2 after")


def test_what_cannot_be_switched_off_is_said_and_results_stay(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="what-if", layer=2, head=2, off="L2H2")
    page.drawn("pattern-after")
    page.fill("#off", "L77")
    page.keyboard.press("Enter")
    page.wait_for_selector("#notice >> text=there is no layer 77; the last one is 3")
    page.wait_for_view(off="L2H2")
    assert page.locator("#following .bars .point").count() == 20
    assert page.text_content("#alert") == ""


def test_a_click_along_the_text_shows_that_tokens_prediction(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="what-if", layer=2, head=2, off="L1H3")
    page.wait_for_selector("#off-text .scatterlayer .trace")
    area = page.area("off-text")
    page.mouse.move(area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    page.wait_for_timeout(150)
    page.mouse.click(area["x"] + area["width"] / 2, area["y"] + area["height"] / 2)
    page.wait_for_function("new URLSearchParams(location.search).has('position')")
    place = page.view()["position"]
    page.wait_for_selector(f"#following-title >> text=/Next token after {place} /")


def test_the_lens_follows_one_token_through_the_layers(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="lens", layer=0, head=0)
    page.drawn("lens-map")
    assert page.locator("#lens-ranks tbody tr").count() == 5  # the embedding and four layers
    assert re.match(r"Tokens \d+ to \d+ of \d+", page.text_content("#lens-note"))
    page.click_cell("lens-map", 2, 3)
    page.wait_for_function("new URLSearchParams(location.search).has('depth-of')")
    place = page.view()["depth-of"]
    page.wait_for_selector(f"#lens-title >> text=/After token {place} /")
    page.wait_for_selector("#lens-ranks >> text=/Rank of “.*”, the token that follows/")


def test_attribution_answers_for_heads_then_for_tokens(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="attribution", layer=0, head=0)
    page.wait_for_selector("#attribution-scatter .scatterlayer .point")
    page.wait_for_selector("#attribution-named table")
    page.wait_for_selector("#sources-deletion .scatterlayer .trace")
    page.drawn("sources-prompt")
    page.locator("#attribution-map").scroll_into_view_if_needed()
    page.click_cell("attribution-map", 1, 3)
    page.wait_for_view(layer="1", head="3")
    page.click("#measure")
    page.get_by_role("option", name="Entropy", exact=True).click()
    page.wait_for_view(measure="entropy")
    plot = "document.querySelector('#attribution-scatter .js-plotly-plot')"
    page.wait_for_function(f"{plot}._fullLayout.xaxis3.title.text.startsWith('entropy')")
    page.click("#task")
    page.get_by_role("option", name="Greater than", exact=True).click()
    page.wait_for_view(task="greater_than")
    page.wait_for_selector("#attribution-note >> text=/year|war|20/")


def test_attribution_on_prompts_of_ones_own(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="attribution", layer=0, head=0, ablation="mean", task="own_prompts")
    page.wait_for_selector("#alert >> text=/no prompts in the field “Your own prompts”; write one JSON object a line/")
    page.fill("#prompts-text", '{"prompt": "The capital of Veld is", "target": " Talvik", "foil": " Besko"}')
    page.click("#use-prompts")
    page.wait_for_selector("#attribution-note >> text=/Talvik/")
    assert page.locator("#alert >> text=/./").count() == 0
    plot = "document.querySelector('#attribution-scatter .js-plotly-plot')"
    page.wait_for_function(f"{plot}._fullLayout.yaxis3.title.text.includes('zero ablation')")  # there is no other
    address = page.url
    page.fill("#prompts-text", "The capital of Veld is Talvik")
    page.click("#use-prompts")
    page.wait_for_selector("#alert >> text=/line 1: “The capital of Veld is Talvik” is not JSON/")
    page.goto(address)
    page.wait_for_selector("#prompts-text")
    page.wait_for_function("document.getElementById('prompts-text').value.includes('Talvik')")
    page.wait_for_selector("#attribution-note >> text=/Talvik/")


def tile(page: Any, what: str) -> str:
    """The number under a tile's title."""
    return page.text_content(f".page:not([hidden]) .tile:has(.tile-what:text-is('{what}')) .tile-value")
