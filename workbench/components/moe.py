"""A mixture of experts in place of one MLP, and how evenly its router uses them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.components.mlp import ACTIVATIONS, apply_gate
from workbench.config import TransformerConfig
from workbench.hooks import HookPoint


class MoE(nn.Module):
    """out = Σ_k weight_k · expert_k(x) over the n_experts_per_token experts that the router picks for each token.

    logits = x W_router + b_router; the experts with the largest logits are chosen (of equal ones the lowest); their
    weights are the softmax over the chosen logits (``renormalise``), or their shares of the softmax over all. Each
    expert is an ``MLP`` of width d_expert. Only chosen pairs of token and expert are computed.

    W_router [d_model, n_experts]; W_in, W_gate [n_experts, d_model, d_expert]; W_out [n_experts, d_expert, d_model];
    b_router [n_experts], b_in, b_gate [n_experts, d_expert], b_out [n_experts, d_model].

    ``hook_router_logits`` is [batch, pos, n_experts]; ``hook_expert_indices`` (int64, largest logit first) and
    ``hook_expert_weights`` are [batch, pos, n_experts_per_token]. Each acts on what follows: an edited choice is what
    runs, with the weights that the router gives to it. The softmax of half-precision logits is taken in float32, as the
    published models take it. There is no hook_pre, hook_pre_linear or hook_post, since no expert sees every token.

    Sources: Shazeer et al. 2017, equations 1 to 5 (without noise); Jiang et al. 2024 (Mixtral), section 2.1.

    Raises (when called):
        ValueError: a hook on ``hook_expert_indices`` returned an expert that does not exist.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        if cfg.moe is None:
            raise ValueError("a mixture of experts needs the configuration's moe, a MixtureOfExperts")
        self.cfg, self.moe = cfg, cfg.moe
        experts, width = self.moe.n_experts, self.moe.d_expert or cfg.d_mlp
        self.W_router = nn.Parameter(torch.empty(cfg.d_model, experts))
        self.b_router = nn.Parameter(torch.zeros(experts)) if self.moe.use_router_bias else None
        self.W_in = nn.Parameter(torch.empty(experts, cfg.d_model, width))
        self.W_out = nn.Parameter(torch.empty(experts, width, cfg.d_model))
        self.b_in: Tensor | None = nn.Parameter(torch.zeros(experts, width)) if cfg.use_mlp_bias else None
        self.b_out: Tensor | None = nn.Parameter(torch.zeros(experts, cfg.d_model)) if cfg.use_mlp_bias else None
        if cfg.gated_mlp:
            self.W_gate = nn.Parameter(torch.empty(experts, cfg.d_model, width))
            self.b_gate: Tensor | None = nn.Parameter(torch.zeros(experts, width)) if cfg.use_mlp_bias else None
        self.hook_router_logits = HookPoint()
        self.hook_expert_indices, self.hook_expert_weights = HookPoint(), HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, pos, d_model] → [batch, pos, d_model]."""
        indices, weights = self._route(x)
        tokens, flat_weights = x.flatten(0, 1), weights.flatten()
        # Pairs of token and expert, by expert: a pair's place in the flat list, divided by k, is its token.
        pairs_by_expert = indices.flatten().argsort(stable=True)
        sizes = torch.bincount(indices.flatten(), minlength=self.moe.n_experts).tolist()
        out = torch.zeros_like(tokens)
        for expert, pairs in enumerate(pairs_by_expert.split(sizes)):
            if len(pairs):
                token = pairs // self.moe.n_experts_per_token
                result = self._expert(tokens.index_select(0, token), expert)
                weighted = result * flat_weights.index_select(0, pairs)[:, None]
                out.index_add_(0, token, weighted)
        return out.view_as(x)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts and their weights, each [batch, pos, n_experts_per_token]."""
        logits = self.hook_router_logits(nn.functional.linear(x, self.W_router.T, self.b_router))
        wide = logits if logits.dtype == torch.float64 else logits.float()
        ranked = wide.detach().argsort(dim=-1, descending=True, stable=True)
        indices = self.hook_expert_indices(ranked[..., : self.moe.n_experts_per_token].contiguous())
        if ((indices < 0) | (indices >= self.moe.n_experts)).any():
            raise ValueError(
                f"a hook on {self.hook_expert_indices.name} must choose experts from 0 to {self.moe.n_experts - 1}, "
                f"got indices from {indices.min()} to {indices.max()}"
            )
        weights = wide.gather(-1, indices).softmax(-1) if self.moe.renormalise else wide.softmax(-1).gather(-1, indices)
        return indices, self.hook_expert_weights(weights.to(x.dtype))

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        """x [token, d_model] → [token, d_model]."""
        linear = nn.functional.linear(x, self.W_in[expert].T, _of(self.b_in, expert))  # [token, d_expert]
        if self.cfg.gated_mlp:
            pre = nn.functional.linear(x, self.W_gate[expert].T, _of(self.b_gate, expert))
            post = apply_gate(pre, linear, self.cfg)
        else:
            post = ACTIVATIONS[self.cfg.act_fn](linear)
        return nn.functional.linear(post, self.W_out[expert].T, _of(self.b_out, expert))


