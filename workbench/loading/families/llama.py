"""Llama (Touvron et al. 2023), and Mistral and Qwen2, which differ from it in biases and windows.

What the other families of this kind have in common with Llama, they take from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless
from workbench.loading.families.rotary import take_rotary
from workbench.loading.weights import (
    WeightRule,
    keep,
    split_heads_bias,
    split_input_heads_of_linear,
    split_output_heads,
    transpose,
)

# Of any configuration of this kind; an architecture that reads one of them takes it.
HARMLESS: Harmless = {
    "attention_dropout": ANY,  # no dropout in evaluation
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "layer_types": (None,),
}
_HARMLESS: Harmless = {
    **HARMLESS,
    "pretraining_tp": ANY,  # slices the same products
    "is_llama_config": ANY,
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Llama, Mistral or Qwen2.

    Rotary positions need no table that was learned, so ``n_ctx`` may exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = take_llama_options(attributes, n_ctx)
    options |= take_rotary(attributes, options["d_head"], hf_config["max_position_embeddings"])
    if attributes.family == "llama":
        options |= take_attention_bias(attributes)
        options["use_mlp_bias"] = attributes.take_switch("mlp_bias", False)
        options |= take_layer_types(attributes, options["n_layers"], None)
    elif attributes.family == "mistral":
        options |= take_common_window(attributes)
    else:
        options["use_qkv_bias"] = True
        options |= take_switched_windows(attributes, options["n_layers"])
    attributes.finish(_HARMLESS)
    return TransformerConfig(**options)


def take_llama_options(
    attributes: ConfigAttributes,
    n_ctx: int | None,
    *,
    default_head: int | None = None,
    default_eps: float = 1e-6,
    default_tied: bool = False,
    activation: tuple[str, str] | None = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """What configurations of this kind say in the same words, rotary positions aside, as ``TransformerConfig`` options.

    Args:
        default_head: ``head_dim`` where it is absent; None: an even share of the width.
        activation: the attribute that names it, and its default; None leaves it to the caller.
    """
    d_model, n_heads = attributes.take_size("hidden_size"), attributes.take_size("num_attention_heads")
    context = attributes.take_size("max_position_embeddings")
    options = {
        "n_layers": attributes.take_size("num_hidden_layers"),
        "d_model": d_model,
        "n_heads": n_heads,
        "n_key_value_heads": attributes.take_size("num_key_value_heads", None) or n_heads,
        "d_head": attributes.take_size("head_dim", None) or default_head or max(d_model // n_heads, 1),
        "d_mlp": attributes.take_size("intermediate_size"),
        "d_vocab": attributes.take_size("vocab_size"),
        "n_ctx": n_ctx or context,
        "gated_mlp": True,
        "normalization_type": "RMS",
        "eps": attributes.take_number("rms_norm_eps", default_eps),
        "tie_word_embeddings": attributes.take_switch("tie_word_embeddings", default_tied),
        "init_mode": "normal",
        "initializer_range": attributes.take_number("initializer_range", 0.02),
    }
    if activation is not None:
        options["act_fn"] = attributes.take_activation(*activation)
    return options


def take_attention_bias(attributes: ConfigAttributes, default: bool = False) -> dict[str, Any]:
    """``attention_bias``, which is one switch for all four projections."""
    bias = attributes.take_switch("attention_bias", default)
    return {"use_qkv_bias": bias, "use_attn_out_bias": bias}


# Windows

_MANY_LAYERS = 100_000


def take_common_window(attributes: ConfigAttributes) -> dict[str, Any]:
    """``sliding_window`` of every layer."""
    window = attributes.take_size("sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    for given in _list(attributes, "layer_types"):
        if given != kind:
            raise attributes.refusal("layer_types", given, f"with sliding_window = {window}, all layers are {kind!r}")
    return {"window_size": window}


def take_switched_windows(attributes: ConfigAttributes, n_layers: int) -> dict[str, Any]:
    """Windows that ``use_sliding_window`` switches on from the layer ``max_window_layers`` on (Qwen)."""
    window = attributes.take_size("sliding_window", None)
    first = attributes.take("max_window_layers", 28)
    if not attributes.take_switch("use_sliding_window", False):
        return take_layer_types(attributes, n_layers, None)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise attributes.refusal("max_window_layers", first, "expected a whole number, not negative")
    return take_layer_types(attributes, n_layers, window, lambda layer: window is not None and layer >= first)


def take_layer_types(
    attributes: ConfigAttributes,
    n_layers: int,
    window: int | None,
    has_window: Callable[[int], bool] = lambda layer: False,
) -> dict[str, Any]:
    """``layer_types``: which layers have the window.

    Args:
        has_window: of a layer, where ``layer_types`` is absent.
    """
    types = _list(attributes, "layer_types")
    if types and len(types) != n_layers:
        raise attributes.refusal("layer_types", types, f"expected one for each of {n_layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise attributes.refusal("layer_types", kind, "supported are 'full_attention' and 'sliding_attention'")
    if window is None and not types:
        return {"window_size": None}
    refuse_absurd_layers(attributes, n_layers)
    local = [kind == "sliding_attention" for kind in types] or [has_window(layer) for layer in range(n_layers)]
    if any(local) and window is None:
        raise attributes.refusal("layer_types", "sliding_attention", "the configuration has no sliding_window in use")
    if not any(local):
        return {"window_size": None}
    mixed = None if all(local) else tuple("local" if here else "global" for here in local)
    return {"window_size": window, "attn_types": mixed}


def refuse_absurd_layers(attributes: ConfigAttributes, n_layers: int) -> None:
    """Before layers are counted up one by one, which for the billions of a damaged file takes minutes."""
    if n_layers > _MANY_LAYERS:
        raise attributes.refusal("num_hidden_layers", n_layers, f"expected at most {_MANY_LAYERS:,}")


def _list(attributes: ConfigAttributes, name: str) -> list[Any]:
    given = attributes.take(name, None)
    if not isinstance(given, (list, tuple, type(None))):
        raise attributes.refusal(name, given, "expected a list")
    return list(given or ())


# Weights. Hugging Face keeps matrices as [out, in]; ours are [in, out].

LAYER = "layers.{layer}"
BLOCK = "blocks.{layer}"

EMBEDDING_RULES = (
    WeightRule("embed_tokens.weight", "embed.W_E", keep),
    WeightRule("norm.weight", "ln_final.w", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)
ATTENTION_RULES = (
    WeightRule(f"{LAYER}.self_attn.q_proj.weight", f"{BLOCK}.attn.W_Q", split_output_heads),
    WeightRule(f"{LAYER}.self_attn.k_proj.weight", f"{BLOCK}.attn.W_K", split_output_heads),
    WeightRule(f"{LAYER}.self_attn.v_proj.weight", f"{BLOCK}.attn.W_V", split_output_heads),
    WeightRule(f"{LAYER}.self_attn.q_proj.bias", f"{BLOCK}.attn.b_Q", split_heads_bias),
    WeightRule(f"{LAYER}.self_attn.k_proj.bias", f"{BLOCK}.attn.b_K", split_heads_bias),
    WeightRule(f"{LAYER}.self_attn.v_proj.bias", f"{BLOCK}.attn.b_V", split_heads_bias),
    WeightRule(f"{LAYER}.self_attn.o_proj.weight", f"{BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{LAYER}.self_attn.o_proj.bias", f"{BLOCK}.attn.b_O", keep),
)
QK_NORM_RULES = (
    WeightRule(f"{LAYER}.self_attn.q_norm.weight", f"{BLOCK}.attn.q_norm.w", keep),
    WeightRule(f"{LAYER}.self_attn.k_norm.weight", f"{BLOCK}.attn.k_norm.w", keep),
)
PRE_NORM_RULES = (
    WeightRule(f"{LAYER}.input_layernorm.weight", f"{BLOCK}.ln1.w", keep),
    WeightRule(f"{LAYER}.post_attention_layernorm.weight", f"{BLOCK}.ln2.w", keep),
)
MLP_RULES = (
    WeightRule(f"{LAYER}.mlp.gate_proj.weight", f"{BLOCK}.mlp.W_gate", transpose),
    WeightRule(f"{LAYER}.mlp.gate_proj.bias", f"{BLOCK}.mlp.b_gate", keep),
    WeightRule(f"{LAYER}.mlp.up_proj.weight", f"{BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{LAYER}.mlp.up_proj.bias", f"{BLOCK}.mlp.b_in", keep),
    WeightRule(f"{LAYER}.mlp.down_proj.weight", f"{BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{LAYER}.mlp.down_proj.bias", f"{BLOCK}.mlp.b_out", keep),
)
HARMLESS_TENSORS = (f"{LAYER}.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq")  # recomputed from θ
TIED = ("lm_head.weight", "embed_tokens.weight")

WEIGHT_RULES = EMBEDDING_RULES + PRE_NORM_RULES + ATTENTION_RULES + MLP_RULES


def llama_like(
    architectures: Mapping[str, str],
    map_config: Callable[[Mapping[str, Any], int | None], TransformerConfig],
    weight_rules: tuple[WeightRule, ...],
) -> Family:
    """A family whose tensors stand where Llama's do."""
    return Family(
        architectures=architectures,
        map_config=map_config,
        weight_rules=weight_rules,
        base_prefix="model.",
        harmless_tensors=HARMLESS_TENSORS,
        tied=TIED,
    )


FAMILY = llama_like(
    {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"},
    map_config,
    WEIGHT_RULES,
)
