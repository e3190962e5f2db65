"""Models that this workbench saved: configuration and weights under their own names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workbench.config import TransformerConfig
from workbench.errors import UnsupportedModelError
from workbench.loading.families.common import Family
from workbench.loading.weights import WeightRule, first_positions, keep

MODEL_TYPE = "attention_workbench"


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """The configuration as it was saved.

    Raises:
        UnsupportedModelError: a configuration of another version, or one that was damaged.
        ValueError: ``n_ctx`` exceeds learned positions.
    """
    fields = hf_config.get("transformer_config")
    if not isinstance(fields, Mapping):
        raise UnsupportedModelError("config.json has no transformer_config; save the model again")
    try:
        cfg = TransformerConfig.from_dict(dict(fields))
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(f"its transformer_config does not fit this version: {error}") from None
    if n_ctx is not None and n_ctx > cfg.n_ctx and cfg.positional_embedding_type == "learned":
        raise ValueError(f"n_ctx = {n_ctx} exceeds the {cfg.n_ctx} positions that this model has learned")
    return dataclasses.replace(cfg, n_ctx=n_ctx or cfg.n_ctx)


def _linear_order(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[…, in, out], laid out in memory as torch's linear layers lie, which the model multiplies by as it is."""
    return tensor.mT.contiguous().mT


def _output_heads(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[head, d_head, d_model], laid out as one linear layer from all heads."""
    return _linear_order(tensor.flatten(0, 1), cfg).unflatten(0, tensor.shape[:2])


_NORMS = [f"{norm}.{part}" for norm in ("ln1", "ln1_post", "ln2", "ln2_post", "ln_cross") for part in ("w", "b")]
_ATTENTION = {
    **dict.fromkeys(("W_Q", "W_K", "W_V"), _linear_order),
    "W_O": _output_heads,
    **dict.fromkeys(("b_Q", "b_K", "b_V", "b_O", "sink_logits"), keep),
    **dict.fromkeys(("q_norm.w", "q_norm.b", "k_norm.w", "k_norm.b"), keep),
}
_MLP = {
    **dict.fromkeys(("W_in", "W_gate", "W_out", "W_router"), _linear_order),
    **dict.fromkeys(("b_in", "b_gate", "b_out", "b_router"), keep),
}
_BLOCK = {
    **dict.fromkeys(_NORMS, keep),
    **{f"{module}.{name}": op for module in ("attn", "cross_attn") for name, op in _ATTENTION.items()},
    **{f"mlp.{name}": op for name, op in _MLP.items()},
}
_WHOLE = {
    **dict.fromkeys(("embed.W_E", "segment_embed.W_seg", "relative_bias.W_rel", "encoder_relative_bias.W_rel"), keep),
    "pos_embed.W_pos": first_positions,
    **{
        f"{norm}.{part}": keep
        for norm in ("ln_embed", "encoder_ln_embed", "ln_final", "encoder_ln_final", "mlm_head.ln")
        for part in ("w", "b")
    },
    **dict.fromkeys(("mlm_head.W", "unembed.W_U"), _linear_order),
    **dict.fromkeys(("mlm_head.b", "unembed.b_U"), keep),
}

FAMILY = Family(
    architectures={MODEL_TYPE: "HookedTransformer"},
    map_config=map_config,
    weight_rules=(
        *(WeightRule(name, name, op) for name, op in _WHOLE.items()),
        *(
            WeightRule(f"{stack}.{{layer}}.{name}", f"{stack}.{{layer}}.{name}", op)
            for stack in ("blocks", "encoder_blocks")
            for name, op in _BLOCK.items()
        ),
    ),
    base_prefix="",
    tied=("unembed.W_U", "embed.W_E"),
)
