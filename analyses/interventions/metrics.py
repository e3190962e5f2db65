"""What is read off a model's logits: one number a prompt, or one a position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True, eq=False)
class Metric:
    """A number for each prompt, or for each row that is read of it.

    Args:
        name, unit: for tables and axes.
        rows: int64 [prompt, row], the positions whose logits are read.
        score: from logits [prompt, row, d_vocab] in float32 or float64 to numbers [prompt] or [prompt, row].
        per_row: whether ``score`` gives one number for each row.
    """

    name: str
    unit: str
    rows: Tensor
    score: Callable[[Tensor], Tensor]
    per_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers: [prompt] or [prompt, row]."""
        return tuple(self.rows.shape) if self.per_row else (len(self.rows),)

    def __call__(self, logits: Tensor) -> Tensor:
        """float64 numbers of logits [prompt, row, d_vocab]."""
        return self.score(logits if logits.dtype == torch.float64 else logits.float()).double()


def last_rows(real: Tensor) -> Tensor:
    """The last real position of each prompt, int64 [prompt, 1]; real is bool [prompt, pos], real tokens first."""
    return real.sum(dim=1, keepdim=True) - 1


def logit_difference(target: Tensor, foil: Tensor, rows: Tensor) -> Metric:
    """Logit of the target less that of the foil; target, foil int64 [prompt], rows [prompt, 1]."""

    def score(logits: Tensor) -> Tensor:
        at = logits[:, 0]
        return (at.gather(1, target[:, None].to(at.device)) - at.gather(1, foil[:, None].to(at.device)))[:, 0]

    return Metric("logit difference", "logits", rows, score)


def log_probability(target: Tensor, rows: Tensor) -> Metric:
    """Log-probability of the target in nats; target int64 [prompt], rows [prompt, 1]."""

    def score(logits: Tensor) -> Tensor:
        return logits[:, 0].log_softmax(dim=-1).gather(1, target[:, None].to(logits.device))[:, 0]

    return Metric("log-probability", "nats", rows, score)


def token_losses(tokens: Tensor, rows: Tensor) -> Metric:
    """Cross-entropy of the token after each row, in nats, one number for each; rows [prompt, row] of tokens."""
    targets = tokens.gather(1, rows.to(tokens.device) + 1)

    def score(logits: Tensor) -> Tensor:
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device), reduction="none")
        return losses.view(rows.shape)

    return Metric("loss", "nats", rows, score, per_row=True)


def kl_divergence(clean_logits: Tensor, rows: Tensor) -> Metric:
    """KL(clean ‖ intervened) of the next token's distribution, mean over rows, in nats.

    ``clean_logits`` [prompt, row, d_vocab] are those of the model as it is, at ``rows``.
    """
    clean = clean_logits.double().log_softmax(dim=-1)

    def score(logits: Tensor) -> Tensor:
        other = logits.double().log_softmax(dim=-1)
        return (clean.exp() * (clean - other)).sum(dim=-1).mean(dim=1)

    return Metric("KL divergence", "nats", rows, score)
