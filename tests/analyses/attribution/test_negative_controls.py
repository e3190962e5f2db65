"""Random weights and random prompts: nothing agrees beyond chance, and no head or token is called anything."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import (
    AttributionAgreement,
    PromptSet,
    attribution_agreement,
    attribution_patching,
    head_pruning,
    joint_ablation,
    source_attribution,
)
from workbench.analyses.attribution import agreement

N_MODELS = 10
LEAST_P = 0.01  # of a test that p-values are uniform


def random_model(seed: int, **options: object) -> HookedTransformer:
    """Weights as a model has them before training."""
    torch.manual_seed(seed)
    sizes = dict(n_layers=2, d_model=32, n_heads=8, d_head=4, d_mlp=32, d_vocab=50, n_ctx=16)
    kinds = dict(positional_embedding_type="rotary", normalization_type="RMS")
    return HookedTransformer(TransformerConfig(**sizes | kinds | options)).eval()


def random_prompts(seed: int, n: int, n_tokens: int = 8) -> PromptSet:
    """Which token is target and which foil is chance, so that no head does anything to their difference on average."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(50, generator=generator) for _ in range(n)])
    tokens, corrupted = rows[:, :n_tokens], rows[:, n_tokens : 2 * n_tokens]
    real = torch.ones_like(tokens, dtype=torch.bool)
    return PromptSet(tokens, real, rows[:, -1], rows[:, -2], corrupted, "random", "random tokens")


def is_uniform(p: np.ndarray, n_permutations: int) -> bool:
    """Whether p-values, multiples of 1 / (1 + n_permutations), could be draws from the uniform distribution."""
    spread = p - np.random.default_rng(0).uniform(0, 1 / (1 + n_permutations), p.shape)
    return scipy.stats.kstest(spread, "uniform").pvalue > LEAST_P


@pytest.fixture(scope="module")
def of_heads() -> list[AttributionAgreement]:
    return [
        attribution_agreement(random_model(seed), random_prompts(seed, 20), ablations=("zero",), n_permutations=99)
        for seed in range(N_MODELS)
    ]


@pytest.mark.parametrize("measure", ["max_weight", "off_sink_mass", "entropy"])
def test_attention_of_random_heads_says_nothing_of_their_ablation(of_heads, measure: str) -> None:
    row = of_heads[0].measures.index(measure)
    assert is_uniform(np.array([found["tau_p"][row, 0] for found in of_heads]), 99)
    taus = np.array([found["tau"][row, 0] for found in of_heads])
    assert abs(taus.mean()) < 3 * taus.std(ddof=1) / N_MODELS**0.5 and np.abs(taus).max() < 0.4


def test_few_of_the_discoveries_are_false(of_heads) -> None:
    """Of the measures below an adjusted p of 0.05 one in 20 may be of attention, which is known to say nothing here."""
    shares = []
    for found in of_heads:
        discovered = found["tau_p_adjusted"][:, 0] < 0.05
        shares.append(discovered[:3].sum() / max(1, discovered.sum()))
    assert of_heads[0].measures[:3] == ["max_weight", "off_sink_mass", "entropy"] and np.mean(shares) <= 0.15


def test_the_same_statistics_see_what_is_there(of_heads) -> None:
    """Ablation is what the gradient extrapolates to, in random weights as in any."""
    row = of_heads[0].measures.index("gradient_output")
    assert all(found["tau"][row, 0] > 0.6 and found["tau_p"][row, 0] == 1 / 100 for found in of_heads)


def test_no_random_head_is_called_anything(of_heads) -> None:
    for found in of_heads:
        assert (found["verdict"] == "untested").all() and "does not do the task" in found.settings["untested"]


def test_attention_to_random_tokens_says_nothing_of_their_knock_out() -> None:
    """Without positions, which would make tokens differ by their place."""
    options = dict(n_heads=4, d_head=8, positional_embedding_type="none")
    results = [
        source_attribution(random_model(seed, **options), random_prompts(seed, 6), n_permutations=49)
        for seed in range(N_MODELS)
    ]
    for measure in ("attention_mean", "attention_max", "rollout", "flow", "recency"):
        row = results[0].measures.index(measure)
        assert is_uniform(np.array([found["tau_p"][row, 0] for found in results]), 49), measure
        assert np.mean([found["tau_p_adjusted"][row, 0] < 0.05 for found in results]) <= 0.2, measure


def test_no_random_head_has_an_effect_of_patching_on_average() -> None:
    """One false alarm in 20 is allowed of all heads together, for estimates as for effects."""
    smallest = []
    for seed in range(N_MODELS):
        found = attribution_patching(random_model(seed), random_prompts(seed, 20))
        for name in ("prompt_estimate", "prompt_effect"):
            smallest.append(agreement.sign_flip_p(found[name].reshape(20, -1), n_flips=199, seed=seed).min())
    assert np.mean(np.array(smallest) < 0.05) <= 0.15 and np.mean(smallest) > 0.3


def test_no_ranking_of_random_heads_prunes_better_than_chance() -> None:
    smallest, inside = [], []
    for seed in range(N_MODELS):
        found = head_pruning(random_model(seed), random_prompts(seed, 24), n_random=4, seed=seed)
        kept = np.array(found.coordinates["kept"])
        areas = np.trapezoid(found["prompt_curve"], kept / kept[-1], axis=1)  # [ranking, prompt]
        better = (areas[:-1] - areas[-1]).T
        smallest.append(agreement.sign_flip_p(better, n_flips=199, seed=seed).min())
        inside.append(found["area"][:-1] - found["area"][-1])
    assert np.mean(np.array(smallest) < 0.05) <= 0.2
    # Rankings of one model are made on the same prompts; between models their sign is chance.
    assert abs(np.mean(np.sign(np.mean(inside, axis=1)))) < 0.9


def test_random_heads_are_not_redundant() -> None:
    """What they do together beyond each alone has no sign of its own."""
    smallest = []
    for seed in range(N_MODELS):
        found = joint_ablation(random_model(seed), random_prompts(seed, 24), n_random=2, seed=seed)
        excess = (found["prompt_joint"] - found["prompt_alone"])[:, 1:].reshape(-1, 12).T
        smallest.append(agreement.sign_flip_p(excess, n_flips=199, seed=seed).min())
    assert np.mean(np.array(smallest) < 0.05) <= 0.2
