"""Parity with transformers is measured where it matters, and a difference is found wherever it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from workbench import HookedTransformer
from workbench.parity import ParityErrors, measure_parity


def test_equal_models_differ_by_rounding_only(pair: Any, tokens: torch.Tensor) -> None:
    assert 0 < measure_parity(pair.model, pair.reference, tokens).largest < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_are_not_compared(pair: Any, tokens: torch.Tensor, side: str) -> None:
    real = torch.ones_like(tokens)
    real[1, slice(40) if side == "left" else slice(-40, None)] = 0
    assert measure_parity(pair.model, pair.reference, tokens, real).largest < 1e-5


@pytest.mark.parametrize(
    ("parameter", "touched"),
    [
        ("embed.W_E", {"logits", "residual", "pattern"}),
        ("blocks.1.attn.W_Q", {"logits", "residual", "pattern"}),
        ("blocks.2.attn.W_O", {"logits", "residual"}),  # behind the last pattern
        ("ln_final.w", {"logits", "residual"}),
        ("unembed.W_U", {"logits"}),
    ],
)
def test_a_wrong_weight_shows_where_it_acts(pair: Any, tokens: torch.Tensor, parameter: str, touched: set[str]) -> None:
    model: HookedTransformer = copy.deepcopy(pair.model)
    weights = dict(model.named_parameters())
    if parameter not in weights:  # the unembedding of a tied model, which is the embedding
        assert parameter == "unembed.W_U" and model.cfg.tie_word_embeddings
        return
    with torch.no_grad():
        weights[parameter] *= 1.5
    errors = measure_parity(model, pair.reference, tokens[:1])
    assert {name for name in ("logits", "residual", "pattern") if getattr(errors, name) > 1e-3} == touched


def test_nan_is_no_parity() -> None:
    assert not ParityErrors(logits=0.0, residual=float("nan"), pattern=0.0).largest < 1


def test_without_eager_attention_there_is_nothing_to_compare_with(pair: Any, tokens: torch.Tensor) -> None:
    reference = copy.deepcopy(pair.reference)
    reference.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation to 'eager'"):
        measure_parity(pair.model, reference, tokens)
