"""Rectangles of the attention pattern, on demand."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.checks import check_scores, check_sink_logits
from workbench.kernels.masks import AttentionMask, is_whole
from workbench.kernels.reference import attention_weights
from workbench.kernels.scores import prepared, rectangle_scores

_ROWS = 64  # rows whose scores against all keys are held at a time


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

    Takes O(rows · n_keys) time and, besides the result, O(n_keys) memory.

    Args:
        rows, cols: slices of query rows and key columns, or int64 index tensors (negative ones count from the end).
        The others are those of ``attention``.

    Raises:
        ValueError: an argument that does not fit, or an index out of range.
    """
    rule = check_scores(q, k, mask, scale, softcap, alibi_slopes, offset_bias)
    check_sink_logits(sink_logits, q.shape[1], q.device)
    chosen_rows = _indices("rows", rows, q.shape[2], q.device)
    chosen_columns = _indices("cols", cols, k.shape[2], q.device)
    every_column = torch.arange(k.shape[2], device=q.device)
    queries, keys = prepared(q, k, rule)
    parts = [
        attention_weights(rectangle_scores(queries, keys, rule, part, every_column), sink_logits)[0][
            ..., chosen_columns
        ]
        for part in chosen_rows.split(_ROWS)
    ]
    return torch.cat(parts, 2)


def _indices(name: str, chosen: slice | Tensor, size: int, device: torch.device) -> Tensor:
    if isinstance(chosen, slice):
        parts = (chosen.start, chosen.stop, chosen.step)
        if not all(part is None or is_whole(part) for part in parts) or (chosen.step is not None and chosen.step < 1):
            raise ValueError(f"{name} must be a slice of whole numbers that goes forwards, got {chosen}")
        return torch.arange(size, device=device)[chosen]
    if not isinstance(chosen, Tensor) or chosen.dtype != torch.int64 or chosen.ndim != 1:
        found = f"{chosen.dtype} {list(chosen.shape)}" if isinstance(chosen, Tensor) else type(chosen).__name__
        raise ValueError(f"{name} must be a slice or an int64 tensor with one axis, got {found}")
    if chosen.numel() and (chosen.min() < -size or chosen.max() >= size):
        raise ValueError(f"{name} must lie within the {size} there are, got {int(chosen.min())} to {int(chosen.max())}")
    return (chosen % size if size else chosen).to(device)
