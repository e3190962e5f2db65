"""GPT-J (Wang & Komatsuzaki 2021): attention and MLP in parallel behind one norm; adjacent dimensions rotate in pairs.

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
    split_input_heads_of_linear,
    split_output_heads,
    transpose,
)

_HARMLESS: Harmless = {
    "rotary": (True,),
    "n_ctx": ANY,  # an old duplicate of n_positions
    "scale_attn_weights": (True,),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), ANY),
    # of heads for classification
    **dict.fromkeys(("summary_activation", "summary_first_dropout", "summary_proj_to_labels"), ANY),
    **dict.fromkeys(("summary_type", "summary_use_proj"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face GPT-J; ``n_ctx`` may exceed the context of the training.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    d_model = attributes.take_size("n_embd")
    n_heads = attributes.take_size("n_head")
    d_head = attributes.head_width(d_model, "n_head", n_heads)
    trained_context = attributes.take_size("n_positions", 2048)
    rotary_dim = attributes.take_size("rotary_dim", 64)
    if rotary_dim > d_head:
        raise attributes.refusal("rotary_dim", rotary_dim, f"a head has {d_head} dimensions")
    config = TransformerConfig(
        n_layers=attributes.take_size("n_layer"),
        d_model=d_model,
        n_heads=n_heads,
        d_head=d_head,
        d_mlp=attributes.take_size("n_inner", None) or 4 * d_model,
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=n_ctx or trained_context,
        act_fn=attributes.take_activation("activation_function", "gelu_new"),
        eps=attributes.take_number("layer_norm_epsilon", 1e-5),
        parallel_attn_mlp=True,
        shared_parallel_norm=True,
        positional_embedding_type="rotary",
        rotary_dim=rotary_dim,
        rotary_adjacent_pairs=True,
        use_mlp_bias=True,
        use_unembed_bias=True,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", False),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    attributes.finish(_HARMLESS)
    return config


_LAYER = "h.{layer}"
_BLOCK = "blocks.{layer}"

# Hugging Face keeps matrices as [out, in]; ours are [in, out].
WEIGHT_RULES = (
    WeightRule("wte.weight", "embed.W_E", keep),
    WeightRule(f"{_LAYER}.ln_1.weight", f"{_BLOCK}.ln1.w", keep),
    WeightRule(f"{_LAYER}.ln_1.bias", f"{_BLOCK}.ln1.b", keep),
    WeightRule(f"{_LAYER}.attn.q_proj.weight", f"{_BLOCK}.attn.W_Q", split_output_heads),
    WeightRule(f"{_LAYER}.attn.k_proj.weight", f"{_BLOCK}.attn.W_K", split_output_heads),
    WeightRule(f"{_LAYER}.attn.v_proj.weight", f"{_BLOCK}.attn.W_V", split_output_heads),
    WeightRule(f"{_LAYER}.attn.out_proj.weight", f"{_BLOCK}.attn.W_O", split_input_heads_of_linear),
    WeightRule(f"{_LAYER}.mlp.fc_in.weight", f"{_BLOCK}.mlp.W_in", transpose),
    WeightRule(f"{_LAYER}.mlp.fc_in.bias", f"{_BLOCK}.mlp.b_in", keep),
    WeightRule(f"{_LAYER}.mlp.fc_out.weight", f"{_BLOCK}.mlp.W_out", transpose),
    WeightRule(f"{_LAYER}.mlp.fc_out.bias", f"{_BLOCK}.mlp.b_out", keep),
    WeightRule("ln_f.weight", "ln_final.w", keep),
    WeightRule("ln_f.bias", "ln_final.b", keep),
    WeightRule("lm_head.weight", "unembed.W_U", transpose),
    WeightRule("lm_head.bias", "unembed.b_U", keep),
)

FAMILY = Family(
    architectures={"gptj": "GPTJForCausalLM"},
    base_models={"gptj": "GPTJModel"},
    map_config=map_config,
    weight_rules=WEIGHT_RULES,
    base_prefix="transformer.",
    harmless_tensors=(f"{_LAYER}.attn.bias", f"{_LAYER}.attn.masked_bias"),  # causal masks of old checkpoints
    tied=("lm_head.weight", "wte.weight"),
)
