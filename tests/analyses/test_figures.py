from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.colors import sample_colorscale

from workbench.analyses import figures

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = ["<script>document.title='broken'</script>", "%{x}", " the", "\n", "a & b", "<b>bold</b>", "$\\alpha$"]


def pattern(theme: str = "light", scale: str = "linear") -> go.Figure:
    n = len(HOSTILE)
    cells = np.where(np.tri(n) > 0, 1 / np.arange(1, n + 1)[:, None], np.nan)
    labels = figures.token_labels(HOSTILE)
    return figures.pattern_map(
        cells, query_labels=labels, key_labels=labels, query_marginal=np.ones(n), key_marginal=np.ones(n),
        query_marginal_label="entropy (nats)", key_marginal_label="received", label="weight", scale=scale, theme=theme,
    )  # fmt: skip


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", figures.THEMES)
def test_text_and_series_stand_out_from_the_paper(name: str) -> None:
    theme = figures.THEMES[name]
    assert contrast(theme.text, theme.paper) >= 7
    assert all(contrast(colour, theme.paper) >= 3 for colour in theme.series[:2])  # lines and markers in use
    # Grey of masked cells is none of the scale's colours: cividis runs from dark blue to yellow.
    assert contrast(theme.masked, "#00224e") >= 2 and contrast(theme.masked, theme.paper) >= 1.3


def test_a_head_map_runs_down_from_layer_0_over_a_stated_range() -> None:
    values = np.array([[0.1, np.nan], [0.9, 0.0], [0.2, 0.3]])
    figure = figures.head_map(values, label="prefix matching", upper=1.0, marked=[(1, 0)])
    (heatmap,) = figure.data
    assert (heatmap.zmin, heatmap.zmax) == (0.0, 1.0)
    assert figure.layout.yaxis.range == (2.5, -0.5) and figure.layout.yaxis.title.text == "layer"
    assert figure.layout.xaxis.range == (-0.5, 1.5)  # which a frame at the edge would widen
    assert heatmap.customdata[1][0] == "L1H0" and heatmap.z[1][0] == 0.9
    (frame,) = figure.layout.shapes
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (-0.5, 0.5, 0.5, 1.5)
    assert figure.layout.plot_bgcolor == figures.THEMES["light"].masked  # shows where there is no value


@pytest.mark.parametrize("signed", [False, True])
def test_numbers_on_a_map_stand_out_from_their_cells(signed: bool) -> None:
    values = np.linspace(-1.0 if signed else 0.0, 1.0, 101)[None]
    figure = figures.head_map(values, label="s", signed=signed, upper=1.0)
    cells = sample_colorscale("RdBu_r" if signed else "cividis", np.linspace(0, 1, 101), colortype="tuple")
    numbers = figure.layout.annotations
    assert [number.text for number in numbers] == [f"{value:z.2f}" for value in values[0]]
    for number, cell in zip(numbers, cells, strict=True):
        assert contrast(number.font.color, "#" + "".join(f"{round(255 * c):02x}" for c in cell)) >= 4.5


@pytest.mark.parametrize(("largest", "text"), [(3.0, "3.00"), (0.2, "0.20"), (0.03, "0.030"), (0.0012, "0.0012")])
def test_small_effects_are_not_printed_as_zeros(largest: float, text: str) -> None:
    figure = figures.head_map(np.array([[largest, 0.0]]), label="effect", signed=True)
    assert figure.layout.annotations[0].text == text and float(figure.layout.annotations[1].text) == 0


def test_cells_without_a_value_and_large_maps_print_nothing() -> None:
    assert len(figures.head_map(np.array([[0.5, np.nan]]), label="s").layout.annotations) == 1
    assert not figures.head_map(np.ones((30, 30)), label="s").layout.annotations


def test_effects_are_coloured_about_zero() -> None:
    (heatmap,) = figures.head_map(np.array([[-0.2, 0.5]]), label="effect", signed=True).data
    assert (heatmap.zmin, heatmap.zmax) == (-0.5, 0.5)
    assert len(heatmap.colorscale) == len(go.Figure(go.Heatmap(colorscale="RdBu_r")).data[0].colorscale)


def test_a_range_without_a_bound_ends_at_the_largest_value() -> None:
    (heatmap,) = figures.head_map(np.array([[0.5, 3.0]]), label="entropy").data
    assert (heatmap.zmin, heatmap.zmax) == (0.0, 3.0)
    (heatmap,) = figures.head_map(np.full((1, 2), np.nan), label="entropy").data
    assert (heatmap.zmin, heatmap.zmax) == (0.0, 1.0)


