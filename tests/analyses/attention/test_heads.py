from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer
from workbench.analyses import HeadStatistics, head_statistics
from workbench.analyses.attention.scores import SCORES
from workbench.analyses.labels import HEAD_SCORES


def naive_scores(pattern: np.ndarray, tokens: Sequence[int], sink_keys: int) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Score → (values of every row, rows that count) of one head's float64 pattern [n, n], by the definitions."""
    n = len(tokens)
    rows = range(n)
    followers = [[j for j in range(1, i) if tokens[j - 1] == tokens[i]] for i in rows]
    earlier = [[j for j in range(i) if tokens[j] == tokens[i]] for i in rows]

    def by_row(value: Callable[[int], float], counted: Callable[[int], bool] = lambda i: True) -> tuple:
        return np.array([value(i) for i in rows]), [i for i in rows if counted(i)]

    def entropy(i: int) -> float:
        return -sum(p * np.log(p) for p in pattern[i, : i + 1] if p > 0)

    return {
        "entropy": by_row(entropy),
        "relative_entropy": by_row(lambda i: entropy(i) / np.log(max(i + 1, 2)), lambda i: i > 0),
        "max_weight": by_row(lambda i: pattern[i].max()),
        "mean_distance": by_row(lambda i: sum(pattern[i, j] * (i - j) for j in range(i + 1))),
        "sink_mass": by_row(lambda i: pattern[i, :sink_keys].sum()),
        "self_weight": by_row(lambda i: pattern[i, i]),
        "previous_token": by_row(lambda i: pattern[i, i - 1], lambda i: i > 0),
        "prefix_matching": by_row(lambda i: pattern[i, followers[i]].sum(), lambda i: bool(followers[i])),
        "prefix_matching_latest": by_row(
            lambda i: pattern[i, max(followers[i], default=0)], lambda i: bool(followers[i])
        ),
        "duplicate_token": by_row(lambda i: pattern[i, earlier[i]].sum(), lambda i: bool(earlier[i])),
    }


def assert_scores_agree(
    found: HeadStatistics, patterns: list[np.ndarray], tokens: list[list[int]], tolerance: float
) -> None:
    """patterns: of every sequence, float64 [layer, head, n, n] without pads."""
    sink_keys = found.settings["sink_keys"]
    n_layers, n_heads = patterns[0].shape[:2]
    n_rows = sum(map(len, tokens))
    for layer in range(n_layers):
        for head in range(n_heads):
            of_head = [
                naive_scores(pattern[layer, head], row, sink_keys)
                for pattern, row in zip(patterns, tokens, strict=True)
            ]
            for name in of_head[0]:
                values = np.concatenate([scores[name][0][scores[name][1]] for scores in of_head])
                assert abs(found[name][layer, head] - values.mean()) <= tolerance * max(1, abs(values.mean())), name
                assert found.coverage[name] == pytest.approx(len(values) / n_rows)
            mass, pairs, concentration = 0.0, 0, []
            for pattern, row in zip(patterns, tokens, strict=True):
                p = pattern[layer, head]
                targets = [(i, j) for i in range(len(row)) for j in range(1, i) if row[j - 1] == row[i]]
                mass, pairs = mass + sum(p[pair] for pair in targets), pairs + len(targets)
                concentration.append(((p.sum(axis=0) / len(row)) ** 2).sum())
            assert abs(found["prefix_matching_per_entry"][layer, head] - mass / pairs) <= tolerance
            assert abs(found["key_concentration"][layer, head] - np.mean(concentration)) <= tolerance
    for key in range(max(map(len, tokens))):
        means = [
            pattern[..., key].sum(axis=2) / (len(row) - key)
            for pattern, row in zip(patterns, tokens, strict=True)
            if key < len(row)
        ]
        np.testing.assert_allclose(found["received"][..., key], np.mean(means, axis=0), atol=tolerance)


def patterns_of(model: HookedTransformer, tokens: list[list[int]]) -> list[np.ndarray]:
    """Materialised patterns of each sequence alone, float64 [layer, head, n, n]."""
    found = []
    for row in tokens:
        _, cache = model.run_with_cache(torch.tensor([row]), names_filter=lambda name: name.endswith("hook_pattern"))
        layers = [cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(model.cfg.n_layers)]
        found.append(torch.stack(layers).double().numpy())
    return found


