"""Tokens to vectors and back. Biases and tables exist only where the configuration asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.config import TransformerConfig


class Embed(nn.Module):
    """Token embedding, W_E [d_vocab, d_model]."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.W_E)  # [batch, pos] → [batch, pos, d_model]


class PositionEmbed(nn.Module):
    """Learned absolute positions, W_pos [n_ctx, d_model]."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(self, position_ids: Tensor) -> Tensor:
        return nn.functional.embedding(position_ids, self.W_pos)  # [batch, pos] → [batch, pos, d_model]


class Unembed(nn.Module):
    """Residual stream to logits, W_U [d_model, d_vocab].

    A tied model has no W_U of its own: ``W_U`` is then a view of the embedding's W_E, which the model hands in.
    """

    def __init__(self, cfg: TransformerConfig, embed: Embed) -> None:
        super().__init__()
        self.b_U: Tensor | None = nn.Parameter(torch.zeros(cfg.d_vocab)) if cfg.use_unembed_bias else None
        if cfg.tie_word_embeddings:
            # In a tuple, so that the shared weight is registered (and moved, saved, counted) once.
            self._tied: tuple[Embed, ...] = (embed,)
        else:
            self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab))

    def __getattr__(self, name: str) -> Any:
        if name == "W_U" and "_tied" in self.__dict__:
            return self._tied[0].W_E.T
        return super().__getattr__(name)

    def forward(self, residual: Tensor) -> Tensor:
        return nn.functional.linear(residual, self.W_U.T, self.b_U)  # [batch, pos, d_model] → [batch, pos, d_vocab]
