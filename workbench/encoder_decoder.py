"""A Transformer with an encoder beside the decoder: translation, T5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workbench.components.block import Block
from workbench.components.embeddings import RelativeBias
from workbench.components.norms import Norm
from workbench.config import TransformerConfig
from workbench.context import (
    AttentionContext,
    Contexts,
    KeysAndQueries,
    Memory,
    position_rules,
    request_across_texts,
)
from workbench.generation import Sampling
from workbench.hooks import HookPoint, RunPositions
from workbench.inputs import check_return_type
from workbench.kernels import StatisticsRequest
from workbench.kv_cache import KVCache
from workbench.losses import next_token_loss
from workbench.statistics import ModelStatistics, StatisticsCollector
from workbench.tokens import PaddingSide
from workbench.transformer import HookedTransformer, ReturnType

Stack = Literal["decoder", "encoder", "cross"]


class HookedEncoderDecoder(HookedTransformer):
    """A bidirectional encoder of one text and a causal decoder of another, whose every layer attends to the encoder.

    The decoder is what a HookedTransformer is: ``blocks``, ``ln_final``, ``unembed`` and their hook points; its
    cross-attention is ``blocks.{l}.cross_attn`` (queries are the decoder's tokens, keys the encoder's). The encoder is
    ``encoder_blocks`` and ``encoder_ln_final``; its embeddings are ``hook_encoder_embed`` and
    ``hook_encoder_pos_embed``. One W_E serves both. In the hooks of ``cross_attn``, ``hook.position_ids`` are those of
    the decoder's tokens and ``hook.key_position_ids`` those of the encoder's.

    Source: Vaswani et al. 2017, section 3.1.
    """

    def setup(self) -> None:
        """As HookedTransformer's; hooks on cross-attention learn where the tokens of both texts stand."""
        super().setup()
        self.cross_positions = RunPositions()
        for name, hook in self.hook_dict.items():
            if ".cross_attn." in name:
                hook.run = self.cross_positions

    def _check_kind(self, cfg: TransformerConfig) -> None:
        if cfg.n_encoder_layers is None:
            raise ValueError("a HookedEncoderDecoder needs n_encoder_layers; without, use HookedTransformer")

    def _add_embeddings(self, cfg: TransformerConfig) -> None:
        super()._add_embeddings(cfg)
        assert cfg.n_encoder_layers is not None
        self.hook_encoder_embed = HookPoint()
        if cfg.positional_embedding_type in ("learned", "sinusoidal"):
            self.hook_encoder_pos_embed = HookPoint()
        if cfg.positional_embedding_type == "relative":
            self.encoder_relative_bias = RelativeBias(cfg)
        if cfg.use_embed_norm:
            self.encoder_ln_embed = Norm(cfg)
        self.encoder_blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_encoder_layers))
        self.encoder_ln_final = Norm(cfg) if cfg.has_final_norm else nn.Identity()

    def forward(  # type: ignore[override]  # an encoder–decoder reads two texts
        self,
        input: str | Sequence[str] | Tensor | None = None,
        return_type: ReturnType = "logits",
        *,
        decoder_input: str | Sequence[str] | Tensor | None = None,
        encoder_output: Tensor | None = None,
        loss_per_token: bool = False,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        kv_cache: KVCache | None = None,
        collector: StatisticsCollector | None = None,
        collect_from: Stack = "decoder",
    ) -> Any:
        """Runs encoder and decoder.

        Args:
            input: what the encoder reads: text, several texts, or token ids [batch, pos]. None with ``encoder_output``.
            decoder_input: what the decoder reads: text or several texts (see ``to_decoder_tokens``), or token ids
                [batch, decoder pos] that begin with the model's start token. None is that token alone.
            encoder_output: what ``encode`` returned, so that the encoder does not run again; with its
                ``attention_mask`` where the input was padded.
            attention_mask: [batch, pos], true or 1 for the encoder's real tokens.
            decoder_attention_mask: [batch, decoder pos]; with a ``kv_cache`` that of the new tokens.
            kv_cache: what the decoder remembers of the tokens before ``decoder_input``.
            collector, collect_from: where the statistics of one stack go, as ``run_with_statistics`` asks.

        Returns:
            As HookedTransformer, for the decoder's tokens.

        Raises:
            ValueError: an argument that does not fit, in words that say which and why.
        """
        check_return_type(return_type, None, None, self.cfg)
        if collect_from not in ("decoder", "encoder", "cross"):
            raise ValueError(f"collect_from must be 'decoder', 'encoder' or 'cross', got {collect_from!r}")
        if (input is None) == (encoder_output is None):
            raise ValueError("give either input, which the encoder reads, or encoder_output, what encode returned")
        collectors = {collect_from: collector}
        if encoder_output is None:
            assert input is not None
            of_encoder = collectors.get("encoder")
            encoder_output, attention_mask = self.encode(input, attention_mask=attention_mask, collector=of_encoder)
        memory_real = self._real_tokens(attention_mask, tuple(encoder_output.shape[:2]))
        memory = Memory(encoder_output, memory_real, collectors.get("cross"))
        self.cross_positions.keys = self._position_ids(None, memory_real, None, tuple(encoder_output.shape[:2]))
        if kv_cache is not None and len(kv_cache) and not isinstance(decoder_input, Tensor):
            raise ValueError("text begins with the start token; continue what the kv_cache holds with token ids")
        tokens, decoder_attention_mask = self._read_decoder_input(
            decoder_input, decoder_attention_mask, len(encoder_output)
        )
        if len(tokens) != len(encoder_output):
            raise ValueError(f"decoder_input has {len(tokens)} texts, but the encoder read {len(encoder_output)}")
        real = self._real_tokens(decoder_attention_mask, tuple(tokens.shape))
        own = collectors.get("decoder")
        if kv_cache is not None:
            self._check_cached_run(kv_cache, return_type)
            normalized = self._run_cached(tokens, real, None, kv_cache, own, memory)
        else:
            position_ids = self._position_ids(None, real, None, tuple(tokens.shape))
            sequence = KeysAndQueries(position_ids, position_ids, real)
            contexts = self._contexts(sequence, tokens, own, memory=memory)
            residual = self._embed(tokens, position_ids)
            residual = self._run_blocks(residual, contexts, position_ids, position_ids, 0, self.cfg.n_layers)
            normalized = self.ln_final(residual)  # [batch, decoder pos, d_model]
        if return_type is None:
            return None
        logits = self._unembed(normalized)  # [batch, decoder pos, d_vocab]
        if return_type == "logits":
            return logits
        loss = next_token_loss(logits, tokens, real, None, per_token=loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _run_blocks(self, residual: Tensor, contexts: Contexts, positions: Tensor, *arguments: Any) -> Tensor:
        self.cross_positions.queries = positions
        return super()._run_blocks(residual, contexts, positions, *arguments)

    def to_decoder_tokens(
        self,
        input: str | Sequence[str],
        *,
        padding_side: PaddingSide | None = None,
        return_attention_mask: bool = False,
    ) -> Any:
        """What the decoder reads of a text: the start token and the text's tokens, without the tokenizer's template.

        Token ids [batch, decoder pos], as ``to_tokens`` returns them for the encoder. Tokenizers that tell languages
        apart take the text as one of the target language.

        Raises:
            ValueError: as ``to_tokens``; a configuration without decoder_start_token_id.
        """
        start = self._start_token()
        rows = []
        for text in [input] if isinstance(input, str) else input:
            tokenizer = self._checked_tokenizer(text)
            ids = tokenizer(text_target=text, add_special_tokens=False, verbose=False)["input_ids"]
            rows.append([start, *self._known(ids)])
        return self._fill_up(rows, padding_side, return_attention_mask)

    def _read_decoder_input(
        self, decoder_input: Any, attention_mask: Tensor | None, batch: int, padding_side: PaddingSide = "right"
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(decoder_input, Tensor):
            return self._read_input(decoder_input, None, attention_mask, None, None)
        if attention_mask is not None:
            raise ValueError("text is padded and masked by the model; leave decoder_attention_mask out, or pass tokens")
        if decoder_input is None:
            return torch.full((batch, 1), self._start_token(), device=self.cfg.device), None
        return self.to_decoder_tokens(decoder_input, padding_side=padding_side, return_attention_mask=True)

    def _start_token(self) -> int:
        if self.cfg.decoder_start_token_id is None:
            raise ValueError("the configuration has no decoder_start_token_id: pass decoder_input as token ids")
        return self.cfg.decoder_start_token_id

    def encode(
        self,
        input: str | Sequence[str] | Tensor,
        *,
        attention_mask: Tensor | None = None,
        collector: StatisticsCollector | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the encoder alone.

        Returns:
            Its normalised stream [batch, pos, d_model], which every decoder layer reads, and the attention mask, bool
            [batch, pos]; None where every token is real.

        Raises:
            ValueError: as the model's call.
        """
        tokens, attention_mask = self._read_input(input, None, attention_mask, None, None)
        shape = tokens.shape[0], tokens.shape[1]
        real = self._real_tokens(attention_mask, shape)
        position_ids = self._position_ids(None, real, None, shape)
        sequence = KeysAndQueries(position_ids, position_ids, real)
        table = self.encoder_relative_bias.W_rel if self.cfg.positional_embedding_type == "relative" else None
        context = AttentionContext(
            mask=sequence.mask(causal=False),
            positions=position_rules(self.cfg, "global", sequence, table, causal=False),
            tokens=tokens,
            n_queries=shape[1],
            n_keys=shape[1],
            user_request=self.statistics_request if collector is None else collector.request,
            collector=collector,
        )
        residual = self.hook_encoder_embed(self.embed(tokens))
        if self.cfg.positional_embedding_type in ("learned", "sinusoidal"):
            residual = residual + self.hook_encoder_pos_embed(self._position_vectors(position_ids))
        residual = self._finish_embedding(residual, getattr(self, "encoder_ln_embed", None))
        self.run_positions.queries = self.run_positions.keys = position_ids
        for block in self.encoder_blocks:
            residual = block(residual, Contexts({"global": context}))
        return self.encoder_ln_final(residual), real

    def run_with_statistics(
        self,
        input: str | Sequence[str] | Tensor | None = None,
        request: StatisticsRequest | None = None,
        *,
        collect_from: Stack = "decoder",
        **forward_arguments: Any,
    ) -> tuple[Any, ModelStatistics]:
        """As HookedTransformer, for the layers of one stack.

        Args:
            collect_from: "decoder" for its self-attention, "encoder", or "cross" for its attention to the encoder,
                whose statistics have no offsets, match or mean distance.

        Raises:
            ValueError: as the model's call; the encoder's statistics of an ``encoder_output``.
        """
        if collect_from == "encoder" and input is None:
            raise ValueError("statistics of the encoder need its input, as encoder_output means that it does not run")
        if request is None:
            own = self.statistics_request
            request = request_across_texts(own) if collect_from == "cross" else own
        collector = StatisticsCollector(request)
        output = self(input, collector=collector, collect_from=collect_from, **forward_arguments)
        return output, ModelStatistics(collector.layers, range(len(collector.layers)), collector.real)

    @torch.no_grad()
    def generate(  # type: ignore[override]
        self,
        input: str | Sequence[str] | Tensor,
        max_new_tokens: int = 20,
        *,
        decoder_input: str | Sequence[str] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        stop_at_eos: bool = True,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        kv_cache: KVCache | None = None,
    ) -> Any:
        """The decoder's text for what the encoder reads, else as HookedTransformer's.

        The encoder runs once, the decoder token by token. It never picks its start token, which is also a pad: Marian
        leaves that token's logit untrained.

        Args:
            decoder_input: what the decoder's text begins with: text or several texts, or token ids [batch, decoder pos]
                that begin with the start token. None is that token alone.

        Returns:
            The decoder's text, a list of texts, or its tokens [batch, decoder pos + new], as the input was.

        Raises:
            ValueError: as HookedTransformer's.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        encoder_output, real = self.encode(input, attention_mask=attention_mask)
        batch = len(encoder_output)
        tokens, mask = self._read_decoder_input(decoder_input, None, batch, padding_side="left")
        if len(tokens) != batch:
            raise ValueError(f"decoder_input has {len(tokens)} texts, but the encoder read {batch}")

        def decode(tokens: Tensor, *, attention_mask: Tensor, kv_cache: KVCache) -> Tensor:
            logits = self(
                encoder_output=encoder_output, attention_mask=real, decoder_input=tokens,
                decoder_attention_mask=attention_mask, kv_cache=kv_cache,
            )  # fmt: skip
            if self.cfg.decoder_start_token_id is not None:
                logits[..., self.cfg.decoder_start_token_id] = -torch.inf
            return logits

        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        tokens, mask = self._continue(decode, tokens, mask, max_new_tokens, sampling, stop_at_eos, kv_cache)
        if isinstance(input, Tensor):
            return tokens
        texts = [
            self.tokenizer.decode(row[kept], skip_special_tokens=True) for row, kept in zip(tokens, mask, strict=True)
        ]
        return texts[0] if isinstance(input, str) else texts
