"""The largest weights of every row and the columns they are on, from the maxima over blocks of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.tiles import HIDDEN, RowBlock, Tiling


def largest_weights(
    tiling: Tiling,
    block: RowBlock,
    kv_head: int,
    shift: Tensor,
    maxima: Tensor,
    key_blocks: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The ``count`` largest weights, ties to the lowest column; what is missing has weight 0 and column -1.

    The k largest lie in the k blocks with the largest maxima, of equal ones the first: every element elsewhere is
    preceded by the maxima of k blocks. So only these blocks are calculated once more.

    Args:
        shift: lse of the rows in base 2, [group, row].
        maxima: shifted scores' maxima over blocks of keys, [key block, group · row].
        key_blocks: first column and end of every block, int64 [2, key block].

    Returns:
        Weights and int64 columns, both [group, row, count].
    """
    n_blocks = min(count, maxima.shape[0])
    if n_blocks == 1:
        chosen = maxima.argmax(0, keepdim=True)
    else:
        chosen = maxima.sort(dim=0, descending=True, stable=True).indices[:n_blocks].sort(dim=0).values
    start, end = key_blocks[:, chosen]  # [n_blocks, group · row] each
    width = int((key_blocks[1] - key_blocks[0]).max())
    columns = (start[:, None] + torch.arange(width, device=start.device)[:, None]).flatten(0, 1)  # [key, group · row]
    exists = columns < end.repeat_interleave(width, 0)
    columns = columns.clamp(max=tiling.rule.mask.n_keys - 1)
    scores = _scores_at(tiling, block, kv_head, columns) - shift.flatten()
    row = torch.arange(block.start, block.stop, device=start.device).repeat(tiling.group)
    visible = exists & tiling.rule.mask.visible(block.batch, row, columns)
    scores = torch.where(visible, scores, HIDDEN)
    order = scores.sort(dim=0, descending=True, stable=True).indices[:count] if count > 1 else scores.argmax(0)[None]
    weights, columns = scores.gather(0, order).exp2(), columns.gather(0, order)
    columns = columns.masked_fill(weights == 0, -1)
    missing = count - len(order)
    shape = (count, tiling.group, len(block))
    weights = torch.nn.functional.pad(weights, (0, 0, 0, missing)).view(shape)
    columns = torch.nn.functional.pad(columns, (0, 0, 0, missing), value=-1).view(shape)
    return weights.permute(1, 2, 0), columns.permute(1, 2, 0)


def _scores_at(tiling: Tiling, block: RowBlock, kv_head: int, columns: Tensor) -> Tensor:
    """Scores before the mask of every row on columns of its own: [key, group · row]."""
    queries = tiling.queries[block.batch, kv_head, :, block.rows].flatten(0, 1)  # [group · row, d_head]
    products = (tiling.keys[block.batch, kv_head][columns] * queries).sum(2)
    row = torch.arange(block.start, block.stop, device=columns.device).repeat(tiling.group)
    head = torch.arange(tiling.group, device=columns.device).repeat_interleave(len(block)) + kv_head * tiling.group
    return tiling.rule.biased_scores(products, head, row, columns)
