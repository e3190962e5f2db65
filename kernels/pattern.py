"""Rectangles of the attention pattern, on demand."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.checks import check_scores, check_sink_logits
from workbench.kernels.masks import AttentionMask
from workbench.kernels.streaming import log_normaliser, tile_scores


def attention_pattern(
    q: Tensor,
    k: Tensor,
    *,
    mask: AttentionMask,
    rows: slice | Tensor,
    cols: slice | Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    offset_bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Weights of some queries on some keys, exact: [batch, head, row, column].

    Costs the normalisers of the chosen rows, O(rows · n_keys) time, and the rectangle's memory.

    Args:
        rows, cols: slices of query rows and key columns, or int64 index tensors (negative indices count from the end).
        The others as in ``attention``.

    Raises:
        ValueError: an argument that does not fit, or an index out of range.
    """
    rule = check_scores(q, k, mask, scale, softcap, alibi_slopes, offset_bias)
    check_sink_logits(sink_logits, q.shape[1], q.device)
    row = _indices("rows", rows, q.shape[2], q.device)
    column = _indices("cols", cols, k.shape[2], q.device)
    lse = log_normaliser(q, k, rule, sink_logits, row)  # [batch, head, row]
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    return (tile_scores(q, k, rule, row, column) - finite[..., None]).exp()


def _indices(name: str, chosen: slice | Tensor, size: int, device: torch.device) -> Tensor:
    if isinstance(chosen, slice):
        return torch.arange(size, device=device)[chosen]
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.int64 or chosen.ndim != 1:
        raise ValueError(f"{name} must be a slice or an int64 tensor with one axis")
    if chosen.numel() and (chosen.min() < -size or chosen.max() >= size):
        raise ValueError(f"{name} must lie within the {size} there are, got {int(chosen.min())} to {int(chosen.max())}")
    return (chosen % size if size else chosen).to(device)
