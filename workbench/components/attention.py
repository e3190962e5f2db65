"""Multi-head attention with every stage exposed. It knows no architecture: a family is a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.components.heads import HeadWeights, project
from workbench.config import TransformerConfig
from workbench.context import AttentionContext
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
from workbench.statistics import STATISTIC_HOOKS, WITHIN_ONE_TEXT


class Attention(HeadWeights):
    """z = softmax(softcap(scale · q kᵀ) + position bias + mask) v per head, out = Σ_heads z W_O + b_O.

    Sources: Vaswani et al. 2017, section 3.2; Ainslie et al. 2023 (fewer key/value heads). By configuration: a norm of
    q and k (Henry et al. 2020), before or after their rotation; a soft cap (Gemma 2); and a score per head for
    attending to nothing, ``sink_logits`` [n_heads] (GPT-OSS), which takes its share of the softmax.
    With ``cross`` the keys and values are another text's, without positions (Vaswani et al. 2017, section 3.2.3).

    What listens decides the cost. A hook on ``hook_pattern`` or ``hook_attn_scores`` materialises both
    [batch, n_heads, query, key]; otherwise the kernel runs in O(n) memory and emits the statistics that have a hook.
    While a cache is in use, keys are those of all remembered tokens in hook_rot_k, hook_attn_scores and hook_pattern,
    and those of the new ones in hook_k and hook_v.

    Raises (when called):
        ValueError: ``attention_backend="flash"`` with a hook that needs the pattern.
    """

    def __init__(self, cfg: TransformerConfig, layer: int, *, cross: bool = False) -> None:
        super().__init__(cfg, rotary=cfg.positional_embedding_type == "rotary" and not cross)
        self.layer = layer
        self.sink_logits: Tensor | None = nn.Parameter(torch.zeros(cfg.n_heads)) if cfg.use_sink_logits else None
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.statistic_hooks = [name for name in STATISTIC_HOOKS if not (cross and name in WITHIN_ONE_TEXT)]
        for name in self.statistic_hooks:
            self.add_module(name, ReadOnlyHookPoint())

    def forward(
        self, q_input: Tensor, k_input: Tensor, v_input: Tensor, context: AttentionContext, *,
        rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Inputs [batch, pos, d_model], or with a head axis before d_model; returns [batch, pos, d_model], or with
        ``rows``, int64 [batch, row], the outputs of those positions alone."""
        q, k, v = self.queries_keys_values(q_input, k_input, v_input, context)
        output = self._attend(q, k, v, context, context.layer_request(self._listening()))
        for name in self.statistic_hooks:
            point = getattr(self, name)
            if point.has_hooks():
                point(STATISTIC_HOOKS[name].read(output))
        context.collect(output)
        return self.out(self.hook_z(output.z.transpose(1, 2)), rows)  # z [batch, pos, n_heads, d_head]

    def queries_keys_values(
        self, q_input: Tensor, k_input: Tensor, v_input: Tensor, context: AttentionContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the scores are made of and what they weigh: q [batch, n_heads, query, d_head], k and v
        [batch, n_key_value_heads, key, d_head], normalised and rotated; a cache has been extended."""
        q = self.hook_q(project(q_input, self.W_Q, self.b_Q))  # [batch, pos, n_heads, d_head]
        k = self.hook_k(project(k_input, self.W_K, self.b_K))  # [batch, pos, n_key_value_heads, d_head]
        v = self.hook_v(project(v_input, self.W_V, self.b_V))
        normalises = self.cfg.qk_norm is not None
        if normalises and not self.cfg.qk_norm_after_rotary:
            q, k = self._normalise(q, self.q_norm), self._normalise(k, self.k_norm)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        positions = context.positions
        if positions.query_rotation is not None and positions.key_rotation is not None:
            q = self.hook_rot_q(self._rotate(q, positions.query_rotation))
            k = self.hook_rot_k(self._rotate(k, positions.key_rotation))
        if normalises and self.cfg.qk_norm_after_rotary:
            q, k = self._normalise(q, self.q_norm), self._normalise(k, self.k_norm)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def score_options(self, context: AttentionContext) -> dict[str, Any]:
        """The options of ``workbench.kernels.attention_scores`` under which q and k give this layer's scores."""
        return {
            "mask": context.mask,
            "scale": self.cfg.query_key_scale,
            "softcap": self.cfg.attn_scores_soft_cap,
            "alibi_slopes": context.positions.alibi_slopes,
            "offset_bias": context.positions.offset_bias,
        }

    def _listening(self) -> list[str]:
        return [name for name in self.statistic_hooks if getattr(self, name).has_hooks()]

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
        """q [batch, n_heads, query, d_head], k and v [batch, n_key_value_heads, key, d_head]."""
        if not self._materialises():
            return attention(q, k, v, sink_logits=self.sink_logits, statistics=request, **self.score_options(context))
        scores = attention_scores(q, k, **self.score_options(context))  # [batch, head, query, key]
        scores = self.hook_attn_scores(scores)
        pattern, lse, virtual_mass = attention_weights(scores, self.sink_logits)
        pattern = self.hook_pattern(pattern)
        per_group = pattern.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [batch, kv head, group · query, key]
        z = (per_group.to(v.dtype) @ v).view_as(q)
        found = pattern_statistics(
            pattern.detach(), mask=context.mask, request=request or StatisticsRequest(), virtual_mass=virtual_mass
        )
        return AttentionOutput(z=z, lse=lse, statistics=AttentionStatistics({"lse": lse.detach(), **found}))
