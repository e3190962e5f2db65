"""GPT-OSS (OpenAI 2025): sink logits, windows in every other layer, experts with biases and a bounded SwiGLU, YaRN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from workbench.config import MixtureOfExperts, TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Harmless
from workbench.loading.families.llama import (
    ATTENTION_RULES,
    BLOCK,
    EMBEDDING_RULES,
    HARMLESS,
    LAYER,
    PRE_NORM_RULES,
    llama_like,
    take_attention_bias,
    take_layer_types,
    take_llama_options,
)
from workbench.loading.families.mixtral import take_n_experts
from workbench.loading.families.rotary import take_rotary
from workbench.loading.weights import WeightRule, keep, transpose

_HARMLESS: Harmless = {
    **HARMLESS,
    "hidden_act": ("silu",),  # the code has x · sigmoid(swiglu_alpha · x) whatever this says
    "swiglu_alpha": (1.702,),  # which makes it gelu_quick
    "experts_per_token": ANY,  # repeats num_experts_per_tok
    "initial_context_length": ANY,  # repeats what rotary positions say
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), ANY),  # of the training
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face GPT-OSS.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    options = take_llama_options(attributes, n_ctx, default_head=64, default_eps=1e-5, activation=None)
    if not hf_config.get("rope_scaling") and not hf_config.get("rope_parameters"):
        raise attributes.refusal("rope_scaling", None, "state how rotary positions are scaled, or type 'default'")
    context = hf_config["max_position_embeddings"]
    options |= take_rotary(attributes, options["d_head"], context, default_base=150_000.0)
    options |= take_attention_bias(attributes, default=True)
    window, n_layers = attributes.take_size("sliding_window", 128), options["n_layers"]
    options |= take_layer_types(attributes, n_layers, window, lambda layer: layer % 2 == 0)
    moe = MixtureOfExperts(
        n_experts=take_n_experts(attributes, 128),
        n_experts_per_token=attributes.take_size("num_experts_per_tok", 4),
        use_router_bias=True,
    )
    limit = attributes.take_number("swiglu_limit", 7.0)
    attributes.finish(_HARMLESS)
    return TransformerConfig(
        **options,
        act_fn="gelu_quick",
        glu_limit=limit,
        glu_linear_offset=1.0,
        use_mlp_bias=True,
        use_sink_logits=True,
        moe=moe,
    )


def _split_interleaved(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """[…, 2 · d_expert] whose columns are gate and linear factor by turns → the two, each […, d_expert]"""
    return tensor[..., 0::2], tensor[..., 1::2]


_MLP, _OURS = f"{LAYER}.mlp", f"{BLOCK}.mlp"
_EXPERT_RULES = (
    WeightRule(f"{LAYER}.self_attn.sinks", f"{BLOCK}.attn.sink_logits", keep),
    WeightRule(f"{_MLP}.router.weight", f"{_OURS}.W_router", transpose),
    WeightRule(f"{_MLP}.router.bias", f"{_OURS}.b_router", keep),
    WeightRule(f"{_MLP}.experts.gate_up_proj", (f"{_OURS}.W_gate", f"{_OURS}.W_in"), _split_interleaved),
    WeightRule(f"{_MLP}.experts.gate_up_proj_bias", (f"{_OURS}.b_gate", f"{_OURS}.b_in"), _split_interleaved),
    WeightRule(f"{_MLP}.experts.down_proj", f"{_OURS}.W_out", keep),
    WeightRule(f"{_MLP}.experts.down_proj_bias", f"{_OURS}.b_out", keep),
)

FAMILY = llama_like(
    {"gpt_oss": "GptOssForCausalLM"}, map_config, EMBEDDING_RULES + PRE_NORM_RULES + ATTENTION_RULES + _EXPERT_RULES
)
