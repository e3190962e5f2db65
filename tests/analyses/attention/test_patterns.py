from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import head_pattern

LAYER, HEAD, N = 1, 3, 37


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (N,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def whole(random_model: HookedTransformer, tokens: torch.Tensor) -> np.ndarray:
    """The head's materialised pattern, float64 [n, n]."""
    name = f"blocks.{LAYER}.attn.hook_pattern"
    return random_model.run_with_cache(tokens, names_filter=name)[1][name][0, HEAD].double().numpy()


def spans(n: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda span: span[0] < span[1])


@settings(deadline=None, max_examples=40)
@given(queries=spans(N), keys=spans(N), max_cells=st.integers(1, 40), pooling=st.sampled_from(["max", "mean"]))
def test_every_cell_is_what_its_block_holds(
    random_model: HookedTransformer, tokens: torch.Tensor, whole: np.ndarray, queries, keys, max_cells, pooling
) -> None:
    found = head_pattern(
        random_model, tokens, LAYER, HEAD, queries=queries, keys=keys, max_cells=max_cells, pooling=pooling
    )
    rows, columns = found.settings["block"]
    first_key, end_key = found.settings["keys"]
    assert first_key <= keys[0] and keys[1] <= end_key <= N
    weight = found["weight"]
    assert max(weight.shape) <= max_cells
    if max_cells >= max(queries[1] - queries[0], keys[1] - keys[0]):
        assert found.is_exact and (first_key, end_key) == keys
    visible = np.tril(np.ones((N, N), dtype=bool))
    for r, row in enumerate(range(queries[0], queries[1], rows)):
        for c, column in enumerate(range(first_key, end_key, columns)):
            block = slice(row, min(row + rows, queries[1])), slice(column, min(column + columns, end_key))
            pairs = whole[block][visible[block]]
            if not pairs.size:
                assert np.isnan(weight[r, c])
            else:
                assert weight[r, c] == pytest.approx(pairs.max() if pooling == "max" else pairs.mean(), abs=1e-6)
    assert weight.shape == (r + 1, c + 1)
    shown = whole[slice(*queries)]
    np.testing.assert_allclose(found["received"], shown[:, first_key:end_key].sum(axis=0), atol=1e-5)
    np.testing.assert_allclose(found["max_weight"], shown.max(axis=1), atol=1e-6)
    entropy = [-sum(p * np.log(p) for p in row if p > 0) for row in shown]
    np.testing.assert_allclose(found["entropy"], entropy, atol=1e-5)
    assert len(found.coordinates["query"]) == queries[1] - queries[0]
    assert len(found.coordinates["key"]) == end_key - first_key
    assert f"L{LAYER}H{HEAD}" in found.summary()


def test_pads_are_left_out(random_model: HookedTransformer, tokens: torch.Tensor, whole: np.ndarray) -> None:
    padded = torch.cat((torch.full((5,), 3), tokens))[None]
    mask = torch.cat((torch.zeros(5), torch.ones(N)))[None]
    found = head_pattern(random_model, padded, LAYER, HEAD, attention_mask=mask)
    np.testing.assert_allclose(np.nan_to_num(found["weight"]), whole, atol=1e-6)


def test_learned_positions_have_patterns_too() -> None:
    cfg = TransformerConfig(n_layers=1, d_model=16, n_heads=2, d_head=8, d_mlp=16, d_vocab=20, n_ctx=32, attn_scale=2.0)
    model = HookedTransformer(cfg).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)
    tokens = torch.randint(0, 20, (20,), generator=torch.Generator().manual_seed(0))
    found = head_pattern(model, tokens, 0, 1)
    pattern = model.run_with_cache(tokens)[1]["blocks.0.attn.hook_pattern"][0, 1].detach().numpy()
    np.testing.assert_allclose(np.nan_to_num(found["weight"]), pattern, atol=1e-6)
    assert pattern[1:, 1:].max() > 0.5  # sharp enough for a wrong scale to show


def test_a_thin_stripe_survives_pooling(
    random_model: HookedTransformer, tokens: torch.Tensor, whole: np.ndarray
) -> None:
    found = head_pattern(random_model, tokens, LAYER, HEAD, max_cells=5)
    assert np.nanmax(found["weight"]) == pytest.approx(whole.max(), abs=1e-6)


@pytest.mark.parametrize(
    ("queries", "keys", "most", "about"),
    [
        ((0, N), (0, N), (0, N), "Most attended:"),
        ((5, 20), (0, 20), (0, 20), "Most attended:"),  # the keys not shown are hidden from these queries
        ((5, 20), (3, 9), (3, 9), "Most attended of the keys shown:"),
        ((5, 20), (0, 19), (0, 19), "Most attended of the keys shown:"),
        ((5, 20), (15, 30), (15, 20), "Most attended of the keys shown:"),
    ],
)
def test_the_most_attended_key_is_one_of_those_shown(
    random_model: HookedTransformer, tokens: torch.Tensor, whole: np.ndarray, queries, keys, most, about
) -> None:
    found = head_pattern(random_model, tokens, LAYER, HEAD, queries=queries, keys=keys)
    means = whole[slice(*queries), slice(*most)].mean(axis=0)
    expected = f"{about} '#{tokens[most[0] + means.argmax()]}' at {most[0] + means.argmax()}, with {means.max():.1%} of"
    assert expected in found.summary()
    assert ("over all keys" in found.summary()) == ("of the keys shown" in about)


