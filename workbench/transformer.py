"""The hookable Transformer: tokens → embedding → blocks → logits, every intermediate value within reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.components.attention import Attention
from workbench.components.block import Block
from workbench.components.embeddings import Embed, PositionEmbed, Unembed
from workbench.components.norms import Norm
from workbench.components.positions import rotary_tables
from workbench.config import AttentionBackend, TransformerConfig
from workbench.generation import GenerationMethods
from workbench.hooks import HookedModel, HookPoint
from workbench.kernels import AttentionMask, StatisticsRequest
from workbench.statistics import (
    DEFAULT_REQUEST,
    AttentionContext,
    ModelStatistics,
    StatisticsCollector,
    rank_in_document,
)
from workbench.tokens import TokenMethods, check_tokens
from workbench.weights import WeightViews

ReturnType = Literal["logits", "loss", "both"] | None


class HookedTransformer(WeightViews, TokenMethods, GenerationMethods, HookedModel):
    """A decoder-only Transformer whose attention runs on a kernel that emits attention statistics.

    Hook points carry TransformerLens' names and shapes (``model.hook_dict`` lists them). Statistics are read-only hook
    points beside them: ``blocks.{l}.attn.hook_entropy`` and its siblings. ``statistics_request`` holds the parameters
    of the statistics' hooks and is what ``run_with_statistics`` computes by default.

    ``HookedTransformer(cfg)`` initialises weights as GPT-2 did: normal with standard deviation 0.02, projections into
    the residual stream divided by sqrt(2 · n_layers) (Radford et al. 2019, section 2.3).
    """

    def __init__(self, cfg: TransformerConfig, tokenizer: Any = None) -> None:
        super().__init__()
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.statistics_request: StatisticsRequest = DEFAULT_REQUEST
        self.embed = Embed(cfg)
        self.hook_embed = HookPoint()
        if cfg.positional_embedding_type == "learned":
            self.pos_embed = PositionEmbed(cfg)
            self.hook_pos_embed = HookPoint()
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.ln_final = Norm(cfg)
        self.unembed = Unembed(cfg, self.embed)
        self._initialise()
        self.setup()
        self.to(device=cfg.device, dtype=cfg.dtype)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        revision: str | None = None,
        n_ctx: int | None = None,
        attention_backend: AttentionBackend = "auto",
    ) -> HookedTransformer:
        """Loads a model, in eval mode.

        Args:
            source: a name that ``workbench models`` lists (fetched on first use), a Hugging Face id, a folder with
                config.json and safetensors, a GGUF file, or a transformers model in memory (its weights are copied).
            tokenizer: a transformers tokenizer that replaces the model's own.
            n_ctx: another context length than the checkpoint's. Rotary models accept longer ones, at their own risk.

        Raises:
            ModelNotFoundError, UnsupportedModelError, CorruptWeightsError: with what to do about it.
        """
        from workbench.loading.pretrained import load_pretrained

        return load_pretrained(
            source,
            tokenizer=tokenizer,
            device=device,
            dtype=dtype,
            revision=revision,
            n_ctx=n_ctx,
            attention_backend=attention_backend,
        )

    # Forward pass

    def forward(
        self,
        input: str | Sequence[str] | Tensor,
        return_type: ReturnType = "logits",
        *,
        loss_per_token: bool = False,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        collector: StatisticsCollector | None = None,
    ) -> Any:
        """Runs the model.

        Args:
            input: text, several texts (padded and masked here), token ids [batch, pos] or [pos], or with
                ``start_at_layer`` the residual stream [batch, pos, d_model] that enters that layer.
            return_type: "logits" [batch, pos, d_vocab], "loss" (next-token cross-entropy in nats), "both", or None to
                skip the unembedding.
            loss_per_token: losses [batch, pos − 1] instead of their mean; NaN where there is no real target.
            attention_mask: [batch, pos], true or 1 for real tokens. Pads are attended by nobody and count in nothing.
            position_ids: [batch, pos]; by default they count the real tokens of each sequence (and document).
            documents: int64 [batch, pos], runs of equal ids: packed texts that do not see each other.
            stop_at_layer: return the residual that enters this layer; neither norm nor unembedding runs, so there is
                no loss to ask for.
            collector: where the statistics of all layers go, as ``run_with_statistics`` asks.

        Raises:
            ValueError: an argument that does not fit, in words that say which and why.
        """
        first, last = self._layer_range(start_at_layer, stop_at_layer)
        _check_return_type(return_type, start_at_layer, stop_at_layer)
        x, attention_mask = self._read_input(input, start_at_layer, attention_mask, prepend_bos, padding_side)
        tokens = x if start_at_layer is None else None
        shape = x.shape[0], x.shape[1]
        attention_mask = self._real_tokens(attention_mask, shape)
        documents = self._checked_documents(documents, shape)
        position_ids = self._position_ids(position_ids, attention_mask, documents, shape)
        residual = x if tokens is None else self._embed(tokens, position_ids)
        context = self._attention_context(tokens, attention_mask, documents, position_ids, shape, collector)
        for block in self.blocks[first:last]:
            residual = block(residual, context)
        if stop_at_layer is not None:
            return residual
        normalized = self.ln_final(residual)  # [batch, pos, d_model]
        if return_type is None:
            return None
        logits = self.unembed(normalized)  # [batch, pos, d_vocab]
        if return_type == "logits":
            return logits
        assert tokens is not None  # _check_return_type has seen to it
        loss = next_token_loss(logits, tokens, attention_mask, documents, per_token=loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def run_with_statistics(
        self, input: str | Sequence[str] | Tensor, request: StatisticsRequest | None = None, **forward_arguments: Any
    ) -> tuple[Any, ModelStatistics]:
        """Runs the model and returns (output, statistics of every layer that ran), in O(n) memory.

        Hooks that are active apply, so the statistics under an ablation are a ``with model.hooks(…)`` away.

        Args:
            request: what to compute; None means ``model.statistics_request``.
            **forward_arguments: those of the model's call, ``return_type`` among them.

        Raises:
            ValueError: as the model's call, or a range of layers that is empty.
        """
        collector = StatisticsCollector(self.statistics_request if request is None else request)
        first, last = (forward_arguments.get(name) for name in ("start_at_layer", "stop_at_layer"))
        first, last = self._layer_range(first, last)
        if first >= last:
            raise ValueError("statistics need a layer that runs, but start_at_layer and stop_at_layer leave none")
        output = self(input, collector=collector, **forward_arguments)
        return output, ModelStatistics(collector.layers, first)

    def _read_input(
        self, input: Any, start_at_layer: int | None, attention_mask: Tensor | None, prepend_bos: Any, padding_side: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [batch, pos], or with start_at_layer the residual [batch, pos, d_model]; and the attention mask."""
        if start_at_layer is not None:
            is_stream = isinstance(input, Tensor) and input.is_floating_point() and input.dim() == 3 and input.numel()
            if not is_stream or input.shape[-1] != self.cfg.d_model or input.dtype != self.cfg.dtype:
                raise ValueError(
                    f"with start_at_layer, input must be a residual stream [batch, pos, {self.cfg.d_model}] of the "
                    f"model's {self.cfg.dtype}, got {_kind(input)}"
                )
            return input.to(self.cfg.device), attention_mask
        if isinstance(input, Tensor):
            if prepend_bos is not None or padding_side is not None:
                raise ValueError("prepend_bos and padding_side apply to text; the input is already tokens")
            return check_tokens(input, self.cfg).to(self.cfg.device), attention_mask
        if attention_mask is not None:
            raise ValueError("text is padded and masked by the model; leave attention_mask out, or pass tokens")
        return self.to_tokens(input, prepend_bos=prepend_bos, padding_side=padding_side, return_attention_mask=True)

    def _layer_range(self, start: int | None, stop: int | None) -> tuple[int, int]:
        layers = self.cfg.n_layers
        for name, value in (("start_at_layer", start), ("stop_at_layer", stop)):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and -layers <= value <= layers):
                raise ValueError(f"{name} must be a whole number between {-layers} and {layers}, got {value!r}")
        first = 0 if start is None else start % layers if start < 0 else start
        last = layers if stop is None else stop % layers if stop < 0 else stop
        if first > last:
            raise ValueError(f"start_at_layer must not lie behind stop_at_layer, got {start} and {stop}")
        return first, last

    def _real_tokens(self, attention_mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """bool [batch, pos], or None where every token is real."""
        if attention_mask is None:
            return None
        if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
            raise ValueError(
                f"attention_mask must be a tensor of the input's shape {shape}, got {_kind(attention_mask)}"
            )
        real = attention_mask.to(self.cfg.device)
        if real.dtype != torch.bool and not bool(((real == 0) | (real == 1)).all()):
            raise ValueError("attention_mask must hold only 0 (pad) and 1 (real token)")
        real = real.bool()
        return None if bool(real.all()) else real

    def _checked_documents(self, documents: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        if documents is None:
            return None
        if not _holds_integers(documents) or tuple(documents.shape) != shape:
            raise ValueError(f"documents must be integers of the input's shape {shape}, got {_kind(documents)}")
        return documents.to(self.cfg.device, torch.int64)

    def _position_ids(
        self, given: Tensor | None, real: Tensor | None, documents: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        """int64 [batch, pos]. Pads never shift the positions of real tokens."""
        if given is not None:
            if not _holds_integers(given):
                raise ValueError(f"position_ids must be integers of the input's shape {shape}, got {_kind(given)}")
            position_ids = given.to(self.cfg.device, torch.int64)
            if position_ids.dim() == 1:
                position_ids = position_ids[None]
            if position_ids.shape not in (torch.Size(shape), torch.Size((1, shape[1]))):
                raise ValueError(f"position_ids must be integers of the input's shape {shape}, got {_kind(given)}")
            position_ids = position_ids.expand(shape)
        elif real is None and documents is None:
            position_ids = torch.arange(shape[1], device=self.cfg.device).expand(shape)
        else:
            everything = torch.ones(shape, dtype=torch.bool, device=self.cfg.device)
            position_ids = rank_in_document(everything if real is None else real, documents)
        low, high = int(position_ids.min()), int(position_ids.max())
        if low < 0 or high >= self.cfg.n_ctx:
            raise ValueError(
                f"positions run from {low} to {high}, but the model's context has {self.cfg.n_ctx} (n_ctx). "
                "Shorten the input (to_tokens(…, truncate=True)), or load a rotary model with a larger n_ctx."
            )
        return position_ids

    def _embed(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        residual = self.hook_embed(self.embed(tokens))  # [batch, pos, d_model]
        if self.cfg.positional_embedding_type == "learned":
            residual = residual + self.hook_pos_embed(self.pos_embed(position_ids))
        return residual

    def _attention_context(
        self, tokens: Tensor | None, real: Tensor | None, documents: Tensor | None, position_ids: Tensor,
        shape: tuple[int, int], collector: StatisticsCollector | None,
    ) -> AttentionContext:  # fmt: skip
        cfg, rotation = self.cfg, None
        if cfg.positional_embedding_type == "rotary":
            rotation = rotary_tables(position_ids, cfg.d_head, cfg.rotary_base, cfg.dtype)
        return AttentionContext(
            mask=AttentionMask(causal=True, key_padding=real, query_padding=real, documents=documents),
            rotation=rotation,
            tokens=tokens,
            shape=shape,
            device=cfg.device,
            user_request=self.statistics_request if collector is None else collector.request,
            collector=collector,
        )

    # Switches

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Switches attn.hook_result [batch, pos, n_heads, d_model] on or off."""
        self._reconfigure(use_attn_result=use_attn_result)

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Switches attn.hook_q_input, hook_k_input and hook_v_input [batch, pos, head, d_model] on or off.

        While it is on, ln1's hooks fire once for each of the three, with a head axis.
        """
        self._reconfigure(use_split_qkv_input=use_split_qkv_input)

    def set_attention_backend(self, attention_backend: AttentionBackend) -> None:
        """Chooses "auto" (materialise where a hook needs it), "flash" (never) or "materialised" (always)."""
        self._reconfigure(attention_backend=attention_backend)

    def _reconfigure(self, **changes: Any) -> None:
        cfg = dataclasses.replace(self.cfg, **changes)
        for module in self.modules():
            if isinstance(module, (HookedTransformer, Block, Attention)):
                module.cfg = cfg

    def _apply(self, fn: Callable, recurse: bool = True) -> HookedTransformer:
        """What to(), half(), double() and cuda() come down to; the configuration's device and dtype follow."""
        super()._apply(fn, recurse)
        weight = self.embed.W_E
        if (weight.device, weight.dtype) != (self.cfg.device, self.cfg.dtype):
            self._reconfigure(device=weight.device, dtype=weight.dtype)
        return self

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            # Without memory there is nothing to draw, and torch would import its compiler for it.
            if parameter.dim() > 1 and not parameter.is_meta:
                into_residual = name.endswith(("W_O", "W_out"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.cfg.n_layers) ** 0.5 if into_residual else 0.02)


def _check_return_type(return_type: Any, start_at_layer: int | None, stop_at_layer: int | None) -> None:
    if return_type not in ("logits", "loss", "both", None):
        raise ValueError(f"return_type must be 'logits', 'loss', 'both' or None, got {return_type!r}")
    if return_type in ("loss", "both") and start_at_layer is not None:
        raise ValueError("a loss needs tokens, but this run starts from a residual; ask for logits instead")
    if return_type in ("loss", "both") and stop_at_layer is not None:
        raise ValueError("with stop_at_layer the model returns a residual, which has no loss; leave return_type out")


def _holds_integers(value: Any) -> bool:
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return isinstance(value, Tensor) and not floating and value.dtype != torch.bool


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


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
