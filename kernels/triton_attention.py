"""The Triton backend: a forward with the statistics that fit into it, then probes and a pass over columns.

float64, head dimensions above 256, empty tensors and gradients of ``offset_bias`` go to the streaming backend, and so
does the search for the largest keys of each row, which are found in torch with the normaliser of the forward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from workbench.kernels.matches import MatchRuns
from workbench.kernels.normaliser import Normaliser
from workbench.kernels.scores import ScoreRule, all_finite
from workbench.kernels.statistics import (
    AttentionOutput,
    AttentionStatistics,
    StatisticsRequest,
    received_statistics,
)
from workbench.kernels.streaming import streaming_attention
from workbench.kernels.tile_statistics import tile_statistics
from workbench.kernels.tiles import Tiling
from workbench.kernels.triton_passes import Weights, run_backward, run_forward
from workbench.kernels.triton_plan import Plan

_LARGEST_HEAD = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INTERPRETED = triton.knobs.runtime.interpret


@torch.compiler.disable  # launches are planned in Python, from values on the device
def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, sink_logits: Tensor | None, request: StatisticsRequest
) -> AttentionOutput:
    """The backend: arguments have been checked by ``attention``.

    Raises:
        ValueError: tensors that are not on a GPU.
    """
    if not (q.is_cuda or _INTERPRETED):
        raise ValueError(f'backend "triton" needs tensors on a GPU, got {q.device}: move them, or use backend="auto"')
    needs_bias_gradient = rule.offset_bias is not None and rule.offset_bias.requires_grad and torch.is_grad_enabled()
    hides_nan = request.top_keys > 0 and not all_finite(q, k, rule)  # the search would not say which rows it reaches
    too_large = q.shape[3] > _LARGEST_HEAD
    if q.dtype not in _DTYPES or too_large or 0 in (*q.shape, *k.shape) or needs_bias_gradient or hides_nan:
        return streaming_attention(q, k, v, rule, sink_logits, request)
    dtype = q.dtype
    if _INTERPRETED and dtype == torch.bfloat16:  # which the interpreter gets wrong
        q, k, v = q.float(), k.float(), v.float()
    plan = Plan.of(q, k, rule)
    z, lse, *rows = _Attention.apply(q, k, v, rule.alibi_slopes, sink_logits, plan, request)
    found = {name: row for name, row in zip(_ROWS, rows, strict=True) if row is not None}
    with torch.no_grad():
        statistics = {"lse": lse.detach(), **_later_statistics(q, k, plan, sink_logits, found, request)}
    return AttentionOutput(z=z.to(dtype), lse=lse, statistics=AttentionStatistics(statistics))


_ROWS = ("largest", "log_sum", "virtual_mass", "entropy", "max_weight", "argmax_key", "mean_distance")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        sinks: Tensor | None,
        plan: Plan,
        request: StatisticsRequest,
    ) -> tuple[Tensor | None, ...]:
        z, rows = run_forward(q, k, v, sinks, plan, request)
        ctx.plan = plan
        needed = (rows.get(name) for name in ("lse", "largest", "log_sum", "virtual_mass"))
        ctx.save_for_backward(q, k, v, slopes, sinks, z, *needed)
        outputs = z, rows["lse"], *(rows.get(name) for name in _ROWS)
        ctx.mark_non_differentiable(*(row for row in outputs[2:] if row is not None))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor, dlse: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        q, k, v, slopes, sinks, z, lse, largest, log_sum, virtual_mass = ctx.saved_tensors
        dlse = dlse.masked_fill(lse == -torch.inf, 0.0)  # an empty row passes nothing on, whatever comes in
        delta = (z.float() * dz.float()).sum(3) - dlse  # [batch, head, query]
        dq, dk, dv, slope_terms = run_backward(q, k, v, dz, delta, largest, log_sum, ctx.plan)
        d_slopes = d_sinks = None
        if slopes is not None and ctx.needs_input_grad[3]:
            d_slopes = slope_terms.sum((0, 2)).to(slopes.dtype)
        if sinks is not None and ctx.needs_input_grad[4]:
            d_sinks = -(virtual_mass * delta).sum((0, 2)).to(sinks.dtype)
        return dq, dk, dv, d_slopes, d_sinks, None, None


def _later_statistics(
    q: Tensor,
    k: Tensor,
    plan: Plan,
    sinks: Tensor | None,
    rows: dict[str, Tensor],
    request: StatisticsRequest,
) -> dict[str, Any]:
    """What the forward found, and what takes its normaliser to find."""
    largest, log_sum = rows.pop("largest"), rows.pop("log_sum")
    found: dict[str, Any] = dict(rows)
    weights = Weights(q, k, plan, largest, log_sum)
    if request.sink_keys is not None:
        found["sink_mass"] = weights.sink(request.sink_positions(q.shape[0], k.shape[2], q.device))
    if request.offsets:
        found["offset_mass"] = weights.offsets(torch.tensor(request.offsets, device=q.device))
    if request.match:
        runs = {name: MatchRuns.of(labels, plan.rule.mask) for name, labels in request.labels().items()}
        found["match_mass"] = {name: weights.matches(run) for name, run in runs.items()}
    if request.classes is not None:
        indicators = request.class_indicators(torch.float32)[:, None].expand(-1, k.shape[1], -1, -1)
        found["class_mass"], _ = run_forward(q, k, indicators, sinks, plan, StatisticsRequest())
    if request.received or request.pooled is not None:
        found |= weights.columns(request)
    if request.received:
        found |= received_statistics(found["received"], plan.rule.mask, request.query_weights)
    if request.top_keys:
        tiling = Tiling.of(q, k, plan.natural)
        shape = tiling.queries.shape[:4]
        normaliser = Normaliser(largest.view(shape), log_sum.view(shape))
        found |= tile_statistics(tiling, normaliser, StatisticsRequest(top_keys=request.top_keys))
    return found
