"""Pairs of equal labels, found by sorting instead of comparing every query with every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.kernels.masks import ColumnSpan, VisibleKeys
from workbench.kernels.statistics import MatchLabels
from workbench.kernels.tiles import RowBlock, Tiling

_DENSE = 1 / 16  # from this share of matching pairs on, a mask over the tile is cheaper than a list of them


@dataclass(frozen=True, eq=False)
class MatchList:
    """The matching pairs of a tile, one by one."""

    key: Tensor  # int64 [pair], counted from the tile's first
    row: Tensor  # int64 [pair], counted from the block's first
    run: Tensor  # int64 [pair], row · names + name

    def add_mass(self, weights: Tensor, mass: Tensor, scratch: Tensor) -> None:
        """Adds the weight on matching keys to ``mass``.

        Args:
            weights: of a tile, [key/value head, key, group, row], contiguous.
            mass: [key/value head, group, row, name], contiguous.
        """
        heads, n_keys, group, rows = weights.shape
        place = torch.add(self.row, self.key, alpha=group * rows)
        place = place + torch.arange(0, group * rows, rows, device=place.device)[:, None]
        place = place + torch.arange(0, weights.numel(), n_keys * group * rows, device=place.device)[:, None, None]
        found = weights.view(-1).index_select(0, place.flatten())
        mass.view(heads * group, -1).index_add_(1, self.run, found.view(heads * group, -1))


@dataclass(frozen=True, eq=False)
class MatchMask:
    """The matching pairs of a tile, where they are many."""

    mask: Tensor  # [name, key, 1, row] of 0 and 1

    def add_mass(self, weights: Tensor, mass: Tensor, scratch: Tensor) -> None:
        """As for a list; ``scratch`` has the shape of the weights and is overwritten."""
        for name, mask in enumerate(self.mask):
            mass[..., name] += torch.mul(weights, mask, out=scratch).sum(1)


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
    """The matches of a request, tile by tile, for all names together."""

    def __init__(self, labels: Mapping[str, MatchLabels], tiling: Tiling) -> None:
        self._dtype, self._offset = tiling.keys.dtype, tiling.rule.mask.query_offset
        self._query = torch.stack([pair.query for pair in labels.values()], 1)  # [batch, name, query]
        self._key = torch.stack([pair.key for pair in labels.values()], 1)  # [batch, name, key]
        runs = [MatchRuns.of(pair, tiling.rule.mask) for pair in labels.values()]
        self._columns = torch.cat([run.columns for run in runs], 1)  # [batch, name · key]
        self._counts = torch.stack([run.count for run in runs], 2).flatten(1)  # [batch, query · name]
        ends = self._counts.cumsum(1)
        name = torch.arange(len(runs), device=ends.device)
        first = torch.stack([run.first for run in runs], 2) + name * self._key.shape[2]
        # The pairs of a sequence are counted through by row and name; in _columns, pair i of a run is at i + _shifts.
        self._shifts = first.flatten(1) - (ends - self._counts)
        self._pairs_before = pad(ends, (1, 0)).tolist()

    @property
    def n_names(self) -> int:
        return self._query.shape[1]

    def tiles(self, block: RowBlock, spans: list[ColumnSpan]) -> list[TileMatches | None]:
        """The matches of every span with a block of rows, None where there are none."""
        runs = slice(block.start * self.n_names, block.stop * self.n_names)
        before, end = (self._pairs_before[block.batch][edge] for edge in (runs.start, runs.stop))
        if end - before > _DENSE * self.n_names * len(block) * sum(map(len, spans)):
            return [self._dense(block, span) for span in spans]
        if end == before:
            return [None] * len(spans)
        counts = self._counts[block.batch, runs]
        run = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=end - before)
        pairs = torch.arange(before, end, device=counts.device)
        columns = self._columns[block.batch, pairs.add_(self._shifts[block.batch, runs][run])]
        return [self._listed(run, columns, span) for span in spans]

    def _listed(self, run: Tensor, columns: Tensor, span: ColumnSpan) -> MatchList | None:
        inside = ((columns >= span.start) & (columns < span.stop)).nonzero()[:, 0]
        if not len(inside):
            return None
        if len(inside) < len(run):
            run, columns = run[inside], columns[inside]
        return MatchList(columns - span.start, run // self.n_names, run)

    def _dense(self, block: RowBlock, span: ColumnSpan) -> MatchMask | None:
        query, key = self._query[block.batch, :, block.rows], self._key[block.batch, :, span.start : span.stop]
        row = torch.arange(block.start, block.stop, device=query.device)
        column = torch.arange(span.start, span.stop, device=query.device)[:, None]
        matches = (key[:, :, None] == query[:, None]) & (query >= 0)[:, None] & (column < row + self._offset)
        return MatchMask(matches[:, :, None].to(self._dtype)) if matches.any() else None
