from __future__ import annotations

import copy
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
from workbench.analyses import figures, head_pattern
from workbench.analyses.attention import cells
from workbench.analyses.attention.cells import ScoreMemory

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


@pytest.fixture(scope="module")
def exact(random_model: HookedTransformer, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The head's pattern [n, n] and ‖v_j W_O‖ [n], in float64 throughout."""
    model = copy.deepcopy(random_model).double()
    names = [f"blocks.{LAYER}.attn.{point}" for point in ("hook_pattern", "hook_v")]
    cache = model.run_with_cache(tokens, names_filter=names)[1]
    written = cache[names[1]][0, :, HEAD // 2] @ model.blocks[LAYER].attn.W_O[HEAD]  # two heads share their values
    return cache[names[0]][0, HEAD].detach().numpy(), written.norm(dim=1).detach().numpy()


def without_first(pattern: np.ndarray) -> np.ndarray:
    """Weights over the keys but the first, scaled to sum to 1; the first query has none."""
    rest = pattern.copy()
    rest[:, 0] = 0
    return rest / np.maximum(rest.sum(axis=1, keepdims=True), 1e-300)


@settings(deadline=None, max_examples=40)
@given(
    queries=spans(N), keys=spans(N), max_cells=st.integers(1, 40), pooling=st.sampled_from(["max", "mean"]),
    left_out=st.booleans(), weighted=st.booleans(),
)  # fmt: skip
def test_token_0_left_out_and_values_count_in_every_cell(
    random_model: HookedTransformer, tokens: torch.Tensor, exact: tuple[np.ndarray, np.ndarray],
    queries, keys, max_cells, pooling, left_out, weighted,
) -> None:  # fmt: skip
    found = head_pattern(
        random_model, tokens, LAYER, HEAD, queries=queries, keys=keys, max_cells=max_cells, pooling=pooling,
        without_first=left_out, value_weighted=weighted,
    )  # fmt: skip
    pattern, visible = exact[0], np.tril(np.ones((N, N), dtype=bool))
    weights = without_first(pattern) if left_out else pattern
    if left_out:
        visible[:, 0] = False
    drawn = weights * exact[1] if weighted else weights
    for r, rows in enumerate(zip(found.edges("query")[:-1], found.edges("query")[1:], strict=True)):
        for c, columns in enumerate(zip(found.edges("key")[:-1], found.edges("key")[1:], strict=True)):
            pairs = drawn[slice(*rows), slice(*columns)][visible[slice(*rows), slice(*columns)]]
            expected = np.nan if not pairs.size else pairs.max() if pooling == "max" else pairs.mean()
            assert found.cells[r, c] == pytest.approx(expected, abs=2e-5, nan_ok=True)
    assert ("weight" in found) != weighted and ("value_weighted" in found) == weighted
    shown = weights[slice(*queries)]
    counted = slice(1 if left_out and queries[0] == 0 else 0, None)
    entropy = np.array([-sum(p * np.log(p) for p in row if p > 0) for row in shown])
    np.testing.assert_allclose(found["entropy"][counted], entropy[counted], atol=1e-5)
    np.testing.assert_allclose(found["max_weight"][counted], shown.max(axis=1)[counted], atol=1e-5)
    assert np.isnan(found["entropy"]).sum() == (left_out and queries[0] == 0)
    np.testing.assert_allclose(found["received"], shown[:, slice(*found.settings["keys"])].sum(axis=0), atol=1e-4)
    np.testing.assert_allclose(found["first_weight"], pattern[slice(*queries), 0], atol=1e-5)
    share = f"Token 0 gets {pattern[slice(*queries), 0].mean():.1%} of the attention of these queries"
    assert share in found.summary() and ("left out" in found.summary()) == left_out
    assert "nan" not in found.summary()


def test_one_token_has_nothing_left_without_token_0(random_model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="without_first leaves nothing of a text of one token"):
        head_pattern(random_model, torch.tensor([3]), LAYER, HEAD, without_first=True)


@pytest.mark.parametrize("max_cells", [64, 5])
def test_edited_patterns_have_token_0_left_out_and_values_too(random_model: HookedTransformer, max_cells: int) -> None:
    tokens, name = torch.arange(1, 21), "blocks.1.attn.hook_pattern"
    options = {"max_cells": max_cells, "without_first": True, "value_weighted": True}
    plain = head_pattern(random_model, tokens, 1, 1, **options)
    with random_model.hooks(fwd_hooks=[(name, lambda pattern, hook: pattern.clone())]):
        edited = head_pattern(random_model, tokens, 1, 1, **options)
    np.testing.assert_allclose(edited.cells, plain.cells, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(edited["entropy"], plain["entropy"], atol=1e-5)


def test_a_remembered_layer_is_not_run_again_and_gives_the_same(
    random_model: HookedTransformer, tokens: torch.Tensor
) -> None:
    runs: list[int] = []

    def count(value: torch.Tensor, hook: Any) -> None:
        runs.append(hook.layer())

    memory = ScoreMemory()
    parts: list[dict[str, Any]] = [{}, {"queries": (5, 20), "keys": (2, 9), "value_weighted": True}, {"max_cells": 6}]
    with random_model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", count)]):
        for head in (HEAD, 0):
            for part in parts:
                remembered = head_pattern(random_model, tokens, LAYER, head, memory=memory, **part)
                assert len(runs) == 1
                fresh = head_pattern(random_model, tokens, LAYER, head, **part)
                runs.pop()
                np.testing.assert_array_equal(remembered.cells, fresh.cells)
        head_pattern(random_model, tokens, 2, HEAD, memory=memory)
        assert len(runs) == 1  # it starts where the layer before ended
        head_pattern(random_model, tokens[:-1], 2, HEAD, memory=memory)
        assert len(runs) == 2


@pytest.mark.parametrize("kept_bytes", [0, 2**27])
def test_layers_in_any_order_are_run_once_and_give_the_same(
    random_model: HookedTransformer, tokens: torch.Tensor, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under hooks that edit in place, which must not act twice."""
    monkeypatch.setattr(cells, "STREAM_BYTES", kept_bytes)
    points = [f"blocks.{layer}.{name}" for layer in range(3) for name in ("hook_resid_pre", "hook_resid_post")]
    seen: list[str] = []

    def shift(value: torch.Tensor, hook: Any) -> torch.Tensor:
        seen.append(hook.name)
        return value.add_(torch.linspace(-1, 2, value.shape[-1]))

    memory = ScoreMemory()
    with random_model.hooks(fwd_hooks=[(point, shift) for point in points]):
        for layer in (1, 0, 2, 1, 2):
            fresh = head_pattern(random_model, tokens, layer, HEAD)
            seen.clear()
            remembered = head_pattern(random_model, tokens, layer, HEAD, memory=memory)
            np.testing.assert_array_equal(remembered.cells, fresh.cells)
            assert len(seen) <= 3 or not kept_bytes  # of the layer that is asked for, and of one more


@pytest.fixture(scope="module")
def worded(random_model: HookedTransformer) -> HookedTransformer:
    """The random model with words: even ids begin one, odd ids continue it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"▁{i}" if i % 2 == 0 else f"{i}": i for i in range(50)}, unk_token="1"))
    model = copy.deepcopy(random_model)
    model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="1")
    return model


