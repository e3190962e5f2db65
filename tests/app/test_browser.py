"""The dashboard in a real Chromium: every page, clicks, errors, cancel, keys, colours, the address, two users at once.

Every request to the outside fails the test (``new_page``), and so does every error in the console (``watched``).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.app.jobs import Job
from workbench.app.models import ModelStore

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[[], "Page"]
Serve = Callable[[ModelStore], AbstractContextManager[str]]
TEXT = "Mara met Tomas at the harbour. Mara gave Tomas a map. Tomas gave Mara the map again."


ROWS_WITH_A_BRIGHT_PIXEL = """
async (graph) => {
                const image = document.querySelector(`#${graph} .heatmaplayer image`);
                const picture = new Image();
                picture.src = image.getAttribute("href") || image.getAttribute("xlink:href");
                await picture.decode();
                const canvas = document.createElement("canvas");
                [canvas.width, canvas.height] = [picture.width, picture.height];
                const context = canvas.getContext("2d");
                context.drawImage(picture, 0, 0);
                const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
                let bright = 0;
                for (let y = 0; y < canvas.height; y++) {
                    let found = false;
                    for (let x = 0; x < canvas.width; x++) {
                        const [red, , blue] = data.slice(4 * (y * canvas.width + x), 4 * (y * canvas.width + x) + 3);
                        found = found || (red > 220 && blue < 120);
                    }
                    bright += found;
                }
                return [bright, canvas.height];
            }
