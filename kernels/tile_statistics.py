"""The statistics that need every pair, in one pass over tiles of scores with the known normaliser.

Scores are in base 2 and shifted, t = s - lse, so that weights are p = exp2(t) and the entropy is -ln 2 · Σ p t, free of
the cancellation in lse - E[s].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.kernels.largest import largest_again, largest_in_tile, largest_weights
from workbench.kernels.masks import ColumnSpan, KeyGrid
from workbench.kernels.matches import MatchPairs, TileMatches
from workbench.kernels.normaliser import Normaliser
from workbench.kernels.online import OnlineForward
from workbench.kernels.statistics import StatisticsRequest, received_statistics, weights_per_head
from workbench.kernels.tiles import HIDDEN, KEY_BLOCK, RowBlock, Tiling, hide
from workbench.kernels.workers import run_pieces

_SMALLEST_KEY_BLOCK = 8  # by less they would hardly shrink: other blocks of a pooled map are taken as they are,
_LARGEST_KEY_BLOCK = 64  # if not larger than this, or else in blocks of which the last is shorter

# Of a tile [key/value head, key, group · row]: t and p, and what t still lacks, to be subtracted: [.., group · row].
_Weights = tuple[Tensor, Tensor, Tensor | None]


def tile_statistics(
    tiling: Tiling, normaliser: Normaliser, request: StatisticsRequest, forward: OnlineForward | None = None
) -> dict[str, Any]:
    """Entropy (of the keys alone), maximum, distance, match and class mass, received, pooled maps, top keys.

    With a ``forward``, whose normaliser that is, its z and lse are calculated in the same pass: where a row has a
    single tile, the weights in it serve both. The request has to have the usual cut.
    """
    tile_pass = _TilePass(tiling, normaliser, request, forward)
    if tile_pass.has_work:
        run_pieces(tile_pass.work, range(len(tile_pass.pieces)), normaliser.lse.device)
    return tile_pass.results()


def tile_cut(tiling: Tiling, request: StatisticsRequest) -> tuple[list[list[RowBlock]], KeyGrid]:
    """The pieces of work and the grid of columns that fit the request's pooled map."""
    rows, period = request.pooled or (1, KEY_BLOCK)
    size = next(size for size in range(KEY_BLOCK, 0, -1) if period % size == 0)
    if size < _SMALLEST_KEY_BLOCK:
        size = period if period <= _LARGEST_KEY_BLOCK else KEY_BLOCK
    return tiling.pieces(rows), KeyGrid(tiling.rule.mask.n_keys, size=size, period=period)


def has_usual_cut(tiling: Tiling, request: StatisticsRequest) -> bool:
    """Whether tiles that fit the request's pooled map are those that a forward takes without any statistics."""
    rows, period = request.pooled or (1, KEY_BLOCK)
    return tiling.block_rows % rows == 0 and period % KEY_BLOCK == 0


@dataclass(frozen=True, eq=False)
class _SharedTile:
    """What the tiles of all heads over the same rows and columns have in common."""

    span: ColumnSpan
    key_blocks: slice  # its blocks of keys, counted from the first one of the block of rows
    behind: Tensor  # i - j from the first row, [key], for the first keys: those that do not lie ahead of it
    ahead: Tensor  # i - j, or |i - j|, for the others, [key, 1, row]
    matches: TileMatches | None

    @property
    def columns(self) -> slice:
        return slice(self.span.start, self.span.stop)


@dataclass(frozen=True, eq=False)
class _SharedRows:
    """A block of rows and its tiles."""

    block: RowBlock
    spans: list[ColumnSpan]
    tiles: list[_SharedTile]  # of those spans in which something is to be done
    heads: list[slice]  # the key/value heads that are taken together
    key_blocks: slice  # from the first that is visible, or the first of its period, to the last
    n_behind: int  # how many of the key blocks, the first ones, do not lie ahead of the first row


