"""The public function: checks its arguments and hands them to a backend."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.kernels.checks import check_scores, check_sink_logits, check_type, check_values
from workbench.kernels.masks import AttentionMask
from workbench.kernels.reference import reference_attention
from workbench.kernels.scores import ScoreRule
from workbench.kernels.statistics import AttentionOutput, StatisticsRequest
from workbench.kernels.streaming import streaming_attention

HAS_TRITON = find_spec("triton") is not None
Backend = Callable[[Tensor, Tensor, Tensor, ScoreRule, Tensor | None, StatisticsRequest], AttentionOutput]


def _triton_attention(*arguments: Any) -> AttentionOutput:
    from workbench.kernels.triton_attention import triton_attention  # triton is not on every machine

    return triton_attention(*arguments)


BACKENDS: dict[str, Backend] = {
    "reference": reference_attention,
    "streaming": streaming_attention,
    "triton": _triton_attention,
}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    offset_bias: Tensor | None = None,
    sink_logits: Tensor | None = None,
    statistics: StatisticsRequest | None = None,
    backend: Literal["auto", "reference", "streaming", "triton"] = "auto",
) -> AttentionOutput:
    """Softmax attention, its log-normaliser, and the statistics asked for.

    scores = softcap · tanh(scale · q·k / softcap) - slope · |i - j| + offset_bias, then the mask, then softmax.

    Args:
        q: [batch, head, query, d_head], float16, bfloat16, float32 or float64.
        k, v: [batch, key/value head, key, d_head]; query head h reads key/value head h // (n_heads / n_kv_heads).
        mask: who sees whom.
        scale: multiplies q·k; None means 1 / sqrt(d_head).
        softcap: bounds the scores before any bias (Gemma 2).
        alibi_slopes: [head], subtracts slope · |i - j| (Press et al. 2022).
        offset_bias: [head, n_queries + n_keys - 1], a bias that depends on row - column alone; column c of the table is
            for ``row - column = c - (n_keys - 1)``.
        sink_logits: [head], the score of a virtual key with value 0 that every query sees.
        statistics: what else to return; None is nothing.
        backend: "auto" takes Triton on a GPU, streaming torch elsewhere; the choice never changes what is computed.

    Returns:
        z [batch, head, query, d_head] and lse [batch, head, query], both differentiable, and the detached statistics.
        A query without a visible key has z 0, lse -inf (its sink logit where there is one), masses 0.

    Raises:
        ValueError: naming the argument that does not fit.
    """
    rule = check_scores(q, k, mask, scale, softcap, alibi_slopes, offset_bias)
    check_values(v, q, k)
    check_sink_logits(sink_logits, q.shape[1], q.device)
    request = StatisticsRequest() if statistics is None else statistics
    check_type("statistics", request, StatisticsRequest)
    request.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    request = request.of_real_queries(mask.query_padding)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(('auto', *BACKENDS))}, got {backend!r}")
    if backend == "triton" and not HAS_TRITON:
        raise ValueError('backend "triton" needs the package triton, which is not installed; "auto" works without it')
    if backend == "auto":
        backend = "triton" if q.is_cuda and HAS_TRITON else "streaming"
    with torch.autocast(q.device.type, enabled=False):  # products are made at the inputs' precision or better
        return BACKENDS[backend](q, k, v, rule, sink_logits, request)