"""


def at(dashboard: str, **view: Any) -> str:
    fields = {"v": 1, "page": "heads", "model": "demo", "text": TEXT} | view
    return dashboard + "?" + "&".join(f"{name}={quote(str(value))}" for name, value in fields.items())


def drawn(page: Page, graph: str) -> None:
    """Waits until a heat map is on the screen."""
    page.wait_for_selector(f"#{graph} .heatmaplayer image")


def address(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.url).query).items()}


def wait_for_address(page: Page, /, **expected: str) -> None:
    for name, value in expected.items():
        page.wait_for_function("([n, v]) => new URLSearchParams(location.search).get(n) === v", arg=[name, value])


def area(page: Page, graph: str, axis: str = "") -> dict[str, float]:
    """Where a graph draws, in pixels of the window."""
    return page.evaluate(
        """([graph, axis]) => {
            const plot = document.querySelector(`#${graph} .js-plotly-plot`);
            const box = plot.getBoundingClientRect();
            const [x, y] = [plot._fullLayout["xaxis" + axis], plot._fullLayout["yaxis" + axis]];
            return {x: box.x + x._offset, y: box.y + y._offset, width: x._length, height: y._length};
        }""",
        [graph, axis],
    )


def click_cell(page: Page, graph: str, row: int, column: int) -> None:
    rows, columns = page.evaluate(
        "graph => { const { z } = document.querySelector(`#${graph} .js-plotly-plot`)._fullData[0]; "
        "return [z.length, z[0].length]; }",
        graph,
    )
    box = area(page, graph)
    x, y = box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (row + 0.5) / rows
    page.mouse.move(x, y)
    page.wait_for_timeout(100)
    page.mouse.click(x, y)


def test_it_opens_on_the_demo_model_with_a_text_analysed_and_a_head_chosen(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(dashboard)
    drawn(page, "heads-map")
    drawn(page, "heads-pattern")
    assert re.fullmatch(r"Pattern of L\dH\d", page.text_content("#heads-pattern-title"))
    assert re.match(r"demo · \d+ layers × \d+ heads · \d+ tokens", page.text_content("#context-facts"))
    page.wait_for_selector("#heads-table .ag-row")
    page.wait_for_selector("#heads-scatter .scatterlayer .point")
    assert page.get_attribute("#go-heads", "aria-current") == "page"
    found = address(page)
    assert (found["v"], found["page"], found["model"]) == ("1", "heads", "demo")
    assert "layer" in found and "head" in found


def test_a_click_in_map_table_or_scatter_shows_that_head(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, layer=0, head=0))
    drawn(page, "heads-map")
    click_cell(page, "heads-map", 2, 1)
    page.wait_for_selector("text=Pattern of L2H1")
    wait_for_address(page, layer="2", head="1")
    assert page.input_value("#layer") == "2" and page.input_value("#head") == "1"
    page.click('#heads-table [row-id="L1H3"] [col-id="entropy"], #heads-table [row-id="L1H3"] .ag-cell >> nth=0')
    page.wait_for_selector("text=Pattern of L1H3")
    point = page.locator("#heads-scatter .scatterlayer .point").nth(2)  # layer by layer
    point.hover(force=True)
    page.wait_for_timeout(100)
    point.click(force=True)
    page.wait_for_selector("text=Pattern of L0H2")


def test_nothing_large_goes_up_and_nothing_huge_comes_down(watched: Open, dashboard: str) -> None:
    page = watched()
    sent: list[int] = []
    received: list[int] = []
    page.on("request", lambda request: sent.append(len(request.post_data or "")))
    page.on("response", lambda answer: received.append(int(answer.headers.get("content-length", 0))))
    page.goto(at(dashboard, layer=0, head=0))
    drawn(page, "heads-pattern")
    page.click("#open-pattern")
    drawn(page, "pattern-map")
    assert sum(length > 0 for length in sent) > 10
    assert max(sent) < 10_000 and max(received) < 8_000_000


def test_the_map_shows_the_score_that_is_chosen(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, layer=0, head=0))
    drawn(page, "heads-map")
    page.click("#score")
    page.click("[role=option] >> text='Mean distance'")
    page.wait_for_selector("#heads-note >> text=Unit: tokens")
    wait_for_address(page, score="mean_distance")
    page.reload()
    page.wait_for_selector("#heads-note >> text=Unit: tokens")


def test_the_pattern_is_read_on_the_text_with_mouse_and_keys(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, page="pattern", layer=1, head=1))
    drawn(page, "pattern-map")
    page.wait_for_selector("#tokens .token")
    assert "".join(page.locator("#tokens .token").all_text_contents()).endswith(TEXT)
    page.hover("#tokens .token >> nth=10")
    page.wait_for_selector("#token-line >> text=(10) looks at")
    said = [float(weight) for weight in re.findall(r"\) (\d\.\d{3})", page.text_content("#token-line"))]
    assert said == sorted(said, reverse=True) and 0.5 < sum(said) <= 1.001
    assert page.locator("#tokens .token.query").count() == 1 and page.locator(".crosshair").count() == 2
    page.focus("#tokens")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#token-line >> text=(11) looks at")
    box = area(page, "pattern-map", "3")
    n_tokens = page.locator("#tokens .token").count()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + box["height"] * 15.5 / n_tokens)
    page.wait_for_selector("#token-line >> text=(15) looks at")


def test_zooming_by_drag_double_click_and_keys(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, page="pattern", layer=1, head=1))
    drawn(page, "pattern-map")
    n_tokens = page.locator("#tokens .token").count()
    box = area(page, "pattern-map", "3")
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.4 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.8 * box["height"], steps=4)
    page.mouse.up()
    page.wait_for_function("new URLSearchParams(location.search).has('queries')")
    first, end = map(int, address(page)["queries"].split("-"))
    assert 0.3 * n_tokens < first < 0.5 * n_tokens < 0.7 * n_tokens < end < 0.9 * n_tokens
    page.wait_for_selector(f"#pattern-note >> text=queries {first} to {end - 1}")
    box = area(page, "pattern-map", "3")
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function("!new URLSearchParams(location.search).has('queries')")
    page.wait_for_selector(f"#pattern-note >> text=queries 0 to {n_tokens - 1}")
    page.fill("#first-token", "4")
    page.fill("#last-token", "9")
    page.focus("#zoom-in")
    page.keyboard.press("Enter")
    page.wait_for_selector("#pattern-note >> text=queries 4 to 9, keys 4 to 9")
    page.fill("#last-token", "999")
    page.focus("#zoom-in")
    page.keyboard.press("Enter")
    page.wait_for_selector("#alert >> text=a range from 0 to")


def test_a_stripe_of_one_token_is_seen_in_every_row_of_a_long_text(
    tiny: HookedTransformer, watched: Open, serve: Serve
) -> None:
    model = previous_token_model(2048, tiny.tokenizer)
    with serve(ModelStore(load=lambda source, job: model)) as address:
        page = watched()
        page.goto(address)
        page.fill("#text", "a b c d " * 512)
        page.fill("#max-tokens", "2048")
        page.click("#analyse")
        page.wait_for_selector("#context-facts >> text=2,048 tokens")
        page.click("#go-pattern")
        page.wait_for_selector("#pattern-note >> text=max over blocks of 7 queries × 7 keys")
        for graph, width in (("pattern-map", 1280), ("pattern-map", 900), ("heads-pattern", 900)):
            page.set_viewport_size({"width": width, "height": 900})
            page.click("#go-pattern" if graph == "pattern-map" else "#go-heads")
            drawn(page, graph)
            page.wait_for_timeout(600)
            bright, height = page.evaluate(ROWS_WITH_A_BRIGHT_PIXEL, graph)
            assert bright == height > 200


def previous_token_model(n_ctx: int, tokenizer: Any) -> HookedTransformer:
    """One head, which attends to the token before: positions are 32 rotations, and keys are turned by one position."""
    cfg = TransformerConfig(
        n_layers=1, d_model=64, n_heads=1, d_head=64, d_mlp=1, d_vocab=len(tokenizer), n_ctx=n_ctx,
        normalization_type="RMS", attn_scale=1.0, model_name="previous token",
    )  # fmt: skip
    model = HookedTransformer(cfg, tokenizer).eval()
    frequency = torch.rand(32, generator=torch.Generator().manual_seed(0)) * 3
    angle = torch.arange(n_ctx)[:, None] * frequency
    cos, sin = frequency.cos().diag(), frequency.sin().diag()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        model.pos_embed.W_pos.copy_(torch.cat((angle.cos(), angle.sin()), dim=1))
        attention = model.blocks[0].attn
        attention.W_Q[0] = 4 * torch.eye(64)
        attention.W_K[0] = torch.cat((torch.cat((cos, sin), dim=1), torch.cat((-sin, cos), dim=1)))
    return model


def test_induction_and_sinks_draw_and_their_settings_count(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, page="induction", length=16, sequences=2, text=TEXT * 4))
    drawn(page, "induction-map")
    page.wait_for_selector("#induction-loss .scatterlayer .js-line")
    page.wait_for_selector("#induction-ablation .scatterlayer .point")
    assert page.locator("#induction-verdicts tbody tr", has_not_text="control").count() == 5
    assert "2 sequences, 66 tokens" in page.text_content("#context-facts")
    page.fill("#sequences", "3")
    page.keyboard.press("Tab")
    page.wait_for_selector("#context-facts >> text=3 sequences, 99 tokens")
    page.click("#go-sinks")
    drawn(page, "sinks-map")
    page.wait_for_selector("#sinks-positions .barlayer .point", state="attached")
    page.wait_for_selector("#sinks-norms .scatterlayer .point")
    assert page.locator("#sinks-kinds tbody tr").count() >= 2
    click_cell(page, "sinks-map", 3, 2)
    wait_for_address(page, layer="3", head="2")
    page.click("#open-pattern")
    drawn(page, "pattern-map")
    assert page.text_content("#pattern-title") == "L3H2"


def test_the_back_button_and_a_copied_address_bring_the_view_back(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, layer=1, head=2, score="entropy"))
    drawn(page, "heads-pattern")
    page.click("#go-sinks")
    wait_for_address(page, page="sinks")
    page.click("#go-pattern")
    wait_for_address(page, page="pattern")
    drawn(page, "pattern-map")
    copied = page.url
    page.go_back()
    page.wait_for_selector("#page-sinks", state="visible")
    page.go_back()
    page.wait_for_selector("#page-heads", state="visible")
    assert page.input_value("#layer") == "1"
    other = watched()
    other.goto(copied)
    drawn(other, "pattern-map")
    assert other.text_content("#pattern-title") == "L1H2"
    assert other.input_value("#text") == TEXT
    assert address(other) == address_of(copied)


def address_of(url: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"model": "dema"}, "did you mean demo"),
        ({"model": "/nowhere/model.gguf"}, "There is no folder or file /nowhere/model.gguf"),
        ({"layer": 99, "head": 0, "page": "pattern"}, "Layer must be between 0 and 3, got 99"),
        ({"text": "word " * 290}, "field “Shorten to”"),
        ({"page": "induction", "length": 4000}, "choose a smaller length"),
    ],
)
def test_mistakes_are_told_in_words(view: dict[str, Any], said: str, watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, **view))
    page.wait_for_selector(f"#alert >> text={said}")
    assert page.get_attribute("#alert", "role") == "alert"
    assert not page.is_visible("#progress")


def test_an_empty_text_and_a_bad_link_are_told_and_mended(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, layer="x", colour="red"))
    page.wait_for_selector("#notice >> text='layer' must be a whole number")
    page.wait_for_selector("#notice >> text='colour' is unknown here")
    drawn(page, "heads-pattern")
    page.fill("#text", "   ")
    page.click("#analyse")
    page.wait_for_selector("#alert >> text=The text is empty")
    page.fill("#text", "Mara met Mara.")
    page.press("#text", "Control+Enter")
    page.wait_for_selector("#alert >> text=The text is empty", state="detached")
    wait_for_address(page, text="Mara met Mara.")


def test_what_breaks_inside_is_told_too(watched: Open, serve: Serve) -> None:
    def load(source: str, job: Job) -> Any:
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

    def load(source: str, job: Job) -> HookedTransformer:
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
    drawn(page, "heads-map")
    assert loads == ["slow", "slow"]


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
    drawn(two, "heads-pattern")
    assert loads == ["slow"]
    one.click("#analyse")
    drawn(one, "heads-pattern")
    assert (one.text_content("#heads-pattern-title"), two.text_content("#heads-pattern-title")) == (
        "Pattern of L0H1",
        "Pattern of L1H2",
    )


def test_markup_in_tokens_stays_text(tiny: HookedTransformer, watched: Open, serve: Serve) -> None:
    text = "a <script>alert(1)</script> b %{x} a <script>alert(1)</script> b"
    with serve(ModelStore(load=lambda source, job: tiny)) as address:
        page = watched()
        page.on("dialog", lambda dialog: pytest.fail("a token was run as a script"))
        page.goto(address + f"?v=1&page=pattern&model=tiny&layer=0&head=0&text={quote(text)}")
        drawn(page, "pattern-map")
        assert page.locator("#tokens .token").nth(2).text_content() == "<script>alert(1)</script>"
        assert page.locator("#pattern-map .xaxislayer-above, #pattern-map .x3tick").first.is_visible()
        ticks = page.locator("#pattern-map .x3tick").all_text_contents()
        assert any("<script>alert(1)</script>" in tick for tick in ticks)


def test_dark_and_light_follow_the_system_and_the_switch(watched: Open, dashboard: str) -> None:
    def colours(page: Page) -> tuple[str, str]:
        return (
            page.evaluate("getComputedStyle(document.body).backgroundColor"),
            page.evaluate("document.querySelector('#heads-map .js-plotly-plot')._fullLayout.font.color"),
        )

    page = watched()
    page.emulate_media(color_scheme="dark")
    page.goto(at(dashboard, layer=0, head=0))
    drawn(page, "heads-map")
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
    drawn(page, "heads-map")
    assert colours(page) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(scheme: str, watched: Open, dashboard: str) -> None:
    page = watched()
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(at(dashboard, page="pattern", layer=0, head=0))
    drawn(page, "pattern-map")
    page.wait_for_timeout(400)  # the cards have faded in
    faint = page.evaluate(FAINT_TEXT)
    assert faint == []


# Text whose contrast (WCAG 2.2, 1.4.3) with what lies behind it is below 4.5.
FAINT_TEXT = """
() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const luminance = (colour) => {
        const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = numbers(colour).map((c) => linear(c / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (part) => {
        for (; part; part = part.parentElement) {
            const colour = getComputedStyle(part).backgroundColor;
            if (colour.startsWith("rgb") && (numbers(colour)[3] ?? 1) > 0.9) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const faint = [];
    for (const part of document.querySelectorAll("body *")) {
        const says = [...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!says || !part.checkVisibility() || part.closest("svg, script, style, .skip-link")) continue;
        const [one, two] = [luminance(getComputedStyle(part).color), luminance(behind(part))];
        const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
        if (ratio < 4.5) faint.push(`${part.textContent.trim().slice(0, 30)}: ${ratio.toFixed(1)}`);
    }
    return faint;
}
"""


def brightness(colour: str) -> float:
    if colour.startswith("#"):
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) / 3
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_everything_can_be_reached_by_keyboard(watched: Open, dashboard: str) -> None:
    page = watched()
    page.goto(at(dashboard, layer=0, head=0))
    drawn(page, "heads-map")
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
    page.goto(at(dashboard, layer=0, head=0))
    drawn(page, "heads-pattern")
    for name in ("heads", "pattern"):
        page.click(f"#go-{name}")
        drawn(page, f"{name}-map")
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
