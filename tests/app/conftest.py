"""A dashboard that really listens, and tiny models to put behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from werkzeug.serving import make_server

from workbench import HookedTransformer, TransformerConfig
from workbench.app import create_app
from workbench.app.main import QuietHandler, listen
from workbench.app.models import ModelStore

if TYPE_CHECKING:
    from playwright.sync_api import Page

TEXT = "Mara met Tomas at the harbour. Mara gave Tomas a map. Tomas gave Mara the map again."
WORDS = ["<script>alert(1)</script>", "a", "b", "c", "d", "%{x}", "e", "f"]


@pytest.fixture(scope="session")
def tiny() -> HookedTransformer:
    """Two layers, three heads, random weights; its words are in WORDS, and one of them is markup. Read-only."""
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<bos>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>")
    cfg = TransformerConfig(
        n_layers=2, d_model=24, n_heads=3, d_head=8, d_mlp=16, d_vocab=len(vocabulary), n_ctx=1024, model_name="tiny"
    )  # fmt: skip
    return HookedTransformer(cfg, tokenizer).eval()


@contextmanager
def served(models: ModelStore | None = None) -> Iterator[str]:
    """The address of a dashboard that runs as long as the block."""
    listener = listen(18050)
    port = listener.getsockname()[1]
    server = make_server(
        "127.0.0.1", port, create_app(models=models).server, threaded=True, request_handler=QuietHandler,
        fd=listener.fileno(),
    )  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.shutdown()
        server.server_close()
        listener.close()


@pytest.fixture(scope="session")
def serve() -> Callable[[ModelStore | None], AbstractContextManager[str]]:
    """``with serve(models) as address`` runs a dashboard."""
    return served


@pytest.fixture(scope="session")
def dashboard() -> Iterator[str]:
    """The dashboard as users get it, on the demo model."""
    with served() as address:
        yield address


class Tab:
    """A page in the browser, and what the dashboard's users do in it. Everything else is the page's own."""

    def __init__(self, page: Page) -> None:
        self.page = page

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def open(self, dashboard: str, **view: Any) -> None:
        """Opens the dashboard on a view, named as in the address."""
        fields = {"v": 1, "page": "heads", "model": "demo", "text": TEXT} | view
        self.page.goto(dashboard + "?" + "&".join(f"{name}={quote(str(value))}" for name, value in fields.items()))

    def view(self) -> dict[str, str]:
        """The view in the address."""
        return dict(parse_qsl(urlsplit(self.page.url).query))

    def wait_for_view(self, **expected: str) -> None:
        script = "([name, value]) => new URLSearchParams(location.search).get(name) === value"
        for pair in expected.items():
            self.page.wait_for_function(script, arg=list(pair))

    def drawn(self, graph: str) -> None:
        """Waits until a heat map is on the screen."""
        self.page.wait_for_selector(f"#{graph} .heatmaplayer image")

    def area(self, graph: str, axis: str = "") -> dict[str, float]:
        """Where a graph draws, in pixels of the window."""
        return self.page.evaluate(AREA, [graph, axis])

    def click_cell(self, graph: str, row: int, column: int) -> None:
        rows, columns = self.page.evaluate(SHAPE, graph)
        box = self.area(graph)
        x, y = box["x"] + box["width"] * (column + 0.5) / columns, box["y"] + box["height"] * (row + 0.5) / rows
        self.page.mouse.move(x, y)
        self.page.wait_for_timeout(100)
        self.page.mouse.click(x, y)

    def faint_text(self) -> list[str]:
        """Text whose contrast with what lies behind it is below 4.5 (WCAG 2.2, 1.4.3)."""
        return self.page.evaluate(FAINT_TEXT)


AREA = """
([graph, axis]) => {
    const plot = document.querySelector(`#${graph} .js-plotly-plot`);
    const box = plot.getBoundingClientRect();
    const [x, y] = [plot._fullLayout["xaxis" + axis], plot._fullLayout["yaxis" + axis]];
    return {x: box.x + x._offset, y: box.y + y._offset, width: x._length, height: y._length};
}
"""
SHAPE = """
(graph) => {
    const { z } = document.querySelector(`#${graph} .js-plotly-plot`)._fullData[0];
    return [z.length, z[0].length];
}
"""
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


@pytest.fixture
def watched(new_page: Callable[[], Page]) -> Iterator[Callable[[], Tab]]:
    """Opens pages; fails the test where one of them logs an error to the console or throws one."""
    errors: list[str] = []

    def open_page() -> Tab:
        page = new_page()
        page.set_default_timeout(60_000)  # a busy machine draws slowly
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        return Tab(page)

    yield open_page
    assert not errors
