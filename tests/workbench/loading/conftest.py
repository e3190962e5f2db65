"""Tiny random transformers models of every covered kind, with sizes that no two axes share; and as GGUF files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_GPT2 = {
    "vocab_size": 61, "n_positions": 53, "n_embd": 30, "n_layer": 3, "n_head": 5, "n_inner": 44,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 61, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 53, "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
}  # fmt: skip
_QWEN2 = {name: value for name, value in _LLAMA.items() if name != "head_dim"}

CASES: Mapping[str, tuple[type[PreTrainedModel], Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**_GPT2)),
    "gpt2-variants": (
        GPT2LMHeadModel,
        GPT2Config(
            **_GPT2 | {"n_inner": None, "activation_function": "relu"},
            scale_attn_weights=False,
            reorder_and_upcast_attn=True,
            tie_word_embeddings=False,
        ),  # fmt: skip
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**_LLAMA)),
    "llama-biases-tied-mqa": (
        LlamaForCausalLM,
        LlamaConfig(
            **_LLAMA | {"num_key_value_heads": 1}, attention_bias=True, tie_word_embeddings=True, hidden_act="gelu"
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**_LLAMA, sliding_window=None)),
    "mistral-wide-window": (MistralForCausalLM, MistralConfig(**_LLAMA, sliding_window=53)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_QWEN2)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**_QWEN2, tie_word_embeddings=True)),
}


def build_tiny(case: str, **overrides: Any) -> PreTrainedModel:
    """A model of that case whose every parameter, gains and biases included, is random and large enough to matter."""
    kind, config = CASES[case]
    return _build_random(kind, type(config)(**config.to_dict() | overrides))


def _build_random(kind: type[PreTrainedModel], config: PreTrainedConfig, std: float = 0.3) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    config._attn_implementation = "eager"
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=std, generator=generator)
            if parameter.dim() == 1 and not name.endswith("bias"):
                parameter += 1.0
    return model.eval()


@pytest.fixture(scope="session")
def build_random() -> Callable[..., PreTrainedModel]:
    """``build_random(kind, config, std=0.3)``: eager attention, and no parameter whose absence would go unnoticed."""
    return _build_random


@pytest.fixture(scope="session", params=CASES)
def hf_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each covered kind in turn. Read-only."""
    return build_tiny(request.param)


@pytest.fixture
def make_hf_model() -> Callable[..., PreTrainedModel]:
    """``make_hf_model(case, **config overrides)``"""
    return build_tiny


@pytest.fixture(scope="session")
def _saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-llama"
    build_tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def llama_folder(_saved_llama: Path, tmp_path: Path) -> Path:
    """A folder with config.json and model.safetensors, without a tokenizer, that a test may damage."""
    return Path(shutil.copytree(_saved_llama, tmp_path / "tiny-llama"))


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """``edit_config(folder, **changes)`` rewrites attributes of its config.json."""

    def edit(folder: Path, **changes: Any) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


_LLAMA_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GPT2_NAMES = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "lm_head": "output", "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip


_QWEN3_NAMES = _LLAMA_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_GEMMA_NAMES = _QWEN3_NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_NAMES = {"gpt2": _GPT2_NAMES, "qwen3": _QWEN3_NAMES, "gemma2": _GEMMA_NAMES, "gemma3": _GEMMA_NAMES}


def gguf_name(hf_name: str, architecture: str = "llama") -> str:
    """model.layers.3.mlp.up_proj.weight → blk.3.ffn_up.weight"""
    stem, kind = hf_name.rsplit(".", 1)
    names = _NAMES.get(architecture, _LLAMA_NAMES)
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def _permuted(weights: np.ndarray, n_heads: int) -> np.ndarray:
    """The rows of each head, first its two halves' first rows, then their second ones, and so on."""
    rows = weights.reshape(n_heads, 2, weights.shape[0] // n_heads // 2, *weights.shape[1:])
    return rows.swapaxes(1, 2).reshape(weights.shape)


def save_as_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    quantised: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a Llama, Qwen2, Qwen3, Gemma 2, Gemma 3 or GPT-2 as llama.cpp's converter does.

    ``quantised`` gives the type of tensors by the end of their Hugging Face name; ``extra`` are further tensors.

    Returns Hugging Face's state dict with the quantised values.
    """
    config: Any = model.config
    architecture = config.model_type.removesuffix("_text")
    rope = getattr(config, "rope_parameters", {})
    writer = gguf.GGUFWriter(path, architecture)
    fields: dict[str, Any] = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "attention.head_count": config.num_attention_heads,
    }  # fmt: skip
    if architecture == "gpt2":
        fields |= {"feed_forward_length": config.n_inner, "attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        d_head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        fields |= {
            "feed_forward_length": config.intermediate_size, "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "attention.key_length": d_head,
            "attention.value_length": d_head, "rope.dimension_count": d_head,
            "rope.freq_base": rope.get("full_attention", rope)["rope_theta"], "vocab_size": config.vocab_size,
        }  # fmt: skip
    if architecture.startswith("gemma"):
        fields["attention.sliding_window"] = config.sliding_window
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        fields |= {name: getattr(config, name) for name in caps if getattr(config, name) is not None}
    prefixed = {f"{architecture}.{key}": value for key, value in fields.items()}
    for key, value in (prefixed | dict(metadata or {})).items():
        _add(writer, key, value)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": getattr(config, "num_key_value_heads", 0)}
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "gpt2" and values.ndim == 2 and ".h." in name:
            values = np.ascontiguousarray(values.T)
        for part, n_heads in heads.items():
            if architecture == "llama" and part in name:
                values = _permuted(values, n_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        kind = next((kind for end, kind in (quantised or {}).items() if name.endswith(end)), None)
        if kind is None:
            writer.add_tensor(gguf_name(name, architecture), values)
            stored[name] = tensor
        else:
            writer.add_tensor(gguf_name(name, architecture), gguf.quants.quantize(values, kind), raw_dtype=kind)
            # Blocks lie within rows, so permuting rows before or after makes no difference.
            blocks = gguf.quants.quantize(tensor.numpy(), kind)
            stored[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def write_gguf() -> Callable[..., dict[str, torch.Tensor]]:
    """``write_gguf(path, model, quantised=…, metadata=…)``"""
    return save_as_gguf