def expert_load(indices: Tensor, n_experts: int, real: Tensor | None = None) -> Tensor:
    """The share of the routed slots that each expert got, [n_experts], float32; they sum to 1. Even load: 1/n_experts.

    Args:
        indices: ``hook_expert_indices``, int64 [batch, pos, n_experts_per_token].
        real: bool [batch, pos], False at padding, which then counts for nothing.

    Raises:
        ValueError: no real token, ``real`` of another form, or an expert outside 0 … n_experts − 1.
    """
    if real is not None:
        _check_real(real, indices)
        indices = indices[real]
    if not indices.numel():
        raise ValueError("the load of experts needs at least one real token")
    if indices.min() < 0 or indices.max() >= n_experts:
        raise ValueError(f"indices must lie from 0 to {n_experts - 1}, got {indices.min()} to {indices.max()}")
    return torch.bincount(indices.flatten(), minlength=n_experts).float() / indices.numel()


def load_balance_loss(router_logits: Tensor, indices: Tensor, n_experts: int, real: Tensor | None = None) -> Tensor:
    """n_experts · Σ_e f_e P_e of one layer, a scalar: k where the load is even, up to n_experts where it is not.

    f_e is the mean number of slots that a token gives to expert e (it sums to k = n_experts_per_token), P_e the mean
    probability of e in the softmax over all logits. The gradient reaches the router through P alone.

    Source: Fedus et al. 2022 (Switch Transformer), equations 4 to 6 without the factor α; f over all k choices as
    Mixtral's implementation counts it.

    Args:
        router_logits: ``hook_router_logits`` [batch, pos, n_experts].
        indices: ``hook_expert_indices`` [batch, pos, n_experts_per_token].
        real: bool [batch, pos], False at padding, which then counts for nothing.

    Raises:
        ValueError: shapes that do not fit, or what ``expert_load`` refuses.
    """
    if router_logits.shape != (*indices.shape[:-1], n_experts):
        raise ValueError(
            f"router_logits must be {[*indices.shape[:-1], n_experts]} for {n_experts} experts, "
            f"got {list(router_logits.shape)}"
        )
    load = expert_load(indices, n_experts, real)
    wide = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    probabilities = wide.softmax(-1)
    probabilities = probabilities.flatten(0, -2) if real is None else probabilities[real]  # [token, n_experts]
    return n_experts * indices.shape[-1] * (load * probabilities.mean(0)).sum()


def _check_real(real: Tensor, indices: Tensor) -> None:
    if real.dtype != torch.bool or real.shape != indices.shape[:-1]:
        raise ValueError(
            f"real must be a bool tensor {list(indices.shape[:-1])}, got {list(real.shape)} in {real.dtype}"
        )


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
