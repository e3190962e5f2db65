"""Figures as files: their sizes in print, what stays readable there, their numbers; and one browser, or none."""

from __future__ import annotations

import base64
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import psutil
import pytest

from workbench.analyses import HeadStatistics, Provenance, Quantity, figures
from workbench.analyses.figures import browser as drawing
from workbench.analyses.figures.paper import LEAST_POINTS

if TYPE_CHECKING:
    from playwright.sync_api import Page

PROVENANCE = Provenance(
    model_name="m", revision=None, weights="float32", inputs="“a <b>”", inputs_sha256="0" * 64, n_sequences=1,
    n_tokens=3, bos="starting with BOS", versions={"python": "3"},
)  # fmt: skip
NAMES = [f"L{layer}H{head}" for layer in range(12) for head in range(12)]


def pattern(n: int, theme: str = "light", scale: str = "linear") -> go.Figure:
    labels = figures.token_labels([f" word{i % 7}" for i in range(n)])
    cells = np.where(np.tri(n) > 0, np.eye(n), np.nan)
    return figures.pattern_map(
        cells, query_labels=labels, key_labels=labels, query_marginal=np.ones(n), key_marginal=np.linspace(0, 1, n),
        query_marginal_label="entropy (nats)", key_marginal_label="received<br>(queries)", label="weight", scale=scale,
        theme=theme,
    )  # fmt: skip


def drawn(theme: str) -> dict[str, go.Figure]:
    """A figure of every shape that has to fit."""
    random = np.random.default_rng(0)
    effect = random.normal(size=(12, 12))
    names = ["weight, mean of heads", "a measure whose name is long", "‖Σ p v W<sub>O</sub>‖", "recency"]
    values = random.uniform(-0.5, 0.5, size=(3, 4))
    series = {f"{kind} ablation": (row, row - 0.1, row + 0.1) for kind, row in zip("abc", values, strict=True)}
    long = "change of the loss of the repeated tokens, mean over all of them (nats per token)"
    return {
        "map": figures.head_map(effect, label="effect (logits)", signed=True, marked=[(1, 2)], theme=theme),
        "large map": figures.head_map(random.uniform(size=(30, 9)), label="prefix matching", upper=1.0, theme=theme),
        "scatter": figures.head_scatter(
            np.exp(effect), effect**2, x_label="‖v W<sub>O</sub>‖ / median key", y_label="mean weight", ratio=True,
            theme=theme,
        ),
        "diagonal": figures.diagonal(
            effect, effect + random.normal(size=effect.shape), names=NAMES, x_label="true patching (logits)",
            y_label="estimate (logits)", note="r = 0.998, mean |error| = 0.799 logits", theme=theme,
        ),
        "curves": figures.curves(
            dict.fromkeys(("loss of the next token", "KL to the final prediction", "entropy"), random.uniform(size=9)),
            x_label="depth (layers applied)", y_label="mean over positions (nats)", theme=theme,
        ),
        "bars": figures.position_bars(
            np.append(random.uniform(size=40), [np.nan] * 9), x_label="key position", y_label="sink rate (ε = 0.3)",
            missing="not evaluated: seen by fewer than 16 other queries", theme=theme,
        ),
        "dots": figures.agreement_dots(names, series, filled=[row > 0 for row in values], x_label=long, theme=theme),
        "pattern": pattern(30, theme),
        "panels of which one is empty": figures.joint_curves(
            np.array([1, 2, 3, 5, 6, 9, 12, 16]), dict.fromkeys("abcde", (-np.arange(8.0), -np.arange(8.0) ** 1.3)),
            band=(-np.arange(8.0) - 1, np.zeros(8)), y_label="effect (logits)", theme=theme,
        ),
        "circuit": figures.circuit_view(
            {f"L1{i}H{i}" + " (control)" * (i > 5): f"previous token {i / 10:.2f}" for i in range(8)},
            {f"L2{i}H{i}": f"prefix matching 0.9{i}" for i in range(3)}, np.vander(np.linspace(0.2, 0.9, 3), 8),
            named={"feeds its keys": np.eye(3, 8) > 0}, rest="does not feed", hover="change", theme=theme,
        ),
        "captioned": figures.captioned(
            figures.head_map(effect[:4, :4], label="prefix matching", theme=theme), "Prefix matching of every head",
            "Prefix matching: weight on all tokens that follow an earlier occurrence of the query's, mean over rows.",
            PROVENANCE.sentence(),
        ),
        "captioned with a legend": figures.captioned(
            figures.curves({"a": np.ones(9), "b": np.zeros(9)}, x_label="place", y_label="loss (nats)", theme=theme),
            "Loss of both copies, along the sequence", "What one must know. " * 9, PROVENANCE.sentence(),
        ),
    }  # fmt: skip