def test_nothing_is_most_attended_where_no_key_is_visible(
    random_model: HookedTransformer, tokens: torch.Tensor
) -> None:
    found = head_pattern(random_model, tokens, LAYER, HEAD, queries=(5, 20), keys=(20, 30))
    assert found.summary().endswith("These queries give no weight to the keys shown, which the mask hides from them.")


def test_bars_of_blocks_are_told_from_bars_of_tokens(random_model: HookedTransformer, tokens: torch.Tensor) -> None:
    def told(max_cells: int, **ranges: Any) -> tuple[str, list[str]]:
        drawing = head_pattern(random_model, tokens, LAYER, HEAD, max_cells=max_cells, **ranges)._draw_pattern()
        return drawing.note, [trace.hovertemplate for trace in drawing.figure.data]

    note, hovers = told(N)
    assert note.endswith("Bars: the sum of the weights on each key, and the entropy of each query.")
    assert [hover.split(" %")[0] for hover in hovers] == ["key", "query", "query"] and "<br>key %" in hovers[2]
    note, hovers = told(10)
    assert note.endswith("the weights on all keys of a block, and the mean entropy of the queries of a block.")
    assert [hover.split(" %")[0] for hover in hovers] == ["keys", "queries", "queries"] and "<br>keys %" in hovers[2]
    note, hovers = told(10, queries=(20, 30))  # one query a cell, but four keys
    assert note.endswith("the weights on all keys of a block, and the entropy of each query.")
    assert [hover.split(" %")[0] for hover in hovers] == ["keys", "query", "query"] and "<br>keys %" in hovers[2]


LONG = """
import resource, torch
from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import head_pattern
n = 12_000
cfg = TransformerConfig(
    n_layers=1, d_model=8, n_heads=1, d_head=8, d_mlp=8, d_vocab=20, n_ctx=n, positional_embedding_type="rotary"
)
model, tokens = HookedTransformer(cfg).eval(), torch.randint(0, 20, (n,))
head_pattern(model, tokens[:500], 0, 0, max_cells=100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = head_pattern(model, tokens, 0, 0, max_cells=100)
assert found["weight"].shape == (100, 100)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_a_long_text_needs_no_square_matrix(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, cwd=tmp_path, check=True)
    square = 4 * 12_000**2 // 2**20  # MiB of one n × n matrix in float32
    assert int(done.stdout) < square / 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 3}, "layer must be between 0 and 2"),
        ({"head": -1}, "head must be between 0 and 3"),
        ({"queries": (5, 5)}, "queries must be a range"),
        ({"keys": (0, N + 1)}, "keys must be a range"),
        ({"max_cells": 0}, "max_cells"),
        ({"pooling": "median"}, "pooling"),
        ({"tokens": torch.zeros((2, 4), dtype=torch.int64)}, "one sequence, got 2"),
    ],
)
def test_bad_arguments_are_refused(
    random_model: HookedTransformer, tokens: torch.Tensor, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        head_pattern(random_model, **({"tokens": tokens, "layer": 0, "head": 0} | arguments))
    with pytest.raises(ValueError, match="scale must be"):
        head_pattern(random_model, tokens, 0, 0).figure(scale="log")


@pytest.mark.parametrize("max_cells", [64, 5])
def test_active_hooks_on_scores_and_weights_show_in_the_pattern(
    random_model: HookedTransformer, max_cells: int
) -> None:
    tokens = torch.arange(1, 21)

    def cut(scores: torch.Tensor, hook: object) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 1, 3:, 2] = -torch.inf
        return scores

    with torch.no_grad(), random_model.hooks(fwd_hooks=[("blocks.1.attn.hook_attn_scores", cut)]):
        found = head_pattern(random_model, tokens, 1, 1, queries=(4, 19), max_cells=max_cells)
        _, cache = random_model.run_with_cache(tokens[None], names_filter=["blocks.1.attn.hook_pattern"])
    expected = cache["blocks.1.attn.hook_pattern"][0, 1, 4:19].double().numpy()
    assert not expected[:, 2].any()
    np.testing.assert_allclose(found["max_weight"], expected.max(axis=1), atol=1e-6)
    np.testing.assert_allclose(found["received"], expected.sum(axis=0)[: len(found["received"])], atol=1e-5)
    if found.is_exact:
        visible = np.arange(20) <= np.arange(4, 19)[:, None]
        first, end = found.settings["keys"]
        np.testing.assert_allclose(found["weight"], np.where(visible, expected, np.nan)[:, first:end], atol=1e-6)
    plain = head_pattern(random_model, tokens, 1, 1, queries=(4, 19), max_cells=max_cells)
    assert np.abs(plain["max_weight"] - found["max_weight"]).max() > 1e-3
