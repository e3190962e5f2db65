"""Times the dashboard in a real Chromium: ``python benchmarks/app_times.py``.

How long the first page takes from the request on, in five starts; from the click on a head until its pattern is drawn,
on the demo model and on SmolLM2; and from the end of a drag until the part of a text of 8,192 tokens is drawn anew, on
a random model of its size, as it reaches no further than 512. Each is the median of some, in milliseconds, with the
longest. The largest answer of the server is what it sent for all of that, the scripts of the page included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode

import torch

from workbench import HookedTransformer
from workbench.analyses.figures import ExportError, find_browser
from workbench.loading.sources import KNOWN_MODELS

LONG = 8192
STORY = "Mara and Hugo went to the harbour. Mara gave the lantern to Hugo. "
LARGER = "smollm2-135m"
PATTERN, PREVIEW = "pattern-map", "heads-pattern"
# What comes one after the other when the dashboard is opened, and how to know that it is there.
FIRST_PAGE = {
    "frame": "#analyse",
    "page and its controls": "#page-heads h1",
    "figures": f"#{PREVIEW} .heatmaplayer image",
}

# Resolves with the milliseconds from the next release of the mouse until a graph has drawn and the page says so.
WATCH = """
([graph, title, said]) => {
    const plot = document.querySelector(`#${graph} .js-plotly-plot`);
    const before = plot.data;
    const heading = document.getElementById(title);
    let start;
    document.addEventListener("mouseup", () => (start = performance.now()), { once: true, capture: true });
    window.timed = new Promise((resolve) => {
        const look = () => {
            if (!start || plot.data === before || !heading.textContent.includes(said)) return;
            if (plot.querySelector(".heatmaplayer image")) resolve(performance.now() - start);
        };
        plot.on("plotly_afterplot", look);
        new MutationObserver(look).observe(heading, { childList: true, characterData: true, subtree: true });
    });
}
"""
SHAPE = """
() => {
    const { z } = document.querySelector("#heads-map .js-plotly-plot")._fullData[0];
    return [z.length, z[0].length];
}
"""
AREA = """
([graph, axis]) => {
    const plot = document.querySelector(`#${graph} .js-plotly-plot`);
    const { x, y } = plot.getBoundingClientRect();
    const [across, down] = [plot._fullLayout["xaxis" + axis], plot._fullLayout["yaxis" + axis]];
    return [x + across._offset, y + down._offset, across._length, down._length];
}
"""


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a dashboard in a process of its own, as users start it."""
    command = [sys.executable, "-m", "workbench", "app", "--no-browser", "--model", model, "--port", "8750"]
    surroundings = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=surroundings)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        yield line.split(" is at ")[1].split()[0]
    finally:
        process.terminate()
        process.wait()


def long_model(folder: Path) -> None:
    """Saves a model of the demo's shape with random weights, which reads LONG tokens."""
    torch.manual_seed(0)
    demo = HookedTransformer.from_pretrained("demo")
    HookedTransformer(replace(demo.cfg, n_ctx=LONG, model_name="random"), demo.tokenizer).save_pretrained(folder)


