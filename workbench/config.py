"""One configuration for every model. Names follow TransformerLens; sizes are counts, angles need no unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

import torch

ActivationName = Literal["relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid"]
AttentionBackend = Literal["auto", "flash", "materialised"]
AttentionType = Literal["global", "local", "linear"]
InitMode = Literal["gpt2", "normal", "xavier", "t5"]
NormPlacement = Literal["pre", "post", "sandwich", "output"]
PositionType = Literal["learned", "sinusoidal", "rotary", "alibi", "relative", "none"]
RopeScalingType = Literal["linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
_RUNTIME_FIELDS = ("device", "dtype", "attention_backend")


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
        _check_choice("type", self.type, get_args(RopeScalingType))
        _check_switches(self)
        for name in ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            _check_positive(name, getattr(self, name))
        if self.attention_factor is not None:
            _check_positive("attention_factor", self.attention_factor)
        if self.original_context is not None:
            _check_size("original_context", self.original_context)
        elif self.type not in ("linear", "ntk"):
            raise ValueError(f"rope scaling of type {self.type!r} needs original_context, the context of the training")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor must be below high_freq_factor, got {self.low_freq_factor}")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None:
                object.__setattr__(self, name, tuple(factors))
                for factor in factors:
                    _check_positive(name, factor)
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
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
        _check_switches(self)
        for name in ("n_experts", "n_experts_per_token"):
            _check_size(name, getattr(self, name))
        if self.d_expert is not None:
            _check_size("d_expert", self.d_expert)
        if self.n_experts_per_token > self.n_experts:
            raise ValueError(
                f"n_experts_per_token ({self.n_experts_per_token}) must not exceed n_experts ({self.n_experts})"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A Transformer: decoder, encoder (``attention_dir="bidirectional"``), or both (``n_encoder_layers``).

    ``None`` means that the feature is absent. ``device``, ``dtype`` and ``attention_backend`` say how the model runs,
    not what it computes: they are neither compared nor saved. Where a feature's equation and source are not given
    here, the component that implements it gives them.

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

    attention_dir: Literal["causal", "bidirectional"] = "causal"
    n_encoder_layers: int | None = None  # a bidirectional encoder, which every decoder layer reads by cross-attention
    decoder_start_token_id: int | None = None  # what the decoder of an encoder–decoder begins with

    # Feed-forward layers
    act_fn: ActivationName = "gelu"  # "gelu" is the exact (erf) form, "gelu_tanh" GPT-2's approximation
    gated_mlp: bool = False  # True: out = W_out(act(W_gate x) * W_in x), with act_fn="silu" SwiGLU (Shazeer 2020)
    glu_limit: float | None = None  # bounds both factors of a gated MLP (GPT-OSS)
    glu_linear_offset: float = 0.0  # added to the linear factor (GPT-OSS: 1)
    moe: MixtureOfExperts | None = None

    # Norms and residuals
    normalization_type: Literal["LN", "RMS"] = "LN"
    eps: float = 1e-5
    use_norm_bias: bool = True  # of LayerNorms
    norm_gain_plus_one: bool = False  # the gain is 1 + w (Gemma)
    norm_placement: NormPlacement = "pre"  # "output": a norm on each sublayer's output alone (OLMo 2)
    parallel_attn_mlp: bool = False  # both read resid_pre and add to it (GPT-J)
    shared_parallel_norm: bool = False  # by one norm, ln1
    dropout: float = 0.0  # rate on the embeddings' sum and on each sublayer's output; in training mode only

    # Embeddings and positions
    embed_scale: float = 1.0  # multiplies token embeddings; the original Transformer and Gemma: sqrt(d_model)
    use_embed_norm: bool = False  # a norm on the embeddings' sum (BERT, BLOOM)
    n_segments: int | None = None  # segment embeddings (BERT)
    positional_embedding_type: PositionType = "learned"
    sinusoidal_halves: bool = False  # all sines before all cosines (Marian) instead of by turns
    rotary_base: float = 10_000.0
    rotary_base_local: float | None = None  # of "local" layers, which are then not scaled (Gemma 3)
    rotary_dim: int | None = None  # the first so many dimensions of a head rotate; None: all
    rotary_adjacent_pairs: bool = False  # pairs (2i, 2i + 1) (GPT-J) instead of (i, i + rotary_dim / 2)
    rope_scaling: RopeScaling | None = None
    alibi_slopes: tuple[float, ...] | None = None  # one a head; None: those of Press et al. 2022
    n_relative_buckets: int = 32  # of relative positions (T5)
    relative_max_distance: int = 128

    # Attention
    attn_scale: float | None = None  # multiplies q·k; None: 1 / sqrt(d_head)
    attn_temperature: float = 1.0  # divides the scores: small is sharp
    attn_scores_soft_cap: float | None = None
    attn_types: tuple[AttentionType, ...] | None = None  # one a layer; None: "local" with a window_size, else "global"
    window_size: int | None = None  # keys that a "local" layer's query sees, its own included
    n_global_tokens: int = 0  # first tokens that local layers see at any distance
    use_sink_logits: bool = False  # a learned score per head for attending to nothing (GPT-OSS)
    qk_norm: Literal["per_head", "across_heads"] | None = None
    qk_norm_after_rotary: bool = False

    use_qkv_bias: bool = False
    use_attn_out_bias: bool = False
    use_mlp_bias: bool = False
    use_unembed_bias: bool = False
    tie_word_embeddings: bool = False

    # Head
    use_unembed: bool = True  # False: an encoder without a head, which gives no logits
    use_mlm_head: bool = False  # a dense layer, the activation and a norm before the unembedding (BERT)
    logit_scale: float = 1.0  # multiplies the residual stream before the unembedding
    output_logits_soft_cap: float | None = None

    # Initialisation
    init_mode: InitMode = "gpt2"
    initializer_range: float = 0.02

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
        for name in ("attn_types", "alibi_slopes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_values()
        self._check_attention()
        self._check_positions()
        self._check_whole()

    def _check_values(self) -> None:
        _check_switches(self)
        for name in ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "n_ctx", "n_key_value_heads"):
            _check_size(name, getattr(self, name))
        for name, kind in (("rope_scaling", RopeScaling), ("moe", MixtureOfExperts)):
            if not isinstance(part := getattr(self, name), (kind, NoneType)):
                raise ValueError(f"{name} must be a {kind.__name__} or None, got {type(part).__name__}")
        for name in ("n_encoder_layers", "n_segments", "rotary_dim", "window_size"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        start = self.decoder_start_token_id
        whole = isinstance(start, int) and not isinstance(start, bool)
        if start is not None and not (whole and 0 <= start < self.d_vocab):
            raise ValueError(f"decoder_start_token_id must be a token id from 0 to {self.d_vocab - 1}, got {start!r}")
        for name in ("n_relative_buckets", "relative_max_distance"):
            _check_size(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), choices)
        for name in ("eps", "rotary_base", "attn_temperature", "embed_scale", "logit_scale", "initializer_range"):
            _check_positive(name, getattr(self, name))
        for name in ("attn_scale", "attn_scores_soft_cap", "output_logits_soft_cap", "rotary_base_local", "glu_limit"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be a rate from 0 up to, not including, 1, got {self.dropout!r}")

    def _check_attention(self) -> None:
        if self.n_heads % self.n_key_value_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_key_value_heads ({self.n_key_value_heads})"
            )
        if self.attn_types is not None:
            if len(self.attn_types) != self.n_layers:
                raise ValueError(
                    f"attn_types must name one type for each of {self.n_layers} layers, got {len(self.attn_types)}"
                )
            for kind in self.attn_types:
                _check_choice("attn_types", kind, get_args(AttentionType))
        if self.window_size is None and "local" in self._kinds:
            raise ValueError("attn_types has local layers, which need a window_size")
        whole = isinstance(self.n_global_tokens, int) and not isinstance(self.n_global_tokens, bool)
        if not whole or self.n_global_tokens < 0:
            raise ValueError(f"n_global_tokens must be a whole number, not negative, got {self.n_global_tokens!r}")

    def _check_positions(self) -> None:
        rotated = self.rotated_dim
        if self.positional_embedding_type == "rotary" and (rotated % 2 or rotated > self.d_head):
            raise ValueError(
                f"rotary positions rotate pairs, so {'d_head' if self.rotary_dim is None else 'rotary_dim'} must be "
                f"even and at most d_head = {self.d_head}, got {rotated}"
            )
        scaling = self.rope_scaling
        for factors in (scaling.short_factor, scaling.long_factor) if scaling is not None else ():
            if factors is not None and len(factors) != rotated // 2:
                raise ValueError(f"rope_scaling needs {rotated // 2} factors, one a frequency, got {len(factors)}")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.n_heads:
            raise ValueError(
                f"alibi_slopes must hold one slope for each of {self.n_heads} heads, got {len(self.alibi_slopes)}"
            )
        if self.positional_embedding_type == "relative" and "linear" in self._kinds:
            raise ValueError("linear attention has no scores to which relative positions could add a bias")
        if self.positional_embedding_type == "alibi" and "linear" in self._kinds:
            raise ValueError("linear attention has no scores to which ALiBi could add a bias")

    def _check_whole(self) -> None:
        if self.shared_parallel_norm and not self.parallel_attn_mlp:
            raise ValueError("shared_parallel_norm needs parallel_attn_mlp")
        if self.parallel_attn_mlp and self.norm_placement != "pre":
            raise ValueError(f"parallel_attn_mlp needs norm_placement 'pre', got {self.norm_placement!r}")
        if self.n_encoder_layers is not None and self.norm_placement not in ("pre", "post"):
            raise ValueError(f"with an encoder, norm_placement must be 'pre' or 'post', got {self.norm_placement!r}")
        if self.n_encoder_layers is not None and self.parallel_attn_mlp:
            raise ValueError("parallel_attn_mlp leaves no place for the cross-attention that n_encoder_layers asks for")
        if self.n_encoder_layers is not None and (self.attention_dir != "causal" or self.moe or self.n_segments):
            raise ValueError("an encoder–decoder has a causal decoder, without experts and without segments")
        if (self.glu_limit is not None or self.glu_linear_offset) and not self.gated_mlp:
            raise ValueError("glu_limit and glu_linear_offset need gated_mlp")
        if self.norm_gain_plus_one and self.normalization_type != "RMS":
            raise ValueError("norm_gain_plus_one is a form of RMSNorm; set normalization_type='RMS'")

    @property
    def _kinds(self) -> set[AttentionType]:
        """Those of ``layer_types``, without counting up layers of which a damaged file may claim billions."""
        same: AttentionType = "global" if self.window_size is None else "local"
        return {same} if self.attn_types is None else set(self.attn_types)

    @property
    def layer_types(self) -> tuple[AttentionType, ...]:
        """The attention of each layer."""
        if self.attn_types is not None:
            return self.attn_types
        return ("global" if self.window_size is None else "local",) * self.n_layers

    @property
    def rotated_dim(self) -> int:
        """How many dimensions of a head rotate, where positions are rotary."""
        return self.d_head if self.rotary_dim is None else self.rotary_dim

    @property
    def has_final_norm(self) -> bool:
        """Whether the unembedding reads a normalised stream; blocks that end in a norm need no other."""
        return self.norm_placement != "post"

    @property
    def query_key_scale(self) -> float:
        """The factor on q·k: ``attn_scale`` or 1 / sqrt(d_head) (Vaswani et al. 2017, equation 1), by temperature."""
        return (self.d_head**-0.5 if self.attn_scale is None else self.attn_scale) / self.attn_temperature

    @property
    def attn_only(self) -> bool:
        """Every block has an MLP. transformer_lens asks."""
        return False

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def to_dict(self) -> dict[str, Any]:
        """The fields that say what the model computes, as JSON types."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _RUNTIME_FIELDS}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TransformerConfig:
        """The inverse of ``to_dict``, also after a journey through JSON.

        Raises:
            ValueError: an unknown or a missing field.
        """
        parts: dict[str, Any] = {"rope_scaling": RopeScaling, "moe": MixtureOfExperts}
        nested = {
            name: _from_fields(kind, fields[name], name) for name, kind in parts.items() if fields.get(name) is not None
        }
        return _from_fields(cls, {**fields, **nested}, "the configuration")


