"""The dashboard in a real Chromium: what stands in the boxes, what is on the page, and a server that goes away.

See test_browser.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from werkzeug.serving import make_server

from workbench import HookedTransformer
from workbench.app import create_app
from workbench.app.main import QuietHandler, listen
from workbench.app.models import ModelStore

Open = Callable[[], Any]
Serve = Callable[[ModelStore], AbstractContextManager[str]]


def analysed(page: Any) -> dict[str, str]:
    """The view once nothing is running any more."""
    page.wait_for_function("document.getElementById('main').className === 'main'")
    page.wait_for_timeout(300)
    return page.view()


def test_what_is_analysed_is_what_stands_in_the_boxes_when_it_is_asked_for(watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard)
    page.drawn("heads-map")
    page.click("#text")
    for word in ("Hugo", "Thea", "Niels"):
        page.press("#text", "Control+a")
        page.keyboard.type(f"Mara met {word}. Mara met {word}!")  # the last keystroke and the shortcut, back to back
        page.keyboard.press("Control+Enter")
        page.wait_for_view(text=f"Mara met {word}. Mara met {word}!")
    page.click("#max-tokens")
    page.keyboard.type("7")
    page.keyboard.press("Control+Enter")
    page.wait_for_view(max="7")
    page.keyboard.press("Backspace")
    page.keyboard.type("9")
    page.click("#analyse")
    page.wait_for_view(max="9")
    assert analysed(page)["text"] == "Mara met Niels. Mara met Niels!"


def test_what_is_changed_and_not_analysed_is_said_beside_the_button_and_the_figures(
    watched: Open, dashboard: str
) -> None:
    page = watched()
    page.open(dashboard, text="Mara met Hugo.\r\nMara met Thea.")
    page.drawn("heads-pattern")
    page.wait_for_timeout(500)
    said = page.locator(".changed")
    assert said.count() == 2 and not said.first.is_visible() and not said.last.is_visible()
    for box, typed in (("text", " and"), ("max-tokens", "5"), ("model", "x")):
        page.press(f"#{box}", "End")
        page.keyboard.type(typed)
        page.wait_for_selector("text=Changed, not analysed yet", state="visible")
        page.wait_for_selector("text=from before your changes", state="visible")
        for _ in typed:
            page.keyboard.press("Backspace")
        page.wait_for_selector("text=Changed, not analysed yet", state="hidden")
    page.fill("#text", "Mara met Mara.")
    page.click("#analyse")
    page.wait_for_view(text="Mara met Mara.")
    page.wait_for_selector("text=from before your changes", state="hidden")
    page.go_back()
    page.wait_for_view(text="Mara met Hugo.\r\nMara met Thea.")
    page.wait_for_selector("text=Changed, not analysed yet", state="hidden")


def test_the_list_of_models_closes_on_enter_and_a_pick_is_analysed(
    tiny: HookedTransformer, watched: Open, serve: Serve
) -> None:
    with serve(ModelStore(load=lambda source, job, make_room: tiny)) as address:
        page = watched()
        page.goto(address)
        page.drawn("heads-map")
        page.click("#model")
        page.wait_for_selector("[role=option]", state="visible")
        page.press("#model", "Control+a")
        page.keyboard.type("a/model")
        page.keyboard.press("Enter")
        page.wait_for_view(model="a/model")
        page.wait_for_selector("[role=option]", state="hidden")
        page.press("#model", "ArrowDown")
        page.wait_for_selector("[role=option]", state="visible")
        page.click("[role=option] >> text=demo")
        page.wait_for_view(model="demo")
        page.wait_for_selector("[role=option]", state="hidden")
        page.wait_for_selector("text=Changed, not analysed yet", state="hidden")


@pytest.mark.parametrize(
    ("query", "notice", "view"),
    [
        ("?layer=9999&head=9999", "demo has no L9999H9999; this is L3H3", {"layer": "3", "head": "3"}),
        ("?page=pattern&layer=1&head=9999", "demo has no L1H9999; this is L1H3", {"layer": "1", "head": "3"}),
        ("?page=sinks&layer=4&head=0", "demo has no L4H0; this is L3H0", {"layer": "3", "head": "0"}),
        ("?layer=-1&head=0", "“layer” must be a whole number from 0", {"page": "heads"}),
        ("?layer=abc&head=1", "“layer” must be a whole number from 0", {"page": "heads"}),
        ("?page=nonsense", "“page” must be one of heads, pattern", {"page": "heads"}),
        ("nonsense/page?layer=1&head=1", "There is no page '/nonsense/page'", {"layer": "1"}),
    ],
)
def test_an_address_that_names_nothing_shows_what_comes_closest_and_says_so(
    query: str, notice: str, view: dict[str, str], watched: Open, dashboard: str
) -> None:
    page = watched()
    page.goto(dashboard + query)
    page.wait_for_selector(f"#notice >> text={notice}")
    page.wait_for_view(**view)
    page.wait_for_selector(".page:not([hidden]) .heatmaplayer image")
    assert not page.is_visible("#alert .message")


@pytest.mark.parametrize("unit", ["word ", "語", "<b>&amp;</b>"])
def test_a_text_of_a_megabyte_is_told_to_be_too_long(unit: str, watched: Open, dashboard: str) -> None:
    page = watched()
    page.open(dashboard)
    page.drawn("heads-map")
    page.evaluate(
        """(text) => {
            const box = document.getElementById("text");
            Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, "value").set.call(box, text);
            box.dispatchEvent(new Event("input", { bubbles: true }));
        }""",
        unit * (1_000_000 // len(unit)),
    )
    page.click("#analyse")
    page.wait_for_selector(
        "#alert >> text=/the text has [\\d,]+ tokens, but demo takes at most [\\d,]+;/", timeout=20_000
    )


@pytest.mark.parametrize(
    "text",
    [
        "   \n\t ",
        "🙂🙂 👩‍👩‍👧 🙂🙂",
        "\x00\x01\x1b[31m\x7f\u202eabc\u200b\ufeff",
        "<img src=x onerror=alert(1)> <b>a</b> &lt;i&gt;",
        "%{x} %{y} <br> <br>",
    ],
)
def test_odd_texts_are_analysed_as_text_or_refused_in_words(text: str, watched: Open, dashboard: str) -> None:
    page = watched()
    page.on("dialog", lambda dialog: pytest.fail("the text was run as a script"))
    page.open(dashboard, page="pattern", layer=1, head=1, text=text)
    page.wait_for_selector("#tokens .token, #alert .message")
    page.wait_for_timeout(300)
    if page.locator("#alert .message").count():
        page.wait_for_selector("#alert >> text=This cannot be analysed")
        return
    box = page.area("pattern-map", "3")
    page.mouse.move(box["x"] + 2, box["y"] + 2)
    page.mouse.move(box["x"] + 3, box["y"] + 3)
    page.wait_for_selector("#pattern-map .hoverlayer .hovertext", state="attached")
    assert (
        page.locator("#tokens b, #tokens img, #pattern-map svg a, #pattern-map .hoverlayer tspan[style*=bold]").count()
        == 0
    )
    raw = "".join(page.locator("#tokens .token").all_text_contents()).replace("␣", " ")  # a space alone is shown so
    if "<" in text:
        assert text in raw
        shown = "".join(page.locator("#pattern-map .y3tick").all_text_contents())
        assert "&lt;" not in shown.replace("&lt;i&gt;", "") and "<" in shown


def test_eight_tabs_at_once_all_draw(tiny: HookedTransformer, watched: Open, serve: Serve) -> None:
    with serve(ModelStore(load=lambda source, job, make_room: tiny)) as address:
        first = watched()
        first.goto(address + "?v=1&page=heads&model=tiny&text=a%20b%20a%20b&layer=0&head=0")
        tabs = [first, *(first.context.new_page() for _ in range(7))]
        for place, tab in enumerate(tabs[1:], 1):
            tab.goto(address + f"?v=1&page=heads&model=tiny&text=a%20b%20a%20b&layer={place % 2}&head={place % 3}")
        for place, tab in enumerate(tabs):
            tab.wait_for_selector("#heads-pattern .heatmaplayer image", timeout=60_000)
            assert tab.text_content("#heads-pattern-title") == f"Pattern of L{place % 2}H{place % 3}"


def test_a_server_that_stops_and_one_that_was_restarted_are_told_and_a_reload_mends_it(
    tiny: HookedTransformer, new_page: Open
) -> None:
    listener = listen(18300)
    port = listener.getsockname()[1]

    def start() -> Any:
        models = ModelStore(load=lambda source, job, make_room: tiny)
        app = create_app(models=models).server
        server = make_server("127.0.0.1", port, app, threaded=True, request_handler=QuietHandler, fd=listener.fileno())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    server = start()
    page = new_page()
    page.goto(f"http://127.0.0.1:{port}/?v=1&page=heads&model=tiny&text=a%20b%20a%20b&layer=1&head=2")
    page.wait_for_selector("#heads-pattern .heatmaplayer image")
    assert not page.is_visible("#connection")
    page.wait_for_timeout(2500)  # it has asked once
    page.route("**/_*", lambda route: route.abort())  # what a stopped server looks like to the page
    page.wait_for_selector("text=server does not answer")
    assert not page.is_visible("#reload")
    page.unroute("**/_*")
    page.wait_for_selector("#connection", state="hidden")
    server.shutdown()
    server = start()
    page.wait_for_selector("#connection >> text=The server was restarted")
    page.click("#reload")
    page.wait_for_selector("#connection", state="hidden")
    page.wait_for_selector("#heads-pattern .heatmaplayer image")
    assert page.text_content("#heads-pattern-title") == "Pattern of L1H2"
    assert page.input_value("#text") == "a b a b"
    server.shutdown()
    server.server_close()
    listener.close()


def test_a_figure_library_that_loads_late_or_at_the_second_try_only_delays_the_page(
    watched: Open, new_page: Open, dashboard: str
) -> None:
    query = dashboard + "?v=1&page=pattern&layer=1&head=1&queries=10-30&keys=5-20"
    late = watched()
    held: list[Any] = []
    late.route("**/plotly.min.js*", lambda route: held.append(route))
    late.goto(query, wait_until="commit")
    late.wait_for_timeout(3000)
    for route in held:
        route.continue_()
    late.drawn("pattern-map")
    assert (late.view()["queries"], late.view()["keys"]) == ("10-30", "5-20")
    failed: set[str] = set()

    def fail_once(route: Any) -> None:
        is_first = route.request.url not in failed
        failed.add(route.request.url)
        route.abort() if is_first else route.continue_()

    failing = new_page()
    for chunk in ("plotly.min.js", "async-graph.js", "async-community.js"):
        failing.route(f"**/{chunk}*", fail_once)
    failing.goto(query.replace("page=pattern", "page=heads"))
    failing.wait_for_selector("#heads-map .heatmaplayer image", timeout=60_000)
    failing.wait_for_selector("#heads-table .ag-row")
    assert len(failed) == 3


def test_a_number_may_start_with_a_digit_below_its_least(watched: Open, dashboard: str) -> None:
    """Typed over what stood there: 16 random tokens, not the 6 that are left where a 1 is refused."""
    page = watched()
    page.open(dashboard, page="induction", length=20, sequences=2)
    page.drawn("induction-map")
    for typed, taken in (("16", "16"), ("2", "4"), ("12", "12")):
        page.click("#length")
        page.keyboard.press("Control+a")
        page.keyboard.type(typed)
        page.keyboard.press("Tab")
        page.wait_for_view(length=taken)
        assert page.input_value("#length") == taken
