"""Attention written as its definition: the whole pattern in memory, any float type, differentiable in everything.

Every other backend is tested against this one. A model uses its parts where a layer's scores or pattern are looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.kernels.checks import check_layout, check_scores, check_sink_logits, check_table, check_type
from workbench.kernels.masks import AttentionMask, VisibleKeys
from workbench.kernels.scores import ScoreRule, prepared, real_entries, rectangle_scores
from workbench.kernels.statistics import (
    AttentionOutput,
    AttentionStatistics,
    StatisticsRequest,
    received_statistics,
    weights_per_head,
)


def attention_scores(
    q: Tensor,
    k: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    offset_bias: Tensor | None = None,
) -> Tensor:
    """Scores as the softmax takes them, -inf where the mask hides a pair: [batch, head, query, key].

    Arguments as in ``attention``. float32 for half-precision inputs, else in their dtype.

    Raises:
        ValueError: an argument that does not fit.
    """
    return _scores(q, k, check_scores(q, k, mask, scale, softcap, alibi_slopes, offset_bias))


def attention_weights(scores: Tensor, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Softmax over keys, with a virtual extra column per head where ``sink_logits`` [head] are given.

    Args:
        scores: [batch, head, query, key], -inf for hidden pairs.

    Returns:
        The pattern [batch, head, query, key], lse [batch, head, query], and the virtual column's weight
        [batch, head, query] or None. A row without a key has weights 0 and lse -inf (or its sink logit).

    Raises:
        ValueError: scores of another layout, or sink logits that do not fit them.
    """
    check_layout("scores", scores, "[batch, head, query, key]")
    n_keys = scores.shape[3]
    if sink_logits is None:
        column = scores.new_full((*scores.shape[:3], 1), -torch.inf)
    else:
        check_sink_logits(sink_logits, scores.shape[1], scores.device)
        column = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat((scores, column), 3)
    # logsumexp of -inf alone has no gradient: such rows take a constant instead, and are put right afterwards.
    empty = scores.amax(3, keepdim=True) == -torch.inf
    lse = scores.masked_fill(empty, 0.0).logsumexp(3, keepdim=True)
    weights = (scores - lse).exp()
    lse = lse.masked_fill(empty, -torch.inf)[..., 0]
    return weights[..., :n_keys], lse, None if sink_logits is None else weights[..., n_keys]


def pattern_statistics(
    pattern: Tensor, *, mask: AttentionMask, request: StatisticsRequest, virtual_mass: Tensor | None = None
) -> AttentionStatistics:
    """Every requested statistic of the pattern [batch, head, query, key] that multiplies v; lse is no part of it.

    ``virtual_mass`` [batch, head, query] is the weight of the virtual column where there are sink logits; the entropy
    includes it.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_layout("pattern", pattern, "[batch, head, query, key]")
    check_type("mask", mask, AttentionMask)
    check_type("request", request, StatisticsRequest)
    check_table("virtual_mass", virtual_mass, list(pattern.shape[:3]), pattern.device)
    batch, n_heads, n_queries, n_keys = pattern.shape
    request.check(batch, n_heads, n_queries, n_keys, pattern.device)
    request = request.of_real_queries(mask.query_padding)
    bound = mask.bind(batch, n_queries, n_keys, pattern.device)
    pattern = real_entries(pattern, mask.query_padding)
    return AttentionStatistics(_statistics(pattern, bound, request, virtual_mass))


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sink_logits: Tensor | None, request: StatisticsRequest
) -> AttentionOutput:
    """The backend: arguments have been checked by ``attention``."""
    pattern, lse, virtual_mass = attention_weights(_scores(q, k, rule), sink_logits)
    v = real_entries(v, rule.mask.key_padding).to(pattern.dtype)
    z = (pattern @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).to(q.dtype)
    statistics = _statistics(pattern, rule.mask, request, virtual_mass)
    return AttentionOutput(z=z, lse=lse, statistics=AttentionStatistics({"lse": lse.detach(), **statistics}))


def _scores(q: Tensor, k: Tensor, rule: ScoreRule) -> Tensor:
    row, column = _row_and_column(rule.mask, q.device)
    return rectangle_scores(*prepared(q, k, rule), rule, row[:, 0], column)


def _row_and_column(mask: VisibleKeys, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(mask.n_queries, device=device)[:, None], torch.arange(mask.n_keys, device=device)


def _statistics(
    pattern: Tensor, mask: VisibleKeys, request: StatisticsRequest, virtual_mass: Tensor | None
) -> dict[str, Any]:
    """The definitions, one after the other, on the detached pattern p [batch, head, query, key]."""
    p = pattern.detach().to(torch.promote_types(pattern.dtype, torch.float32))
    row, column = _row_and_column(mask, p.device)
    found: dict[str, Any] = {}
    if virtual_mass is not None:
        found["virtual_mass"] = virtual_mass.detach()
    if request.entropy:
        found["entropy"] = -torch.xlogy(p, p).sum(3)
        if virtual_mass is not None:
            found["entropy"] -= torch.xlogy(found["virtual_mass"], found["virtual_mass"])
    if request.max_weight:
        weights, keys = _largest(p, 1)
        found["max_weight"], found["argmax_key"] = weights[..., 0], keys[..., 0]
    if request.mean_distance:
        found["mean_distance"] = (p * mask.distance(row, column)).sum(3)
    if request.sink_keys is not None:
        positions = request.sink_positions(p.shape[0], mask.n_keys, p.device)  # [batch, m]
        found["sink_mass"] = _at(p, positions[:, None, None]).sum(3)
    if request.offsets:
        back = torch.tensor(request.offsets, device=p.device)
        found["offset_mass"] = _at(p, row + mask.query_offset - back)
    if request.match:
        earlier = column < row + mask.query_offset  # [query, key]
        found["match_mass"] = {
            name: (p * (earlier & labels.pairs())[:, None]).sum(3) for name, labels in request.labels().items()
        }
    if request.classes is not None:
        found["class_mass"] = p @ request.class_indicators(p.dtype)[:, None]
    if request.received:
        weighted = p if request.query_weights is None else p * weights_per_head(request.query_weights)[..., None]
        found |= received_statistics(weighted.sum(2), mask, request.query_weights)
    if request.pooled is not None:
        found["pooled_max"], found["pooled_sum"] = _pool(p, *request.pooled)
    if request.top_keys:
        found["top_weights"], found["top_keys"] = _largest(p, request.top_keys)
    return found


def _largest(p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest weights of every row and their columns, ties to the lowest; without weight, column -1."""
    weights, keys = pad(p, (0, max(0, count - p.shape[3]))).sort(dim=3, descending=True, stable=True)
    weights, keys = weights[..., :count], keys[..., :count]
    return weights, keys.masked_fill(weights == 0, -1)


def _at(p: Tensor, columns: Tensor) -> Tensor:
    """Weights on given columns, broadcastable to [batch, head, query, m]; 0 where there is no such column."""
    exists = (columns >= 0) & (columns < p.shape[3])
    indices = columns.where(exists, p.shape[3]).expand(*p.shape[:3], columns.shape[-1])
    return pad(p, (0, 1)).gather(3, indices)


def _pool(p: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Maximum and sum over blocks of rows and columns, the last ones ragged."""
    p = pad(p, (0, -p.shape[3] % columns, 0, -p.shape[2] % rows))
    blocks = p.unflatten(3, (-1, columns)).unflatten(
        2, (-1, rows)
    )  # [batch, head, row block, row, column block, column]
    return blocks.amax((3, 5)), blocks.sum((3, 5))
