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
    _rows: Tensor  # m, log2 l and lse in base 2: [3, batch, key/value head, group, query]

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> OnlineForward:
        tiling = Tiling.of(q, k, rule)
        values = real_entries(v, rule.mask.key_padding).to(tiling.keys.dtype)
        z = torch.empty_like(tiling.queries)
        rows = z.new_zeros(3, *z.shape[:4])
        rows[2] = -torch.inf  # which it stays where a block of rows sees no key at all
        return cls(tiling, Normaliser(rows[0], rows[1]), values, z, rows)

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
        low, maximum, tile = self.tiling.low, None, None
        for span, bound in zip(spans, hidden, strict=True):
            scores = self.tiling.scores(block, heads, span, queries, scratch[0])
            hide(scores, bound)
            raised = scores.amax(1, keepdim=True).clamp_(min=low)  # no key so far: weights must be 0
            if maximum is not None:
                raised = torch.maximum(maximum, raised)
            scores -= raised
            weights = torch.exp2(scores, out=scratch[-1][: scores.numel()].view(scores.shape))
            total, values = weights.sum(1, keepdim=True), self._values[block.batch, heads, span.start : span.stop].mT
            if maximum is None:
                normaliser, output = total, torch.bmm(values, weights)
            else:
                rescale = torch.exp2(maximum - raised)
                normaliser.mul_(rescale).add_(total)
                output.mul_(rescale).baddbmm_(values, weights)
            maximum, tile = raised, (scores, weights)
        if maximum is None:
            self._z[block.place(heads)] = 0.0
        else:
            self._store(block, heads, output, maximum, normaliser)
        return tile

    def _store(self, block: RowBlock, heads: slice, output: Tensor, maximum: Tensor, normaliser: Tensor) -> None:
        place, shape = block.place(heads), (self.tiling.group, len(block))
        total = normaliser.clamp(min=1.0)  # that is the least, but for rows without a key
        output /= total
        self._z[place] = output.unflatten(2, shape).permute(0, 2, 3, 1)
        rows = torch.cat((maximum, total.log2(), maximum + normaliser.log2()), 1)  # [key/value head, 3, group · row]
        self._rows[:, *place] = rows.unflatten(2, shape).movedim(1, 0)

    def results(self) -> tuple[Tensor, Tensor]:
        """z [batch, head, query, d_head] and lse [batch, head, query], in nats."""
        return self._z.flatten(1, 2), self._rows[2].flatten(1, 2) / LOG2_E
