"""What the Triton kernels have in common: scores of a tile in base 2, and who sees whom in it.

Names: i and j are absolute positions of queries and keys, a row and a column their indices. Flags in capitals are
compile-time constants.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_scores(
    products,  # q·k, float32 [ROWS, COLUMNS]
    row,  # int32 [ROWS, 1] or [1, ROWS]: broadcasts against column
    column,  # int32
    head,
    scale,  # everything in base 2: log2(e) is in scale, softcap, slopes and bias
    softcap,
    slopes,  # pointer, [head]
    bias,  # pointer, [head, n_queries + n_keys - 1]
    n_queries,
    n_keys,
    query_offset,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Scores before the mask."""
    scores = products * scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    if ALIBI:
        distance = tl.abs(row + query_offset - column).to(tl.float32)
        scores -= tl.load(slopes + head) * distance
    if BIAS:
        entry = row - column + n_keys - 1
        inside = (entry >= 0) & (entry < n_queries + n_keys - 1)
        scores += tl.load(bias + head.to(tl.int64) * (n_queries + n_keys - 1) + entry, mask=inside, other=0.0)
    return scores


@triton.jit
def tanh(x):
    """By exp2, which every target has, and near 0, where that would cancel, by its series: good to 5e-7 of itself."""
    large = 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.885390081777927))  # 2 log2(e)
    y = x * x
    series = 2 / 15 + y * (-17 / 315 + y * (62 / 2835 - y * (1382 / 155925)))
    return tl.where(y < 0.0625, x + x * y * (-1 / 3 + y * series), large)


@triton.jit
def multiples(batch, head, row, ALIGNMENT: tl.constexpr):
    """The strides of a tensor, as the multiples that they are: the compiler then loads as many elements at once."""
    return batch // ALIGNMENT * ALIGNMENT, head // ALIGNMENT * ALIGNMENT, row // ALIGNMENT * ALIGNMENT


@triton.jit
def row_bounds(bounds, batch, row, n_queries, step, GLOBAL: tl.constexpr):
    """Column intervals of rows: first, end, global_first, global_end, int32 like ``row``.

    ``bounds`` is [4, batch, query], ``step`` its first stride. Rows past the last one take its bounds: a tile then
    needs no mask where the others do not.
    """
    at = bounds + batch.to(tl.int64) * n_queries + tl.minimum(row, n_queries - 1)
    first, end = tl.load(at), tl.load(at + step)
    if GLOBAL:
        global_first, global_end = tl.load(at + 2 * step), tl.load(at + 3 * step)
    else:
        global_first, global_end = first, first  # never read
    return first, end, global_first, global_end


@triton.jit
def column_range(first, end, global_first, global_end, BLOCK_N: tl.constexpr, GLOBAL: tl.constexpr):
    """The columns that rows see, in whole tiles: from ``start`` to ``stop``, and ``n_global`` tiles before ``start``.

    Returns start, stop, global_start, n_global; an empty range has its stop at its start.
    """
    start = tl.min(first) // BLOCK_N * BLOCK_N
    stop = tl.max(end)
    global_start = 0
    n_global = 0
    if GLOBAL:
        global_start = tl.min(global_first) // BLOCK_N * BLOCK_N
        stop = tl.maximum(stop, tl.where(tl.max(global_end) > start, tl.max(global_end), 0))
        n_global = tl.cdiv(tl.maximum(tl.minimum(tl.max(global_end), start) - global_start, 0), BLOCK_N)
    stop = start + tl.cdiv(tl.maximum(stop - start, 0), BLOCK_N) * BLOCK_N
    return start, stop, global_start, n_global


@triton.jit
def is_visible(column, first, end, global_first, global_end, GLOBAL: tl.constexpr):
    """Whether columns lie in the intervals of rows; the shapes broadcast."""
    inside = (column >= first) & (column < end)
    if GLOBAL:
        inside = inside | ((column >= global_first) & (column < global_end))
    return inside
