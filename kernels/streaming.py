"""Attention in O(n) memory on any device: a forward that yields lse, then the statistics from the known lse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from workbench.kernels.flash_cpu import fits_flash, flash_attention
from workbench.kernels.normaliser import Normaliser
from workbench.kernels.online import OnlineForward
from workbench.kernels.probes import probe_statistics
from workbench.kernels.reference import attention_weights, reference_attention
from workbench.kernels.scores import ScoreRule, all_finite, prepared, real_entries, rectangle_scores
from workbench.kernels.statistics import AttentionOutput, AttentionStatistics, StatisticsRequest
from workbench.kernels.tile_statistics import has_usual_cut, tile_cut, tile_statistics
from workbench.kernels.tiles import Tiling

_ROWS = 64  # rows whose scores against all keys the differentiable forward holds at a time


def streaming_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sink_logits: Tensor | None, request: StatisticsRequest
) -> AttentionOutput:
    """The backend: arguments have been checked by ``attention``."""
    # torch's operator turns NaN into 0 in silence; the reference says which rows it reaches.
    if q.numel() == 0 or k.numel() == 0 or not all_finite(q, k, rule):
        return reference_attention(q, k, v, rule, sink_logits, request)
    found: dict[str, Any] | None = None
    if fits_flash(q, k, rule):
        z, lse = flash_attention(q, k, v, rule)
    elif torch.is_grad_enabled() and any(_needs_gradient(q, k, v, rule)):
        z, lse = differentiable_attention(q, k, v, rule)
    else:
        forward = OnlineForward.of(q, k, v, rule)
        if request.is_empty or sink_logits is not None or not has_usual_cut(forward.tiling, request):
            forward.run()
        else:
            found = tile_statistics(forward.tiling, forward.normaliser, request, forward)
            found |= probe_statistics(forward.tiling, forward.normaliser, request)
        z, lse = forward.results()
    virtual_mass = None
    if sink_logits is not None:
        z, lse, virtual_mass = add_virtual_column(z, lse, sink_logits)
    if found is None:
        with torch.no_grad():
            found = _statistics(q, k, rule, lse, virtual_mass, request)
    return AttentionOutput(z=z.to(q.dtype), lse=lse, statistics=AttentionStatistics({"lse": lse.detach(), **found}))


def differentiable_attention(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """z and lse at working precision by autograd, one block of rows at a time, each recalculated in the backward."""
    queries, keys = prepared(q, k, rule)
    values = real_entries(v, rule.mask.key_padding).to(keys.dtype)
    values = values.repeat_interleave(q.shape[1] // v.shape[1], 1)
    columns = torch.arange(k.shape[2], device=q.device)

    def attend(queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, lse, _ = attention_weights(rectangle_scores(queries, keys, rule, rows, columns))
        return weights @ values, lse

    blocks = [
        checkpoint(attend, queries, keys, values, rows, use_reentrant=False, preserve_rng_state=False)
        for rows in torch.arange(q.shape[2], device=q.device).split(_ROWS)
    ]
    z, lse = zip(*blocks, strict=True)
    return torch.cat(z, 2), torch.cat(lse, 2)


def add_virtual_column(z: Tensor, lse: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z, lse and the virtual column's weight when every row also sees a key of that score and value 0."""
    sink = sink_logits.to(lse.dtype)[:, None].expand_as(lse)  # [batch, head, query]
    both = torch.stack((lse, sink))
    empty = both.amax(0) == -torch.inf
    total = both.masked_fill(empty, 0.0).logsumexp(0)
    share, virtual_mass = (both - total).exp()
    return z * share[..., None], total.masked_fill(empty, -torch.inf), virtual_mass


def _statistics(
    q: Tensor, k: Tensor, rule: ScoreRule, lse: Tensor, virtual_mass: Tensor | None, request: StatisticsRequest
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if virtual_mass is not None:
        found["virtual_mass"] = virtual_mass.detach()
    if request.is_empty:
        return found
    tiling = Tiling.of(q, k, rule)
    normaliser = Normaliser.of(tiling, lse, virtual_mass, *tile_cut(tiling, request))
    found |= probe_statistics(tiling, normaliser, request)
    found |= tile_statistics(tiling, normaliser, request)
    if virtual_mass is not None and request.entropy:
        found["entropy"] -= torch.xlogy(virtual_mass, virtual_mass)
    return found


def _needs_gradient(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> list[bool]:
    tensors = (q, k, v, rule.alibi_slopes, rule.offset_bias)
    return [tensor is not None and tensor.requires_grad for tensor in tensors]
