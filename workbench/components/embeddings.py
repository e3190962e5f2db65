"""Tokens to vectors and back. Biases and tables exist only where the configuration asks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workbench.components.mlp import ACTIVATIONS
from workbench.components.norms import Norm
from workbench.config import TransformerConfig


class Embed(nn.Module):
    """Token embedding, W_E [d_vocab, d_model], times ``embed_scale``.

    The original Transformer scales by sqrt(d_model), so that positions do not drown the tokens (Vaswani et al. 2017,
    section 3.4).
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model))
        self.scale = cfg.embed_scale

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = nn.functional.embedding(tokens, self.W_E)  # [batch, pos] → [batch, pos, d_model]
        return embedded if self.scale == 1 else embedded * torch.tensor(self.scale, dtype=embedded.dtype)


class SegmentEmbed(nn.Module):
    """Segment embedding, W_seg [n_segments, d_model] (Devlin et al. 2019, section 3)."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        assert cfg.n_segments is not None
        self.W_seg = nn.Parameter(torch.empty(cfg.n_segments, cfg.d_model))

    def forward(self, token_type_ids: Tensor) -> Tensor:
        return nn.functional.embedding(token_type_ids, self.W_seg)  # [batch, pos] → [batch, pos, d_model]


class PositionEmbed(nn.Module):
    """Learned absolute positions, W_pos [n_ctx, d_model]."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.W_pos = nn.Parameter(torch.empty(cfg.n_ctx, cfg.d_model))

    def forward(self, position_ids: Tensor) -> Tensor:
        return nn.functional.embedding(position_ids, self.W_pos)  # [batch, pos] → [batch, pos, d_model]


class RelativeBias(nn.Module):
    """A bias on the scores for each head and bucket of relative positions, W_rel [n_relative_buckets, n_heads].

    One table serves all layers of a stack. Source: Raffel et al. 2020 (T5), section 2.1.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.W_rel = nn.Parameter(torch.empty(cfg.n_relative_buckets, cfg.n_heads))


class MaskedLanguageModelHead(nn.Module):
    """ln(act(x W + b)), which the unembedding reads; W [d_model, d_model] (Devlin et al. 2019, section 3.1)."""

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(cfg.d_model, cfg.d_model))
        self.b = nn.Parameter(torch.zeros(cfg.d_model))
        self.activation = ACTIVATIONS[cfg.act_fn]
        self.ln = Norm(cfg)

    def forward(self, residual: Tensor) -> Tensor:
        return self.ln(self.activation(nn.functional.linear(residual, self.W.T, self.b)))  # [batch, pos, d_model]


class Unembed(nn.Module):
    """Residual stream to logits, softcap(logit_scale · x W_U + b_U), W_U [d_model, d_vocab].

    A tied model has no W_U of its own: ``W_U`` is then a view of the embedding's W_E, which the model hands in.
    ``output_logits_soft_cap`` c bounds the logits by c · tanh(logits / c) (Gemma 2, section 2).
    """

    def __init__(self, cfg: TransformerConfig, embed: Embed) -> None:
        super().__init__()
        self.scale, self.soft_cap = cfg.logit_scale, cfg.output_logits_soft_cap
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

    def forward(self, residual: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[batch, pos, d_model] → [batch, pos, d_vocab], or the logits of ``tokens``, int64 [n], alone."""
        scaled = residual if self.scale == 1 else residual * self.scale
        weight, bias = self.W_U.T, self.b_U
        if tokens is not None:
            weight, bias = weight[tokens], None if bias is None else bias[tokens]
        logits = nn.functional.linear(scaled, weight, bias)
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
