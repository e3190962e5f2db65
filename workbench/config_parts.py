"""Options that travel together, as parts of a TransformerConfig, and the checks that all of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

LARGEST_SIZE = 2**31 - 1
LARGEST_NUMBER = 3.4e38  # of float32

RopeScalingType = Literal["linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are changed so that a model works beyond the context of its training.

    ``workbench.components.positions`` gives each type's equation and source.

    Args:
        type: "linear" (position interpolation), "ntk", "dynamic" (NTK from the length of the input), "yarn", "llama3"
            or "longrope".
        factor: how many times the original context; longrope takes it only for its attention factor.
        original_context: the tokens of the training context.
        attention_factor: multiplies the rotated q and k (yarn, longrope); None: what their papers give for ``factor``.
        beta_fast, beta_slow: rotations within the original context above which yarn leaves a frequency alone, and
            below which it interpolates fully.
        truncate: yarn rounds the bounds of its ramp to whole dimensions.
        low_freq_factor, high_freq_factor: llama3's bounds, as original_context / wavelength.
        short_factor, long_factor: longrope's divisor for each frequency, within and beyond the original context.

    Raises:
        ValueError: a field that the type needs is missing, or a value outside its range.
    """

    type: RopeScalingType
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("type", self.type, get_args(RopeScalingType))
        check_switches(self)
        for name in ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        if self.attention_factor is not None:
            check_positive("attention_factor", self.attention_factor)
        if self.original_context is not None:
            check_size("original_context", self.original_context)
        elif self.type not in ("linear", "ntk"):
            raise ValueError(f"rope scaling of type {self.type!r} needs original_context, the context of the training")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow must be below beta_fast, got {self.beta_slow} and {self.beta_fast}")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor must be below high_freq_factor, got {self.low_freq_factor}")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None:
                object.__setattr__(self, name, check_tuple(name, factors))
                for factor in factors:
                    check_positive(name, factor)
            elif self.type == "longrope":
                raise ValueError(f"rope scaling of type 'longrope' needs {name}, one number for each frequency")

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a token change when the text behind it grows."""
        return self.type in ("dynamic", "longrope")

    def changes_between(self, length: int, longer: int) -> bool:
        """Whether a text of ``longer`` tokens has other frequencies than one of ``length``."""
        original = self.original_context or 0
        if self.type == "longrope":
            return (length > original) != (longer > original)
        return self.type == "dynamic" and max(length, original) != max(longer, original)


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Some layers' MLPs are ``n_experts`` smaller ones, of which a router picks ``n_experts_per_token`` for each token.

    Source: Shazeer et al. 2017, equations 1 to 5 (without noise); Jiang et al. 2024 (Mixtral), section 2.1.

    Args:
        d_expert: the width of one expert; None: ``d_mlp``.
        renormalise: True: the chosen experts' weights sum to 1 (softmax over the chosen logits); False: they keep
            their shares of the softmax over all.
        use_router_bias: the router's logits have a bias.
        dense_layers: layers that have a plain MLP of width ``d_mlp`` all the same.
    """

    n_experts: int
    n_experts_per_token: int
    d_expert: int | None = None
    renormalise: bool = True
    use_router_bias: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", check_tuple("dense_layers", self.dense_layers))
        for layer in self.dense_layers:
            if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
                raise ValueError(f"dense_layers must hold layers, whole numbers from 0 up, got {layer!r}")
        check_switches(self)
        for name in ("n_experts", "n_experts_per_token"):
            check_size(name, getattr(self, name))
        if self.d_expert is not None:
            check_size("d_expert", self.d_expert)
        if self.n_experts_per_token > self.n_experts:
            raise ValueError(
                f"n_experts_per_token ({self.n_experts_per_token}) must not exceed n_experts ({self.n_experts})"
            )


def check_size(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST_SIZE:
        raise ValueError(f"{name} must be a positive integer, at most {LARGEST_SIZE:,}, got {size!r}")


def check_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number <= LARGEST_NUMBER:
        raise ValueError(f"{name} must be a positive and finite number, got {number!r}")


def check_tuple(name: str, values: Any) -> tuple[Any, ...]:
    """The values as a tuple; one value, or none, is refused."""
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{name} must be a tuple, got {values!r}")
    return tuple(values)


def check_switches(configuration: Any) -> None:
    for f in dataclasses.fields(configuration):
        if f.type == "bool" and not isinstance(getattr(configuration, f.name), bool):
            raise ValueError(f"{f.name} must be True or False, got {getattr(configuration, f.name)!r}")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
