"""All heads of a layer at once are what each head is alone, and stand where the figure says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import LayerPatterns, figures, head_pattern, layer_patterns, load_result
from workbench.analyses.attention import mosaics
from workbench.analyses.figures.mosaic import AROUND, HEIGHT, cells_of_a_panel

TOKENS = torch.randint(0, 50, (41,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("at_a_time", [1, 10**9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_cells": 7},
        {"max_cells": 6, "pooling": "mean", "without_first": True, "queries": (3, 40)},
        {"max_cells": 9, "value_weighted": True, "keys": (5, 30)},
    ],
)
def test_every_head_is_what_it_is_alone(
    random_model: HookedTransformer, options: dict[str, Any], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaics, "PAIRS_AT_A_TIME", at_a_time)
    found = layer_patterns(random_model, TOKENS, 1, **options)
    for head in range(4):
        alone = head_pattern(random_model, TOKENS, 1, head, **({"max_cells": 100} | options))
        np.testing.assert_allclose(found.cells[head], alone.cells, rtol=1e-5, atol=1e-6)
        assert found["entropy"][head] == pytest.approx(np.nanmean(alone["entropy"]), abs=1e-6)
        assert found["max_weight"][head] == pytest.approx(np.nanmean(alone["max_weight"]), abs=1e-6)
        assert found["first_weight"][head] == pytest.approx(alone["first_weight"].mean(), abs=1e-6)
    assert found.settings["block"] == alone.settings["block"] and found.settings["keys"] == alone.settings["keys"]
    most = int(found["first_weight"].argmax())
    assert f"most in H{most} ({found['first_weight'][most]:.1%})" in found.summary()


def test_it_is_saved_and_told_where_it_stands(random_model: HookedTransformer, tmp_path: Path) -> None:
    told: list[float] = []
    found = layer_patterns(random_model, TOKENS, 0, progress=lambda share, text: told.append(share))
    found.save(tmp_path / "layer")
    loaded = load_result(tmp_path / "layer")
    assert isinstance(loaded, LayerPatterns) and loaded.summary() == found.summary() and told == [0.0]
    assert loaded.figure(chosen=1).to_json() == found.figure(chosen=1).to_json()
    assert list(found.to_frame()["head"]) == ["L0H0", "L0H1", "L0H2", "L0H3"]
    with pytest.raises(ValueError, match="there is no head 4 among 4"):
        found.figure(chosen=4)
    with pytest.raises(ValueError, match="layer must be between 0 and 2"):
        layer_patterns(random_model, TOKENS, 3)


@pytest.mark.parametrize("n_heads", [1, 9, 12, 40, 64])
@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_panels_stand_apart_under_their_names_and_have_a_pixel_for_every_cell(n_heads: int, scale: str) -> None:
    size = cells_of_a_panel(n_heads)
    cells = np.random.default_rng(0).uniform(size=(n_heads, size, size))
    cells[:, np.triu_indices(size, 1)[0], np.triu_indices(size, 1)[1]] = np.nan
    edges = [3 * place for place in range(size + 1)]
    figure = figures.layer_mosaic(cells, edges=(edges, edges), label="weight", chosen=n_heads - 1, scale=scale)
    (heatmap,) = figure.data
    assert heatmap.z.shape[0] <= HEIGHT - AROUND and heatmap.z.shape[1] <= 480
    panels = [shape for shape in figure.layout.shapes if shape.layer == "below"]
    assert len(panels) == n_heads
    taken = np.zeros(heatmap.z.shape, dtype=int)
    for head, panel in enumerate(panels):
        place = slice(round(panel.y0 + 0.5), round(panel.y1 + 0.5)), slice(round(panel.x0 + 0.5), round(panel.x1 + 0.5))
        taken[place] += 1
        shown = np.square(heatmap.z[place]) if scale == "sqrt" else heatmap.z[place]
        np.testing.assert_allclose(shown, cells[head], atol=1e-6)
        about = heatmap.customdata[place]
        assert (about[..., 0] == head).all() and (about[..., 1] == np.array(edges[:-1])[:, None]).all()
        assert (about[..., 2] == edges[:-1]).all()
    assert taken.max() == 1 and np.isnan(heatmap.z[taken == 0]).all()
    names = [note.text for note in figure.layout.annotations]
    assert names == [f"H{head}" for head in range(n_heads)]
    table = figures.numbers_of(figure)
    assert list(table) == ["head", "query", "key", "weight"] and len(table) == cells.size
    by_place = table.sort_values(["head", "query", "key"])["weight"].to_numpy()
    np.testing.assert_allclose(by_place, cells.reshape(-1), atol=1e-6)


def test_a_frame_hides_none_of_the_cells_of_the_head_it_is_around() -> None:
    edges = list(range(101))
    figure = figures.layer_mosaic(np.zeros((9, 100, 100)), edges=(edges, edges), label="weight", chosen=4)
    (frame,) = (shape for shape in figure.layout.shapes if shape.layer != "below")
    panel = figure.layout.shapes[4]
    assert frame.x0 < panel.x0 and frame.x1 > panel.x1 and frame.y0 < panel.y0 and frame.y1 > panel.y1
