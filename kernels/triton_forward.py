"""Flash attention in Triton: output, log-normaliser, and the statistics that fit into the same loop.

One program takes BLOCK_M query rows of one head through all columns that any of them sees, first the tiles in which
something is hidden, then the others, which need no mask. It keeps for each row (Milakov and Gimelshein 2018; Dao et al.
2022), in base 2 and relative to the largest score m so far,

    l = Σ exp2(s - m)    t = Σ exp2(s - m) (s - m)    z = Σ exp2(s - m) v

and when m grows by -δ they become a·l, a·(t + δ l) and a·z, with a = exp2(δ). At the end the entropy is
ln 2 · (log2 l - t / l), which has no difference of large numbers in it. A learned sink is one more score without a
value. What later passes need to take weights from scores are m and log2 l apart: their sum would be rounded at the size
of m. In the code m is row_max, l row_sum, t row_spread and z acc.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.triton_tiles import column_range, is_visible, multiples, row_bounds, tile_scores


@triton.jit
def forward_kernel(
    q, k, v, z,  # [batch, head, position, d], each with strides of its own
    lse, largest, log_sum, virtual_mass, entropy, max_weight, argmax_key, mean_distance,  # [batch, head, query]
    bounds, key_padding,  # int32 [4, batch, query], int8 [batch, key]
    slopes, bias, sinks,
    scale, softcap,
    n_queries, n_keys, query_offset, n_heads, group, bounds_step,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    z_batch, z_head, z_row, z_dim,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, GLOBAL: tl.constexpr, PADDING: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, SINK: tl.constexpr,
    ENTROPY: tl.constexpr, MAXIMUM: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    q_batch, q_head, q_row = multiples(q_batch, q_head, q_row, ALIGNMENT)
    k_batch, k_head, k_row = multiples(k_batch, k_head, k_row, ALIGNMENT)
    v_batch, v_head, v_row = multiples(v_batch, v_head, v_row, ALIGNMENT)
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks  # causal rows that see most come first
    batch, head = tl.program_id(0) // n_blocks // n_heads, tl.program_id(0) // n_blocks % n_heads

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    dim_qk, dim_v = tl.arange(0, PADDED_QK), tl.arange(0, PADDED_V)
    q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    v += batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
    key_padding += batch.to(tl.int64) * n_keys
    queries = tl.load(
        q + row.to(tl.int64)[:, None] * q_row + dim_qk[None, :] * q_dim,
        mask=(row < n_queries)[:, None] & (dim_qk < D_QK)[None, :],
        other=0.0,
    )  # [BLOCK_M, PADDED_QK]
    first, end, global_first, global_end = row_bounds(bounds, batch, row, n_queries, bounds_step, GLOBAL)

    start, stop, global_start, n_global = column_range(first, end, global_first, global_end, BLOCK_N, GLOBAL)
    # Every row sees the columns from full_start up to full_stop.
    full_start = tl.minimum(tl.cdiv(tl.max(first), BLOCK_N) * BLOCK_N, stop)
    full_stop = tl.maximum(tl.min(end) // BLOCK_N * BLOCK_N, full_start)
    if PADDING:
        full_start, full_stop = stop, stop
    n_front = (full_start - start) // BLOCK_N
    n_masked = n_global + n_front + (stop - full_stop) // BLOCK_N

    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_V], tl.float32)
    row_spread = tl.zeros([BLOCK_M], tl.float32)
    away = tl.zeros([BLOCK_M], tl.float32)  # Σ exp2(s - row_max) |i - j|
    best = tl.full([BLOCK_M], -1, tl.int32)

    for tile in range(0, n_masked):
        column = tl.where(
            tile < n_global,
            global_start + tile * BLOCK_N,
            tl.where(tile < n_global + n_front, start, full_stop - n_front * BLOCK_N) + (tile - n_global) * BLOCK_N,
        ) + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        exists = column < n_keys
        if PADDING:
            exists = exists & (tl.load(key_padding + column, mask=exists, other=0) != 0)
        keys = tl.load(
            k + column.to(tl.int64)[None, :] * k_row + dim_qk[:, None] * k_dim,
            mask=exists[None, :] & (dim_qk < D_QK)[:, None],
            other=0.0,
        )  # [PADDED_QK, BLOCK_N]
        products = tl.dot(queries, keys, input_precision=PRECISION)
        scores = tile_scores(
            products, row[:, None], column[None, :], head, scale, softcap, slopes, bias,
            n_queries, n_keys, query_offset, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        visible = is_visible(
            column[None, :], first[:, None], end[:, None], global_first[:, None], global_end[:, None], GLOBAL
        )
        scores = tl.where(visible & exists[None, :], scores, -float("inf"))
        values = tl.load(
            v + column.to(tl.int64)[:, None] * v_row + dim_v[None, :] * v_dim,
            mask=exists[:, None] & (dim_v < D_V)[None, :],
            other=0.0,
        )  # [BLOCK_N, PADDED_V]
        row_max, row_sum, acc, row_spread, away, best = _add_tile(
            scores, values, row + query_offset, column, row_max, row_sum, acc, row_spread, away, best,
            True, PRECISION, CAUSAL, ENTROPY, MAXIMUM, DISTANCE,
        )  # fmt: skip

    for full in range(full_start, full_stop, BLOCK_N):
        column = full + tl.arange(0, BLOCK_N)
        keys = tl.load(
            k + column.to(tl.int64)[None, :] * k_row + dim_qk[:, None] * k_dim,
            mask=(dim_qk < D_QK)[:, None],
            other=0.0,
        )
        products = tl.dot(queries, keys, input_precision=PRECISION)
        scores = tile_scores(
            products, row[:, None], column[None, :], head, scale, softcap, slopes, bias,
            n_queries, n_keys, query_offset, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        values = tl.load(
            v + column.to(tl.int64)[:, None] * v_row + dim_v[None, :] * v_dim,
            mask=(dim_v < D_V)[None, :],
            other=0.0,
        )
        row_max, row_sum, acc, row_spread, away, best = _add_tile(
            scores, values, row + query_offset, column, row_max, row_sum, acc, row_spread, away, best,
            BIAS, PRECISION, CAUSAL, ENTROPY, MAXIMUM, DISTANCE,
        )  # fmt: skip

    total, share = row_max, row_sum  # with the virtual column
    if SINK:
        sink = tl.load(sinks + head)  # may be -inf
        total = tl.maximum(row_max, sink)
        base = tl.where(total == -float("inf"), 0.0, total)
        shift = tl.where(row_max == -float("inf"), 0.0, row_max - base)
        weight = tl.exp2(sink - base)
        row_spread = tl.exp2(shift) * (row_spread + shift * row_sum)
        row_spread += tl.where(weight == 0.0, 0.0, weight * (sink - base))
        share = tl.exp2(shift) * row_sum + weight
        acc *= tl.exp2(shift)[:, None]
        away *= tl.exp2(shift)
    safe = tl.where(share == 0.0, 1.0, share)
    pivot = tl.where(share == 0.0, 0.0, total)
    exists = row < n_queries
    at = (batch.to(tl.int64) * n_heads + head) * n_queries + row
    tl.store(largest + at, pivot, mask=exists)
    tl.store(log_sum + at, tl.log2(safe), mask=exists)
    natural = tl.where(share == 0.0, -float("inf"), 0.6931471805599453 * (pivot + tl.log2(safe)))
    tl.store(lse + at, natural, mask=exists)
    if SINK:
        tl.store(virtual_mass + at, tl.exp2(sink - pivot) / safe, mask=exists)
    if ENTROPY:
        tl.store(entropy + at, 0.6931471805599453 * (tl.log2(safe) - row_spread / safe), mask=exists)
    if MAXIMUM:
        weight = tl.exp2(row_max - pivot) / safe
        tl.store(max_weight + at, weight, mask=exists)
        tl.store(argmax_key + at, tl.where(weight == 0.0, -1, best).to(tl.int64), mask=exists)
    if DISTANCE:
        tl.store(mean_distance + at, away / safe, mask=exists)
    tl.store(
        z + batch.to(tl.int64) * z_batch + head.to(tl.int64) * z_head + row.to(tl.int64)[:, None] * z_row
        + dim_v[None, :] * z_dim,
        (acc / safe[:, None]).to(z.dtype.element_ty),
        mask=exists[:, None] & (dim_v < D_V)[None, :],
    )  # fmt: skip


@triton.jit
def _add_tile(
    scores, values, position, column, row_max, row_sum, acc, row_spread, away, best,
    HIDDEN: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
    ENTROPY: tl.constexpr, MAXIMUM: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """The sums of rows with a tile more. HIDDEN: whether some of the scores may be -∞."""
    if MAXIMUM:
        tile_largest, tile_best = tl.max(scores, 1, return_indices=True)  # ties to the lowest column
        tile_best = tl.min(column) + tile_best
        # Tiles come in any order.
        better = (tile_largest > row_max) | ((tile_largest == row_max) & (tile_best < best) & (row_max > -float("inf")))
        best = tl.where(better, tile_best, best)
    else:
        tile_largest = tl.max(scores, 1)
    total = tl.maximum(row_max, tile_largest)
    pivot = tl.where(total == -float("inf"), 0.0, total)
    shift = tl.where(row_max == -float("inf"), 0.0, row_max - pivot)
    decay = tl.exp2(shift)
    relative = scores - pivot[:, None]
    p = tl.exp2(relative)
    if ENTROPY:
        terms = p * relative
        if HIDDEN:
            terms = tl.where(p == 0.0, 0.0, terms)
        row_spread = decay * (row_spread + shift * row_sum) + tl.sum(terms, 1)
    if DISTANCE:
        distance = (position[:, None] - column[None, :]).to(tl.float32)
        if not CAUSAL:
            distance = tl.abs(distance)
        away = decay * away + tl.sum(p * distance, 1)
    row_sum = decay * row_sum + tl.sum(p, 1)
    acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision=PRECISION)
    return total, row_sum, acc, row_spread, away, best
