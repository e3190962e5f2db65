"""Launches of the Triton kernels: tensors and a plan in, tensors out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from workbench.kernels.launch import launch, tiles
from workbench.kernels.matches import MatchRuns
from workbench.kernels.scores import LOG2_E
from workbench.kernels.statistics import StatisticsRequest, weights_per_head
from workbench.kernels.triton_backward import key_gradient_kernel, query_gradient_kernel
from workbench.kernels.triton_columns import columns_kernel
from workbench.kernels.triton_forward import forward_kernel
from workbench.kernels.triton_plan import Plan, alignment, edges, padded, strides
from workbench.kernels.triton_probes import MATCH, OFFSET, SINK, probe_kernel


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, request: StatisticsRequest
) -> tuple[Tensor, dict[str, Tensor]]:
    """z [batch, head, query, d_v] in the type of v, and by name one number per query [batch, head, query]."""
    statistics = request.entropy or request.max_weight or request.mean_distance
    sizes = tiles("forward with statistics" if statistics else "forward", max(q.shape[3], v.shape[3]), q.element_size())
    batch, n_heads, n_queries, d_head = q.shape
    z = torch.empty(batch, n_heads, n_queries, v.shape[3], dtype=v.dtype, device=q.device)
    wanted = {
        "lse": True,
        "largest": True,
        "log_sum": True,
        "virtual_mass": sinks is not None,
        "entropy": request.entropy,
        "max_weight": request.max_weight,
        "argmax_key": request.max_weight,
        "mean_distance": request.mean_distance,
    }
    kind = {"argmax_key": torch.int64}
    rows = {
        name: torch.empty(q.shape[:3], dtype=kind.get(name, torch.float32), device=q.device)
        for name, is_wanted in wanted.items()
        if is_wanted
    }
    launch(
        forward_kernel, triton.cdiv(n_queries, sizes.rows) * n_heads * batch, sizes,
        q=q, k=k, v=v, z=z,
        **{name: rows.get(name, rows["lse"]) for name in wanted},
        sinks=plan.bounds if sinks is None else (sinks.detach().float() * LOG2_E).contiguous(),
        **plan.arguments(q), **strides(q=q, k=k, v=v, z=z),
        D_QK=d_head, D_V=v.shape[3], PADDED_QK=padded(d_head), PADDED_V=padded(v.shape[3]),
        BLOCK_M=sizes.rows, BLOCK_N=sizes.columns, ALIGNMENT=alignment(q, k, v), PRECISION="ieee",
        CAUSAL=plan.mask.causal, SINK=sinks is not None,
        ENTROPY=request.entropy, MAXIMUM=request.max_weight, DISTANCE=request.mean_distance,
    )  # fmt: skip
    return z, rows


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, dz: Tensor, delta: Tensor, largest: Tensor, log_sum: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and of the slopes per query [batch, head, query]."""
    batch, n_heads, n_queries, d_head = q.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    slope_terms = torch.zeros_like(delta)
    common = {
        "q": q, "k": k, "v": v, "dz": dz, "largest": largest, "log_sum": log_sum, "delta": delta.contiguous(),
        "scale_natural": plan.natural.scale, **plan.arguments(q), **strides(q=q, k=k, v=v, dz=dz),
        "D_QK": d_head, "D_V": v.shape[3], "PADDED_QK": padded(d_head), "PADDED_V": padded(v.shape[3]),
        "ALIGNMENT": alignment(q, k, v, dz), "PRECISION": "ieee",
    }  # fmt: skip
    sizes = tiles("query gradient", d_head, q.element_size())
    launch(
        query_gradient_kernel, triton.cdiv(n_queries, sizes.rows) * n_heads * batch, sizes,
        **common, dq=dq, slope_terms=slope_terms, **strides(dq=dq),
        BLOCK_M=sizes.rows, BLOCK_N=sizes.columns,
    )  # fmt: skip
    sizes = tiles("key gradient", d_head, q.element_size())
    columns = edges(k.shape[2], sizes.columns, sizes.columns, q.device)
    row_tiles = plan.row_tiles(edges(n_queries, sizes.rows, sizes.rows, q.device), columns)
    launch(
        key_gradient_kernel, columns.shape[1] * k.shape[1] * batch, sizes,
        **common, dk=dk, dv=dv, **strides(dk=dk, dv=dv),
        row_tiles=row_tiles, tiles_step=row_tiles.stride(0), n_column_tiles=columns.shape[1],
        BLOCK_M=sizes.rows, BLOCK_N=sizes.columns,
    )  # fmt: skip
    return dq, dk, dv, slope_terms


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of single pairs and of whole columns, from the normaliser that the forward found.

    q and k are [batch, head, position, d_head]; ``largest`` and ``log_sum`` [batch, head, query] are what to subtract
    from the scores in base 2.
    """

    q: Tensor
    k: Tensor
    plan: Plan
    largest: Tensor
    log_sum: Tensor

    def sink(self, positions: Tensor) -> Tensor:
        """Mass on positions int32 [batch, m], -1 for unused: [batch, head, query]."""
        return self._probe(SINK, positions, positions.shape[1])

    def offsets(self, back: Tensor) -> Tensor:
        """Weights on the keys that lie so far back, int32 [offset]: [batch, head, query, offset]."""
        return self._probe(OFFSET, back, len(back))

    def matches(self, runs: MatchRuns) -> Tensor:
        """Mass on the keys of each row's run: [batch, head, query]."""
        return self._probe(MATCH, runs.columns, 0, runs.first, runs.count)

    def _probe(self, kind: Any, columns: Tensor, n_slots: int, *runs: Tensor) -> Tensor:
        q, k = self.q, self.k
        width = (n_slots,) if kind is OFFSET else ()
        mass = torch.empty(*q.shape[:3], *width, dtype=torch.float32, device=q.device)
        first, count = (run.int().contiguous() for run in runs or (columns, columns))
        sizes = tiles("probe", q.shape[3], q.element_size())
        launch(
        probe_kernel, triton.cdiv(q.shape[2], sizes.rows) * q.shape[1] * q.shape[0], sizes,
            q=q, k=k, largest=self.largest, log_sum=self.log_sum, mass=mass,
            columns=columns.int().contiguous(), run_first=first, run_count=count, n_slots=n_slots,
            **self.plan.arguments(q), **strides(q=q, k=k),
            D_QK=q.shape[3], PADDED_QK=padded(q.shape[3]), BLOCK_M=sizes.rows, KIND=kind,
        )  # fmt: skip
        return mass

    def columns(self, request: StatisticsRequest) -> dict[str, Tensor]:
        """``received`` [batch, head, key], and the pooled maps [batch, head, query block, key block]."""
        q, k, plan = self.q, self.k, self.plan
        batch, n_heads, n_queries, d_head = q.shape
        sizes = tiles("columns", d_head, q.element_size())
        block_rows, block_columns = sizes.rows, sizes.columns
        if request.pooled is not None:
            block_rows, block_columns = min(request.pooled[0], n_queries), min(request.pooled[1], k.shape[2])
        rows = min(sizes.rows, triton.next_power_of_2(block_rows))
        columns = min(sizes.columns, triton.next_power_of_2(block_columns))
        column_tiles = edges(k.shape[2], block_columns, columns, q.device)
        row_tiles = plan.row_tiles(edges(n_queries, block_rows, rows, q.device), column_tiles)
        n_row_blocks, n_column_blocks = triton.cdiv(n_queries, block_rows), triton.cdiv(k.shape[2], block_columns)
        n_column_tiles = column_tiles.shape[1]
        shape = batch, n_heads, n_row_blocks, n_column_tiles
        pooled = torch.zeros(2, *(shape if request.pooled else (1,)), dtype=torch.float32, device=q.device)
        received = torch.empty(batch, n_heads, k.shape[2], dtype=torch.float32, device=q.device)
        weights = received
        if request.query_weights is not None:
            weights = weights_per_head(request.query_weights).float().expand(batch, n_heads, -1).contiguous()
        launch(
        columns_kernel, n_column_tiles * n_heads * batch, sizes,
            q=q, k=k, largest=self.largest, log_sum=self.log_sum,
            query_weights=weights, received=received, pooled_max=pooled[0], pooled_sum=pooled[1],
            row_tiles=row_tiles, tiles_step=row_tiles.stride(0), block_rows=block_rows, block_columns=block_columns,
            n_row_blocks=n_row_blocks, n_column_tiles=n_column_tiles,
            **plan.arguments(q), **strides(q=q, k=k),
            D_QK=d_head, PADDED_QK=padded(d_head), BLOCK_M=rows, BLOCK_N=columns,
            ALIGNMENT=alignment(q, k), PRECISION="ieee",
            RECEIVED=request.received, WEIGHTS=request.query_weights is not None, POOLED=request.pooled is not None,
        )  # fmt: skip
        found = {"received": received} if request.received else {}
        if request.pooled is not None:
            parts = pooled.unflatten(4, (n_column_blocks, -1))  # [2, batch, head, query block, key block, tile]
            found |= {"pooled_max": parts[0].amax(4), "pooled_sum": parts[1].sum(4)}
        return found
