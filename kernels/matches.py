"""Pairs of equal labels, found by sorting instead of comparing every query with every key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.masks import ColumnSpan, VisibleKeys
from workbench.kernels.statistics import MatchLabels
from workbench.kernels.tiles import RowBlock, Tiling

_DENSE = 1 / 16  # from this share of matching pairs on, a mask over the tile is cheaper than a list of them


@dataclass(frozen=True, eq=False)
class MatchList:
    """The matching pairs of a tile, one by one."""

    place: Tensor  # int64 [group · pair], in the flattened tile [key, group · row] of one key/value head
    row: Tensor  # int64 [group · pair], in [group · row]

    def add_mass(self, weights: Tensor, mass: Tensor, scratch: Tensor) -> None:
        """Adds the weight on matching keys, from a tile, to ``mass`` [key/value head, group · row]."""
        head = torch.arange(len(mass), device=mass.device)[:, None]
        place, row = (head * weights[0].numel() + self.place).flatten(), (head * mass.shape[1] + self.row).flatten()
        mass.view(-1).index_add_(0, row, weights.view(-1).index_select(0, place))


@dataclass(frozen=True, eq=False)
class MatchMask:
    """The matching pairs of a tile, where they are many."""

    mask: Tensor  # [key, 1, row] of 0 and 1

    def add_mass(self, weights: Tensor, mass: Tensor, scratch: Tensor) -> None:
        """As for a list; ``scratch`` has the size of the weights and is overwritten."""
        tile = weights.unflatten(2, (-1, self.mask.shape[2]))
        mass += torch.mul(tile, self.mask, out=scratch.view(tile.shape)).flatten(2).sum(1)


TileMatches = MatchList | MatchMask


@dataclass(frozen=True, eq=False)
class MatchRuns:
    """Key columns in the order of their labels, and for every query the run of earlier keys with its label.

    A run reaches from the first key that the query sees to the last one; hidden keys may lie between them.
    """

    columns: Tensor  # int64 [batch, key]
    first: Tensor  # int64 [batch, query], where in ``columns`` the run begins
    count: Tensor  # int64 [batch, query]

    @classmethod
    def of(cls, labels: MatchLabels, mask: VisibleKeys) -> MatchRuns:
        n_queries, n_keys = labels.query.shape[1], labels.key.shape[1]
        both = torch.cat((labels.query, labels.key), 1)
        _, ranks = both.unique(return_inverse=True)  # labels may be large, ranks are not
        query, key = ranks.split((n_queries, n_keys), 1)
        place, columns = (key * (n_keys + 1) + torch.arange(n_keys, device=key.device)).sort(dim=1)  # label, column
        position = torch.arange(n_queries, device=key.device) + mask.query_offset
        lowest = torch.minimum(mask.first, mask.global_first)
        highest = torch.minimum(torch.maximum(mask.end, mask.global_end), position.clamp(min=0))
        start = query * (n_keys + 1)
        first, end = torch.searchsorted(place, start + lowest), torch.searchsorted(place, start + highest)
        return cls(columns, first, torch.where(labels.query < 0, 0, (end - first).clamp(min=0)))


class MatchPairs:
    """The matches of a request, tile by tile."""

    def __init__(self, labels: MatchLabels, tiling: Tiling) -> None:
        self._labels, self._group, self._dtype = labels, tiling.group, tiling.keys.dtype
        self._offset = tiling.rule.mask.query_offset
        self._runs = MatchRuns.of(labels, tiling.rule.mask)

    def tiles(self, block: RowBlock, spans: list[ColumnSpan]) -> list[TileMatches | None]:
        """The matches of every span with a block of rows; None where there are none."""
        counts = self._runs.count[block.batch, block.rows]  # [row]
        total = int(counts.sum())
        if total > _DENSE * len(block) * sum(map(len, spans)):
            return [self._dense(block, span) for span in spans]
        rows = torch.arange(len(block), device=counts.device).repeat_interleave(counts, output_size=total)
        before = (counts.cumsum(0) - counts)[rows]
        places = self._runs.first[block.batch, block.rows][rows] + torch.arange(total, device=counts.device) - before
        columns = self._runs.columns[block.batch, places]
        return [self._listed(rows, columns, len(block), span) for span in spans]

    def _listed(self, rows: Tensor, columns: Tensor, n_rows: int, span: ColumnSpan) -> MatchList | None:
        inside = ((columns >= span.start) & (columns < span.stop)).nonzero()[:, 0]
        if not len(inside):
            return None
        heads = torch.arange(self._group, device=rows.device)[:, None] * n_rows
        row = heads + rows[inside]  # [group, pair]
        place = row + (columns[inside] - span.start) * (self._group * n_rows)
        return MatchList(place.flatten(), row.flatten())

    def _dense(self, block: RowBlock, span: ColumnSpan) -> MatchMask | None:
        query, key = self._labels.query[block.batch, block.rows], self._labels.key[block.batch, span.start : span.stop]
        row = torch.arange(block.start, block.stop, device=query.device)
        column = torch.arange(span.start, span.stop, device=query.device)[:, None]
        matches = (key[:, None] == query) & (query >= 0) & (column < row + self._offset)
        return MatchMask(matches[:, None].to(self._dtype)) if matches.any() else None
