"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, partial rotation, LongRoPE and a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Harmless
from workbench.loading.families.llama import (
    ATTENTION_RULES,
    BLOCK,
    EMBEDDING_RULES,
    HARMLESS,
    LAYER,
    MLP_RULES,
    PRE_NORM_RULES,
    llama_like,
    take_common_window,
    take_llama_options,
)
from workbench.loading.families.rotary import take_rotary
from workbench.loading.weights import WeightRule, split_output_heads

_CODE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}

_HARMLESS: Harmless = {
    **HARMLESS,
    **dict.fromkeys(("embd_pdrop", "resid_pdrop"), ANY),  # no dropout in evaluation
    # The code beside the published weights, which transformers has taken over.
    "auto_map": (_CODE, _CODE | {"AutoTokenizer": "Xenova/gpt-4o"}),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "lm_head_bias": (False,),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Phi-3.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = take_llama_options(attributes, n_ctx, default_eps=1e-5)
    options |= take_rotary(
        attributes,
        options["d_head"],
        hf_config["max_position_embeddings"],
        partial=True,
        aliases={"su": "longrope", "yarn": "longrope"},  # its names before LongRoPE was published
    )
    options |= take_common_window(attributes)
    attributes.finish(_HARMLESS)
    return TransformerConfig(**options)


def _split_qkv(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """Linear [(n_heads + 2 · n_key_value_heads) · d_head, d_model] → q, k and v, each [head, d_model, d_head]"""
    return split_output_heads(tensor, cfg).split((cfg.n_heads, cfg.n_key_value_heads, cfg.n_key_value_heads))


def _split_gate_up(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """Linear [2 · d_mlp, d_model] → gate and linear factor, each [d_model, d_mlp]"""
    return tensor.T.split(cfg.d_mlp, dim=1)


_FUSED_RULES = (
    WeightRule(
        f"{LAYER}.self_attn.qkv_proj.weight",
        (f"{BLOCK}.attn.W_Q", f"{BLOCK}.attn.W_K", f"{BLOCK}.attn.W_V"),
        _split_qkv,
    ),
    WeightRule(f"{LAYER}.mlp.gate_up_proj.weight", (f"{BLOCK}.mlp.W_gate", f"{BLOCK}.mlp.W_in"), _split_gate_up),
)
_OUTPUT_RULES = tuple(
    rule for rule in ATTENTION_RULES + MLP_RULES if rule.source.endswith(("o_proj.weight", "down_proj.weight"))
)

FAMILY = llama_like(
    {"phi3": "Phi3ForCausalLM"}, map_config, EMBEDDING_RULES + PRE_NORM_RULES + _FUSED_RULES + _OUTPUT_RULES
)