def padded(tokens: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Filled up with a token that also occurs, so that a pad which counts would show."""
    width = max(map(len, tokens))
    rows, mask = [], []
    for row in tokens:
        pads = [row[0]] * (width - len(row))
        rows.append(pads + row if side == "left" else row + pads)
        mask.append([0] * len(pads) + [1] * len(row) if side == "left" else [1] * len(row) + [0] * len(pads))
    return torch.tensor(rows), torch.tensor(mask)


def test_every_score_has_a_name_for_people() -> None:
    assert set(HEAD_SCORES) == set(SCORES)


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_score_is_what_its_definition_gives(random_model: HookedTransformer, side: str) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 9, (n,), generator=generator).tolist() for n in (31, 18, 1, 24)]
    tokens[1][5:8] = [7, 7, 7]  # what follows "7 7" is the query itself, which is no target
    rows, mask = padded(tokens, side)
    found = head_statistics(random_model, rows, attention_mask=mask, sink_keys=3)
    assert_scores_agree(found, patterns_of(random_model, tokens), tokens, 2e-6)
    assert set(SCORES) - {"virtual_sink_mass"} == {name for name in SCORES if name in found}


def test_several_batches_give_what_one_gives(random_model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 9, (5, 20), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(tokens)
    mask[0, 12:] = 0
    whole = head_statistics(random_model, tokens, attention_mask=mask)
    monkeypatch.setattr("workbench.analyses.running.TOKENS_PER_RUN", 40)
    monkeypatch.setattr("workbench.analyses.running.Sequences.batches.__defaults__", (40,))
    done = []
    parts = head_statistics(random_model, tokens, attention_mask=mask, progress=lambda share, _: done.append(share))
    assert done == [0.4, 0.8, 1.0]
    for name in whole.quantities:
        np.testing.assert_allclose(parts[name], whole[name], atol=1e-6, err_msg=name)


def test_hand_built_heads_score_what_they_do(hand_built_model: Callable[..., HookedTransformer]) -> None:
    first = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:20]
    found = head_statistics(hand_built_model(20), first.repeat(2)[None], sink_keys=1)
    assert found["previous_token"][0, 0] == pytest.approx(1.0, abs=1e-6)
    assert found["sink_mass"][0, 1] == pytest.approx(1.0, abs=1e-6)
    assert found["key_concentration"][0, 1] == pytest.approx(1.0, abs=1e-6)
    assert found["prefix_matching"][1, 0] == pytest.approx(1.0, abs=1e-6)
    assert found.top("prefix_matching", 2) == [(1, 0), (1, 3)] or found.top("prefix_matching", 2) == [(1, 3), (1, 0)]
    # L0H2 spreads its attention evenly: query i puts 1 / (i + 1) on each of its keys.
    even = np.array([1 / (i + 1) for i in range(40)])
    assert found["entropy"][0, 2] == pytest.approx(np.log(np.arange(1, 41)).mean())
    assert found["relative_entropy"][0, 2] == pytest.approx(1.0)
    assert found["self_weight"][0, 2] == pytest.approx(even.mean())
    assert found["prefix_matching"][0, 2] == pytest.approx(even[20:].mean())
    assert found["mean_distance"][0, 2] == pytest.approx(39 / 4)
    assert found.coverage["prefix_matching"] == 0.5


def test_without_a_repeated_token_induction_is_undefined_and_says_so(random_model: HookedTransformer) -> None:
    found = head_statistics(random_model, torch.arange(20))
    assert np.isnan(found["prefix_matching"]).all() and found.coverage["prefix_matching"] == 0.0
    assert "prefix_matching" not in found.score_names
    assert "no query of these inputs counts: prefix_matching" in found.summary()
    for refused in (lambda: found.figure("map", score="prefix_matching"), lambda: found.top("duplicate_token")):
        with pytest.raises(ValueError, match="no query of these inputs counts"):
            refused()
    assert "entropy" in found.figure("map").data[0].colorbar.title.text
    assert found.figure("scatter").layout.yaxis.title.text == "sink mass (first 4 tokens)"


def test_intervals_come_from_twenty_sequences_on(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 20, (20, 12), generator=torch.Generator().manual_seed(5))
    assert "entropy_low" not in head_statistics(random_model, tokens[:19])
    found = head_statistics(random_model, tokens, seed=1)
    for name in ("entropy", "previous_token", "key_concentration"):
        assert (found[f"{name}_low"] < found[name]).all() and (found[name] < found[f"{name}_high"]).all()
    again = head_statistics(random_model, tokens, seed=1)
    np.testing.assert_array_equal(found["entropy_low"], again["entropy_low"])
    narrow = head_statistics(random_model, tokens, confidence=0.5)
    assert (narrow["entropy_high"] - narrow["entropy_low"] < found["entropy_high"] - found["entropy_low"]).all()


def test_sequences_without_rows_for_a_score_leave_the_others_their_interval(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 20, (21, 30), generator=torch.Generator().manual_seed(5))
    tokens[20] = torch.arange(30)  # no token comes twice
    found, without = head_statistics(random_model, tokens), head_statistics(random_model, tokens[:20])
    for end in ("prefix_matching_low", "prefix_matching_high"):
        np.testing.assert_allclose(found[end], without[end], atol=1e-9)
    tokens[19] = torch.arange(30)
    fewer = head_statistics(random_model, tokens)
    assert "prefix_matching_low" not in fewer and "entropy_low" in fewer


def test_the_interval_is_that_of_the_mean_over_sequences(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 20, (40, 12), generator=torch.Generator().manual_seed(6))
    found = head_statistics(random_model, tokens)
    _, statistics = random_model.run_with_statistics(tokens)
    single = statistics["max_weight"].mean(dim=3).numpy()  # [layer, sequence, head]
    error = single.std(axis=1) / np.sqrt(len(tokens))
    width = (found["max_weight_high"] - found["max_weight_low"]) / (2 * 1.96 * error)
    assert 0.9 < np.median(width) < 1.1  # equal lengths: the normal approximation of the same interval


def test_identical_sequences_leave_no_uncertainty(random_model: HookedTransformer) -> None:
    row = torch.randint(0, 20, (1, 12), generator=torch.Generator().manual_seed(7))
    found = head_statistics(random_model, row.repeat(20, 1))
    np.testing.assert_allclose(found["entropy_low"], found["entropy"], rtol=1e-6)
    np.testing.assert_allclose(found["entropy_high"], found["entropy"], rtol=1e-6)


def test_the_digest_depends_on_tokens_and_mask_but_not_on_the_padding_side(random_model: HookedTransformer) -> None:
    def digest(tokens: Tensor, mask: Tensor | None = None) -> str:
        return head_statistics(random_model, tokens, attention_mask=mask).provenance.inputs_sha256

    rows = [[1, 2, 3, 4], [5, 6]]
    left, right = (digest(*padded(rows, side)) for side in ("left", "right"))
    assert left == right != digest(padded(rows, "left")[0])
    assert digest(torch.tensor([1, 2])) != digest(torch.tensor([1, 3]))


def test_inputs_are_left_alone(random_model: HookedTransformer) -> None:
    tokens, mask = padded([[1, 2, 3, 4], [5, 6]], "left")
    before = tokens.clone(), mask.clone()
    head_statistics(random_model, tokens, attention_mask=mask)
    assert torch.equal(tokens, before[0]) and torch.equal(mask, before[1])
    assert not any(point.has_hooks() for point in random_model.hook_dict.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tokens": torch.tensor([[1, 2], [3, 4]]), "attention_mask": torch.tensor([[1, 1], [0, 0]])},
            "sequence 1 has no",
        ),
        ({"tokens": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 1, 1]])}, "tokens' shape"),
        ({"tokens": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[1, 2]])}, "only 0"),
        ({"tokens": torch.tensor([[1, 50]])}, "vocabulary has 50"),
        ({"tokens": torch.tensor([[0.5]])}, "must be integers"),
        ({"tokens": torch.zeros((1, 129), dtype=torch.int64)}, "context"),
        ({"tokens": "text"}, "no tokenizer"),
        ({"tokens": "text", "attention_mask": torch.tensor([[1]])}, "leave attention_mask out"),
        ({"tokens": torch.tensor([[1, 2]]), "sink_keys": 0}, "sink_keys"),
        ({"tokens": torch.tensor([[1, 2]]), "confidence": 95}, "confidence"),
    ],
)
def test_bad_input_is_refused(random_model: HookedTransformer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_statistics(random_model, **arguments)


def test_unknown_scores_are_refused(random_model: HookedTransformer) -> None:
    found = head_statistics(random_model, torch.tensor([1, 2, 1, 2]))
    with pytest.raises(ValueError, match="score must be one of entropy"):
        found.figure("map", score="entropi")


def test_the_map_of_received_attention_leaves_out_means_over_a_few_queries(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (40,), generator=torch.Generator().manual_seed(0))
    found = head_statistics(random_model, tokens)
    (heatmap,) = found.figure("received").data
    drawn = np.reshape(heatmap.customdata, found["received"].shape)
    assert np.isnan(drawn[..., 24:]).all()  # key 23 is seen by 16 later queries
    np.testing.assert_array_equal(drawn[..., :24], found["received"][..., :24])
    assert np.isfinite(found["received"]).all()
    assert "received" not in head_statistics(random_model, tokens[:16]).figure_kinds
    assert "received" in head_statistics(random_model, tokens[:17]).figure_kinds


def test_the_mass_on_sinks_says_on_how_many_tokens(random_model: HookedTransformer) -> None:
    found = head_statistics(random_model, torch.arange(8), sink_keys=2)
    assert "sink_mass (first 2 tokens)" in found.summary()
    assert found.figure("map", score="sink_mass").data[0].colorbar.title.text == "sink mass (first 2 tokens)"
    assert found.figure("map", score="entropy").data[0].colorbar.title.text == "entropy (nats)"


def test_weights_that_are_no_numbers_give_no_scores(random_model: HookedTransformer) -> None:
    tokens = torch.arange(3, 9)[None]
    for weight, message in (
        (float("nan"), "blocks.1.attn.W_K of custom holds NaN or infinity"),
        (float("inf"), "blocks.1.attn.W_K of custom holds NaN or infinity"),
        (1e38, "the attention of layer 1 is not finite"),
        (1e12, "the attention scores of layer 1 reach .* load the model in float64"),
    ):
        broken = copy.deepcopy(random_model)
        broken.blocks[1].attn.W_K.data[0] = weight
        with pytest.raises(ValueError, match=message):
            head_statistics(broken, tokens)
