"""The hookable Transformer: tokens → embedding → blocks → logits, every intermediate value within reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.components.block import Block
from workbench.components.embeddings import (
    Embed,
    MaskedLanguageModelHead,
    PositionEmbed,
    RelativeBias,
    SegmentEmbed,
    Unembed,
)
from workbench.components.norms import Norm
from workbench.components.positions import sinusoidal_table
from workbench.config import AttentionBackend, RopeScaling, TransformerConfig
from workbench.context import AttentionContext, Contexts, KeysAndQueries, Memory, position_rules
from workbench.generation import GenerationMethods
from workbench.hooks import HookedModel, HookPoint
from workbench.initialisation import initialise
from workbench.inputs import InputMethods, check_return_type
from workbench.kernels import StatisticsRequest
from workbench.kv_cache import KVCache
from workbench.losses import next_token_loss
from workbench.statistics import DEFAULT_REQUEST, ModelStatistics, StatisticsCollector
from workbench.switches import SwitchMethods
from workbench.tokens import TokenMethods
from workbench.weights import WeightViews

ReturnType = Literal["logits", "loss", "both"] | None


class HookedTransformer(WeightViews, TokenMethods, InputMethods, GenerationMethods, SwitchMethods, HookedModel):
    """A Transformer decoder or encoder whose attention runs on a kernel that emits attention statistics.

    Hook points carry TransformerLens' names and shapes (``model.hook_dict`` lists them). Statistics are read-only hook
    points beside them: ``blocks.{l}.attn.hook_entropy`` and its siblings. ``statistics_request`` holds the parameters
    of the statistics' hooks and is what ``run_with_statistics`` computes by default.

    ``HookedTransformer(cfg)`` draws its weights by ``cfg.init_mode``; models with an encoder beside the decoder are
    ``workbench.HookedEncoderDecoder``.
    """

    blocks: Any
    ln_final: Any

    def __init__(self, cfg: TransformerConfig, tokenizer: Any = None) -> None:
        super().__init__()
        if not isinstance(cfg, TransformerConfig):
            raise ValueError(f"cfg must be a TransformerConfig, got {type(cfg).__name__}")
        self._check_kind(cfg)
        self.cfg = cfg
        self.tokenizer = tokenizer
        self.statistics_request: StatisticsRequest = DEFAULT_REQUEST
        self._add_embeddings(cfg)
        self.blocks = nn.ModuleList(
            Block(cfg, layer, kind, reads_encoder=cfg.n_encoder_layers is not None)
            for layer, kind in enumerate(cfg.layer_types)
        )
        self.ln_final = Norm(cfg) if cfg.has_final_norm else nn.Identity()
        if cfg.use_mlm_head:
            self.mlm_head = MaskedLanguageModelHead(cfg)
        if cfg.use_unembed:
            self.unembed = Unembed(cfg, self.embed)
        initialise(self, cfg)
        self.setup()
        self.to(device=cfg.device, dtype=cfg.dtype)

    def _check_kind(self, cfg: TransformerConfig) -> None:
        if cfg.n_encoder_layers is not None:
            raise ValueError("a configuration with n_encoder_layers is that of a HookedEncoderDecoder; use that class")

    def _add_embeddings(self, cfg: TransformerConfig) -> None:
        self.embed = Embed(cfg)
        self.hook_embed = HookPoint()
        if cfg.n_segments is not None:
            self.segment_embed, self.hook_segment_embed = SegmentEmbed(cfg), HookPoint()
        if cfg.positional_embedding_type == "learned":
            self.pos_embed = PositionEmbed(cfg)
        if cfg.positional_embedding_type in ("learned", "sinusoidal"):
            self.hook_pos_embed = HookPoint()
        if cfg.positional_embedding_type == "relative":
            self.relative_bias = RelativeBias(cfg)
        if cfg.use_embed_norm:
            self.ln_embed = Norm(cfg)

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
        rope_scaling: RopeScaling | None = None,
        attention_backend: AttentionBackend = "auto",
    ) -> HookedTransformer:
        """Loads a model, in eval mode. Encoder–decoders come back as HookedEncoderDecoder.

        Args:
            source: a name that ``workbench models`` lists (fetched on first use), a Hugging Face id, a folder with
                config.json and safetensors, a GGUF file, or a transformers model in memory (its weights are copied).
            tokenizer: a transformers tokenizer that replaces the model's own.
            n_ctx: another context length than the checkpoint's. Rotary models accept longer ones, at their own risk.
            rope_scaling: another scaling of rotary positions than the checkpoint's.

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
            rope_scaling=rope_scaling,
            attention_backend=attention_backend,
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes configuration, weights and tokenizer into a folder, from which ``from_pretrained`` loads the model.

        Raises:
            WorkbenchError: the folder cannot be written.
        """
        from workbench.saving import save_pretrained

        save_pretrained(self, folder)

    # Forward pass

    def forward(
        self,
        input: str | Sequence[str] | Tensor,
        return_type: ReturnType = "logits",
        *,
        loss_per_token: bool = False,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        documents: Tensor | None = None,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        rows: Tensor | None = None,
        z: Tensor | None = None,
        kv_cache: KVCache | None = None,
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
            token_type_ids: [batch, pos], the segment of each token in models that have segments; 0 by default.
            documents: int64 [batch, pos], runs of equal ids: packed texts that do not see each other.
                (Rotary positions that are scaled by length, "dynamic" and "longrope", take the longest text's for the
                whole batch, as transformers does: run such texts in batches of one length.)
            stop_at_layer: return the residual that enters this layer; neither norm nor unembedding runs, so there is
                no loss to ask for.
            rows: with ``stop_at_layer``, int64 [batch, row], the only positions to return, [batch, row, d_model]. The
                last layer that runs then computes what lies behind its attn.hook_z for them alone, unless a hook
                listens there: the values are the same, and so is what a hook sees.
            z: with ``start_at_layer``, [batch, pos, n_heads, d_head], what enters that layer's attn.hook_z. Its
                attention does not run, so what hooks do between hook_resid_pre and there counts for nothing.
            kv_cache: what the model remembers of the tokens before these, to which it adds these; ``attention_mask``
                is then that of the new tokens.
            collector: where the statistics of all layers go, as ``run_with_statistics`` asks.

        Raises:
            ValueError: an argument that does not fit, in words that say which and why.
        """
        first, last = self._layer_range(start_at_layer, stop_at_layer)
        check_return_type(return_type, start_at_layer, stop_at_layer, self.cfg)
        x, attention_mask = self._read_input(input, start_at_layer, attention_mask, prepend_bos, padding_side)
        shape = x.shape[0], x.shape[1]
        if rows is not None:
            self._check_rows(rows, shape, stop_at_layer, n_run=last - first)
        if z is not None:
            self._check_z(z, shape, start_at_layer, n_run=last - first)
        real = self._real_tokens(attention_mask, shape)
        documents = self._checked_documents(documents, shape)
        segments = self._segments(token_type_ids, shape, start_at_layer)
        if kv_cache is not None:
            self._check_cached_run(
                kv_cache, return_type, position_ids=position_ids, documents=documents,
                start_at_layer=start_at_layer, stop_at_layer=stop_at_layer,
            )  # fmt: skip
            normalized = self._run_cached(x, real, segments, kv_cache, collector)
        else:
            position_ids = self._position_ids(position_ids, real, documents, shape)
            sequence = KeysAndQueries(position_ids, position_ids, real, documents)
            tokens = x if start_at_layer is None else None
            residual = x if tokens is None else self._embed(tokens, position_ids, segments)
            contexts = self._contexts(sequence, tokens, collector)
            residual = self._run_blocks(residual, contexts, position_ids, position_ids, first, last, rows, z)
            if stop_at_layer is not None:
                return residual
            normalized = self.ln_final(residual)  # [batch, pos, d_model]
        if return_type is None:
            return None
        logits = self._unembed(normalized)  # [batch, pos, d_vocab]
        if return_type == "logits":
            return logits
        loss = next_token_loss(logits, x, real, documents, per_token=loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def run_with_statistics(
        self, input: str | Sequence[str] | Tensor, request: StatisticsRequest | None = None, **forward_arguments: Any
    ) -> tuple[Any, ModelStatistics]:
        """Runs the model and returns (output, statistics of every layer that ran), in O(n) memory.

        As in any call of the model, every layer's activations are kept for gradients unless torch.no_grad() is on.
        Hooks that are active apply, so the statistics under an ablation are a ``with model.hooks(…)`` away. Layers with
        linear attention have no statistics and are left out. The rows of pads are 0; ``statistics.real`` says which
        rows to average over.

        Args:
            request: what to compute; None means ``model.statistics_request``.
            **forward_arguments: those of the model's call, ``return_type`` among them.

        Raises:
            ValueError: as the model's call, or a range of layers that is empty.
        """
        collector = StatisticsCollector(self.statistics_request if request is None else request)
        first, last = (forward_arguments.get(name) for name in ("start_at_layer", "stop_at_layer"))
        first, last = self._layer_range(first, last)
        layers = [layer for layer in range(first, last) if self.cfg.layer_types[layer] != "linear"]
        if not layers:
            raise ValueError(
                "statistics need a layer with softmax attention that runs, but start_at_layer, stop_at_layer and the "
                "model's attn_types leave none"
            )
        output = self(input, collector=collector, **forward_arguments)
        return output, ModelStatistics(collector.layers, layers, collector.real)

    def score_inputs(
        self, tokens: Tensor, layer: int, *, attention_mask: Tensor | None = None, start_at_layer: int | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """What the scores of one layer are made of, so that any part of its pattern can be had without all of it.

        The layers before it run, under the hooks that are active.

        Args:
            tokens: [batch, pos], or with ``start_at_layer`` the residual stream [batch, pos, d_model] that enters that
                layer.

        Returns:
            q [batch, n_heads, pos, d_head], k [batch, n_key_value_heads, pos, d_head], and the options under which
            ``workbench.kernels.attention_pattern`` makes the layer's pattern of them.

        Raises:
            ValueError: a layer without softmax attention, or as the model's call.
        """
        whole = isinstance(layer, int) and not isinstance(layer, bool)
        if not whole or not 0 <= layer < self.cfg.n_layers or self.cfg.layer_types[layer] == "linear":
            raise ValueError(f"layer must be one with softmax attention, 0 to {self.cfg.n_layers - 1}, got {layer}")
        residual = self(tokens, None, attention_mask=attention_mask, start_at_layer=start_at_layer, stop_at_layer=layer)
        shape = residual.shape[0], residual.shape[1]
        real = self._real_tokens(attention_mask, shape)
        position_ids = self._position_ids(None, real, None, shape)
        contexts = self._contexts(KeysAndQueries(position_ids, position_ids, real), None, None)
        block = self.blocks[layer]
        context = contexts.of(block.attn_type)
        inputs = block.attention_inputs(block.hook_resid_pre(residual))
        q, k, _ = block.attn.queries_keys_values(*inputs, context)
        return q, k, {**block.attn.score_options(context), "sink_logits": block.attn.sink_logits}

    def _embed(self, tokens: Tensor, position_ids: Tensor, segments: Tensor | None = None) -> Tensor:
        """[batch, pos] → [batch, pos, d_model]"""
        residual = self.hook_embed(self.embed(tokens))
        if self.cfg.positional_embedding_type in ("learned", "sinusoidal"):
            residual = residual + self.hook_pos_embed(self._position_vectors(position_ids))
        if segments is not None:
            residual = residual + self.hook_segment_embed(self.segment_embed(segments))
        return self._finish_embedding(residual, getattr(self, "ln_embed", None))

    def _position_vectors(self, position_ids: Tensor) -> Tensor:
        cfg = self.cfg
        if cfg.positional_embedding_type == "learned":
            return self.pos_embed(position_ids)
        n_positions = int(position_ids.max()) + 1
        table = sinusoidal_table(n_positions, cfg.d_model, cfg.sinusoidal_halves, position_ids.device, cfg.dtype)
        return table[position_ids]

    def _finish_embedding(self, residual: Tensor, norm: Norm | None) -> Tensor:
        residual = residual if norm is None else norm(residual)
        return nn.functional.dropout(residual, self.cfg.dropout, self.training)

    def _contexts(
        self, sequence: KeysAndQueries, tokens: Tensor | None, collector: StatisticsCollector | None,
        cache: KVCache | None = None, memory: Memory | None = None,
    ) -> Contexts:  # fmt: skip
        """One context for each kind of attention that the blocks have."""
        cfg, causal = self.cfg, self.cfg.attention_dir == "causal"
        table = self.relative_bias.W_rel if cfg.positional_embedding_type == "relative" else None
        asked = self.statistics_request
        own = {
            kind: AttentionContext(
                mask=sequence.mask(
                    causal=causal,
                    window=cfg.window_size if kind == "local" else None,
                    n_global=cfg.n_global_tokens,
                ),
                positions=position_rules(cfg, kind, sequence, table, causal=causal),
                tokens=tokens,
                n_queries=sequence.n_queries,
                n_keys=sequence.n_keys,
                user_request=asked if collector is None else collector.request,
                collector=collector,
                cache=cache,
            )
            for kind in set(cfg.layer_types)
        }
        return Contexts(own, None if memory is None else memory.context(sequence, asked))

    def _run_blocks(
        self, residual: Tensor, contexts: Contexts, positions: Tensor, key_positions: Tensor, first: int, last: int,
        rows: Tensor | None = None, z: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The blocks from ``first`` up to ``last``, with hooks that know where the tokens stand in their texts."""
        self.run_positions.queries, self.run_positions.keys = positions, key_positions
        for layer, block in enumerate(self.blocks[first:last], first):
            ends = {"rows": rows if layer == last - 1 else None, "z": z if layer == first else None}
            residual = block(residual, contexts, **ends)
        return residual

    def _run_cached(
        self, tokens: Tensor, real: Tensor | None, segments: Tensor | None, cache: KVCache,
        collector: StatisticsCollector | None, memory: Memory | None = None,
    ) -> Tensor:  # fmt: skip
        """The normalised stream [batch, pos, d_model] of new tokens, which ``cache`` remembers from here on."""
        new_real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        cache.check(new_real)
        self._check_cached_length(cache, new_real)
        pieces = list(cache.pieces(tokens.shape[1]))
        if collector is not None and len(pieces) > 1:
            raise ValueError(
                f"the kv_cache's window of {cache.window} splits these {tokens.shape[1]} tokens, and statistics are of "
                "one piece; pass the tokens that go beyond the window one by one"
            )
        outputs = []
        for piece in pieces:
            new = tokens[:, piece]
            cache.start(new, new_real[:, piece])
            assert cache.real is not None and cache.positions is not None
            all_real = None if bool(cache.real.all()) else cache.real
            key_ids = cache.real.long().cumsum(dim=1) - cache.real.long()  # counted within the cache
            positions = cache.positions[:, -new.shape[1] :]
            residual = self._embed(new, positions, None if segments is None else segments[:, piece])
            sequence = KeysAndQueries(key_ids[:, -new.shape[1] :], key_ids, all_real)
            contexts = self._contexts(sequence, cache.tokens, collector, cache, memory)
            residual = self._run_blocks(residual, contexts, positions, cache.positions, 0, self.cfg.n_layers)
            outputs.append(self.ln_final(residual))
        cache.finish()
        return torch.cat(outputs, dim=1)

    def to_logits(self, residual: Tensor, tokens: Tensor | None = None) -> Tensor:
        """What the model makes of the residual stream behind its last layer: [batch, pos, d_model] → [batch, pos,
        d_vocab], or with ``tokens``, int64 [n], their logits alone."""
        return self._unembed(self.ln_final(residual), tokens)

    def _unembed(self, normalized: Tensor, tokens: Tensor | None = None) -> Tensor:
        return self.unembed(self.mlm_head(normalized) if self.cfg.use_mlm_head else normalized, tokens)
