"""Weights of the few pairs that a statistic names, from the known lse: no pass over all pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.normaliser import Normaliser
from workbench.kernels.statistics import StatisticsRequest
from workbench.kernels.tiles import Place, RowBlock, Tiling
from workbench.kernels.workers import run_pieces

_ROWS = 512  # rows of all heads that are probed at a time


def probe_statistics(tiling: Tiling, normaliser: Normaliser, request: StatisticsRequest) -> dict[str, Tensor]:
    """Sink and offset mass."""
    mask, lse = tiling.rule.mask, normaliser.lse  # lse [batch, key/value head, group, query]
    found: dict[str, Tensor] = {}
    if request.sink_keys is not None:
        found["sink_mass"] = torch.zeros_like(lse)
        sinks = request.sink_positions(lse.shape[0], mask.n_keys, lse.device)  # [batch, m]
    if request.offsets:
        found["offset_mass"] = lse.new_zeros(*lse.shape, len(request.offsets))

    def probe(block: RowBlock) -> None:
        place = block.place(slice(0, lse.shape[1]))
        queries, keys = tiling.queries[place], tiling.keys[block.batch]  # [kv head, group, row, d], [kv head, key, d]
        row = torch.arange(block.start, block.stop, device=lse.device)[:, None]
        if request.sink_keys is not None:
            columns = sinks[block.batch]
            products = (queries.flatten(1, 2) @ keys[:, columns].mT).unflatten(1, queries.shape[1:3])
            found["sink_mass"][place] = _weights(tiling, products, block.batch, row, columns, normaliser, place).sum(3)
        for i, back in enumerate(request.offsets):
            columns = row + mask.query_offset - back  # [row, 1]
            there = keys[:, columns[:, 0].clamp(0, mask.n_keys - 1)]  # [kv head, row, d]
            products = (queries * there[:, None]).sum(3, keepdim=True)
            weights = _weights(tiling, products, block.batch, row, columns, normaliser, place)
            found["offset_mass"][(*place, i)] = weights[..., 0]

    if found:
        n_batch, n_rows = lse.shape[0], lse.shape[3]
        starts = range(0, n_rows, _ROWS)
        blocks = [RowBlock(b, start, min(start + _ROWS, n_rows)) for b in range(n_batch) for start in starts]
        run_pieces(probe, blocks, lse.device)
    return {name: mass.flatten(1, 2) for name, mass in found.items()}


def _weights(
    tiling: Tiling,
    products: Tensor,
    batch: int,
    row: Tensor,
    columns: Tensor,
    normaliser: Normaliser,
    place: Place,
) -> Tensor:
    """Weights of pairs [key/value head, group, row, m], 0 where there is no such column or the mask hides it."""
    mask = tiling.rule.mask
    exists = (columns >= 0) & (columns < mask.n_keys)
    columns = columns.clamp(0, mask.n_keys - 1)
    head = tiling.heads(place[1]).view(-1, tiling.group, 1, 1)
    scores = tiling.rule.biased_scores(products, head, row, columns)
    visible = exists & mask.visible(batch, row, columns)
    for shift in normaliser.parts(place):
        scores = scores - shift.view(*scores.shape[:3], 1)
    # No weight is above 1, whatever these products, which round otherwise than those of the lse, make of large scores.
    return torch.where(visible, scores.clamp_max(0.0).exp2(), 0.0)
