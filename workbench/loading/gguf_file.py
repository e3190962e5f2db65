"""The container format of GGUF: metadata as Python values, tensors as memory-mapped bytes.

The ``gguf`` package reads it too, but takes seconds for the tokens of a vocabulary, each of which it makes an array.

Source: the specification of GGUF, versions 2 and 3 (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in the file.

    Attributes:
        shape: as numpy has it, the last axis contiguous.
        kind: the number of its type, ``gguf.GGMLQuantizationType``.
        offset: of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class GGUFFile:
    """A GGUF file's metadata and its tensors' places.

    Raises:
        ValueError: no GGUF file of version 2 or 3, or one that ends too early or contradicts itself.
        NotImplementedError: the other byte order.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)
        self._buffer = self._bytes.data
        self._position = 0
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                raise NotImplementedError("the other byte order")
            raise ValueError(f"its version is {version}")
        n_tensors, n_fields = self._number("Q"), self._number("Q")
        self.fields: dict[str, Any] = {}
        for _ in range(n_fields):
            key = self._string()
            if key in self.fields:
                raise ValueError(f"it states {key} twice")
            self.fields[key] = self._value(self._number("I"))
        headers = [(self._string(), self._shape(), self._number("I"), self._number("Q")) for _ in range(n_tensors)]
        alignment = self.fields.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise ValueError(f"its alignment is {alignment!r}, no multiple of 8")
        self._alignment = alignment
        start = self._start = math.ceil(self._position / alignment) * alignment
        self.tensors = {name: StoredTensor(name, shape, kind, start + at) for name, shape, kind, at in headers}
        if len(self.tensors) != n_tensors:
            raise ValueError("two tensors have the same name")

    def check_places(self, blocks: Mapping[str, tuple[int, int]]) -> None:
        """Checks that the tensors lie one behind the other, as the format demands, each padded to the alignment.

        Args:
            blocks: elements and bytes of one block of each tensor's type.

        Raises:
            ValueError: the first tensor that lies elsewhere.
        """
        expected = self._start
        for tensor in self.tensors.values():
            if tensor.offset != expected:
                raise ValueError(f"{tensor.name} begins at byte {tensor.offset:,} instead of {expected:,}")
            elements, n_bytes = blocks[tensor.name]
            end = tensor.offset + tensor.size // elements * n_bytes
            expected = math.ceil(end / self._alignment) * self._alignment

    def data(self, tensor: StoredTensor, block: tuple[int, int]) -> np.ndarray:
        """The bytes of a tensor, [*shape but the last axis, bytes of a row], which are the file's own memory.

        Args:
            block: elements and bytes of one block of its type.

        Raises:
            ValueError: the file ends before the tensor, or rows are no whole number of blocks.
        """
        *rows, width = tensor.shape
        if width % block[0]:
            raise ValueError(f"{tensor.name} has rows of {width}, no multiple of {block[0]}")
        shape = (*rows, width // block[0] * block[1])
        end = tensor.offset + math.prod(shape)
        if end > len(self._bytes):
            raise ValueError(f"{tensor.name} ends at byte {end:,} of {len(self._bytes):,}")
        return self._bytes[tensor.offset : end].reshape(shape)

    def _take(self, length: int) -> memoryview:
        end = self._position + length
        if end > len(self._buffer):
            raise ValueError(f"it ends at byte {len(self._buffer):,}, within its header")
        piece = self._buffer[self._position : end]
        self._position = end
        return piece

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _shape(self) -> tuple[int, ...]:
        n_dimensions = self._number("I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"a tensor has {n_dimensions} dimensions")
        axes = tuple(self._number("Q") for _ in range(n_dimensions))
        if 0 in axes:
            raise ValueError("a tensor has an axis of length 0")
        return axes[::-1]  # the file begins with the last axis

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"a value has the type {kind}")
        item, length = self._number("I"), self._number("Q")
        if item == _STRING:
            return [self._string() for _ in range(length)]
        if item not in _SCALARS:
            raise ValueError(f"an array holds values of the type {item}")
        values = np.frombuffer(self._take(length * struct.calcsize("<" + _SCALARS[item])), dtype="<" + _SCALARS[item])
        return values.tolist()
