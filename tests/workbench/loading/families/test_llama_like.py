"""The families that begin where Llama does, each with its odd options on, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from workbench import HookedTransformer

# No two sizes are equal, heads are of an odd multiple of 2, and the context ends before the text that is measured.
_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 300, "rms_norm_eps": 1e-4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 5.0, "original_max_position_embeddings": 60}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0, "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.2, 2.0, 3.5, 5.0], "partial_rotary_factor": 0.8,
}  # fmt: skip
_NO_HEAD_DIM = {name: value for name, value in _SIZES.items() if name != "head_dim"}

Case = tuple[type[PreTrainedModel], PreTrainedConfig]
CASES: dict[str, Case] = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3),
    ),
    "llama of one key head, tied": (
        LlamaForCausalLM,
        LlamaConfig(**_SIZES | {"num_key_value_heads": 1}, tie_word_embeddings=True, hidden_act="gelu"),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**_SIZES, sliding_window=37, rope_parameters=_YARN)),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**_NO_HEAD_DIM, use_sliding_window=True, sliding_window=37, max_window_layers=1),
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **_SIZES, attention_bias=True, use_sliding_window=True, sliding_window=37,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=_YARN,
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**_NO_HEAD_DIM, attention_bias=True, rope_parameters=_LLAMA3)),
    "phi3": (
        Phi3ForCausalLM,
        Phi3Config(
            **_NO_HEAD_DIM | {"hidden_size": 60}, sliding_window=37, rope_parameters=_LONGROPE,
            original_max_position_embeddings=64,
        ),
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**_SIZES, attention_bias=True)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **_SIZES, sliding_window=37, query_pre_attn_scalar=7, attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0, attention_bias=True,
        ),
    ),
    "gemma3_text": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_SIZES, sliding_window=37, sliding_window_pattern=2, query_pre_attn_scalar=7, final_logit_softcapping=3.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        ),
    ),
    "gemma3": (
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=_SIZES | {"sliding_window": 37, "sliding_window_pattern": 2},
            vision_config={
                "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 28, "patch_size": 14,
            },
            image_token_index=60,
        ),
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(
            **_SIZES, sliding_window=37, num_local_experts=5, num_experts_per_tok=2,
            rope_parameters={"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
        ),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **_SIZES, attention_bias=True, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
            mlp_only_layers=[1], norm_topk_prob=False,
        ),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_SIZES, sliding_window=37, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=1.5,
            rope_parameters=_YARN | {"truncate": False},
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, check_family: Callable[..., HookedTransformer]) -> None:
    check_family(*CASES[case], std=0.2)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_in_shards_of_half_precision(
    case: str, build_random: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """Mixtral and Qwen3-MoE have a tensor for each expert on disk, which may lie in different files."""
    half = build_random(*CASES[case]).to(torch.bfloat16)
    half.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = list(tmp_path.glob("*.safetensors"))
    names = [name for path in shards for name in load_file(path)]
    assert len(shards) > 5 and any("experts.3." in name for name in names) == (case != "gpt_oss")
    model = HookedTransformer.from_pretrained(tmp_path)
    assert model.cfg.weights_description == "bfloat16, cast to float32"
    expected = HookedTransformer.from_pretrained(half.float()).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
