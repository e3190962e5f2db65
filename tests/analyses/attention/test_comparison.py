"""Two results side by side: what is subtracted, what is refused, and that both share one scale."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import (
    HeadStatistics,
    compare_heads,
    compare_patterns,
    head_pattern,
    head_statistics,
    load_result,
)
from workbench.analyses.figures import numbers_of
from workbench.analyses.result import Provenance, Quantity

ABOUT = {"unit": "share of 1", "definition": "weight on the token before"}


def scores(model: str = "one", inputs: str = "“a b”", **arrays: Any) -> HeadStatistics:
    """A result with such numbers per head."""
    provenance = Provenance(
        model_name=model, revision=None, weights="float32", inputs=inputs, inputs_sha256="0", n_sequences=1,
        n_tokens=5, bos="starting with BOS", versions={},
    )  # fmt: skip
    quantities = {name: Quantity(np.array(values), ("layer", "head"), **ABOUT) for name, values in arrays.items()}
    return HeadStatistics(quantities=quantities, provenance=provenance, settings={"sink_keys": 4})


A = scores(previous_token=[[0.1, 0.9], [0.5, np.nan]], entropy=[[1.0, 2.0], [3.0, 4.0]])
B = scores("two", previous_token=[[0.3, 0.2], [0.5, 0.4]], entropy=[[np.nan] * 2] * 2)


def model(seed: int, **sizes: int) -> HookedTransformer:
    torch.manual_seed(seed)
    cfg = {"n_layers": 2, "n_heads": 3, "d_model": 12, "d_head": 4, "d_mlp": 8, "d_vocab": 20, "n_ctx": 64} | sizes
    return HookedTransformer(TransformerConfig(**cfg, model_name=f"random {seed}")).eval()


def test_changes_are_b_minus_a_and_the_largest_are_named_first() -> None:
    found = compare_heads(A, B)
    np.testing.assert_allclose(found["previous_token_change"], [[0.2, -0.7], [0.0, np.nan]])
    assert found.most_changed("previous_token") == [(0, 1), (0, 0), (1, 0)]
    assert found.scores == ["previous_token"] and found.settings["scores"] == ["previous_token", "entropy"]
    # Ranks of the three heads that both have: A 1, 3, 2; B 2, 1, 3. ρ = 1 − 6 · (1 + 4 + 1) / (3 · 8) = −0.5.
    assert found.rank_correlation("previous_token") == pytest.approx(-0.5)
    assert "most changed L0H1 -0.700, L0H0 +0.200" in found.summary()
    assert "Without a value in one of the two: entropy." in found.summary()


def test_figures_name_the_sides_and_share_one_range() -> None:
    found = compare_heads(A, B)
    maps = found.figure("maps", chosen=(0, 1), other=(1, 0))
    first, second = maps.data
    assert (first.zmin, first.zmax) == (second.zmin, second.zmax) == (0.0, 1.0)
    assert [title.text for title in maps.layout.annotations[:2]] == ["A: one", "B: two"]
    assert [(shape.x0, shape.y0) for shape in maps.layout.shapes[1::2]] == [(0.5, -0.5), (-0.5, 0.5)]
    change = found.figure("change").data[0]
    assert change.zmin == -change.zmax == pytest.approx(-0.7)
    points = found.figure("scatter", n_labels=1).data[1]
    assert list(points.text) == ["", "L0H1", ""] and list(points.x) == [0.1, 0.9, 0.5]
    table = numbers_of(maps)
    assert list(table["series"].unique()) == ["A: one", "B: two"] and len(table) == 8


def test_titles_of_two_panels_stay_apart_in_a_narrow_window() -> None:
    long = scores("a model with a name as long as a folder's path", previous_token=[[0.1]])
    titles = compare_heads(long, dataclasses.replace(B)).figure("maps").layout.annotations[:2]
    letter = 6.2  # pixels, at the titles' size; at 900 pixels of window the panels are 210 apart
    assert all(len(title.text) * letter < 210 for title in titles)
    assert titles[0].text.endswith("…")


def test_models_of_other_sizes_have_maps_and_no_change(tmp_path: Path) -> None:
    wide = scores("wide", previous_token=[[0.1, 0.2, 0.3]])
    found = compare_heads(A, wide)
    assert not found.same_shape and found.figure_kinds == ("maps",)
    assert [trace.z.shape for trace in found.figure().data] == [(2, 2), (1, 3)]
    with pytest.raises(ValueError, match="2 layers of 2 heads, B 1 layers of 3 heads"):
        found.most_changed("previous_token")
    kept = load_result(found.save(tmp_path / "compared"))
    np.testing.assert_array_equal(kept["previous_token_b"], wide["previous_token"])
    assert kept.tables()["b"]["previous_token_b"].tolist() == [0.1, 0.2, 0.3]


def test_what_differs_names_the_sides() -> None:
    other_text = scores(inputs="“b a”", previous_token=[[0.3, 0.2], [0.5, 0.4]])
    assert dict(compare_heads(A, other_text).settings["panels"]) == {"a": "“a b”", "b": "“b a”"}
    assert dict(compare_heads(A, A).settings["panels"]) == {"a": "", "b": ""}
    assert compare_heads(A, A).figure().layout.annotations[0].text == "A"


def test_what_cannot_be_compared_is_refused() -> None:
    other = dataclasses.replace(
        B, quantities={"previous_token": dataclasses.replace(B.quantities["previous_token"], definition="else")}
    )
    tokens = torch.arange(8)
    one = head_pattern(model(0), tokens, 0, 0)
    for a, b, message in (
        (A, other, "previous_token is “weight on the token before” in A and “else” in B"),
        (A, "B", "b must be a result of an analysis, got str"),
        (A, one, "a is a head_statistics, b a head_pattern"),
        (one, one, "a head pattern has no number per head"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_heads(a, b)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="A has pooling = 'max', B 'mean'"):
        compare_patterns(one, head_pattern(model(0), tokens, 0, 0, pooling="mean"))
    with pytest.raises(ValueError, match="B has no value of entropy"):
        compare_heads(A, B).figure(score="entropy")
    with pytest.raises(ValueError, match="chosen must be a head among 2 layers of 2 heads, got L2H0"):
        compare_heads(A, B).figure("maps", chosen=(2, 0))


def test_real_heads_and_patterns_of_two_models(tmp_path: Path) -> None:
    one, other = model(1), model(2, n_layers=1, n_heads=2, d_head=6)
    tokens, longer = torch.arange(10) % 4, torch.arange(30) % 7
    a, b = head_statistics(one, tokens), head_statistics(other, longer)
    heads = compare_heads(a, b)
    np.testing.assert_array_equal(heads["entropy_a"], a["entropy"])
    np.testing.assert_array_equal(heads["entropy_b"], b["entropy"])
    assert heads.provenance.model_name == "A: random 1; B: random 2" and heads.provenance.n_tokens == 40
    first, second = head_pattern(one, tokens, 1, 2, max_cells=10), head_pattern(other, longer, 0, 1, max_cells=10)
    patterns = compare_patterns(first, second)
    np.testing.assert_array_equal(patterns["cells_b"], second["weight"])
    figure = patterns.figure(scale="sqrt")
    left, right = figure.data
    assert (left.zmax, right.zmax) == (1.0, 1.0)
    np.testing.assert_allclose(left.z, np.sqrt(first["weight"]))
    assert right.x[0] == "0–2" and left.x[1].endswith(" 1")  # three tokens a cell, and one
    assert "max over blocks of 3 queries × 3 keys" in patterns.summary()
    kept = load_result(patterns.save(tmp_path / "patterns"))
    assert kept.figure().data[1].z.shape == (10, 10)
