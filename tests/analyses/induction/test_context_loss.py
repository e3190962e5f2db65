from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import in_context_learning, load_result, repeated_random_tokens

LENGTH = 20


def text(n_sequences: int = 20, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 50, (n_sequences, length), generator=torch.Generator().manual_seed(0))


def test_an_induction_circuit_learns_in_context(hand_built_model: Callable[..., HookedTransformer]) -> None:
    model = hand_built_model(LENGTH)
    prompts = repeated_random_tokens(model, length=LENGTH, n_sequences=20)
    # Without a tokenizer there is no BOS: position 10 is of the first copy, unknown, and 30 the same token again.
    found = in_context_learning(model, prompts, early=10, late=30)
    assert found["late_loss"] < 0.01 and found["early_loss"] > 4
    assert found["score"] == pytest.approx(float(found["late_loss"] - found["early_loss"]))
    assert found["score_high"] < -4 and "no difference is shown" not in found.summary()


def test_losses_and_errors_are_those_of_a_naive_loop(random_model: HookedTransformer) -> None:
    tokens, mask = text(24), torch.ones(24, 40, dtype=torch.long)
    mask[3, 35:] = 0  # the others are cut to its length
    found = in_context_learning(random_model, tokens, attention_mask=mask, early=6, late=30, width=3)
    log_probabilities = random_model(tokens).detach().double().log_softmax(-1).numpy()
    losses = np.array([[-log_probabilities[b, i - 1, tokens[b, i]] for i in range(1, 35)] for b in range(24)])
    assert np.isnan(found["loss"][0]) and len(found["loss"]) == 35
    np.testing.assert_allclose(found["loss"][1:], losses.mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(found["loss_sem"][1:], losses.std(axis=0, ddof=1) / np.sqrt(24), atol=1e-5)
    np.testing.assert_allclose(found["smooth_loss"][20], losses[:, 11:28].mean(), atol=1e-5)
    np.testing.assert_allclose(found["smooth_loss"][34], losses[:, 25:].mean(), atol=1e-5)  # up to the end
    error = losses[:, 11:28].mean(axis=1).std(ddof=1) / np.sqrt(24)
    np.testing.assert_allclose(found["smooth_loss_sem"][20], error, atol=1e-5)
    early, late = losses[:, [4, 5, 6]].mean(axis=1), losses[:, [28, 29, 30]].mean(axis=1)  # positions 5–7 and 29–31
    np.testing.assert_allclose(found["sequence_score"], late - early, atol=1e-5)
    assert found["score"] == pytest.approx((late - early).mean(), abs=1e-5)
    assert found["score_sem"] == pytest.approx((late - early).std(ddof=1) / np.sqrt(24), abs=1e-5)
    assert found["score_low"] < found["score"] < found["score_high"]
    assert found.provenance.n_tokens == 24 * 35


def test_random_weights_learn_nothing(random_model: HookedTransformer) -> None:
    found = in_context_learning(random_model, text(40), early=6, late=36)
    assert abs(found["score"]) < 3 * found["score_sem"]
    n = found.n_for_good_error
    assert n == pytest.approx(40 * (float(found["score_sem"]) / 0.1) ** 2, abs=1) and n > 40
    assert f"About {n:,} such sequences" in found.summary()


def test_the_figure_is_drawn_and_the_result_comes_back(random_model: HookedTransformer, tmp_path: Path) -> None:
    found = in_context_learning(random_model, text(), early=6, late=30)
    figure = found.figure(captioned=True, theme="dark")
    drawn = {trace.name: trace.y for trace in figure.data}
    np.testing.assert_array_equal(drawn["each position"], found["loss"])
    np.testing.assert_array_equal(drawn["mean of 17 positions"], found["smooth_loss"])
    assert {line.text for line in figure.layout.annotations} >= {"early", "late"}
    back = load_result(found.save(tmp_path / "context"))
    np.testing.assert_array_equal(back["loss"], found["loss"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": text(19)}, "19 sequences make no in-context-learning score.*length=31"),
        ({"tokens": text(1)}, "1 sequence makes no"),
        ({"tokens": text(20, 30)}, "20 of 20 sequences have fewer than the 31 tokens"),
        ({"late": 128}, "late must be at most 127"),
        ({"early": 10, "late": 120, "width": 17}, "late must be at most 119"),
        ({"width": 2}, "width must be an odd number"),
        ({"early": 29, "width": 3}, "further apart than width = 3"),
        ({"early": 0}, "positions from 1 on"),
    ],
)
def test_what_has_no_number_is_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        in_context_learning(random_model, **({"tokens": text(), "early": 6, "late": 30} | options))
