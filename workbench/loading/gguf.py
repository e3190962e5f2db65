"""GGUF files (llama.cpp's format): metadata and tensors brought back to Hugging Face's names, values dequantised.

From there a GGUF file takes the same way as any other checkpoint; nothing here knows our own parameter names.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import CorruptWeightsError, UnsupportedModelError, WorkbenchError
from workbench.loading.checkpoint import Checkpoint
from workbench.loading.gguf_tokenizer import build_tokenizer
from workbench.loading.huggingface import digest

_Op = Callable[[Tensor, int], Tensor]  # (tensor, number of heads) → tensor


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


def _llama_tensors(rotary_op: _Op) -> dict[str, tuple[str, _Op]]:
    layer, block = "model.layers.{layer}", "blk.{layer}"
    names: dict[str, tuple[str, _Op]] = {
        "token_embd.weight": ("model.embed_tokens.weight", _keep),
        "output_norm.weight": ("model.norm.weight", _keep),
        "output.weight": ("lm_head.weight", _keep),
        f"{block}.attn_norm.weight": (f"{layer}.input_layernorm.weight", _keep),
        f"{block}.ffn_norm.weight": (f"{layer}.post_attention_layernorm.weight", _keep),
    }
    for kind in ("weight", "bias"):
        names |= {
            f"{block}.attn_q.{kind}": (f"{layer}.self_attn.q_proj.{kind}", rotary_op),
            f"{block}.attn_k.{kind}": (f"{layer}.self_attn.k_proj.{kind}", rotary_op),
            f"{block}.attn_v.{kind}": (f"{layer}.self_attn.v_proj.{kind}", _keep),
            f"{block}.attn_output.{kind}": (f"{layer}.self_attn.o_proj.{kind}", _keep),
            f"{block}.ffn_gate.{kind}": (f"{layer}.mlp.gate_proj.{kind}", _keep),
            f"{block}.ffn_up.{kind}": (f"{layer}.mlp.up_proj.{kind}", _keep),
            f"{block}.ffn_down.{kind}": (f"{layer}.mlp.down_proj.{kind}", _keep),
        }
    return names


def _gpt2_tensors() -> dict[str, tuple[str, _Op]]:
    layer, block = "transformer.h.{layer}", "blk.{layer}"
    names: dict[str, tuple[str, _Op]] = {
        "token_embd.weight": ("transformer.wte.weight", _keep),
        "position_embd.weight": ("transformer.wpe.weight", _keep),
        "output.weight": ("lm_head.weight", _keep),
    }
    for kind, op in (("weight", _to_conv1d), ("bias", _keep)):
        names |= {
            f"output_norm.{kind}": (f"transformer.ln_f.{kind}", _keep),
            f"{block}.attn_norm.{kind}": (f"{layer}.ln_1.{kind}", _keep),
            f"{block}.ffn_norm.{kind}": (f"{layer}.ln_2.{kind}", _keep),
            f"{block}.attn_qkv.{kind}": (f"{layer}.attn.c_attn.{kind}", op),
            f"{block}.attn_output.{kind}": (f"{layer}.attn.c_proj.{kind}", op),
            f"{block}.ffn_up.{kind}": (f"{layer}.mlp.c_fc.{kind}", op),
            f"{block}.ffn_down.{kind}": (f"{layer}.mlp.c_proj.{kind}", op),
        }
    return names


_TENSORS: Mapping[str, Mapping[str, tuple[str, _Op]]] = {
    "llama": _llama_tensors(_restore_halves),
    "qwen2": _llama_tensors(_keep),
    "gpt2": _gpt2_tensors(),
}

# Metadata under the architecture's prefix → attribute of Hugging Face's configuration.
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
_ATTRIBUTES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA_ATTRIBUTES,
    "qwen2": _LLAMA_ATTRIBUTES,
    "gpt2": {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
}
_HARMLESS_METADATA: Mapping[str, tuple[Any, ...] | None] = {
    "vocab_size": None,  # the embedding says it
    "rope.scaling.type": ("none",),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
}


class GGUFTensors(Mapping[str, Tensor]):
    """The tensors of a GGUF file under Hugging Face's names; each is dequantised to float32 when it is asked for."""

    def __init__(self, reader: Any, architecture: str, n_heads: int, n_key_value_heads: int, described_as: str) -> None:
        self._heads = {"q_proj": n_heads, "k_proj": n_key_value_heads}
        self._described_as = described_as
        self._entries: dict[str, tuple[Any, _Op]] = {}
        for tensor in reader.tensors:
            layer = re.match(r"blk\.(\d+)\.", tensor.name)
            generic = tensor.name if layer is None else f"blk.{{layer}}.{tensor.name[layer.end() :]}"
            if generic not in _TENSORS[architecture]:
                raise UnsupportedModelError(
                    f"{described_as}: the tensor {tensor.name} is not supported in the architecture {architecture!r}"
                )
            name, op = _TENSORS[architecture][generic]
            self._entries[name.format(layer=layer and layer[1])] = tensor, op

    def __getitem__(self, name: str) -> Tensor:
        stored, op = self._entries[name]
        try:
            values = require_gguf().quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise UnsupportedModelError(f"{self._described_as}: {name} is quantised as {kind}, not supported") from None
        heads = next((count for part, count in self._heads.items() if part in name), 1)
        # A copy where the values are the file's own memory, which is read-only.
        tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
        try:
            return op(tensor, heads)
        except RuntimeError:  # torch's own words name sizes but no tensor
            raise CorruptWeightsError(
                f"{self._described_as}: {name} has shape {list(tensor.shape)}, which does not fit its {heads} heads; "
                "the file is damaged, download it again"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def stored_type(self) -> str:
        """How the weights are stored, by their share of the matrices, such as "Q4_1 GGUF, dequantised to float32"."""
        counts: Counter[str] = Counter()
        for tensor, _ in self._entries.values():
            if len(tensor.shape) > 1:  # norms and biases are kept in float32 whatever the quantisation
                counts[tensor.tensor_type.name] += int(tensor.n_elements)
        (main, _), *others = counts.most_common()
        shares = [f"{name} in {count / counts.total():.0%} of the weights" for name, count in others]
        verb = "read as" if set(counts) <= {"F32", "F16", "BF16"} else "dequantised to"
        mixture = f" ({', '.join(shares)})" if shares else ""
        return f"{main} GGUF{mixture}, {verb} float32"


def gguf_checkpoint(path: Path, *, tokenizer: Any = None) -> Checkpoint:
    """Opens a GGUF file.

    Raises:
        CorruptWeightsError: no GGUF file, or one that is truncated.
        UnsupportedModelError: an architecture, attribute, tensor or tokenizer that is not supported.
        WorkbenchError: the optional ``gguf`` package is not installed.
    """
    reader, fields = _open(path)
    architecture = str(fields.get("general.architecture"))
    if architecture not in _TENSORS:
        raise UnsupportedModelError(
            f"{path}: the GGUF architecture {architecture!r} is not supported; supported are {', '.join(_TENSORS)}"
        )
    if fields.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(f"{path} is one part of a split GGUF; merge it with llama.cpp's gguf-split first")
    n_heads = _count(fields, f"{architecture}.attention.head_count", path)
    n_key_value_heads = _count(fields, f"{architecture}.attention.head_count_kv", path, default=n_heads)
    _count(fields, f"{architecture}.embedding_length", path)
    config = _hf_config(fields, architecture, str(path))
    tensors = GGUFTensors(reader, architecture, n_heads, n_key_value_heads, str(path))
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise CorruptWeightsError(f"{path} has no token_embd.weight; the file is incomplete, download it again")
    config |= {"vocab_size": int(embedding.shape[-1]), "tie_word_embeddings": "lm_head.weight" not in tensors}
    if architecture == "llama":
        config["attention_bias"] = any(name.endswith("_proj.bias") for name in tensors)
    return Checkpoint(
        hf_config=config,
        tensors=tensors,
        tokenizer=build_tokenizer(fields, str(path)) if tokenizer is None else tokenizer,
        model_name=path.stem,
        revision=digest([path]),
        weights_description=tensors.stored_type(),
        described_as=str(path),
    )


def _count(fields: Mapping[str, Any], key: str, path: Path, *, default: int | None = None) -> int:
    """A number of the metadata that others are computed from before the configuration is checked as a whole."""
    count = fields.get(key, default)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UnsupportedModelError(f"{path}: {key} is {count!r}, expected one whole number from 1 up")
    return count


def _open(path: Path) -> tuple[Any, dict[str, Any]]:
    """The file's reader and its metadata."""
    gguf = require_gguf()
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    # The reader checks nothing: what it meets first in a damaged file decides which of these it raises.
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, OSError) as error:
        if isinstance(error, PermissionError):
            raise CorruptWeightsError(f"{path} cannot be read: permission denied") from None
        raise CorruptWeightsError(f"{path} is truncated or no GGUF file ({error}); download it again") from None
    if reader.byte_order != "I":
        raise UnsupportedModelError(f"{path} has the other byte order; convert it with gguf's convert-endian")
    return reader, fields


