"""How the score matrix is cut: blocks of query rows that workers share out, and tiles of scores within them.

A tile is laid out [key/value head, key, group, row]: keys down, and side by side the rows of the query heads that read
one key/value head. Reductions over keys and over small blocks of keys then run along contiguous memory. Where a block
of rows sees few keys, a tile holds several key/value heads, so that the calls on it do not outweigh the arithmetic.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.kernels.masks import ColumnSpan, KeyGrid
from workbench.kernels.scores import ScoreRule, prepared

KEY_BLOCK = 16  # maxima and sums are first taken over so many keys at most, where that divides the pooled map's blocks
_TILE_ROWS = 384  # rows of all heads of a group together, at most
_ROWS_OF_RANGE = 4  # a block has no more rows than this part of the keys that a row sees: it reads so many more of them
_TILE_SIZE = 1024 * _TILE_ROWS  # elements; large enough to outweigh the calls, small enough for a core's caches
_WINDOW_TILES = 2  # so many times larger where a window leaves no more than one tile: calls on rows weigh more there
Place = tuple[int, slice, slice, slice]
HiddenPart = tuple[slice, Tensor]  # some keys of a tile, and a bound for their scores [key, 1, row]
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

    def place(self, kv_heads: slice) -> Place:
        """Index of its rows in [batch, key/value head, group, query]."""
        return self.batch, kv_heads, slice(None), self.rows


@dataclass(frozen=True, eq=False)
class Tiling:
    """Prepared queries and keys, and the rule in base 2 that makes tiles of scores of them."""

    queries: Tensor  # [batch, key/value head, group, query, d_head]
    keys: Tensor  # [batch, key/value head, key, d_head], scaled, contiguous
    rule: ScoreRule
    block_rows: int  # rows of a block, at most
    tile_size: int  # elements of a tile, at most
    _memory: threading.local = field(default_factory=threading.local)
    _bounds: dict[tuple[float, int, int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, rule: ScoreRule) -> Tiling:
        rule = rule.in_base_2()
        queries, keys = prepared(q, k, rule)
        queries = queries.unflatten(1, (k.shape[1], -1))
        keys_per_row = int((rule.mask.end - rule.mask.first).max()) if rule.mask.first.numel() else 0
        n_rows = max(min(_TILE_ROWS // queries.shape[2], keys_per_row // _ROWS_OF_RANGE, 256), 16)
        seen = keys_per_row + n_rows  # keys that a block of rows sees
        one_tile = seen < rule.mask.n_keys and seen * n_rows * queries.shape[2] <= _TILE_SIZE
        if one_tile:  # a power of 2: pooled maps of such blocks take the same tiles as z and lse
            return cls(queries, keys.contiguous(), rule, 1 << n_rows.bit_length() - 1, _TILE_SIZE * _WINDOW_TILES)
        return cls(queries, keys.contiguous(), rule, n_rows, _TILE_SIZE)

    @property
    def group(self) -> int:
        return self.queries.shape[2]

    @property
    def grid(self) -> KeyGrid:
        """How columns are cut where nothing asks for another cut, beside ``pieces()``."""
        return KeyGrid(self.rule.mask.n_keys, size=KEY_BLOCK, period=KEY_BLOCK)

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

    def heads_at_a_time(self, spans: list[ColumnSpan], grid: KeyGrid) -> list[slice]:
        """The key/value heads, as many together as fit the buffer with the longest of the spans."""
        n_heads, longest = self.keys.shape[1], max(map(len, spans), default=1)
        step = max(self._tile_keys(grid) // longest, 1)
        return [slice(first, min(first + step, n_heads)) for first in range(0, n_heads, step)]

    def _tile_keys(self, grid: KeyGrid) -> int:
        return max(self.tile_size // (self.block_rows * self.group * grid.size), 1) * grid.size

    def hidden(self, block: RowBlock, span: ColumnSpan, value: float) -> list[HiddenPart]:
        """Upper bounds for the scores of a tile, for the parts of it in which the mask may hide pairs.

        A bound [key, 1, row] is ``value`` where a pair is hidden, else infinite. The minimum with it is the mask, for
        all heads.
        """
        parts: list[HiddenPart] = []
        for start, stop in span.masked:
            # The bound, and what it depends on where the mask is one of distances.
            bound, key = None, (value, len(block), start - block.start, stop - start)
            if self.rule.mask.by_distance:
                bound = self._bounds.get(key)
            if bound is None:
                unbounded, hidden = self.keys.new_tensor((torch.inf, value))
                column = torch.arange(start, stop, device=self.keys.device)[:, None, None]
                visible = self.rule.mask.visible(block.batch, block.rows, column)
                bound = self._bounds[key] = torch.where(visible, unbounded, hidden)
            parts.append((slice(start - span.start, stop - span.start), bound))
        return parts

    @property
    def lowest(self) -> float:
        """A score for hidden pairs, before any shift, whose weight is 0.

        Finite where no bias may lie as low, so that its product with that weight is 0 as well.
        """
        return -(2.0**126) if self.rule.only_scales else -torch.inf

    @property
    def low(self) -> float:
        """From ``lowest``, any shift by a score that is not above this leaves a weight of 0."""
        return -(2.0**125) if self.rule.only_scales else torch.finfo(self.keys.dtype).min

    def block_queries(self, block: RowBlock, kv_heads: slice) -> Tensor:
        """[key/value head, d_head, group · row]"""
        return self.queries[block.place(kv_heads)].flatten(1, 2).mT

    def scores(self, block: RowBlock, kv_heads: slice, span: ColumnSpan, queries: Tensor, buffer: Tensor) -> Tensor:
        """Scores before the mask, in base 2: [key/value head, key, group · row]; in the buffer if the rule allows."""
        n_heads, _, width = queries.shape
        products = buffer[: n_heads * len(span) * width].view(n_heads, len(span), width)
        torch.bmm(self.keys[block.batch, kv_heads, span.start : span.stop], queries, out=products)
        if self.rule.only_scales:
            return products
        tile = products.unflatten(2, (self.group, len(block)))
        head = self.heads(kv_heads).view(n_heads, 1, self.group, 1)
        return self.rule.biased_scores(tile, head, *self._indices(block, span.start, span.stop)).flatten(2)

    def heads(self, kv_heads: slice) -> Tensor:
        """The query heads that read some key/value heads, int64 [head]."""
        return torch.arange(kv_heads.start * self.group, kv_heads.stop * self.group, device=self.keys.device)

    def scratch(self, grid: KeyGrid, count: int) -> list[Tensor]:
        """Memory for so many tiles: for every thread its own, which it keeps, so that caches know it."""
        n_keys = min(self._tile_keys(grid), self.keys.shape[1] * self.keys.shape[2])
        size, tiles = n_keys * self.block_rows * self.group, self._memory.__dict__.setdefault("tiles", [])
        if len(tiles) < count or len(tiles[0]) < size:
            tiles[:] = [self.keys.new_empty(size) for _ in range(count)]
        return tiles[:count]

    def _indices(self, block: RowBlock, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows [row] and columns [key, 1, 1]."""
        row = torch.arange(block.start, block.stop, device=self.keys.device)
        return row, torch.arange(start, stop, device=self.keys.device)[:, None, None]


def hide(scores: Tensor, hidden: list[HiddenPart]) -> None:
    """Applies the bounds of ``Tiling.hidden`` to a tile [key/value head, key, group · row] in place."""
    for keys, bound in hidden:
        part = scores[:, keys].unflatten(2, (-1, bound.shape[2]))
        torch.minimum(part, bound, out=part)
