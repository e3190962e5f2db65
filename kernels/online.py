"""The online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): exact attention over tiles of keys, O(n) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels.masks import KeyGrid
from workbench.kernels.scores import LOG2_E, ScoreRule, real_entries
from workbench.kernels.tiles import RowBlock, Tiling, hide
from workbench.kernels.workers import run_pieces


def online_attention(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """z [batch, head, query, d_head] and lse [batch, head, query] at working precision, without gradients.

    For every row: a running maximum m of its scores, a running normaliser l = Σ exp(s - m), and a running
    Σ exp(s - m) v. A tile that raises m rescales the two sums by exp(m_old - m_new).
    """
    tiling, grid = Tiling.of(q, k, rule), KeyGrid(k.shape[2])
    values = real_entries(v, rule.mask.key_padding).to(tiling.keys.dtype)
    z = torch.empty_like(tiling.queries)  # [batch, key/value head, group, query, d_head]
    lse = z.new_full(z.shape[:4], -torch.inf)

    def attend(piece: list[RowBlock]) -> None:
        buffer = tiling.buffer(grid)
        for block in piece:
            spans = tiling.spans(block, grid)
            hidden = [tiling.hidden(block, span, -torch.inf) for span in spans]
            for heads in tiling.heads_at_a_time(spans, grid):
                queries = tiling.block_queries(block, heads)  # [key/value head, d_head, group · row]
                output = queries.new_zeros(queries.shape)
                maximum = queries.new_full((len(queries), queries.shape[2]), -torch.inf)
                normaliser = torch.zeros_like(maximum)
                for span, bound in zip(spans, hidden, strict=True):
                    scores = tiling.scores(block, heads, span, queries, buffer)  # [key/value head, key, group · row]
                    hide(scores, bound)
                    raised = torch.maximum(maximum, scores.amax(1))
                    pivot = raised.masked_fill(raised == -torch.inf, 0.0)  # no key so far: exp2(-inf) must be 0
                    weights = scores.sub_(pivot[:, None]).exp2_()
                    rescale = torch.exp2(maximum - pivot)
                    normaliser.mul_(rescale).add_(weights.sum(1))
                    tile_values = values[block.batch, heads, span.start : span.stop]
                    output.mul_(rescale[:, None]).baddbmm_(tile_values.mT, weights)
                    maximum = raised
                place, shape = block.place(heads), (tiling.group, len(block))
                output /= normaliser.masked_fill(normaliser == 0, 1.0)[:, None]
                z[place] = output.unflatten(2, shape).permute(0, 2, 3, 1)
                lse[place] = (maximum + normaliser.log2()).unflatten(1, shape)

    run_pieces(attend, tiling.pieces(), q.device)
    return z.flatten(1, 2), lse.flatten(1, 2) / LOG2_E