def _from_fields(kind: Any, fields: dict[str, Any], what: str) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind) if f.name not in _RUNTIME_FIELDS}
    if unknown := sorted(set(fields) - set(known)):
        raise ValueError(f"unknown fields in {what}: {', '.join(unknown)}")
    required = {name for name, f in known.items() if f.default is dataclasses.MISSING}
    if missing := sorted(required - set(fields)):
        raise ValueError(f"missing fields in {what}: {', '.join(missing)}")
    return kind(**fields)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "act_fn": get_args(ActivationName),
    "attention_backend": get_args(AttentionBackend),
    "attention_dir": ("causal", "bidirectional"),
    "init_mode": get_args(InitMode),
    "normalization_type": ("LN", "RMS"),
    "norm_placement": get_args(NormPlacement),
    "positional_embedding_type": get_args(PositionType),
    "qk_norm": (None, "per_head", "across_heads"),
}


def _check_size(name: str, size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a positive integer, got {size!r}")


def _check_positive(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a positive and finite number, got {number!r}")


def _check_switches(fields: Any) -> None:
    for f in dataclasses.fields(fields):
        if f.type == "bool" and not isinstance(getattr(fields, f.name), bool):
            raise ValueError(f"{f.name} must be True or False, got {getattr(fields, f.name)!r}")


def _check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
