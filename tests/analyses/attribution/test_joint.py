"""Joint ablation against a naive loop, and where redundancy is known from the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import JointAblation, joint_ablation, load_result
from workbench.analyses.tasks import PromptSet

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 3, "d_head": 4, "d_mlp": 12, "d_vocab": 23, "n_ctx": 12}


def saturated(written: tuple[float, ...]) -> HookedTransformer:
    """The stream holds a constant 1 at dimension 0; head h adds ``written[h]`` to dimension 1, of which token 0 is the
    readout. The final norm makes that o / √(1 + o²), with o what the heads write together."""
    d_model = 4
    cfg = TransformerConfig(
        n_layers=1, d_model=d_model, n_heads=len(written), d_head=2, d_mlp=1, d_vocab=4, n_ctx=4,
        normalization_type="RMS", eps=1e-12,
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[:, 0] = 1.0
        for norm in (model.blocks[0].ln1, model.ln_final):
            norm.w.fill_(d_model**-0.5)
        attention = model.blocks[0].attn
        attention.W_V[:, 0, 0] = 1.0
        attention.W_O[:, 0, 1] = torch.tensor(written, dtype=torch.float64)
        model.unembed.W_U[1, 0] = 1.0
    return model


def same_prompts(n: int = 44) -> PromptSet:
    """Any tokens; the target is token 0, the foil token 1."""
    tokens = torch.randint(0, 4, (n, 3), generator=torch.Generator().manual_seed(0))
    target = torch.zeros(n, dtype=torch.int64)
    real = torch.ones_like(tokens, dtype=torch.bool)
    return PromptSet(tokens, real, target, target + 1, None, "saturated", "tokens")


def test_heads_that_stand_in_for_each_other() -> None:
    """Two heads write 3 each, a third nothing: one alone is hardly missed, of both everything hangs."""
    result = joint_ablation(saturated((3.0, 3.0, 0.0)), same_prompts(), ablation="zero", n_random=2)
    row = result.rankings.index("ablation effect")
    assert list(result.coordinates["ablated"]) == [1, 2, 3]

    def logit(o: float) -> float:
        return o / (1 + o**2) ** 0.5

    one, both = logit(3) - logit(6), -logit(6)
    np.testing.assert_allclose(result["single"], [[one, one, 0]], atol=1e-9)
    np.testing.assert_allclose(result["joint"][row], [one, both, both], atol=1e-9)
    np.testing.assert_allclose(result["alone"][row], [one, 2 * one, 2 * one], atol=1e-9)
    np.testing.assert_allclose(result["excess"][row], [0, both - 2 * one, both - 2 * one], atol=1e-9)
    np.testing.assert_allclose(result["excess_low"][row, 1], both - 2 * one, atol=1e-6)  # all prompts are alike
    assert "Bars: 95 % bootstrap intervals" in result.drawing("excess").note
    assert result.peak("ablation effect") == 2
    assert "ablation effect, first 2: together -0.986, alone -0.075, difference -0.911 [-0.911, -0.911]" in (
        result.summary()
    )


def test_effects_that_are_independent_add_up() -> None:
    """So little is written that the norm's scale stays."""
    result = joint_ablation(saturated((2e-5, 1e-5, -1e-5)), same_prompts(), ablation="zero", n_random=2)
    np.testing.assert_allclose(result["excess"], 0, atol=1e-12)
    np.testing.assert_allclose(result["single"], [[-2e-5, -1e-5, 1e-5]], atol=1e-12)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    torch.manual_seed(0)
    cfg = TransformerConfig(**SIZES, normalization_type="RMS", initializer_range=0.4, init_mode="normal")
    return HookedTransformer(cfg).double().eval()


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 23, (5, 7), generator=generator)
    real = torch.arange(7) < torch.tensor([7, 5, 7, 6, 4])[:, None]
    target, foil = torch.tensor([[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]])
    return PromptSet(tokens.masked_fill(~real, 0), real, target, foil, None, "random", "random tokens")


@pytest.fixture(scope="module")
def result(model: HookedTransformer, prompts: PromptSet) -> JointAblation:
    return joint_ablation(model, prompts, {"mine": np.arange(6.0).reshape(2, 3)}, ablation="zero", n_random=2)


@torch.no_grad()
def difference(model: HookedTransformer, prompts: PromptSet, place: int, heads: list[tuple[int, int]]) -> float:
    """Logit difference of one prompt without its pads, heads zeroed one hook after the other."""

    def zero(head: int):
        def edit(z: Tensor, hook: object) -> Tensor:
            z = z.clone()
            z[:, :, head] = 0
            return z

        return edit

    tokens = prompts.tokens[place, prompts.real[place]]
    hooks = [(f"blocks.{layer}.attn.hook_z", zero(head)) for layer, head in heads]
    logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0, -1]
    return float(logits[prompts.target[place]] - logits[prompts.foil[place]])


def test_effects_are_those_of_a_naive_loop_on_the_other_half(model, prompts, result) -> None:
    _, unseen = prompts.halves(0)
    order = [(1, 2), (1, 1), (1, 0), (0, 2), (0, 1), (0, 0)]  # of "mine", the largest first
    row = result.rankings.index("mine")
    for place in range(len(unseen)):
        whole = difference(model, unseen, place, [])
        single = {head: difference(model, unseen, place, [head]) - whole for head in order}
        for column, n in enumerate(result.coordinates["ablated"]):
            joint = difference(model, unseen, place, order[:n]) - whole
            assert result["prompt_joint"][row, column, place] == pytest.approx(joint, abs=1e-10)
            alone = sum(single[head] for head in order[:n])
            assert result["prompt_alone"][row, column, place] == pytest.approx(alone, abs=1e-10)
        assert result["all_heads"][place] == pytest.approx(whole, abs=1e-10)
    np.testing.assert_allclose(result["excess"], result["joint"] - result["alone"], atol=1e-12)
    assert np.isnan(result["excess_low"]).all()  # two prompts
    ends = result["joint"][:, -1]
    np.testing.assert_allclose(ends, ends[0], atol=1e-10)  # all heads are all heads in any order
    assert (result["random_low"] <= result["random_high"]).all()
    middle = (result["random_low"] + result["random_high"]) / 2  # of two orders
    np.testing.assert_allclose(result["joint"][-1], middle, atol=1e-12)


def test_tokens_are_scored_by_their_loss(model, prompts) -> None:
    found = joint_ablation(model, prompts.tokens, attention_mask=prompts.real, n_random=2)
    assert found.quantities["joint"].unit == "nats per token" and "mine" not in found.rankings


def test_what_makes_no_sense_is_refused(model, prompts) -> None:
    for options, message in (
        ({"ablation": "resample"}, "ablation must be"), ({"n_random": 1}, "n_random"), ({"metric": "loss"}, "metric"),
        ({"rankings": {"mine": np.zeros((3, 2))}}, "number for each head"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            joint_ablation(model, prompts, **options)
    with pytest.raises(ValueError, match="one prompt"):
        joint_ablation(model, prompts.subset([0]))


def test_figures_and_files(result, tmp_path) -> None:
    for kind in result.figure_kinds:
        for theme in ("light", "dark"):
            assert result.figure(kind, captioned=True, theme=theme).data
    together = [trace for trace in result.figure("curves").data if trace.name == "together"]
    np.testing.assert_array_equal(together[1].y, result["joint"][1])
    again = load_result(result.save(tmp_path / "joint"))
    assert isinstance(again, JointAblation) and again.summary() == result.summary()
    assert set(again.tables()) == {"", "heads", "random", "scores"}
    with pytest.raises(ValueError, match="ranking must be"):
        result.peak("best")
