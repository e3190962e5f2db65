"""Gradients of flash attention in Triton, by recomputation (Dao et al. 2022, algorithm 4), without atomics.

With p the weights, dz and dlse the incoming gradients, and per row Δ = z · dz - dlse,

    dv_j = Σ_i p_ij dz_i    ds_ij = p_ij (dz_i · v_j - Δ_i)    dq_i = scale Σ_j dx_ij k_j    dk_j = scale Σ_i dx_ij q_i

where x = scale · q·k and s = cap · tanh(x / cap) + bias, so dx = ds (1 - tanh²(x / cap)); the slope of a head has the
gradient -Σ_ij ds_ij |i - j|. A learned sink with weight p_0 is a score with value 0: its gradient is -Σ_i p_0 Δ_i. One
kernel goes row by row, for dq; the other key by key, for dk and dv, through all query heads that read a key/value head,
so that they add up in float32 in one place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.triton_tiles import column_range, is_visible, multiples, row_bounds, tanh, tile_scores


@triton.jit
def query_gradient_kernel(
    q, k, v, dz, dq,  # [batch, head, position, d], each with strides of its own
    largest, log_sum, delta, slope_terms,  # [batch, head, query]
    bounds, key_padding, slopes, bias,
    scale, softcap, scale_natural,
    n_queries, n_keys, query_offset, n_heads, group, bounds_step,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    dz_batch, dz_head, dz_row, dz_dim,
    dq_batch, dq_head, dq_row, dq_dim,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    GLOBAL: tl.constexpr, PADDING: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    q_batch, q_head, q_row = multiples(q_batch, q_head, q_row, ALIGNMENT)
    k_batch, k_head, k_row = multiples(k_batch, k_head, k_row, ALIGNMENT)
    v_batch, v_head, v_row = multiples(v_batch, v_head, v_row, ALIGNMENT)
    dz_batch, dz_head, dz_row = multiples(dz_batch, dz_head, dz_row, ALIGNMENT)
    n_blocks = tl.cdiv(n_queries, BLOCK_M)
    block = n_blocks - 1 - tl.program_id(0) % n_blocks
    batch, head = tl.program_id(0) // n_blocks // n_heads, tl.program_id(0) // n_blocks % n_heads
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    dim_qk, dim_v = tl.arange(0, PADDED_QK), tl.arange(0, PADDED_V)
    q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    v += batch.to(tl.int64) * v_batch + (head // group).to(tl.int64) * v_head
    dz += batch.to(tl.int64) * dz_batch + head.to(tl.int64) * dz_head
    first, end, global_first, global_end = row_bounds(bounds, batch, row, n_queries, bounds_step, GLOBAL)
    seeing = (row < n_queries) & ((first < end) | (global_first < global_end))
    queries = tl.load(
        q + row.to(tl.int64)[:, None] * q_row + dim_qk[None, :] * q_dim,
        mask=seeing[:, None] & (dim_qk < D_QK)[None, :],
        other=0.0,
    )
    dzs = tl.load(
        dz + row.to(tl.int64)[:, None] * dz_row + dim_v[None, :] * dz_dim,
        mask=seeing[:, None] & (dim_v < D_V)[None, :],
        other=0.0,
    )
    at = (batch.to(tl.int64) * n_heads + head) * n_queries + row
    pivot = tl.load(largest + at, mask=seeing, other=0.0)
    log2_l = tl.load(log_sum + at, mask=seeing, other=0.0)
    deltas = tl.load(delta + at, mask=seeing, other=0.0)

    start, stop, global_start, n_global = column_range(first, end, global_first, global_end, BLOCK_N, GLOBAL)
    n_tiles = n_global + (stop - start) // BLOCK_N
    acc = tl.zeros([BLOCK_M, PADDED_QK], tl.float32)
    away = tl.zeros([BLOCK_M], tl.float32)
    for tile in range(0, n_tiles):
        column = tl.where(tile < n_global, global_start, start - n_global * BLOCK_N) + tile * BLOCK_N
        column += tl.arange(0, BLOCK_N)
        exists = column < n_keys
        if PADDING:
            exists = exists & (tl.load(key_padding + batch.to(tl.int64) * n_keys + column, mask=exists, other=0) != 0)
        keys = tl.load(
            k + column.to(tl.int64)[:, None] * k_row + dim_qk[None, :] * k_dim,
            mask=exists[:, None] & (dim_qk < D_QK)[None, :],
            other=0.0,
        )  # [BLOCK_N, PADDED_QK]
        values = tl.load(
            v + column.to(tl.int64)[None, :] * v_row + dim_v[:, None] * v_dim,
            mask=exists[None, :] & (dim_v < D_V)[:, None],
            other=0.0,
        )  # [PADDED_V, BLOCK_N]
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = tile_scores(
            products, row[:, None], column[None, :], head, scale, softcap, slopes, bias,
            n_queries, n_keys, query_offset, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        visible = is_visible(
            column[None, :], first[:, None], end[:, None], global_first[:, None], global_end[:, None], GLOBAL
        )
        p = tl.exp2(scores - pivot[:, None] - log2_l[:, None])
        p = tl.where(visible & exists[None, :] & seeing[:, None], p, 0.0)
        ds = p * (tl.dot(dzs, values, input_precision=PRECISION) - deltas[:, None])
        if ALIBI:
            away += tl.sum(ds * tl.abs(row[:, None] + query_offset - column[None, :]).to(tl.float32), 1)
        if SOFTCAP:
            capped = tanh(products * scale / softcap)
            ds *= 1.0 - capped * capped
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)
    tl.store(
        dq + batch.to(tl.int64) * dq_batch + head.to(tl.int64) * dq_head + row.to(tl.int64)[:, None] * dq_row
        + dim_qk[None, :] * dq_dim,
        (acc * scale_natural).to(dq.dtype.element_ty),
        mask=(row < n_queries)[:, None] & (dim_qk < D_QK)[None, :],
    )  # fmt: skip
    if ALIBI:
        tl.store(slope_terms + at, -away, mask=row < n_queries)


@triton.jit
def key_gradient_kernel(
    q, k, v, dz, dk, dv,  # [batch, head, position, d], each with strides of its own
    largest, log_sum, delta,  # [batch, head, query]
    bounds, key_padding, row_tiles,  # int32 [4, batch, query], int8 [batch, key], int32 [2, batch, column tile]
    slopes, bias,
    scale, softcap, scale_natural,
    n_queries, n_keys, query_offset, n_heads, group, bounds_step, tiles_step, n_column_tiles,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    v_batch, v_head, v_row, v_dim,
    dz_batch, dz_head, dz_row, dz_dim,
    dk_batch, dk_head, dk_row, dk_dim,
    dv_batch, dv_head, dv_row, dv_dim,
    D_QK: tl.constexpr, D_V: tl.constexpr, PADDED_QK: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    GLOBAL: tl.constexpr, PADDING: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    q_batch, q_head, q_row = multiples(q_batch, q_head, q_row, ALIGNMENT)
    k_batch, k_head, k_row = multiples(k_batch, k_head, k_row, ALIGNMENT)
    v_batch, v_head, v_row = multiples(v_batch, v_head, v_row, ALIGNMENT)
    dz_batch, dz_head, dz_row = multiples(dz_batch, dz_head, dz_row, ALIGNMENT)
    tile = tl.program_id(0) % n_column_tiles
    n_kv_heads = n_heads // group
    batch = tl.program_id(0) // n_column_tiles // n_kv_heads
    kv_head = tl.program_id(0) // n_column_tiles % n_kv_heads
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = column < n_keys
    real = exists
    if PADDING:
        real = tl.load(key_padding + batch.to(tl.int64) * n_keys + column, mask=exists, other=0) != 0
    dim_qk, dim_v = tl.arange(0, PADDED_QK), tl.arange(0, PADDED_V)
    keys = tl.load(
        k + batch.to(tl.int64) * k_batch + kv_head.to(tl.int64) * k_head + column.to(tl.int64)[:, None] * k_row
        + dim_qk[None, :] * k_dim,
        mask=real[:, None] & (dim_qk < D_QK)[None, :],
        other=0.0,
    )  # [BLOCK_N, PADDED_QK]  # fmt: skip
    values = tl.load(
        v + batch.to(tl.int64) * v_batch + kv_head.to(tl.int64) * v_head + column.to(tl.int64)[:, None] * v_row
        + dim_v[None, :] * v_dim,
        mask=real[:, None] & (dim_v < D_V)[None, :],
        other=0.0,
    )  # [BLOCK_N, PADDED_V]  # fmt: skip
    dk_sum = tl.zeros([BLOCK_N, PADDED_QK], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, PADDED_V], tl.float32)

    tile_at = row_tiles + batch.to(tl.int64) * n_column_tiles + tile
    first_tile, n_tiles = tl.load(tile_at), tl.load(tile_at + tiles_step) - tl.load(tile_at)
    for step in range(0, group * n_tiles):  # every head of the group, one after the other
        head = kv_head * group + step // n_tiles
        row = (first_tile + step % n_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        first, end, global_first, global_end = row_bounds(bounds, batch, row, n_queries, bounds_step, GLOBAL)
        seeing = (row < n_queries) & ((first < end) | (global_first < global_end))
        queries = tl.load(
            q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head + row.to(tl.int64)[:, None] * q_row
            + dim_qk[None, :] * q_dim,
            mask=seeing[:, None] & (dim_qk < D_QK)[None, :],
            other=0.0,
        )  # [BLOCK_M, PADDED_QK]  # fmt: skip
        dzs = tl.load(
            dz + batch.to(tl.int64) * dz_batch + head.to(tl.int64) * dz_head + row.to(tl.int64)[:, None] * dz_row
            + dim_v[None, :] * dz_dim,
            mask=seeing[:, None] & (dim_v < D_V)[None, :],
            other=0.0,
        )  # [BLOCK_M, PADDED_V]  # fmt: skip
        at = (batch.to(tl.int64) * n_heads + head) * n_queries + row
        pivot = tl.load(largest + at, mask=seeing, other=0.0)
        log2_l = tl.load(log_sum + at, mask=seeing, other=0.0)
        deltas = tl.load(delta + at, mask=seeing, other=0.0)
        products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        scores = tile_scores(
            products, row[None, :], column[:, None], head, scale, softcap, slopes, bias,
            n_queries, n_keys, query_offset, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        visible = is_visible(
            column[:, None], first[None, :], end[None, :], global_first[None, :], global_end[None, :], GLOBAL
        )
        p = tl.exp2(scores - pivot[None, :] - log2_l[None, :])
        p = tl.where(visible & real[:, None] & seeing[None, :], p, 0.0)
        dv_sum = tl.dot(p.to(dzs.dtype), dzs, dv_sum, input_precision=PRECISION)
        ds = p * (tl.dot(values, tl.trans(dzs), input_precision=PRECISION) - deltas[None, :])
        if SOFTCAP:
            capped = tanh(products * scale / softcap)
            ds *= 1.0 - capped * capped
        dk_sum = tl.dot(ds.to(queries.dtype), queries, dk_sum, input_precision=PRECISION)
    tl.store(
        dk + batch.to(tl.int64) * dk_batch + kv_head.to(tl.int64) * dk_head + column.to(tl.int64)[:, None] * dk_row
        + dim_qk[None, :] * dk_dim,
        (dk_sum * scale_natural).to(dk.dtype.element_ty),
        mask=exists[:, None] & (dim_qk < D_QK)[None, :],
    )  # fmt: skip
    tl.store(
        dv + batch.to(tl.int64) * dv_batch + kv_head.to(tl.int64) * dv_head + column.to(tl.int64)[:, None] * dv_row
        + dim_v[None, :] * dv_dim,
        dv_sum.to(dv.dtype.element_ty),
        mask=exists[:, None] & (dim_v < D_V)[None, :],
    )  # fmt: skip
