"""Falcon (Almazrouei et al. 2023): attention and MLP in parallel, all query heads on one or a few key/value heads.

Falcon-7B has one norm for both, Falcon-40B and 180B (``new_decoder_architecture``) one each. Falcon-RW is refused for
its ALiBi, which transformers rounds to bfloat16 position by position: it depends on more than the distance. The
dropout of the training is left out, as the published weights are evaluated.
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

_HARMLESS: Harmless = {
    "alibi": (False,),
    "ff_factor": (4,),  # Falcon-2 says it beside what is the default
    "apply_residual_connection_post_layernorm": (False,),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "auto_map"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Falcon; ``n_ctx`` may exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size_called("hidden_size", "n_embed")
    n_heads = attributes.take_size("num_attention_heads")
    d_head = attributes.head_width(d_model, "num_attention_heads", n_heads)
    trained_context = attributes.take_size("max_position_embeddings", 2048)
    use_bias = attributes.take_switch("bias", False)
    is_new = attributes.take_switch("new_decoder_architecture", False)
    parallel, shared_norm = _parallel(attributes, is_new)
    config = TransformerConfig(
        n_layers=attributes.take_size("num_hidden_layers"),
        d_model=d_model,
        n_heads=n_heads,
        n_key_value_heads=_key_value_heads(attributes, n_heads, is_new),
        d_head=d_head,
        d_mlp=attributes.take_size("ffn_hidden_size", None) or 4 * d_model,
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=n_ctx or trained_context,
        act_fn=attributes.take_activation("activation", "gelu"),
        eps=attributes.take_number("layer_norm_epsilon", 1e-5),
        parallel_attn_mlp=parallel,
        shared_parallel_norm=shared_norm,
        **take_rotary(attributes, d_head, trained_context),
        use_qkv_bias=use_bias,
        use_attn_out_bias=use_bias,
        use_mlp_bias=use_bias,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    attributes.finish(_HARMLESS)
    return config


def _parallel(attributes: ConfigAttributes, is_new: bool) -> tuple[bool, bool]:
    """Whether attention and MLP run in parallel, and whether one norm serves both."""
    parallel = attributes.take_switch("parallel_attn", True)
    n_norms = attributes.take("num_ln_in_parallel_attn", None)
    if n_norms not in (None, 1, 2) or isinstance(n_norms, bool):
        raise attributes.refusal("num_ln_in_parallel_attn", n_norms, "supported is 1 or 2")
    if is_new and not parallel:
        raise attributes.refusal("parallel_attn", parallel, "new_decoder_architecture needs it")
    if n_norms == 2 and not is_new:
        raise attributes.refusal("num_ln_in_parallel_attn", n_norms, "it needs new_decoder_architecture")
    return parallel, parallel and not (is_new and n_norms in (None, 2))


def _key_value_heads(attributes: ConfigAttributes, n_heads: int, is_new: bool) -> int:
    """The new architecture says how many; the old one has as many as queries, or a single one (``multi_query``)."""
    given = attributes.take_size("num_kv_heads", None)
    multi_query = attributes.take_switch("multi_query", True)
    if is_new:
        if given is not None and n_heads % given:
            raise attributes.refusal("num_kv_heads", given, f"it must divide num_attention_heads = {n_heads}")
        return given or n_heads
    if multi_query:
        return 1
    if given not in (None, n_heads):
        raise attributes.refusal("num_kv_heads", given, "it needs new_decoder_architecture")
    return n_heads


_LAYER = "h.{layer}"
_BLOCK = "blocks.{layer}"
_QKV = tuple(f"{_BLOCK}.attn.W_{name}" for name in "QKV")
_QKV_BIAS = tuple(f"{_BLOCK}.attn.b_{name}" for name in "QKV")

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("word_embeddings.weight", "embed.W_E", keep),
    WeightRule(f"{_LAYER}.input_layernorm.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.input_layernorm.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.ln_attn.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.ln_attn.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.self_attention.query_key_value.weight", _QKV, split_grouped_heads),
    WeightRule(f"{_LAYER}.self_attention.query_key_value.bias", _QKV_BIAS, split_grouped_heads_bias),
    WeightRule(f"{_LAYER}.self_attention.dense.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.self_attention.dense.bias", f"{_BLOCK}.attn.b_O", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.post_attention_layernorm.bias", f"{_BLOCK}.ln2.b", keep),
    WeightRule(f"{_LAYER}.ln_mlp.weight", f"{_BLOCK}.ln2.w", keep),
    WeightRule(f"{_LAYER}.ln_mlp.bias", f"{_BLOCK}.ln2.b", keep),
    WeightRule(f"{_LAYER}.mlp.dense_h_to_4h.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.mlp.dense_h_to_4h.bias", f"{_BLOCK}.mlp.b_in", keep),
    WeightRule(f"{_LAYER}.mlp.dense_4h_to_h.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{_LAYER}.mlp.dense_4h_to_h.bias", f"{_BLOCK}.mlp.b_out", keep),
    WeightRule("ln_f.weight", "ln_final.w", keep),
    WeightRule("ln_f.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"falcon": "FalconForCausalLM"},
    base_models={"falcon": "FalconModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="transformer.",
    harmless_tensors=(f"{_LAYER}.self_attention.rotary_emb.inv_freq",),  # recomputed from the base
    tied=("lm_head.weight", "word_embeddings.weight"),
)
