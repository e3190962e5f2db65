"""Alternative attention where what other weights do is known, and against whole runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import scipy.optimize
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import AlternativeAttention, alternative_attention, load_result
from workbench.analyses.attribution.answer_rows import AnswerRows, _projected, even, jensen_shannon, shuffled
from workbench.analyses.tasks import PromptSet

VOCABULARY, CONTEXT, STRENGTH, LN_2 = 8, 4, 6.0, np.log(2)
WEIGHTS = {2: (0.7, 0.3), 3: (0.6, 0.3, 0.1)}  # of H1 at the last of so many tokens


def reader(n: int) -> HookedTransformer:
    """One layer of two heads at prompts of ``n`` tokens. H0 attends to the first token alone and writes nothing. H1 has
    the weights of WEIGHTS and adds STRENGTH times what it reads to the logits. In the stream stands a constant so large
    that norms divide everything by the same."""
    d_model, constant = 2 * VOCABULARY + CONTEXT + 1, 1e6
    token, position = torch.arange(VOCABULARY), torch.arange(CONTEXT) + VOCABULARY
    output = token + VOCABULARY + CONTEXT
    cfg = TransformerConfig(
        n_layers=1, d_model=d_model, n_heads=2, d_head=VOCABULARY, d_mlp=1, d_vocab=VOCABULARY, n_ctx=CONTEXT,
        normalization_type="RMS", attn_scale=1.0, model_name="reader",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[token, token] = 1.0
        model.embed.W_E[:, -1] = constant
        model.pos_embed.W_pos[torch.arange(CONTEXT), position] = 1.0
        for norm in (model.blocks[0].ln1, model.ln_final):
            norm.w.fill_(((constant**2 + 2) / d_model) ** 0.5)
        model.unembed.W_U[output, token] = 1.0
        attention = model.blocks[0].attn
        attention.W_Q[:, position, 0] = 1.0
        attention.W_K[0, position[0], 0] = 100.0
        attention.W_K[1, position[:n], 0] = torch.tensor(WEIGHTS[n], dtype=torch.float64).log()
        attention.W_V[1, token, token] = 1.0
        attention.W_O[1, token, output] = STRENGTH
    return model


def prompts_of(n_tokens: int, n: int = 20) -> PromptSet:
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(n)])
    tokens = rows[:, :n_tokens]
    real = torch.ones_like(tokens, dtype=torch.bool)
    return PromptSet(tokens, real, rows[:, 0], rows[:, 5], None, "read", "tokens")


def prediction(weights: np.ndarray) -> np.ndarray:
    """Of H1, the tokens of the prompt first."""
    logits = STRENGTH * np.append(weights, np.zeros(VOCABULARY - len(weights)))
    return np.exp(logits) / np.exp(logits).sum()


def moved(weights: np.ndarray) -> float:
    """Total variation distance from the prediction under the model's weights."""
    return float(np.abs(prediction(weights) - prediction(np.array(WEIGHTS[len(weights)]))).sum() / 2)


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    middle = (p + q) / 2
    return sum(float((x[x > 0] * np.log(x[x > 0] / middle[x > 0])).sum()) / 2 for x in (p, q))


@pytest.fixture(scope="module")
def of_heads() -> AlternativeAttention:
    return alternative_attention(reader(3), prompts_of(3), scope="heads", n_permutations=60, n_steps=60)


def test_a_head_that_writes_nothing_may_attend_to_anything(of_heads) -> None:
    """All its weight is on one token and may go to another: the divergence is ln 2 and the prediction the same."""
    assert of_heads["max_weight"][0, 0] == pytest.approx(1)
    for name in ("median_distance", "even_distance", "divergence_distance"):
        assert of_heads[name][0, 0] == pytest.approx(0, abs=1e-9)
    assert of_heads["divergence"][0, 0] == pytest.approx(LN_2) == of_heads["most_divergence"][0, 0]


def test_permutations_and_even_weights_by_hand(of_heads) -> None:
    weights = np.array(WEIGHTS[3])
    assert of_heads["even_distance"][0, 1] == pytest.approx(moved(np.full(3, 1 / 3)), abs=1e-8)
    assert of_heads["most_divergence"][0, 1] == pytest.approx(divergence(np.array([0, 0, 1.0]), weights))
    # Each of six orders has a sixth of 60 permutations, so the median lies between the inner ones.
    distances = sorted(moved(weights[list(order)]) for order in
                       ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)))  # fmt: skip
    medians = of_heads["prompt_median_distance"][0, 1]
    assert (medians >= distances[1] - 1e-8).all() and (medians <= distances[4] + 1e-8).all()
    assert of_heads["median_distance_low"][0, 1] <= medians.mean() <= of_heads["median_distance_high"][0, 1]


