"""The statistics that need every pair, in one pass over tiles of scores with the known lse.

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

from workbench.kernels.largest import largest_weights
from workbench.kernels.masks import ColumnSpan
from workbench.kernels.matches import MatchPairs, TileMatches
from workbench.kernels.statistics import StatisticsRequest, received_statistics, weights_per_head
from workbench.kernels.tiles import HIDDEN, RowBlock, Tiling
from workbench.kernels.workers import run_pieces

_KEY_BLOCK = 16  # maxima and sums are first taken over this many keys, or over the pooled map's blocks where smaller
_LARGEST_KEY_BLOCK = 64


def tile_statistics(tiling: Tiling, lse: Tensor, request: StatisticsRequest) -> dict[str, Any]:
    """Entropy (of the keys alone), maximum, distance, match and class mass, attention received, pooled maps, top keys.

    Args:
        lse: [batch, key/value head, group, query] in base 2, 0 for rows without a key.
    """
    tile_pass = _TilePass(tiling, lse, request)
    if tile_pass.has_work:
        run_pieces(tile_pass.work, range(len(tile_pass.pieces)), lse.device)
    return tile_pass.results()


@dataclass(frozen=True, eq=False)
class _SharedTile:
    """What the tiles of all heads over the same rows and columns have in common."""

    span: ColumnSpan
    key_blocks: slice  # its blocks among those of all tiles over these rows
    hidden: Tensor | None  # upper bound of scores, [key, 1, row]
    distance: Tensor | None  # |i - j|, [key, 1, row], only without causality
    matches: dict[str, TileMatches]


class _TilePass:
    """One pass: which quantities it needs, where their results go, and the loop over tiles."""

    def __init__(self, tiling: Tiling, lse: Tensor, request: StatisticsRequest) -> None:
        mask = tiling.rule.mask
        self._tiling, self._lse, self._request = tiling, lse, request
        rows, columns = request.pooled or (1, _KEY_BLOCK)
        fine = columns <= _LARGEST_KEY_BLOCK  # then a tile is made of whole pooled blocks, else it lies within one
        self._key_block = columns if fine else _KEY_BLOCK
        self._step = columns if fine else 1
        self._boundary = None if fine else columns
        self.pieces = tiling.pieces(rows)
        self._n_top = max(int(request.max_weight), request.top_keys)
        self._needs_maxima = self._n_top > 0 or request.pooled is not None
        self._needs_sums = request.pooled is not None or (request.mean_distance and mask.causal)
        self._needs_every_tile = self._needs_maxima or request.entropy or request.mean_distance or request.received
        self._needs_every_tile |= request.classes is not None
        self._pairs = {name: MatchPairs(labels, mask.query_offset) for name, labels in request.labels().items()}
        self._classes = None if request.classes is None else request.class_indicators(lse.dtype)  # [batch, key, class]
        self._ones = lse.new_ones(mask.n_keys)
        self._columns = torch.arange(mask.n_keys, device=lse.device, dtype=lse.dtype)
        self._weights = None
        if request.query_weights is not None:
            weights = weights_per_head(request.query_weights).to(lse.dtype)
            self._weights = weights.expand(lse.shape[0], lse.shape[1] * lse.shape[2], -1).unflatten(1, lse.shape[1:3])
        self._places = self._allocate()

    @property
    def has_work(self) -> bool:
        return self._needs_every_tile or bool(self._pairs)

    def _allocate(self) -> dict[str, Tensor]:
        lse, request, n_keys = self._lse, self._request, self._tiling.rule.mask.n_keys
        shapes: dict[str, tuple[int, ...]] = {}
        if request.entropy:
            shapes["entropy"] = ()
        if request.mean_distance:
            shapes["mean_distance"] = ()
        shapes |= {f"match {name}": () for name in self._pairs}
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
        scratch = self._tiling.buffer(), self._tiling.buffer()
        for block in self.pieces[index]:
            tiles, key_blocks = self._shared_tiles(block)
            for kv_head in range(self._lse.shape[1]):
                sums = self._sum_tiles(index, block, kv_head, tiles, scratch)
                self._store(block, kv_head, key_blocks, sums)

    def _shared_tiles(self, block: RowBlock) -> tuple[list[_SharedTile], Tensor]:
        """The tiles over a block of rows, and first column and end of their key blocks, [2, key block]."""
        tiling, mask = self._tiling, self._tiling.rule.mask
        spans = tiling.spans(block, self._step, self._boundary)
        matches = {name: pairs.tiles(block, spans, tiling.group) for name, pairs in self._pairs.items()}
        row = torch.arange(block.start, block.stop, device=self._lse.device)
        tiles: list[_SharedTile] = []
        starts, ends = [row[:0]], [row[:0]]
        n_key_blocks = 0
        for i, span in enumerate(spans):
            here = {name: found for name, tile_matches in matches.items() if (found := tile_matches[i]) is not None}
            if not (self._needs_every_tile or here):
                continue
            distance = None
            if self._request.mean_distance and not mask.causal:
                column = torch.arange(span.start, span.stop, device=row.device)[:, None, None]
                distance = mask.distance(row, column).to(self._lse.dtype)
            first = torch.arange(span.start, span.stop, self._key_block, device=row.device)
            starts.append(first)
            ends.append((first + self._key_block).clamp(max=span.stop))
            key_blocks = slice(n_key_blocks, n_key_blocks + len(first))
            n_key_blocks = key_blocks.stop
            tiles.append(_SharedTile(span, key_blocks, tiling.hidden(block, span, HIDDEN), distance, here))
        return tiles, torch.stack((torch.cat(starts), torch.cat(ends)))

    def _sum_tiles(
        self, index: int, block: RowBlock, kv_head: int, tiles: list[_SharedTile], scratch: tuple[Tensor, Tensor]
    ) -> dict[str, Tensor]:
        """Sums over all tiles of one block of rows, [.., group · row]."""
        tiling, place = self._tiling, _place(block, kv_head)
        queries = tiling.block_queries(block, kv_head)  # [d_head, group · row]
        shift = self._lse[place]  # [group, row]
        sums = self._empty_sums(queries.shape[1], tiles[-1].key_blocks.stop if tiles else 0)
        for tile in tiles:
            columns = slice(tile.span.start, tile.span.stop)
            ones = self._ones[columns]
            t = tiling.scores(block, kv_head, tile.span, queries, scratch[0]).sub_(shift)  # [key, group, row]
            if not tiling.rule.only_scales:
                t.clamp_(min=HIDDEN)  # a bias may be -inf
            if tile.hidden is not None:
                torch.minimum(t, tile.hidden, out=t)
            if "maxima" in sums:
                sums["maxima"][tile.key_blocks] = _over_key_blocks(torch.amax, t, self._key_block)
            p = torch.exp2(t, out=scratch[1][: t.numel()].view(t.shape))
            if "sums" in sums:
                sums["sums"][tile.key_blocks] = _over_key_blocks(torch.sum, p, self._key_block)
            if "entropy" in sums:
                sums["entropy"].addmv_(t.mul_(p).flatten(1).mT, ones)
            if tile.distance is not None:
                sums["mean_distance"].addmv_(torch.mul(p, tile.distance, out=t).flatten(1).mT, ones)
            elif "mean_distance" in sums:  # i - j from the block's first row; the rest of i is added once, in _store
                back = block.start + tiling.rule.mask.query_offset - self._columns[columns]
                sums["mean_distance"].addmv_(p.flatten(1).mT, back)
            for name, matches in tile.matches.items():
                matches.add_mass(p, sums[f"match {name}"], t)
            if self._classes is not None:
                sums["class_mass"].addmm_(self._classes[block.batch, columns].mT, p.flatten(1))
            if "received" in self._places:
                weighted = p if self._weights is None else torch.mul(p, self._weights[place], out=t)
                self._places["received"][index, kv_head, columns] += weighted.sum(2)
        return sums

    def _empty_sums(self, width: int, n_key_blocks: int) -> dict[str, Tensor]:
        names = [name for name in self._places if name in ("entropy", "mean_distance") or name.startswith("match ")]
        sums = {name: self._lse.new_zeros(width) for name in names}
        if self._classes is not None:
            sums["class_mass"] = self._lse.new_zeros(self._classes.shape[2], width)
        if self._needs_maxima:
            sums["maxima"] = self._lse.new_empty(n_key_blocks, width)
        if self._needs_sums:
            sums["sums"] = self._lse.new_empty(n_key_blocks, width)
        return sums

    def _store(self, block: RowBlock, kv_head: int, key_blocks: Tensor, sums: dict[str, Tensor]) -> None:
        places, place, shape = self._places, _place(block, kv_head), (self._tiling.group, len(block))
        for name in self._pairs:
            places[f"match {name}"][place] = sums[f"match {name}"].view(shape)
        if "entropy" in sums:
            places["entropy"][place] = sums["entropy"].view(shape) * -math.log(2)
        if "mean_distance" in sums:
            distance = sums["mean_distance"].view(shape)
            if self._tiling.rule.mask.causal:
                distance += sums["sums"].sum(0).view(shape) * torch.arange(len(block), device=distance.device)
            places["mean_distance"][place] = distance
        if "class_mass" in sums:
            places["class_mass"][place] = sums["class_mass"].unflatten(1, shape).permute(1, 2, 0)
        if self._n_top and key_blocks.shape[1]:
            places["largest_weights"][place], places["largest_keys"][place] = largest_weights(
                self._tiling, block, kv_head, self._lse[place], sums["maxima"], key_blocks, self._n_top
            )
        if self._request.pooled is not None and key_blocks.shape[1]:
            self._pool(block, kv_head, key_blocks[0], sums["maxima"].view(-1, *shape), sums["sums"].view(-1, *shape))

    def _pool(self, block: RowBlock, kv_head: int, first: Tensor, maxima: Tensor, sums: Tensor) -> None:
        """Adds blocks of keys [key block, group, row], which begin at the columns ``first``, to the pooled maps."""
        rows, columns = self._request.pooled or (1, 1)
        height = min(rows, len(block))  # rows of a pooled block in this block of rows
        missing = -len(block) % height
        maxima = pad(maxima, (0, missing), value=HIDDEN).unflatten(2, (-1, height)).amax(3).exp2()
        sums = pad(sums, (0, missing)).unflatten(2, (-1, height)).sum(3)
        at = block.start // rows
        place = (block.batch, kv_head, slice(None), slice(at, at + maxima.shape[2]))
        index = (first // columns).expand(*maxima.shape[1:], -1)  # [group, row block, key block]
        pooled_max, pooled_sum = self._places["pooled_max"][place], self._places["pooled_sum"][place]
        pooled_max.scatter_reduce_(2, index, maxima.permute(1, 2, 0), "amax")
        pooled_sum.scatter_add_(2, index, sums.permute(1, 2, 0))

    def results(self) -> dict[str, Any]:
        """The statistics under their public names, with a head axis."""
        found: dict[str, Any] = {
            name: place if name == "received" else place.flatten(1, 2) for name, place in self._places.items()
        }
        if self._pairs:
            found["match_mass"] = {name: found.pop(f"match {name}") for name in self._pairs}
        if self._n_top:
            weights, keys = found.pop("largest_weights"), found.pop("largest_keys")
            if self._request.max_weight:
                found["max_weight"], found["argmax_key"] = weights[..., 0], keys[..., 0]
            if self._request.top_keys:
                found["top_weights"], found["top_keys"] = weights, keys
        if "received" in found:
            parts = self._places["received"].unflatten(
                0, (self._lse.shape[0], -1)
            )  # [batch, piece, kv head, key, group]
            received = parts.sum(1).movedim(3, 2).flatten(1, 2)  # [batch, head, key]
            found |= received_statistics(received, self._tiling.rule.mask, self._request.query_weights)
        return found


def _place(block: RowBlock, kv_head: int) -> tuple[int, int, slice, slice]:
    return block.batch, kv_head, slice(None), block.rows


def _over_key_blocks(reduce: Callable[..., Tensor], tile: Tensor, size: int) -> Tensor:
    """Reduction of a tile [key, group, row] over blocks of keys, the last one ragged: [key block, group · row]."""
    flat = tile.flatten(1)
    whole = len(flat) // size * size
    blocks = reduce(flat[:whole].unflatten(0, (-1, size)), 1)
    return blocks if whole == len(flat) else torch.cat((blocks, reduce(flat[whole:], 0, keepdim=True)))
