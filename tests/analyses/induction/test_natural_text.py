from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import load_result, prefix_matching_in_text, repeated_random_tokens

LENGTH = 20


def text(n_sequences: int, length: int = 40, n_words: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, n_words, (n_sequences, length), generator=torch.Generator().manual_seed(seed))


def test_a_perfect_induction_head_is_all_above_its_null(hand_built_model: Callable[..., HookedTransformer]) -> None:
    model = hand_built_model(LENGTH)
    prompts = repeated_random_tokens(model, length=LENGTH, n_sequences=20, spacing="random gaps")
    found = prefix_matching_in_text(model, prompts)
    # One earlier occurrence each, so that no shifted key follows one: all the weight is excess.
    for name in ("prefix_matching", "excess", "excess_low", "excess_high"):
        assert found[name][1, 0] == pytest.approx(1.0, abs=1e-9)
    np.testing.assert_allclose(found["shift_excess"][:, 1, 0], 1.0, atol=1e-9)
    # A head that spreads its weight evenly has the same on as many keys anywhere.
    assert found["prefix_matching"][0, 2] > 0.02
    np.testing.assert_allclose([found[name][0, 2] for name in ("excess", "excess_low", "excess_high")], 0, atol=1e-9)
    assert found.top(1) == [(1, 0)] and "L1H0 +1.000 [+1.000, +1.000]" in found.summary()


def test_scores_are_those_of_a_naive_loop(random_model: HookedTransformer) -> None:
    tokens, mask = text(4), torch.ones(4, 40, dtype=torch.long)
    mask[2, 30:] = 0
    n_shifts, max_shift = 3, 6
    found = prefix_matching_in_text(
        random_model, tokens, attention_mask=mask, n_shifts=n_shifts, max_shift=max_shift, seed=7
    )
    _, cache = random_model.run_with_cache(tokens, attention_mask=mask)
    patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(3)]).double().numpy()
    generator = torch.Generator().manual_seed(7)
    targets, null, by_shift = [], [], [[] for _ in range(n_shifts)]  # type: ignore[var-annotated]
    for b in range(4):
        shifts = (torch.randperm(max_shift - 1, generator=generator)[:n_shifts] + 2).tolist()
        for i in range(int(mask[b].sum())):
            keys = np.array([j for j in range(1, i) if tokens[b, j - 1] == tokens[b, i]], dtype=int)
            row, beside = patterns[:, b, :, i], []
            for place, shift in enumerate(shifts):
                if len(keys) and keys.min() - shift >= 1 and keys.max() + shift < i:
                    beside.append((row[..., keys + shift].sum(-1) + row[..., keys - shift].sum(-1)) / 2)
                    by_shift[place].append(row[..., keys].sum(-1) - beside[-1])
            if beside:
                targets.append(row[..., keys].sum(-1))
                null.append(np.mean(beside, axis=0))
    assert len(targets) > 20
    np.testing.assert_allclose(found["prefix_matching"], np.mean(targets, axis=0), atol=1e-6)
    np.testing.assert_allclose(found["shifted"], np.mean(null, axis=0), atol=1e-6)
    np.testing.assert_allclose(found["excess"], np.mean(targets, axis=0) - np.mean(null, axis=0), atol=1e-6)
    np.testing.assert_allclose(found["shift_excess"], [np.mean(rows, axis=0) for rows in by_shift], atol=1e-6)
    assert found.coverage["excess"] == pytest.approx(len(targets) / int(mask.sum()))
    assert "excess_low" not in found and "no intervals" in found.summary()


def test_random_weights_match_nothing(random_model: HookedTransformer) -> None:
    found = prefix_matching_in_text(random_model, text(24, 60))
    assert np.abs(found["excess"]).max() < 0.02
    assert (found["excess_low"] <= found["excess"]).all() and (found["excess"] <= found["excess_high"]).all()


def test_every_figure_is_drawn_and_the_result_comes_back(random_model: HookedTransformer, tmp_path: Path) -> None:
    found = prefix_matching_in_text(random_model, text(20))
    for kind in found.figure_kinds:
        assert found.figure(kind, captioned=True, theme="dark").data
    ends = found["shift_excess"][:, *np.array(found.top(8)).T]
    (drawn,) = [trace for trace in found.figure("heads").data if trace.name == "by draw of the shifts"]
    np.testing.assert_allclose(drawn.x, ends.mean(axis=0))
    back = load_result(found.save(tmp_path / "text"))
    np.testing.assert_array_equal(back["excess"], found["excess"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shift": 1}, "max_shift must be at least 2"),
        ({"n_shifts": 0}, "n_shifts must be between 1 and 15"),
        ({"n_shifts": 6, "max_shift": 6}, "n_shifts must be between 1 and 5"),
        ({"tokens": torch.arange(1, 40)}, "no query of these texts counts"),
    ],
)
def test_what_has_no_number_is_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefix_matching_in_text(random_model, **({"tokens": text(2)} | options))