def test_the_adversary_reaches_the_furthest_weights_of_three(of_heads) -> None:
    """The best of a fine grid of all weights: the search must come close and cannot pass it by more than a cell."""
    steps = np.linspace(0, 1, 201)
    grid = [np.array([a, b, 1 - a - b]) for a in steps for b in steps if a + b <= 1 + 1e-9]
    grid = [np.clip(weights, 0, 1) for weights in grid]
    best = max(divergence(one, np.array(WEIGHTS[3])) for one in grid if moved(one) <= 0.05)
    reached = of_heads["prompt_divergence"][0, 1]
    assert (reached <= best * 1.05).all() and reached.mean() >= 0.9 * best
    assert (of_heads["prompt_divergence_distance"] <= 0.05 + 1e-9).all()
    assert 0 < best < 0.1  # the prediction pins this head down


def test_the_adversary_of_two_weights_is_the_edge_of_what_epsilon_allows() -> None:
    result = alternative_attention(reader(2), prompts_of(2), scope="heads", epsilon=0.1, n_permutations=1)
    edges = [scipy.optimize.brentq(lambda x: moved(np.array([x, 1 - x])) - 0.1, *ends) for ends in ((0, 0.7), (0.7, 1))]
    best = max(divergence(np.array([x, 1 - x]), np.array(WEIGHTS[2])) for x in edges)
    np.testing.assert_allclose(result["prompt_divergence"][0, 1], best, rtol=0.02)


def test_all_heads_of_a_layer_at_once() -> None:
    result = alternative_attention(reader(3), prompts_of(3), n_permutations=20)
    assert "mean over the layer's heads" in result.quantities["prompt_divergence"].definition
    assert result["max_weight"].shape == (1,) and result["max_weight"][0] == pytest.approx((1 + 0.6) / 2)
    assert result["even_distance"][0] == pytest.approx(moved(np.full(3, 1 / 3)), abs=1e-8)
    # H0 is free to go anywhere, so half of the mean is ln 2 and the rest what H1 can.
    assert LN_2 / 2 < result["divergence"][0] < LN_2 / 2 + 0.05
    assert np.isnan(result["tau"]).all()  # the weights are the same in all prompts


def test_even_attention_has_nothing_to_permute(random_model: HookedTransformer) -> None:
    """Weights that are all the same stay the same in any order, whatever the head writes."""
    import copy

    model = copy.deepcopy(random_model)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.zero_()
    result = alternative_attention(model, random_prompts(3), n_permutations=5, n_steps=2)
    assert (result["prompt_median_distance"] < 1e-6).all() and (result["prompt_even_distance"] < 1e-6).all()
    assert (result["prompt_divergence"] > 1e-5).all()


def random_prompts(n: int) -> PromptSet:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (n, 9), generator=generator)
    real = torch.arange(9) < torch.tensor([9, 6, 8][:n])[:, None]
    target, foil = torch.randperm(50, generator=generator)[: 2 * n].view(2, n)
    return PromptSet(tokens * real, real, target, foil, None, "random", "random tokens")


@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [2]])
@torch.no_grad()
def test_distances_and_gradients_are_those_of_whole_runs(random_model: HookedTransformer, heads: list[int]) -> None:
    prompts, layer = random_prompts(3), 1
    rows = AnswerRows(random_model, prompts, layer, keep_first=False)
    weights, free = rows.weights[:, heads], rows.free[:, heads]
    variants = shuffled(weights, free, 4, torch.Generator().manual_seed(1))
    distances, slopes = rows.gradients(variants, heads)
    np.testing.assert_allclose(rows.distances(variants, heads), distances, atol=1e-6)
    step = 0.05 * torch.randn(variants.shape, generator=torch.Generator().manual_seed(2)) * free
    ahead, behind = (rows.distances(variants + sign * 0.02 * step, heads) for sign in (1, -1))
    np.testing.assert_allclose((ahead - behind) / 0.04, (slopes * step).sum(dim=(2, 3)), atol=3e-3)
    for place in range(3):
        n = int(prompts.real[place].sum())
        tokens = prompts.tokens[place, :n]
        assert sorted(variants[0, place, 0, :n].tolist()) == sorted(weights[place, 0, :n].tolist())
        assert (variants[:, place, :, n:] == 0).all()
        clean = random_model(tokens)[0, -1].softmax(dim=-1)
        for variant in range(4):

            def replace_row(pattern: torch.Tensor, hook: object, new=variants[variant, place, :, :n]) -> torch.Tensor:
                pattern = pattern.clone()
                pattern[0, heads, -1] = new.float()
                return pattern

            other = random_model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", replace_row)])
            expected = (other[0, -1].softmax(dim=-1) - clean).abs().sum() / 2
            assert distances[variant, place] == pytest.approx(float(expected), abs=1e-5)


