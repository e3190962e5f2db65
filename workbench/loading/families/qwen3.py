"""Qwen3 (Yang et al. 2025): Llama with norms on each head's q and k before they rotate, and with Qwen's windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ConfigAttributes
from workbench.loading.families.llama import (
    HARMLESS,
    QK_NORM_RULES,
    WEIGHT_RULES,
    llama_like,
    take_attention_bias,
    take_llama_options,
    take_switched_windows,
)
from workbench.loading.families.rotary import take_rotary


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Qwen3.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = take_llama_options(attributes, n_ctx, default_head=128)
    options |= take_rotary(attributes, options["d_head"], hf_config["max_position_embeddings"])
    options |= take_attention_bias(attributes)
    options |= take_switched_windows(attributes, options["n_layers"])
    attributes.finish(HARMLESS)
    return TransformerConfig(**options, qk_norm="per_head")


FAMILY = llama_like({"qwen3": "Qwen3ForCausalLM"}, map_config, WEIGHT_RULES + QK_NORM_RULES)
