"""What the model is called with, checked and brought to one form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.config import TransformerConfig
from workbench.kv_cache import KVCache
from workbench.statistics import rank_in_document
from workbench.tokens import check_tokens


class InputMethods:
    """Checks of the arguments of a forward pass; each raises a ValueError that names what does not fit."""

    cfg: TransformerConfig
    to_tokens: Any

    def _read_input(
        self, input: Any, start_at_layer: int | None, attention_mask: Tensor | None, prepend_bos: Any, padding_side: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [batch, pos], or with start_at_layer the residual [batch, pos, d_model]; and the attention mask."""
        if start_at_layer is not None:
            is_stream = isinstance(input, Tensor) and input.is_floating_point() and input.dim() == 3 and input.numel()
            if not is_stream or input.shape[-1] != self.cfg.d_model or input.dtype != self.cfg.dtype:
                raise ValueError(
                    f"with start_at_layer, input must be a residual stream [batch, pos, {self.cfg.d_model}] of the "
                    f"model's {self.cfg.dtype}, got {kind(input)}"
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

    def _check_rows(self, rows: Any, shape: tuple[int, int], stop_at_layer: int | None, *, n_run: int) -> None:
        """Refuses rows that are no positions of the residual that a run of ``n_run`` layers returns."""
        if stop_at_layer is None or not n_run:
            raise ValueError(
                "rows are of the residual behind a layer that runs: pass stop_at_layer, and model.to_logits makes "
                "logits of what comes back"
            )
        if not holds_integers(rows) or rows.dim() != 2 or len(rows) != shape[0]:
            raise ValueError(f"rows must be integers [batch, row] for a batch of {shape[0]}, got {kind(rows)}")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < shape[1]:
            raise ValueError(f"rows must lie from 0 to {shape[1] - 1}, got {int(rows.min())} to {int(rows.max())}")

    def _check_z(self, z: Any, shape: tuple[int, int], start_at_layer: int | None, *, n_run: int) -> None:
        """Refuses a z that is none of the layer at which a run of ``n_run`` layers starts."""
        if start_at_layer is None or not n_run:
            raise ValueError(
                "z is that of the layer at which the run starts: pass start_at_layer, of a layer that runs"
            )
        expected = (*shape, self.cfg.n_heads, self.cfg.d_head)
        if not isinstance(z, Tensor) or tuple(z.shape) != expected:
            raise ValueError(f"z must be a tensor [batch, pos, n_heads, d_head] of shape {expected}, got {kind(z)}")

    def _real_tokens(self, attention_mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        """bool [batch, pos], or None where every token is real."""
        if attention_mask is None:
            return None
        if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
            raise ValueError(
                f"attention_mask must be a tensor of the input's shape {shape}, got {kind(attention_mask)}"
            )
        real = attention_mask.to(self.cfg.device)
        if real.dtype != torch.bool and not bool(((real == 0) | (real == 1)).all()):
            raise ValueError("attention_mask must hold only 0 (pad) and 1 (real token)")
        real = real.bool()
        if self._counts_columns and bool((real[:, 1:] & ~real[:, :-1] & real[:, :-1].cumsum(dim=1).bool()).any()):
            raise ValueError(
                "attention_mask has a pad between real tokens, which would keep its place in this model's windows or "
                f"{self.cfg.positional_embedding_type} positions; take pads out, or move them before or behind the text"
            )
        return None if bool(real.all()) else real

    @property
    def _counts_columns(self) -> bool:
        """Whether distances are counted in columns of the input rather than by position ids."""
        return self.cfg.positional_embedding_type in ("alibi", "relative") or "local" in self.cfg.layer_types

    def _checked_documents(self, documents: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        if documents is None:
            return None
        if not holds_integers(documents) or tuple(documents.shape) != shape:
            raise ValueError(f"documents must be integers of the input's shape {shape}, got {kind(documents)}")
        if self.cfg.rope_scaling is not None and self.cfg.rope_scaling.depends_on_length:
            raise ValueError(
                f"rope_scaling {self.cfg.rope_scaling.type!r} depends on a text's length, and packed documents have "
                "several; pass each document as a row of its own"
            )
        return documents.to(self.cfg.device, torch.int64)

    def _position_ids(
        self, given: Tensor | None, real: Tensor | None, documents: Tensor | None, shape: tuple[int, ...]
    ) -> Tensor:
        """int64 [batch, pos]. Pads never shift the positions of real tokens."""
        if given is not None:
            if self.cfg.positional_embedding_type in ("alibi", "relative", "none"):
                raise ValueError(
                    f"position_ids have no effect in a model whose positions are "
                    f"{self.cfg.positional_embedding_type!r}; leave them out"
                )
            if not holds_integers(given):
                raise ValueError(f"position_ids must be integers of the input's shape {shape}, got {kind(given)}")
            position_ids = given.to(self.cfg.device, torch.int64)
            if position_ids.dim() == 1:
                position_ids = position_ids[None]
            if position_ids.shape not in (torch.Size(shape), torch.Size((1, shape[1]))):
                raise ValueError(f"position_ids must be integers of the input's shape {shape}, got {kind(given)}")
            position_ids = position_ids.expand(shape)
        elif real is None and documents is None:
            position_ids = torch.arange(shape[1], device=self.cfg.device).expand(shape)
        else:
            everything = torch.ones(shape, dtype=torch.bool, device=self.cfg.device)
            position_ids = rank_in_document(everything if real is None else real, documents)
        self._check_context(position_ids)
        return position_ids

    def _check_context(self, position_ids: Tensor) -> None:
        low, high = int(position_ids.min()), int(position_ids.max())
        if low < 0 or high >= self.cfg.n_ctx:
            raise ValueError(
                f"positions run from {low} to {high}, but the model's context has {self.cfg.n_ctx} (n_ctx). "
                "Shorten the input (to_tokens(…, truncate=True)), or load a rotary model with a larger n_ctx."
            )

    def _segments(self, given: Tensor | None, shape: tuple[int, ...], start_at_layer: int | None) -> Tensor | None:
        """int64 [batch, pos]; None where the model has no segments, or the run starts behind the embedding."""
        n_segments = self.cfg.n_segments
        if n_segments is None or start_at_layer is not None:
            if given is not None:
                raise ValueError("token_type_ids are for models with segments, from their embedding on")
            return None
        if given is None:
            return torch.zeros(shape, dtype=torch.int64, device=self.cfg.device)
        if not holds_integers(given) or tuple(given.shape) != shape:
            raise ValueError(f"token_type_ids must be integers of the input's shape {shape}, got {kind(given)}")
        if int(given.min()) < 0 or int(given.max()) >= n_segments:
            raise ValueError(f"token_type_ids must lie between 0 and {n_segments - 1}, got up to {int(given.max())}")
        return given.to(self.cfg.device, torch.int64)

    def _check_cached_run(self, cache: KVCache, return_type: Any, **left_out: Any) -> None:
        """Refuses what a cache cannot serve; ``left_out`` are arguments that must be None beside it."""
        cfg = self.cfg
        if not isinstance(cache, KVCache):
            raise ValueError(f"kv_cache must be a workbench.KVCache, got {type(cache).__name__}")
        cache.claim(self)
        if cfg.attention_dir != "causal":
            raise ValueError("a kv_cache needs causal attention: in this model earlier tokens see later ones")
        if named := [name for name, value in left_out.items() if value is not None]:
            raise ValueError(f"{named[0]} cannot be combined with a kv_cache; leave it out")
        if return_type in ("loss", "both"):
            raise ValueError("with a kv_cache the model sees a part of a text; ask for logits and take the loss of all")
        if cache.window is not None and "linear" in cfg.layer_types:
            raise ValueError("linear attention sums over all tokens and can evict none; use KVCache() without a window")
        if cache.n_sink_tokens and cfg.positional_embedding_type in ("learned", "sinusoidal"):
            raise ValueError(
                f"n_sink_tokens re-bases positions, but this model's are {cfg.positional_embedding_type} and part of "
                "the embedding; use a model whose positions are rotary, alibi or relative"
            )
        n_first = 0 if cache.sink_start else cache.n_sink_tokens
        if cache.window is not None and "local" in cfg.layer_types and cfg.n_global_tokens > n_first:
            raise ValueError(
                f"the kv_cache's window would evict some of the {cfg.n_global_tokens} n_global_tokens that this model "
                f"sees at any distance; pass KVCache(window=…, n_sink_tokens={cfg.n_global_tokens})"
            )

    def _check_cached_length(self, cache: KVCache, new_real: Tensor) -> None:
        """Refuses new tokens, bool [batch, new], that take a cache beyond what its keys and the context allow."""
        before, after = cache.length(), cache.length(new_real)
        scaling = self.cfg.rope_scaling
        if scaling is not None and before and scaling.changes_between(before, after):
            raise ValueError(
                f"rope_scaling {scaling.type!r} has other frequencies at {after} tokens than at {before}, so what the "
                "kv_cache holds no longer fits; run the whole text with a new one"
            )
        absolute = self.cfg.positional_embedding_type in ("learned", "sinusoidal")
        self._check_context(torch.tensor([0, max(cache.length(new_real, with_evicted=absolute), 1) - 1]))


def check_return_type(
    return_type: Any, start_at_layer: int | None, stop_at_layer: int | None, cfg: TransformerConfig
) -> None:
    if return_type is not None and (isinstance(return_type, Tensor) or return_type not in ("logits", "loss", "both")):
        hint = "; the decoder's tokens go in as decoder_input=…" if cfg.n_encoder_layers is not None else ""
        found = kind(return_type) if isinstance(return_type, Tensor) else repr(return_type)
        raise ValueError(f"return_type must be 'logits', 'loss', 'both' or None, got {found}{hint}")
    if return_type in ("loss", "both") and start_at_layer is not None:
        raise ValueError("a loss needs tokens, but this run starts from a residual; ask for logits instead")
    if return_type in ("loss", "both") and stop_at_layer is not None:
        raise ValueError("with stop_at_layer the model returns a residual, which has no loss; leave return_type out")
    if return_type in ("loss", "both") and cfg.attention_dir != "causal":
        raise ValueError("a bidirectional model sees the next token, so it has no next-token loss; ask for logits")
    if return_type is not None and stop_at_layer is None and not cfg.use_unembed:
        raise ValueError(f"{cfg.model_name} has no language-model head, so it gives no logits; pass return_type=None")


def holds_integers(value: Any) -> bool:
    floating = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return isinstance(value, Tensor) and not floating and value.dtype != torch.bool


def kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