class Watched:
    """A page, and the largest answer that it got."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1440, "height": 1100})
        self.page.set_default_timeout(120_000)
        self.largest = (0, "")
        self.page.on("response", self._weigh)

    def _weigh(self, response: Any) -> None:
        size = int(response.headers.get("content-length", 0))
        self.largest = max(self.largest, (size, response.url.partition("?")[0]))

    def open(self, address: str, graph: str, **view: Any) -> float:
        """Opens a view; the seconds until a graph is drawn."""
        start = time.perf_counter()
        self.page.goto(address + "?" + urlencode({"v": 1} | view))
        self.page.wait_for_selector(f"#{graph} .heatmaplayer image")
        return time.perf_counter() - start

    def first_page(self, address: str) -> list[float]:
        """Milliseconds until each of FIRST_PAGE is there."""
        start = time.perf_counter()
        self.page.goto(address, wait_until="commit")
        times = []
        for part in FIRST_PAGE.values():
            self.page.wait_for_selector(part)
            times.append(1000 * (time.perf_counter() - start))
        return times

    def timed(self, act: Callable[[], None], graph: str, title: str, said: str) -> float:
        """Milliseconds from the end of ``act`` until the graph is drawn and the title says so."""
        self.page.wait_for_timeout(600)
        self.page.evaluate(WATCH, [graph, title, said])
        act()
        return float(self.page.evaluate("window.timed"))

    def click(self, graph: str, across: float, down: float, axis: str = "") -> None:
        left, top, width, height = self.page.evaluate(AREA, [graph, axis])
        self.page.mouse.move(left + across * width, top + down * height)
        self.page.wait_for_timeout(100)
        self.page.mouse.click(left + across * width, top + down * height)

    def drag(self, graph: str, across: tuple[float, float], down: tuple[float, float]) -> None:
        left, top, width, height = self.page.evaluate(AREA, [graph, "3"])
        self.page.mouse.move(left + across[0] * width, top + down[0] * height)
        self.page.mouse.down()
        self.page.mouse.move(left + across[1] * width, top + down[1] * height, steps=4)
        self.page.mouse.up()


def print_times(what: str, times: list[float], asked: int) -> None:
    print(f"{what:44} {median(times):5.0f} ms, longest {max(times):5.0f} (asked: {asked:,})", flush=True)


def first_pages(browser: Any) -> None:
    starts = []
    for _ in range(5):
        with served("demo") as address:
            watched = Watched(browser)
            starts.append(watched.first_page(address))
            watched.page.close()
    for part, times in zip(FIRST_PAGE, zip(*starts, strict=True), strict=True):
        print_times(f"first page after the server is up: {part}", list(times), 3000)


def short_texts(browser: Any) -> tuple[int, str]:
    with served("demo") as address:
        watched = Watched(browser)
        for n_tokens in (64, 512):
            text = {"text": STORY * (1 if n_tokens == 64 else 30), "max": n_tokens}
            heads = ((2, 1), (1, 3), (3, 0), (2, 2), (0, 1))
            print_times(f"click → small pattern, {n_tokens} tokens", clicks(watched, address, "demo", heads, text), 400)
            times = []
            for head in (0, 3, 1, 2):
                watched.open(
                    address, PATTERN, page="pattern", model="demo", layer=2, head=(head + 1) % 4, show="layer", **text
                )
                place = 0.25 + 0.5 * (head % 2), 0.35 + 0.5 * (head // 2)
                act = lambda place=place: watched.click(PATTERN, *place)  # noqa: E731
                times.append(watched.timed(act, PATTERN, "pattern-title", f"L2H{head}"))
            print_times(f"click in a layer → pattern, {n_tokens} tokens", times, 400)
        return watched.largest


def clicks(watched: Watched, address: str, model: str, heads: Sequence[tuple[int, int]], text: dict) -> list[float]:
    """Milliseconds from the click on each head in the map until its pattern is drawn."""
    watched.open(address, PREVIEW, page="heads", model=model, layer=0, head=0, **text)
    watched.page.wait_for_timeout(1000)
    layers, across = watched.page.evaluate(SHAPE)
    times = []
    for layer, head in heads:
        act = lambda place=((head + 0.5) / across, (layer + 0.5) / layers): watched.click("heads-map", *place)  # noqa: E731
        times.append(watched.timed(act, PREVIEW, "heads-pattern-title", f"L{layer}H{head}"))
    return times


def larger_model(browser: Any) -> tuple[int, str]:
    """The same clicks on SmolLM2, 270 heads, where it has been fetched."""
    watched = Watched(browser)
    if not KNOWN_MODELS[LARGER].path.exists():
        print(f"{LARGER} is not here; workbench fetch {LARGER}")
        return watched.largest
    with served(LARGER) as address:
        for n_tokens in (64, 512):
            text = {"text": STORY * (1 if n_tokens == 64 else 30), "max": n_tokens}
            heads = ((18, 6), (3, 2), (25, 8), (12, 0), (7, 5))
            print_times(f"click, {LARGER}, {n_tokens} tokens", clicks(watched, address, LARGER, heads, text), 400)
    return watched.largest


def long_texts(browser: Any, folder: Path) -> tuple[int, str]:
    long_model(folder)
    with served(str(folder)) as address:
        watched = Watched(browser)
        watched.open(address, PATTERN, page="pattern", model=str(folder), text="Mara", layer=2, head=1)
        watched.page.fill("#text", STORY * (LONG // 15))
        watched.page.fill("#max-tokens", str(LONG))
        watched.page.click("#analyse")
        watched.page.wait_for_selector(f"#pattern-part >> text=of {LONG:,} tokens")
        halves, quarters = [], []
        for _ in range(4):
            for across, down, times in (((0.1, 0.6), (0.4, 0.9), halves), ((0.2, 0.4), (0.5, 0.7), quarters)):
                act = lambda across=across, down=down: watched.drag(PATTERN, across, down)  # noqa: E731
                times.append(watched.timed(act, PATTERN, "pattern-part", "of 8,192"))
            watched.page.click("#zoom-out")
            watched.page.wait_for_selector("#pattern-part >> text=/Queries 0 .* to 8191/")
        print_times("zoom at 8,192 tokens, to half", halves, 600)
        print_times("zoom at 8,192 tokens, on to a tenth", quarters, 600)
        return watched.largest


def main() -> None:
    try:
        found = find_browser()
    except ExportError as error:
        print(f"nothing to time here: {error}")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        first_pages(browser)
        size, url = max(short_texts(browser), larger_model(browser), long_texts(browser, Path(folder) / "long"))
        print(f"largest answer: {size / 1e6:.1f} MB, {url} (asked: below 8)")
        browser.close()


if __name__ == "__main__":
    main()
