"""The table of weight rules: nothing is left over on either side, nothing has a wrong shape, nothing is shared."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workbench.config import TransformerConfig
from workbench.errors import CorruptWeightsError
from workbench.loading import weights
from workbench.loading.weights import WeightRule, convert_weights

CFG = TransformerConfig(n_layers=2, d_model=6, n_heads=2, d_head=5, d_mlp=7, d_vocab=3, n_ctx=4)
RULES = (
    WeightRule("embed", "E", weights.keep),
    WeightRule("h.{layer}.qkv", ("b.{layer}.Q", "b.{layer}.K", "b.{layer}.V"), weights.split_fused_heads),
)
EXPECTED = {"E": torch.Size([3, 6])} | {f"b.{i}.{x}": torch.Size([2, 6, 5]) for i in range(2) for x in "QKV"}


def _source() -> dict[str, Tensor]:
    return {"embed": torch.randn(3, 6), "h.0.qkv": torch.randn(6, 30), "h.1.qkv": torch.randn(6, 30)}


def test_every_target_is_filled_and_owns_its_memory() -> None:
    source = _source()
    state = convert_weights(source, RULES, CFG, EXPECTED)
    assert state.keys() == EXPECTED.keys()
    assert torch.equal(state["b.1.K"][1], source["h.1.qkv"][:, 15:20])
    memory = {tensor.untyped_storage().data_ptr() for tensor in source.values()}
    own = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert not memory & own and len(own) == len(state)
    assert sum(tensor.untyped_storage().nbytes() for tensor in state.values()) == 4 * (18 + 2 * 180)


def test_tensors_are_read_once_and_released_before_the_next() -> None:
    """So that beside the result never more than one of them is in memory."""

    class Counting(Mapping[str, Tensor]):
        def __init__(self) -> None:
            self.reads: list[str] = []
            self.alive: list[weakref.ref[Tensor]] = []

        def __getitem__(self, name: str) -> Tensor:
            assert not any(tensor() is not None for tensor in self.alive), f"{self.reads[-1]} is still there"
            self.reads.append(name)
            tensor = _source()[name]
            self.alive.append(weakref.ref(tensor))
            return tensor

        def __iter__(self) -> Iterator[str]:
            return iter(_source())

        def __len__(self) -> int:
            return len(_source())

    source = Counting()
    convert_weights(source, RULES, CFG, EXPECTED)
    assert source.reads == ["embed", "h.0.qkv", "h.1.qkv"]


def test_prefix_is_optional_and_harmless_tensors_are_passed_over() -> None:
    source = {f"model.{name}": tensor for name, tensor in _source().items()} | {"model.h.1.mask": torch.ones(2)}
    state = convert_weights(source, RULES, CFG, EXPECTED, prefix="model.", harmless=("h.{layer}.mask",))
    assert torch.equal(state["E"], source["model.embed"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h.2.qkv": torch.randn(6, 30)}, "h.2.qkv has no place"),
        ({"h.00.qkv": torch.randn(6, 30)}, "h.00.qkv has no place"),
        ({"h.0.mask": torch.ones(1)}, "h.0.mask has no place"),
        ({"x.embed": torch.randn(3, 6)}, "x.embed and embed are the same parameter"),
        ({"embed": torch.randn(4, 6)}, r"embed has shape \[4, 6\]"),
        ({"h.0.qkv": torch.randn(6, 29)}, r"h.0.qkv has shape \[6, 29\]"),
        ({"h.0.qkv": torch.randn(30)}, r"h.0.qkv has shape \[30\]"),
        ({"embed": torch.ones(3, 6, dtype=torch.int8)}, "embed is torch.int8, not floating point"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_what_does_not_fit_is_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(CorruptWeightsError, match=f"^the file: .*{message}"):
        convert_weights(_source() | change, RULES, CFG, EXPECTED, prefix="x.", described_as="the file")


def test_missing_tensors_are_named_as_the_source_names_them() -> None:
    source = _source()
    del source["h.1.qkv"]
    with pytest.raises(CorruptWeightsError, match=r"3 of 7 parameters have no tensor, among them b.1.Q \(h.1.qkv\)"):
        convert_weights(source, RULES, CFG, EXPECTED)


EXPERT_RULES = (
    WeightRule("moe.{layer}.experts.{expert}.w", "b.{layer}.W", weights.transpose),
    WeightRule("moe.{layer}.experts.all", "b.{layer}.W", weights.keep),
)
EXPERTS = {"b.0.W": torch.Size([2, 6, 4]), "b.1.W": torch.Size([2, 6, 4])}


def _experts() -> dict[str, Tensor]:
    """Layer 0 expert by expert, in an order of the source's own; layer 1 as one tensor."""
    names = ("moe.0.experts.1.w", "moe.0.experts.0.w")
    return {name: torch.randn(4, 6) for name in names} | {"moe.1.experts.all": torch.randn(2, 6, 4)}


