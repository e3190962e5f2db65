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
    z = torch.zeros_like(tiling.queries)  # [batch, key/value head, group, query, d_head]
    lse = z.new_full(z.shape[:4], -torch.inf)

    def attend(piece: list[RowBlock]) -> None:
        buffer = tiling.buffer(grid)
        for block in piece:
            spans = tiling.spans(block, grid)
            hidden = [tiling.hidden(block, span, -torch.inf) for span in spans]
            for kv_head in range(values.shape[1]):
                queries = tiling.block_queries(block, kv_head)  # [d_head, group · row]
                output = torch.zeros_like(queries)
                maximum = queries.new_full((queries.shape[1],), -torch.inf)
                normaliser = torch.zeros_like(maximum)
                for span, bound in zip(spans, hidden, strict=True):
                    scores = tiling.scores(block, kv_head, span, queries, buffer)  # [key, group · row]
                    hide(scores, bound)
                    raised = torch.maximum(maximum, scores.amax(0))
                    pivot = raised.masked_fill(raised == -torch.inf, 0.0)  # no key so far: exp2(-inf) must be 0
                    weights = scores.sub_(pivot).exp2_()
                    rescale = torch.exp2(maximum - pivot)
                    normaliser.mul_(rescale).add_(weights.sum(0))
                    tile_values = values[block.batch, kv_head, span.start : span.stop]
                    output.mul_(rescale).addmm_(tile_values.mT, weights)
                    maximum = raised
                shape = (-1, tiling.group, len(block))
                output /= normaliser.masked_fill(normaliser == 0, 1.0)
                z[block.batch, kv_head, :, block.rows] = output.view(shape).permute(1, 2, 0)
                lse[block.batch, kv_head, :, block.rows] = (maximum + normaliser.log2()).view(shape[1:])

    run_pieces(attend, tiling.pieces(), q.device)
    return z.flatten(1, 2), lse.flatten(1, 2) / LOG2_E
