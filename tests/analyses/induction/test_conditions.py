from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import (
    PrefixMatchingConditions,
    Quantity,
    induction_heads,
    load_result,
    prefix_matching_conditions,
    repeated_random_tokens,
)
from workbench.analyses.induction import conditions

LENGTH = 20


@pytest.fixture(scope="module")
def hand_built_conditions(hand_built_model: Callable[..., HookedTransformer]) -> PrefixMatchingConditions:
    return prefix_matching_conditions(hand_built_model(LENGTH), lengths=(12, LENGTH), seeds=(0, 1), n_sequences=10)


def test_a_fixed_period_is_told_from_content(hand_built_conditions: PrefixMatchingConditions) -> None:
    found = hand_built_conditions
    np.testing.assert_allclose(found["prefix_matching"][..., 1, 0], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["prefix_matching_low"][..., 1, 0], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["period_gain"][..., 1, 0], 0.0, atol=1e-6)
    # L1H3 looks 19 tokens back: perfect where tokens repeat after 20, by chance elsewhere.
    score = found["prefix_matching"][..., 1, 3]  # [length, spacing]
    assert score[1, 0] == pytest.approx(1.0, abs=1e-6) and score[0, 0] < 0.1  # even where nothing is so far back
    assert score[1, 1] < 0.5 and found["period_gain_low"][1, 1, 3] > 0.5
    assert found.heads("content") == [(1, 0)] and found.heads("position") == [(1, 3)]
    assert found.heads("some conditions") == [] and len(found.heads("no pattern")) == 6
    assert "(content): L1H0." in found.summary() and "(position): L1H3." in found.summary()


def test_a_head_that_misses_only_distant_copies_goes_not_by_position() -> None:
    """Gaps part position from content, but they part the copies further, too: one length alone tells nothing."""
    ends = np.zeros((2, 2, 1, 3))  # [length, spacing, layer, head]
    ends[..., 0, 0] = [[0.9, 0.8], [0.7, 0.3]]  # content, though half is lost at the greater length
    ends[..., 0, 1] = [[0.9, 0.8], [0.7, 0.2]]  # as well, and below the threshold there
    ends[..., 0, 2] = [[0.9, 0.1], [0.1, 0.1]]  # by position, where the period is the one it looks for
    quantities = {
        f"prefix_matching_{end}": Quantity(ends, ("length", "spacing", "layer", "head"), "share of 1", "")
        for end in ("low", "high")
    }
    reads = conditions._reads(quantities, ["fixed", "random gaps"], 0.3)
    assert reads.tolist() == [["content", "some conditions", "position"]]


def test_scores_of_a_seed_are_those_of_induction_heads(random_model: HookedTransformer) -> None:
    options: dict[str, Any] = {"n_sequences": 10, "n_copies": 3}
    found = prefix_matching_conditions(random_model, lengths=(5, 8), seeds=(3, 4), **options)
    for place, column, length, spacing in ((0, 0, 5, "fixed"), (1, 1, 8, "random gaps")):
        of_seeds = [
            induction_heads(random_model, length=length, spacing=spacing, seed=seed, n_ablated=0, **options)
            for seed in (3, 4)
        ]
        for row, of_seed in enumerate(of_seeds):
            np.testing.assert_array_equal(found["seed_prefix_matching"][row, place, column], of_seed["prefix_matching"])
        for name in ("prefix_matching", "prefix_matching_latest", "prefix_matching_per_entry"):
            mean = np.mean([of_seed[name] for of_seed in of_seeds], axis=0)  # as many rows in each
            np.testing.assert_allclose(found[name][place, column], mean, rtol=1e-12)
    assert not np.allclose(found["prefix_matching"], found["prefix_matching_latest"])
    gain = found["prefix_matching"][:, 0] - found["prefix_matching"][:, 1]
    np.testing.assert_allclose(found["period_gain"], gain, atol=1e-12)