def test_one_wide_columns_survive_pooling() -> None:
    values = np.zeros((1, 2, 3000))
    values[0, 1, 1234] = 0.64
    figure = figures.position_map(values, label="received")
    (heatmap,) = figure.data
    z = np.asarray(heatmap.z)
    assert z.shape[1] <= 512 and z.max() == pytest.approx(0.8) and np.max(heatmap.customdata) == 0.64
    column = int(z[1].argmax())
    assert abs(heatmap.x0 + column * heatmap.dx - 1234) <= heatmap.dx / 2
    assert "of 6 at a time" in figure.layout.xaxis.title.text


def test_a_map_of_positions_has_a_row_for_every_head_and_no_range_of_what_is_missing() -> None:
    values = np.full((3, 2, 10), 0.01)
    values[2, 1, 4] = 0.04
    values[..., 8:] = np.nan
    figure = figures.position_map(values, label="received", missing="too few queries")
    (heatmap,) = figure.data
    assert list(heatmap.y) == ["L0H0", "L0H1", "L1H0", "L1H1", "L2H0", "L2H1"]
    assert heatmap.zmax == pytest.approx(0.2) and heatmap.customdata[5][4] == 0.04
    ticks = dict(zip(heatmap.colorbar.ticktext, heatmap.colorbar.tickvals, strict=True))
    assert all(at == pytest.approx(np.sqrt(tick)) for tick, at in ticks.items()) and len(ticks) >= 4
    grey = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert [(shape.x0, shape.x1, shape.name) for shape in grey] == [(7.5, 9.5, "too few queries")]
    assert figure.layout.showlegend
    many = figures.position_map(np.ones((30, 9, 5)), label="received")
    assert list(many.layout.yaxis.tickvals) == [f"L{layer}H0" for layer in range(30)]
    assert figures.position_map(np.full((1, 1, 5), np.nan), label="received").data[0].zmax == 1.0


def test_scatter_names_the_highest_heads() -> None:
    y = np.array([[0.1, 0.9], [0.5, np.nan]])
    (points,) = figures.head_scatter(np.zeros((2, 2)), y, x_label="x", y_label="y", n_labels=2).data
    assert list(points.text) == ["", "L0H1", "L1H0", ""]


@pytest.mark.parametrize(("low", "high", "least"), [(0.6, 0.9, 3), (0.3, 2.0, 4), (0.001, 30.0, 10)])
def test_a_ratio_has_a_named_log_scale_with_numbers_on_it_and_a_line_at_1(low: float, high: float, least: int) -> None:
    figure = figures.head_scatter(np.array([[low, high]]), np.ones((1, 2)), x_label="ratio", y_label="y", ratio=True)
    axis = figure.layout.xaxis
    assert axis.type == "log" and axis.title.text == "ratio (log scale)"
    assert least <= sum(min(low, 1) <= tick <= max(high, 1) for tick in axis.tickvals) <= 16
    (line,) = figure.layout.shapes
    assert line.x0 == line.x1 == 1
    plain = figures.head_scatter(np.ones((1, 2)), np.ones((1, 2)), x_label="x", y_label="y")
    assert plain.layout.xaxis.title.text == "x" and not plain.layout.shapes


@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_patterns_read_down_and_keep_masked_cells_apart_from_zero(scale: str) -> None:
    figure = pattern(scale=scale)
    heatmap = figure.data[2]
    z = np.asarray(heatmap.z, dtype=float)
    assert np.isnan(z[0, 1]) and z[1, 0] == pytest.approx(0.5 if scale == "linear" else np.sqrt(0.5))
    assert figure.layout.yaxis3.autorange == "reversed"
    assert (
        figure.layout.xaxis3.title.text == "key (source)" and figure.layout.yaxis3.title.text == "query (destination)"
    )
    assert ("√" in heatmap.colorbar.title.text) == (scale == "sqrt")


def test_bars_of_a_pattern_have_a_length_that_means_something() -> None:
    def drawn(entropy: list[float], received: list[float]) -> go.Figure:
        return figures.pattern_map(
            np.eye(2), query_labels=["a", "b"], key_labels=["c", "d"], query_marginal=np.array(entropy),
            key_marginal=np.array(received), query_marginal_label="entropy (nats)",
            key_marginal_label="received<br>(queries)", label="weight",
        )  # fmt: skip

    dust, real = drawn([2e-37, 0.0], [0.0, 1e-30]), drawn([0.5, 2.0], [1.0, 3.0])
    assert dust.layout.xaxis4.range[0] == dust.layout.yaxis.range[0] == 0.0
    assert dust.layout.xaxis4.range[1] >= 0.1 and dust.layout.yaxis.range[1] >= 0.1
    assert 2.0 < real.layout.xaxis4.range[1] < 2.2 and 3.0 < real.layout.yaxis.range[1] < 3.3
    above, right = real.data[:2]
    assert above.hovertemplate.startswith("key %{x}<br>received<br>(queries): %{y")
    assert right.hovertemplate.startswith("query %{y}<br>entropy (nats): %{x")


