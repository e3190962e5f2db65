"""What keys receive and the pooled map: a second pass in Triton, key by key, with the known normaliser.

One program takes up to BLOCK_N columns through all rows that see any of them. Nobody else writes what it writes, so
there are no atomics and the result is the same on every run. Tiles lie within the blocks of the pooled map, whatever
their size, and a block's running maximum and sum are stored after each tile: the last store holds all of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.triton_tiles import is_visible, multiples, row_bounds, tile_scores


@triton.jit
def columns_kernel(
    q, k,  # [batch, head, position, d], each with strides of its own
    largest, log_sum,  # [batch, head, query]
    query_weights, received,  # [batch, head, query], [batch, head, key]
    pooled_max, pooled_sum,  # [batch, head, row block, column tile]
    bounds, key_padding, row_tiles,  # int32 [4, batch, query], int8 [batch, key], int32 [2, batch, column tile]
    slopes, bias,
    scale, softcap,
    n_queries, n_keys, query_offset, n_heads, group, bounds_step, tiles_step,
    block_rows, block_columns, n_row_blocks, n_column_tiles,
    q_batch, q_head, q_row, q_dim,
    k_batch, k_head, k_row, k_dim,
    D_QK: tl.constexpr, PADDED_QK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNMENT: tl.constexpr, PRECISION: tl.constexpr,
    GLOBAL: tl.constexpr, PADDING: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    RECEIVED: tl.constexpr, WEIGHTS: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    q_batch, q_head, q_row = multiples(q_batch, q_head, q_row, ALIGNMENT)
    k_batch, k_head, k_row = multiples(k_batch, k_head, k_row, ALIGNMENT)
    tile = tl.program_id(0) % n_column_tiles
    batch = tl.program_id(0) // n_column_tiles // n_heads
    head = tl.program_id(0) // n_column_tiles % n_heads
    parts = tl.cdiv(block_columns, BLOCK_N)
    start = tile // parts * block_columns + tile % parts * BLOCK_N
    stop = tl.minimum(tl.minimum(start + BLOCK_N, (tile // parts + 1) * block_columns), n_keys)

    column = start + tl.arange(0, BLOCK_N)
    exists = column < stop
    real = exists
    if PADDING:
        real = tl.load(key_padding + batch.to(tl.int64) * n_keys + column, mask=exists, other=0) != 0
    dim = tl.arange(0, PADDED_QK)
    q += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k += batch.to(tl.int64) * k_batch + (head // group).to(tl.int64) * k_head
    keys = tl.load(
        k + column.to(tl.int64)[None, :] * k_row + dim[:, None] * k_dim,
        mask=real[None, :] & (dim < D_QK)[:, None],
        other=0.0,
    )  # [PADDED_QK, BLOCK_N]
    rows_at = (batch.to(tl.int64) * n_heads + head) * n_queries
    cells_at = (batch.to(tl.int64) * n_heads + head) * n_row_blocks * n_column_tiles + tile
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    cell_max = 0.0
    cell_sum = 0.0

    row_parts = tl.cdiv(block_rows, BLOCK_M)
    at = row_tiles + batch.to(tl.int64) * n_column_tiles + tile
    for row_tile in range(tl.load(at), tl.load(at + tiles_step)):
        cell = row_tile // row_parts
        row_start = cell * block_rows + row_tile % row_parts * BLOCK_M
        row_stop = tl.minimum(tl.minimum(row_start + BLOCK_M, (cell + 1) * block_rows), n_queries)
        row = row_start + tl.arange(0, BLOCK_M)
        inside = row < row_stop
        first, end, global_first, global_end = row_bounds(bounds, batch, row, n_queries, bounds_step, GLOBAL)
        seeing = inside & ((first < end) | (global_first < global_end))
        queries = tl.load(
            q + row.to(tl.int64)[:, None] * q_row + dim[None, :] * q_dim,
            mask=seeing[:, None] & (dim < D_QK)[None, :],
            other=0.0,
        )  # [BLOCK_M, PADDED_QK]
        # The forward's order of operands: products round as they did there, and weights of a row sum to 1.
        products = tl.dot(queries, keys, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = tile_scores(
            products, row[:, None], column[None, :], head, scale, softcap, slopes, bias,
            n_queries, n_keys, query_offset, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        visible = is_visible(
            column[None, :], first[:, None], end[:, None], global_first[:, None], global_end[:, None], GLOBAL
        )
        pivot = tl.load(largest + rows_at + row, mask=inside, other=0.0)
        log2_l = tl.load(log_sum + rows_at + row, mask=inside, other=0.0)
        p = tl.exp2(scores - pivot[:, None] - log2_l[:, None])
        p = tl.where(visible & real[None, :] & inside[:, None], p, 0.0)
        if POOLED:
            fresh = row_tile % row_parts == 0
            cell_max = tl.maximum(tl.where(fresh, 0.0, cell_max), tl.max(tl.max(p, 1), 0))
            cell_sum = tl.where(fresh, 0.0, cell_sum) + tl.sum(tl.sum(p, 1), 0)
            tl.store(pooled_max + cells_at + cell.to(tl.int64) * n_column_tiles, cell_max)
            tl.store(pooled_sum + cells_at + cell.to(tl.int64) * n_column_tiles, cell_sum)
        if RECEIVED:
            if WEIGHTS:
                p *= tl.load(query_weights + rows_at + row, mask=inside, other=0.0)[:, None]
            total += p
    if RECEIVED:
        tl.store(received + (batch.to(tl.int64) * n_heads + head) * n_keys + column, tl.sum(total, 0), mask=exists)
