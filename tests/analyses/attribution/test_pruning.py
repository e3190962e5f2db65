"""Head pruning against a naive loop, and on a model of which one head does everything."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import HeadPruning, head_pruning, load_result
from workbench.analyses.tasks import PromptSet

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 3, "d_head": 4, "d_mlp": 12, "d_vocab": 23, "n_ctx": 12}


def build(**options: object) -> HookedTransformer:
    torch.manual_seed(0)
    model = HookedTransformer(
        TransformerConfig(**SIZES, normalization_type="RMS", initializer_range=0.4, init_mode="normal", **options)
    )
    return model.double().eval()


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return build()


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 23, (5, 7), generator=generator)
    real = torch.arange(7) < torch.tensor([7, 5, 7, 6, 4])[:, None]
    target, foil = torch.tensor([[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]])
    return PromptSet(tokens.masked_fill(~real, 0), real, target, foil, None, "random", "random tokens")


@pytest.fixture(scope="module")
def result(model, prompts) -> HeadPruning:
    return head_pruning(model, prompts, n_random=2)


def kept_heads(result: HeadPruning, ranking: str, n: int) -> set[tuple[int, int]]:
    score = result["score"][list(result.coordinates["ranking_with_scores"]).index(ranking)]
    ordered = sorted(np.ndindex(score.shape), key=lambda head: (-score[head], head))
    return set(ordered[:n])


def without(model: HookedTransformer, heads: set, outputs: dict[int, Tensor], tokens: Tensor) -> Tensor:
    """Logits [pos, d_vocab] of one text with heads ablated, one hook after the other."""

    def ablate(head: int, value: Tensor):
        def edit(z: Tensor, hook: object) -> Tensor:
            z = z.clone()
            z[:, :, head] = value
            return z

        return edit

    hooks = [(f"blocks.{layer}.attn.hook_z", ablate(head, outputs[layer][head])) for layer, head in heads]
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model(tokens[None])[0]


def means_over(model: HookedTransformer, texts: list[Tensor]) -> dict[int, Tensor]:
    """Layer → mean z over all tokens of the texts, [n_heads, d_head]."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(2)]
    with torch.no_grad():
        caches = [model.run_with_cache(text[None], names_filter=names)[1] for text in texts]
    return {layer: torch.cat([cache[name][0] for cache in caches]).mean(dim=0) for layer, name in enumerate(names)}


def difference(prompts: PromptSet, prompt: int, logits: Tensor) -> float:
    return float(logits[-1, prompts.target[prompt]] - logits[-1, prompts.foil[prompt]])


def texts_of(prompts: PromptSet) -> list[Tensor]:
    return [tokens[mask] for tokens, mask in zip(prompts.tokens, prompts.real, strict=True)]


def test_curves_are_those_of_a_naive_loop_on_the_other_half(model, prompts, result):
    seen, unseen = prompts.halves(0)
    outputs = means_over(model, texts_of(seen))
    every = set(np.ndindex(2, 3))
    assert list(result.coordinates["kept"]) == [0, 1, 2, 3, 4, 5, 6]
    for row, ranking in enumerate(result.coordinates["ranking_with_scores"]):
        for n in (0, 1, 4, 6):
            ablated = every - kept_heads(result, ranking, n)
            expected = [
                difference(unseen, place, without(model, ablated, outputs, text))
                for place, text in enumerate(texts_of(unseen))
            ]
            np.testing.assert_allclose(result["prompt_curve"][row, n], expected, atol=1e-11)
    np.testing.assert_allclose(result["curve"], result["prompt_curve"].mean(axis=2), atol=1e-14)
    np.testing.assert_allclose(result["curve"][:, 0], result["curve"][0, 0], atol=1e-11)
    np.testing.assert_array_equal(result["curve"][:, 6], np.full(len(result["curve"]), result["all_heads"].mean()))


def test_scores_are_those_of_naive_loops_on_the_first_half(model, prompts, result):
    seen, _ = prompts.halves(0)
    texts, names = texts_of(seen), list(result.coordinates["ranking_with_scores"])
    outputs = means_over(model, texts)
    effect, gradient = np.zeros((2, 3)), np.zeros((2, 3))
    for layer, head in np.ndindex(2, 3):
        changes = [
            difference(seen, place, without(model, {(layer, head)}, outputs, text))
            - difference(seen, place, without(model, set(), outputs, text))
            for place, text in enumerate(texts)
        ]
        effect[layer, head] = abs(np.mean(changes))
    weights, first = np.zeros((2, 3)), np.zeros((2, 3))
    for place, text in enumerate(texts):
        kept: list[Tensor] = []

        def keep(z: Tensor, hook: object, kept: list = kept) -> None:
            z.retain_grad()
            kept.append(z)

        hooks = [(f"blocks.{layer}.attn.hook_z", keep) for layer in range(2)]
        with model.hooks(fwd_hooks=hooks):
            logits = model(text[None])[0, -1]
        (logits[seen.target[place]] - logits[seen.foil[place]]).backward()
        model.zero_grad()
        for layer, z in enumerate(kept):
            gradient[layer] += (z * z.grad).sum(dim=(0, 1, 3)).abs().detach().numpy() / len(texts)
        patterns = model.run_with_cache(text[None], names_filter=lambda name: name.endswith("hook_pattern"))[1]
        for layer, pattern in enumerate(patterns.values()):
            weights[layer] += pattern[0].amax(dim=2).sum(dim=1).detach().numpy()
            first[layer] += pattern[0, :, :, 0].sum(dim=1).detach().numpy()
    n = sum(map(len, texts))
    for name, expected in (("ablation effect", effect), ("gradient", gradient), ("max weight", weights / n),
                           ("off the first token", 1 - first / n)):  # fmt: skip
        np.testing.assert_allclose(result["score"][names.index(name)], expected, atol=1e-6, err_msg=name)


