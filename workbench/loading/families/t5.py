"""T5 (Raffel et al. 2020) and T5 1.1 / Flan-T5: an encoder–decoder with relative positions and RMSNorm, without biases.

Queries and keys are multiplied without a scale. T5 1.1 gates its MLPs and has an unembedding of its own. There is no
dropout: the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import ActivationName, TransformerConfig
from workbench.loading.families.common import ACTIVATIONS, ANY, ConfigAttributes, Family, Harmless
from workbench.loading.weights import WeightRule, keep, split_input_heads_of_linear, split_output_heads, transpose

_HARMLESS: Harmless = {
    "is_encoder_decoder": (True,),
    "is_decoder": (False,),
    "output_past": ANY,  # an old name of use_cache
    **dict.fromkeys(("dropout_rate", "classifier_dropout"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face T5.

    Relative positions need no table as long as the text, so ``n_ctx`` may be anything.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    n_encoder_layers = attributes.take_size("num_layers")
    d_model = attributes.take_size("d_model")
    act_fn, gated = _feed_forward(attributes)
    # Its original form scales what it unembeds, as the unembedding is the embedding. transformers 5 says so by an
    # attribute of its own and calls every T5 tied, so whether it is shows in the tensors.
    tied = attributes.take_switch("tie_word_embeddings", True)
    scaled = attributes.take_switch("scale_decoder_outputs", tied)
    trained_context = attributes.take_size("n_positions", None) or 512
    config = TransformerConfig(
        n_layers=attributes.take_size("num_decoder_layers", None) or n_encoder_layers,
        n_encoder_layers=n_encoder_layers,
        d_model=d_model,
        n_heads=attributes.take_size("num_heads"),
        d_head=attributes.take_size("d_kv"),
        d_mlp=attributes.take_size("d_ff"),
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=n_ctx or trained_context,
        act_fn=act_fn,
        gated_mlp=gated,
        normalization_type="RMS",
        eps=attributes.take_number("layer_norm_epsilon", 1e-6),
        positional_embedding_type="relative",
        n_relative_buckets=attributes.take_size("relative_attention_num_buckets", 32),
        relative_max_distance=attributes.take_size("relative_attention_max_distance", 128),
        attn_scale=1.0,
        logit_scale=d_model**-0.5 if scaled else 1.0,
        tie_word_embeddings=tied,
        init_mode="t5",
        initializer_range=attributes.take_number("initializer_factor", 1.0),
        decoder_start_token_id=attributes.take_token("decoder_start_token_id", 0),
    )
    attributes.finish(_HARMLESS)
    return config


def _feed_forward(attributes: ConfigAttributes) -> tuple[ActivationName, bool]:
    """The activation of ``feed_forward_proj`` ("relu", "gated-gelu", …), and whether it gates."""
    name = attributes.take("feed_forward_proj", "relu")
    gated = isinstance(name, str) and name.startswith("gated-")
    activation = "gelu_new" if name == "gated-gelu" else str(name).removeprefix("gated-")
    if not isinstance(name, str) or activation not in ACTIVATIONS:
        raise attributes.refusal("feed_forward_proj", name, f"supported are {', '.join(ACTIVATIONS)}, each also gated-")
    for repeated, expected in (("dense_act_fn", activation), ("is_gated_act", gated)):
        if (value := attributes.take(repeated, expected)) != expected:
            raise attributes.refusal(repeated, value, f"it contradicts feed_forward_proj = {name!r}")
    return ACTIVATIONS[activation], gated


def _attention(source: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{source}.q.weight", f"{target}.W_Q", split_output_heads),
        WeightRule(f"{source}.k.weight", f"{target}.W_K", split_output_heads),
        WeightRule(f"{source}.v.weight", f"{target}.W_V", split_output_heads),
        WeightRule(f"{source}.o.weight", f"{target}.W_O", split_input_heads_of_linear),
    )


def _feed_forward_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{source}.wi.weight", f"{target}.W_in", transpose),
        WeightRule(f"{source}.wi_0.weight", f"{target}.W_gate", transpose),
        WeightRule(f"{source}.wi_1.weight", f"{target}.W_in", transpose),
        WeightRule(f"{source}.wo.weight", f"{target}.W_out", transpose),
    )


_ENCODER, _DECODER = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"
_RELATIVE = "layer.0.SelfAttention.relative_attention_bias.weight"

# Hugging Face keeps matrices as [out, in]; ours are [in, out]. The first layer of a stack holds its relative positions.
WEIGHT_RULES = (
    WeightRule("shared.weight", "embed.W_E", keep),
    WeightRule(f"encoder.block.0.{_RELATIVE}", "encoder_relative_bias.W_rel", keep),
    WeightRule(f"{_ENCODER}.0.layer_norm.weight", "encoder_blocks.{layer}.ln1.w", keep),
    *_attention(f"{_ENCODER}.0.SelfAttention", "encoder_blocks.{layer}.attn"),
    WeightRule(f"{_ENCODER}.1.layer_norm.weight", "encoder_blocks.{layer}.ln2.w", keep),
    *_feed_forward_rules(f"{_ENCODER}.1.DenseReluDense", "encoder_blocks.{layer}.mlp"),
    WeightRule("encoder.final_layer_norm.weight", "encoder_ln_final.w", keep),
    WeightRule(f"decoder.block.0.{_RELATIVE}", "relative_bias.W_rel", keep),
    WeightRule(f"{_DECODER}.0.layer_norm.weight", "blocks.{layer}.ln1.w", keep),
    *_attention(f"{_DECODER}.0.SelfAttention", "blocks.{layer}.attn"),
    WeightRule(f"{_DECODER}.1.layer_norm.weight", "blocks.{layer}.ln_cross.w", keep),
    *_attention(f"{_DECODER}.1.EncDecAttention", "blocks.{layer}.cross_attn"),
    WeightRule(f"{_DECODER}.2.layer_norm.weight", "blocks.{layer}.ln2.w", keep),
    *_feed_forward_rules(f"{_DECODER}.2.DenseReluDense", "blocks.{layer}.mlp"),
    WeightRule("decoder.final_layer_norm.weight", "ln_final.w", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"t5": ("T5ForConditionalGeneration", "T5WithLMHeadModel")},
    base_models={"t5": "T5Model"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="",
    tied=("lm_head.weight", "shared.weight"),
    unties=True,
    copies=dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"),
    # of old checkpoints: relative positions between decoder and encoder, which nothing reads
    harmless_tensors=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
