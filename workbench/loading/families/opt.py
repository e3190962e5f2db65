"""OPT (Zhang et al. 2022): GPT-2's blocks with ReLU; its table of positions begins with two rows for pads.

The dropout of the training is left out, as the published weights are evaluated. OPT-350M differs: its norms come after
the sublayers, and its embeddings are narrower than the model, which is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless, learned_context
from workbench.loading.weights import (
    WeightRule,
    keep,
    positions_after,
    split_heads_bias,
    split_input_heads_of_linear,
    split_output_heads,
    transpose,
)

_HARMLESS: Harmless = {
    "_remove_final_layer_norm": (False,),
    "layer_norm_elementwise_affine": (True,),
    "output_projection": ANY,  # what transformers does not read either
    **dict.fromkeys(("attention_dropout", "dropout", "activation_dropout", "layerdrop"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face OPT.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
        ValueError: ``n_ctx`` exceeds the learned positions.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("hidden_size")
    n_heads = attributes.take_size("num_attention_heads")
    d_embed = attributes.take_size("word_embed_proj_dim", None)
    if d_embed not in (None, d_model):
        raise attributes.refusal("word_embed_proj_dim", d_embed, f"embeddings must have hidden_size = {d_model}")
    use_bias = attributes.take_switch("enable_bias", True)
    config = TransformerConfig(
        n_layers=attributes.take_size("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        d_head=attributes.head_width(d_model, "num_attention_heads", n_heads),
        d_mlp=attributes.take_size("ffn_dim"),
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=learned_context(n_ctx, attributes.take_size("max_position_embeddings", 2048)),
        act_fn=attributes.take_activation("activation_function", "relu"),
        eps=1e-5,
        norm_placement="pre" if attributes.take_switch("do_layer_norm_before", True) else "post",
        use_qkv_bias=use_bias,
        use_attn_out_bias=use_bias,
        use_mlp_bias=use_bias,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
        init_mode="normal",
        initializer_range=attributes.take_number("init_std", 0.02),
    )
    attributes.finish(_HARMLESS)
    return config


_LAYER = "decoder.layers.{layer}"
_BLOCK = "blocks.{layer}"

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("decoder.embed_tokens.weight", "embed.W_E", keep),
    WeightRule("decoder.embed_positions.weight", "pos_embed.W_pos", positions_after(2)),
    WeightRule(f"{_LAYER}.self_attn_layer_norm.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.self_attn_layer_norm.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.self_attn.q_proj.weight", f"{_BLOCK}.attn.W_Q", split_output_heads),
    WeightRule(f"{_LAYER}.self_attn.k_proj.weight", f"{_BLOCK}.attn.W_K", split_output_heads),
    WeightRule(f"{_LAYER}.self_attn.v_proj.weight", f"{_BLOCK}.attn.W_V", split_output_heads),
    WeightRule(f"{_LAYER}.self_attn.q_proj.bias", f"{_BLOCK}.attn.b_Q", split_heads_bias),
    WeightRule(f"{_LAYER}.self_attn.k_proj.bias", f"{_BLOCK}.attn.b_K", split_heads_bias),
    WeightRule(f"{_LAYER}.self_attn.v_proj.bias", f"{_BLOCK}.attn.b_V", split_heads_bias),
    WeightRule(f"{_LAYER}.self_attn.out_proj.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.self_attn.out_proj.bias", f"{_BLOCK}.attn.b_O", keep),
    WeightRule(f"{_LAYER}.final_layer_norm.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.final_layer_norm.bias", f"{_BLOCK}.ln2.b", keep),
    WeightRule(f"{_LAYER}.fc1.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.fc1.bias", f"{_BLOCK}.mlp.b_in", keep),
    WeightRule(f"{_LAYER}.fc2.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{_LAYER}.fc2.bias", f"{_BLOCK}.mlp.b_out", keep),
    WeightRule("decoder.final_layer_norm.weight", "ln_final.w", keep),
    WeightRule("decoder.final_layer_norm.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"opt": "OPTForCausalLM"},
    base_models={"opt": "OPTModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="model.",
    tied=("lm_head.weight", "decoder.embed_tokens.weight"),
)
