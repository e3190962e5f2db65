"""What is one token wide is seen in every row of the screen and of every exported file, however long the text is.

See test_browser.py.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import head_pattern, layer_patterns
from workbench.app.models import ModelStore

Open = Callable[[], Any]
Serve = Callable[[ModelStore], AbstractContextManager[str]]
LENGTHS = (2048, 8192)
STRIPE, SINK = 0, 1  # heads


@pytest.fixture(scope="module")
def model(tiny: HookedTransformer) -> HookedTransformer:
    """Head 0 attends to the token before, head 1 to the first.

    Positions are 32 rotations. Keys of head 0 are turned by one position; queries of head 1 ask for position 0, which
    they have from a number that is the same in every token's embedding.
    """
    n_ctx, n_rotations = max(LENGTHS), 32
    cfg = TransformerConfig(
        n_layers=1, d_model=2 * n_rotations + 1, n_heads=2, d_head=2 * n_rotations, d_mlp=1, d_vocab=tiny.cfg.d_vocab,
        n_ctx=n_ctx, normalization_type="RMS", attn_scale=1.0, model_name="stripe and sink",
    )  # fmt: skip
    made = HookedTransformer(cfg, tiny.tokenizer).eval()
    frequency = torch.rand(n_rotations, generator=torch.Generator().manual_seed(0)) * 3
    angle = torch.arange(n_ctx)[:, None] * frequency
    cos, sin = frequency.cos().diag(), frequency.sin().diag()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        made.pos_embed.W_pos[:, :-1] = torch.cat((angle.cos(), angle.sin()), dim=1)
        made.embed.W_E[:, -1] = 1.0
        attention = made.blocks[0].attn
        attention.W_Q[STRIPE, :-1] = 4 * torch.eye(2 * n_rotations)
        attention.W_K[STRIPE, :-1] = torch.cat((torch.cat((cos, sin), dim=1), torch.cat((-sin, cos), dim=1)))
        attention.W_Q[SINK, -1, :n_rotations] = 30.0
        attention.W_K[SINK, :-1] = torch.eye(2 * n_rotations)
    return made


def text_of(n_tokens: int) -> torch.Tensor:
    return torch.arange(n_tokens) % 8 + 2


def test_the_heads_do_what_they_are_made_for(model: HookedTransformer) -> None:
    near = {"queries": (8000, 8040), "keys": (7990, 8040)}
    stripe = head_pattern(model, text_of(8192), 0, STRIPE, **near)["weight"]
    assert all(stripe[row, row + 9] > 0.99 for row in range(40))
    sink = head_pattern(model, text_of(8192), 0, SINK)
    assert sink["first_weight"].min() > 0.99


# Of a picture: the rows, from those given on, in which some pixel is near the upper end of the scale.
BRIGHT_ROWS = """
async ([source, left, top, width, height]) => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    const { data } = context.getImageData(left, top, width || canvas.width, height || canvas.height);
    const [rows, columns] = [height || canvas.height, width || canvas.width];
    const bright = (x, y) => {
        const [red, green, blue] = data.subarray(4 * (y * columns + x));
        return red > 215 && green > 190 && blue < 130;
    };
    return [...Array(rows).keys()].map((y) => [...Array(columns).keys()].some((x) => bright(x, y)));
}
"""


def bright_rows(page: Any, picture: bytes, *area: int, kind: str = "png") -> np.ndarray:
    source = f"data:image/{kind};base64," + base64.b64encode(picture).decode()
    return np.array(page.evaluate(BRIGHT_ROWS, [source, *(area or (0, 0, 0, 0))]))


def test_a_stripe_and_a_sink_are_in_every_row_of_the_screen(
    model: HookedTransformer, watched: Open, serve: Serve
) -> None:
    words = ["a", "b", "c", "d", "%{x}", "e", "f"]
    page = watched()
    with serve(ModelStore(load=lambda source, job, make_room: model)) as address:
        page.goto(address + "?v=1&page=pattern&model=made&text=a%20b&layer=0&head=0")
        page.drawn("pattern-map")
        page.fill("#text", " ".join(words[place % 7] for place in range(max(LENGTHS) - 1)))
        for n_tokens in LENGTHS:
            page.fill("#max-tokens", str(n_tokens))
            page.click("#analyse")
            for width, head in ((1440, STRIPE), (900, SINK)):
                page.set_viewport_size({"width": width, "height": 1100})
                page.fill("#head", str(head))
                page.wait_for_selector(f"#pattern-title >> text=L0H{head}")
                page.wait_for_selector(f"#pattern-part >> text=of {n_tokens:,} tokens")
                page.locator("#pattern-map").scroll_into_view_if_needed()
                page.wait_for_timeout(300)
                box = page.area("pattern-map", "3")
                area = int(box["x"]), int(box["y"]) + 1, int(box["width"]) + 1, int(box["height"]) - 2
                rows = bright_rows(page, page.screenshot(), *area)
                assert len(rows) > 320 and rows.all(), (n_tokens, width, head, np.flatnonzero(~rows))
            if n_tokens == LENGTHS[0]:
                check_preview(page)
        page.click("#show")
        page.click("text=All heads of layer")
        page.wait_for_selector("#pattern-title >> text=Layer 0")
        page.wait_for_timeout(300)
        screen = page.screenshot()
        for panel in page.evaluate(PANELS):
            rows = bright_rows(page, screen, *panel)
            assert len(rows) > 150 and rows.all(), np.flatnonzero(~rows)


def check_preview(page: Any) -> None:
    """The small pattern beside the map of all heads is not too small for its cells."""
    page.click("#go-heads")
    page.drawn("heads-pattern")
    page.wait_for_timeout(300)
    page.locator("#heads-pattern").scroll_into_view_if_needed()
    box = page.area("heads-pattern", "3")
    area = int(box["x"]), int(box["y"]) + 1, int(box["width"]) + 1, int(box["height"]) - 2
    rows = bright_rows(page, page.screenshot(), *area)
    assert len(rows) > 150 and rows.all(), np.flatnonzero(~rows)
    page.click("#go-pattern")


# Where the panels of the mosaic are, in pixels of the window.
PANELS = """
() => {
    const plot = document.querySelector("#pattern-map .js-plotly-plot");
    const { xaxis: x, yaxis: y, shapes } = plot._fullLayout;
    const { left, top } = plot.getBoundingClientRect();
    return shapes.filter((shape) => shape.layer === "below").map(({ x0, x1, y0, y1 }) => {
        const [west, east] = [x0, x1].map((edge) => Math.round(left + x._offset + x.l2p(edge)));
        const [north, south] = [y0, y1].map((edge) => Math.round(top + y._offset + y.l2p(edge)));
        return [west, north + 1, east - west, south - north - 2];
    });
}
"""


def test_a_stripe_and_a_sink_are_in_every_row_of_every_file(
    model: HookedTransformer, watched: Open, tmp_path: Path
) -> None:
    page = watched()
    page.goto("about:blank")
    for head, preset, n_tokens in ((STRIPE, "one-column", 8192), (SINK, "two-column", 2048)):
        figure = head_pattern(model, text_of(n_tokens), 0, head).figure(captioned=True)
        cells = len(figure.data[-1].z)
        for name in written(figure, tmp_path, preset):
            pictures = list(maps_in(tmp_path / name, page))
            assert pictures, name
            for rows in pictures:
                drawn = np.flatnonzero(rows)
                assert len(drawn) >= cells and rows[drawn[0] : drawn[-1] + 1].all(), (name, head)
    mosaic = layer_patterns(model, text_of(8192), 0).figure()
    for name in written(mosaic, tmp_path, "one-column"):
        (rows,) = maps_in(tmp_path / name, page)
        drawn = np.flatnonzero(rows)
        assert len(drawn) >= mosaic.layout.shapes[0].y1 - mosaic.layout.shapes[0].y0, name
        assert rows[drawn[0] : drawn[-1] + 1].all(), name


def written(figure: Any, folder: Path, preset: str) -> list[str]:
    from workbench.analyses.figures import write_figures

    return [
        path.name for path in write_figures({folder / f"map.{k}": figure for k in ("png", "svg", "pdf")}, preset=preset)
    ]


def maps_in(path: Path, page: Any) -> Iterator[np.ndarray]:
    """The rows with a bright pixel of a PNG, left of its colour bar, or of the map that an SVG or a PDF holds."""
    content = path.read_bytes()
    if path.suffix == ".png":
        width = int.from_bytes(content[16:20], "big")
        height = int.from_bytes(content[20:24], "big")
        yield bright_rows(page, content, 0, 0, int(0.7 * width), height)
    elif path.suffix == ".svg":
        for picture in re.findall(rb"<image[^>]*href=\"data:image/png;base64,([^\"]+)", content):
            rows = bright_rows(page, base64.b64decode(picture))
            if len(rows) > 100:  # others are colour bars
                yield rows
    else:
        for size, stream in re.findall(
            rb"(/Type /XObject\s*/Subtype /Image.*?)stream\r?\n(.*?)endstream", content, re.S
        ):
            found = re.search(rb"/Width (\d+).*?/Height (\d+)", size, re.S)
            if found is None or b"/DeviceGray" in size:  # the latter is a picture's opacity
                continue
            width, height = int(found[1]), int(found[2])
            if height > 100 and width > 100:
                pixels = np.frombuffer(zlib.decompress(stream), dtype=np.uint8).reshape(height, width, 3)
                yield ((pixels[..., 0] > 215) & (pixels[..., 1] > 190) & (pixels[..., 2] < 130)).any(axis=1)
