"""MarianMT: the original Transformer (Vaswani et al. 2017) as an encoder–decoder for translation.

Norms come after each sublayer, positions are sinusoids, one embedding serves encoder, decoder and head. There is no
dropout: the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.components.positions import sinusoidal_table
from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless
from workbench.loading.weights import (
    WeightRule,
    keep,
    split_heads_bias,
    split_input_heads_of_linear,
    split_output_heads,
    transpose,
)

_HARMLESS: Harmless = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "share_encoder_decoder_embeddings": (True,),
    "tie_word_embeddings": (True,),
    "static_position_embeddings": (True,),
    **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm", "add_bias_logits"), (False,)),
    "extra_pos_embeddings": ANY,  # of another model's learned positions
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), ANY),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), ANY),  # in training only
    **dict.fromkeys(("classif_dropout", "classifier_dropout"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Marian.

    Sinusoids reach beyond the context of the training, so ``n_ctx`` may exceed it.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("d_model")
    d_vocab = attributes.take_size("vocab_size")
    n_encoder_layers = attributes.take_size("encoder_layers")
    n_heads = attributes.take_size("encoder_attention_heads")
    d_mlp = attributes.take_size("encoder_ffn_dim")
    trained_context = attributes.take_size("max_position_embeddings")
    for name, encoder_name, size in (
        ("num_hidden_layers", "encoder_layers", n_encoder_layers),
        ("decoder_attention_heads", "encoder_attention_heads", n_heads),
        ("decoder_ffn_dim", "encoder_ffn_dim", d_mlp),
        ("decoder_vocab_size", "vocab_size", d_vocab),
    ):
        if (other := attributes.take_size(name, None) or size) != size:
            raise attributes.refusal(name, other, f"it must equal {encoder_name} = {size}")
    config = TransformerConfig(
        n_layers=attributes.take_size("decoder_layers"),
        n_encoder_layers=n_encoder_layers,
        d_model=d_model,
        n_heads=n_heads,
        d_head=attributes.head_width(d_model, "encoder_attention_heads", n_heads),
        d_mlp=d_mlp,
        d_vocab=d_vocab,
        n_ctx=n_ctx or trained_context,
        act_fn=attributes.take_activation("activation_function", "gelu"),
        normalization_type="LN",
        norm_placement="post",
        embed_scale=d_model**0.5 if attributes.take_switch("scale_embedding", False) else 1.0,
        positional_embedding_type="sinusoidal",
        sinusoidal_halves=True,
        use_qkv_bias=True,
        use_attn_out_bias=True,
        use_mlp_bias=True,
        use_unembed_bias=True,
        tie_word_embeddings=True,
        init_mode="normal",
        initializer_range=attributes.take_number("init_std", 0.02),
        decoder_start_token_id=attributes.take_token("decoder_start_token_id", d_vocab - 1),
    )
    attributes.finish(_HARMLESS)
    return config


def _one_row(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[1, d_vocab] → [d_vocab]"""
    return tensor.squeeze(0)


def _attention(source: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{source}.q_proj.weight", f"{target}.W_Q", split_output_heads),
        WeightRule(f"{source}.q_proj.bias", f"{target}.b_Q", split_heads_bias),
        WeightRule(f"{source}.k_proj.weight", f"{target}.W_K", split_output_heads),
        WeightRule(f"{source}.k_proj.bias", f"{target}.b_K", split_heads_bias),
        WeightRule(f"{source}.v_proj.weight", f"{target}.W_V", split_output_heads),
        WeightRule(f"{source}.v_proj.bias", f"{target}.b_V", split_heads_bias),
        WeightRule(f"{source}.out_proj.weight", f"{target}.W_O", split_input_heads_of_linear),
        WeightRule(f"{source}.out_proj.bias", f"{target}.b_O", keep),
    )


def _norm(source: str, target: str) -> tuple[WeightRule, ...]:
    return WeightRule(f"{source}.weight", f"{target}.w", keep), WeightRule(f"{source}.bias", f"{target}.b", keep)


def _layer(source: str, target: str) -> tuple[WeightRule, ...]:
    """What layers of the encoder and of the decoder have in common."""
    return (
        *_attention(f"{source}.self_attn", f"{target}.attn"),
        *_norm(f"{source}.self_attn_layer_norm", f"{target}.ln1"),
        WeightRule(f"{source}.fc1.weight", f"{target}.mlp.W_in", transpose),
        WeightRule(f"{source}.fc1.bias", f"{target}.mlp.b_in", keep),
        WeightRule(f"{source}.fc2.weight", f"{target}.mlp.W_out", transpose),
        WeightRule(f"{source}.fc2.bias", f"{target}.mlp.b_out", keep),
        *_norm(f"{source}.final_layer_norm", f"{target}.ln2"),
    )


# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("shared.weight", "embed.W_E", keep),
    *_layer("encoder.layers.{layer}", "encoder_blocks.{layer}"),
    *_layer("decoder.layers.{layer}", "blocks.{layer}"),
    *_attention("decoder.layers.{layer}.encoder_attn", "blocks.{layer}.cross_attn"),
    *_norm("decoder.layers.{layer}.encoder_attn_layer_norm", "blocks.{layer}.ln_cross"),
    WeightRule("final_logits_bias", "unembed.b_U", _one_row),
)


def _sinusoids(shape: torch.Size) -> Tensor:
    return sinusoidal_table(shape[0], shape[1], halves=True)


FAMILY = Family(
    architectures={"marian": "MarianMTModel"},
    base_models={"marian": "MarianModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="model.",
    tied=("lm_head.weight", "shared.weight"),
    copies=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"),
    computed=dict.fromkeys(("encoder.embed_positions.weight", "decoder.embed_positions.weight"), _sinusoids),
)
