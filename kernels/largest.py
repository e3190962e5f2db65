"""The largest weights of every row and the columns they are on, from the maxima over blocks of keys.

The k largest lie in the k blocks with the largest maxima, of equal ones the first: every element elsewhere is preceded
by the maxima of k blocks. So only these blocks are looked at once more, in the tile itself where a row has a single
one; else their scores are calculated again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.kernels.tiles import HIDDEN, RowBlock, Tiling

_BLOCK = 16
_FEW = 256  # among so many, the first largest is found in one step

Largest = tuple[Tensor, Tensor]  # shifted scores and their int64 columns, [key/value head, count, group · row] each


def largest_in_tile(tile: Tensor, first: int, maxima: Tensor, edges: Tensor, count: int) -> Largest:
    """The ``count`` largest scores of rows that have no others than this tile's, ties to the lowest column.

    Args:
        tile: shifted scores, HIDDEN where a pair is, [key/value head, key, group · row].
        first: the column of its first key.
        maxima: over its blocks of keys, [key/value head, key block, group · row].
        edges: first column and end of every block, int64 [2, key block].

    Returns:
        Fewer than ``count`` where there are fewer keys.
    """

    def scores_at(columns: Tensor) -> Tensor:
        return tile.gather(1, columns - first)

    return _largest(maxima, edges, count, scores_at)


def largest_again(
    tiling: Tiling,
    block: RowBlock,
    kv_heads: slice,
    shifts: list[Tensor],
    maxima: Tensor,
    edges: Tensor,
    count: int,
    scratch: Tensor,
) -> Largest:
    """As ``largest_in_tile``, for a block of rows with any number of tiles.

    Args:
        shifts: what to subtract from the scores of the rows, [key/value head, group · row] each (see Normaliser).
        scratch: memory that may be overwritten.
    """
    n_heads = len(maxima)

    def scores_at(columns: Tensor) -> Tensor:
        columns = columns.transpose(0, 1).flatten(1)  # [key, head · row]
        row = torch.arange(block.start, block.stop, device=columns.device).repeat(n_heads * tiling.group)
        scores = _scores_at(tiling, block, kv_heads, row, columns, scratch)
        for shift in shifts:
            scores -= shift.flatten()
        scores = torch.where(tiling.rule.mask.visible(block.batch, row, columns), scores, HIDDEN)
        return scores.unflatten(1, (n_heads, -1)).transpose(0, 1)

    scores, columns = _largest(maxima, edges, count, scores_at)
    # The tile's own maximum: its products, rounded otherwise than those calculated here, are what sums to 1.
    largest = maxima.amax(1, keepdim=True)
    return torch.cat((largest, torch.minimum(scores[:, 1:], largest)), 1), columns


def largest_weights(found: Largest, count: int) -> tuple[Tensor, Tensor]:
    """Weights and columns, [key/value head, count, group · row] each; what is missing has weight 0 and column -1."""
    weights, columns = found[0].exp2(), found[1]
    columns = columns.masked_fill(weights == 0, -1)
    if missing := count - weights.shape[1]:
        weights, columns = pad(weights, (0, 0, 0, missing)), pad(columns, (0, 0, 0, missing), value=-1)
    return weights, columns


def _largest(maxima: Tensor, edges: Tensor, count: int, scores_at: Callable[[Tensor], Tensor]) -> Largest:
    """``scores_at`` gives the scores of columns of every row, [key/value head, key, group · row]."""
    chosen = _first_largest(maxima, count)
    if count > 1:
        chosen = chosen.sort(dim=1).values
    shortest, longest = (int(length) for length in (edges[1] - edges[0]).aminmax())
    start, end = edges[:, chosen]  # [key/value head, chosen, group · row] each
    columns = (start[:, :, None] + torch.arange(longest, device=edges.device)[:, None]).flatten(1, 2)
    if shortest == longest:
        scores = scores_at(columns)
    else:  # a block ends before the longest would
        last = end.repeat_interleave(longest, 1) - 1
        scores = torch.where(columns <= last, scores_at(torch.minimum(columns, last)), HIDDEN)
    order = _first_largest(scores, count)
    return scores.gather(1, order), columns.gather(1, order)


def _scores_at(
    tiling: Tiling, block: RowBlock, kv_heads: slice, row: Tensor, columns: Tensor, scratch: Tensor
) -> Tensor:
    """Scores before the mask of every row on columns of its own: [key, head · row], heads being query heads."""
    queries = tiling.queries[block.place(kv_heads)].flatten(0, 2)  # [head · row, d_head]
    keys, d_head = tiling.keys[block.batch].flatten(0, 1), queries.shape[1]  # [key/value head · key, d_head]
    kv_head = torch.arange(kv_heads.start, kv_heads.stop, device=row.device)
    places = columns + kv_head.repeat_interleave(tiling.group * len(block)) * tiling.keys.shape[2]
    step = max(1, scratch.numel() // (len(columns) * d_head))  # as many rows as gathered keys fit the memory
    products = torch.empty_like(columns, dtype=queries.dtype)
    for start in range(0, len(row), step):
        part = places[:, start : start + step]
        size = part.numel() * d_head
        memory = scratch[:size] if size <= scratch.numel() else scratch.new_empty(size)
        gathered = torch.index_select(keys, 0, part.flatten(), out=memory.view(-1, d_head)).view(*part.shape, d_head)
        torch.sum(gathered.mul_(queries[start : start + step]), 2, out=products[:, start : start + step])
    return tiling.rule.biased_scores(products, tiling.heads(kv_heads).repeat_interleave(len(block)), row, columns)


def _first_largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values, the lowest of equal ones first: [head, n, row] -> int64 [head, count, row].

    One index takes several times less time on a CPU by maxima and minima, of numbers of one type, than by argmax.
    """
    n = values.shape[1]
    if min(count, n) > 1:
        return values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    if n > _FEW:
        blocks = pad(values, (0, 0, 0, -n % _BLOCK), value=-torch.inf).unflatten(1, (-1, _BLOCK))
        block = _first_largest(blocks.amax(2), 1)
        within = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK, -1))[:, 0]
        return block * _BLOCK + _first_largest(within, 1)
    less = torch.lt(values, values.amax(1, keepdim=True), out=torch.empty_like(values))  # 1 or 0
    index = torch.arange(n, dtype=values.dtype, device=values.device)[:, None]
    return torch.add(index, less, alpha=n).amin(1, keepdim=True).long()
