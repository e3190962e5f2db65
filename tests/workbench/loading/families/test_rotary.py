"""Rotary positions and their scalings: what configurations of both generations say, and what it computes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from workbench import HookedTransformer
from workbench.config import RopeScaling, TransformerConfig
from workbench.errors import UnsupportedModelError
from workbench.loading.families import find_family
from workbench.parity import measure_parity

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 2, "vocab_size": 61,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 240,
    "rope_theta": 300.0,
}  # fmt: skip
SIZES = {name: value for name, value in LLAMA.items() if name not in ("model_type", "rope_theta")}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 7, "rope_theta": 2e6}
PHI3 = LLAMA | {"model_type": "phi3"}
LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0], "long_factor": [1.2, 2.0, 3.5, 5.0, 7.0]}
ORIGINAL = "original_max_position_embeddings"

SCALINGS: dict[str, tuple[dict[str, Any], RopeScaling]] = {
    "linear": ({"factor": 4.0}, RopeScaling(type="linear", factor=4.0)),
    "dynamic": ({"factor": 4.0}, RopeScaling(type="dynamic", factor=4.0, original_context=240)),
    "yarn": (
        {"factor": 4.0, ORIGINAL: 60, "beta_fast": 16, "beta_slow": 2},
        RopeScaling(type="yarn", factor=4.0, original_context=60, beta_fast=16, beta_slow=2),
    ),
    "yarn by contexts": ({ORIGINAL: 60}, RopeScaling(type="yarn", factor=4.0, original_context=60)),
    "yarn, stated factor": (
        {"factor": 4.0, ORIGINAL: 60, "attention_factor": 0.7, "truncate": False},
        RopeScaling(type="yarn", factor=4.0, original_context=60, attention_factor=0.7, truncate=False),
    ),
    "yarn, two magnitudes": (
        {"factor": 4.0, ORIGINAL: 60, "mscale": 2.0, "mscale_all_dim": 0.5},
        RopeScaling(
            type="yarn", factor=4.0, original_context=60,
            attention_factor=(0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 64},
        RopeScaling(type="llama3", factor=8.0, original_context=64),
    ),
    "longrope": (LONG | {ORIGINAL: 60}, RopeScaling(type="longrope", factor=4.0, original_context=60, **LONG)),
    "longrope, stated factor": (
        LONG | {ORIGINAL: 60, "factor": 9.0, "attention_factor": 1.3},
        RopeScaling(type="longrope", factor=9.0, original_context=60, attention_factor=1.3, **LONG),
    ),
}  # fmt: skip


def _map(config: dict[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    return find_family(config, "x").map_config(copy.deepcopy(config), n_ctx)


@pytest.mark.parametrize("case", SCALINGS)
def test_scalings_of_either_generation(case: str) -> None:
    """And the length that a caller asks for changes none of their numbers."""
    parameters, expected = SCALINGS[case]
    kind = case.split()[0].strip(",")
    older = _map(LLAMA | {"rope_scaling": parameters | {"type": kind}})
    assert older.rope_scaling == expected and older.rotary_base == 300.0
    newer = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    newer["rope_parameters"] = parameters | {"rope_type": kind, "rope_theta": 300.0}
    assert _map(newer) == older
    for n_ctx in (30, 1000):
        assert _map(newer, n_ctx).rope_scaling == expected


@pytest.mark.parametrize("case", SCALINGS)
def test_scaled_rotations_equal_transformers(case: str, build_random: Callable[..., PreTrainedModel]) -> None:
    """Beyond the original context and within it, where dynamic and longrope take other frequencies."""
    parameters, _ = SCALINGS[case]
    rope = {"factor": None, **parameters, "rope_type": case.split()[0].strip(","), "rope_theta": 300.0}
    reference = build_random(LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=rope), 0.2)
    model = HookedTransformer.from_pretrained(reference, n_ctx=400)
    unscaled = HookedTransformer.from_pretrained(reference, n_ctx=400, rope_scaling=RopeScaling(type="linear"))
    for n_positions in (40, 390):
        tokens = torch.randint(0, 61, (1, n_positions), generator=torch.Generator().manual_seed(0))
        assert measure_parity(model, reference, tokens).largest < 1e-4
    assert measure_parity(unscaled, reference, tokens).largest > 1e-2  # the scaling matters here


def test_the_base_of_either_generation() -> None:
    newer = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    assert _map(newer).rotary_base == 10_000.0  # transformers' default
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 300.0}
    assert _map(newer) == _map(LLAMA)
    assert _map(newer | {"model_type": "mixtral", "rope_parameters": None}).rotary_base == 1e6


@pytest.mark.parametrize(
    "value", [0, -5, float("inf"), float("nan"), 10**400, "1e4", True, [1e4]], ids=lambda v: repr(v)[:9]
)
def test_a_base_that_is_none_is_refused_wherever_it_stands(value: Any) -> None:
    good = {"rope_type": "default", "rope_theta": 300.0}
    for config in ({"rope_theta": value}, {"rope_theta": value, "rope_parameters": good}):
        with pytest.raises(UnsupportedModelError, match="^llama: rope_theta = .* expected a positive number"):
            _map(LLAMA | config)
    with pytest.raises(UnsupportedModelError, match="rope_parameters.rope_theta = .* expected a positive number"):
        _map(LLAMA | {"rope_parameters": good | {"rope_theta": value}})


def test_statements_that_contradict_each_other_are_refused() -> None:
    agreeing = {"rope_type": "default", "type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}
    assert _map(LLAMA | {"rope_parameters": agreeing, "rope_scaling": agreeing}) == _map(LLAMA)
    with pytest.raises(UnsupportedModelError, match="rope_theta = 300.0 .* contradicts rope_parameters.rope_theta = 1"):
        _map(LLAMA | {"rope_parameters": agreeing | {"rope_theta": 1}})
    with pytest.raises(UnsupportedModelError, match="rope_parameters.rope_type = 'default' .* contradicts .*'linear'"):
        _map(LLAMA | {"rope_parameters": agreeing | {"type": "linear"}})
    yarn = {"type": "yarn", "factor": 4.0, ORIGINAL: 60}
    with pytest.raises(UnsupportedModelError, match=f"{ORIGINAL} = 50 .* contradicts rope_scaling.{ORIGINAL} = 60"):
        _map(LLAMA | {"rope_scaling": yarn, ORIGINAL: 50})
    with pytest.raises(UnsupportedModelError, match="rope_local_base_freq.* contradicts rope_parameters.sliding"):
        parameters = {"sliding_attention": {"rope_theta": 5.0}}
        _map(GEMMA3 | {"rope_local_base_freq": 4.0, "rope_parameters": parameters})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "mrope"}, "rope_scaling.type = 'mrope' .* supported are default, linear, dynamic, yarn"),
        ({"type": ["yarn"]}, r"rope_scaling.type = \['yarn'\]"),
        ({"type": "default", "factor": 4.0}, "rope_scaling.factor = 4.0 .* of type 'default' do not read it"),
        ({"factor": 4.0}, "rope_scaling.factor = 4.0"),
        ({"type": "linear"}, "'linear' .* needs factor"),
        ({"type": "linear", "factor": "2"}, "rope_scaling.factor = '2' .* positive number"),
        ({"type": "linear", "factor": 2.0, ORIGINAL: 60}, f"rope_scaling.{ORIGINAL} = 60"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000.0}, "rope_scaling.alpha = 1000.0"),
        ({"type": "yarn", "factor": 2.0, ORIGINAL: 60.5}, f"rope_scaling.{ORIGINAL} = 60.5"),
        ({"type": "yarn", "factor": 2.0, "truncate": 0}, "rope_scaling.truncate = 0 .* true or false"),
        ({"type": "yarn", "factor": 2.0, "extrapolation_factor": 1.0}, "rope_scaling.extrapolation_factor"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "needs high_freq_factor"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "low_freq_factor must be"),
        ({"type": "longrope", **LONG, "long_factor": 3.0}, "rope_scaling.long_factor = 3.0 .* list"),
        ({"type": "longrope", **LONG, "long_factor": [1.0, None]}, "rope_scaling.long_factor = None"),
        ("linear", "rope_scaling = 'linear' .* names and values"),
    ],
)
def test_what_is_not_understood_is_named(rope: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^llama: .*{message}"):
        _map(LLAMA | {"rope_scaling": rope})


def test_longrope_needs_a_factor_for_every_frequency() -> None:
    with pytest.raises(ValueError, match="rope_scaling needs 5 factors, one a frequency, got 2"):
        _map(LLAMA | {"rope_scaling": {"type": "longrope", **LONG, "long_factor": [1.0, 2.0]}})


def test_only_architectures_that_know_it_rotate_a_part_of_a_head() -> None:
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor = 0.8 .* every dimension of a head"):
        _map(LLAMA | {"partial_rotary_factor": 0.8})
    assert _map(PHI3 | {"partial_rotary_factor": 0.8}).rotary_dim == 8
    assert _map(PHI3).rotary_dim is None
    with pytest.raises(UnsupportedModelError, match="partial_rotary_factor = 1.5"):
        _map(PHI3 | {"partial_rotary_factor": 1.5})


def test_phi3_has_other_names_for_longrope() -> None:
    expected = RopeScaling(type="longrope", factor=4.0, original_context=60, **LONG)
    for name in ("longrope", "su", "yarn"):
        assert _map(PHI3 | {ORIGINAL: 60, "rope_scaling": {"type": name, **LONG}}).rope_scaling == expected
    assert _map(PHI3 | {ORIGINAL: 60}).rope_scaling is None


def test_gemma3_of_either_generation() -> None:
    """Only layers without a window are scaled."""
    older = _map(GEMMA3 | {"rope_local_base_freq": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert older.rope_scaling == RopeScaling(type="linear", factor=8.0)
    assert (older.rotary_base, older.rotary_base_local) == (2e6, 5e4)
    newer = {name: value for name, value in GEMMA3.items() if name != "rope_theta"}
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
    }
    assert _map(newer) == older
    plain = _map({name: value for name, value in GEMMA3.items() if name != "rope_theta"})
    assert (plain.rotary_base, plain.rotary_base_local, plain.rope_scaling) == (1e6, 1e4, None)
    scaled = {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}
    with pytest.raises(UnsupportedModelError, match="rope_parameters.sliding_attention = 'linear'"):
        _map(newer | {"rope_parameters": scaled})
    with pytest.raises(UnsupportedModelError, match="rope_parameters = .*rope_theta.* expected full_attention"):
        _map(newer | {"rope_parameters": {"rope_theta": 1e6}})


def test_a_callers_scaling_replaces_the_checkpoints(build_random: Callable[..., PreTrainedModel]) -> None:
    """As transformers would compute it, had the configuration said so."""
    yarn = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, ORIGINAL: 60}
    scaled = build_random(LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=yarn), 0.2)
    plain = build_random(
        LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 300.0}), 0.2
    )
    model = HookedTransformer.from_pretrained(
        plain, rope_scaling=RopeScaling(type="yarn", factor=4.0, original_context=60)
    )
    tokens = torch.randint(0, 61, (1, 200), generator=torch.Generator().manual_seed(0))
    assert measure_parity(model, scaled, tokens).largest < 1e-4
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11))
    with pytest.raises(ValueError, match="rope_scaling changes rotary positions, but those of .* are 'learned'"):
        HookedTransformer.from_pretrained(gpt2, rope_scaling=RopeScaling(type="linear", factor=2.0))
