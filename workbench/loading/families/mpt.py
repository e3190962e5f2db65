"""MPT (MosaicML 2023): ALiBi instead of positions, and no bias anywhere, not even in the norms.

Its slopes are written down in another way than those of Press et al. 2022, and are the same. What the original code
offers but transformers does not compute (a wider MLP, other slopes, a prefix, scaled logits) is refused. The dropout of
the training is left out, as the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless
from workbench.loading.weights import (
    WeightRule,
    keep,
    split_fused_heads_of_linear,
    split_input_heads_of_linear,
    transpose,
)

_HARMLESS: Harmless = {
    "expansion_ratio": (4,),
    "logit_scale": (None,),
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "learned_pos_emb": ANY,  # without effect where there is ALiBi
    "embedding_fraction": ANY,  # of gradients
    **dict.fromkeys(("emb_pdrop", "resid_pdrop", "init_device", "init_config", "verbose", "auto_map"), ANY),
    **dict.fromkeys(("tokenizer_name", "init_std"), ANY),
}
_HARMLESS_OF_ATTENTION: Harmless = {
    "alibi": (True,),
    "alibi_bias_max": (8,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "clip_qkv": (None,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_impl": ANY,  # the same products by another kernel
    "attn_pdrop": ANY,
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face MPT; ALiBi lets ``n_ctx`` exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("d_model")
    n_heads = attributes.take_size("n_heads")
    trained_context = attributes.take_size("max_seq_len", 2048)
    given = attributes.take("attn_config", None)
    if given is not None and not isinstance(given, Mapping):
        raise attributes.refusal("attn_config", given, "expected names and values")
    of_attention = ConfigAttributes({**(given or {}), "model_type": f"{attributes.family}: attn_config"})
    scale = of_attention.take("softmax_scale", None)
    config = TransformerConfig(
        n_layers=attributes.take_size("n_layers"),
        d_model=d_model,
        n_heads=n_heads,
        d_head=attributes.head_width(d_model, "n_heads", n_heads),
        d_mlp=4 * d_model,
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=n_ctx or trained_context,
        act_fn="gelu",
        eps=attributes.take_number("layer_norm_epsilon", 1e-5),
        use_norm_bias=False,
        positional_embedding_type="alibi",
        attn_scale=None if scale is None else of_attention.checked_number("softmax_scale", scale),
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    of_attention.finish(_HARMLESS_OF_ATTENTION)
    attributes.finish(_HARMLESS)
    return config


_LAYER = "blocks.{layer}"

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("wte.weight", "embed.W_E", keep),
    WeightRule(f"{_LAYER}.norm_1.weight", f"{_LAYER}.ln1.w", keep),
    WeightRule(
        f"{_LAYER}.attn.Wqkv.weight",
        tuple(f"{_LAYER}.attn.W_{name}" for name in "QKV"),
        split_fused_heads_of_linear,
    ),
    WeightRule(f"{_LAYER}.attn.out_proj.weight", f"{_LAYER}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.norm_2.weight", f"{_LAYER}.ln2.w", keep),
    WeightRule(f"{_LAYER}.ffn.up_proj.weight", f"{_LAYER}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.ffn.down_proj.weight", f"{_LAYER}.mlp.W_out", transpose),
    WeightRule("norm_f.weight", "ln_final.w", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
)

FAMILY = Family(
    architectures={"mpt": ("MptForCausalLM", "MPTForCausalLM")},  # the latter in the code that MPT came with
    base_models={"mpt": "MptModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="transformer.",
    tied=("lm_head.weight", "wte.weight"),
)