class _TilePass:
    """One pass: which quantities it needs, where their results go, and the loop over tiles."""

    def __init__(
        self, tiling: Tiling, normaliser: Normaliser, request: StatisticsRequest, forward: OnlineForward | None
    ) -> None:
        mask, lse, self._forward = tiling.rule.mask, normaliser.lse, forward
        self._tiling, self._normaliser, self._lse, self._request = tiling, normaliser, lse, request
        self.pieces, self._grid = tile_cut(tiling, request)
        edges = [self._grid.edges(i) for i in range(self._grid.index(mask.n_keys - 1) + 1)]
        self._edges = torch.tensor(edges, device=lse.device).T  # [2, key block]
        self._n_top = max(int(request.max_weight), request.top_keys)
        self._needs_maxima = self._n_top > 0 or request.pooled is not None
        self._needs_sums = request.pooled is not None or request.mean_distance
        self._needs_every_tile = self._needs_maxima or request.entropy or request.mean_distance or request.received
        self._needs_every_tile |= request.classes is not None
        self._pairs = MatchPairs(labels, tiling) if (labels := request.labels()) else None
        self._classes = None if request.classes is None else request.class_indicators(lse.dtype)  # [batch, key, class]
        self._columns = torch.arange(mask.n_keys, device=lse.device, dtype=lse.dtype)
        self._weights = None
        if request.query_weights is not None:
            weights = weights_per_head(request.query_weights).to(lse.dtype)
            self._weights = weights.expand(lse.shape[0], lse.shape[1] * lse.shape[2], -1).unflatten(1, lse.shape[1:3])
        self._places = self._allocate()

    @property
    def has_work(self) -> bool:
        return self._needs_every_tile or self._pairs is not None or self._forward is not None

    def _allocate(self) -> dict[str, Tensor]:
        lse, request, n_keys = self._lse, self._request, self._tiling.rule.mask.n_keys
        shapes: dict[str, tuple[int, ...]] = {}
        if request.entropy:
            shapes["entropy"] = ()
        if request.mean_distance:
            shapes["mean_distance"] = ()
        if self._pairs is not None:
            shapes["match_mass"] = (self._pairs.n_names,)
        if self._classes is not None:
            shapes["class_mass"] = self._classes.shape[2:]
        if self._n_top:
            shapes["largest_weights"] = shapes["largest_keys"] = (self._n_top,)
        places = {name: lse.new_zeros(*lse.shape, *shape) for name, shape in shapes.items()}
        if self._n_top:
            places["largest_keys"] = torch.full_like(places["largest_keys"], -1, dtype=torch.int64)
        if request.received:  # a sum for every piece of work
            places["received"] = lse.new_zeros(len(self.pieces), lse.shape[1], n_keys, lse.shape[2])
        if request.pooled is not None:
            rows, columns = request.pooled
            blocks = (-(-lse.shape[3] // rows), -(-n_keys // columns))
            places["pooled_max"] = lse.new_zeros(*lse.shape[:3], *blocks)
            places["pooled_sum"] = torch.zeros_like(places["pooled_max"])
        return places

    def work(self, index: int) -> None:
        """Does one piece of work and stores its results."""
        tiling, scratch = self._tiling, self._tiling.scratch(self._grid, 2)
        for block in self.pieces[index]:
            rows = self._shared(block)
            edges = self._edges[:, rows.key_blocks]
            for heads in rows.heads:
                queries = tiling.block_queries(block, heads)  # [key/value head, d_head, group · row]
                known = None if self._forward is None else self._attend(rows, heads, queries, scratch)
                shifts = [] if known else self._normaliser.parts(block.place(heads))
                sums = self._sum_tiles(index, rows, heads, queries, shifts, known, scratch)
                if self._n_top and len(rows.tiles) > 1:
                    sums["largest_scores"], sums["largest_keys"] = largest_again(
                        tiling, block, heads, shifts, sums["maxima"], edges, self._n_top, scratch[0]
                    )
                self._store(rows, heads, sums)
                if self._request.pooled is not None and rows.tiles:
                    self._pool(rows, heads, "pooled_max", sums["maxima"].exp2_(), torch.amax, torch.maximum)
                    self._pool(rows, heads, "pooled_sum", sums["sums"], torch.sum, torch.add)

    def _attend(self, rows: _SharedRows, heads: slice, queries: Tensor, scratch: list[Tensor]) -> _Weights | None:
        """z and lse of a block of rows, and the weights in its tile if it has a single one."""
        assert self._forward is not None
        lowest = self._tiling.lowest
        hidden = [self._tiling.hidden(rows.block, span, lowest) for span in rows.spans]
        tile = self._forward.attend(rows.block, heads, queries, rows.spans, hidden, scratch)
        if tile is None or len(rows.spans) > 1:
            return None
        t, p = tile
        if not self._tiling.rule.only_scales:
            t.clamp_(min=HIDDEN)  # a bias may be -inf
        rest = self._normaliser.second(rows.block.place(heads))
        p *= torch.exp2(-rest)[:, None]
        return t, p, rest

    def _tile_again(
        self,
        rows: _SharedRows,
        span: ColumnSpan,
        heads: slice,
        queries: Tensor,
        shifts: list[Tensor],
        scratch: list[Tensor],
    ) -> _Weights:
        """The weights in a tile from the known normaliser."""
        t = self._tiling.scores(rows.block, heads, span, queries, scratch[0])
        for shift in shifts:
            t -= shift[:, None]
        if not self._tiling.rule.only_scales:
            t.clamp_(min=HIDDEN)  # a bias may be -inf
        hide(t, self._tiling.hidden(rows.block, span, HIDDEN))
        return t, torch.exp2(t, out=scratch[1][: t.numel()].view(t.shape)), None

    def _shared(self, block: RowBlock) -> _SharedRows:
        tiling, mask, grid = self._tiling, self._tiling.rule.mask, self._grid
        spans = tiling.spans(block, grid)
        heads = tiling.heads_at_a_time(spans, grid)
        matches: list[TileMatches | None] = [None] * len(spans)
        if self._pairs is not None:
            matches = self._pairs.tiles(block, spans)
        position = block.start + mask.query_offset
        first = grid.index(spans[0].start) // grid.blocks_per_period * grid.blocks_per_period if spans else 0
        ahead = grid.n_keys if position >= grid.n_keys - 1 else grid.floor(max(position + 1, 0))  # the first column
        tiles: list[_SharedTile] = []
        for span, match in zip(spans, matches, strict=True):
            if not self._needs_every_tile and match is None:
                continue
            distances = self._columns[:0], self._columns[:0]
            if self._request.mean_distance:
                behind, further = self._columns[span.start : span.stop].tensor_split([max(ahead - span.start, 0)])
                row = torch.arange(block.start, block.stop, device=further.device)
                distances = position - behind, mask.distance(row, further[:, None, None])
            key_blocks = slice(grid.index(span.start) - first, grid.index(span.stop - 1) + 1 - first)
            tiles.append(_SharedTile(span, key_blocks, *distances, match))
        all_blocks = slice(first, first + (tiles[-1].key_blocks.stop if tiles else 0))
        n_behind = grid.index(ahead - 1) + 1 - first if ahead else 0
        return _SharedRows(block, spans, tiles, heads, all_blocks, max(n_behind, 0))

    def _sum_tiles(
        self,
        index: int,
        rows: _SharedRows,
        heads: slice,
        queries: Tensor,
        shifts: list[Tensor],
        known: _Weights | None,
        scratch: list[Tensor],
    ) -> dict[str, Tensor]:
        """Sums over all tiles of a block of rows, [key/value head, .., group · row]; received goes to its place."""
        block, shape = rows.block, (self._tiling.group, len(rows.block))
        sums = self._empty_sums(len(queries), queries.shape[2], rows.key_blocks.stop - rows.key_blocks.start)
        for tile in rows.tiles:
            t, p, rest = known or self._tile_again(rows, tile.span, heads, queries, shifts, scratch)
            if "maxima" in sums:
                maxima = sums["maxima"][:, tile.key_blocks]
                _over_key_blocks(torch.amax, t, self._grid.size, maxima)
                if self._n_top and len(rows.tiles) == 1:
                    edges = self._edges[:, rows.key_blocks][:, tile.key_blocks]
                    sums["largest_scores"], sums["largest_keys"] = largest_in_tile(
                        t, tile.span.start, maxima, edges, self._n_top
                    )
            if "sums" in sums:
                _over_key_blocks(torch.sum, p, self._grid.size, sums["sums"][:, tile.key_blocks])
            if "entropy" in sums:
                sums["entropy"] += t.mul_(p).sum(1)
            if "mean_distance" in sums:  # the way from the first row to the others is added in _store
                behind, ahead = p.tensor_split([len(tile.behind)], 1)
                sums["mean_distance"] += tile.behind @ behind
                if len(tile.ahead):
                    distance = ahead.unflatten(2, shape) * tile.ahead
                    sums["mean_distance"] += distance.sum(1).flatten(1)
            if tile.matches is not None:
                tile.matches.add_mass(p.unflatten(2, shape), sums["match_mass"], t.unflatten(2, shape))
            if self._classes is not None:
                sums["class_mass"] += self._classes[block.batch, tile.columns].mT @ p
            if "received" in self._places:
                if self._weights is not None:
                    p *= self._weights[block.place(heads)].flatten(1)[:, None]
                received = p.unflatten(2, shape).sum(3)  # [key/value head, key, group]
                self._places["received"][index, heads, tile.columns] += received
            if rest is not None:
                for name in sums.keys() & {"entropy", "maxima", "largest_scores"}:
                    sums[name] -= rest if name == "entropy" else rest[:, None]
        return sums

    def _empty_sums(self, n_heads: int, width: int, n_key_blocks: int) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        for name in ("entropy", "mean_distance"):
            if name in self._places:
                sums[name] = self._lse.new_zeros(n_heads, width)
        if self._classes is not None:
            sums["class_mass"] = self._lse.new_zeros(n_heads, self._classes.shape[2], width)
        if self._pairs is not None:
            group = self._tiling.group
            sums["match_mass"] = self._lse.new_zeros(n_heads, group, width // group, self._pairs.n_names)
        if self._needs_maxima:
            sums["maxima"] = self._lse.new_full((n_heads, n_key_blocks, width), HIDDEN)
        if self._needs_sums:
            sums["sums"] = self._lse.new_zeros(n_heads, n_key_blocks, width)
        return sums

    def _store(self, rows: _SharedRows, heads: slice, sums: dict[str, Tensor]) -> None:
        """Stores what is one number, or one per class, for every row."""
        place, shape = rows.block.place(heads), (-1, self._tiling.group, len(rows.block))
        if "entropy" in sums:
            self._places["entropy"][place] = sums["entropy"].view(shape) * -math.log(2)
        if "mean_distance" in sums:
            behind = sums["sums"][:, : rows.n_behind].sum(1).view(shape)
            further = torch.arange(len(rows.block), device=behind.device)  # rows after the first
            self._places["mean_distance"][place] = sums["mean_distance"].view(shape) + behind * further
        if "match_mass" in sums:
            self._places["match_mass"][place] = sums["match_mass"]
        several: dict[str, Tensor] = {"class_mass": sums["class_mass"]} if "class_mass" in sums else {}
        if "largest_keys" in sums:
            found = largest_weights((sums["largest_scores"], sums["largest_keys"]), self._n_top)
            several["largest_weights"], several["largest_keys"] = found
        for name, values in several.items():
            self._places[name][place] = values.unflatten(2, shape[1:]).movedim(1, 3)

    def _pool(
        self,
        rows: _SharedRows,
        heads: slice,
        name: str,
        blocks: Tensor,
        reduce: Callable[..., Tensor],
        join: Callable[..., Tensor],
    ) -> None:
        """Reduces blocks of keys [key/value head, key block, group · row] to a pooled map's, and joins them to it."""
        block, length = rows.block, self._grid.blocks_per_period
        pooled_rows, _ = self._request.pooled or (1, 1)
        height = min(pooled_rows, len(block))
        blocks = blocks.unflatten(2, (-1, len(block)))
        if any(missing := (-len(block) % height, -blocks.shape[1] % length)):
            blocks = pad(blocks, (0, missing[0], 0, 0, 0, missing[1]))
        if length > 1:
            blocks = reduce(blocks.unflatten(1, (-1, length)), 2)
        blocks = reduce(blocks.unflatten(3, (-1, height)), 4).movedim(1, 3)  # [.., group, row block, column block]
        row, column = block.start // pooled_rows, rows.key_blocks.start // length
        target = self._places[name][block.batch, heads, :, row : row + blocks.shape[2]]
        target = target[..., column : column + blocks.shape[3]]
        join(target, blocks, out=target)

    def results(self) -> dict[str, Any]:
        """The statistics under their public names, with a head axis."""
        found: dict[str, Any] = {
            name: place.flatten(1, 2) for name, place in self._places.items() if name != "received"
        }
        if self._pairs is not None:
            masses = found["match_mass"].movedim(3, 0).contiguous()
            found["match_mass"] = dict(zip(self._request.labels(), masses, strict=True))
        if self._n_top:
            weights, keys = found.pop("largest_weights"), found.pop("largest_keys")
            if self._request.max_weight:
                found["max_weight"], found["argmax_key"] = weights[..., 0], keys[..., 0]
            if self._request.top_keys:
                found["top_weights"], found["top_keys"] = weights, keys
        if "received" in self._places:
            parts = self._places["received"].unflatten(0, (self._lse.shape[0], -1))
            received = parts.sum(1).movedim(3, 2).flatten(1, 2)  # [batch, head, key]
            found |= received_statistics(received, self._tiling.rule.mask, self._request.query_weights)
        return found


def _over_key_blocks(reduce: Callable[..., Tensor], tile: Tensor, size: int, out: Tensor) -> None:
    """Reduces a tile [key/value head, key, group · row] over blocks of keys, the last one ragged, to one row each."""
    whole, rest = divmod(tile.shape[1], size)
    reduce(tile[:, : whole * size].unflatten(1, (whole, size)), 2, out=out[:, :whole])
    if rest:
        reduce(tile[:, whole * size :], 1, out=out[:, whole])
