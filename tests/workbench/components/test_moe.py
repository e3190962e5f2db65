"""Mixtures of experts: which run, with what weights, as transformers' blocks do, and how even their load is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from workbench.components.mlp import MLP
from workbench.components.moe import MoE, expert_load, load_balance_loss
from workbench.config import MixtureOfExperts, TransformerConfig

N_EXPERTS = 5


def _moe(k: int = 2, *, renormalise: bool = True, use_router_bias: bool = True, **options: object) -> MoE:
    """In float64, every parameter drawn; experts are of odd width."""
    torch.manual_seed(0)
    chosen = {
        "n_layers": 1, "d_model": 6, "n_heads": 2, "d_head": 3, "d_mlp": 10, "d_vocab": 5, "n_ctx": 9,
        "act_fn": "silu", "gated_mlp": True, "use_mlp_bias": True,
        "moe": MixtureOfExperts(
            n_experts=N_EXPERTS, n_experts_per_token=k, d_expert=7, renormalise=renormalise,
            use_router_bias=use_router_bias,
        ),
        **options,
    }  # fmt: skip
    moe = MoE(TransformerConfig(**chosen)).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    return moe


def _x() -> Tensor:
    return torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _watched(moe: MoE, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and what the three hook points saw, after edits."""
    seen: dict[str, Tensor] = {}
    handles = [
        getattr(moe, name).register_forward_hook(lambda *of, name=name: seen.update({name: of[2]}))
        for name in ("hook_router_logits", "hook_expert_indices", "hook_expert_weights")
    ]
    out = moe(x)
    for handle in handles:
        handle.remove()
    return out, seen


def _all_experts(moe: MoE, x: Tensor) -> Tensor:
    """[expert, batch, pos, d_model]: each expert as the MLP that it is."""
    results = []
    for expert in range(moe.moe.n_experts):
        mlp = MLP(moe.cfg)
        for name, parameter in mlp.named_parameters():
            parameter.data = getattr(moe, name)[expert].detach()
        results.append(mlp(x))
    return torch.stack(results)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("k", [1, 2, N_EXPERTS])
def test_equals_the_dense_sum_with_zero_weights_elsewhere(k: int, renormalise: bool, gated: bool) -> None:
    moe, x = _moe(k, renormalise=renormalise, gated_mlp=gated), _x()
    probabilities = (x @ moe.W_router + moe.b_router).softmax(-1)
    kept = probabilities >= probabilities.sort(dim=-1).values[..., -k, None]
    dense = probabilities * kept
    if renormalise:
        dense = dense / dense.sum(-1, keepdim=True)
    expected = torch.einsum("bpe,ebpd->bpd", dense, _all_experts(moe, x))
    torch.testing.assert_close(moe(x), expected, rtol=0, atol=1e-12)


