"""One configuration for every model. Names follow TransformerLens; sizes are counts, angles need no unit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

ActivationName = Literal["relu", "gelu", "gelu_tanh", "gelu_quick", "silu"]
AttentionBackend = Literal["auto", "flash", "materialised"]
_RUNTIME_FIELDS = ("device", "dtype", "attention_backend")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A decoder-only pre-norm Transformer.

    ``None`` means that the feature is absent. ``device``, ``dtype`` and ``attention_backend`` say how the model runs,
    not what it computes: they are neither compared nor saved.

    Raises:
        ValueError: sizes that do not fit each other, or a value outside its choices.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    n_key_value_heads: int = None  # type: ignore[assignment]  # left out: n_heads. Always set afterwards

    act_fn: ActivationName = "gelu"  # "gelu" is the exact (erf) form, "gelu_tanh" GPT-2's approximation
    gated_mlp: bool = False  # True: out = W_out(act(W_gate x) * W_in x), with act_fn="silu" SwiGLU (Shazeer 2020)
    normalization_type: Literal["LN", "RMS"] = "LN"
    eps: float = 1e-5

    positional_embedding_type: Literal["learned", "rotary"] = "learned"
    rotary_base: float = 10_000.0
    attn_scale: float | None = None  # multiplies q·k; None: 1 / sqrt(d_head)

    use_qkv_bias: bool = False
    use_attn_out_bias: bool = False
    use_mlp_bias: bool = False
    use_unembed_bias: bool = False
    tie_word_embeddings: bool = False

    # Hook points that cost memory, off until asked for (TransformerLens names).
    use_attn_result: bool = False
    use_split_qkv_input: bool = False

    # Provenance, printed with every result.
    model_name: str = "custom"
    revision: str | None = None
    weights_description: str = "randomly initialised"

    device: torch.device = dataclasses.field(default=torch.device("cpu"), compare=False)
    dtype: torch.dtype = dataclasses.field(default=torch.float32, compare=False)
    attention_backend: AttentionBackend = dataclasses.field(default="auto", compare=False)

    def __post_init__(self) -> None:
        if self.n_key_value_heads is None:
            object.__setattr__(self, "n_key_value_heads", self.n_heads)
        for name in ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "n_ctx", "n_key_value_heads"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
        if self.n_heads % self.n_key_value_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_key_value_heads ({self.n_key_value_heads})"
            )
        if self.positional_embedding_type == "rotary" and self.d_head % 2:
            raise ValueError(f"rotary positions rotate pairs, so d_head must be even, got {self.d_head}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        for name in ("eps", "rotary_base", "attn_scale"):
            number = getattr(self, name)
            if number is None and name == "attn_scale":
                continue
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < float("inf"):
                raise ValueError(f"{name} must be a positive and finite number, got {number!r}")

    @property
    def query_key_scale(self) -> float:
        """The factor on q·k: ``attn_scale``, or 1 / sqrt(d_head) (Vaswani et al. 2017, equation 1)."""
        return self.d_head**-0.5 if self.attn_scale is None else self.attn_scale

    @property
    def attn_only(self) -> bool:
        """Every block has an MLP. transformer_lens asks."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """The fields that say what the model computes, as JSON types."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _RUNTIME_FIELDS}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TransformerConfig:
        """The inverse of ``to_dict``.

        Raises:
            ValueError: an unknown or a missing field.
        """
        known = {f.name: f for f in dataclasses.fields(cls) if f.name not in _RUNTIME_FIELDS}
        if unknown := sorted(set(fields) - set(known)):
            raise ValueError(f"unknown configuration fields: {', '.join(unknown)}")
        required = {name for name, f in known.items() if f.default is dataclasses.MISSING}
        if missing := sorted(required - set(fields)):
            raise ValueError(f"missing configuration fields: {', '.join(missing)}")
        return cls(**fields)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "act_fn": get_args(ActivationName),
    "attention_backend": get_args(AttentionBackend),
    "normalization_type": ("LN", "RMS"),
    "positional_embedding_type": ("learned", "rotary"),
}
