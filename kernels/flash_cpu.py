"""torch's own flash attention on CPUs, where the mask allows it: z at its speed, and an lse that has a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.kernels.masks import VisibleKeys
from workbench.kernels.scores import ScoreRule, real_entries, working_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fits_flash(q: Tensor, k: Tensor, rule: ScoreRule) -> bool:
    """Whether the operator knows this mask: every key, or the keys up to the row's own index, less padding.

    It masks before it scales, so a scale that is not positive would turn the mask round.
    """
    if q.device.type != "cpu" or not rule.only_scales or rule.scale <= 0:
        return False
    return _sees_everything(rule.mask) or _sees_top_left_triangle(rule.mask)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """z [batch, head, query, d_head] and lse [batch, head, query] at working precision, both differentiable.

    Half-precision inputs are widened: the operator's lse is off by 1e-4 for them, which statistics would inherit.
    """
    mask, dtype = rule.mask, working_dtype(q)
    q = real_entries(q, mask.query_padding).to(dtype)
    k, v = (real_entries(x, mask.key_padding).to(dtype) for x in (k, v))
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))  # it reads other layouts wrongly
    bias = None
    if mask.key_padding is not None:
        bias = torch.zeros_like(mask.key_padding, dtype=dtype).masked_fill(~mask.key_padding, -torch.inf)[:, None, None]
    z, lse = _Flash.apply(q, k, v, bias, not _sees_everything(mask), rule.scale)
    if mask.key_padding is not None or mask.query_padding is not None:
        empty = (mask.keys_per_query() == 0)[:, None]  # [batch, 1, query]
        z, lse = z.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
    return z, lse


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        z, lse = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        ctx.save_for_backward(q, k, v, bias, z, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.set_materialize_grads(False)
        return z, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """The operator differentiates z. For lse, ds = p · dlse: the same two products as for an attention to keys."""
        q, k, v, bias, z, lse = ctx.saved_tensors
        options = {"attn_mask": bias, "scale": ctx.scale}
        dq, dk, dv = None, None, None
        if dz is not None:
            dq, dk, dv = _backward(dz.contiguous(), q, k, v, z, lse, 0.0, ctx.causal, **options)
        if dlse is not None:
            mean_key = _forward(q, k, k, 0.0, ctx.causal, **options)[0]  # Σ_j p_ij k_j
            weighted = (dlse[..., None] * q).contiguous()
            received = _backward(weighted, q, k, k, mean_key, lse, 0.0, ctx.causal, **options)[2]  # Σ_i p_ij dlse_i q_i
            dq = _sum(dq, ctx.scale * dlse[..., None] * mean_key)
            dk = _sum(dk, ctx.scale * received)
        return dq, dk, dv, None, None, None


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second


def _sees_everything(mask: VisibleKeys) -> bool:
    return _rows_end_at(mask, torch.full_like(mask.end[:1], mask.n_keys))


def _sees_top_left_triangle(mask: VisibleKeys) -> bool:
    return _rows_end_at(mask, torch.arange(1, mask.n_queries + 1).clamp(max=mask.n_keys)[None])


def _rows_end_at(mask: VisibleKeys, end: Tensor) -> bool:
    """Whether every row that is no padding sees the columns from 0 to ``end`` [1, query]."""
    fits = (mask.first == 0) & (mask.end == end)
    if mask.query_padding is not None:
        fits = fits | ~mask.query_padding
    return bool(fits.all())
