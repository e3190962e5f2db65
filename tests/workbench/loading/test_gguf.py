"""GGUF files, written as llama.cpp's converter writes them, come back as the model they were made from."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from workbench import HookedTransformer
from workbench.errors import CorruptWeightsError, UnsupportedModelError, WorkbenchError
from workbench.loading import gguf as loading_gguf

Write = Callable[..., dict[str, torch.Tensor]]
Make = Callable[..., PreTrainedModel]

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 70}
CASES = ["llama", "llama-biases-tied-mqa", "qwen2", "qwen2-tied", "gpt2"]


def _assert_same(model: HookedTransformer, reference: HookedTransformer) -> None:
    left, right = model.state_dict(), reference.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    provenance = ("model_name", "revision", "weights_description")
    assert {k: v for k, v in model.cfg.to_dict().items() if k not in provenance} == {
        k: v for k, v in reference.cfg.to_dict().items() if k not in provenance
    }


@pytest.mark.parametrize("case", CASES)
def test_file_equals_the_model_it_was_made_from(
    case: str, make_hf_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    """Bit for bit, configuration included; for Llama through the permuted rows of q and k."""
    # GGUF does not store the activation: llama.cpp takes the architecture's own.
    hf = make_hf_model(case, **({"hidden_act": "silu"} if case == "llama-biases-tied-mqa" else {}))
    write_gguf(tmp_path / "tiny.gguf", hf)
    model = HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")
    expected = HookedTransformer.from_pretrained(hf)
    _assert_same(model, expected)
    assert model.cfg.model_name == "tiny"
    assert model.cfg.weights_description == "F32 GGUF, read as float32"


def test_quantised_values_are_those_of_the_file(make_hf_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    hf = make_hf_model("llama", **WIDE)
    path = tmp_path / "tiny.gguf"
    stored = write_gguf(path, hf, quantised={"embed_tokens.weight": Kind.Q8_0, "_proj.weight": Kind.Q4_1})
    hf.load_state_dict(stored)
    model = HookedTransformer.from_pretrained(path)
    # llama.cpp permutes before it quantises, so within rows, where the blocks lie, nothing moves.
    _assert_same(model, HookedTransformer.from_pretrained(hf))
    sizes = {name: tensor.numel() for name, tensor in stored.items() if tensor.dim() > 1}
    share = {kind: sum(n for name, n in sizes.items() if name.endswith(end)) / sum(sizes.values())
             for kind, end in (("Q8_0", "embed_tokens.weight"), ("F32", "lm_head.weight"))}  # fmt: skip
    text = model.cfg.weights_description
    assert text.startswith("Q4_1 GGUF (") and text.endswith(" of the weights), dequantised to float32")
    assert all(f"{kind} in {part:.0%} of the weights" in text for kind, part in share.items())


def test_cast_is_stated(make_hf_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"))
    model = HookedTransformer.from_pretrained(tmp_path / "tiny.gguf", dtype=torch.bfloat16)
    assert model.cfg.weights_description == "F32 GGUF, read as float32, cast to bfloat16"
    assert model.cfg.revision is not None and model.cfg.revision.startswith("sha256:")


@pytest.fixture
def tiny_gguf(make_hf_model: Make, write_gguf: Write, tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"))
    return tmp_path / "tiny.gguf"


def test_file_truncated_anywhere(tiny_gguf: Path, tmp_path: Path) -> None:
    whole, reader, cut = tiny_gguf.read_bytes(), gguf.GGUFReader(tiny_gguf), tmp_path / "cut.gguf"
    begin, end = reader.data_offset, max(tensor.data_offset + tensor.n_bytes for tensor in reader.tensors)
    for length in (*range(0, begin, 7), *range(begin, end, 5003), end - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptWeightsError, match=r"cut\.gguf is truncated or no GGUF file.*download it again"):
            loading_gguf.gguf_checkpoint(cut)


ARRAY, ARRAY_OF_ONE_ARRAY = struct.pack("<I", 9), struct.pack("<IQ", 9, 1)
NESTED = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"a" + ARRAY + ARRAY_OF_ONE_ARRAY * 3000


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 a zip file", b"GGUF" + b"\xff" * 60, NESTED],
    ids=["empty", "zip", "header of ones", "nested without end"],
)
def test_file_of_another_kind(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(content)
    with pytest.raises(CorruptWeightsError, match=r"other\.bin is truncated or no GGUF file"):
        HookedTransformer.from_pretrained(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 8.0),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 16),
        ("llama.rope.dimension_count", 4),
        ("llama.attention.value_length", 6),
        ("llama.attention.scale", 0.5),
        ("llama.logit_scale", 2.0),
    ],
)
def test_metadata_that_would_change_the_numbers(
    key: str, value: Any, make_hf_model: Make, write_gguf: Write, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"), metadata={key: value})
    with pytest.raises(UnsupportedModelError, match=f"{key} = {value!r} is not supported"):
        HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")


def test_architecture_that_is_not_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "rwkv.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match="'rwkv6' is not supported; supported are llama, qwen2, qwen3, gemma2, gemma3, gpt2"
    ):
        HookedTransformer.from_pretrained(tmp_path / "rwkv.gguf")


def test_one_part_of_a_split_file(make_hf_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"), metadata={"split.count": 3})
    with pytest.raises(UnsupportedModelError, match="one part of a split GGUF; merge it"):
        HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")


def test_without_the_optional_package(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    loading_gguf.require_gguf.cache_clear()
    with pytest.raises(WorkbenchError, match=r"pip install 'attention-workbench\[gguf\]'"):
        HookedTransformer.from_pretrained(tiny_gguf)


@pytest.mark.parametrize("key", ["attention.head_count", "attention.head_count_kv", "embedding_length"])
@pytest.mark.parametrize("value", [0, "x", True])
def test_counts_that_are_none(key: str, value: Any, make_hf_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"), metadata={f"llama.{key}": value})
    with pytest.raises(UnsupportedModelError, match=f"llama.{key} is {value!r}, expected one whole number from 1 up"):
        HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")


def test_more_layers_than_the_file_holds(make_hf_model: Make, write_gguf: Write, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_hf_model("llama"), metadata={"llama.block_count": 10**9})
    with pytest.raises(CorruptWeightsError, match=r"1,000,000,000 layers, but only \d+ tensors"):
        HookedTransformer.from_pretrained(tmp_path / "tiny.gguf")
