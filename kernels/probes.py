"""Weights of the few pairs that a statistic names, from the known lse: no pass over all pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.normaliser import Normaliser
from workbench.kernels.statistics import StatisticsRequest
from workbench.kernels.tiles import RowBlock, Tiling
from workbench.kernels.workers import run_pieces


def probe_statistics(tiling: Tiling, normaliser: Normaliser, request: StatisticsRequest) -> dict[str, Tensor]:
    """Sink and offset mass."""
    mask, lse = tiling.rule.mask, normaliser.lse
    found: dict[str, Tensor] = {}
    if request.sink_keys is not None:
        found["sink_mass"] = torch.zeros_like(lse)
        sinks = request.sink_positions(lse.shape[0], mask.n_keys, lse.device)  # [batch, m]
    if request.offsets:
        found["offset_mass"] = lse.new_zeros(*lse.shape, len(request.offsets))
        back = torch.tensor(request.offsets, device=lse.device)

    def probe(piece: list[RowBlock]) -> None:
        for block in piece:
            row = torch.arange(block.start, block.stop, device=lse.device)[:, None]
            for kv_head in range(lse.shape[1]):
                place = block.place(kv_head)
                queries, keys = tiling.queries[place], tiling.keys[block.batch, kv_head]
                if request.sink_keys is not None:
                    columns = sinks[block.batch]
                    products = queries @ keys[columns].mT  # [group, row, m]
                    weights = _weights(tiling, products, block.batch, kv_head, row, columns, normaliser.parts(place))
                    found["sink_mass"][place] = weights.sum(2)
                if request.offsets:
                    columns = row + mask.query_offset - back  # [row, offset]
                    products = (queries[:, :, None] * keys[columns.clamp(0, mask.n_keys - 1)]).sum(3)
                    weights = _weights(tiling, products, block.batch, kv_head, row, columns, normaliser.parts(place))
                    found["offset_mass"][place] = weights

    run_pieces(probe, tiling.pieces(), lse.device)
    return {name: mass.flatten(1, 2) for name, mass in found.items()}


def _weights(
    tiling: Tiling, products: Tensor, batch: int, kv_head: int, row: Tensor, columns: Tensor, shifts: list[Tensor]
) -> Tensor:
    """Weights of pairs [group, row, m], 0 where there is no such column or the mask hides it."""
    mask = tiling.rule.mask
    exists = (columns >= 0) & (columns < mask.n_keys)
    columns = columns.clamp(0, mask.n_keys - 1)
    head = torch.arange(tiling.group, device=row.device)[:, None, None] + kv_head * tiling.group
    scores = tiling.rule.biased_scores(products, head, row, columns)
    visible = exists & mask.visible(batch, row, columns)
    for shift in shifts:
        scores = scores - shift.view(tiling.group, -1)[..., None]
    return torch.where(visible, scores.exp2(), 0.0)