# Sizes


@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize(("preset", "inches"), [("one-column", 3.3), ("two-column", 6.9), ("slide", 10.0)])
def test_pictures_have_the_width_of_their_preset(preset: str, inches: float, tmp_path: Path) -> None:
    figure = figures.curves({"a": np.arange(4.0)}, x_label="x", y_label="y")
    figures.write_figures({tmp_path / f"f.{kind}": figure for kind in ("svg", "pdf", "png")}, preset=preset)
    svg = (tmp_path / "f.svg").read_text(encoding="utf-8")
    assert float(re.search(r'width="([\d.]+)"', svg)[1]) / 96 == pytest.approx(inches, abs=0.01)
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", (tmp_path / "f.pdf").read_bytes())
    assert float(box[1]) / 72 == pytest.approx(inches, abs=0.02)
    png = (tmp_path / "f.png").read_bytes()
    assert png.startswith(b"\x89PNG") and struct.unpack(">I", png[16:20])[0] == pytest.approx(300 * inches, abs=2)
    assert {path.name for path in tmp_path.iterdir()} == {"f.svg", "f.pdf", "f.png"}


TEXTS = """() => {
  const svg = document.querySelector('svg')
  const frame = svg.getBoundingClientRect()
  const shown = [...document.querySelectorAll('text')].filter(node => node.textContent.trim())
  return [frame.right, frame.bottom, shown.map(node => {
    const box = node.getBoundingClientRect()
    const pixels = parseFloat(getComputedStyle(node).fontSize) * frame.width / svg.viewBox.baseVal.width
    return [node.textContent, box.left, box.top, box.right, box.bottom, pixels]
  })]
}"""


@pytest.mark.parametrize(("preset", "theme"), [("one-column", "light"), ("two-column", "dark"), ("slide", "light")])
def test_all_text_can_be_read_and_none_is_cut_off_or_covers_another(
    preset: str, theme: str, page: Page, tmp_path: Path
) -> None:
    shown = drawn(theme)
    figures.write_figures({tmp_path / f"{name}.svg": figure for name, figure in shown.items()}, preset=preset)
    page.set_viewport_size({"width": 1100, "height": 1500})
    for name in shown:
        page.set_content(f"<body style='margin: 0'>{(tmp_path / f'{name}.svg').read_text(encoding='utf-8')}</body>")
        width, height, texts = page.evaluate(TEXTS)
        assert len(texts) > 4, name
        for i, (text, left, top, right, bottom, pixels) in enumerate(texts):
            assert pixels * 72 / 96 >= LEAST_POINTS - 0.01, f"{name}: {text!r} is too small"
            inside = left >= -1 and top >= -1 and right <= width + 1 and bottom <= height + 1
            assert inside, f"{name}: {text!r} is cut off"
            for other, left_, top_, right_, bottom_, _ in texts[i + 1 :]:
                apart = min(right, right_) - max(left, left_) < 2 or min(bottom, bottom_) - max(top, top_) < 3
                assert apart, f"{name}: {text!r} covers {other!r}"


BRIGHT = """async (source) => {
  const image = new Image()
  image.src = source
  await image.decode()
  const canvas = document.createElement('canvas')
  canvas.width = image.width
  canvas.height = image.height
  const context = canvas.getContext('2d')
  context.drawImage(image, 0, 0)
  const data = context.getImageData(0, 0, image.width, image.height).data
  const yellow = (x, y) => {
    const [red, green, blue] = data.subarray(4 * (y * image.width + x))
    return red > 200 && green > 180 && blue < 120
  }
  const columns = [...Array(Math.floor(0.7 * image.width)).keys()]  // without the colour bar
  return [...Array(image.height).keys()].map(y => columns.filter(x => yellow(x, y)).length)
}"""


