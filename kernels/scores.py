"""From products of queries and keys to masked scores: the one place where scale, softcap, bias and mask are applied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.masks import Index, VisibleKeys


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """scores = softcap(scale · q·k) + bias(i - j), then -inf where the mask hides the pair.

    A tile of any shape goes through ``masked_scores``: rectangles of the score matrix, or single pairs.
    """

    mask: VisibleKeys
    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # [head]
    offset_bias: Tensor | None = None  # [head, n_queries + n_keys - 1], entry row - column + n_keys - 1

    def masked_scores(self, products: Tensor, batch: Index, head: Index, row: Tensor, column: Tensor) -> Tensor:
        """Scores of pairs from their q·k; the index tensors broadcast to the shape of ``products``."""
        scores = self.biased_scores(products, head, row, column)
        return torch.where(self.mask.visible(batch, row, column), scores, -torch.inf)

    def biased_scores(self, products: Tensor, head: Index, row: Tensor, column: Tensor) -> Tensor:
        """The same without the mask."""
        scores = products * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi_slopes is not None:
            distance = (row + self.mask.query_offset - column).abs().to(scores.dtype)
            scores = scores - self.alibi_slopes[head].to(scores.dtype) * distance
        if self.offset_bias is not None:
            entry = row - column + self.mask.n_keys - 1
            scores = scores + self.offset_bias[head, entry].to(scores.dtype)
        return scores


def real_entries(x: Tensor, padding: Tensor | None) -> Tensor:
    """x [batch, head, position, d] with zeros where ``padding`` [batch, position] is False.

    Memory behind padding may hold anything, and 0 · NaN is NaN: a weight of 0 does not keep it out of a product.
    """
    return x if padding is None else torch.where(padding[:, None, :, None], x, 0.0)
