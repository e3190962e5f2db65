"""The head zoo on heads that are made by hand, against patterns and outputs taken apart, and on random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import HeadZoo, head_statistics, head_zoo, load_result, repeated_random_tokens
from workbench.analyses.attention.windows import window_masses
from workbench.analyses.attention.zoo import KINDS
from workbench.analyses.running import Sequences, silent
from workbench.config import RopeScaling

N = 40


def drawn(n: int, vocabulary: int = 60, length: int = N) -> torch.Tensor:
    return torch.randint(0, vocabulary, (n, length), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def found(hand_built_model: Callable[..., HookedTransformer]) -> HeadZoo:
    return head_zoo(hand_built_model(20, induction_heads=2), drawn(3), length=12, n_sequences=3)


def test_heads_are_called_what_they_were_made_for(found: HeadZoo) -> None:
    assert found["kind"].tolist() == [
        ["previous token", "resting", "none", "none"],  # the others spread their weight evenly,
        ["induction", "induction", "none", "none"],  # or go 19 back
    ]
    assert found.of_kind("induction") == [(1, 0), (1, 1)]
    assert found["previous_token"][0, 0] == found["prefix_matching_repeated"][1, 0] == pytest.approx(1)
    with pytest.raises(ValueError, match="kind must be one of"):
        found.of_kind("broad")


def test_how_far_back_hand_built_heads_read(found: HeadZoo) -> None:
    assert found.coordinates["window"] == [1, 2, 4, 8, 16]
    rows = np.arange(15, N)  # the queries that have 16 tokens
    within, beside = found["mass_within"], found["mass_within_or_first"]
    np.testing.assert_allclose(within[0, 0], [0, 1, 1, 1, 1], atol=1e-9)
    np.testing.assert_allclose(within[0, 1], [0, 0, 0, 0, 1 / len(rows)], atol=1e-9)  # the 16th reads itself back to 0
    np.testing.assert_allclose(beside[0, 1], 1.0)
    even = [np.mean(w / (rows + 1)) for w in (1, 2, 4, 8, 16)]
    np.testing.assert_allclose(within[0, 2], even, atol=1e-9)
    more = [np.mean((w + (rows >= w)) / (rows + 1)) for w in (1, 2, 4, 8, 16)]
    np.testing.assert_allclose(beside[0, 2], more, atol=1e-9)
    np.testing.assert_allclose(found["effective_context"][0], [2, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(found["effective_context_or_first"][0], [2, 1, np.nan, np.nan])


def test_what_hand_built_heads_write(found: HeadZoo) -> None:
    outputs = found["output_correlation"]
    names = found.coordinates["head a"]
    assert outputs[names.index("L1H0"), names.index("L1H1")] == pytest.approx(1)  # both copy the same token
    assert np.isnan(outputs[names.index("L0H1")]).all() and np.isnan(found["output_rank"][0, 1])  # writes nothing
    alike = [pair[:2] for pair in found.most_alike(4) if pair[2] == pytest.approx(1)]
    assert alike == [("L0H2", "L0H3"), ("L1H0", "L1H1")]  # the even heads of a layer write the same noise
    # L0H0 writes the previous token's slot: as many directions of equal length as there are tokens, weighed by how
    # often each comes; the mean takes one away.
    tokens = drawn(3)[:, :-1].flatten()
    share = torch.bincount(tokens, minlength=60).double() / len(tokens)
    values = torch.linalg.eigvalsh(torch.diag(share) - torch.outer(share, share))
    assert found["output_rank"][0, 0] == pytest.approx(float(values.sum() ** 2 / values.square().sum()))


def test_scores_are_those_of_the_two_inputs(random_model: HookedTransformer) -> None:
    tokens = drawn(2, 50)
    found = head_zoo(random_model, tokens, length=10, n_sequences=2, seed=3)
    text = head_statistics(random_model, tokens, sink_keys=1)
    repeated = repeated_random_tokens(random_model, length=10, n_sequences=2, spacing="random gaps", seed=3)
    again = head_statistics(random_model, repeated)
    for name in text.score_names:
        np.testing.assert_array_equal(found[name], text[name])
    for name in ("prefix_matching", "duplicate_token", "previous_token"):
        np.testing.assert_array_equal(found[f"{name}_repeated"], again[name])


@pytest.mark.parametrize("scaling", [None, RopeScaling(type="dynamic", factor=4.0, original_context=16)])
def test_outputs_are_those_of_a_naive_loop(random_model: HookedTransformer, scaling: RopeScaling | None) -> None:
    tokens, mask = drawn(3, 50), torch.ones(3, N, dtype=torch.int64)
    mask[1, :9] = 0  # pads on the left
    if scaling is not None:  # how a sequence is read then depends on its length, not on that of others beside it
        weights, random_model = (
            random_model.state_dict(),
            HookedTransformer(replace(random_model.cfg, rope_scaling=scaling)),
        )
        random_model.eval().load_state_dict(weights)
    found = head_zoo(random_model, tokens, attention_mask=mask, length=10, n_sequences=2)
    written = []
    for row, real in zip(tokens, mask.bool(), strict=True):
        _, cache = random_model.run_with_cache(row[real])
        z = torch.stack([cache[f"blocks.{layer}.attn.hook_z"][0, 1:] for layer in range(3)]).double()
        written.append(torch.einsum("lthe,lhed->lhtd", z, random_model.W_O.double()).flatten(0, 1))
    outputs = torch.cat(written, dim=1)
    outputs = (outputs - outputs.mean(dim=1, keepdim=True)).detach()
    for a in range(12):
        values = torch.linalg.svdvals(outputs[a]) ** 2
        assert found["output_rank"].flat[a] == pytest.approx(float(values.sum() ** 2 / values.square().sum()), rel=1e-5)
        for b in range(12):
            expected = (outputs[a] * outputs[b]).sum() / outputs[a].norm() / outputs[b].norm()
            assert found["output_correlation"][a, b] == pytest.approx(float(expected), abs=1e-6)


MODELS = {
    "windows and learned sinks": {"attn_types": ("local", "global"), "window_size": 6, "use_sink_logits": True},
    "ALiBi": {"positional_embedding_type": "alibi"},
    "rotary, soft cap, norms of q and k": {
        "positional_embedding_type": "rotary", "attn_scores_soft_cap": 2.0, "qk_norm": "per_head",
    },
    "an encoder": {"attention_dir": "bidirectional"},
}  # fmt: skip


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_windows_are_sums_of_the_pattern(options: dict) -> None:
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=2, d_model=24, n_heads=4, d_head=6, d_mlp=16, d_vocab=30, n_ctx=64, initializer_range=0.5,
        init_mode="normal", **options,
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    if cfg.use_sink_logits:
        for block in model.blocks:
            torch.nn.init.normal_(block.attn.sink_logits)
    tokens, mask, windows = drawn(3, 30, 24), torch.ones(3, 24, dtype=torch.int64), [1, 2, 5, 8]
    mask[2, 20:] = 0
    sequences = Sequences.read(model, tokens, mask)
    within, beside = window_masses(model, sequences, windows, silent)
    sums, n_rows = np.zeros((2, 2, 4, 4)), 0
    for row, real in zip(tokens, mask.bool(), strict=True):
        _, cache = model.run_with_cache(row[real])
        n = int(real.sum())
        n_rows += n - 7
        for layer in range(2):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
            for query in range(7, n):
                for place, window in enumerate(windows):
                    end = query + window if cfg.attention_dir == "bidirectional" else query + 1
                    keys = set(range(query - window + 1, min(end, n)))
                    sums[0, layer, :, place] += pattern[:, query, sorted(keys)].sum(axis=1)
                    sums[1, layer, :, place] += pattern[:, query, sorted(keys | {0})].sum(axis=1)
    np.testing.assert_allclose(within, sums[0] / n_rows, atol=1e-9)
    np.testing.assert_allclose(beside, sums[1] / n_rows, atol=1e-9)


@pytest.mark.parametrize(
    ("direction", "words"), [("causal", "the last W tokens,"), ("bidirectional", "W away on either side,")]
)
def test_windows_say_which_side_they_are_on(direction: Any, words: str) -> None:
    cfg = TransformerConfig(
        n_layers=1, d_model=8, n_heads=2, d_head=4, d_mlp=8, d_vocab=60, n_ctx=64, attention_dir=direction
    )
    found = head_zoo(HookedTransformer(cfg).eval(), drawn(1), length=10, n_sequences=2)
    assert words in found.quantities["mass_within"].definition


@pytest.mark.parametrize(("scale", "positions"), [(0.02, "learned"), (0.3, "rotary")])
def test_random_weights_are_called_nothing(scale: float, positions: str) -> None:
    torch.manual_seed(5)
    cfg = TransformerConfig(
        n_layers=3, d_model=48, n_heads=8, d_head=12, d_mlp=64, d_vocab=200, n_ctx=128,
        positional_embedding_type=positions, initializer_range=scale, init_mode="normal",
    )  # fmt: skip
    found = head_zoo(HookedTransformer(cfg).eval(), drawn(4, 200, 48), n_sequences=3)
    assert set(found["kind"].ravel()) == {"none"}


def test_short_texts_are_refused(random_model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="15 tokens, too few"):
        head_zoo(random_model, torch.arange(15))


def test_it_is_saved_tabulated_and_drawn(found: HeadZoo, tmp_path: Path) -> None:
    again = load_result(found.save(tmp_path / "zoo"))
    assert isinstance(again, HeadZoo) and again.summary() == found.summary()
    assert "induction: 2 (L1H0, L1H1); prefix matching of 0.3 or more" in found.summary()
    n = int(np.isfinite(found["effective_context"]).sum())  # the others hold too little within any W
    (line,) = [line for line in found.summary().splitlines() if line.startswith("effective_context ")]
    assert 0 < n < 8 and line.endswith(f"of the {n} that have one")
    tables = again.tables()
    assert list(tables) == ["", "windows", "outputs"] and len(tables[""]) == 8 and len(tables["windows"]) == 40
    assert {"kind", "output_rank", "effective_context", "prefix_matching_repeated"} <= set(tables[""].columns)
    for theme in ("light", "dark"):
        kinds = again.figure("kinds", captioned=True, theme=theme).data
        assert [trace.name for trace in kinds] == list(KINDS) and [len(trace.x) for trace in kinds] == [
            2,
            1,
            0,
            1,
            0,
            4,
        ]
        for score in again.score_names:
            again.figure("map", score=score, theme=theme)
        assert again.figure("outputs", captioned=True, theme=theme).data[0].zmin == -1
    with pytest.raises(ValueError, match="score must be one of"):
        again.figure("map", score="kind")
