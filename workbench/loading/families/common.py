"""What every family shares: the bookkeeping that accounts for each attribute of a Hugging Face configuration."""

from __future__ import annotations

import dataclasses
import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.config import ActivationName, TransformerConfig
from workbench.errors import UnsupportedModelError
from workbench.loading.weights import WeightRule

ANY = None  # in a table of harmless attributes: whatever its value
MAX_SIZE = 2**31 - 1  # of any count; what lies beyond is a damaged file, not a model

Harmless = Mapping[str, Collection[Any] | None]

_REQUIRED = object()

# Attributes of any Hugging Face configuration that do not enter the forward pass of an evaluated causal language
# model: provenance, generation defaults, training settings, classification heads.
_NO_EFFECT = (
    "architectures", "_name_or_path", "_commit_hash", "transformers_version", "transformers.js_config",
    "tokenizer_class", "dtype", "torch_dtype", "torchscript", "use_bfloat16", "use_cache", "gradient_checkpointing",
    "initializer_range", "return_dict", "output_attentions", "output_hidden_states", "output_scores",
    "return_dict_in_generate", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation",
    "chunk_size_feed_forward", "is_decoder", "id2label", "label2id", "num_labels", "_num_labels", "problem_type",
    "finetuning_task", "task_specific_params", "tf_legacy_loss", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "decoder_start_token_id", "prefix", "bad_words_ids", "forced_bos_token_id",
    "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "max_length", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "num_return_sequences", "remove_invalid_values", "exponential_decay_length_penalty", "unsloth_version",
    "unsloth_fixed",
)  # fmt: skip

# A tuple limits the values to those that switch the feature off.
_HARMLESS_EVERYWHERE: Harmless = {
    **dict.fromkeys(_NO_EFFECT, ANY),
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
}

_ADVICE = {"quantization_config": "load unquantised weights, or a GGUF file, whose values are dequantised"}

