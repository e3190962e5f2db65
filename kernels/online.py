"""The online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): exact attention over tiles of keys, O(n) memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.masks import ColumnSpan
from workbench.kernels.normaliser import Normaliser
from workbench.kernels.scores import LOG2_E, ScoreRule, real_entries
from workbench.kernels.tiles import HiddenPart, RowBlock, Tiling, hide
from workbench.kernels.workers import run_pieces


@dataclass(frozen=True, eq=False)
class OnlineForward:
    """z and lse at working precision, without gradients, block of rows by block of rows.

    For every row: a running maximum m of its scores, a running normaliser l = Σ exp2(s - m), and a running
    Σ exp2(s - m) v. A tile that raises m rescales the two sums by exp2(m_old - m_new).
    """

    tiling: Tiling
    normaliser: Normaliser  # m and log2 l
    _values: Tensor  # [batch, key/value head, key, d_head]
    _z: Tensor  # [batch, key/value head, group, query, d_head]
    _lse: Tensor  # [batch, key/value head, group, query], in base 2

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> OnlineForward:
        tiling = Tiling.of(q, k, rule)
        values = real_entries(v, rule.mask.key_padding).to(tiling.keys.dtype)
        z = torch.empty_like(tiling.queries)
        zeros = z.new_zeros(2, *z.shape[:4])
        return cls(tiling, Normaliser(zeros[0], zeros[1]), values, z, z.new_full(z.shape[:4], -torch.inf))

    def run(self) -> None:
        """All rows."""
        tiling, grid = self.tiling, self.tiling.grid

        def work(piece: list[RowBlock]) -> None:
            scratch = tiling.scratch(grid, 1)
            for block in piece:
                spans = tiling.spans(block, grid)
                hidden = [tiling.hidden(block, span, tiling.lowest) for span in spans]
                for heads in tiling.heads_at_a_time(spans, grid):
                    self.attend(block, heads, tiling.block_queries(block, heads), spans, hidden, scratch)

        run_pieces(work, tiling.pieces(), self._z.device)

    def attend(
        self,
        block: RowBlock,
        heads: slice,
        queries: Tensor,
        spans: list[ColumnSpan],
        hidden: list[list[HiddenPart]],
        scratch: list[Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        """A block of rows under some key/value heads, whose queries are [key/value head, d_head, group · row].

        Returns:
            Of the last tile s - m and exp2(s - m), [key/value head, key, group · row] each, in the first and in the
            last scratch memory; None where there is no tile.
        """
        output = queries.new_zeros(queries.shape)
        maximum = queries.new_full((len(queries), queries.shape[2]), -torch.inf)
        pivot, normaliser = torch.zeros_like(maximum), torch.zeros_like(maximum)
        tile = None
        for span, bound in zip(spans, hidden, strict=True):
            scores = self.tiling.scores(block, heads, span, queries, scratch[0])
            hide(scores, bound)
            raised = torch.maximum(maximum, scores.amax(1))
            pivot = raised.masked_fill(raised <= self.tiling.lowest, 0.0)  # no key so far: weights must be 0
            scores -= pivot[:, None]
            weights = torch.exp2(scores, out=scratch[-1][: scores.numel()].view(scores.shape))
            rescale = torch.exp2(maximum - pivot)
            normaliser.mul_(rescale).add_(weights.sum(1))
            values = self._values[block.batch, heads, span.start : span.stop]
            output.mul_(rescale[:, None]).baddbmm_(values.mT, weights)
            maximum, tile = raised, (scores, weights)
        place, shape = block.place(heads), (self.tiling.group, len(block))
        total = normaliser.masked_fill(normaliser == 0, 1.0)
        output /= total[:, None]
        self._z[place] = output.unflatten(2, shape).permute(0, 2, 3, 1)
        self.normaliser.store(place, pivot, total.log2())
        self._lse[place] = (pivot + normaliser.log2()).unflatten(1, shape)
        return tile

    def results(self) -> tuple[Tensor, Tensor]:
        """z [batch, head, query, d_head] and lse [batch, head, query], in nats."""
        return self._z.flatten(1, 2), self._lse.flatten(1, 2) / LOG2_E
