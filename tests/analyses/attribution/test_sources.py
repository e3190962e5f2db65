"""Source tokens: every measure and every knock-out against values by hand and a naive loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import load_result
from workbench.analyses.attribution.deletion import SHARES, first_sources
from workbench.analyses.attribution.flow import attention_flow
from workbench.analyses.attribution.sources import SourceAttribution, source_attribution
from workbench.analyses.tasks import PromptSet

VOCABULARY, LENGTH, ASKED, STRENGTH = 12, 6, 2, 40.0


def even_reader() -> HookedTransformer:
    """One layer whose head H1 spreads its weight evenly and adds what it reads to the logits; H0 attends to the token
    at position 1 and writes nothing. In the stream stands a constant so large that norms divide everything by the same.
    """
    d_model, constant = 3 * VOCABULARY + 1, 1e6
    token = torch.arange(VOCABULARY)
    position, output = token + VOCABULARY, token + 2 * VOCABULARY
    cfg = TransformerConfig(
        n_layers=1, d_model=d_model, n_heads=2, d_head=VOCABULARY, d_mlp=1, d_vocab=VOCABULARY, n_ctx=VOCABULARY,
        normalization_type="RMS", attn_scale=1.0, model_name="even reader",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[token, token] = 1.0
        model.embed.W_E[:, -1] = constant
        model.pos_embed.W_pos[token, position] = 1.0
        for norm in (model.blocks[0].ln1, model.ln_final):
            norm.w.fill_(((constant**2 + 2) / d_model) ** 0.5)
        model.unembed.W_U[output, token] = 1.0
        attention = model.blocks[0].attn
        attention.W_Q[0, position, 0] = 100.0
        attention.W_K[0, position[1], 0] = 1.0
        attention.W_V[:, token, token] = 1.0
        attention.W_O[1, token, output] = STRENGTH
    return model


def repeat_prompts(n: int = 21) -> PromptSet:
    """Six different tokens; the target is the one at ASKED, the foil is not in the prompt."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(n)])
    tokens = rows[:, :LENGTH]
    real = torch.ones_like(tokens, dtype=torch.bool)
    return PromptSet(tokens, real, rows[:, ASKED], rows[:, LENGTH], None, "repeat", "tokens")


@pytest.fixture(scope="module")
def found() -> SourceAttribution:
    return source_attribution(even_reader(), repeat_prompts(), n_permutations=99)


def test_every_measure_is_what_the_weights_say(found: SourceAttribution) -> None:
    even, nan = 1 / LENGTH, np.nan
    expected = {
        "attention_mean": [nan, (1 + even) / 2, even / 2, even / 2, even / 2, nan],
        "attention_max": [nan, 1, even, even, even, nan],
        "last_layer": [nan, (1 + even) / 2, even / 2, even / 2, even / 2, nan],
        "value_weighted": [nan, *[STRENGTH * even] * 4, nan],  # H0 writes nothing
        "rollout": [nan, (1 + even) / 4, even / 4, even / 4, even / 4, nan],
        "flow": [nan, (1 + even) / 4, even / 4, even / 4, even / 4, nan],  # of one layer, its edge
        # ∂m/∂x of the target's token, and as much of the constant against it: a norm cancels what only scales.
        "gradient_input": [nan, 0, 2 * STRENGTH * even, 0, 0, nan],
        "recency": [nan, -4, -3, -2, -1, nan],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], np.tile(values, (21, 1)), atol=1e-6, err_msg=name)


def test_every_knock_out_is_what_the_weights_say(found: SourceAttribution) -> None:
    # Five tokens share the weight of six: the target's logit rises, or is gone with its token.
    rise = STRENGTH * (1 / 5 - 1 / 6)
    signed = [np.nan, rise, -STRENGTH / 6, rise, rise, np.nan]
    np.testing.assert_allclose(found["signed_effect"], np.tile(signed, (21, 1)), atol=1e-6)

    def prediction(n_read: int) -> np.ndarray:
        logits = np.where(np.arange(VOCABULARY) < n_read, STRENGTH / n_read, 0.0)
        return np.exp(logits) / np.exp(logits).sum()

    clean, cut = prediction(6), np.roll(prediction(5), 1)  # the token that is cut stands first
    mean = (clean + cut) / 2
    distance = np.abs(clean - cut).sum() / 2
    divergence = ((clean * np.log(clean / mean)).sum() + (cut * np.log(cut / mean)).sum()) / 2
    np.testing.assert_allclose(found["total_variation"][:, 1:5], distance, atol=1e-6)
    np.testing.assert_allclose(found["jensen_shannon"][:, 1:5], divergence, atol=1e-6)


