"""The pattern page in a real Chromium: all heads of a layer, its options, the keys that walk over it, a full window.

See test_browser.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Open = Callable[[], Any]


def test_a_head_of_a_layer_is_opened_by_click_and_by_key(watched: Open, dashboard: str) -> None:
    page = watched()
    page.set_viewport_size({"width": 1440, "height": 1200})  # all of the map is in sight
    page.open(dashboard, page="pattern", layer=2, head=1, show="layer")
    page.drawn("pattern-map")
    page.wait_for_selector("#first-share >> text=/Token 0 gets .* most in H. /")
    page.wait_for_selector("#tokens-hint >> text=Click on a head")
    page.wait_for_selector("#unit:disabled")  # a layer's patterns are by tokens, whatever is chosen here
    box = page.area("pattern-map")
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 0.8 * box["height"])  # in the lower left of four
    page.wait_for_timeout(200)
    page.mouse.down()
    page.mouse.up()
    page.wait_for_selector("#pattern-title >> text=L2H2")
    page.wait_for_view(head="2")
    assert "show" not in page.view()
    page.wait_for_selector("#unit:enabled")
    page.wait_for_selector("#tokens .token")
    page.go_back()
    page.wait_for_selector("#pattern-title >> text=Layer 2")
    page.wait_for_selector("#first-share >> text=most in H")
    page.focus("#pattern-cells")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#pattern-cell >> text=Head 2 of layer 2. Enter opens it.")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pattern-title >> text=L2H3")


def test_what_is_asked_of_a_pattern_is_said_and_in_the_address(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="pattern", layer=2, head=2)
    page.drawn("pattern-map")
    share = page.text_content("#first-share")
    for control, choice, name, value, title in (
        ("#first-token", "Coloured apart", "first", "apart", "first column apart: 0 to 1"),
        ("#first-token", "Left out", "first", "left out", "token 0 left out"),
        ("#weighting", "Weight × ‖value‖", "by", "value", "‖p v W"),
        ("#unit", "By words", "unit", "word", "by words"),
    ):
        page.click(control)
        page.click(f"[role=option]:visible >> text={choice}")
        page.wait_for_view(**{name: value})
        page.wait_for_function(TITLE, arg=title)
    assert page.text_content("#first-share") == share  # of the attention, before anything is left out
    page.wait_for_selector("#pattern-part >> text=the sum over a word's keys, the mean over its queries")
    page.wait_for_selector("#tokens .token >> text=harbour.")  # two tokens
    copied = page.url
    other = watched()
    other.goto(copied)
    other.wait_for_function(TITLE, arg="by words, token 0 left out")
    assert other.input_value("#unit") == "By words" and other.url == copied


# Whether the map's colour bar says so.
TITLE = """
(part) => {
    const plot = document.querySelector("#pattern-map .js-plotly-plot");
    const map = plot && plot._fullData && plot._fullData.find((trace) => trace.type === "heatmap");
    return map && map.colorbar.title.text.includes(part);
}
"""


def test_keys_walk_over_the_map_zoom_in_and_show_all(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="pattern", layer=2, head=1)
    page.drawn("pattern-map")
    page.focus("#tokens")
    page.keyboard.press("Shift+Tab")  # out of the text
    page.focus("#pattern-cells")
    page.keyboard.press("ArrowLeft")
    expected = said(page.evaluate(CELL, [-1, 0]))
    page.wait_for_selector(f"#pattern-cell >> text=key <|bos|> 0: {expected}")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Shift+ArrowRight")
    expected = said(page.evaluate(CELL, [-2, 10]))
    page.wait_for_selector(f"#pattern-cell >> text=/→ key .* 10: {expected}/")
    assert page.get_attribute("#pattern-cell", "role") == "status"
    n_tokens = page.evaluate("document.querySelector('#pattern-map .js-plotly-plot')._fullData.at(-1).z.length")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#pattern-part >> text=/Queries .* to {n_tokens - 1} .*, keys [1-9]/")
    page.keyboard.press("Escape")
    page.wait_for_selector(f"#pattern-part >> text=/Queries 0 .* to {n_tokens - 1} .*, keys 0/")
    page.wait_for_function("!location.search.includes('queries')")


def said(weight: float) -> str:
    """A weight as the line below the map has it."""
    return f"{weight:.1e}".replace("e-0", "e-") if 0 < weight < 0.001 else f"{weight:.4f}"


def test_a_click_says_what_is_in_the_cell_and_keys_go_on_from_there(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="pattern", layer=2, head=1)
    page.drawn("pattern-map")
    page.wait_for_selector("#main:not(.stale)")
    page.locator("#pattern-map").scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    n_tokens = page.evaluate("document.querySelector('#pattern-map .js-plotly-plot')._fullData.at(-1).z.length")
    box, row, column = page.area("pattern-map", "3"), n_tokens - 2, 5
    x, y = (box[at] + box[size] * (cell + 0.5) / n_tokens for at, size, cell in (
        ("x", "width", column), ("y", "height", row),
    ))  # fmt: skip
    page.mouse.move(x, y)
    page.wait_for_timeout(200)
    page.mouse.click(x, y)
    weight = said(page.evaluate(CELL, [row - n_tokens, column]))
    page.wait_for_selector(f"#pattern-cell >> text=/^Query .* {row} → key .* {column}: {weight}/")
    page.keyboard.press("ArrowRight")
    weight = said(page.evaluate(CELL, [row - n_tokens, column + 1]))
    page.wait_for_selector(f"#pattern-cell >> text=/^Query .* {row} → key .* {column + 1}: {weight}/")
    frames = page.evaluate("document.querySelectorAll('.crosshair').length")
    assert frames == 2 and page.locator("#tokens .query").get_attribute("data-q") == str(row)


# The weight on a cell of the map; rows count from the end.
CELL = """
([row, column]) => Array.from(
    document.querySelector("#pattern-map .js-plotly-plot")._fullData.find((trace) => trace.type === "heatmap").z
).at(row)[column]
"""


def test_a_card_fills_the_window_and_escape_puts_it_back(watched: Open, dashboard: str) -> None:
    page = watched()
    page.set_viewport_size({"width": 1300, "height": 1000})
    page.open(dashboard, page="pattern", layer=2, head=1)
    page.drawn("pattern-map")
    before = page.evaluate(SIZE)
    button = page.locator("#page-pattern .maximise").first
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"{SIZE}[0] > {before[0] + 100}")
    card = page.locator(".card.maximised").bounding_box()
    assert (card["width"], card["height"]) == (1300, 1000) and button.get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    page.wait_for_function(f"{SIZE}[0] === {before[0]}")
    assert page.locator(".maximised").count() == 0 and button.evaluate("(it) => it === document.activeElement")


SIZE = """(({ width, height }) => [width, height])(
    document.querySelector("#pattern-map .js-plotly-plot")._fullLayout
)"""