def test_experts_come_one_by_one_or_together() -> None:
    source = _experts()
    state = convert_weights(source, EXPERT_RULES, CFG, EXPERTS)
    assert torch.equal(state["b.0.W"], torch.stack([source[f"moe.0.experts.{i}.w"].T for i in range(2)]))
    assert torch.equal(state["b.1.W"], source["moe.1.experts.all"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe.0.experts.2.w": torch.randn(4, 6)}, "moe.0.experts.2.w has no place"),
        ({"moe.1.experts.0.w": torch.randn(4, 6)}, "moe.1.experts.0.w and moe.1.experts.all are the same"),
        ({"moe.0.experts.all": torch.randn(2, 6, 4)}, "moe.0.experts.all and moe.0.experts.1.w are the same"),
        ({"x.moe.0.experts.1.w": torch.randn(4, 6)}, "x.moe.0.experts.1.w and moe.0.experts.1.w are the same"),
        ({"moe.0.experts.1.w": torch.randn(6, 4)}, r"moe.0.experts.1.w has shape \[6, 4\]"),
        ({"moe.0.experts.0.w": None}, r"1 of 2 parameters have no tensor, among them b.0.W \(moe.0.experts.0.w\)"),
        ({"moe.1.experts.all": None}, r"1 of 2 parameters have no tensor, among them b.1.W \(moe.1.experts.0.w\)"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_experts_that_do_not_fit_are_named(change: dict[str, Tensor | None], message: str) -> None:
    source = {name: tensor for name, tensor in (_experts() | change).items() if tensor is not None}
    with pytest.raises(CorruptWeightsError, match=f"^the file: .*{message}"):
        convert_weights(source, EXPERT_RULES, CFG, EXPERTS, prefix="x.", described_as="the file")


@given(heads=st.integers(1, 4), d_head=st.integers(1, 5), d_model=st.integers(1, 6))
def test_splitting_heads_loses_nothing(heads: int, d_head: int, d_model: int) -> None:
    """x @ W per head, side by side, is the whole projection; and z per head, summed through W_O, is the whole one."""
    cfg = TransformerConfig(n_layers=1, d_model=d_model, n_heads=heads, d_head=d_head, d_mlp=1, d_vocab=1, n_ctx=1)
    x, z = torch.randn(3, d_model).double(), torch.randn(3, heads * d_head).double()
    linear_in = torch.randn(heads * d_head, d_model).double()
    linear_out = torch.randn(d_model, heads * d_head).double()
    per_head = torch.einsum("pm,hmd->phd", x, weights.split_output_heads(linear_in, cfg))
    torch.testing.assert_close(per_head.flatten(1), x @ linear_in.T)
    mixed = torch.einsum(
        "phd,hdm->pm", z.unflatten(1, (heads, d_head)), weights.split_input_heads_of_linear(linear_out, cfg)
    )
    torch.testing.assert_close(mixed, z @ linear_out.T)


def test_projections_multiply_without_being_rearranged() -> None:
    """[head, d_model, d_head] keeps its source's order, so that flattening it into one matrix copies nothing."""
    rule = (WeightRule("q", "Q", weights.split_output_heads),)
    state = convert_weights({"q": torch.randn(10, 6)}, rule, CFG, {"Q": torch.Size([2, 6, 5])})
    flat = state["Q"].transpose(1, 2).flatten(0, 1)  # [head · d_head, d_model]
    assert flat.data_ptr() == state["Q"].data_ptr()
