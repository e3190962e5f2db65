"""GGUF files (llama.cpp's format): metadata and tensors brought back to Hugging Face's names, values dequantised.

From there a GGUF file takes the same way as any other checkpoint; nothing here knows our own parameter names.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import CorruptWeightsError, UnsupportedModelError, WorkbenchError
from workbench.loading.checkpoint import Checkpoint
from workbench.loading.gguf_architectures import ARCHITECTURES, ROPE_FACTORS, Architecture, Op, hf_config
from workbench.loading.gguf_file import GGUFFile, StoredTensor
from workbench.loading.gguf_tokenizer import build_tokenizer
from workbench.loading.huggingface import digest


class GGUFTensors(Mapping[str, Tensor]):
    """The tensors of a GGUF file under Hugging Face's names; each is dequantised to float32 when it is asked for."""

    def __init__(
        self, file: GGUFFile, architecture: Architecture, n_heads: int, n_key_value_heads: int, described_as: str
    ) -> None:
        self._file = file
        self._heads = {"q_proj": n_heads, "k_proj": n_key_value_heads}
        self._described_as = described_as
        self._entries: dict[str, tuple[StoredTensor, Op]] = {}
        for tensor in file.tensors.values():
            if tensor.name == ROPE_FACTORS and architecture.reads_rope_factors:
                continue  # the configuration says what they say
            layer = re.match(r"blk\.(\d+)\.", tensor.name)
            generic = tensor.name if layer is None else f"blk.{{layer}}.{tensor.name[layer.end() :]}"
            if generic not in architecture.tensors:
                raise UnsupportedModelError(
                    f"{described_as}: the tensor {tensor.name} is not supported in the architecture "
                    f"{architecture.name!r}"
                )
            name, op = architecture.tensors[generic]
            self._entries[name.format(layer=layer and layer[1])] = tensor, op

    def __getitem__(self, name: str) -> Tensor:
        stored, op = self._entries[name]
        values = _dequantised(self._file, stored, self._described_as)
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
                counts[_kind(tensor).name] += tensor.size
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
    file = _open(path)
    fields = file.fields
    name = str(fields.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: the GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    if fields.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(f"{path} is one part of a split GGUF; merge it with llama.cpp's gguf-split first")
    n_heads = _count(fields, f"{name}.attention.head_count", path)
    n_key_value_heads = _count(fields, f"{name}.attention.head_count_kv", path, default=n_heads)
    _count(fields, f"{name}.embedding_length", path)
    scaled = file.tensors.get(ROPE_FACTORS)
    rope_factors = None if scaled is None else _dequantised(file, scaled, str(path))
    config = hf_config(fields, architecture, rope_factors, str(path))
    tensors = GGUFTensors(file, architecture, n_heads, n_key_value_heads, str(path))
    if "token_embd.weight" not in file.tensors:
        raise CorruptWeightsError(f"{path} has no token_embd.weight; the file is incomplete, download it again")
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    if architecture.optional_biases:
        config["attention_bias"] = any(".self_attn." in name and name.endswith(".bias") for name in tensors)
        config["mlp_bias"] = any(".mlp." in name and name.endswith(".bias") for name in tensors)
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


def _open(path: Path) -> GGUFFile:
    """The file, every tensor of which is there."""
    require_gguf()
    try:
        file = GGUFFile(path)
        for tensor in file.tensors.values():
            file.data(tensor, _block(tensor))
        file.check_places({name: _block(tensor) for name, tensor in file.tensors.items()})
    except NotImplementedError:
        raise UnsupportedModelError(f"{path} has the other byte order; convert it with gguf's convert-endian") from None
    except PermissionError:
        raise CorruptWeightsError(f"{path} cannot be read: permission denied") from None
    except (ValueError, OSError) as error:
        raise CorruptWeightsError(f"{path} is truncated or no GGUF file ({error}); download it again") from None
    return file


def _kind(tensor: StoredTensor) -> Any:
    return require_gguf().GGMLQuantizationType(tensor.kind)


def _block(tensor: StoredTensor) -> tuple[int, int]:
    return require_gguf().GGML_QUANT_SIZES[_kind(tensor)]


def _dequantised(file: GGUFFile, tensor: StoredTensor, described_as: str) -> np.ndarray:
    """float32, of the tensor's shape."""
    stored = file.data(tensor, _block(tensor))
    # Blocks lie one behind another, so rows may be joined. gguf works on 16 at a time, which alone are few.
    n_joined = math.gcd(math.prod(tensor.shape[:-1]), 64)
    try:
        values = require_gguf().quants.dequantize(stored.reshape(-1, n_joined * stored.shape[-1]), _kind(tensor))
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{described_as}: {tensor.name} is quantised as {_kind(tensor).name}, not supported"
        ) from None
    return values.reshape(tensor.shape)


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
