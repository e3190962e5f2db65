"""The same function from weights that are easier to read: norms folded into what reads them, a centred unembedding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from workbench.components.block import Block
from workbench.config import TransformerConfig
from workbench.transformer import HookedTransformer

Model = TypeVar("Model", bound=HookedTransformer)
State = dict[str, Tensor]


def fold_layer_norm(model: Model) -> Model:
    """A new model that gives the same logits, whose norms only normalise: gain 1, bias 0.

    Gain and bias g, b of each norm go into the weights that read it: (x̂ · g + b) W + c = x̂ (g ⊙ W) + (c + b W). As a
    LayerNorm's x̂ sums to zero over d_model, what it reads of each column of g ⊙ W is the part without its mean, which
    alone is kept. Folded are ln1 (into W_Q, W_K, W_V), ln2 (W_in, W_gate, W_router; with ``shared_parallel_norm`` it is
    ln1's work), ln_final (W_U), and where there is an encoder ln_cross (the cross-attention's W_Q) and encoder_ln_final
    (its W_K and W_V in every layer). Norms that write to the stream keep their weights: ln_embed, those on a
    sublayer's output in "sandwich" placement, and ln_final of a model without a head; q_norm and k_norm do, too.

    The configuration gains the biases that take up those of norms (other biases that their switches bring are zero).
    A tied model comes back untied, as only its unembedding is folded. Activation statistics, patterns and the residual
    stream are those of ``model``, which is left as it is; hooks are not carried over.

    Raises:
        ValueError: a model whose norms are read by the stream itself: norm_placement "post" or "output".
    """
    cfg = _config_of(model)
    if cfg.norm_placement in ("post", "output"):
        raise ValueError(
            f"fold_layer_norm needs norms that only weights read, but with norm_placement={cfg.norm_placement!r} the "
            "residual stream reads them, too; such a model cannot be folded"
        )
    state, cfg = _copy(model, untied=cfg.use_unembed)
    if any(bool(state[f"{norm}.b"].any()) for norm, _ in _readers(model) if f"{norm}.b" in state):
        cfg = _with_biases(cfg)
    processed = _build(model, cfg, state, "norms folded")
    weights = dict(processed.named_parameters())
    for norm, readers in _readers(model):
        _fold(weights, norm, readers, cfg)
    return processed


def center_unembed(model: Model) -> Model:
    """A new model with the same log-probabilities, whose logits have mean 0 over the vocabulary.

    The mean over the vocabulary is taken off each row of W_U, and off b_U; softmax does not notice a number that all
    logits share. A tied model comes back untied. ``model`` is left as it is; hooks are not carried over.

    Raises:
        ValueError: a model without an unembedding, or with output_logits_soft_cap, to which the shared number matters.
    """
    cfg = _config_of(model)
    if not cfg.use_unembed:
        raise ValueError("center_unembed needs an unembedding, but this model has none (use_unembed=False)")
    if cfg.output_logits_soft_cap is not None:
        raise ValueError(
            "center_unembed would change this model's probabilities: its output_logits_soft_cap bends the logits "
            "after the shared number is taken off; leave the unembedding as it is"
        )
    state, cfg = _copy(model, untied=True)
    for name in ("unembed.W_U", "unembed.b_U"):  # [d_model, d_vocab], [d_vocab]
        if name in state:
            wide = _wide(state[name])
            state[name] = (wide - wide.mean(-1, keepdim=True)).to(cfg.dtype)
    return _build(model, cfg, state, "unembedding centred")


def _config_of(model: Any) -> TransformerConfig:
    if not isinstance(model, HookedTransformer):
        raise ValueError(f"model must be a HookedTransformer, got {type(model).__name__}")
    return model.cfg


def _copy(model: HookedTransformer, *, untied: bool) -> tuple[State, TransformerConfig]:
    """Copies of a model's weights, and its configuration; on request with an unembedding of its own."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    cfg = model.cfg
    if untied and cfg.tie_word_embeddings:
        state["unembed.W_U"] = model.W_U.detach().clone()
        cfg = dataclasses.replace(cfg, tie_word_embeddings=False)
    return state, cfg


