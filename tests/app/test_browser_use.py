"""The dashboard in a real Chromium: mistakes, long work, several users, markup, colours, keys and widths.

See test_browser.py.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote

import pytest

from workbench import HookedTransformer
from workbench.app.jobs import Job
from workbench.app.models import ModelStore

Open = Callable[[], Any]
Serve = Callable[[ModelStore], AbstractContextManager[str]]


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"model": "dema"}, "did you mean demo"),
        ({"model": "/nowhere/model.gguf"}, "there is no folder or file /nowhere/model.gguf"),
        ({"text": "word " * 290}, "field “Shorten to”"),
        ({"page": "induction", "length": 4000}, "choose a smaller length"),
    ],
)
def test_mistakes_are_told_in_words(view: dict[str, Any], said: str, watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, **view)
    page.wait_for_selector(f"#alert >> text={said}")
    assert page.get_attribute("#alert", "role") == "alert"
    assert not page.is_visible("#progress")


def test_an_empty_text_and_a_bad_link_are_told_and_mended(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer="x", colour="red")
    page.wait_for_selector("#notice >> text=“layer” must be a whole number")
    page.wait_for_selector("#notice >> text=“colour” is unknown here")
    page.drawn("heads-pattern")
    page.fill("#text", "   ")
    page.click("#analyse")
    page.wait_for_selector("#alert >> text=the text is empty")
    page.fill("#text", "Mara met Mara.")
    page.press("#text", "Control+Enter")
    page.wait_for_selector("#alert >> text=the text is empty", state="detached")
    page.wait_for_view(text="Mara met Mara.")


def test_errors_progress_and_cancel_are_in_sight_of_a_scrolled_page(slow: Any, watched: Open, dashboard: str) -> None:
    address, _, _ = slow
    page = watched()
    page.set_viewport_size({"width": 1440, "height": 900})
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-pattern")

    def is_in_sight(selector: str) -> bool:
        box = page.locator(selector).bounding_box()
        return box is not None and box["y"] >= 0 and box["y"] + box["height"] <= 900

    page.evaluate("window.scrollTo(0, 400)")
    page.fill("#text", "")
    page.click("#analyse")
    page.wait_for_selector("#alert >> text=the text is empty")
    assert page.evaluate("window.scrollY") > 300 and is_in_sight("#alert")
    page.goto(address + "?v=1&page=heads&model=slow&text=a%20b%20a%20b")
    page.wait_for_selector("#progress-text >> text=Downloading")
    page.evaluate("window.scrollTo(0, 400)")
    page.wait_for_timeout(300)
    assert page.evaluate("window.scrollY") > 300 and is_in_sight("#progress") and is_in_sight("#cancel")


def test_what_breaks_inside_is_told_too(watched: Open, serve: Serve) -> None:
    def load(source: str, job: Job, make_room: Callable[[], None]) -> Any:
        raise KeyError("a bug of ours")

    with serve(ModelStore(load=load)) as address:
        page = watched()
        page.goto(address)
        page.wait_for_selector("#alert >> text=Something went wrong here")
        page.click("#alert summary")
        page.wait_for_selector("#alert pre >> text=a bug of ours")


@pytest.fixture
def slow(tiny: HookedTransformer, serve: Serve) -> Iterator[tuple[str, list[str], threading.Event]]:
    """A dashboard whose model loads until it is let go, what it loaded, and the event that lets it go."""
    loads: list[str] = []
    let_go = threading.Event()

    def load(source: str, job: Job, make_room: Callable[[], None]) -> HookedTransformer:
        loads.append(source)
        while not let_go.wait(0.02):
            job.report(0.4, "Downloading a large model")
        return tiny

    with serve(ModelStore(load=load)) as address:
        yield address, loads, let_go
        let_go.set()


def test_progress_cancel_and_starting_again(slow: Any, watched: Open) -> None:
    address, loads, let_go = slow
    page = watched()
    page.goto(address + "?v=1&page=heads&model=slow&text=a%20b%20a%20b")
    page.wait_for_selector("#progress-text >> text=/Downloading a large model · [1-9] s/")
    page.click("#cancel")
    page.wait_for_selector("#alert >> text=Cancelled")
    page.wait_for_timeout(600)
    assert not page.is_visible("#progress") and loads == ["slow"]
    let_go.set()
    page.click("#analyse")
    page.drawn("heads-map")
    assert loads == ["slow", "slow"]


def test_a_click_asks_only_the_open_page(watched: Open, dashboard: str) -> None:
    """Every page's callbacks wait for the same view: asking all of them made a click twice as slow."""
    page = watched()
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-pattern")
    page.wait_for_selector("#heads-pattern-title >> text=L0H0")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or "") if request.method == "POST" else None)
    page.click_cell("heads-map", 1, 2)
    page.wait_for_selector("#heads-pattern-title >> text=L1H2")
    page.wait_for_load_state("networkidle")
    outputs = [json.loads(body)["output"] for body in asked if '"output"' in body]
    drawn = [output for output in outputs if ".figure" in output or ".rowData" in output]
    assert drawn and all("heads-" in output for output in drawn), outputs
    assert len(outputs) < 10  # 7: click, view, jobs, and four cards


