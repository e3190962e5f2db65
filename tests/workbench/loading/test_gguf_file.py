"""The container format: what gguf writes comes back, and no damage raises anything but the errors that are stated."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workbench.loading.gguf_file import GGUFFile

FIELDS = {
    "uint8": 200, "int8": -3, "uint16": 60_000, "int16": -30_000, "uint32": 4_000_000_000, "int32": -7,
    "float32": 0.5, "bool": True, "string": "a ▁ 日本", "uint64": 2**63, "int64": -(2**40), "float64": 1e-300,
}  # fmt: skip
ARRAYS = {"tokens": ["<s>", "", "é"], "scores": [-1.5, 0.25], "types": [1, -2, 3], "flags": [True, False]}
KIND = gguf.GGMLQuantizationType


def _write(path: Path, alignment: int | None = None) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for kind, value in FIELDS.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    for name, values in ARRAYS.items():
        writer.add_array(f"x.{name}", values)
    generator = np.random.default_rng(0)
    tensors = {"a": generator.normal(size=(3, 5)), "b": generator.normal(size=(7,)), "c": np.ones((2, 3, 4))}
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    blocks = gguf.quants.quantize(np.ones((4, 64), np.float32), KIND.Q8_0)
    writer.add_tensor("q", blocks, raw_dtype=KIND.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors | {"q": blocks}


@pytest.mark.parametrize("alignment", [None, 64])
def test_what_was_written_comes_back(alignment: int | None, tmp_path: Path) -> None:
    expected = _write(tmp_path / "x.gguf", alignment)
    file = GGUFFile(tmp_path / "x.gguf")
    assert {key.removeprefix("x."): value for key, value in file.fields.items() if key[:2] == "x."} == FIELDS | ARRAYS
    for key, value in (FIELDS | ARRAYS).items():
        assert type(file.fields[f"x.{key}"]) is type(value)
    assert file.tensors.keys() == expected.keys()
    for name, tensor in file.tensors.items():
        data = file.data(tensor, gguf.GGML_QUANT_SIZES[KIND(tensor.kind)])
        assert np.array_equal(data if name == "q" else data.view(np.float32), expected[name])
        assert not data.flags.owndata and not data.flags.writeable  # the file's own memory
    assert file.tensors["q"].shape == (4, 64) and file.tensors["q"].size == 256
    assert file.tensors["c"].shape == (2, 3, 4)


def test_files_of_other_versions_and_byte_orders(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    _write(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    with pytest.raises(ValueError, match="its version is 1"):
        GGUFFile(path)
    path.write_bytes(content[:4] + struct.pack(">I", 3) + content[8:])
    with pytest.raises(NotImplementedError, match="the other byte order"):
        GGUFFile(path)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _tensor(name: str, *axes: int) -> bytes:
    return _string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, 0, 0)


@pytest.mark.parametrize(
    ("n_tensors", "n_fields", "body", "message"),
    [
        (0, 2, _field("a", 7, b"\1") * 2, "states a twice"),
        (0, 1, _field("a", 13, b"\1"), "a value has the type 13"),
        (0, 1, _field("a", 9, struct.pack("<IQ", 9, 1)), "an array holds values of the type 9"),
        (0, 1, _field("a", 9, struct.pack("<IQ", 8, 2**60)), "within its header"),
        (0, 1, _field("a", 9, struct.pack("<IQ", 10, 2**62)), "within its header"),
        (0, 1, _field("general.alignment", 4, struct.pack("<I", 0)), "its alignment is 0"),
        (2, 0, _tensor("a", 1) * 2, "two tensors have the same name"),
        (1, 0, _tensor("a"), "a tensor has 0 dimensions"),
        (1, 0, _tensor("a", 1, 1, 1, 1, 1), "a tensor has 5 dimensions"),
        (1, 0, _tensor("a", 3, 0), "a tensor has an axis of length 0"),
        (2**60, 0, b"", "within its header"),
    ],
)
def test_contradictions_are_named(n_tensors: int, n_fields: int, body: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_fields) + body)
    with pytest.raises(ValueError, match=message):
        GGUFFile(path)


def test_tensors_beyond_the_end(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + _tensor("a", 2**40, 2**40))
    file = GGUFFile(path)
    with pytest.raises(ValueError, match=r"a ends at byte .* of \d+"):
        file.data(file.tensors["a"], (1, 4))
    with pytest.raises(ValueError, match=f"a has rows of {2**40}, no multiple of 33"):
        file.data(file.tensors["a"], (33, 1))


@pytest.mark.parametrize("shift", [32, -32, 1])
def test_tensors_lie_one_behind_the_other(shift: int, tmp_path: Path) -> None:
    """An offset that damage has moved would let the tensor read its neighbour's values."""
    _write(tmp_path / "x.gguf")
    file = GGUFFile(tmp_path / "x.gguf")
    blocks = {name: gguf.GGML_QUANT_SIZES[KIND(tensor.kind)] for name, tensor in file.tensors.items()}
    file.check_places(blocks)
    moved = file.tensors["b"]
    file.tensors["b"] = dataclasses.replace(moved, offset=moved.offset + shift)
    with pytest.raises(ValueError, match=f"b begins at byte .* instead of {moved.offset:,}"):
        file.check_places(blocks)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damage_raises_nothing_else(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    if not path.exists():
        _write(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 700))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        file = GGUFFile(damaged)
        for tensor in file.tensors.values():
            assert math.prod(file.data(tensor, (1, 4)).shape) == 4 * tensor.size
    except (ValueError, NotImplementedError):
        pass
