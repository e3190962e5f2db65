"""OLMo 2 (OLMo et al. 2024): norms on what sublayers give, not on what they read, and on all heads' q and k as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ConfigAttributes
from workbench.loading.families.llama import (
    ATTENTION_RULES,
    BLOCK,
    EMBEDDING_RULES,
    HARMLESS,
    LAYER,
    MLP_RULES,
    QK_NORM_RULES,
    llama_like,
    take_attention_bias,
    take_llama_options,
)
from workbench.loading.families.rotary import take_rotary
from workbench.loading.weights import WeightRule, keep


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face OLMo 2.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = take_llama_options(attributes, n_ctx, default_eps=1e-5)
    options |= take_rotary(attributes, options["d_head"], hf_config["max_position_embeddings"])
    options |= take_attention_bias(attributes)
    attributes.finish(HARMLESS)
    return TransformerConfig(**options, qk_norm="across_heads", norm_placement="output")


_NORM_RULES = (
    WeightRule(f"{LAYER}.post_attention_layernorm.weight", f"{BLOCK}.ln1_post.w", keep),
    WeightRule(f"{LAYER}.post_feedforward_layernorm.weight", f"{BLOCK}.ln2_post.w", keep),
)

FAMILY = llama_like(
    {"olmo2": "Olmo2ForCausalLM"},
    map_config,
    EMBEDDING_RULES + _NORM_RULES + ATTENTION_RULES + QK_NORM_RULES + MLP_RULES,
)