def test_many_clicks_and_two_users_start_one_job_and_do_not_disturb_each_other(slow: Any, watched: Open) -> None:
    address, loads, let_go = slow
    one, two = watched(), watched()
    one.goto(address + "?v=1&page=heads&model=slow&text=a%20b%20a%20b&layer=0&head=1")
    two.goto(address + "?v=1&page=heads&model=slow&text=a%20b%20a%20b&layer=1&head=2&score=entropy")
    for page in (one, two):
        page.wait_for_selector("#progress-text >> text=Downloading")
        for _ in range(3):
            page.click("#analyse")
    one.click("#cancel")
    one.wait_for_selector("#alert >> text=Cancelled")
    two.wait_for_timeout(500)
    assert two.is_visible("#progress")
    let_go.set()
    two.drawn("heads-pattern")
    assert loads == ["slow"]
    one.click("#analyse")
    one.drawn("heads-pattern")
    assert (one.text_content("#heads-pattern-title"), two.text_content("#heads-pattern-title")) == (
        "Pattern of L0H1",
        "Pattern of L1H2",
    )


def test_markup_in_tokens_stays_text(tiny: HookedTransformer, watched: Open, serve: Serve) -> None:
    text = "a <script>alert(1)</script> b %{x} a <script>alert(1)</script> b"
    with serve(ModelStore(load=lambda source, job, make_room: tiny)) as address:
        page = watched()
        page.on("dialog", lambda dialog: pytest.fail("a token was run as a script"))
        page.goto(address + f"?v=1&page=pattern&model=tiny&layer=0&head=0&text={quote(text)}")
        page.drawn("pattern-map")
        assert page.locator("#tokens .token").nth(2).text_content() == "<script>alert(1)</script>"
        assert page.locator("#pattern-map .xaxislayer-above, #pattern-map .x3tick").first.is_visible()
        ticks = page.locator("#pattern-map .x3tick").all_text_contents()
        assert any("<script>alert(1)</script>" in tick for tick in ticks)


def test_dark_and_light_follow_the_system_and_the_switch(watched: Open, dashboard: str) -> None:
    def colours(page: Any) -> tuple[str, str]:
        return (
            page.evaluate("getComputedStyle(document.body).backgroundColor"),
            page.evaluate("document.querySelector('#heads-map .js-plotly-plot')._fullLayout.font.color"),
        )

    page = watched()
    page.emulate_media(color_scheme="dark")
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-map")
    dark = colours(page)
    assert brightness(dark[0]) < 60 and brightness(dark[1]) > 180
    page.click("#toggle-scheme")
    page.wait_for_function("document.documentElement.getAttribute('data-mantine-color-scheme') === 'light'")
    page.wait_for_function(
        "before => document.querySelector('#heads-map .js-plotly-plot')._fullLayout.font.color !== before", arg=dark[1]
    )
    light = colours(page)
    assert brightness(light[0]) > 220 and brightness(light[1]) < 80
    page.reload()
    page.drawn("heads-map")
    assert colours(page) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(scheme: str, watched: Open, dashboard: str) -> None:
    page = watched()
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.open(dashboard, page="pattern", layer=0, head=0)
    page.drawn("pattern-map")
    page.wait_for_timeout(400)  # the cards have faded in
    assert page.faint_text() == []


def brightness(colour: str) -> float:
    if colour.startswith("#"):
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 3
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_everything_can_be_reached_by_keyboard(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-map")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    reached = set()
    for _ in range(200):
        if "scatter-x" in reached:
            break
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.closest('[id]')?.id"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        if page.evaluate("document.activeElement.className.includes('nav-link')"):
            assert outline != "none"
    assert {"go-pattern", "model", "text", "max-tokens", "analyse", "layer", "head", "score", "scatter-x"} <= reached
    page.focus("#head")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector("text=Pattern of L0H1")


@pytest.mark.parametrize("width", [900, 1440, 2560])
def test_nothing_sticks_out_of_the_window(width: int, watched: Open, dashboard: str) -> None:
    page = watched()
    page.set_viewport_size({"width": width, "height": 1000})
    page.open(dashboard, layer=0, head=0)
    page.drawn("heads-pattern")
    for name in ("heads", "pattern"):
        page.click(f"#go-{name}")
        page.drawn(f"{name}-map")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sticking = page.evaluate(
            """() => [...document.querySelectorAll(".page:not([hidden]) .card")].flatMap((card) => {
                const box = card.getBoundingClientRect();
                return [...card.querySelectorAll(".card-head *, .graph > *")]
                    .filter((part) => part.getBoundingClientRect().right > box.right + 1)
                    .map((part) => part.id || part.className);
            })"""
        )
        assert sticking == []
