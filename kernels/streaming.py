"""Attention in blocks of query rows, O(n) memory for z and lse."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.reference import attention_weights, reference_attention
from workbench.kernels.scores import ScoreRule, real_entries
from workbench.kernels.statistics import AttentionOutput, AttentionStatistics, StatisticsRequest

_ROWS = 128


def streaming_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sink_logits: Tensor | None, request: StatisticsRequest
) -> AttentionOutput:
    """The backend: arguments have been checked by ``attention``."""
    with torch.no_grad():
        statistics = reference_attention(q, k, v, rule, sink_logits, request).statistics
    values = real_entries(v, rule.mask.key_padding).to(torch.promote_types(v.dtype, torch.float32))
    values = values.repeat_interleave(q.shape[1] // v.shape[1], 1)
    columns = torch.arange(k.shape[2], device=q.device)
    z, lse = [q[:, :, :0]], [values.new_zeros(q.shape[:2] + (0,))]
    for row in torch.arange(q.shape[2], device=q.device).split(_ROWS):
        pattern, row_lse, _ = attention_weights(tile_scores(q, k, rule, row, columns), sink_logits)
        z.append((pattern @ values).to(q.dtype))
        lse.append(row_lse)
    whole_lse = torch.cat(lse, 2)
    statistics = AttentionStatistics({**statistics, "lse": whole_lse.detach()})
    return AttentionOutput(torch.cat(z, 2), whole_lse, statistics)


def tile_scores(q: Tensor, k: Tensor, rule: ScoreRule, row: Tensor, column: Tensor) -> Tensor:
    """Masked scores of any rows and columns, given by index: [batch, head, row, column]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, n_heads = q.shape[:2]
    q = real_entries(q, rule.mask.query_padding)[:, :, row].to(dtype)
    k = real_entries(k, rule.mask.key_padding)[:, :, column].to(dtype).repeat_interleave(n_heads // k.shape[1], 1)
    batches = torch.arange(batch, device=q.device)[:, None, None, None]
    heads = torch.arange(n_heads, device=q.device)[:, None, None]
    return rule.masked_scores(q @ k.mT, batches, heads, row[:, None], column)


def log_normaliser(q: Tensor, k: Tensor, rule: ScoreRule, sink_logits: Tensor | None, row: Tensor) -> Tensor:
    """lse of some rows, given by index: [batch, head, row]."""
    columns = torch.arange(k.shape[2], device=q.device)
    parts = [attention_weights(tile_scores(q, k, rule, rows, columns), sink_logits)[1] for rows in row.split(_ROWS)]
    return torch.cat(parts, 2)