def _with_biases(cfg: TransformerConfig) -> TransformerConfig:
    moe = None if cfg.moe is None else dataclasses.replace(cfg.moe, use_router_bias=True)
    return dataclasses.replace(cfg, moe=moe, use_qkv_bias=True, use_mlp_bias=True, use_unembed_bias=cfg.use_unembed)


def _build(model: Model, cfg: TransformerConfig, state: State, what: str) -> Model:
    """A model of ``model``'s kind with these weights, and zeros for biases that they lack."""
    cfg = dataclasses.replace(cfg, weights_description=f"{what}, {cfg.weights_description}")
    with torch.device("meta"):  # the weights become the parameters, so it needs no memory of its own
        processed = type(model)(dataclasses.replace(cfg, device=torch.device("meta")), model.tokenizer)
    zeros = {
        name: torch.zeros(parameter.shape, device=cfg.device, dtype=cfg.dtype)
        for name, parameter in processed.named_parameters()
        if name not in state
    }
    processed.load_state_dict({**zeros, **state}, assign=True)
    processed.statistics_request = model.statistics_request
    return processed.to(cfg.device).train(model.training)


# The matrices that read a norm, [..., d_model, out], under the biases that they add to, [..., out].
_ATTENTION = {"W_Q": "b_Q", "W_K": "b_K", "W_V": "b_V"}
_MLP = {"W_in": "b_in", "W_gate": "b_gate", "W_router": "b_router"}


def _readers(model: HookedTransformer) -> Iterator[tuple[str, dict[str, str]]]:
    """Each norm that only weights read -> the names of these and of their biases."""
    cfg = model.cfg
    of_encoder: dict[str, str] = {}
    for name, block in model.named_modules():
        if not isinstance(block, Block):
            continue
        attention, mlp = _under(f"{name}.attn", _ATTENTION), _under(f"{name}.mlp", _MLP)
        if cfg.shared_parallel_norm:
            yield f"{name}.ln1", attention | mlp
        else:
            yield f"{name}.ln1", attention
            yield f"{name}.ln2", mlp
        if block.reads_encoder:
            yield f"{name}.ln_cross", _under(f"{name}.cross_attn", {"W_Q": "b_Q"})
            of_encoder |= _under(f"{name}.cross_attn", {"W_K": "b_K", "W_V": "b_V"})
    if of_encoder:
        yield "encoder_ln_final", of_encoder
    unembedding = _under("unembed", {"W_U": "b_U"})
    if cfg.use_unembed and cfg.use_mlm_head:
        yield "ln_final", _under("mlm_head", {"W": "b"})
        yield "mlm_head.ln", unembedding
    elif cfg.use_unembed:
        yield "ln_final", unembedding


def _under(module: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{module}.{weight}": f"{module}.{bias}" for weight, bias in names.items()}


@torch.no_grad()
def _fold(weights: dict[str, Any], norm: str, readers: dict[str, str], cfg: TransformerConfig) -> None:
    """Moves a norm's gain and bias into the weights that read it, in place."""
    gain, shift = weights[f"{norm}.w"], weights.get(f"{norm}.b")
    wide_gain = _wide(gain) + (1 if cfg.norm_gain_plus_one else 0)
    for name, bias in readers.items():
        if name not in weights:  # W_gate and W_router are not everywhere
            continue
        wide = _wide(weights[name])
        if shift is not None and bias in weights:
            scale = cfg.logit_scale if name == "unembed.W_U" else 1
            weights[bias].add_(scale * (_wide(shift) @ wide))
        wide = wide * wide_gain[:, None]
        weights[name].copy_(wide - wide.mean(-2, keepdim=True) if cfg.normalization_type == "LN" else wide)
    gain.fill_(0 if cfg.norm_gain_plus_one else 1)
    if shift is not None:
        shift.zero_()


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least, so that half-precision weights are rounded once."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
