"""The normaliser of each row, precise enough to take weights from scores of any size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.masks import KeyGrid
from workbench.kernels.scores import LOG2_E
from workbench.kernels.tiles import Place, RowBlock, Tiling, hide
from workbench.kernels.workers import run_pieces

_LARGE = 32.0  # from here on the rounding of lse, in base 2, exceeds 1e-6 of a weight


@dataclass(frozen=True, eq=False)
class Normaliser:
    """log2 of each row's normaliser in two parts, [batch, key/value head, group, query] each.

    A float32 of 200 is rounded to 1e-5, and so would be every weight of a row from its lse alone; besides, lse may come
    from an operator that rounds its scores otherwise than our tiles do. So where lse is large, ``rest`` is what a pass
    over our own tiles finds between their normaliser and ``lse``; it is 0 in blocks of rows where all are small, and
    None where there are no others. A forward over the same tiles has the largest score and the rest at once. What is
    subtracted from rows without a key does not matter.
    """

    lse: Tensor
    rest: Tensor | None

    @classmethod
    def of(
        cls, tiling: Tiling, lse: Tensor, virtual_mass: Tensor | None, pieces: list[list[RowBlock]], grid: KeyGrid
    ) -> Normaliser:
        """From the natural lse [batch, head, query], which a virtual column of the given weight may be part of.

        ``pieces`` and ``grid`` say how the scores are cut: products of another shape round otherwise.
        """
        shape = tiling.queries.shape[1:3]
        empty = lse == -torch.inf
        in_base_2 = torch.where(empty, 0.0, lse * LOG2_E).unflatten(1, shape)
        if in_base_2.abs().amax() <= _LARGE:
            return cls(in_base_2, None)
        rest = (
            torch.full_like(in_base_2, -torch.inf) if virtual_mass is None else virtual_mass.log2().unflatten(1, shape)
        )
        _add_tiles(tiling, in_base_2, rest, pieces, grid)
        return cls(in_base_2, rest.masked_fill(rest == -torch.inf, 0.0))

    def parts(self, place: Place) -> list[Tensor]:
        """What to subtract from the scores of the rows at ``place``, one after the other.

        [key/value head, group · row] each.
        """
        lse = self.lse[place].flatten(1)
        if self.rest is None:
            return [lse]
        rest = self.second(place)
        total = lse + rest
        return [total] if total.abs().amax() <= _LARGE else [lse, rest]

    def second(self, place: Place) -> Tensor:
        """The second part for the rows at ``place``, [key/value head, group · row]."""
        assert self.rest is not None
        return self.rest[place].flatten(1)


def _add_tiles(tiling: Tiling, lse: Tensor, rest: Tensor, pieces: list[list[RowBlock]], grid: KeyGrid) -> None:
    """Adds, in the logarithm, each row's Σ exp2(s − lse) to ``rest``."""

    def add(piece: list[RowBlock]) -> None:
        (buffer,) = tiling.scratch(grid, 1)
        for block in piece:
            rows = block.batch, slice(None), slice(None), block.rows
            if lse[rows].abs().amax() <= _LARGE:
                rest[rows] = 0.0
                continue
            spans = tiling.spans(block, grid)
            hidden = [tiling.hidden(block, span, -torch.inf) for span in spans]
            for heads in tiling.heads_at_a_time(spans, grid):
                place = block.place(heads)
                queries, shift = tiling.block_queries(block, heads), lse[place].flatten(1)
                total = rest[place].flatten(1)
                for span, bound in zip(spans, hidden, strict=True):
                    t = tiling.scores(block, heads, span, queries, buffer)  # [key/value head, key, group · row]
                    t -= shift[:, None]
                    hide(t, bound)
                    largest = t.amax(1)
                    pivot = largest.masked_fill(largest == -torch.inf, 0.0)
                    total = torch.logaddexp2(total, pivot + t.sub_(pivot[:, None]).exp2_().sum(1).log2())
                rest[place] = total.unflatten(1, (tiling.group, len(block)))

    run_pieces(add, pieces, lse.device)
