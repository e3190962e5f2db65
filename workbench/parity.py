"""How far a model's numbers are from those of the transformers model that it was converted from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.transformer import HookedTransformer


@dataclass(frozen=True, kw_only=True)
class ParityErrors:
    """Largest differences, each as a share of the largest magnitude in the tensor that it was found in.

    Attributes:
        logits: 0 for models without a head.
        residual: the worst of all residual streams: what enters each layer, and what the last one hands on (after the
            final norm, where there is one).
        pattern: the worst of all attention patterns, the encoder's and the cross-attention's included.
    """

    logits: float
    residual: float
    pattern: float

    @property
    def largest(self) -> float:
        """The worst of them; NaN where anything was."""
        return float(torch.tensor([self.logits, self.residual, self.pattern]).max())


@torch.no_grad()
def measure_parity(
    model: HookedTransformer,
    hf_model: nn.Module,
    tokens: Tensor,
    attention_mask: Tensor | None = None,
    *,
    decoder_tokens: Tensor | None = None,
    hf_arguments: Mapping[str, Any] | None = None,
    **forward_arguments: Any,
) -> ParityErrors:
    """Runs both models and compares logits, every layer's residual stream and every attention pattern.

    Only real tokens are compared: what a model computes at a pad is nobody's business. Where there are pads, the
    transformers model is given positions that count real tokens, as ours do; ``hf_arguments`` may replace them
    (``{"position_ids": None}`` leaves them to a model that knows about pads, such as RoBERTa). One that counts from the
    first column whatever it is told, as Marian does, is given its pads on the right.

    Args:
        hf_model: in eval mode, with ``attn_implementation="eager"``, on the model's device.
        tokens: [batch, pos]; of an encoder–decoder those of the encoder.
        attention_mask: [batch, pos], true or 1 for real tokens.
        decoder_tokens: [batch, decoder_pos], for encoder–decoders.
        hf_arguments: further arguments of the transformers model's call.
        **forward_arguments: further arguments of our model's call.

    Raises:
        ValueError: the transformers model gives no patterns.
    """
    real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    passed, their_real = _their_inputs(model, hf_model, tokens, real)
    if decoder_tokens is not None:
        passed["decoder_input_ids"] = decoder_tokens
        forward_arguments["decoder_input"] = decoder_tokens
    theirs = hf_model(**passed | dict(hf_arguments or {}), output_hidden_states=True, output_attentions=True)
    patterns = theirs.attentions if decoder_tokens is None else theirs.decoder_attentions
    if len(patterns or ()) != model.cfg.n_layers:
        raise ValueError("the transformers model gives no attention patterns; set its attn_implementation to 'eager'")

    pairs = _hook_pairs(model, theirs, real, decoder_tokens)
    their_pairs = _hook_pairs(model, theirs, their_real, decoder_tokens)
    names = {name.removesuffix(_NORMALISED) for name, _, _ in pairs}
    return_type = "logits" if model.cfg.use_unembed else None
    logits, cache = model.run_with_cache(
        tokens, return_type, attention_mask=attention_mask, names_filter=names, **forward_arguments
    )
    errors: dict[str, list[Tensor]] = {"logits": [], "residual": [], "pattern": []}
    if return_type is not None:
        everything = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        keep, their_keep = (real, their_real) if decoder_tokens is None else (everything, everything)
        errors["logits"].append(_relative_error(logits, keep, theirs.logits, their_keep))
    for (name, expected, keep), (_, _, their_keep) in zip(pairs, their_pairs, strict=True):
        value = cache[name.removesuffix(_NORMALISED)]
        if name.endswith(_NORMALISED):
            value = (model.encoder_ln_final if name.startswith("encoder") else model.ln_final)(value)
        errors["pattern" if name.endswith("pattern") else "residual"].append(
            _relative_error(value, keep, expected, their_keep)
        )
    worst = {what: float(torch.stack(found).max()) if found else 0.0 for what, found in errors.items()}
    return ParityErrors(**worst)


def _their_inputs(
    model: HookedTransformer, hf_model: nn.Module, tokens: Tensor, real: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """The arguments of the transformers model's call, and which of its tokens are real: ours, perhaps moved."""
    if bool(real.all()):
        return {"input_ids": tokens}, real
    if "position_ids" in inspect.signature(hf_model.forward).parameters:
        positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)
        return {"input_ids": tokens, "attention_mask": real.long(), "position_ids": positions}, real
    if model.cfg.positional_embedding_type in ("learned", "sinusoidal"):
        order = (~real).long().argsort(dim=1, stable=True)
        tokens, real = tokens.gather(1, order), real.gather(1, order)
    return {"input_ids": tokens, "attention_mask": real.long()}, real


_NORMALISED = " after the final norm"


def _hook_pairs(
    model: HookedTransformer, theirs: Any, real: Tensor, decoder_tokens: Tensor | None
) -> list[tuple[str, Tensor, Tensor]]:
    """(our hook's name, their value, which of it to compare) for every residual stream and pattern."""

    def stack(blocks: str, states: Sequence[Tensor], patterns: Sequence[Tensor], real: Tensor) -> Iterator[tuple]:
        for layer, (state, pattern) in enumerate(zip(states[:-1], patterns, strict=True)):
            yield f"{blocks}.{layer}.hook_resid_pre", state, real
            yield f"{blocks}.{layer}.attn.hook_pattern", pattern, real[:, None, :, None] & real[:, None, None, :]
        end = _NORMALISED if model.cfg.has_final_norm else ""
        yield f"{blocks}.{len(patterns) - 1}.hook_resid_post{end}", states[-1], real

    if decoder_tokens is None:
        return list(stack("blocks", theirs.hidden_states, theirs.attentions, real))
    answered = torch.ones_like(decoder_tokens, dtype=torch.bool)
    return [
        *stack("encoder_blocks", theirs.encoder_hidden_states, theirs.encoder_attentions, real),
        *stack("blocks", theirs.decoder_hidden_states, theirs.decoder_attentions, answered),
        *(
            (f"blocks.{layer}.cross_attn.hook_pattern", pattern, answered[:, None, :, None] & real[:, None, None, :])
            for layer, pattern in enumerate(theirs.cross_attentions)
        ),
    ]


def _relative_error(ours: Tensor, keep: Tensor, theirs: Tensor, their_keep: Tensor) -> Tensor:
    if keep.dim() == 4:  # patterns: the same keys for all heads
        keep, their_keep = (mask.expand(-1, theirs.shape[1], -1, -1) for mask in (keep, their_keep))
    expected = theirs[their_keep].double()
    return (ours[keep].double() - expected).abs().max() / expected.abs().max()
