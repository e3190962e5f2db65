"""Refuses attention arguments that do not fit, before any backend sees them."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from workbench.kernels.masks import AttentionMask
from workbench.kernels.scores import ScoreRule, working_dtype

_LARGEST = 1e30  # float32 holds its products with other numbers that occur here
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_scores(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask,
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    offset_bias: Tensor | None,
) -> ScoreRule:
    """The rule that turns q·k into scores, from the arguments of ``attention``.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    check_layout("q", q)
    batch, n_heads, n_queries, d_head = q.shape
    _check_like_q("k", k, q)
    n_keys = k.shape[2]
    check_type("mask", mask, AttentionMask)
    if scale is None:
        scale = 1 / math.sqrt(d_head) if d_head else 1.0
    if not _is_number(scale) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    if softcap is not None and not (_is_number(softcap) and 0 < softcap <= _LARGEST):
        raise ValueError(f"softcap must be positive and at most {_LARGEST:g}, or None for no cap, got {softcap!r}")
    check_table("alibi_slopes", alibi_slopes, [n_heads], q.device)
    check_table("offset_bias", offset_bias, [n_heads, max(0, n_queries + n_keys - 1)], q.device)
    bound = mask.bind(batch, n_queries, n_keys, q.device)
    tables = (None if table is None else table.to(working_dtype(q)) for table in (alibi_slopes, offset_bias))
    return ScoreRule(bound, float(scale), softcap, *tables)


def check_values(v: Tensor, q: Tensor, k: Tensor) -> None:
    """Refuses values that do not go with the keys."""
    _check_like_q("v", v, q)
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, got {list(v.shape)}")


def check_sink_logits(sink_logits: Tensor | None, n_heads: int, device: torch.device) -> None:
    """Refuses sink logits that are not one number a head, -inf for none."""
    check_table("sink_logits", sink_logits, [n_heads], device)
    if sink_logits is not None and not (sink_logits <= _LARGEST).all():
        raise ValueError(f"sink_logits must be at most {_LARGEST:g}, got {sink_logits.tolist()}")


def check_type(name: str, value: object, kind: type) -> None:
    """Refuses objects of another class."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(f"{name} must be {article} {kind.__name__}, got {type(value).__name__}")


def check_layout(name: str, x: Tensor, axes: str = "[batch, head, position, d_head]") -> None:
    """Refuses what is no tensor of a supported float type with four axes."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        found = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor {axes}, got {found}")
    if x.dtype not in _FLOATS:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def _check_like_q(name: str, x: Tensor, q: Tensor) -> None:
    check_layout(name, x)
    if x.dtype != q.dtype:
        raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if x.shape[0] != q.shape[0] or x.shape[3] != q.shape[3]:
        raise ValueError(
            f"{name} must have the batch and d_head of q, {q.shape[0]} and {q.shape[3]}, got shape {list(x.shape)}"
        )
    if x.shape[1] == 0 or q.shape[1] % x.shape[1]:
        raise ValueError(f"{name} has {x.shape[1]} heads, which must divide the {q.shape[1]} heads of q")


def check_table(name: str, table: Tensor | None, shape: list[int], device: torch.device) -> None:
    """Refuses another shape, device or kind of number; None is no table."""
    if table is None:
        return
    if not isinstance(table, Tensor) or not table.is_floating_point() or list(table.shape) != shape:
        found = f"{table.dtype} {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"{name} must be a floating point tensor of shape {shape}, got {found}")
    if table.device != device:
        raise ValueError(f"{name} must be on the device of the other tensors, {device}, got {table.device}")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
