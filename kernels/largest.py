"""The largest weights of every row and the columns they are on, from the maxima over blocks of keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.kernels.tiles import HIDDEN, RowBlock, Tiling

_BLOCK = 16


def largest_weights(
    tiling: Tiling,
    block: RowBlock,
    kv_heads: slice,
    shifts: list[Tensor],
    maxima: Tensor,
    edges: Tensor,
    count: int,
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest weights, ties to the lowest column; what is missing has weight 0 and column -1.

    The k largest lie in the k blocks with the largest maxima, of equal ones the first: every element elsewhere is
    preceded by the maxima of k blocks. So only these blocks are calculated once more.

    Args:
        shifts: what to subtract from the scores of the rows, [key/value head, group · row] each (see Normaliser).
        maxima: shifted scores' maxima over blocks of keys, [key/value head, key block, group · row].
        edges: first column and end of every block, int64 [2, key block].
        scratch: memory that may be overwritten.

    Returns:
        Weights and int64 columns, both [key/value head, group, row, count].
    """
    n_heads, maxima = len(maxima), maxima.transpose(0, 1).flatten(1)  # [key block, head · row], heads being query heads
    if min(count, len(maxima)) == 1:
        chosen = _first_largest(maxima)[None]
    else:
        chosen = maxima.sort(dim=0, descending=True, stable=True).indices[:count].sort(dim=0).values
    start, end = edges[:, chosen]  # [chosen, head · row] each
    width = int((edges[1] - edges[0]).max())
    within = torch.arange(width, device=start.device)[:, None]
    columns = (start[:, None] + within).clamp(max=tiling.rule.mask.n_keys - 1).flatten(0, 1)  # [key, head · row]
    row = torch.arange(block.start, block.stop, device=start.device).repeat(n_heads * tiling.group)
    visible = tiling.rule.mask.visible(block.batch, row, columns)
    visible &= (start[:, None] + within < end[:, None]).flatten(0, 1)
    scores = _scores_at(tiling, block, kv_heads, row, columns, scratch)
    for shift in shifts:
        scores -= shift.flatten()
    scores = torch.where(visible, scores, HIDDEN)
    if count == 1:
        order = _first_largest(scores)[None]
    else:
        order = scores.sort(dim=0, descending=True, stable=True).indices[:count]
    weights, columns = scores.gather(0, order).exp2(), columns.gather(0, order)
    # The tile's own maximum: its products, rounded otherwise than those calculated here, are what sums to 1.
    largest = maxima.amax(0).exp2()
    weights = torch.minimum(weights, largest)
    weights[0] = largest
    columns = columns.masked_fill(weights == 0, -1)
    missing, shape = count - len(order), (count, n_heads, tiling.group, len(block))
    weights, columns = pad(weights, (0, 0, 0, missing)), pad(columns, (0, 0, 0, missing), value=-1)
    return weights.view(shape).movedim(0, 3), columns.view(shape).movedim(0, 3)


def _scores_at(
    tiling: Tiling, block: RowBlock, kv_heads: slice, row: Tensor, columns: Tensor, scratch: Tensor
) -> Tensor:
    """Scores before the mask of every row on columns of its own: [key, head · row]."""
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


def _first_largest(values: Tensor) -> Tensor:
    """argmax over the first axis, the lowest index of equal ones: [n, m] -> [m].

    In two steps, and by max instead of argmax: several times faster on a CPU.
    """
    if len(values) % _BLOCK:
        values = pad(values, (0, 0, 0, -len(values) % _BLOCK), value=-torch.inf)
    blocks = values.unflatten(0, (-1, _BLOCK))
    block = blocks.amax(1).max(0).indices  # [m]
    within = blocks.gather(0, block.expand(1, _BLOCK, -1))[0].max(0).indices
    return block * _BLOCK + within
