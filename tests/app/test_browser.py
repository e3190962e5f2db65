"""The dashboard in a real Chromium: every page, what clicks and drags do, the address and the back button.

Every request to the outside fails the test (``new_page``), and so does every error in the console (``watched``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from workbench.app.models import ModelStore

Open = Callable[[], Any]
Serve = Callable[[ModelStore], AbstractContextManager[str]]
TEXT = "Mara met Tomas at the harbour. Mara gave Tomas a map. Tomas gave Mara the map again."


def test_it_opens_on_the_demo_model_with_a_text_analysed_and_a_head_chosen(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(dashboard)
    page.drawn("heads-map")
    page.drawn("heads-pattern")
    assert re.fullmatch(r"Pattern of L\dH\d", page.text_content("#heads-pattern-title"))
    assert re.match(r"demo · \d+ layers × \d+ heads · \d+ tokens", page.text_content("#context-facts"))
    page.wait_for_selector("#heads-table .ag-row")
    page.wait_for_selector("#heads-scatter .scatterlayer .point")
    assert page.get_attribute("#go-heads", "aria-current") == "page"
    assert min(page.evaluate(GAPS)) >= 10
    found = page.view()
    assert (found["v"], found["page"], found["model"]) == ("1", "heads", "demo")
    assert "layer" in found and "head" in found


# Pixels between each map that is shown and its colour bar.
GAPS = """
() => [...document.querySelectorAll(".page:not([hidden]) .graph:has(.heatmaplayer image)")].map((graph) => {
    const box = (part) => graph.querySelector(part).getBoundingClientRect();
    return box(".colorbar .cbfills").left - box(".heatmaplayer image").right;
})
"""


def test_a_click_in_map_table_or_scatter_shows_that_head(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-map")
    page.click_cell("heads-map", 2, 1)
    page.wait_for_selector("text=Pattern of L2H1")
    page.wait_for_view(layer="2", head="1")
    assert page.input_value("#layer") == "2" and page.input_value("#head") == "1"
    page.click('#heads-table [row-id="L1H3"] [col-id="entropy"], #heads-table [row-id="L1H3"] .ag-cell >> nth=0')
    page.wait_for_selector("text=Pattern of L1H3")
    place, name = page.evaluate(LONELIEST_POINT, "heads-scatter")
    point = page.locator("#heads-scatter .scatterlayer .point").nth(place)
    point.hover(force=True)
    page.wait_for_timeout(100)
    point.click(force=True)
    page.wait_for_selector(f"text=Pattern of {name}")


# Of the points of a scatter the one that is farthest from all others: its place and its name.
LONELIEST_POINT = """
(graph) => {
    const points = [...document.querySelectorAll(`#${graph} .scatterlayer .point`)].map((point, place) => {
        const { x, y } = point.getBoundingClientRect();
        return { x, y, place };
    });
    const room = (one) => Math.min(...points.filter((other) => other !== one).map(
        (other) => Math.hypot(one.x - other.x, one.y - other.y)
    ));
    const { place } = points.reduce((best, point) => (room(point) > room(best) ? point : best));
    return [place, document.querySelector(`#${graph} .js-plotly-plot`)._fullData[0].customdata[place]];
}
"""


def test_nothing_large_goes_up_and_nothing_huge_comes_down(watched: Open, dashboard: str) -> None:
    page = watched()
    sent: list[int] = []
    received: list[int] = []
    page.on("request", lambda request: sent.append(len(request.post_data or "")))
    page.on("response", lambda answer: received.append(int(answer.headers.get("content-length", 0))))
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-pattern")
    page.click("#open-pattern")
    page.drawn("pattern-map")
    assert sum(length > 0 for length in sent) > 10
    assert max(sent) < 10_000 and max(received) < 8_000_000


def test_the_map_shows_the_score_that_is_chosen(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-map")
    page.click("#score")
    page.click("[role=option] >> text='Mean distance'")
    page.wait_for_selector("#heads-note >> text=Unit: tokens")
    page.wait_for_view(score="mean_distance")
    page.reload()
    page.wait_for_selector("#heads-note >> text=Unit: tokens")


def test_the_pattern_is_read_on_the_text_with_mouse_and_keys(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="pattern", layer=1, head=1)
    page.drawn("pattern-map")
    page.wait_for_selector("#tokens .token")
    assert "".join(page.locator("#tokens .token").all_text_contents()).endswith(TEXT)
    page.hover("#tokens .token >> nth=10")
    page.wait_for_selector("#token-line >> text=(10) looks at")
    said = [float(weight) for weight in re.findall(r"\) (\d\.\d{3})", page.text_content("#token-line"))]
    assert said == sorted(said, reverse=True) and 0.5 < sum(said) <= 1.001 and said[-1] >= 0.005
    assert page.locator("#tokens .token.query").count() == 1 and page.locator(".crosshair").count() == 2
    page.focus("#tokens")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#token-line >> text=(11) looks at")
    box = page.area("pattern-map", "3")
    n_tokens = page.locator("#tokens .token").count()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + box["height"] * 15.5 / n_tokens)
    page.wait_for_selector("#token-line >> text=(15) looks at")


def test_zooming_by_drag_double_click_and_keys(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="pattern", layer=1, head=1)
    page.drawn("pattern-map")
    n_tokens = page.locator("#tokens .token").count()
    box = page.area("pattern-map", "3")
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.4 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.8 * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function("new URLSearchParams(location.search).has('queries')")
    first, end = map(int, page.view()["queries"].split("-"))
    assert 0.3 * n_tokens < first < 0.5 * n_tokens < 0.7 * n_tokens < end < 0.9 * n_tokens
    page.wait_for_selector(f"#pattern-part >> text=/Queries {first} .* to {end - 1} /")
    box = page.area("pattern-map", "3")
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function("!new URLSearchParams(location.search).has('queries')")
    page.wait_for_selector(f"#pattern-part >> text=/Queries 0 .* to {n_tokens - 1} .*, keys 0 .* to {n_tokens - 1} /")
    for end, place in (("first-query", "4"), ("last-query", "9"), ("first-key", "0"), ("last-key", "7")):
        page.fill(f"#{end}", place)
    page.focus("#zoom-in")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pattern-part >> text=/Queries 4 .* to 9 .*, keys 0 .* to 7 .*one query and one key/")
    page.fill("#last-query", "12")
    page.keyboard.press("Enter")  # in the field, right after typing
    page.wait_for_selector("#pattern-part >> text=/Queries 4 .* to 12 /")
    page.fill("#last-key", "999")
    page.focus("#zoom-in")
    page.keyboard.press("Enter")
    page.wait_for_selector("#alert >> text=a range from 0 to")


def test_induction_and_sinks_draw_and_their_settings_count(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, page="induction", length=16, sequences=2, text=TEXT * 4)
    page.drawn("induction-map")
    page.wait_for_selector("#induction-loss .scatterlayer .js-line")
    page.wait_for_selector("#induction-ablation .scatterlayer .point")
    assert page.locator("#induction-verdicts tbody tr", has_not_text="control").count() == 5
    assert "2 sequences, 66 tokens" in page.text_content("#context-facts")
    page.fill("#sequences", "3")
    page.keyboard.press("Tab")
    page.wait_for_selector("#context-facts >> text=3 sequences, 99 tokens")
    page.click("#go-sinks")
    page.drawn("sinks-map")
    page.wait_for_selector("#sinks-positions .barlayer .point", state="attached")
    page.wait_for_selector("#sinks-norms .scatterlayer .point")
    page.wait_for_selector("#sinks-positions-note >> text=/Evaluated: .* 0 to 47 of 0 to 63.* of the text's/")
    assert page.locator("#sinks-kinds tbody tr").count() >= 2
    page.click_cell("sinks-map", 3, 2)
    page.wait_for_view(layer="3", head="2")
    page.click("#open-pattern")
    page.drawn("pattern-map")
    assert page.text_content("#pattern-title") == "L3H2"


def test_the_back_button_and_a_copied_address_bring_the_view_back(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=1, head=2, score="entropy")
    page.drawn("heads-pattern")
    page.click("#go-sinks")
    page.wait_for_view(page="sinks")
    page.click("#go-pattern")
    page.wait_for_view(page="pattern")
    page.drawn("pattern-map")
    copied = page.url
    page.go_back()
    page.wait_for_selector("#page-sinks", state="visible")
    page.go_back()
    page.wait_for_selector("#page-heads", state="visible")
    assert page.input_value("#layer") == "1"
    other = watched()
    other.goto(copied)
    other.drawn("pattern-map")
    assert other.text_content("#pattern-title") == "L1H2"
    assert other.input_value("#text") == TEXT
    assert other.url == copied


def test_a_downloaded_figure_says_what_it_is(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=1, head=2, score="entropy")
    page.drawn("heads-pattern")
    for graph, name, title in (
        ("heads-map", "demo-Entropy-of-every-head.svg", "Entropy of every head"),
        ("heads-pattern", "demo-Attention-pattern-of-L1H2.svg", "Attention pattern of L1H2"),
    ):
        assert page.locator(f"#{graph} .gtitle").count() == 0  # the card has a title of its own
        page.hover(f"#{graph} .nsewdrag >> nth=0")
        with page.expect_download() as found:
            page.click(f'#{graph} .modebar-btn[data-title^="Download"]')
        assert found.value.suggested_filename == name
        drawing = found.value.path().read_text(encoding="utf-8")
        said = " ".join(re.findall(r">([^<>]+)<", drawing)).replace("\xa0", " ")
        assert title in said and "demo (float16" in said and "starting with BOS" in said
        assert "<image" in drawing and re.search(r'<rect x="0" y="0" [^>]*fill: rgb\(255, 255, 255\)', drawing)