def _hf_config(fields: Mapping[str, Any], architecture: str, described_as: str) -> dict[str, Any]:
    prefix = f"{architecture}."
    left = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
    config: dict[str, Any] = {"model_type": architecture}
    for key, attribute in _ATTRIBUTES[architecture].items():
        if key in left:
            value = left.pop(key)
            config[attribute] = _shortest_decimal(value) if isinstance(value, float) else value
    rotated, value_width = left.pop("rope.dimension_count", None), left.pop("attention.value_length", None)
    if architecture != "gpt2" and {"hidden_size", "num_attention_heads"} <= set(config):
        d_head = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        for key, width in (("rope.dimension_count", rotated), ("attention.value_length", value_width)):
            if width not in (None, d_head):
                left[key] = width
    for key, value in left.items():
        allowed = _HARMLESS_METADATA.get(key, ())
        if allowed is not None and value not in allowed:
            raise UnsupportedModelError(f"{described_as}: {prefix}{key} = {value!r} is not supported")
    return config


def _shortest_decimal(value: float) -> float:
    """A float32 reads 9.999999747378752e-06 where 1e-5 was meant: the shortest decimal that rounds to it."""
    narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


@functools.cache
def require_gguf() -> ModuleType:
    """The optional ``gguf`` package.

    Raises:
        WorkbenchError: it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise WorkbenchError("GGUF files need the gguf package: pip install 'attention-workbench[gguf]'") from None
    return gguf
