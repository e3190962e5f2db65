"""Mixtral (Jiang et al. 2024) and Qwen3-MoE: Mistral and Qwen3 whose MLPs are mixtures of experts.

On disk each expert has its own tensors; transformers 5 keeps those of a layer as one in memory. Both are read.
"""

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
    MLP_RULES,
    PRE_NORM_RULES,
    QK_NORM_RULES,
    llama_like,
    refuse_absurd_layers,
    take_attention_bias,
    take_common_window,
    take_llama_options,
)
from workbench.loading.families.rotary import take_rotary
from workbench.loading.weights import WeightRule, transpose

_HARMLESS: Harmless = {
    **HARMLESS,
    # of the training
    **dict.fromkeys(("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"), ANY),
}


def map_config(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face Mixtral or Qwen3-MoE.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
    """
    attributes = ConfigAttributes(hf_config)
    is_mixtral = attributes.family == "mixtral"
    options = take_llama_options(attributes, n_ctx, default_eps=1e-5 if is_mixtral else 1e-6)
    default_base = 1e6 if is_mixtral else 1e4
    context = hf_config["max_position_embeddings"]
    options |= take_rotary(attributes, options["d_head"], context, default_base=default_base)
    if is_mixtral:
        options |= take_common_window(attributes)
        options["moe"] = MixtureOfExperts(
            n_experts=take_n_experts(attributes, 8),
            n_experts_per_token=attributes.take_size("num_experts_per_tok", 2),
        )
    else:
        options |= _take_switched_window(attributes) | take_attention_bias(attributes)
        options["moe"] = _take_qwen3_experts(attributes, options["n_layers"])
        options["qk_norm"] = "per_head"
    attributes.finish(_HARMLESS)
    return TransformerConfig(**options)


def take_n_experts(attributes: ConfigAttributes, default: int) -> int:
    """The number of experts, which goes by either of two names."""
    counts = {name: attributes.take_size(name, None) for name in ("num_local_experts", "num_experts")}
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        advice = f"it contradicts num_experts = {counts['num_experts']}"
        raise attributes.refusal("num_local_experts", counts["num_local_experts"], advice)
    return next(iter(given.values()), default)


def _take_switched_window(attributes: ConfigAttributes) -> dict[str, Any]:
    """A window that all layers have where it is switched on; transformers lets ``max_window_layers`` change nothing."""
    is_on = attributes.take_switch("use_sliding_window", False)
    window = attributes.take_size("sliding_window", None)
    first = attributes.take("max_window_layers", 0)
    if is_on and first != 0:
        raise attributes.refusal("max_window_layers", first, "with use_sliding_window, every layer has the window")
    return {"window_size": window if is_on else None}


def _take_qwen3_experts(attributes: ConfigAttributes, n_layers: int) -> MixtureOfExperts:
    refuse_absurd_layers(attributes, n_layers)
    step = attributes.take_size("decoder_sparse_step", 1)
    plain = attributes.take("mlp_only_layers", None)
    if not isinstance(plain, (list, tuple, type(None))):
        raise attributes.refusal("mlp_only_layers", plain, "expected a list of layers")
    return MixtureOfExperts(
        n_experts=take_n_experts(attributes, 128),
        n_experts_per_token=attributes.take_size("num_experts_per_tok", 8),
        d_expert=attributes.take_size("moe_intermediate_size", 768),
        renormalise=attributes.take_switch("norm_topk_prob", False),
        dense_layers=tuple(i for i in range(n_layers) if i in (plain or ()) or (i + 1) % step),
    )


def _transpose_experts(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[expert, out, in] → [expert, in, out]"""
    return tensor.mT


def _split_gate_up_experts(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """[expert, 2 · d_expert, d_model] → gate and linear factor, each [expert, d_model, d_expert]"""
    return tensor.mT.chunk(2, dim=2)


_MLP, _OURS = f"{LAYER}.mlp", f"{BLOCK}.mlp"
_FUSED_EXPERT_RULES = (
    WeightRule(f"{_MLP}.gate.weight", f"{_OURS}.W_router", transpose),
    WeightRule(f"{_MLP}.experts.gate_up_proj", (f"{_OURS}.W_gate", f"{_OURS}.W_in"), _split_gate_up_experts),
    WeightRule(f"{_MLP}.experts.down_proj", f"{_OURS}.W_out", _transpose_experts),
)
_ON_DISK = f"{LAYER}.block_sparse_moe"
_MIXTRAL_RULES = (
    WeightRule(f"{_ON_DISK}.gate.weight", f"{_OURS}.W_router", transpose),
    WeightRule(f"{_ON_DISK}.experts.{{expert}}.w1.weight", f"{_OURS}.W_gate", transpose),
    WeightRule(f"{_ON_DISK}.experts.{{expert}}.w3.weight", f"{_OURS}.W_in", transpose),
    WeightRule(f"{_ON_DISK}.experts.{{expert}}.w2.weight", f"{_OURS}.W_out", transpose),
)
_QWEN3_RULES = (
    WeightRule(f"{_MLP}.experts.{{expert}}.gate_proj.weight", f"{_OURS}.W_gate", transpose),
    WeightRule(f"{_MLP}.experts.{{expert}}.up_proj.weight", f"{_OURS}.W_in", transpose),
    WeightRule(f"{_MLP}.experts.{{expert}}.down_proj.weight", f"{_OURS}.W_out", transpose),
    *MLP_RULES,  # of layers without experts
    *QK_NORM_RULES,
)

FAMILY = llama_like(
    {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"},
    map_config,
    EMBEDDING_RULES + PRE_NORM_RULES + ATTENTION_RULES + _FUSED_EXPERT_RULES + _MIXTRAL_RULES + _QWEN3_RULES,
)