def test_areas_and_the_band_of_random_orders(result):
    curve = result["curve"]
    np.testing.assert_allclose(result["area"], (curve[:, :-1] + curve[:, 1:]).sum(axis=1) / 2 / 6, atol=1e-12)
    assert result.rankings[-1] == "random" and (result["random_low"] <= result["random_high"]).all()
    middle = (result["random_low"] + result["random_high"]) / 2  # of two orders
    np.testing.assert_allclose(curve[-1], middle, atol=1e-12)
    assert np.isnan(result["area_low"]).all()  # two prompts
    assert result.best == result.rankings[int(result["area"].argmax())]


def test_the_head_that_does_everything_is_kept_first():
    """L1H2 alone writes to the stream: it copies the first token, which is the right answer."""
    model = build()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_O.zero_()
            block.mlp.W_out.zero_()
        attention = model.blocks[1].attn
        attention.W_O[2].copy_(4 * attention.W_O.new_tensor(np.eye(4, 16)))
        attention.W_V[2].copy_(attention.W_V.new_tensor(np.eye(16, 4)))
    tokens = torch.randint(0, 23, (44, 5), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)[:, -1].detach()
    best, worst = logits.argmax(dim=1), logits.argmin(dim=1)
    prompts = PromptSet(tokens, torch.ones_like(tokens, dtype=torch.bool), best, worst, None, "copy", "tokens")
    result = head_pruning(model, prompts, {"wrong": -np.arange(6.0).reshape(2, 3)}, ablation="zero")
    ranked = list(result.coordinates["ranking_with_scores"])
    for name in ("ablation effect", "gradient"):
        assert kept_heads(result, name, 1) == {(1, 2)}
        row = ranked.index(name)
        np.testing.assert_allclose(result["curve"][row, 1:], result["curve"][row, -1], atol=1e-12)
        assert result.needed(name) == 1
        assert result["area_low"][row] <= result["area"][row] <= result["area_high"][row]  # 22 prompts
    wrong = ranked.index("wrong")
    np.testing.assert_allclose(result["curve"][wrong, :-1], result["curve"][wrong, 0], atol=1e-12)
    assert result.needed("wrong") == 6
    assert result["area"][wrong] == result["area"].min() < result["area"].max()
    assert result["area"][ranked.index("gradient")] == pytest.approx(result["area"].max())
    assert "wrong" in result.summary()


def test_tokens_are_scored_by_the_loss_of_all_next_tokens(model, prompts):
    tokens = prompts.tokens % 3  # some repeat
    result = head_pruning(model, tokens, attention_mask=prompts.real, n_random=2)
    assert result.settings["lower_is_better"] and result.quantities["curve"].unit == "nats per token"
    halves = torch.randperm(5, generator=torch.Generator().manual_seed(0))[3:].sort().values
    texts = [tokens[place][prompts.real[place]] for place in halves.tolist()]
    with torch.no_grad():
        losses = [float(model(text[None], return_type="loss")) for text in texts]
    np.testing.assert_allclose(result["all_heads"], losses, atol=1e-10)
    assert "prefix matching" in result.rankings
    assert result.best == result.rankings[int(result["area"].argmin())]


def test_what_cannot_be_pruned_is_refused(model, prompts):
    with pytest.raises(ValueError, match="one prompt"):
        head_pruning(model, prompts.subset([0]))
    with pytest.raises(ValueError, match="no two halves"):
        head_pruning(model, prompts.tokens[:1])
    with pytest.raises(ValueError, match="two tokens"):
        head_pruning(model, prompts.tokens[:, :1])
    with pytest.raises(ValueError, match="number for each head"):
        head_pruning(model, prompts, {"mine": np.zeros((3, 2))})
    with pytest.raises(ValueError, match="number for each head"):
        head_pruning(model, prompts, {"mine": np.full((2, 3), np.nan)})
    with pytest.raises(ValueError, match="another name"):
        head_pruning(model, prompts, {"gradient": np.zeros((2, 3))})
    with pytest.raises(ValueError, match="ablation must be"):
        head_pruning(model, prompts, ablation="resample")
    with pytest.raises(ValueError, match="n_random"):
        head_pruning(model, prompts, n_random=1)
    with pytest.raises(ValueError, match="no foils"):
        head_pruning(model, dataclasses.replace(prompts, foil=None), metric="logit_difference")
    with pytest.raises(ValueError, match="bidirectional"):
        head_pruning(build(attention_dir="bidirectional"), prompts)


def test_results_tabulate_draw_and_come_back(result, tmp_path):
    result.save(tmp_path / "pruning")
    again = load_result(tmp_path / "pruning")
    assert isinstance(again, HeadPruning) and again.summary() == result.summary()
    for figure in result.figure_kinds:
        for theme in ("light", "dark"):
            assert result.figure(figure, captioned=True, theme=theme).data
    lines = result.figure("curves").data[1:]
    assert [line.name for line in lines] == result.rankings and list(lines[0].x) == [0, 1, 2, 3, 4, 5, 6]
    assert set(result.tables()) == {"", "areas", "random", "scores"}
    with pytest.raises(ValueError, match="ranking must be"):
        result.figure("map", ranking="random")
    with pytest.raises(ValueError, match="ranking must be"):
        result.needed("best")
