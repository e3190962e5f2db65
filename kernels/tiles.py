"""How the score matrix is cut: blocks of query rows that workers share out, and tiles of scores within them.

A tile is laid out [key, group, row]: keys down, and side by side the rows of the query heads that read one key/value
head. Reductions over keys and over small blocks of keys then run along contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.masks import ColumnSpan, KeyGrid
from workbench.kernels.scores import ScoreRule, prepared

_TILE_ROWS = 384  # rows of all heads of a group together
_TILE_SIZE = 1024 * _TILE_ROWS  # elements; large enough to outweigh the calls, small enough for a core's caches
HIDDEN = -1e4  # a base-2 score whose weight is 0 in every precision, and so is its product with that weight
_PIECES = 16  # pieces of work per sequence: a constant, so that sums over them do not depend on the machine


@dataclass(frozen=True, eq=False)
class RowBlock:
    """Query rows from ``start`` up to ``stop`` of one sequence."""

    batch: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def place(self, kv_head: int) -> tuple[int, int, slice, slice]:
        """Index of its rows in [batch, key/value head, group, query]."""
        return self.batch, kv_head, slice(None), self.rows


@dataclass(frozen=True, eq=False)
class Tiling:
    """Prepared queries and keys, and the rule in base 2 that makes tiles of scores of them."""

    queries: Tensor  # [batch, key/value head, group, query, d_head]
    keys: Tensor  # [batch, key/value head, key, d_head], scaled
    rule: ScoreRule

    @classmethod
    def of(cls, q: Tensor, k: Tensor, rule: ScoreRule) -> Tiling:
        rule = rule.in_base_2()
        queries, keys = prepared(q, k, rule)
        return cls(queries.unflatten(1, (k.shape[1], -1)), keys, rule)

    @property
    def group(self) -> int:
        return self.queries.shape[2]

    @property
    def block_rows(self) -> int:
        return min(max(16, _TILE_ROWS // self.group), 256)

    def pieces(self, pooled_rows: int = 1) -> list[list[RowBlock]]:
        """Work that is independent of each other: the rows of one pooled block stay within a piece."""
        batch, n_rows, longest = self.queries.shape[0], self.queries.shape[3], self.block_rows
        band = longest // pooled_rows * pooled_rows or pooled_rows
        bands = range(0, n_rows, band)
        return [
            [
                RowBlock(sequence, start, min(start + longest, first + band, n_rows))
                for first in bands[piece::_PIECES]
                for start in range(first, min(first + band, n_rows), longest)
            ]
            for sequence in range(batch)
            for piece in range(min(_PIECES, len(bands)))
        ]

    def spans(self, block: RowBlock, grid: KeyGrid) -> list[ColumnSpan]:
        """The columns that a block of rows sees, in widths that fit the buffer."""
        return self.rule.mask.spans(block.batch, block.rows, grid, self._tile_keys(grid))

    def _tile_keys(self, grid: KeyGrid) -> int:
        return max(_TILE_SIZE // (self.block_rows * self.group * grid.size), 1) * grid.size

    def hidden(self, block: RowBlock, span: ColumnSpan, value: float) -> Tensor | None:
        """An upper bound for the scores of a tile: ``value`` where the mask hides the pair, else infinite.

        [key, 1, row]; None where nothing is hidden. The minimum with it is the mask, for all heads.
        """
        if not span.masked:
            return None
        row, column = self._indices(block, span)
        visible = self.rule.mask.visible(block.batch, row, column)
        return torch.where(visible, torch.inf, value).to(self.keys.dtype)

    def block_queries(self, block: RowBlock, kv_head: int) -> Tensor:
        """[d_head, group · row]"""
        return self.queries[block.batch, kv_head, :, block.rows].permute(2, 0, 1).flatten(1)

    def scores(self, block: RowBlock, kv_head: int, span: ColumnSpan, queries: Tensor, buffer: Tensor) -> Tensor:
        """Scores before the mask, in base 2: [key, group · row], in the buffer where the rule allows it."""
        products = buffer[: len(span) * queries.shape[1]].view(len(span), -1)
        torch.mm(self.keys[block.batch, kv_head, span.start : span.stop], queries, out=products)
        if self.rule.only_scales:
            return products
        head = torch.arange(self.group, device=products.device)[:, None] + kv_head * self.group
        tile = products.unflatten(1, (self.group, len(block)))
        return self.rule.biased_scores(tile, head, *self._indices(block, span)).flatten(1)

    def buffer(self, grid: KeyGrid) -> Tensor:
        """Memory for one tile."""
        n_keys = min(self._tile_keys(grid), self.keys.shape[2])
        return self.keys.new_empty(n_keys * self.block_rows * self.group)

    def _indices(self, block: RowBlock, span: ColumnSpan) -> tuple[Tensor, Tensor]:
        row = torch.arange(block.start, block.stop, device=self.keys.device)
        return row, torch.arange(span.start, span.stop, device=self.keys.device)[:, None, None]


def hide(scores: Tensor, hidden: Tensor | None) -> None:
    """Applies the bound of ``Tiling.hidden`` to a tile [key, group · row] in place."""
    if hidden is not None:
        tile = scores.unflatten(1, (-1, hidden.shape[2]))
        torch.minimum(tile, hidden, out=tile)
