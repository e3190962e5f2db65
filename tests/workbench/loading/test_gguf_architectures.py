"""Every architecture of GGUF: files written as llama.cpp's converter writes them compute what transformers computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from workbench import HookedTransformer
from workbench.errors import UnsupportedModelError
from workbench.loading.families import find_family
from workbench.loading.gguf_architectures import ARCHITECTURES, hf_config
from workbench.parity import measure_parity

_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 300, "rms_norm_eps": 1e-4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN2_SIZES = {name: value for name, value in _SIZES.items() if name != "head_dim"}
_LINEAR = {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0}
_YARN = {
    "rope_type": "yarn", "rope_theta": 300.0, "factor": 5.0, "original_max_position_embeddings": 60, "beta_fast": 24.0,
}  # fmt: skip
_LINEAR_METADATA = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_YARN_METADATA = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 5.0, "rope.scaling.original_context_length": 60,
    "rope.scaling.yarn_beta_fast": 24.0, "rope.scaling.finetuned": True,
}  # fmt: skip
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

CASES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES, mlp_bias=True, rope_parameters=_LINEAR), _LINEAR_METADATA),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_QWEN2_SIZES, rope_parameters=_YARN), _YARN_METADATA),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, rope_parameters=_YARN), _YARN_METADATA),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **_SIZES, sliding_window=37, query_pre_attn_scalar=10, attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
        ),
        {},
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_SIZES | {"num_hidden_layers": 7}, sliding_window=37, query_pre_attn_scalar=10,
            rope_parameters=_GEMMA3_ROPE,
        ),
        _LINEAR_METADATA | {"attention.sliding_window_pattern": 6},
    ),
}  # fmt: skip
Build = Callable[..., PreTrainedModel]
Write = Callable[..., dict[str, torch.Tensor]]


@pytest.mark.parametrize("case", CASES)
def test_file_computes_what_transformers_computes(
    case: str, build_random: Build, write_gguf: Write, tmp_path: Path
) -> None:
    """At 260 positions: beyond windows and original contexts."""
    kind, config, metadata = CASES[case]
    reference = build_random(kind, config, 0.2)
    write_gguf(tmp_path / "tiny.gguf", reference, metadata={f"{case}.{key}": value for key, value in metadata.items()})
    model = HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")
    tokens = torch.randint(3, 61, (2, 260), generator=torch.Generator().manual_seed(1))
    assert measure_parity(model, reference, tokens).largest < 1e-4
    options = {**HookedTransformer.from_pretrained(reference).cfg.to_dict()}
    provenance = dict.fromkeys(("model_name", "revision", "weights_description"))
    assert model.cfg.to_dict() | provenance == options | provenance


def _llama3_factors(base: float, d_head: int, factor: float) -> np.ndarray:
    """As the converter computes them, one by one."""
    factors = []
    for i in range(0, d_head, 2):
        wavelength = 2 * math.pi * base ** (i / d_head)
        smooth = (8192 / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < 2048 else factor if wavelength > 8192 else between)
    return np.array(factors, np.float32)


def test_llama3_states_its_scaling_by_a_tensor(build_random: Build, write_gguf: Write, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    sizes = _SIZES | {"head_dim": 24, "max_position_embeddings": 131_072}
    reference = build_random(LlamaForCausalLM, LlamaConfig(**sizes, rope_parameters=rope), 0.2)
    factors = _llama3_factors(500_000.0, 24, 32.0)
    assert set(factors) > {1.0, 32.0}  # and something between
    write_gguf(tmp_path / "tiny.gguf", reference, extra={"rope_freqs.weight": factors})
    model = HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")
    assert model.cfg.rope_scaling == HookedTransformer.from_pretrained(reference).cfg.rope_scaling
    tokens = torch.randint(3, 61, (1, 260), generator=torch.Generator().manual_seed(1))
    assert measure_parity(model, reference, tokens).largest < 1e-4


@pytest.mark.parametrize(
    "factors", [np.full(12, 2.0), np.ones(11), np.linspace(1, 9, 12)], ids=["all the same", "too few", "unknown"]
)
def test_other_divisors_of_frequencies_are_refused(
    factors: np.ndarray, build_random: Build, write_gguf: Write, tmp_path: Path
) -> None:
    reference = build_random(LlamaForCausalLM, LlamaConfig(**_SIZES | {"head_dim": 24}), 0.2)
    write_gguf(tmp_path / "tiny.gguf", reference, extra={"rope_freqs.weight": factors.astype(np.float32)})
    with pytest.raises(UnsupportedModelError, match="rope_freqs.weight is not supported: its divisors"):
        HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")


# Metadata as in the published files.
_GEMMA: dict[str, Any] = {
    "block_count": 26, "context_length": 8192, "embedding_length": 2304, "feed_forward_length": 9216,
    "attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 256,
    "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
    "attention.sliding_window": 4096,
}  # fmt: skip


def _config(name: str, metadata: dict[str, Any]) -> Any:
    fields = {f"{name}.{key}": value for key, value in metadata.items()}
    config = hf_config(fields, ARCHITECTURES[name], None, "x") | {"vocab_size": 256_000, "tie_word_embeddings": True}
    return find_family(config, "x").map_config(config, None)


def test_what_llama_cpp_implies_of_gemma() -> None:
    """The scale of the scores goes by the size of a head, but of the width's share in the models of 27B."""
    gemma2 = _config("gemma2", _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
    assert gemma2.attn_scale == 256**-0.5 and gemma2.eps == 1e-6
    assert gemma2.layer_types == ("local", "global") * 13 and gemma2.window_size == 4096
    assert (gemma2.attn_scores_soft_cap, gemma2.output_logits_soft_cap) == (50.0, 30.0)
    large = {"block_count": 46, "embedding_length": 4608, "attention.head_count": 32, "attention.head_count_kv": 16}
    narrow = {"attention.key_length": 128, "attention.value_length": 128}
    assert _config("gemma2", _GEMMA | large | narrow).attn_scale == 144**-0.5
    gemma3 = _config("gemma3", _GEMMA | {"rope.freq_base": 1e6, "attention.sliding_window": 512})
    assert gemma3.layer_types[:6] == ("local",) * 5 + ("global",) and gemma3.output_logits_soft_cap is None
    assert (gemma3.rotary_base, gemma3.rotary_base_local) == (1e6, 1e4)
    assert _config("gemma3", _GEMMA | {"rope.freq_base_swa": 5e4}).rotary_base_local == 5e4


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"attention.sliding_window_pattern": 4}, "gemma3.attention.sliding_window_pattern = 4 is not supported"),
        ({"attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping = 50.0 is not supported"),
        ({"rope.scaling.type": "yarn"}, "gemma3.rope.scaling.type = 'yarn' is not supported"),
        ({"rope.scaling.factor": 8.0}, "gemma3.rope.scaling.factor = 8.0 is not supported"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 8.0}, "gemma3.rope.scaling.type = 'longrope'"),
        (_YARN_METADATA | {"rope.scaling.yarn_log_multiplier": 0.1}, "gemma3.rope.scaling.yarn_log_multiplier = 0.1"),
        (_YARN_METADATA | {"rope.scaling.attn_factor": 0.5}, "gemma3.rope.scaling.attn_factor = 0.5"),
    ],
)
def test_metadata_that_would_change_the_numbers_are_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^x: {message}"):
        _config("gemma3", _GEMMA | metadata)


@pytest.mark.parametrize("key", ["attention.sliding_window", "attention.layer_norm_rms_epsilon"])
def test_metadata_that_are_missing_are_not_guessed(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"the metadata lack gemma3.{key}"):
        _config("gemma3", {name: value for name, value in _GEMMA.items() if name != key})


def test_scaling_that_is_switched_off() -> None:
    off = {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.original_context_length": 99}
    assert _config("gemma3", _GEMMA | off) == _config("gemma3", _GEMMA)
