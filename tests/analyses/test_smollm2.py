"""SmolLM2-135M, where it has been fetched, against float64 computations from Hugging Face's own attentions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import attention_sinks, head_pattern, head_statistics, induction_heads, repeated_random_tokens
from workbench.loading.sources import KNOWN_MODELS

NAME = "smollm2-135m"
pytestmark = pytest.mark.skipif(
    not KNOWN_MODELS[NAME].fetched, reason=f"{NAME} is not in the cache: run `workbench fetch {NAME}`"
)
SINK_KEYS, TOLERANCE = 4, 1e-4


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained(NAME)


@pytest.fixture(scope="module")
def tokens(model: HookedTransformer) -> torch.Tensor:
    """BOS and 64 random tokens twice, 8 sequences."""
    return repeated_random_tokens(model, length=64, n_sequences=8, seed=0).tokens


@pytest.fixture(scope="module")
def attentions(tokens: torch.Tensor) -> Iterator[list[np.ndarray]]:
    """Of every layer, float32 [sequence, head, query, key]."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        KNOWN_MODELS[NAME].path, attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        found = reference.model(tokens, output_attentions=True).attentions
    yield [layer.numpy() for layer in found]


def test_the_input_is_what_it_should_be(model: HookedTransformer, tokens: torch.Tensor) -> None:
    assert tokens.shape == (8, 129) and (tokens[:, 0] == model.tokenizer.bos_token_id).all()
    assert torch.equal(tokens[:, 1:65], tokens[:, 65:])
    assert not set(tokens[:, 1:].flatten().tolist()) & set(model.tokenizer.all_special_ids)


def test_every_head_agrees_with_hugging_face(
    model: HookedTransformer, tokens: torch.Tensor, attentions: list[np.ndarray]
) -> None:
    found = head_statistics(model, tokens, sink_keys=SINK_KEYS)
    assert found.top("prefix_matching", 1) == [(18, 6)] and found["prefix_matching"][18, 6] > 0.85
    n = tokens.shape[1]
    ids, position = tokens.numpy(), np.arange(n)
    earlier = position[:, None] > position  # [query, key]
    duplicate = earlier & (ids[:, :, None] == ids[:, None, :])  # [sequence, query, key]
    follows = np.zeros_like(duplicate)
    follows[:, :, 1:] = ids[:, :, None] == ids[:, None, :-1]
    follows &= earlier
    for layer, weights in enumerate(attentions):
        p = weights.astype(np.float64)
        has_target, has_duplicate = follows.any(axis=2), duplicate.any(axis=2)
        expected = {
            "entropy": -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=3).mean(axis=(0, 2)),
            "max_weight": p.max(axis=3).mean(axis=(0, 2)),
            "mean_distance": (p * (position[:, None] - position)).sum(axis=3).mean(axis=(0, 2)) / n,
            "sink_mass": p[..., :SINK_KEYS].sum(axis=3).mean(axis=(0, 2)),
            "previous_token": p[:, :, position[1:], position[:-1]].mean(axis=(0, 2)),
            "self_weight": p[:, :, position, position].mean(axis=(0, 2)),
            "prefix_matching": (p * follows[:, None]).sum(axis=(0, 2, 3)) / has_target.sum(),
            "duplicate_token": (p * duplicate[:, None]).sum(axis=(0, 2, 3)) / has_duplicate.sum(),
            "received": (p.sum(axis=2) / (n - position)).mean(axis=0),
        }
        for name, values in expected.items():
            computed = found[name][layer] / (n if name == "mean_distance" else 1)
            np.testing.assert_allclose(computed, values, atol=TOLERANCE, rtol=0, err_msg=f"{name}, layer {layer}")


def test_the_best_known_induction_head_leads_and_is_causal(model: HookedTransformer) -> None:
    found = induction_heads(model, length=24, n_sequences=3, spacing="random gaps", n_ablated=1)
    assert found.top(1) == [(18, 6)]
    assert found["verdict"][0] == "induction" and found["mean_effect"][0] > 1
    first, second = found["copy_loss"]
    assert first > 10 and second < first / 2
    assert "Q4_1" in found.summary() and "starting with BOS" in found.summary()


def test_sinks_and_patterns_agree_with_hugging_face(
    model: HookedTransformer, tokens: torch.Tensor, attentions: list[np.ndarray]
) -> None:
    found = attention_sinks(model, tokens[:3], n_tokens=129)
    near = np.zeros(129 - 16)  # α so close to the threshold that rounding decides
    above = np.zeros(129 - 16)
    for layer, weights in enumerate(attentions):
        p = weights[:3].astype(np.float64)
        means = np.stack([p[:, :, j:, j].mean(axis=2) for j in range(129 - 16)], axis=2)  # [sequence, head, key]
        np.testing.assert_allclose(found["alpha"][layer, :, : 129 - 16], means.mean(axis=0), atol=TOLERANCE)
        near += (abs(means - 0.3) <= TOLERANCE).sum(axis=(0, 1))
        above += (means > 0.3).sum(axis=(0, 1))
    n_heads = 3 * 30 * 9
    assert (abs(found["sink_rate"][: 129 - 16] - above / n_heads) <= near / n_heads + 1e-9).all()
    assert near.sum() < 5
    assert found.sink_position == 0 and np.median(found["value_norm_ratio"]) < 0.5
    pattern = head_pattern(model, tokens[0], 18, 6)
    np.testing.assert_allclose(np.nan_to_num(pattern["weight"]), attentions[18][0, 6], atol=TOLERANCE)