def test_intervals_are_as_wide_as_the_spread_over_sequences_says(random_model: HookedTransformer) -> None:
    found = prefix_matching_conditions(random_model, lengths=(16,), spacings=("fixed",), seeds=(0, 1), n_sequences=20)
    means = []  # [sequence, layer, head], by a naive loop over patterns
    for seed in (0, 1):
        tokens = repeated_random_tokens(random_model, length=16, n_sequences=20, seed=seed).tokens
        _, cache = random_model.run_with_cache(tokens)
        pattern = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(3)], dim=1).double()
        means.append(torch.stack([pattern[..., i, i - 15] for i in range(16, 32)]).mean(dim=0).numpy())
    spread = np.concatenate(means)
    np.testing.assert_allclose(found["prefix_matching"][0, 0], spread.mean(axis=0), atol=1e-6)
    width = (found["prefix_matching_high"] - found["prefix_matching_low"])[0, 0]
    np.testing.assert_allclose(width, 2 * 1.96 * spread.std(axis=0) / np.sqrt(40), rtol=0.2)


def test_stability_compares_seeds(hand_built_conditions: PrefixMatchingConditions) -> None:
    from scipy.stats import spearmanr

    found = hand_built_conditions
    first, second = found["seed_prefix_matching"].reshape(2, 2, 2, 8)
    for place in np.ndindex(2, 2):
        assert found["rank_stability"][place] == pytest.approx(spearmanr(first[place], second[place]).statistic)
        common = set(np.argsort(-first[place], kind="stable")[:5]) & set(np.argsort(-second[place], kind="stable")[:5])
        assert found["top_stability"][place] == pytest.approx(len(common) / 5)


def test_random_weights_are_called_nothing(random_model: HookedTransformer) -> None:
    found = prefix_matching_conditions(random_model, lengths=(16,), seeds=(0, 1), n_sequences=10)
    assert (found["reads"] == "no pattern").all()
    assert "(content): none." in found.summary()


def test_every_figure_is_drawn_and_the_result_comes_back(
    hand_built_conditions: PrefixMatchingConditions, tmp_path: Path
) -> None:
    found = hand_built_conditions
    for options in ({}, {"kind": "map"}, {"kind": "map", "length": LENGTH, "spacing": "random gaps"}):
        assert found.figure(captioned=True, theme="dark", **options).data
    names = list(found.figure(length=LENGTH).data[0].y)
    assert "L1H3: position" in names and "L1H0: content" in names
    for column, trace in enumerate(found.figure(length=LENGTH).data):
        assert trace.x[names.index("L1H3: position")] == found["prefix_matching"][1, column, 1, 3]
        assert len(trace.x) == len(names) == 8
    with pytest.raises(ValueError, match="length must be one of 12, 20, got 13"):
        found.figure(length=13)
    back = load_result(found.save(tmp_path / "conditions"))
    np.testing.assert_array_equal(back["reads"], found["reads"])
    assert list(found.tables()) == ["", "heads", "conditions", "period"]


def test_lengths_that_fit_are_found(random_model: HookedTransformer) -> None:
    found = prefix_matching_conditions(random_model, spacings=("fixed",), seeds=(0, 1), n_sequences=10)
    assert found.coordinates["length"] == [32]  # 64 different tokens are more than the vocabulary holds
    assert "period_gain" not in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": (10, 49), "n_copies": 3}, "context holds 128"),
        ({"lengths": (30,)}, "too few to draw"),
        ({"lengths": None, "n_copies": 9}, "do not fit"),
        ({"lengths": (10, 10)}, "different numbers of tokens"),
        ({"seeds": (0,)}, "seeds must be two or more"),
        ({"n_sequences": 9}, "fewer than the 20 per condition"),
        ({"spacings": ("even",)}, "spacings must be"),
        ({"pattern_threshold": 0.0}, "pattern_threshold"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    random_model: HookedTransformer, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(random_model), "run_with_statistics", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=message):
        prefix_matching_conditions(random_model, **({"lengths": (10,), "seeds": (0, 1), "n_sequences": 10} | options))
