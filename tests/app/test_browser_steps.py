"""Generation step by step, the parts of a prediction, and cards on demand, in a real Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Tab

Open = Callable[[], "Tab"]


def click_cell(page: Tab, graph: str, row: int, column: int) -> None:
    """Of a map that may stand below the window."""
    page.evaluate("(graph) => document.getElementById(graph).scrollIntoView({ block: 'center' })", graph)
    page.wait_for_timeout(200)
    page.click_cell(graph, row, column)


def chosen_token(page: Tab) -> str:
    return page.text_content("#step-text .chosen").strip()


def test_steps_go_by_button_key_click_slider_and_figure(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="generation", layer=2, head=2, new=6, step=1)
    page.drawn("step-head")
    page.wait_for_selector("#step-text [data-step='1'].chosen")
    assert page.locator("#step-text [data-step]").count() == 6
    shown = page.text_content("#step-tiles")
    page.click("#step-on")
    page.wait_for_selector("#step-text [data-step='2'].chosen")
    page.wait_for_function("(before) => document.getElementById('step-tiles').textContent !== before", arg=shown)
    assert chosen_token(page) in page.text_content("#step-prediction-note")
    page.focus("#step-text")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#step-text [data-step='4'].chosen")
    page.keyboard.press("Home")
    page.wait_for_selector("#step-text [data-step='0'].chosen")
    page.click("#step-text [data-step='3']")
    page.wait_for_view(step="3")
    click_cell(page, "step-head", 0, 5)
    page.wait_for_view(step="5")
    page.wait_for_selector("#step-title >> text=/^Step 5 of 6: where L2H2 looks/")
    page.press("#step-slider .mantine-Slider-thumb", "ArrowLeft")
    page.wait_for_view(step="4")
    assert page.input_value("#step") == "4"
    page.reload()
    page.wait_for_selector("#step-text [data-step='4'].chosen")
    assert not page.faint_text()


def test_a_head_and_a_share_are_chosen_and_the_temperature_draws(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="generation", layer=2, head=2, new=6)
    page.drawn("step-map")
    click_cell(page, "step-map", 1, 3)
    page.wait_for_view(layer="1", head="3")
    page.wait_for_selector("#step-line >> text=/^L1H3 looks at .*[0-9]/")
    page.click("#step-score")
    page.click("role=option[name='Entropy']")
    page.wait_for_selector("#step-map-note >> text=/Entropy: .* Unit: nats/")
    greedy = page.text_content("#step-text")
    page.fill("#temperature", "1.5")
    page.wait_for_view(temperature="1.5")
    page.wait_for_function("(before) => document.getElementById('step-text').textContent !== before", arg=greedy)
    page.wait_for_selector("#step-prediction .legend >> text=drawn at temperature 1.5")


def test_answers_can_be_typed_and_what_is_no_token_is_said(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="lens", layer=0, head=0, **{"depth-of": 9})
    page.drawn("direct-map")
    page.fill("#foil", "Hugo")
    page.wait_for_selector("#direct-title >> text=/and what “ ?Hugo”, after token 9/")
    page.wait_for_selector("#direct-note >> text=/add up to/")
    click_cell(page, "direct-map", 3, 1)
    page.wait_for_view(layer="3", head="1", foil="Hugo")
    page.fill("#foil", "two words")
    page.wait_for_selector("#direct-message >> text=/foil 'two words' is no single token/")
    assert page.locator("#lens-ranks tbody tr").count() == 5 and not page.locator("#alert *").count()
    page.fill("#foil", "")
    page.wait_for_selector("#direct-message:empty", state="attached")


def test_the_circuit_is_traced_when_it_is_asked_for_and_stays_in_the_address(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="induction", layer=2, head=0, length=16, sequences=4)
    page.drawn("induction-map")
    assert page.is_hidden("#circuit-shown")
    page.click("#ask-circuit")
    page.wait_for_view(asked="circuit")
    page.wait_for_selector("#circuit-note >> text=/fed by L1H3/")
    assert page.is_visible("#induction-circuit .scatterlayer") and page.is_hidden("#ask-circuit")
    assert page.locator("#induction-verdicts thead th").count() == 7
    page.reload()
    page.wait_for_selector("#circuit-note >> text=/fed by L1H3/")
