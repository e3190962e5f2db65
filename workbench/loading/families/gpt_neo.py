"""GPT-Neo (Black et al. 2021): GPT-2 with a window in every second layer, and scores that are not scaled.

The dropout of the training is left out, as the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import AttentionType, TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless, learned_context
from workbench.loading.weights import (
    WeightRule,
    first_positions,
    keep,
    split_input_heads_of_linear,
    split_output_heads,
    transpose,
)

_HARMLESS: Harmless = {
    **dict.fromkeys(("attention_dropout", "embed_dropout", "resid_dropout", "classifier_dropout"), ANY),
    # of heads for classification
    **dict.fromkeys(("summary_activation", "summary_first_dropout", "summary_proj_to_labels"), ANY),
    **dict.fromkeys(("summary_type", "summary_use_proj"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face GPT-Neo.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
        ValueError: ``n_ctx`` exceeds the learned positions.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("hidden_size")
    n_heads = attributes.take_size("num_heads")
    n_layers = attributes.take_size("num_layers")
    config = TransformerConfig(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=n_heads,
        d_head=attributes.head_width(d_model, "num_heads", n_heads),
        d_mlp=attributes.take_size("intermediate_size", None) or 4 * d_model,
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=learned_context(n_ctx, attributes.take_size("max_position_embeddings", 2048)),
        act_fn=attributes.take_activation("activation_function", "gelu_new"),
        eps=attributes.take_number("layer_norm_epsilon", 1e-5),
        attn_scale=1.0,
        attn_types=_attention_types(attributes, n_layers),
        window_size=attributes.take_size("window_size", 256),
        use_attn_out_bias=True,
        use_mlp_bias=True,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    attributes.finish(_HARMLESS)
    return config


def _attention_types(attributes: ConfigAttributes, n_layers: int) -> tuple[AttentionType, ...]:
    """Of each layer, from ``attention_types`` = [[[type, …], repetitions], …] and their list ``attention_layers``."""
    groups = attributes.take("attention_types", [[["global", "local"], 12]])
    try:
        kinds = [kind for kinds, repetitions in groups for _ in range(repetitions) for kind in kinds]
    except (TypeError, ValueError):
        raise attributes.refusal("attention_types", groups, "expected lists of types and repetitions") from None
    expected = f"expected {n_layers} times 'global' or 'local'"
    if len(kinds) != n_layers or not set(kinds) <= {"global", "local"}:
        raise attributes.refusal("attention_types", groups, expected)
    if (layers := attributes.take("attention_layers", kinds)) != kinds:
        raise attributes.refusal("attention_layers", layers, "it contradicts attention_types")
    return tuple(kinds)


_LAYER = "h.{layer}"
_BLOCK = "blocks.{layer}"

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("wte.weight", "embed.W_E", keep),
    WeightRule("wpe.weight", "pos_embed.W_pos", first_positions),
    WeightRule(f"{_LAYER}.ln_1.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.ln_1.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.attn.attention.q_proj.weight", f"{_BLOCK}.attn.W_Q", split_output_heads),
    WeightRule(f"{_LAYER}.attn.attention.k_proj.weight", f"{_BLOCK}.attn.W_K", split_output_heads),
    WeightRule(f"{_LAYER}.attn.attention.v_proj.weight", f"{_BLOCK}.attn.W_V", split_output_heads),
    WeightRule(f"{_LAYER}.attn.attention.out_proj.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.attn.attention.out_proj.bias", f"{_BLOCK}.attn.b_O", keep),
    WeightRule(f"{_LAYER}.ln_2.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.ln_2.bias", f"{_BLOCK}.ln2.b", keep),
    WeightRule(f"{_LAYER}.mlp.c_fc.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.mlp.c_fc.bias", f"{_BLOCK}.mlp.b_in", keep),
    WeightRule(f"{_LAYER}.mlp.c_proj.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{_LAYER}.mlp.c_proj.bias", f"{_BLOCK}.mlp.b_out", keep),
    WeightRule("ln_f.weight", "ln_final.w", keep),
    WeightRule("ln_f.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"gpt_neo": "GPTNeoForCausalLM"},
    base_models={"gpt_neo": "GPTNeoModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="transformer.",
    harmless_tensors=(  # masks of old checkpoints
        f"{_LAYER}.attn.attention.bias",
        f"{_LAYER}.attn.attention.masked_bias",
    ),
    tied=("lm_head.weight", "wte.weight"),
)