def test_tokens_are_visible_unique_and_escaped() -> None:
    assert figures.show_token(" a\n\t<b>&") == "␣a↵⇥&lt;b&gt;&amp;"
    labels = figures.token_labels(["x", "x"])
    assert labels == ["x 0", "x 1"]


def test_an_unknown_theme_is_refused() -> None:
    with pytest.raises(ValueError, match="'light', 'dark'"):
        figures.head_map(np.zeros((1, 1)), label="a", theme="sepia")


def test_what_has_no_value_looks_unlike_zero() -> None:
    figure = figures.position_bars(
        np.array([0.5, 0.0, np.nan, 0.1, np.nan, np.nan]), x_label="key", y_label="rate", missing="not evaluated"
    )
    spans = [(shape.x0, shape.x1, shape.showlegend) for shape in figure.layout.shapes]
    assert spans == [(1.5, 2.5, True), (3.5, 5.5, False)]  # positions 2, 4 and 5, and one entry in the legend
    assert figure.layout.shapes[0].name == "not evaluated" and figure.layout.showlegend
    assert figure.layout.shapes[0].fillcolor == figures.THEMES["light"].masked
    whole = figures.position_bars(np.array([0.5, 0.0]), x_label="key", y_label="rate", missing="not evaluated")
    assert not whole.layout.shapes and not whole.layout.showlegend


def test_a_caption_is_plain_text_above_the_same_figure() -> None:
    bare = figures.position_bars(np.ones(3), x_label="key", y_label="rate")
    captioned = figures.captioned(go.Figure(bare), "a <b>&", "first " * 60, "“<i>”")
    title = captioned.layout.title
    assert title.text == "a &lt;b&gt;&amp;" and title.subtitle.text.endswith("<br>“&lt;i&gt;”")
    lines = title.subtitle.text.split("<br>")
    assert " ".join(lines[:-1]) == ("first " * 60).strip() and max(map(len, lines)) <= 150
    grown = captioned.layout.height - bare.layout.height
    assert grown == captioned.layout.margin.t - bare.layout.template.layout.margin.t > 12 * len(lines) + 17


def caption(note: str, source: str = "") -> list[str]:
    figure = figures.captioned(figures.head_map(np.ones((1, 1)), label="a"), "t", note, source)
    return figure.layout.title.subtitle.text.split("<br>")


def test_wide_characters_fill_lines_sooner() -> None:
    assert [len(line) for line in caption("注" * 150)] == [75, 75]


def test_the_last_line_of_a_caption_holds_no_lonely_word() -> None:
    lines = caption("word " * 31)  # 155 characters: one word more than a line holds
    assert len(lines) == 2 and abs(len(lines[0]) - len(lines[1])) <= 5


def test_indices_in_a_note_are_set_and_quoted_text_stays_as_it_is() -> None:
    assert caption("‖v W_O‖ and α_j, of <p_ij>", "“my_text <i>”") == [
        "‖v W<sub>O</sub>‖ and α<sub>j</sub>, of &lt;p<sub>ij</sub>&gt;",
        "“my_text &lt;i&gt;”",
    ]


