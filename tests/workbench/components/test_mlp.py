"""The feed-forward layer: its gates by hand, and that every position is on its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from workbench.components.mlp import ACTIVATIONS, MLP, apply_gate
from workbench.config import TransformerConfig


def _config(**options: object) -> TransformerConfig:
    sizes = {"n_layers": 1, "d_model": 6, "n_heads": 2, "d_head": 3, "d_mlp": 10, "d_vocab": 5, "n_ctx": 9}
    return TransformerConfig(**{**sizes, **options})


def _mlp(**options: object) -> MLP:
    """In float64, every parameter drawn, biases included."""
    torch.manual_seed(0)
    mlp = MLP(_config(**options)).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    return mlp


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("relu", "relu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("gelu_quick", "quick_gelu"),
        ("silu", "silu"), ("sigmoid", "sigmoid"),
    ],
)  # fmt: skip
def test_activation_equals_transformers_of_that_name(ours: str, theirs: str) -> None:
    x = torch.linspace(-9, 9, 301, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), rtol=1e-12, atol=1e-12)


def test_plain_form() -> None:
    mlp, x = _mlp(act_fn="relu", use_mlp_bias=True), torch.randn(2, 4, 6, dtype=torch.float64)
    expected = (x @ mlp.W_in + mlp.b_in).clamp(min=0) @ mlp.W_out + mlp.b_out
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)
    assert not hasattr(mlp, "W_gate")


@pytest.mark.parametrize("use_mlp_bias", [False, True])
def test_glu_is_the_sigmoid_of_one_projection_times_the_other(use_mlp_bias: bool) -> None:
    mlp = _mlp(act_fn="sigmoid", gated_mlp=True, use_mlp_bias=use_mlp_bias)
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    gate, linear = x @ mlp.W_gate, x @ mlp.W_in
    if use_mlp_bias:
        gate, linear = gate + mlp.b_gate, linear + mlp.b_in
    expected = (linear / (1 + (-gate).exp())) @ mlp.W_out
    torch.testing.assert_close(mlp(x), expected + mlp.b_out if use_mlp_bias else expected, rtol=1e-12, atol=1e-12)
    assert (mlp.b_gate is not None) == use_mlp_bias


def test_limit_and_offset_by_hand() -> None:
    cfg = _config(gated_mlp=True, act_fn="relu", glu_limit=2.0, glu_linear_offset=1.0)
    gate = torch.tensor([5.0, -5.0, 1.0, 1.0, 1.0])
    linear = torch.tensor([0.5, 0.5, 9.0, -9.0, -1.0])
    # gate bounded from above only; linear bounded to ±2, then one added.
    assert apply_gate(gate, linear, cfg).tolist() == [3.0, 0.0, 3.0, -1.0, 0.0]


def test_the_gate_has_no_lower_limit() -> None:
    cfg = _config(gated_mlp=True, act_fn="silu", glu_limit=2.0)
    out = apply_gate(torch.tensor([-5.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64), cfg)
    assert out.item() == pytest.approx(-5 / (1 + math.exp(5)), rel=1e-12)  # at −2 it would be −0.24


def test_hooks_read_both_factors_before_they_are_bounded() -> None:
    mlp = _mlp(gated_mlp=True, act_fn="gelu_quick", use_mlp_bias=True, glu_limit=0.5, glu_linear_offset=1.0)
    x, seen = torch.randn(1, 4, 6, dtype=torch.float64), {}
    for name in ("hook_pre", "hook_pre_linear", "hook_post"):
        getattr(mlp, name).add_hook(lambda value, hook, name=name: seen.update({name: value.detach()}))
    mlp(x)
    torch.testing.assert_close(seen["hook_pre"], x @ mlp.W_gate + mlp.b_gate, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen["hook_pre_linear"], x @ mlp.W_in + mlp.b_in, rtol=1e-12, atol=1e-12)
    assert seen["hook_pre"].max() > 0.5 and seen["hook_pre_linear"].abs().max() > 0.5
    post = apply_gate(seen["hook_pre"], seen["hook_pre_linear"], mlp.cfg)
    torch.testing.assert_close(seen["hook_post"], post, rtol=0, atol=0)


@pytest.mark.parametrize("hook", ["hook_pre", "hook_pre_linear", "hook_post"])
def test_an_edit_at_any_hook_changes_the_output(hook: str) -> None:
    mlp, x = _mlp(gated_mlp=True, act_fn="silu"), torch.randn(1, 4, 6, dtype=torch.float64)
    before = mlp(x)
    getattr(mlp, hook).add_hook(lambda value, hook: value + 1)
    assert not torch.allclose(mlp(x), before)


@pytest.mark.parametrize("gated", [False, True])
def test_a_position_reads_itself_alone(gated: bool) -> None:
    mlp, x = _mlp(gated_mlp=gated, use_mlp_bias=True), torch.randn(2, 5, 6, dtype=torch.float64)

    def moved(changed: int) -> Tensor:
        other = x.clone()
        other[:, changed] += 1
        return (mlp(other) != mlp(x)).any(dim=-1).any(dim=0)

    for position in range(5):
        assert moved(position).tolist() == [i == position for i in range(5)]
