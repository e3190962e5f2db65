"""BLOOM (BigScience Workshop 2022): ALiBi instead of positions, and a norm on the embeddings.

The dropout of the training is left out, as the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless
from workbench.loading.weights import (
    WeightRule,
    keep,
    split_grouped_heads,
    split_grouped_heads_bias,
    split_input_heads_of_linear,
    transpose,
)

_HARMLESS: Harmless = {
    "apply_residual_connection_post_layernorm": (False,),
    # slices of the same products, and how the training computed them
    **dict.fromkeys(("pretraining_tp", "slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion"), ANY),
    **dict.fromkeys(("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi"), ANY),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "unk_token_id"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face BLOOM; ALiBi lets ``n_ctx`` exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size_called("hidden_size", "n_embed")
    n_heads = attributes.take_size_called("n_head", "num_attention_heads")
    if (d_mlp := attributes.take_size("n_inner", None)) not in (None, 4 * d_model):
        raise attributes.refusal("n_inner", d_mlp, f"it must be four times hidden_size = {d_model}")
    trained_context = attributes.take_size("seq_length", 2048)
    config = TransformerConfig(
        n_layers=attributes.take_size_called("n_layer", "num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        d_head=attributes.head_width(d_model, "n_head", n_heads),
        d_mlp=4 * d_model,
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=n_ctx or trained_context,
        act_fn="gelu_tanh",
        eps=attributes.take_number("layer_norm_epsilon", 1e-5),
        use_embed_norm=True,
        positional_embedding_type="alibi",
        use_qkv_bias=True,
        use_attn_out_bias=True,
        use_mlp_bias=True,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    attributes.finish(_HARMLESS)
    return config


_LAYER = "h.{layer}"
_BLOCK = "blocks.{layer}"
_QKV = tuple(f"{_BLOCK}.attn.W_{name}" for name in "QKV")
_QKV_BIAS = tuple(f"{_BLOCK}.attn.b_{name}" for name in "QKV")

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("word_embeddings.weight", "embed.W_E", keep),
    WeightRule("word_embeddings_layernorm.weight", "ln_embed.w", keep),
    WeightRule("word_embeddings_layernorm.bias", "ln_embed.b", keep),
    WeightRule(f"{_LAYER}.input_layernorm.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.input_layernorm.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.self_attention.query_key_value.weight", _QKV, split_grouped_heads),
    WeightRule(f"{_LAYER}.self_attention.query_key_value.bias", _QKV_BIAS, split_grouped_heads_bias),
    WeightRule(f"{_LAYER}.self_attention.dense.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.self_attention.dense.bias", f"{_BLOCK}.attn.b_O", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.bias", f"{_BLOCK}.ln2.b", keep),
    WeightRule(f"{_LAYER}.mlp.dense_h_to_4h.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.mlp.dense_h_to_4h.bias", f"{_BLOCK}.mlp.b_in", keep),
    WeightRule(f"{_LAYER}.mlp.dense_4h_to_h.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{_LAYER}.mlp.dense_4h_to_h.bias", f"{_BLOCK}.mlp.b_out", keep),
    WeightRule("ln_f.weight", "ln_final.w", keep),
    WeightRule("ln_f.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"bloom": "BloomForCausalLM"},
    base_models={"bloom": "BloomModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="transformer.",
    tied=("lm_head.weight", "word_embeddings.weight"),
)
