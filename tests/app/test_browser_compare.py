"""The dashboard in a real Chromium: a view beside another, questions before long work, files and hints.

See test_browser.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.app import estimates
from workbench.app.jobs import Job
from workbench.app.models import ModelStore

Open = Callable[[], Any]
TEXT = "a b c a b c d e a b"


@pytest.fixture
def two_models(tiny: HookedTransformer, serve: Callable[[ModelStore], Any]) -> Iterator[str]:
    """A dashboard on "tiny" (2 layers of 3 heads), beside which there is "small" (1 layer of 2 heads)."""
    torch.manual_seed(1)
    cfg = TransformerConfig(
        n_layers=1, d_model=24, n_heads=2, d_head=8, d_mlp=16, d_vocab=tiny.cfg.d_vocab, n_ctx=1024, model_name="small"
    )  # fmt: skip
    small = HookedTransformer(cfg, tiny.tokenizer).eval()

    def load(source: str, job: Job, make_room: Callable[[], None]) -> HookedTransformer:
        return small if source == "small" else tiny

    with serve(ModelStore(load=load)) as address:
        yield f"{address}?v=1&page={{page}}&model=tiny&layer=1&head=2&text={quote(TEXT)}"


def test_the_view_beside_another_text_another_head_and_another_model(two_models: str, watched: Open) -> None:
    page = watched()
    page.goto(two_models.format(page="compare"))
    page.drawn("compare-maps")
    page.drawn("compare-patterns")  # without a choice, the same words in another order
    page.wait_for_selector("#compare-what >> text=in another order")
    page.wait_for_selector("#compare-facts tr")
    texts = page.locator("#compare-facts tr", has_text="Text").locator("td").all_text_contents()
    assert "a b c a b c d e a b" in texts[0] and texts[1] != texts[0]
    ranges = page.evaluate(
        "document.querySelector('#compare-maps .js-plotly-plot')._fullData.map(({ zmin, zmax }) => [zmin, zmax])"
    )
    assert ranges == [[0, 1], [0, 1]]
    page.fill("#other-head", "0")
    page.wait_for_selector("#compare-patterns-title >> text=Patterns of L1H2 in A and L1H0 in B")
    page.wait_for_view(**{"other-head": "0"})
    page.wait_for_selector("#compare-what >> text=the same model on the same text")
    for axis, place, said in (
        ("", (0.5, 0.25), "L0H1 in A and L0H0 in B"),
        ("2", (0.8, 0.75), "L0H1 in A and L1H2 in B"),
    ):
        page.wait_for_selector("#compare-facts >> text=Loss")  # the last to come: nothing moves any more
        page.wait_for_selector("#main:not(.stale)")
        page.locator("#compare-maps").scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        box = page.area("compare-maps", axis)
        x, y = box["x"] + place[0] * box["width"], box["y"] + place[1] * box["height"]
        page.mouse.move(x, y)
        page.wait_for_timeout(200)
        page.mouse.click(x, y)
        page.wait_for_selector(f"#compare-patterns-title >> text=Patterns of {said}")
    page.fill("#other-model", "small")
    page.fill("#other-text", "c b a c b a")
    page.click("#compare")
    page.wait_for_selector("#notice >> text=B has no L1H2; it is compared with L0H1")
    page.wait_for_selector("#compare-facts >> text=1 × 2")
    page.wait_for_function("document.querySelector('#compare-change').textContent.includes('so no head is in both')")
    said = page.evaluate(
        "fetch(`/export${location.search}&figure=compare-change&export-format=csv&preset=slide`).then((r) => r.text())"
    )
    assert "this figure is empty" in said.lower()
    page.wait_for_selector("text=In memory: tiny, small")
    page.wait_for_view(**{"other-model": "small", "other-text": "c b a c b a", "other-layer": "0"})
    page.reload()
    page.wait_for_selector("#compare-patterns-title >> text=Patterns of L0H1 in A and L0H1 in B")
    assert (page.input_value("#other-model"), page.input_value("#other-text")) == ("small", "c b a c b a")


def test_what_takes_long_asks_first_and_runs_when_told_to(
    two_models: str, watched: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates, "LONGEST_SECONDS", 0.0)
    page = watched()
    page.goto(two_models.format(page="lens"))
    page.wait_for_selector("#alert >> text=/Logit lens will take about .* and .* of memory, of which .* are free/")
    assert page.is_visible("#run-it") and not page.is_visible("#progress")
    page.click("#run-it")
    page.drawn("lens-map")
    assert not page.is_visible("#run-it")


def test_a_text_file_is_opened_and_others_are_refused(two_models: str, watched: Open, tmp_path: Path) -> None:
    page = watched()
    page.goto(two_models.format(page="heads"))
    page.wait_for_selector("#hint >> text=Every cell of the map is an attention head")
    page.click("#close-hint")
    assert not page.is_visible("#hint")
    page.drawn("heads-map")
    for name, content, said in (
        ("text.txt", b"\xef\xbb\xbfd e f\r\nd e f", "text.txt"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\0\0", "does not look like text"),
        ("latin.txt", "caf\u00e9".encode("latin1"), "is not UTF-8; save it as UTF-8"),
        ("wide.txt", "a b".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("nothing.txt", b" \n", "is empty"),
    ):
        (tmp_path / name).write_bytes(content)
        page.set_input_files("#text-file-chooser", tmp_path / name)
        page.wait_for_selector(f"#text-file >> text={said}")
    assert page.input_value("#text") == "d e f\nd e f"  # the last one that could be read
    page.click("#analyse")
    page.wait_for_view(text="d e f\nd e f")
    page.reload()
    page.drawn("heads-map")
    assert not page.is_visible("#hint")


def test_names_of_parts_that_there_are_not_are_refused_and_the_others_stay(two_models: str, watched: Open) -> None:
    page = watched()
    page.goto(two_models.format(page="what-if"))
    page.drawn("pattern-after")
    for name in ("L1H0", "L1H7", "banana"):
        page.fill("#off", name)
        page.press("#off", "Enter")
        if name == "L1H0":
            page.wait_for_view(off="L1H0")
        else:
            page.wait_for_selector(f"#notice >> text={name}")
    page.wait_for_selector("#notice >> text=write a head as L3H7")
    page.wait_for_view(off="L1H0")
    assert page.locator("#page-what-if .mantine-TagsInput-pill").all_text_contents() == ["L1H0"]
    page.fill("#off", "M1")
    page.press("#off", "Enter")
    page.wait_for_view(off="L1H0,M1")
