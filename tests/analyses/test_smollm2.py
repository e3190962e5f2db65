"""SmolLM2-135M, where it has been fetched, against float64 computations from Hugging Face's own attentions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import attention_sinks, head_pattern, head_statistics, induction_heads, repeated_random_tokens
from workbench.analyses.interventions.edits import replace_head, together
from workbench.analyses.interventions.metrics import token_losses
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Sequences
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


@dataclass(frozen=True)
class Reference:
    """What Hugging Face's model computes in every layer.

    Args:
        attentions: float32 [sequence, head, query, key].
        values: float32 [sequence, pos, key/value head, d_head].
    """

    attentions: list[np.ndarray]
    values: list[np.ndarray]


@pytest.fixture(scope="module")
def reference(tokens: torch.Tensor) -> Reference:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        KNOWN_MODELS[NAME].path, attn_implementation="eager", dtype=torch.float32
    )
    values: list[np.ndarray] = []
    for layer in loaded.model.layers:
        d_head = layer.self_attn.head_dim
        layer.self_attn.v_proj.register_forward_hook(
            lambda module, inputs, out, d_head=d_head: values.append(out.unflatten(-1, (-1, d_head)).numpy())
        )
    with torch.no_grad():
        found = loaded.model(tokens, output_attentions=True).attentions
    return Reference([layer.numpy() for layer in found], values)


@pytest.fixture(scope="module")
def attentions(reference: Reference) -> list[np.ndarray]:
    return reference.attentions


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


def test_heads_rank_as_by_hugging_face(
    model: HookedTransformer, tokens: torch.Tensor, attentions: list[np.ndarray]
) -> None:
    """Random tokens come twice, 64 apart, so what followed the earlier occurrence lies 63 back."""
    rows = np.arange(65, 129)
    expected = np.stack([p.astype(np.float64)[:, :, rows, rows - 63].mean(axis=(0, 2)) for p in attentions])
    found = head_statistics(model, tokens)["prefix_matching"]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    theirs, ours = (np.argsort(-scores, axis=None) for scores in (expected, found))
    np.testing.assert_allclose(expected.flat[ours], expected.flat[theirs], atol=1e-3)  # but for near ties


def test_without_its_induction_heads_it_forgets_what_it_read(model: HookedTransformer) -> None:
    prompts = repeated_random_tokens(model, length=24, n_sequences=4, seed=1)
    scores = head_statistics(model, prompts)["prefix_matching"]
    n_heads = 10
    order = np.argsort(-scores, axis=None)
    random = [np.random.default_rng(seed).permutation(order[n_heads:])[:n_heads] for seed in range(4)]
    interventions = [
        together([replace_head(*divmod(int(head), 9)) for head in heads], name)
        for name, heads in (("induction", order[:n_heads]), *((f"random {i}", heads) for i, heads in enumerate(random)))
    ]
    rows = torch.arange(25, 48).expand(4, -1)  # of the second copy, each predicts the next token
    losses = measure(
        model, Sequences.read(model, prompts), [Intervention(), *interventions], token_losses(prompts.tokens, rows)
    ).mean(dim=(1, 2))
    rise, of_random = float(losses[1] - losses[0]), (losses[2:] - losses[0]).tolist()
    message = f"second copy {losses[0]:.3f} nats; {rise:+.3f} without its best 10, {of_random} without random 10"
    assert rise > 3 * max(of_random) and rise > 1, message


def test_seeds_agree_within_their_intervals(model: HookedTransformer) -> None:
    by_seed = [
        head_statistics(model, repeated_random_tokens(model, length=16, n_sequences=20, seed=seed)) for seed in (0, 1)
    ]
    first, second = by_seed
    assert first.top("prefix_matching", 1) == second.top("prefix_matching", 1)
    apart = [
        head
        for head in first.top("prefix_matching", 20)
        if first["prefix_matching_low"][head] > second["prefix_matching_high"][head]
        or second["prefix_matching_low"][head] > first["prefix_matching_high"][head]
    ]
    assert len(apart) <= 1, apart  # of 20; intervals of equal means lie apart in less than 1 % of cases


def test_the_best_known_induction_head_leads_and_is_causal(model: HookedTransformer) -> None:
    found = induction_heads(model, length=24, n_sequences=3, spacing="random gaps", n_ablated=1)
    assert found.top(1) == [(18, 6)]
    assert found["verdict"][0] == "induction" and found["mean_effect"][0] > 1
    first, second = found["copy_loss"]
    assert first > 10 and second < first / 2
    assert "Q4_1" in found.summary() and "starting with BOS" in found.summary()


def test_sinks_and_patterns_agree_with_hugging_face(
    model: HookedTransformer, tokens: torch.Tensor, reference: Reference
) -> None:
    attentions = reference.attentions
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
    assert found.sink_position == int(above.argmax()) == 0
    np.testing.assert_allclose(found["sink_rate"][0], above[0] / n_heads, atol=1e-3)
    assert 0.5 < found["sink_rate"][0] < 1
    for layer, values in enumerate(reference.values):
        norms = np.linalg.norm(values[:3].astype(np.float64), axis=3)  # [sequence, pos, key/value head]
        ratio = (norms[:, 0] / np.median(norms[:, 1:], axis=1)).mean(axis=0).repeat(3)  # of 9 heads on 3
        np.testing.assert_allclose(found["value_norm_ratio"][layer], ratio, rtol=1e-3)
    assert np.median(found["value_norm_ratio"]) < 0.5
    pattern = head_pattern(model, tokens[0], 18, 6)
    np.testing.assert_allclose(np.nan_to_num(pattern["weight"]), attentions[18][0, 6], atol=TOLERANCE)