def test_the_weight_on_the_first_token_may_be_kept(random_model: HookedTransformer) -> None:
    rows = AnswerRows(random_model, random_prompts(3), 1, keep_first=True)
    assert not rows.free[..., 0].any()
    changed = shuffled(rows.weights, rows.free, 3, torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(changed[..., 0], rows.weights[..., 0].expand(3, -1, -1))
    spread = even(rows.weights, rows.free)
    np.testing.assert_allclose(spread.sum(dim=-1), rows.weights.sum(dim=-1), atol=1e-12)
    np.testing.assert_allclose(spread[0, 0, 1:], (1 - rows.weights[0, 0, 0]) / 8, atol=1e-6)
    result = alternative_attention(random_model, random_prompts(3), keep_first=True, n_permutations=3, n_steps=2)
    off_first = 1 - rows.weights[..., 0].mean(dim=1)
    assert (result["prompt_divergence"][1] <= LN_2 * off_first.numpy() + 1e-9).all()


def test_projection_is_the_nearest_point_of_the_simplex() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    free = torch.tensor([True, True, False, True]).expand(5, 4)
    mass = torch.full((5, 1), 0.8, dtype=torch.float64)
    found = _projected(values, free, mass)
    np.testing.assert_allclose(found.sum(dim=-1), 0.8, atol=1e-9)
    assert (found >= 0).all() and (found[:, 2] == 0).all()
    for row, target in zip(found.numpy()[:, [0, 1, 3]], values.numpy()[:, [0, 1, 3]], strict=True):
        least = scipy.optimize.minimize(
            lambda w, target=target: ((w - target) ** 2).sum(), np.full(3, 0.8 / 3), bounds=[(0, None)] * 3,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 0.8},
        )  # fmt: skip
        np.testing.assert_allclose(row, least.x, atol=1e-5)
    p, q = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64).split(1)
    assert float(jensen_shannon(p, q)) == pytest.approx(LN_2) and float(jensen_shannon(p, p)) == 0


def test_a_bridge_gives_the_same(random_model: HookedTransformer) -> None:
    """A model that only has hooks and a cache: every run is a whole one."""

    class Bridge:
        cfg, hook_dict, hooks = random_model.cfg, random_model.hook_dict, random_model.hooks
        run_with_hooks, run_with_cache = random_model.run_with_hooks, random_model.run_with_cache

    prompts = random_prompts(2)
    prompts = replace(prompts, tokens=prompts.tokens[:, :6], real=torch.ones(2, 6, dtype=torch.bool))
    ours, theirs = (
        alternative_attention(model, prompts, n_permutations=4, n_steps=3) for model in (random_model, Bridge())
    )
    for name in ("prompt_median_distance", "prompt_even_distance", "prompt_divergence"):
        np.testing.assert_allclose(theirs[name], ours[name], atol=1e-3, err_msg=name)


def test_what_makes_no_sense_is_refused(random_model: HookedTransformer) -> None:
    prompts = random_prompts(2)
    for options, message in (
        ({"scope": "model"}, "scope must be"), ({"epsilon": 0}, "epsilon"), ({"n_permutations": 0}, "n_permutations"),
        ({"n_starts": 0}, "n_starts"), ({"n_steps": 0}, "n_steps"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            alternative_attention(random_model, prompts, **options)
    alone = replace(prompts, real=torch.arange(9) < torch.tensor([[9], [1]]))
    with pytest.raises(ValueError, match="see two tokens"):
        alternative_attention(random_model, alone)


def test_figures_and_files(of_heads, tmp_path) -> None:
    assert of_heads.figure_kinds == ("permutation", "adversarial", "map")
    for kind in of_heads.figure_kinds:
        for theme in ("light", "dark"):
            assert of_heads.figure(kind, captioned=True, theme=theme).data
    np.testing.assert_array_equal(of_heads.figure("adversarial").data[0].y, of_heads["prompt_divergence"].reshape(-1))
    assert of_heads.figure("permutation").data[0].customdata[20] == "L0H1, prompt 0"
    note = of_heads.drawing("adversarial").note  # points are of prompts, and of single heads
    assert note.count("of each prompt") == 2 and "mean over" not in note
    with pytest.raises(ValueError, match="quantity must be"):
        of_heads.figure("map", quantity="luck")
    again = load_result(of_heads.save(tmp_path / "alternative"))
    assert again.summary() == of_heads.summary() and "does not pin the weights down" in again.summary()
    assert set(again.tables()) == {"", "prompts_of_heads"} and len(again.to_frame()) == 2
