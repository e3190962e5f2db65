"""Weights of single pairs in Triton, with the known normaliser: sink, offset and match mass without n² work.

One program takes BLOCK_M rows of one head and visits, slot by slot, the column that each row names: the same few
positions for all (sink), the column that lies so far back (offset), or the next of the row's own list (match).
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.triton_tiles import is_visible, row_bounds, tile_scores

SINK, OFFSET, MATCH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def probe_kernel(
    q, k,  # [batch, head, position, d], each with strides of its own
    largest, log_sum,  # [batch, head, query]
    mass,  # [batch, head, query, slot] of each slot for OFFSET, else [batch, head, query] of their sum
    columns,  # int32: SINK [batch, slot] with -1 for unused; OFFSET [slot] to go back; MATCH [batch, key], lists
    run_first, run_count,  # int32 [batch, query]: MATCH, which part of the lists is a row's
    bounds, key_padding,  # int32 [4, batch, query], int8 [batch, key]
    slopes, bias,
    scale, softcap,
    n_slots, n_queries, n_keys, query_offset, n_heads, group, bounds_step,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    D_QK: tl.constexpr, PADDED_QK: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr,
    GLOBAL: tl.constexpr, PADDING: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    block = tl.program_id(0) % n_blocks
    batch, head = tl.program_id(0) // n_blocks // n_heads, tl.program_id(0) // n_blocks % n_heads
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < n_queries
    dim = tl.arange(0, PADDED_QK)
    q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    queries = tl.load(
        q + row.to(tl.int64)[:, None] * q_row + dim[None, :] * q_dim,
        mask=inside[:, None] & (dim < D_QK)[None, :],
        other=0.0,
    ).to(tl.float32)  # [BLOCK_M, PADDED_QK]
    first, end, global_first, global_end = row_bounds(bounds, batch, row, n_queries, bounds_step, GLOBAL)
    at = (batch.to(tl.int64) * n_heads + head) * n_queries + row
    pivot = tl.load(largest + at, mask=inside, other=0.0)
    log2_l = tl.load(log_sum + at, mask=inside, other=0.0)
    if KIND == MATCH:
        run = tl.load(run_first + batch.to(tl.int64) * n_queries + row, mask=inside, other=0)
        count = tl.load(run_count + batch.to(tl.int64) * n_queries + row, mask=inside, other=0)
        n_slots = tl.max(count)
    total = tl.zeros([BLOCK_M], tl.float32)
    for slot in range(0, n_slots):
        if KIND == SINK:
            column = tl.load(columns + batch.to(tl.int64) * n_slots + slot) + tl.zeros([BLOCK_M], tl.int32)
            named = inside & (column >= 0)
        elif KIND == OFFSET:
            column = row + query_offset - tl.load(columns + slot)
            named = inside & (column >= 0) & (column < n_keys)
        else:
            named = inside & (slot < count)
            column = tl.load(columns + batch.to(tl.int64) * n_keys + run + slot, mask=named, other=0)
        visible = named & is_visible(column, first, end, global_first, global_end, GLOBAL)
        if PADDING:
            visible = visible & (
                tl.load(key_padding + batch.to(tl.int64) * n_keys + column, mask=visible, other=0) != 0
            )
        keys = tl.load(
            k + column.to(tl.int64)[:, None] * k_row + dim[None, :] * k_dim,
            mask=visible[:, None] & (dim < D_QK)[None, :],
            other=0.0,
        ).to(tl.float32)
        scores = tile_scores(
            tl.sum(queries * keys, 1), row, column, head, scale, softcap, slopes, bias,
            n_queries, n_keys, query_offset, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        # No weight is above 1, whatever a product that rounds otherwise than the lse's makes of a large score.
        exponent = tl.minimum(scores - pivot - log2_l, 0.0, propagate_nan=tl.PropagateNan.ALL)
        p = tl.where(visible, tl.exp2(exponent), 0.0)
        if KIND == OFFSET:
            tl.store(mass + at * n_slots + slot, p, mask=inside)
        total += p
    if KIND != OFFSET:
        tl.store(mass + at, total, mask=inside)
