"""Multi-head attention with every stage exposed. It knows no architecture: a family is a configuration."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.components.positions import rotate
from workbench.config import TransformerConfig
from workbench.hooks import HookPoint, ReadOnlyHookPoint
from workbench.kernels import (
    AttentionOutput,
    AttentionStatistics,
    StatisticsRequest,
    attention,
    attention_scores,
    attention_weights,
    pattern_statistics,
)
from workbench.statistics import STATISTIC_HOOKS, AttentionContext


class Attention(nn.Module):
    """z = softmax(scale · q kᵀ + mask) v per head, out = Σ_heads z W_O + b_O (Vaswani et al. 2017, section 3.2).

    W_Q [n_heads, d_model, d_head]; W_K, W_V [n_key_value_heads, d_model, d_head]; W_O [n_heads, d_head, d_model].
    Query head h reads key/value head h // (n_heads // n_key_value_heads) (Ainslie et al. 2023).

    What listens decides the cost. A hook on ``hook_pattern`` or ``hook_attn_scores`` materialises both
    [batch, n_heads, query, key]; otherwise the kernel runs in O(n) memory and emits the statistics that have a hook.

    Raises:
        ValueError: ``attention_backend="flash"`` with a hook that needs the pattern.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads, kv_heads, bias = cfg.n_heads, cfg.n_key_value_heads, cfg.use_qkv_bias
        self.W_Q = nn.Parameter(torch.empty(heads, cfg.d_model, cfg.d_head))
        self.W_K = nn.Parameter(torch.empty(kv_heads, cfg.d_model, cfg.d_head))
        self.W_V = nn.Parameter(torch.empty(kv_heads, cfg.d_model, cfg.d_head))
        self.W_O = nn.Parameter(torch.empty(heads, cfg.d_head, cfg.d_model))
        self.b_Q: Tensor | None = nn.Parameter(torch.zeros(heads, cfg.d_head)) if bias else None
        self.b_K: Tensor | None = nn.Parameter(torch.zeros(kv_heads, cfg.d_head)) if bias else None
        self.b_V: Tensor | None = nn.Parameter(torch.zeros(kv_heads, cfg.d_head)) if bias else None
        self.b_O: Tensor | None = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.use_attn_out_bias else None

        self.hook_q_input, self.hook_k_input, self.hook_v_input = HookPoint(), HookPoint(), HookPoint()
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if cfg.positional_embedding_type == "rotary":
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.hook_z, self.hook_result = HookPoint(), HookPoint()
        for name in STATISTIC_HOOKS:
            self.add_module(name, ReadOnlyHookPoint())

    def forward(self, q_input: Tensor, k_input: Tensor, v_input: Tensor, context: AttentionContext) -> Tensor:
        """Inputs [batch, pos, d_model], or with a head axis before d_model; returns [batch, pos, d_model]."""
        q = self.hook_q(_project(q_input, self.W_Q, self.b_Q))  # [batch, pos, n_heads, d_head]
        k = self.hook_k(_project(k_input, self.W_K, self.b_K))  # [batch, pos, n_key_value_heads, d_head]
        v = self.hook_v(_project(v_input, self.W_V, self.b_V))
        if context.rotation is not None:
            q = self.hook_rot_q(rotate(q, context.rotation))
            k = self.hook_rot_k(rotate(k, context.rotation))

        request = context.layer_request(self._listening())
        output = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context, request)
        for name, hook in STATISTIC_HOOKS.items():
            point = getattr(self, name)
            if point.has_hooks():
                point(hook.read(output))
        context.collect(output)
        z = self.hook_z(output.z.transpose(1, 2))  # [batch, pos, n_heads, d_head]
        return self._mix_heads(z)

    def _listening(self) -> list[str]:
        return [name for name in STATISTIC_HOOKS if getattr(self, name).has_hooks()]

    def _materialises(self) -> bool:
        listeners = [p.name for p in (self.hook_attn_scores, self.hook_pattern) if p.has_hooks()]
        if listeners and self.cfg.attention_backend == "flash":
            raise ValueError(
                f"{listeners[0]} has a hook, but attention_backend='flash' never builds the pattern. "
                "Use attention_backend='auto', or hook a statistic (hook_entropy, hook_sink_mass, …) instead."
            )
        return bool(listeners) or self.cfg.attention_backend == "materialised"

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, request: StatisticsRequest | None
    ) -> AttentionOutput:
        """q [batch, n_heads, pos, d_head], k and v [batch, n_key_value_heads, pos, d_head]."""
        mask, scale = context.mask, self.cfg.query_key_scale
        if not self._materialises():
            return attention(q, k, v, mask=mask, scale=scale, statistics=request)
        scores = self.hook_attn_scores(attention_scores(q, k, mask=mask, scale=scale))  # [batch, head, query, key]
        pattern, lse, _ = attention_weights(scores)
        pattern = self.hook_pattern(pattern)
        per_group = pattern.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [batch, kv head, group · query, key]
        z = (per_group.to(v.dtype) @ v).view_as(q)
        of_pattern = {} if request is None else pattern_statistics(pattern.detach(), mask=mask, request=request)
        return AttentionOutput(z=z, lse=lse, statistics=AttentionStatistics({"lse": lse.detach(), **of_pattern}))

    def _mix_heads(self, z: Tensor) -> Tensor:
        if self.cfg.use_attn_result:
            result = self.hook_result(torch.einsum("bphe,hed->bphd", z, self.W_O))
            out = result.sum(dim=2)
            return out if self.b_O is None else out + self.b_O
        return nn.functional.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)


def _project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [batch, pos, (head,) d_model], weight [head, d_model, d_head] → [batch, pos, head, d_head]."""
    if x.dim() == 4:
        projected = torch.einsum("bphd,hde->bphe", x, weight)
        return projected if bias is None else projected + bias
    flat_bias = None if bias is None else bias.flatten()
    flat = nn.functional.linear(x, weight.transpose(1, 2).flatten(0, 1), flat_bias)
    return flat.unflatten(-1, (weight.shape[0], weight.shape[2]))