def test_deletion_by_hand(found: SourceAttribution) -> None:
    rankings, shares = list(found.coordinates["ranking"]), list(found.coordinates["share"])
    half = shares.index("50%")  # two of four sources

    def target(n_read: int, is_read: bool) -> float:
        logits = np.zeros(VOCABULARY)
        logits[1 - is_read : n_read + 1 - is_read] = STRENGTH / n_read
        return float(np.exp(logits[0]) / np.exp(logits).sum())

    # The knock-out and the gradient put the target's token first, and then position 1.
    for name in ("knock_out", "gradient_input"):
        row = rankings.index(name)
        lost = target(6, True) - target(4, False)
        assert found["comprehensiveness"][row, half] == pytest.approx(lost)
        assert found["sufficiency"][row, half] == pytest.approx(target(6, True) - target(4, True))
    # Attention puts position 1 first: without it the target gains. Every smaller share is one of the four sources.
    row = rankings.index("attention_max")
    one = target(6, True) - target(5, True)
    np.testing.assert_allclose(found["comprehensiveness"][row, :half], one)
    lost = [target(6, True) - target(3, False)] * half + [target(6, True) - target(4, True)]
    assert found["sufficiency_aopc"][row] == pytest.approx(np.mean(lost))


def test_first_sources() -> None:
    sources = torch.tensor([[False, True, True, True, True, False], [False, True, True, True, False, False]])
    values = np.array([[9, 1, 3, 2, 3, 9], [9, 5, np.nan, 1, np.nan, 9]])
    assert first_sources(values, sources, 0.01).nonzero().tolist() == [[0, 2], [1, 1]]
    assert first_sources(values, sources, 0.5).nonzero().tolist() == [[0, 2], [0, 4], [1, 1], [1, 3]]


def random_prompts(n: int) -> PromptSet:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (n, 9), generator=generator)
    lengths = torch.tensor([9, 6, 8][:n])
    real = torch.arange(9) < lengths[:, None]
    target, foil = torch.randperm(50, generator=generator)[: 2 * n].view(2, n)
    return PromptSet(tokens * real, real, target, foil, None, "random", "random tokens")


@torch.no_grad()
def test_everything_equals_a_naive_loop(random_model: HookedTransformer) -> None:
    prompts, cfg = random_prompts(3), random_model.cfg
    found = source_attribution(random_model, prompts, n_permutations=9)
    for place in range(3):
        n = int(prompts.real[place].sum())
        tokens, target, foil = prompts.tokens[place, :n], prompts.target[place], prompts.foil[place]
        clean, cache = random_model.run_with_cache(tokens)
        rolled, norms = torch.eye(n), torch.zeros(n)
        for layer in range(cfg.n_layers):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
            rolled = (pattern.mean(dim=0) + torch.eye(n)) / 2 @ rolled
            for key in range(n):
                carried = sum(
                    pattern[h, -1, key] * cache[f"blocks.{layer}.attn.hook_v"][0, key, h // 2]
                    @ random_model.blocks[layer].attn.W_O[h] for h in range(cfg.n_heads)
                )  # fmt: skip
                norms[key] += carried.norm() / cfg.n_layers
        np.testing.assert_allclose(found["rollout"][place, 1 : n - 1], rolled[-1, 1:-1], atol=1e-5)
        np.testing.assert_allclose(found["value_weighted"][place, 1 : n - 1], norms[1:-1], rtol=1e-4)
        patterns = [cache[f"blocks.{layer}.attn.hook_pattern"][0].mean(dim=0) for layer in range(cfg.n_layers)]
        flows = attention_flow([(x.numpy() + np.eye(n)) / 2 for x in patterns], n - 1, range(1, n - 1))
        np.testing.assert_allclose(found["flow"][place, 1 : n - 1], flows, atol=1e-5)
        for key in range(1, n - 1):

            def hide(scores: torch.Tensor, hook: object, key: int = key) -> torch.Tensor:
                scores = scores.clone()
                scores[:, :, key + 1 :, key] = -torch.inf  # from the queries after it
                return scores

            hooks = [(f"blocks.{layer}.attn.hook_attn_scores", hide) for layer in range(cfg.n_layers)]
            cut = random_model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1]
            change = (cut[target] - cut[foil]) - (clean[0, -1, target] - clean[0, -1, foil])
            assert found["signed_effect"][place, key] == pytest.approx(float(change), abs=1e-4)
            distance = (cut.softmax(dim=-1) - clean[0, -1].softmax(dim=-1)).abs().sum() / 2
            assert found["total_variation"][place, key] == pytest.approx(float(distance), abs=1e-5)
    assert np.isnan(found["effect"][:, 0]).all() and np.isnan(found["effect"][1, 5:]).all()
    assert np.isnan(found["tau_low"]).all() and np.isnan(found["partial_tau"][found.measures.index("recency")]).all()