def test_html_files_need_nothing_from_outside(tmp_path: Path) -> None:
    path = figures.write_figure(pattern(), tmp_path / "pattern.html")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
    assert '"showSendToCloud": false' in text and '"displaylogo": false' in text
    assert "<script>document.title" not in text
    assert [file.name for file in tmp_path.iterdir()] == ["pattern.html"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        figures.write_figure(pattern(), tmp_path / "missing" / "pattern.html")
    assert not list(tmp_path.iterdir())


def test_a_browser_shows_the_file_without_running_tokens(page: Page, tmp_path: Path) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    html = figures.write_figure(pattern(theme="dark"), tmp_path / "pattern.html").read_text(encoding="utf-8")
    page.set_content(html)
    page.wait_for_selector(".heatmaplayer image")
    ticks = [text.replace("\xa0", " ") for text in page.locator("text").all_text_contents()]
    assert "␣the 2" in ticks and "<b>bold</b> 5" in ticks and "%{x} 1" in ticks
    assert page.title() != "broken" and not errors
    buttons = page.locator(".modebar-btn").evaluate_all("nodes => nodes.map(n => n.getAttribute('data-title'))")
    assert any("svg" in title.lower() or "download" in title.lower() for title in buttons)
    assert not any("share" in title.lower() for title in buttons)


BOXES = """() => ['.gtitle', '.gtitle-subtitle', '.legend', '.plotly .cartesianlayer', '.infolayer .colorbar']
  .map(name => document.querySelector(name)?.getBoundingClientRect()).filter(box => box)
  .map(box => [box.left, box.top, box.right, box.bottom])"""


@pytest.mark.parametrize("width", [900, 1440])
def test_captions_fit_and_cover_nothing(width: int, page: Page, tmp_path: Path) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    bars = figures.position_bars(np.array([0.5, np.nan]), x_label="key", y_label="rate", missing="not evaluated")
    prose = "the model's weights, cast to float32, and whatever else a caption may mention, " * 3
    points = np.array([1.0]), np.array([0.1])
    effects = figures.effects(["L0H0"] * 30, {"mean": points}, control=0.1, x_label="change")
    drawn = {
        "pattern": pattern(),
        "bars": bars,
        "effects": effects,
        "map": figures.head_map(np.ones((2, 2)), label="s"),
    }
    for name, figure in drawn.items():
        figures.captioned(
            figure, "Weight of many moments " * 4, f"“{'MUCH ADO ' * 7}” of {prose}", HOSTILE[0] + "注" * 90
        )
        html = figures.write_figure(figure, tmp_path / f"{name}.html").read_text(encoding="utf-8")
        page.set_content(html)
        page.wait_for_selector(".gtitle-subtitle")
        boxes = page.evaluate(BOXES)
        title, subtitle = boxes[:2]
        assert "<script>" in page.locator(".gtitle-subtitle").text_content() and page.title() != "broken"
        assert all(left >= 0 and right <= width and top >= 0 for left, top, right, _ in boxes), name
        assert title[3] <= subtitle[1] + 2, name
        assert all(subtitle[3] <= top for _, top, _, _ in boxes[2:]), name


PIXELS = """async () => {
  const picture = document.querySelector('.heatmaplayer image')
  const image = new Image()
  image.src = picture.getAttribute('href') || picture.getAttributeNS('http://www.w3.org/1999/xlink', 'href')
  await image.decode()
  const canvas = document.createElement('canvas')
  canvas.width = image.width
  canvas.height = image.height
  const context = canvas.getContext('2d')
  context.drawImage(image, 0, 0)
  const data = context.getImageData(0, 0, image.width, image.height).data
  const bright = (x, y) => data[4 * (y * image.width + x)] > 200
  const rows = [...Array(image.height).keys()].filter(y => [...Array(image.width).keys()].some(x => bright(x, y)))
  const columns = [...Array(image.width).keys()].filter(x => [...Array(image.height).keys()].some(y => bright(x, y)))
  return [rows.length / image.height, columns.length / image.width, image.width, image.height]
}"""


def test_a_stripe_one_cell_wide_is_drawn_in_every_row_and_column(page: Page, tmp_path: Path) -> None:
    n = 512
    labels = [str(i) for i in range(n)]
    figure = figures.pattern_map(
        np.eye(n), query_labels=labels, key_labels=labels, query_marginal=np.ones(n), key_marginal=np.ones(n),
        query_marginal_label="a", key_marginal_label="b", label="weight",
    )  # fmt: skip
    page.set_content(figures.write_figure(figure, tmp_path / "stripe.html").read_text(encoding="utf-8"))
    page.wait_for_selector(".heatmaplayer image")
    rows, columns, width, height = page.evaluate(PIXELS)
    assert rows == columns == 1.0
    assert min(width, height) >= n


def test_labels_of_a_scatter_cover_no_other_label() -> None:
    crowded = np.array([[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0, 1.0]])
    figure = figures.head_scatter(
        crowded, np.array([[0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.0, 1.0]]), x_label="x", y_label="y"
    )
    scatter = figure.data[0]
    named = [(name, side) for name, side in zip(scatter.text, scatter.textposition, strict=True) if name]
    assert ("L0H7", "top right") in named
    sides = [side for name, side in named if name != "L0H7"]
    assert len(sides) == len(set(sides)) == 4  # six points in one place have four sides
    assert figures.head_scatter(np.full((1, 2), np.nan), np.ones((1, 2)), x_label="x", y_label="y").data[0].text == (
        "",
        "",
    )


def test_control_characters_of_tokens_are_shown_so_that_an_svg_can_hold_them() -> None:
    assert figures.show_token("a\n\t\r\x00\x1b\x7f <") == "a↵⇥␍␀␛␡␣&lt;"