def test_a_stripe_one_cell_wide_is_in_every_row_of_a_png(page: Page, tmp_path: Path) -> None:
    path = figures.write_figure(pattern(512), tmp_path / "stripe.png", preset="one-column")
    source = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    rows = np.array(page.evaluate(BRIGHT, source)) > 0
    drawn_rows = np.flatnonzero(rows)
    assert len(drawn_rows) >= 512 and rows[drawn_rows[0] : drawn_rows[-1] + 1].all()


# Numbers


def test_the_numbers_of_a_map_are_the_results_table(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(size=(3, 2))
    quantity = Quantity(values, ("layer", "head"), "share of 1", "d")
    result = HeadStatistics(quantities={"prefix_matching": quantity}, provenance=PROVENANCE)
    path = result.write_figure(tmp_path / "map.csv", "map", score="prefix_matching")
    written = pd.read_csv(path)
    assert list(written) == ["layer", "head", "prefix matching", "label"]
    expected = result.to_frame().rename(columns={"prefix_matching": "prefix matching"})
    pd.testing.assert_frame_equal(written.drop(columns="label"), expected)
    assert list(written["label"][:3]) == ["L0H0", "L0H1", "L1H0"]


def test_numbers_are_those_that_are_meant_and_not_what_colours_or_limits_them(tmp_path: Path) -> None:
    masses = np.array([[[0.04, 0.0, 0.25]]])
    table = figures.numbers_of(figures.position_map(masses, label="mean weight received"))
    assert list(table["mean weight received"]) == [0.04, 0.0, 0.25] and list(table["key position"]) == [0, 1, 2]
    assert list(table["head"]) == ["L0H0"] * 3
    coloured = figures.numbers_of(pattern(3, scale="sqrt"))
    assert list(coloured) == ["query (destination)", "key (source)", "weight"]
    assert coloured["weight"].to_list()[::4] == [1.0, 1.0, 1.0] and coloured["weight"].isna().sum() == 3
    tiny = np.array([[1e-9, 2.0]])
    everyone = {"decisive": np.array([[False, True]]), "rest": np.array([[True, False]])}
    plot = figures.quadrants(
        np.array([[0.1, 0.9]]), tiny, groups=everyone, named={}, thresholds=(0.2, 0.8, 0.1, 1.0), x_label="weight",
        y_label="|effect| (logits)", note="n",
    )  # fmt: skip
    table = figures.numbers_of(plot).set_index("head")
    assert table.loc["L0H0", "|effect| (logits)"] == 1e-9 and table.loc["L0H1", "|effect| (logits)"] == 2.0
    assert len(table) == 2  # neither marginals nor lines
    curve = figures.curves(
        {"a": np.array([1.0, 2.0]), "b": np.array([3.0, np.nan])}, x_label="x", y_label="loss (nats)"
    )
    table = figures.numbers_of(curve)
    assert list(table["series"]) == ["a", "a", "b", "b"] and list(table["loss (nats)"][:3]) == [1.0, 2.0, 3.0]


def test_numbers_hold_the_intervals_and_what_was_written_as_markup() -> None:
    values, low, high = np.array([0.5, 0.1]), np.array([0.4, np.nan]), np.array([0.7, np.nan])
    dots = figures.agreement_dots(
        ["a &lt;b", "‖v W<sub>O</sub>‖"], {"s": (values, low, high)}, filled=[low > 0], x_label="τ"
    )
    table = figures.numbers_of(dots)
    assert list(table["τ, low"][:1]) == [0.4] and np.isnan(table["τ, high"][1])
    assert [text for column in table for text in table[column] if text in ("a <b", "‖v WO‖")] == ["a <b", "‖v WO‖"]


# One browser, or none


@pytest.mark.usefixtures("browser")
def test_all_pictures_are_drawn_by_one_browser(tmp_path: Path) -> None:
    figure = figures.position_bars(np.ones(3), x_label="key", y_label="rate")
    figures.write_figure(figure, tmp_path / "first.svg")
    used = drawing._browser
    figures.write_figures({tmp_path / f"{i}.svg": figure for i in range(10)})
    assert used is not None and drawing._browser is used and len(list(tmp_path.iterdir())) == 11


@pytest.mark.usefixtures("browser")
def test_a_process_that_has_drawn_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import numpy as np; from workbench.analyses import figures\n"
        "figures.write_figure(figures.position_bars(np.ones(3), x_label='k', y_label='r'), 'f.pdf')\n"
        "from workbench.analyses.figures import browser; print(browser._browser._kaleido.subprocess.pid)"
    )
    with tempfile.TemporaryDirectory() as temporary:  # Chromium wants short paths
        surroundings = os.environ | {"TMPDIR": temporary}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=surroundings, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert not psutil.pid_exists(int(done.stdout)) and not os.listdir(temporary)


