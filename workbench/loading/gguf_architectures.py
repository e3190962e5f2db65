"""The architectures of GGUF files in Hugging Face's terms: names of tensors and attributes, and what llama.cpp implies.

Source: llama.cpp's converter and its reading of hyperparameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from workbench.errors import UnsupportedModelError

Op = Callable[[Tensor, int], Tensor]  # (tensor, number of heads) → tensor
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF.

    Attributes:
        name: as GGUF has it.
        model_type: as Hugging Face has it.
        tensors: name in the file -> (Hugging Face's name, how to bring the values to Hugging Face's layout).
        attributes: metadata under the architecture's prefix -> attribute of Hugging Face's configuration.
        needed: metadata without which the model would be guessed.
        harmless: metadata without effect, with the values for which that holds; None: any.
        optional_biases: whether there are biases is known from the tensors.
        reads_rope_factors: a tensor may say how rotary positions are scaled (Llama 3.1).
    """

    name: str
    model_type: str
    tensors: Mapping[str, tuple[str, Op]]
    attributes: Mapping[str, str]
    needed: tuple[str, ...]
    harmless: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    optional_biases: bool = False
    reads_rope_factors: bool = False


# Tensors


def _keep(tensor: Tensor, n_heads: int) -> Tensor:
    return tensor


def _to_conv1d(tensor: Tensor, n_heads: int) -> Tensor:
    """[out, in] → [in, out], the layout of GPT-2's own checkpoints."""
    return tensor.T


def _restore_halves(tensor: Tensor, n_heads: int) -> Tensor:
    """Undoes llama.cpp's reordering of the rows of q and k.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + d_head / 2), so for the
    architecture "llama" the file holds each head's two halves interleaved. [head · d_head, …] → the same shape.
    """
    return tensor.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _subtract_one(tensor: Tensor, n_heads: int) -> Tensor:
    """Gemma's gains are 1 + w; the file holds the sum."""
    return tensor - 1


_Names = dict[str, tuple[str, Op]]
_LAYER, _BLOCK = "model.layers.{layer}", "blk.{layer}"


def _llama_tensors(*, rotary_op: Op = _keep, norm_op: Op = _keep, norms: Mapping[str, str]) -> _Names:
    names: _Names = {
        "token_embd.weight": ("model.embed_tokens.weight", _keep),
        "output_norm.weight": ("model.norm.weight", norm_op),
        "output.weight": ("lm_head.weight", _keep),
    }
    names |= {f"{_BLOCK}.{here}.weight": (f"{_LAYER}.{there}.weight", norm_op) for here, there in norms.items()}
    for kind in ("weight", "bias"):
        names |= {
            f"{_BLOCK}.attn_q.{kind}": (f"{_LAYER}.self_attn.q_proj.{kind}", rotary_op),
            f"{_BLOCK}.attn_k.{kind}": (f"{_LAYER}.self_attn.k_proj.{kind}", rotary_op),
            f"{_BLOCK}.attn_v.{kind}": (f"{_LAYER}.self_attn.v_proj.{kind}", _keep),
            f"{_BLOCK}.attn_output.{kind}": (f"{_LAYER}.self_attn.o_proj.{kind}", _keep),
            f"{_BLOCK}.ffn_gate.{kind}": (f"{_LAYER}.mlp.gate_proj.{kind}", _keep),
            f"{_BLOCK}.ffn_up.{kind}": (f"{_LAYER}.mlp.up_proj.{kind}", _keep),
            f"{_BLOCK}.ffn_down.{kind}": (f"{_LAYER}.mlp.down_proj.{kind}", _keep),
        }
    return names


def _gpt2_tensors() -> _Names:
    layer = "transformer.h.{layer}"
    names: _Names = {
        "token_embd.weight": ("transformer.wte.weight", _keep),
        "position_embd.weight": ("transformer.wpe.weight", _keep),
        "output.weight": ("lm_head.weight", _keep),
    }
    for kind, op in (("weight", _to_conv1d), ("bias", _keep)):
        names |= {
            f"output_norm.{kind}": (f"transformer.ln_f.{kind}", _keep),
            f"{_BLOCK}.attn_norm.{kind}": (f"{layer}.ln_1.{kind}", _keep),
            f"{_BLOCK}.ffn_norm.{kind}": (f"{layer}.ln_2.{kind}", _keep),
            f"{_BLOCK}.attn_qkv.{kind}": (f"{layer}.attn.c_attn.{kind}", op),
            f"{_BLOCK}.attn_output.{kind}": (f"{layer}.attn.c_proj.{kind}", op),
            f"{_BLOCK}.ffn_up.{kind}": (f"{layer}.mlp.c_fc.{kind}", op),
            f"{_BLOCK}.ffn_down.{kind}": (f"{layer}.mlp.c_proj.{kind}", op),
        }
    return names


_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Metadata

