"""Gemma 1 to 3 (Gemma Team 2024, 2024, 2025): scaled embeddings, gains of 1 + w, GeGLU; then more norms and windows.

The sandwich of norms, soft-caps and windows came with Gemma 2, QK-norm and a second rotary base with Gemma 3. Of a
Gemma 3 that also reads images, the language model is loaded; it computes what the whole does for text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless
from workbench.loading.families.llama import (
    ATTENTION_RULES,
    BLOCK,
    EMBEDDING_RULES,
    HARMLESS,
    LAYER,
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    llama_like,
    take_attention_bias,
    take_layer_types,
    take_llama_options,
)
from workbench.loading.families.rotary import take_rotary, take_rotary_of_layer_types
from workbench.loading.weights import WeightRule, keep

_HARMLESS: Harmless = {
    **HARMLESS,
    "use_bidirectional_attention": (None, False),
    "cache_implementation": (None, "hybrid"),  # of generation
}
_ACTIVATION = "gelu_pytorch_tanh"


def map_gemma(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Gemma 1.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = _take_gemma_options(attributes, n_ctx, "hidden_act")
    if options["act_fn"] == "gelu":
        options["act_fn"] = "gelu_tanh"  # what the name stood for in the first release
    options |= take_rotary(attributes, options["d_head"], hf_config["max_position_embeddings"])
    attributes.finish({**_HARMLESS, "hidden_activation": (None, _ACTIVATION)})
    return TransformerConfig(**options)


def map_gemma2(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Gemma 2.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = _take_gemma_options(attributes, n_ctx, "hidden_activation")
    options |= take_rotary(attributes, options["d_head"], hf_config["max_position_embeddings"])
    options |= _take_gemma2_attention(attributes, options["n_layers"], default_pattern=2)
    options["attn_scores_soft_cap"] = _take_cap(attributes, "attn_logit_softcapping", 50.0)
    options["output_logits_soft_cap"] = _take_cap(attributes, "final_logit_softcapping", 30.0)
    attributes.finish({**_HARMLESS, "hidden_act": (_ACTIVATION,), "sliding_window_size": (options["window_size"],)})
    return TransformerConfig(**options)


def map_gemma3(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Gemma 3 for text.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = _take_gemma_options(attributes, n_ctx, "hidden_activation")
    options |= take_rotary_of_layer_types(
        attributes, hf_config["max_position_embeddings"], default_base=1e6, default_local_base=1e4
    )
    patterns = [attributes.take_size(name, None) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = next((pattern for pattern in patterns if pattern is not None), 6)
    options |= _take_gemma2_attention(attributes, options["n_layers"], default_pattern=pattern)
    options["output_logits_soft_cap"] = _take_cap(attributes, "final_logit_softcapping", None)
    attributes.finish({**_HARMLESS, "hidden_act": (_ACTIVATION,), "attn_logit_softcapping": (None,)})
    return TransformerConfig(**options, qk_norm="per_head")


# What the text_config of a published Gemma 3 with images leaves to transformers.
_TEXT_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


def map_gemma3_with_images(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of the language model of a Hugging Face Gemma 3 that also reads images.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    text = attributes.take("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") != "gemma3_text":
        raise attributes.refusal("text_config", text, "expected attributes of the model_type gemma3_text")
    tied = attributes.take_switch("tie_word_embeddings", True)
    if text.get("tie_word_embeddings", tied) != tied:
        raise attributes.refusal("tie_word_embeddings", tied, "it contradicts that of text_config")
    images = ("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    attributes.finish(dict.fromkeys(images, ANY))
    return map_gemma3(_TEXT_DEFAULTS | dict(text) | {"tie_word_embeddings": tied}, n_ctx)


def _take_gemma_options(attributes: ConfigAttributes, n_ctx: int | None, activation: str) -> dict[str, Any]:
    options = take_llama_options(
        attributes, n_ctx, default_head=256, default_tied=True, activation=(activation, _ACTIVATION)
    )
    options |= take_attention_bias(attributes)
    return options | {"embed_scale": options["d_model"] ** 0.5, "norm_gain_plus_one": True}


def _take_gemma2_attention(attributes: ConfigAttributes, n_layers: int, default_pattern: int) -> dict[str, Any]:
    """Of ``default_pattern`` layers the last has no window, where ``layer_types`` does not say otherwise."""
    window = attributes.take_size("sliding_window", 4096)
    return take_layer_types(attributes, n_layers, window, lambda layer: (layer + 1) % default_pattern != 0) | {
        "attn_scale": attributes.take_number("query_pre_attn_scalar", 256) ** -0.5,
        "norm_placement": "sandwich",
    }


def _take_cap(attributes: ConfigAttributes, name: str, default: float | None) -> float | None:
    cap = attributes.take(name, default)
    return None if cap is None else attributes.checked_number(name, cap)


_SANDWICH_RULES = (
    WeightRule(f"{LAYER}.input_layernorm.weight", f"{BLOCK}.ln1.w", keep),
    WeightRule(f"{LAYER}.post_attention_layernorm.weight", f"{BLOCK}.ln1_post.w", keep),
    WeightRule(f"{LAYER}.pre_feedforward_layernorm.weight", f"{BLOCK}.ln2.w", keep),
    WeightRule(f"{LAYER}.post_feedforward_layernorm.weight", f"{BLOCK}.ln2_post.w", keep),
)
_RULES = EMBEDDING_RULES + ATTENTION_RULES + MLP_RULES

GEMMA = llama_like({"gemma": "GemmaForCausalLM"}, map_gemma, _RULES + PRE_NORM_RULES)
GEMMA2 = llama_like({"gemma2": "Gemma2ForCausalLM"}, map_gemma2, _RULES + _SANDWICH_RULES)
_GEMMA3_RULES = _RULES + _SANDWICH_RULES + QK_NORM_RULES
GEMMA3 = llama_like({"gemma3_text": "Gemma3ForCausalLM"}, map_gemma3, _GEMMA3_RULES)
GEMMA3_WITH_IMAGES = Family(
    architectures={"gemma3": "Gemma3ForConditionalGeneration"},
    map_config=map_gemma3_with_images,
    # On disk, in memory, and the head, which in memory stands beside the language model.
    weight_rules=tuple(
        WeightRule(f"{place}{rule.source}", rule.target, rule.op)
        for place in ("language_model.model.", "language_model.", "")
        for rule in _GEMMA3_RULES
        if place or rule.source == "lm_head.weight"
    ),
    base_prefix="model.",
    tied=("lm_head.weight", "language_model.embed_tokens.weight"),
    harmless_tensors=("vision_tower.{rest}", "multi_modal_projector.{rest}"),
)
