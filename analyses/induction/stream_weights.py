"""Weights of heads as the residual stream meets them: the gains of norms folded in, d_head columns at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.analyses.support import check_model, emits_statistics


@dataclass(frozen=True, eq=False)
class StreamWeights:
    """The heads of a layer; W_Q, W_K, W_V [n_heads, d_model, d_head], W_O [n_heads, d_head, d_model].

    W_Q, W_K and W_V read the stream divided by its scale, W_O writes to the stream, but for the scale of a norm on the
    output. A query head has the W_K and W_V of its group. What a LayerNorm centres, they read and write centred.
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor

    @classmethod
    def of(cls, model: Any, layer: int) -> StreamWeights:
        """In float32 at least."""
        block = model.blocks[layer]
        read = {name: _wide(getattr(block.attn, name)) for name in ("W_Q", "W_K", "W_V")}
        if hasattr(block, "ln1"):  # a norm on the output alone leaves the stream to be read as it is
            read = {name: folded(weight.mT, block.ln1).mT for name, weight in read.items()}
        group = model.cfg.n_heads // model.cfg.n_key_value_heads
        W_O = _wide(block.attn.W_O)
        if hasattr(block, "ln1_post"):
            W_O = centred(W_O, block.ln1_post) * _wide(block.ln1_post.gain)
        W_K, W_V = (read[name].repeat_interleave(group, dim=0) for name in ("W_K", "W_V"))
        return cls(read["W_Q"], W_K, W_V, W_O)


def folded(directions: Tensor, norm: Any) -> Tensor:
    """Directions [..., d_model] that read a normalised stream, as they read the stream divided by the norm's scale."""
    return centred(directions * _wide(norm.gain), norm)


def centred(directions: Tensor, norm: Any) -> Tensor:
    """Directions [..., d_model] without their mean where the norm takes the stream's mean away."""
    return directions - directions.mean(dim=-1, keepdim=True) if norm.centred else directions


def check_one_stream(model: Any, analysis: str) -> None:
    """Refuses models whose heads do not meet in one stream through weights alone.

    Raises:
        ValueError: what the model is.
    """
    check_model(model)
    if not emits_statistics(model):
        raise ValueError(f"{analysis} reads weights under our names, so it needs a HookedTransformer; load it with "
                         "HookedTransformer.from_pretrained")  # fmt: skip
    if model.cfg.norm_placement == "post":
        raise ValueError(
            f"{model.cfg.model_name} normalises the stream itself in every layer, so what a head writes does not reach "
            "later layers or the logits by weights alone"
        )


def _wide(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()
