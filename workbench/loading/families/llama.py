"""Llama (Touvron et al. 2023) and what differs from it only in biases, tying and head counts: Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "attention_dropout": ANY,  # no dropout in evaluation
    "pretraining_tp": ANY,  # slices the same products
    "is_llama_config": ANY,
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "mlp_bias": (False,),
    "attention_bias": (False,),  # taken, not harmless, where the code of the model reads it
    "max_window_layers": ANY,  # without effect once a window that bites is refused
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Llama, Mistral or Qwen2.

    Rotary positions need no table that was learned, so ``n_ctx`` may exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("hidden_size")
    n_heads = attributes.take_size("num_attention_heads")
    trained_context = attributes.take_size("max_position_embeddings")
    context = n_ctx or trained_context
    _refuse_windows(attributes, context)
    attention_bias = attributes.family == "llama" and attributes.take_switch("attention_bias", False)
    config = TransformerConfig(
        n_layers=attributes.take_size("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_key_value_heads=attributes.take_size("num_key_value_heads", None) or n_heads,
        d_head=attributes.take_size("head_dim", None) or d_model // n_heads,
        d_mlp=attributes.take_size("intermediate_size"),
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=context,
        act_fn=attributes.take_activation("hidden_act", "silu"),
        gated_mlp=True,
        normalization_type="RMS",
        eps=attributes.take_number("rms_norm_eps", 1e-6),
        positional_embedding_type="rotary",
        rotary_base=_rotary_base(attributes),
        use_qkv_bias=attributes.family == "qwen2" or attention_bias,
        use_attn_out_bias=attention_bias,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", False),
    )
    attributes.finish(_HARMLESS)
    return config


def _refuse_windows(attributes: ConfigAttributes, n_ctx: int) -> None:
    """A window of W keys changes nothing as long as no query has more than W keys before it, itself included."""
    window = attributes.take_size("sliding_window", None) if attributes.family in ("mistral", "qwen2") else None
    if attributes.family == "qwen2" and not attributes.take_switch("use_sliding_window", False):
        window = None
    if window is not None and window < n_ctx:
        advice = f"it is shorter than the context of {n_ctx}: load the model with n_ctx={window} or less"
        raise attributes.refusal("sliding_window", window, advice)
    layer_types = attributes.take("layer_types", None)
    if not isinstance(layer_types, (list, tuple, type(None))):
        raise attributes.refusal("layer_types", layer_types, "expected a list")
    for kind in layer_types or ():
        if kind != "full_attention" and window is None:
            raise attributes.refusal("layer_types", kind, "every layer must be 'full_attention'")


def _rotary_base(attributes: ConfigAttributes) -> float:
    """θ from ``rope_parameters`` (transformers 5) or from ``rope_theta`` and ``rope_scaling`` (before)."""
    thetas = {"rope_theta": attributes.take("rope_theta", None)}
    shares = [attributes.take("partial_rotary_factor", None)]
    for name in ("rope_scaling", "rope_parameters"):
        given = attributes.take(name, None)
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise attributes.refusal(name, given, "expected names and values")
        parameters = dict(given)
        for kind in (parameters.pop(key) for key in ("rope_type", "type") if key in parameters):
            if kind != "default":
                raise attributes.refusal(f"{name} of type", kind, "only unscaled rotary positions are")
        thetas[f"{name}.rope_theta"] = parameters.pop("rope_theta", None)
        shares.append(parameters.pop("partial_rotary_factor", None))
        if parameters:
            raise attributes.refusal(name, parameters, "only rope_type and rope_theta are")
    for share in shares:
        if share not in (None, 1.0):
            raise attributes.refusal("partial_rotary_factor", share, "every dimension of a head must rotate")
    known = {name: attributes.checked_number(name, theta) for name, theta in thetas.items() if theta is not None}
    if len(set(known.values())) > 1:
        (first, theta), *_ = known.items()
        others = ", ".join(f"{name} = {other}" for name, other in known.items() if other != theta)
        raise attributes.refusal(first, theta, f"it contradicts {others}: keep the one that the model was trained with")
    return float(next(iter(known.values()), 10_000.0))


_LAYER = "layers.{layer}"
_BLOCK = "blocks.{layer}"

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("embed_tokens.weight", "embed.W_E", keep),
    WeightRule(f"{_LAYER}.input_layernorm.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.self_attn.q_proj.weight", f"{_BLOCK}.attn.W_Q", split_output_heads),
    WeightRule(f"{_LAYER}.self_attn.k_proj.weight", f"{_BLOCK}.attn.W_K", split_output_heads),
    WeightRule(f"{_LAYER}.self_attn.v_proj.weight", f"{_BLOCK}.attn.W_V", split_output_heads),
    WeightRule(f"{_LAYER}.self_attn.q_proj.bias", f"{_BLOCK}.attn.b_Q", split_heads_bias),
    WeightRule(f"{_LAYER}.self_attn.k_proj.bias", f"{_BLOCK}.attn.b_K", split_heads_bias),
    WeightRule(f"{_LAYER}.self_attn.v_proj.bias", f"{_BLOCK}.attn.b_V", split_heads_bias),
    WeightRule(f"{_LAYER}.self_attn.o_proj.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.self_attn.o_proj.bias", f"{_BLOCK}.attn.b_O", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.mlp.gate_proj.weight", f"{_BLOCK}.mlp.W_gate", transpose),
    WeightRule(f"{_LAYER}.mlp.up_proj.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.mlp.down_proj.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule("norm.weight", "ln_final.w", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="model.",
    harmless_tensors=("layers.{layer}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),  # recomputed from θ
    tied=("lm_head.weight", "embed_tokens.weight"),
)