ACTIVATIONS: Mapping[str, ActivationName] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table of supported architectures.

    Attributes:
        architectures: Hugging Face ``model_type`` -> the classes that carry the language-model head, the usual first.
        base_models: ``model_type`` -> the class without that head, whose models give no logits; where it is supported.
        map_config: ``(hf_config, n_ctx) -> TransformerConfig`` of the headed model; refuses what the model cannot
            express.
        weight_rules: from Hugging Face tensor names, without ``base_prefix``, to ours.
        base_prefix: what the headed model puts before the names of the base model; checkpoints come with and without.
        harmless_tensors: name patterns of tensors that hold no parameter, or one of a head that the model leaves out.
        tied: (output, input) embedding names, which must be equal where the configuration ties them.
        unties: the configuration says nothing of ties: an output embedding that differs from the input's counts.
        copies: name -> the tensor that it repeats wherever both are there.
        computed: name -> what a tensor that the model computes itself must hold, from its shape.
    """

    architectures: Mapping[str, str | tuple[str, ...]]
    map_config: Callable[[Mapping[str, Any], int | None], TransformerConfig]
    weight_rules: tuple[WeightRule, ...]
    base_prefix: str
    tied: tuple[str, str]
    base_models: Mapping[str, str] = field(default_factory=dict)
    harmless_tensors: tuple[str, ...] = ()
    unties: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, Callable[[torch.Size], Tensor]] = field(default_factory=dict)

    def headed(self, model_type: str) -> tuple[str, ...]:
        """The classes of a model type that carry the language-model head."""
        classes = self.architectures[model_type]
        return (classes,) if isinstance(classes, str) else classes

    def configure(self, hf_config: Mapping[str, Any], n_ctx: int | None) -> TransformerConfig:
        """``map_config``, without the head where the checkpoint is one of a base model."""
        config = self.map_config(hf_config, n_ctx)
        base_model = self.base_models.get(str(hf_config["model_type"]))
        if base_model is None or base_model not in named_architectures(hf_config):
            return config
        headless: dict[str, Any] = {
            "use_unembed": False,
            "use_unembed_bias": False,
            "use_mlm_head": False,
            "logit_scale": 1.0,
        }
        return dataclasses.replace(config, **headless, tie_word_embeddings=False)


def named_architectures(hf_config: Mapping[str, Any]) -> list[Any]:
    """The classes that a Hugging Face configuration says it belongs to."""
    architectures = hf_config.get("architectures") or []
    return architectures if isinstance(architectures, list) else [architectures]


class ConfigAttributes:
    """A Hugging Face configuration of which every attribute must be taken, or be harmless, before ``finish``."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self.family = str(hf_config["model_type"])
        self._left = {name: value for name, value in hf_config.items() if name != "model_type"}

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The attribute's value, which counts as handled from here on.

        Raises:
            UnsupportedModelError: it is absent and has no default.
        """
        if name in self._left:
            return self._left.pop(name)
        if default is _REQUIRED:
            raise UnsupportedModelError(f"{self.family}: the configuration lacks {name}; add it to config.json")
        return default

    def take_size(self, name: str, default: Any = _REQUIRED) -> Any:
        """A count, which is a whole number from 1 up; an optional one may be null."""
        size = self.take(name, default)
        absent = size is None and default is None
        if not absent and (isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= MAX_SIZE):
            raise self.refusal(name, size, f"expected a whole number from 1 to {MAX_SIZE:,}")
        return size

    def take_token(self, name: str, default: Any = _REQUIRED) -> int:
        """The id of a token, from 0 up."""
        token = self.take(name, default)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_SIZE:
            raise self.refusal(name, token, "expected the id of a token")
        return token

    def take_size_called(self, *names: str) -> Any:
        """A count that has gone by several names; those that are there must agree."""
        given = {name: self.take_size(name, None) for name in names}
        sizes = {name: size for name, size in given.items() if size is not None}
        if not sizes:
            return self.take(names[0])  # which it lacks
        (first, size), *others = sizes.items()
        for name, other in others:
            if other != size:
                raise self.refusal(name, other, f"it contradicts {first} = {size}")
        return size

    def take_number(self, name: str, default: float) -> float:
        """A positive number."""
        return self.checked_number(name, self.take(name, default))

    def checked_number(self, name: str, number: Any) -> float:
        """A value as a positive number; ``name`` says where it stood."""
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= sys.float_info.max:
            raise self.refusal(name, number, "expected a positive number")
        return number

    def take_switch(self, name: str, default: bool) -> bool:
        """True or false."""
        switch = self.take(name, default)
        if not isinstance(switch, bool):
            raise self.refusal(name, switch, "expected true or false")
        return switch

    def take_activation(self, name: str, default: str) -> ActivationName:
        """An activation function under our name."""
        activation = self.take(name, default)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise self.refusal(name, activation, f"supported are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[activation]

    def head_width(self, d_model: int, name: str, n_heads: int) -> int:
        """The dimensions of a head where all heads together are as wide as the model; ``name`` is the heads'."""
        if d_model % n_heads:
            raise self.refusal(name, n_heads, f"it must divide the model's {d_model} dimensions")
        return d_model // n_heads

    def refusal(self, name: str, value: Any, advice: str) -> UnsupportedModelError:
        """The error for an attribute that the model cannot express."""
        return UnsupportedModelError(f"{self.family}: {name} = {reprlib.repr(value)} is not supported; {advice}")

    def finish(self, harmless: Harmless) -> None:
        """Refuse whatever was neither taken nor is harmless.

        Raises:
            UnsupportedModelError: naming the first such attribute and its value.
        """
        table = {**_HARMLESS_EVERYWHERE, **harmless}
        for name, value in self._left.items():
            if name not in table:
                advice = _ADVICE.get(name, "if it leaves the computation as it is, remove it from the configuration")
                raise self.refusal(name, value, advice)
            allowed = table[name]
            if allowed is not ANY and value not in allowed:
                raise self.refusal(name, value, f"supported is {' or '.join(map(repr, allowed))}")


def learned_context(n_ctx: int | None, n_positions: int) -> int:
    """The context length of a model whose positions are rows of a table.

    Raises:
        ValueError: ``n_ctx`` exceeds them.
    """
    if n_ctx is not None and n_ctx > n_positions:
        raise ValueError(f"n_ctx = {n_ctx} exceeds the {n_positions} positions that this model has learned")
    return n_ctx or n_positions
