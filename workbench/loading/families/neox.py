"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention beside the MLP, partly rotary positions.

The dropout of the training is left out, as the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless
from workbench.loading.families.rotary import take_rotary
from workbench.loading.weights import (
    WeightRule,
    keep,
    split_grouped_heads,
    split_grouped_heads_bias,
    split_input_heads_of_linear,
    transpose,
)

_HARMLESS: Harmless = dict.fromkeys(
    (
        "attention_dropout",
        "hidden_dropout",
        "classifier_dropout",
        "attention_probs_dropout_prob",
        "hidden_dropout_prob",
    ),
    ANY,
)


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face GPT-NeoX; ``n_ctx`` may exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("hidden_size")
    n_heads = attributes.take_size("num_attention_heads")
    d_head = attributes.head_width(d_model, "num_attention_heads", n_heads)
    trained_context = attributes.take_size("max_position_embeddings", 2048)
    use_attention_bias = attributes.take_switch("attention_bias", True)
    config = TransformerConfig(
        n_layers=attributes.take_size("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_head,
        d_mlp=attributes.take_size("intermediate_size"),
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=n_ctx or trained_context,
        act_fn=attributes.take_activation("hidden_act", "gelu"),
        eps=attributes.take_number("layer_norm_eps", 1e-5),
        parallel_attn_mlp=attributes.take_switch("use_parallel_residual", True),
        **take_rotary(
            attributes,
            d_head,
            trained_context,
            partial=True,
            default_share=0.25,
            older_names={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
        ),
        use_qkv_bias=use_attention_bias,
        use_attn_out_bias=use_attention_bias,
        use_mlp_bias=True,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", False),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    attributes.finish(_HARMLESS)
    return config


_LAYER = "layers.{layer}"
_BLOCK = "blocks.{layer}"
_QKV = tuple(f"{_BLOCK}.attn.W_{name}" for name in "QKV")
_QKV_BIAS = tuple(f"{_BLOCK}.attn.b_{name}" for name in "QKV")

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("embed_in.weight", "embed.W_E", keep),
    WeightRule(f"{_LAYER}.input_layernorm.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.input_layernorm.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.attention.query_key_value.weight", _QKV, split_grouped_heads),
    WeightRule(f"{_LAYER}.attention.query_key_value.bias", _QKV_BIAS, split_grouped_heads_bias),
    WeightRule(f"{_LAYER}.attention.dense.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.attention.dense.bias", f"{_BLOCK}.attn.b_O", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.bias", f"{_BLOCK}.ln2.b", keep),
    WeightRule(f"{_LAYER}.mlp.dense_h_to_4h.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.mlp.dense_h_to_4h.bias", f"{_BLOCK}.mlp.b_in", keep),
    WeightRule(f"{_LAYER}.mlp.dense_4h_to_h.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{_LAYER}.mlp.dense_4h_to_h.bias", f"{_BLOCK}.mlp.b_out", keep),
    WeightRule("final_layer_norm.weight", "ln_final.w", keep),
    WeightRule("final_layer_norm.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
    WeightRule("embed_out.weight", "unembed.W_U", transpose),  # its name on disk
)

FAMILY = Family(
    architectures={"gpt_neox": "GPTNeoXForCausalLM"},
    base_models={"gpt_neox": "GPTNeoXModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="gpt_neox.",
    harmless_tensors=(  # masks and frequencies of old checkpoints
        f"{_LAYER}.attention.bias",
        f"{_LAYER}.attention.masked_bias",
        f"{_LAYER}.attention.rotary_emb.inv_freq",
    ),
    tied=("lm_head.weight", "embed_in.weight"),
)
