"""What is read off a model's logits: one number a prompt, or one a position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

ROWS_PER_UNEMBEDDING = 1024  # logits of so many positions are held at a time


# From values [row, width] and the tokens whose logits are wanted, None for all, to logits [row, token].
ToLogits = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, eq=False)
class Metric:
    """A number for each prompt, or for each row that is read of it.

    Args:
        name, unit: for tables and axes.
        rows: int64 [prompt, row], the positions whose logits are read.
        score: from logits [prompt, row, d_vocab] in float32 or float64 to numbers [prompt] or [prompt, row].
        tokens: int64 [n], those whose logits alone ``score`` is given, in place of d_vocab; None is all. The metric of
            whole logits is that of a call, ``metric(logits)``.
        per_row: whether ``score`` gives one number for each row.
        score_some: the same for some of the rows, so that the logits of all need not exist at once: from logits
            [n, d_vocab] and which of the flattened rows they are to numbers [n]; None where ``score`` needs all.
    """

    name: str
    unit: str
    rows: Tensor
    score: Callable[[Tensor], Tensor]
    per_row: bool = False
    score_some: Callable[[Tensor, slice], Tensor] | None = None
    tokens: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers: [prompt] or [prompt, row]."""
        return tuple(self.rows.shape) if self.per_row else (len(self.rows),)

    def __call__(self, logits: Tensor) -> Tensor:
        """float64 numbers of logits [prompt, row, d_vocab]."""
        return self.read(logits, _chosen)

    def read(self, values: Tensor, to_logits: ToLogits) -> Tensor:
        """float64 numbers of values [prompt, row, width], of which ``to_logits`` makes logits.

        No more logits are made than ``score`` reads, and where it can take some rows at a time, no more exist at once.
        """
        parts = values.flatten(0, 1).split(ROWS_PER_UNEMBEDDING)
        if self.score_some is None:
            logits = torch.cat([to_logits(part, self.tokens) for part in parts]).unflatten(0, values.shape[:2])
            return self.score(_wide(logits)).double()
        starts = range(0, ROWS_PER_UNEMBEDDING * len(parts), ROWS_PER_UNEMBEDDING)
        found = [
            self.score_some(_wide(to_logits(part, self.tokens)), slice(start, start + len(part))).double()
            for start, part in zip(starts, parts, strict=True)
        ]
        return torch.cat(found).view(self.shape)


def _chosen(logits: Tensor, tokens: Tensor | None) -> Tensor:
    return logits if tokens is None else logits[..., tokens.to(logits.device)]


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def last_rows(real: Tensor) -> Tensor:
    """The last real position of each prompt, int64 [prompt, 1]; real is bool [prompt, pos], real tokens first."""
    return real.sum(dim=1, keepdim=True) - 1


def logit_difference(target: Tensor, foil: Tensor, rows: Tensor) -> Metric:
    """Logit of the target less that of the foil; target, foil int64 [prompt], rows [prompt, 1]."""

    tokens, places = torch.stack((target, foil), dim=1).unique(return_inverse=True)  # places [prompt, 2] in tokens

    def score(logits: Tensor) -> Tensor:
        of_both = logits[:, 0].gather(1, places.to(logits.device))
        return of_both[:, 0] - of_both[:, 1]

    return Metric("logit difference", "logits", rows, score, tokens=tokens)


def log_probability(target: Tensor, rows: Tensor) -> Metric:
    """Log-probability of the target in nats; target int64 [prompt], rows [prompt, 1]."""

    def score(logits: Tensor) -> Tensor:
        return logits[:, 0].log_softmax(dim=-1).gather(1, target[:, None].to(logits.device))[:, 0]

    return Metric("log-probability", "nats", rows, score)


def token_losses(tokens: Tensor, rows: Tensor) -> Metric:
    """Cross-entropy of the token after each row, in nats, one number for each; rows [prompt, row] of tokens."""
    targets = tokens.gather(1, rows.to(tokens.device) + 1).flatten()

    def score_some(logits: Tensor, which: slice) -> Tensor:
        return cross_entropy(logits, targets[which].to(logits.device), reduction="none")

    def score(logits: Tensor) -> Tensor:
        return score_some(logits.flatten(0, 1), slice(None)).view(rows.shape)

    return Metric("loss", "nats", rows, score, per_row=True, score_some=score_some)


def losses_of(tokens: Tensor, wanted: Tensor) -> tuple[Metric, Tensor]:
    """The losses of the ``wanted`` tokens, bool [prompt, pos], and which of the rows that are read count.

    Each token is predicted at the position before it, so the first of a prompt is never wanted. A prompt with fewer
    wanted tokens than another fills its rows with the first position, which does not count.

    Returns:
        The metric, and bool [prompt, row].
    """
    n_wanted = wanted.sum(dim=1)
    order = (~wanted).long().argsort(dim=1, stable=True)[:, : int(n_wanted.max())]
    counted = torch.arange(order.shape[1], device=wanted.device) < n_wanted[:, None]
    return token_losses(tokens, torch.where(counted, order - 1, 0)), counted


def kl_divergence(clean_logits: Tensor, rows: Tensor) -> Metric:
    """KL(clean ‖ intervened) of the next token's distribution, mean over rows, in nats.

    ``clean_logits`` [prompt, row, d_vocab] are those of the model as it is, at ``rows``.
    """
    clean = clean_logits.double().log_softmax(dim=-1)

    def score(logits: Tensor) -> Tensor:
        other = logits.double().log_softmax(dim=-1)
        return (clean.exp() * (clean - other)).sum(dim=-1).mean(dim=1)

    return Metric("KL divergence", "nats", rows, score)
