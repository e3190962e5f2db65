"""Configurations of the Llama-like families as published: what they map to, and that nothing is passed over."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config import MixtureOfExperts, RopeScaling, TransformerConfig
from workbench.errors import UnsupportedModelError
from workbench.loading.families import find_family

_LLAMA3_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
# As published, attribute by attribute.
LLAMA_3_2_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": _LLAMA3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
OLMO2_1B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
PHI3_MINI_4K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2,
    "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8,
    "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262144,
}  # fmt: skip
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model"},
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
    "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip

_COMMON: dict[str, Any] = {
    "gated_mlp": True, "normalization_type": "RMS", "positional_embedding_type": "rotary", "init_mode": "normal",
    "act_fn": "silu", "eps": 1e-6,
}  # fmt: skip
_GEMMA: dict[str, Any] = _COMMON | {
    "act_fn": "gelu_tanh", "norm_gain_plus_one": True, "tie_word_embeddings": True, "d_head": 256,
}  # fmt: skip

EXPECTED: list[tuple[dict[str, Any], TransformerConfig]] = [
    (
        LLAMA_3_2_1B,
        TransformerConfig(
            n_layers=16, d_model=2048, n_heads=32, n_key_value_heads=8, d_head=64, d_mlp=8192, d_vocab=128256,
            n_ctx=131072, rotary_base=500_000.0, tie_word_embeddings=True, **_COMMON | {"eps": 1e-5},
            rope_scaling=RopeScaling(type="llama3", factor=32.0, original_context=8192),
        ),
    ),
    (
        QWEN3_06B,
        TransformerConfig(
            n_layers=28, d_model=1024, n_heads=16, n_key_value_heads=8, d_head=128, d_mlp=3072, d_vocab=151936,
            n_ctx=40960, rotary_base=1e6, tie_word_embeddings=True, qk_norm="per_head", **_COMMON,
        ),
    ),
    (
        OLMO2_1B,
        TransformerConfig(
            n_layers=16, d_model=2048, n_heads=16, d_head=128, d_mlp=8192, d_vocab=100352, n_ctx=4096,
            rotary_base=500_000.0, qk_norm="across_heads", norm_placement="output", **_COMMON,
        ),
    ),
    (
        PHI3_MINI_4K,
        TransformerConfig(
            n_layers=32, d_model=3072, n_heads=32, d_head=96, d_mlp=8192, d_vocab=32064, n_ctx=4096, window_size=2047,
            **_COMMON | {"eps": 1e-5},
        ),
    ),
    (
        GEMMA_2B,
        TransformerConfig(
            n_layers=18, d_model=2048, n_heads=8, n_key_value_heads=1, d_mlp=16384, d_vocab=256000, n_ctx=8192,
            embed_scale=2048**0.5, **_GEMMA,
        ),
    ),
    (
        GEMMA2_2B,
        TransformerConfig(
            n_layers=26, d_model=2304, n_heads=8, n_key_value_heads=4, d_mlp=9216, d_vocab=256000, n_ctx=8192,
            embed_scale=48.0, attn_scale=1 / 16, attn_scores_soft_cap=50.0, output_logits_soft_cap=30.0,
            norm_placement="sandwich", window_size=4096, attn_types=("local", "global") * 13, **_GEMMA,
        ),
    ),
    (
        GEMMA3_1B,
        TransformerConfig(
            n_layers=26, d_model=1152, n_heads=4, n_key_value_heads=1, d_mlp=6912, d_vocab=262144, n_ctx=32768,
            embed_scale=1152**0.5, attn_scale=1 / 16, norm_placement="sandwich", qk_norm="per_head", window_size=512,
            attn_types=((("local",) * 5 + ("global",)) * 5)[:26], rotary_base=1e6, rotary_base_local=1e4, **_GEMMA,
        ),
    ),
    (
        GEMMA3_4B,
        TransformerConfig(
            n_layers=34, d_model=2560, n_heads=8, n_key_value_heads=4, d_mlp=10240, d_vocab=262208, n_ctx=131072,
            embed_scale=2560**0.5, attn_scale=1 / 16, norm_placement="sandwich", qk_norm="per_head", window_size=1024,
            attn_types=((("local",) * 5 + ("global",)) * 6)[:34], rotary_base=1e6, rotary_base_local=1e4,
            rope_scaling=RopeScaling(type="linear", factor=8.0), **_GEMMA,
        ),
    ),
    (
        MIXTRAL_8X7B,
        TransformerConfig(
            n_layers=32, d_model=4096, n_heads=32, n_key_value_heads=8, d_head=128, d_mlp=14336, d_vocab=32000,
            n_ctx=32768, rotary_base=1e6, moe=MixtureOfExperts(n_experts=8, n_experts_per_token=2),
            **_COMMON | {"eps": 1e-5},
        ),
    ),
    (
        QWEN3_30B_A3B,
        TransformerConfig(
            n_layers=48, d_model=2048, n_heads=32, n_key_value_heads=4, d_head=128, d_mlp=6144, d_vocab=151936,
            n_ctx=40960, rotary_base=1e6, qk_norm="per_head",
            moe=MixtureOfExperts(n_experts=128, n_experts_per_token=8, d_expert=768), **_COMMON,
        ),
    ),
    (
        GPT_OSS_20B,
        TransformerConfig(
            n_layers=24, d_model=2880, n_heads=64, n_key_value_heads=8, d_head=64, d_mlp=2880, d_vocab=201088,
            n_ctx=131072, rotary_base=150_000.0, window_size=128, attn_types=("local", "global") * 12,
            rope_scaling=RopeScaling(type="yarn", factor=32.0, original_context=4096, truncate=False),
            moe=MixtureOfExperts(n_experts=32, n_experts_per_token=4, use_router_bias=True), use_sink_logits=True,
            use_qkv_bias=True, use_attn_out_bias=True, use_mlp_bias=True, glu_limit=7.0, glu_linear_offset=1.0,
            **_COMMON | {"eps": 1e-5, "act_fn": "gelu_quick"},
        ),
    ),
]  # fmt: skip


def _map(config: dict[str, Any]) -> TransformerConfig:
    return find_family(config, "x").map_config(config, None)


@pytest.mark.parametrize(("config", "expected"), EXPECTED, ids=[config["model_type"] for config, _ in EXPECTED])
def test_as_published(config: dict[str, Any], expected: TransformerConfig) -> None:
    assert _map(config) == expected


@pytest.mark.parametrize(
    ("config", "changes", "refused"),
    [
        (QWEN3_06B, {"use_qk_norm": False}, "use_qk_norm"),
        (OLMO2_1B, {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMO2_1B, {"sliding_window": 4096}, "sliding_window"),
        (PHI3_MINI_4K, {"auto_map": {"AutoModelForCausalLM": "modeling_other.X"}}, "auto_map"),
        (PHI3_MINI_4K, {"lm_head_bias": True}, "lm_head_bias"),
        (GEMMA_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_2B, {"hidden_activation": "relu"}, "hidden_activation"),
        (GEMMA2_2B, {"sliding_window": None}, "sliding_window"),
        (GEMMA2_2B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA2_2B, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),  # transformers does not read it
        (GEMMA3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3_1B, {"layer_types": ["sliding_attention"] * 25}, "layer_types"),
        (GEMMA3_4B, {"text_config": None}, "text_config"),
        (GEMMA3_4B, {"text_config": GEMMA2_2B}, "text_config"),
        (GEMMA3_4B, {"audio_config": {}}, "audio_config"),
        (MIXTRAL_8X7B, {"num_experts": 4}, "num_local_experts"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts"),
        (MIXTRAL_8X7B, {"attention_bias": True}, "attention_bias"),
        (QWEN3_30B_A3B, {"use_sliding_window": True, "sliding_window": 64}, "max_window_layers"),
        (QWEN3_30B_A3B, {"mlp_only_layers": 3}, "mlp_only_layers"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (QWEN3_30B_A3B, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (GEMMA2_2B, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        (GPT_OSS_20B, {"swiglu_alpha": 1.5}, "swiglu_alpha"),
        (GPT_OSS_20B, {"rope_scaling": None}, "rope_scaling"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_what_would_change_the_numbers_is_named(config: dict[str, Any], changes: dict[str, Any], refused: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{config['model_type']}: {refused}"):
        _map(config | changes)


def test_which_layers_have_experts() -> None:
    """Every second one, counted from 1, without those that are to be plain."""
    config = QWEN3_30B_A3B | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    mapped = _map(config)
    assert [mapped.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]


def test_qwen3_windows() -> None:
    switched_on = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20}
    assert _map(QWEN3_06B | switched_on).layer_types == ("global",) * 20 + ("local",) * 8
    every_layer = _map(QWEN3_30B_A3B | switched_on | {"max_window_layers": 0})
    assert every_layer.layer_types == ("local",) * 48 and every_layer.window_size == 64