_LLAMA_ATTRIBUTES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_GPT2_ATTRIBUTES = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_GEMMA2_ATTRIBUTES = _LLAMA_ATTRIBUTES | {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA3_ATTRIBUTES = _LLAMA_ATTRIBUTES | {
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_RMS, _WINDOW = "attention.layer_norm_rms_epsilon", "attention.sliding_window"

ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama",
            model_type="llama",
            tensors=_llama_tensors(rotary_op=_restore_halves, norms=_PRE_NORMS),
            attributes=_LLAMA_ATTRIBUTES,
            needed=(_RMS,),
            optional_biases=True,
            reads_rope_factors=True,
        ),
        Architecture(
            name="qwen2",
            model_type="qwen2",
            tensors=_llama_tensors(norms=_PRE_NORMS),
            attributes=_LLAMA_ATTRIBUTES,
            needed=(_RMS,),
        ),
        Architecture(
            name="qwen3",
            model_type="qwen3",
            tensors=_llama_tensors(norms=_PRE_NORMS | _QK_NORMS),
            attributes=_LLAMA_ATTRIBUTES,
            needed=(_RMS,),
            optional_biases=True,
        ),
        Architecture(
            name="gemma2",
            model_type="gemma2",
            tensors=_llama_tensors(norm_op=_subtract_one, norms=_SANDWICH),
            attributes=_GEMMA2_ATTRIBUTES,
            needed=(_RMS, _WINDOW),
            harmless={"attention.sliding_window_pattern": (2,)},
        ),
        Architecture(
            name="gemma3",
            model_type="gemma3_text",
            tensors=_llama_tensors(norm_op=_subtract_one, norms=_SANDWICH | _QK_NORMS),
            attributes=_GEMMA3_ATTRIBUTES,
            needed=(_RMS, _WINDOW),
            harmless={"attention.sliding_window_pattern": (6,)},
        ),
        Architecture(
            name="gpt2",
            model_type="gpt2",
            tensors=_gpt2_tensors(),
            attributes=_GPT2_ATTRIBUTES,
            needed=("attention.layer_norm_epsilon",),
        ),
    )
}
_HARMLESS: Mapping[str, tuple[Any, ...] | None] = {
    "vocab_size": None,  # the embedding says it
    "rope.scaling.finetuned": None,  # of the training
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
}


def hf_config(
    fields: Mapping[str, Any], architecture: Architecture, rope_factors: Any, described_as: str
) -> dict[str, Any]:
    """Hugging Face's configuration as far as the metadata give it.

    Args:
        rope_factors: the values of the tensor ``rope_freqs.weight``, or None.

    Raises:
        UnsupportedModelError: metadata that the configuration cannot express, or that are missing.
    """
    prefix = f"{architecture.name}."
    left = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    for key in architecture.needed:
        if key not in left:
            raise UnsupportedModelError(f"{described_as}: the metadata lack {prefix}{key}")
    config: dict[str, Any] = {"model_type": architecture.model_type}
    for key, attribute in architecture.attributes.items():
        if key in left:
            config[attribute] = _plain(left.pop(key))
    rotated, value_width = left.pop("rope.dimension_count", None), left.pop("attention.value_length", None)
    if architecture.name != "gpt2":
        config.setdefault("rope_theta", 10_000.0)  # llama.cpp's default, whatever the architecture's
        config |= _rope_scaling(left)
        if {"hidden_size", "num_attention_heads"} <= set(config):
            d_head = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
            for key, width in (("rope.dimension_count", rotated), ("attention.value_length", value_width)):
                if width not in (None, d_head):
                    left[key] = width
            if architecture.name in ("gemma2", "gemma3"):
                config["query_pre_attn_scalar"] = _gemma_scale(architecture.name, config)
    for key, value in left.items():
        allowed = {**_HARMLESS, **architecture.harmless}.get(key, ())
        if allowed is not None and value not in allowed:
            raise UnsupportedModelError(f"{described_as}: {prefix}{key} = {value!r} is not supported")
    if config.get("final_logit_softcapping") == 0:
        config["final_logit_softcapping"] = None
    if rope_factors is not None and architecture.reads_rope_factors:
        config |= _llama3_scaling(np.asarray(rope_factors, np.float64).ravel(), config, described_as)
    return config


_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _rope_scaling(left: dict[str, Any]) -> dict[str, Any]:
    """What ``rope.scaling`` says, taken out of ``left``; a factor without a type stays there, to be refused."""
    kind = left.get("rope.scaling.type")
    if kind not in ("none", "linear", "yarn") or (kind != "none" and "rope.scaling.factor" not in left):
        return {}
    said = {key: _plain(left.pop(f"rope.scaling.{key}", None)) for key in ("type", *_SCALING)}
    if kind == "none":
        return {}
    scaling = {attribute: said[key] for key, attribute in _SCALING.items() if kind == "yarn" or key == "factor"}
    return {"rope_scaling": {"rope_type": kind, **scaling}}


def _gemma_scale(name: str, config: Mapping[str, Any]) -> int:
    """The number whose root divides q·k, which no file holds: llama.cpp knows the models of 27B by their layers."""
    is_27b = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[name]
    return config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]


# Of all releases of Llama 3.1 and later; what differs is the factor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3_scaling(factors: np.ndarray, config: Mapping[str, Any], described_as: str) -> dict[str, Any]:
    """The scaling by which the converter came to a divisor for each frequency.

    Raises:
        UnsupportedModelError: it is none of those that were published.
    """
    factor = float(f"{factors.max():.6g}")
    d_head, base = config.get("head_dim"), config["rope_theta"]
    if len(factors) * 2 == d_head and factor > 1:
        wavelengths = 2 * math.pi * base ** (np.arange(0, d_head, 2) / d_head)
        turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
        kept = (turns - _LLAMA3["low_freq_factor"]) / (_LLAMA3["high_freq_factor"] - _LLAMA3["low_freq_factor"])
        kept = kept.clip(0, 1)
        if np.allclose(factors, 1 / ((1 - kept) / factor + kept), rtol=1e-4):
            return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **_LLAMA3}}
    raise UnsupportedModelError(
        f"{described_as}: {ROPE_FACTORS} is not supported: its divisors of the rotary frequencies are not those of a "
        "scaling that Llama 3.1 or later was published with"
    )


def _plain(value: Any) -> Any:
    """A float32 reads 9.999999747378752e-06 where 1e-5 was meant: the shortest decimal that rounds to it."""
    if not isinstance(value, float):
        return value
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value
