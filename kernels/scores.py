"""From products of queries and keys to masked scores: the one place where scale, softcap, bias and mask are applied."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.kernels.masks import Index, VisibleKeys

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """scores = softcap(scale · q·k) + bias(i - j), then -inf where the mask hides the pair.

    Products of queries with *scaled* keys go in (see ``prepared``). The index tensors that say which pairs they are
    broadcast to the products' shape, so that a tile of any layout, or single pairs, take the same way.
    """

    mask: VisibleKeys
    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # [head]
    offset_bias: Tensor | None = None  # [head, n_queries + n_keys - 1], entry row - column + n_keys - 1

    @property
    def only_scales(self) -> bool:
        return self.softcap is None and self.alibi_slopes is None and self.offset_bias is None

    def masked_scores(self, products: Tensor, batch: Index, head: Index, row: Tensor, column: Tensor) -> Tensor:
        """Scores of pairs, -inf for hidden ones."""
        scores = self.biased_scores(products, head, row, column)
        return torch.where(self.mask.visible(batch, row, column), scores, -torch.inf)

    def biased_scores(self, products: Tensor, head: Index, row: Tensor, column: Tensor) -> Tensor:
        """Scores before the mask; the products themselves where the rule only scales."""
        scores = products
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.alibi_slopes is not None:
            distance = (row + self.mask.query_offset - column).abs().to(scores.dtype)
            scores = scores - self.alibi_slopes[head] * distance
        if self.offset_bias is not None:
            entry = row - column + self.mask.n_keys - 1
            scores = scores + self.offset_bias[head, entry]
        return scores

    def in_base_2(self) -> ScoreRule:
        """The rule whose scores are log2(e) times as large: exp2 of them is exp of the original ones."""
        return replace(
            self,
            scale=self.scale * LOG2_E,
            softcap=None if self.softcap is None else self.softcap * LOG2_E,
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes * LOG2_E,
            offset_bias=None if self.offset_bias is None else _finite_times(self.offset_bias, LOG2_E),
        )


def _finite_times(x: Tensor, factor: float) -> Tensor:
    """The product; what is finite stays so: the lowest number of a type often means "hardly", not "never"."""
    limits = torch.finfo(x.dtype)
    return torch.where(x.isfinite(), (x * factor).clamp(limits.min, limits.max), x)


def prepared(q: Tensor, k: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
    """Queries and scaled keys at working precision, free of whatever lies behind padding; shapes as they are.

    Keys, because there are fewer of them where several query heads share one: queries then need no copy.
    """
    dtype = working_dtype(q)
    keys = real_entries(k, rule.mask.key_padding).to(dtype) * rule.scale
    return real_entries(q, rule.mask.query_padding).to(dtype), keys


def rectangle_scores(queries: Tensor, keys: Tensor, rule: ScoreRule, rows: Tensor, columns: Tensor) -> Tensor:
    """Masked scores of any rows and columns of prepared queries and keys: [batch, head, row, column]."""
    batch, n_heads = queries.shape[:2]
    queries, keys = queries[:, :, rows], keys[:, :, columns].repeat_interleave(n_heads // keys.shape[1], 1)
    batches = torch.arange(batch, device=queries.device)[:, None, None, None]
    heads = torch.arange(n_heads, device=queries.device)[:, None, None]
    return rule.masked_scores(queries @ keys.mT, batches, heads, rows[:, None], columns)


def working_dtype(x: Tensor) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.promote_types(x.dtype, torch.float32)


def real_entries(x: Tensor, padding: Tensor | None) -> Tensor:
    """x [batch, head, position, d] with zeros where ``padding`` [batch, position] is False.

    Memory behind padding may hold anything, and 0 · NaN is NaN: a weight of 0 does not keep it out of a product.
    """
    return x if padding is None else torch.where(padding[:, None, :, None], x, 0.0)


def all_finite(q: Tensor, k: Tensor, rule: ScoreRule) -> bool:
    """Whether no query and no key, padding aside, holds NaN or infinity; both must hold something."""
    pairs = (q, rule.mask.query_padding), (k, rule.mask.key_padding)
    entries = [real_entries(x.detach(), padding) for x, padding in pairs]
    sums = [x.sum(dtype=working_dtype(x)) for x in entries]
    if bool(torch.stack(sums).isfinite().all()):  # NaN or infinity anywhere would be in the sum, which is fast
        return True
    extremes = [extreme for x in entries for extreme in x.aminmax()]  # large finite numbers may overflow a sum
    return bool(torch.stack(extremes).isfinite().all())