def test_words_are_sums_over_keys_and_means_over_queries(worded: HookedTransformer) -> None:
    tokens = torch.tensor([2, 4, 5, 7, 6, 8, 9, 3, 3, 10])
    starts = [0, 1, 4, 5, 9, 10]  # "▁2", "▁4 5 7", "▁6", "▁8 9 3 3", "▁10"
    pattern = worded.run_with_cache(tokens)[1]["blocks.1.attn.hook_pattern"][0, 2].double().numpy()
    found = head_pattern(worded, tokens, 1, 2, words=True)
    expected = [
        [pattern[a:b, c:d].sum(axis=1).mean() if c < b else np.nan for c, d in zip(starts, starts[1:], strict=False)]
        for a, b in zip(starts, starts[1:], strict=False)
    ]
    np.testing.assert_allclose(found["weight"], expected, atol=1e-6)
    np.testing.assert_allclose(np.nansum(found["weight"], axis=1), 1, atol=1e-5)
    assert found.edges("query") == found.edges("key") == starts and not found.is_exact
    assert found.texts("key") == ["▁2", "▁457", "▁6", "▁8933", "▁10"]
    assert list(found.figure().data[-1].x) == ["▁2 0", "▁457 1", "▁6 4", "▁8933 5", "▁10 9"]
    part = head_pattern(worded, tokens, 1, 2, words=True, queries=(6, 8), keys=(2, 5))
    assert part.edges("query") == [5, 9] and part.edges("key") == [1, 4, 5]  # whole words
    np.testing.assert_allclose(part["weight"], np.array(expected)[3:4, 1:3], atol=1e-6)