def test_exactly_k_distinct_experts_for_each_token_best_first() -> None:
    moe, x = _moe(3), _x()
    _, seen = _watched(moe, x)
    indices, weights = seen["hook_expert_indices"], seen["hook_expert_weights"]
    assert indices.shape == weights.shape == (2, 6, 3) and indices.dtype == torch.int64
    assert all(len(set(row)) == 3 for row in indices.flatten(0, 1).tolist())
    assert (weights.diff(dim=-1) <= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    torch.testing.assert_close(seen["hook_router_logits"], x @ moe.W_router + moe.b_router)


def test_all_experts_renormalised_is_the_softmax_weighted_sum() -> None:
    moe, x = _moe(N_EXPERTS), _x()
    weights = (x @ moe.W_router + moe.b_router).softmax(-1)
    expected = torch.einsum("bpe,ebpd->bpd", weights, _all_experts(moe, x))
    torch.testing.assert_close(moe(x), expected, rtol=0, atol=1e-12)


def test_shares_that_are_not_renormalised_are_those_of_the_softmax_over_all() -> None:
    moe, x = _moe(2, renormalise=False), _x()
    _, seen = _watched(moe, x)
    probabilities = seen["hook_router_logits"].softmax(-1)
    torch.testing.assert_close(
        seen["hook_expert_weights"], probabilities.gather(-1, seen["hook_expert_indices"]), rtol=1e-12, atol=0
    )
    assert (seen["hook_expert_weights"].sum(-1) < 1).all()


def test_equal_logits_go_to_the_lowest_experts() -> None:
    many = 64  # sorts of fewer are stable by chance
    moe = _moe(moe=MixtureOfExperts(n_experts=many, n_experts_per_token=5, use_router_bias=True))
    moe.W_router.data.zero_()
    moe.b_router.data = torch.arange(many, dtype=torch.float64) % 4 // 2  # 0 0 1 1 0 0 1 1 …
    _, seen = _watched(moe, _x())
    assert (seen["hook_expert_indices"] == torch.tensor([2, 3, 6, 7, 10])).all()


def test_gradients_reach_the_router_and_the_chosen_experts_only() -> None:
    moe, x = _moe(2), _x()[:1, :1].requires_grad_()
    out, seen = _watched(moe, x)
    out.pow(2).sum().backward()
    chosen = set(seen["hook_expert_indices"].flatten().tolist())
    for name in ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out"):
        gradient = getattr(moe, name).grad.flatten(1).abs().amax(1)
        assert {expert for expert in range(N_EXPERTS) if gradient[expert] > 0} == chosen, name
    assert moe.W_router.grad.abs().amax() > 0 and moe.b_router.grad.abs().amax() > 0


@pytest.mark.parametrize("renormalise", [True, False])
def test_gradients_are_those_of_the_numbers(renormalise: bool) -> None:
    moe = _moe(2, renormalise=renormalise)
    names = [name for name, _ in moe.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (_x()[:, :2].requires_grad_(), *(p.detach().requires_grad_() for p in moe.parameters()))
    assert torch.autograd.gradcheck(run, inputs)


def test_an_edited_choice_is_what_runs() -> None:
    moe, x = _moe(2), _x()
    moe.hook_expert_indices.add_hook(lambda indices, hook: torch.full_like(indices, 3))
    torch.testing.assert_close(moe(x), _all_experts(moe, x)[3], rtol=0, atol=1e-12)  # twice, half each


def test_an_edited_choice_gets_the_weights_that_the_router_gives_it() -> None:
    moe, x = _moe(2), _x()
    moe.hook_expert_indices.add_hook(lambda indices, hook: torch.tensor([4, 0]).expand_as(indices).clone())
    out, seen = _watched(moe, x)
    weights = seen["hook_router_logits"][..., [4, 0]].softmax(-1)
    torch.testing.assert_close(seen["hook_expert_weights"], weights, rtol=1e-12, atol=0)
    expected = torch.einsum("bpe,ebpd->bpd", weights, _all_experts(moe, x)[[4, 0]])
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_edited_weights_and_edited_logits_act() -> None:
    moe, x = _moe(2), _x()
    moe.hook_expert_weights.add_hook(lambda weights, hook: weights * 0)
    assert moe(x).abs().max() == 0
    moe.hook_expert_weights.remove_hooks()
    moe.hook_router_logits.add_hook(lambda logits, hook: torch.zeros_like(logits))
    expected = _all_experts(moe, x)[:2].mean(0)
    torch.testing.assert_close(moe(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("wrong", [-1, N_EXPERTS])
def test_a_chosen_expert_must_exist(wrong: int) -> None:
    moe = _moe(2)
    moe.hook_expert_indices.name = "blocks.0.mlp.hook_expert_indices"
    moe.hook_expert_indices.add_hook(lambda indices, hook: indices.fill_(wrong))
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.hook_expert_indices must choose experts from 0 to 4"):
        moe(_x())


def test_a_position_reads_itself_alone() -> None:
    moe, x = _moe(2), _x()
    other = x.clone()
    other[:, 2] += 1
    moved = ((moe(other) - moe(x)).abs() > 1e-9).any(dim=-1).any(dim=0)
    assert moved.tolist() == [i == 2 for i in range(6)]


def test_half_precision_routes_in_float32() -> None:
    moe = _moe(2).bfloat16()
    x = _x().bfloat16()
    out, seen = _watched(moe, x)
    assert out.dtype == seen["hook_expert_weights"].dtype == torch.bfloat16
    weights = seen["hook_router_logits"].float().gather(-1, seen["hook_expert_indices"]).softmax(-1)
    assert torch.equal(seen["hook_expert_weights"], weights.bfloat16())


def _fused(moe: MoE) -> dict[str, Tensor]:
    """Experts as Mixtral and Qwen3-MoE store them: [expert, out, in], the gate's rows before the linear ones."""
    return {
        "gate.weight": moe.W_router.T,
        "experts.gate_up_proj": torch.cat((moe.W_gate, moe.W_in), dim=-1).mT,
        "experts.down_proj": moe.W_out.mT,
    }


def test_equals_mixtral() -> None:
    moe = _moe(2, use_router_bias=False, use_mlp_bias=False).float()
    theirs = MixtralSparseMoeBlock(
        MixtralConfig(hidden_size=6, intermediate_size=7, num_local_experts=N_EXPERTS, num_experts_per_tok=2)
    )
    theirs.load_state_dict(_fused(moe))
    x = _x().float()
    torch.testing.assert_close(moe(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("renormalise", [True, False])
def test_equals_qwen3_moe(renormalise: bool) -> None:
    moe = _moe(3, renormalise=renormalise, use_router_bias=False, use_mlp_bias=False).float()
    theirs = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=6, moe_intermediate_size=7, num_experts=N_EXPERTS, num_experts_per_tok=3,
            norm_topk_prob=renormalise,
        )
    )  # fmt: skip
    theirs.load_state_dict(_fused(moe))
    x = _x().float()
    torch.testing.assert_close(moe(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


def test_equals_gpt_oss_beyond_its_limit() -> None:
    moe = _moe(2, act_fn="gelu_quick", glu_limit=1.5, glu_linear_offset=1.0).float()
    theirs = GptOssMLP(
        GptOssConfig(
            hidden_size=6, intermediate_size=7, num_local_experts=N_EXPERTS, num_experts_per_tok=2, swiglu_limit=1.5
        )
    )
    theirs.load_state_dict(
        {
            "router.weight": moe.W_router.T,
            "router.bias": moe.b_router,
            "experts.gate_up_proj": torch.stack((moe.W_gate, moe.W_in), dim=-1).flatten(2),  # by turns
            "experts.gate_up_proj_bias": torch.stack((moe.b_gate, moe.b_in), dim=-1).flatten(1),
            "experts.down_proj": moe.W_out,
            "experts.down_proj_bias": moe.b_out,
        }
    )
    x = _x().float()
    assert torch.einsum("bpd,edw->bpew", x, moe.W_gate).abs().max() > 1.5
    torch.testing.assert_close(moe(x), theirs.eval()(x)[0], rtol=1e-5, atol=1e-5)


def test_load_by_hand() -> None:
    indices = torch.tensor([[[0, 2], [0, 1], [2, 0]]])
    torch.testing.assert_close(expert_load(indices, 4), torch.tensor([3, 1, 2, 0]) / 6)
    real = torch.tensor([[False, True, True]])
    torch.testing.assert_close(expert_load(indices, 4, real), torch.tensor([2, 1, 1, 0]) / 4)


def test_balance_is_k_when_even_and_n_experts_when_one_takes_all() -> None:
    every = torch.arange(4)
    logits = torch.zeros(1, 4, 4)
    for k in (1, 2, 4):
        even = torch.stack([(every + i) % 4 for i in range(k)], dim=-1)[None]
        assert load_balance_loss(logits, even, 4).item() == pytest.approx(k)
    sure = torch.full((1, 4, 4), -1e4)
    sure[..., 0] = 1e4
    assert load_balance_loss(sure, torch.zeros(1, 4, 1, dtype=torch.int64), 4).item() == pytest.approx(4)


@pytest.mark.parametrize("padded", [False, True])
def test_balance_equals_transformers(padded: bool) -> None:
    logits = torch.randn(2, 7, N_EXPERTS, generator=torch.Generator().manual_seed(0))
    indices = logits.topk(2).indices
    real = torch.arange(7) >= torch.tensor([[3], [0]]) if padded else None
    theirs = load_balancing_loss_func((logits.flatten(0, 1),), N_EXPERTS, 2, None if real is None else real.long())
    torch.testing.assert_close(load_balance_loss(logits, indices, N_EXPERTS, real), theirs)


def test_balance_falls_when_the_router_is_trained_on_it() -> None:
    moe, x = _moe(1, use_router_bias=True), _x()
    moe.b_router.data[2] += 4  # a favourite
    optimizer = torch.optim.SGD([moe.W_router, moe.b_router], lr=0.2)
    losses, loads = [], []
    for _ in range(60):
        _, seen = _watched(moe, x)
        loss = load_balance_loss(seen["hook_router_logits"], seen["hook_expert_indices"], N_EXPERTS)
        losses.append(loss.item())
        loads.append(expert_load(seen["hook_expert_indices"], N_EXPERTS).max().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] and loads[-1] < loads[0]


def test_bad_statistics_input() -> None:
    indices, logits = torch.zeros(1, 3, 2, dtype=torch.int64), torch.zeros(1, 3, 4)
    with pytest.raises(ValueError, match="at least one real token"):
        expert_load(indices, 4, torch.zeros(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="real must be a bool tensor"):
        expert_load(indices, 4, torch.ones(1, 3))
    with pytest.raises(ValueError, match="indices must lie from 0 to 3"):
        expert_load(indices + 4, 4)
    with pytest.raises(ValueError, match="router_logits must be"):
        load_balance_loss(logits, indices, 5)
    with pytest.raises(ValueError, match="needs the configuration's moe"):
        MoE(dataclasses.replace(_moe().cfg, moe=None))