def test_figures_and_files(found: SourceAttribution, tmp_path: object) -> None:
    for kind in found.figure_kinds:
        for theme in ("light", "dark"):
            assert found.figure(kind, captioned=True, theme=theme).data
    curve = found.figure("deletion").data[0]
    np.testing.assert_allclose(curve.x, 100 * np.array(SHARES))
    np.testing.assert_allclose(curve.y, found["comprehensiveness"][0])
    with pytest.raises(ValueError, match="prompt must be one of 0 to 20"):
        found.figure("prompt", prompt=21)
    again = load_result(found.save(f"{tmp_path}/x"))
    assert again.summary() == found.summary() and "given position" in again.summary()
    assert set(found.tables()) == {"", "tokens", "rankings", "deletion", "prompts"}


def test_what_cannot_be_ranked_is_refused(random_model: HookedTransformer) -> None:
    prompts = random_prompts(2)
    with pytest.raises(ValueError, match="metric must be"):
        source_attribution(random_model, prompts, metric="loss")
    with pytest.raises(ValueError, match="n_permutations"):
        source_attribution(random_model, prompts, n_permutations=0)
    with pytest.raises(ValueError, match="prompt 1 has 1 tokens between"):
        source_attribution(random_model, replace(prompts, real=torch.arange(9) < torch.tensor([[9], [3]])))
    with pytest.raises(ValueError, match="no foils"):
        source_attribution(random_model, replace(prompts, foil=None), metric="logit_difference")
    wide = torch.ones(1, 513, dtype=torch.int64)
    long = PromptSet(wide, wide.bool(), torch.tensor([1]), torch.tensor([2]), None, "long", "long")
    with pytest.raises(ValueError, match="513 tokens"):
        source_attribution(random_model, long)


def test_attention_flow_by_hand() -> None:
    """Three tokens and two layers: from token 2 up to ½ to token 0, ⅛ to token 1 and ⅜ to itself, and then on."""
    first = np.array([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 4, 1 / 4, 1 / 2]])
    second = np.array([[1, 0, 0], [1 / 4, 3 / 4, 0], [1 / 2, 1 / 8, 3 / 8]])
    # To 0: 1/2 through 0, 1/8 through 1, and through 2 no more than its 1/4; to 1: 1/8 and 1/4; to 2 all of 3/8.
    assert attention_flow([first, second], 2, range(3)).tolist() == [7 / 8, 3 / 8, 3 / 8]
    assert attention_flow([first], 2, range(3)).tolist() == first[2].tolist()


def test_attention_flow_is_the_optimum_of_the_linear_programme() -> None:
    """Flows on edges within their capacities, as much into a node as out of it, as much as possible into the key."""
    rng = np.random.default_rng(0)
    patterns = np.tril(rng.random((3, 4, 4)) ** 3)
    mixed = patterns / patterns.sum(axis=2, keepdims=True) / 2 + np.eye(4) / 2
    edges = [(layer, i, j) for layer in range(3) for i in range(4) for j in range(i + 1)]
    inner = [(above, node) for above in (1, 2) for node in range(4)]
    balance = [
        [(layer == above - 1 and i == node) - (layer == above and j == node) for layer, i, j in edges]
        for above, node in inner
    ]
    for key in range(4):
        used = [(layer < 2 or i == 3) and (layer > 0 or j == key) for layer, i, j in edges]
        bounds = [(0, mixed[edge] if use else 0) for edge, use in zip(edges, used, strict=True)]
        into_key = [-float(layer == 0 and j == key) for layer, _, j in edges]
        best = scipy.optimize.linprog(into_key, A_eq=np.array(balance, float), b_eq=np.zeros(8), bounds=bounds)
        assert attention_flow(list(mixed), 3, [key])[0] == pytest.approx(-best.fun, abs=1e-6)


def test_flow_is_left_out_where_its_graph_is_too_large(
    random_model: HookedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.analyses.attribution.source_evidence.MAX_EDGES", 3 * 9 * 10 // 2 - 1)
    found = source_attribution(random_model, random_prompts(2), n_permutations=9)
    assert "flow" not in found and "flow" not in found.measures
    assert "Attention flow is left out: its graph would have 135 edges, above 134." in found.summary()


def test_a_measure_that_says_nothing_is_at_its_null() -> None:
    """Recency on random weights without positions: a token's place has nothing to do with what its knock-out does."""
    cfg = TransformerConfig(
        n_layers=2, d_model=32, n_heads=4, d_head=8, d_mlp=32, d_vocab=60, n_ctx=16,
        positional_embedding_type="none", normalization_type="RMS",
    )  # fmt: skip
    torch.manual_seed(0)
    model = HookedTransformer(cfg).eval()
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(60, generator=generator) for _ in range(24)])
    tokens = rows[:, :12]
    real = torch.ones_like(tokens, dtype=torch.bool)
    found = source_attribution(model, PromptSet(tokens, real, rows[:, 12], rows[:, 13], None, "random", "random"))
    tau, p = (found[name][found.measures.index("recency"), 0] for name in ("tau", "tau_p_adjusted"))
    low, high = (found[f"tau_{end}"][found.measures.index("recency"), 0] for end in ("low", "high"))
    assert abs(tau) < 0.15 and p > 0.05 and low < 0 < high
