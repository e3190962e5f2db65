"""What a language model is trained on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def next_token_loss(
    logits: Tensor, tokens: Tensor, real: Tensor | None, documents: Tensor | None, *, per_token: bool
) -> Tensor:
    """Cross-entropy of each next token in nats.

    logits [batch, pos, d_vocab], tokens [batch, pos]; real bool [batch, pos] or None; returns the mean over positions
    whose token and next token are real and of one document, or [batch, pos − 1] with NaN elsewhere.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = nn.functional.cross_entropy(wide[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(tokens.shape[0], -1)
    valid = torch.ones_like(losses, dtype=torch.bool)
    if real is not None:
        valid &= real[:, 1:] & real[:, :-1]
    if documents is not None:
        valid &= documents[:, 1:] == documents[:, :-1]
    if per_token:
        return losses.masked_fill(~valid, float("nan"))
    if not valid.any():
        raise ValueError("no position has a next token, so there is no loss; pass at least two real tokens")
    return losses[valid].mean()