@pytest.mark.usefixtures("browser")
def test_a_browser_that_fails_is_named_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = figures.position_bars(np.ones(3), x_label="key", y_label="rate")
    with monkeypatch.context() as patched:
        patched.setenv("CHROMIUM", shutil.which("false"))
        with pytest.raises(figures.ExportError, match="false could not draw the figure .*or write .html"):
            figures.write_figure(figure, tmp_path / "f.svg")
    assert not list(tmp_path.iterdir())
    assert figures.write_figure(figure, tmp_path / "f.svg").stat().st_size > 1000


def test_without_a_browser_it_says_what_is_missing_and_what_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = figures.position_bars(np.ones(3), x_label="key", y_label="rate")

    def refused() -> str:
        with pytest.raises(figures.ExportError) as raised:
            figures.write_figures({tmp_path / "f.csv": figure, tmp_path / "f.svg": figure})
        assert "write .html" in str(raised.value) and not list(tmp_path.iterdir())
        return str(raised.value)

    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    assert "CHROMIUM is /nowhere/chromium" in refused()
    monkeypatch.delenv("CHROMIUM")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("choreographer.browsers.chromium.Chromium.find_browser", lambda **options: None)
    message = refused()
    assert "apt install chromium" in message and "set the variable CHROMIUM" in message
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    assert "pip install 'attention-workbench[export]'" in refused()
    figures.write_figures({tmp_path / "f.csv": figure, tmp_path / "f.html": figure})
    assert {path.name for path in tmp_path.iterdir()} == {"f.csv", "f.html"}


def test_the_page_that_draws_asks_for_nothing_from_outside() -> None:
    kaleido = pytest.importorskip("kaleido")
    page = kaleido.PageGenerator(mathjax=False).generate_index()
    assert not re.search(r"(src|href)=.?https?:", page)


def test_other_formats_and_sizes_are_refused(tmp_path: Path) -> None:
    figure = figures.position_bars(np.ones(3), x_label="key", y_label="rate")
    with pytest.raises(ValueError, match=r"must end in one of \.svg, \.pdf, \.png, \.html, \.csv"):
        figures.write_figure(figure, tmp_path / "f.eps")
    with pytest.raises(ValueError, match="preset must be one of 'one-column', 'two-column', 'slide', got 'poster'"):
        figures.write_figure(figure, tmp_path / "f.html", preset="poster")
    with pytest.raises(OSError):
        figures.write_figure(figure, tmp_path / "missing" / "f.html")
    assert not list(tmp_path.iterdir())


# One function for what lies around a diagonal


def test_points_far_from_the_diagonal_are_named_and_those_without_a_value_left_out() -> None:
    x, y = np.array([[0.0, 1.0], [2.0, np.nan]]), np.array([[0.0, 1.01], [5.0, 1.0]])
    plot = figures.diagonal(x, y, names=["a", "b", "c", "d"], x_label="true", y_label="estimate", note="r = 1")
    line, points = plot.data
    assert list(line.x) == list(line.y) == [0.0, 5.0]
    assert list(points.customdata) == ["a", "b", "c"] and list(points.text) == ["", "", "c"]
    assert plot.layout.annotations[0].text == "r = 1"
    assert not figures.diagonal(x, y, names=["a", "b", "c", "d"], x_label="t", y_label="e").layout.annotations
