"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, one matrix for q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless, learned_context
from workbench.loading.weights import (
    WeightRule,
    first_positions,
    keep,
    split_fused_heads,
    split_fused_heads_bias,
    split_input_heads,
    transpose,
)

_HARMLESS: Harmless = {
    "n_ctx": ANY,  # an old duplicate of n_positions
    "reorder_and_upcast_attn": ANY,  # the same product in another order and precision
    "scale_attn_by_inverse_layer_idx": (False,),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), ANY),  # no dropout in evaluation
    # of GPT2DoubleHeadsModel
    **dict.fromkeys(("summary_activation", "summary_first_dropout", "summary_proj_to_labels"), ANY),
    **dict.fromkeys(("summary_type", "summary_use_proj"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face GPT-2.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
        ValueError: ``n_ctx`` exceeds the learned positions.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("n_embd")
    n_heads = attributes.take_size("n_head")
    config = TransformerConfig(
        n_layers=attributes.take_size("n_layer"),
        d_model=d_model,
        n_heads=n_heads,
        d_head=attributes.head_width(d_model, "n_head", n_heads),
        d_mlp=attributes.take_size("n_inner", None) or 4 * d_model,
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=learned_context(n_ctx, attributes.take_size("n_positions")),
        act_fn=attributes.take_activation("activation_function", "gelu_new"),
        normalization_type="LN",
        eps=attributes.take_number("layer_norm_epsilon", 1e-5),
        positional_embedding_type="learned",
        attn_scale=None if attributes.take_switch("scale_attn_weights", True) else 1.0,
        use_qkv_bias=True,
        use_attn_out_bias=True,
        use_mlp_bias=True,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
    )
    attributes.finish(_HARMLESS)
    return config


# Hugging Face keeps GPT-2's matrices as [in, out], which is our orientation.
WEIGHT_RULES = (
    WeightRule("wte.weight", "embed.W_E", keep),
    WeightRule("wpe.weight", "pos_embed.W_pos", first_positions),
    WeightRule("h.{layer}.ln_1.weight", "blocks.{layer}.ln1.w", keep),
    WeightRule("h.{layer}.ln_1.bias", "blocks.{layer}.ln1.b", keep),
    WeightRule(
        "h.{layer}.attn.c_attn.weight",
        ("blocks.{layer}.attn.W_Q", "blocks.{layer}.attn.W_K", "blocks.{layer}.attn.W_V"),
        split_fused_heads,
    ),
    WeightRule(
        "h.{layer}.attn.c_attn.bias",
        ("blocks.{layer}.attn.b_Q", "blocks.{layer}.attn.b_K", "blocks.{layer}.attn.b_V"),
        split_fused_heads_bias,
    ),
    WeightRule("h.{layer}.attn.c_proj.weight", "blocks.{layer}.attn.W_O", split_input_heads),
    WeightRule("h.{layer}.attn.c_proj.bias", "blocks.{layer}.attn.b_O", keep),
    WeightRule("h.{layer}.ln_2.weight", "blocks.{layer}.ln2.w", keep),
    WeightRule("h.{layer}.ln_2.bias", "blocks.{layer}.ln2.b", keep),
    WeightRule("h.{layer}.mlp.c_fc.weight", "blocks.{layer}.mlp.W_in", keep),
    WeightRule("h.{layer}.mlp.c_fc.bias", "blocks.{layer}.mlp.b_in", keep),
    WeightRule("h.{layer}.mlp.c_proj.weight", "blocks.{layer}.mlp.W_out", keep),
    WeightRule("h.{layer}.mlp.c_proj.bias", "blocks.{layer}.mlp.b_out", keep),
    WeightRule("ln_f.weight", "ln_final.w", keep),
    WeightRule("ln_f.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"gpt2": "GPT2LMHeadModel"},
    base_models={"gpt2": "GPT2Model"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="transformer.",
    harmless_tensors=("h.{layer}.attn.bias", "h.{layer}.attn.masked_bias"),  # causal masks of old checkpoints
    tied=("lm_head.weight", "wte.weight"),
)