def test_words_that_do_not_fit_are_said_not_to(worded: HookedTransformer) -> None:
    tokens = torch.tensor([2, 4, 5, 7, 6, 8, 9, 3, 3, 10])
    found = head_pattern(worded, tokens, 1, 2, words=True, max_cells=5)
    assert not found.has_words and tuple(found.settings["block"]) == (2, 2)
    assert "Words are shown where every token has a cell: choose at most 5 queries and keys." in found.summary()
    np.testing.assert_array_equal(found["weight"], head_pattern(worded, tokens, 1, 2, max_cells=5)["weight"])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scale", ["linear", "sqrt"])
def test_the_first_column_apart_has_colours_of_its_own_and_the_same_numbers(
    random_model: HookedTransformer, tokens: torch.Tensor, weighted: bool, scale: str
) -> None:
    found = head_pattern(random_model, tokens, LAYER, HEAD, value_weighted=weighted)
    heatmap = found.figure(first_apart=True, scale=scale).data[-1]
    others, cells = np.nanmax(found.cells[:, 1:]), found.cells
    of_first = np.nanmax(cells[:, 0]) if weighted else 1.0
    colour = np.sqrt if scale == "sqrt" else np.asarray
    assert heatmap.zmax == pytest.approx(colour(others))
    np.testing.assert_allclose(heatmap.z[:, 1:], colour(cells[:, 1:]))
    np.testing.assert_allclose(heatmap.z[:, 0], colour(cells[:, 0] / of_first * others))
    assert f"first column apart: 0 to {of_first:.3g}" in heatmap.colorbar.title.text
    table = figures.numbers_of(found.figure(first_apart=True, scale=scale))
    np.testing.assert_allclose(table.iloc[:, 2], cells.reshape(-1))
    assert list(table)[2] == ("‖p v WO‖" if weighted else "weight")
    note = found.drawing(first_apart=True).note
    assert "Its column is coloured on a scale of its own." in note
    for part in ({"keys": (3, N)}, {"without_first": True}):  # where there is no such column
        plain = head_pattern(random_model, tokens, LAYER, HEAD, **part)
        assert "apart" not in plain.figure(first_apart=True).data[-1].colorbar.title.text


def test_bars_have_a_range_where_no_query_is_left_with_a_key(random_model: HookedTransformer) -> None:
    found = head_pattern(random_model, torch.tensor([3, 4, 5]), LAYER, HEAD, queries=(0, 1), without_first=True)
    assert np.isnan(found["entropy"]).all() and np.isnan(found.cells).all()
    layout = found.figure().layout  # NaN would be null in the browser
    assert all(np.isfinite(axis.range).all() for axis in (layout.xaxis4, layout.yaxis))


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
        ({"queries": 5}, "queries must be a range"),
        ({"queries": (0, 1, 2)}, "queries must be a range"),
        ({"queries": (0.5, 3)}, "queries must be a range"),
        ({"queries": ("a", 3)}, "queries must be a range"),
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
