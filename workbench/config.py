"""One configuration for every model. Names follow TransformerLens; sizes are counts, angles need no unit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

import torch

from workbench.config_parts import LARGEST_NUMBER, check_choice, check_positive, check_size, check_switches, check_tuple
from workbench.config_parts import MixtureOfExperts as MixtureOfExperts
from workbench.config_parts import RopeScaling as RopeScaling

ActivationName = Literal["relu", "gelu", "gelu_tanh", "gelu_quick", "silu", "sigmoid"]
AttentionBackend = Literal["auto", "flash", "materialised"]
AttentionType = Literal["global", "local", "linear"]
InitMode = Literal["gpt2", "normal", "xavier", "t5"]
NormPlacement = Literal["pre", "post", "sandwich", "output"]
PositionType = Literal["learned", "sinusoidal", "rotary", "alibi", "relative", "none"]
_RUNTIME_FIELDS = ("device", "dtype", "attention_backend")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A Transformer: decoder, encoder (``attention_dir="bidirectional"``), or both (``n_encoder_layers``).

    ``None`` means that the feature is absent. Where a feature's equation and source are not given here, the component
    that implements it gives them.

    Args:
        n_layers, d_model, n_heads, d_head, d_mlp, d_vocab, n_ctx: sizes; ``n_ctx`` tokens are the context.
        n_key_value_heads: heads of keys and values, of which each serves several query heads; left out: ``n_heads``.
        attention_dir: "causal" or "bidirectional".
        n_encoder_layers: layers of a bidirectional encoder, which every decoder layer reads by cross-attention.
        decoder_start_token_id: the token that the decoder of an encoder–decoder begins with.

        act_fn: "relu", "gelu" (the exact form, by erf), "gelu_tanh" (GPT-2's approximation), "gelu_quick", "silu" or
            "sigmoid".
        gated_mlp: W_out (act(W_gate x) · W_in x) instead of W_out act(W_in x); with "silu" SwiGLU, with "gelu" GeGLU,
            with "sigmoid" GLU (Shazeer 2020).
        glu_limit: bounds both factors of a gated MLP; glu_linear_offset: added to the linear one (GPT-OSS: 7 and 1).
        moe: a mixture of experts in place of the MLP.

        normalization_type: "LN" or "RMS"; eps: added to the variance. use_norm_bias: LayerNorms have a bias.
        norm_gain_plus_one: the gain of RMSNorm is 1 + w (Gemma).
        norm_placement: "pre", "post" (the original), "sandwich" (Gemma 2), or "output", a norm on each sublayer's
            output alone (OLMo 2).
        parallel_attn_mlp: attention and MLP both read resid_pre; shared_parallel_norm: through one norm (GPT-J).
        dropout: rate on the embeddings' sum and on each sublayer's output, in training mode only.

        embed_scale: multiplies token embeddings; sqrt(d_model) in the original Transformer and in Gemma. Sinusoidal
            positions have entries up to 1 and drown embeddings that start small without it.
        use_embed_norm: a norm on the embeddings' sum (BERT, BLOOM). n_segments: segment embeddings (BERT).
        positional_embedding_type: "learned", "sinusoidal", "rotary", "alibi", "relative" (T5) or "none".
        sinusoidal_halves: all sines before all cosines (Marian) instead of by turns.
        rotary_base: θ; rotary_base_local: that of local layers, which are then not scaled (Gemma 3).
        rotary_dim: the first so many dimensions of a head rotate; None: all. rotary_adjacent_pairs: in pairs
            (2i, 2i + 1) (GPT-J) instead of (i, i + rotary_dim / 2).
        rope_scaling: how rotary frequencies are changed for longer texts.
        alibi_slopes: one a head; None: those of Press et al. 2022.
        n_relative_buckets, relative_max_distance: of relative positions.

        attn_scale: multiplies q·k; None: 1 / sqrt(d_head). attn_temperature: divides the scores; small is sharp.
        attn_scores_soft_cap: bounds the scores (Gemma 2).
        attn_types: "global", "local" (a window) or "linear" for each layer; None: "local" with a ``window_size``, else
            "global".
        window_size: keys that a local layer's query sees, its own included. n_global_tokens: first tokens that local
            layers see at any distance.
        use_sink_logits: a learned score per head for attending to nothing (GPT-OSS).
        qk_norm: a norm on queries and keys, "per_head" or "across_heads"; qk_norm_after_rotary: behind their rotation.
        use_qkv_bias, use_attn_out_bias, use_mlp_bias, use_unembed_bias: which layers have biases.
        tie_word_embeddings: the unembedding is the embedding.

        use_unembed: False for a model without a head, which gives no logits.
        use_mlm_head: a dense layer, the activation and a norm before the unembedding (BERT).
        logit_scale: multiplies the stream before the unembedding. output_logits_soft_cap: bounds the logits.

        init_mode: "gpt2", "normal", "xavier" (the original) or "t5"; initializer_range: the standard deviation, or what
            ``workbench.initialisation`` makes of it.
        use_attn_result, use_split_qkv_input: hook points that cost memory, off until asked for.
        model_name, revision, weights_description: provenance, printed with every result.
        device, dtype, attention_backend: how the model runs, not what it computes; neither compared nor saved.

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
    n_key_value_heads: int = None  # type: ignore[assignment]  # always set after __post_init__

    attention_dir: Literal["causal", "bidirectional"] = "causal"
    n_encoder_layers: int | None = None
    decoder_start_token_id: int | None = None

    act_fn: ActivationName = "gelu"
    gated_mlp: bool = False
    glu_limit: float | None = None
    glu_linear_offset: float = 0.0
    moe: MixtureOfExperts | None = None

    normalization_type: Literal["LN", "RMS"] = "LN"
    eps: float = 1e-5
    use_norm_bias: bool = True
    norm_gain_plus_one: bool = False
    norm_placement: NormPlacement = "pre"
    parallel_attn_mlp: bool = False
    shared_parallel_norm: bool = False
    dropout: float = 0.0

    embed_scale: float = 1.0
    use_embed_norm: bool = False
    n_segments: int | None = None
    positional_embedding_type: PositionType = "learned"
    sinusoidal_halves: bool = False
    rotary_base: float = 10_000.0
    rotary_base_local: float | None = None
    rotary_dim: int | None = None
    rotary_adjacent_pairs: bool = False
    rope_scaling: RopeScaling | None = None
    alibi_slopes: tuple[float, ...] | None = None
    n_relative_buckets: int = 32
    relative_max_distance: int = 128

    attn_scale: float | None = None
    attn_temperature: float = 1.0
    attn_scores_soft_cap: float | None = None
    attn_types: tuple[AttentionType, ...] | None = None
    window_size: int | None = None
    n_global_tokens: int = 0
    use_sink_logits: bool = False
    qk_norm: Literal["per_head", "across_heads"] | None = None
    qk_norm_after_rotary: bool = False

    use_qkv_bias: bool = False
    use_attn_out_bias: bool = False
    use_mlp_bias: bool = False
    use_unembed_bias: bool = False
    tie_word_embeddings: bool = False

    use_unembed: bool = True
    use_mlm_head: bool = False
    logit_scale: float = 1.0
    output_logits_soft_cap: float | None = None

    init_mode: InitMode = "gpt2"
    initializer_range: float = 0.02

    use_attn_result: bool = False
    use_split_qkv_input: bool = False

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
                object.__setattr__(self, name, check_tuple(name, getattr(self, name)))
        self._check_values()
        self._check_attention()
        self._check_positions()
        self._check_whole()

    def _check_values(self) -> None:
        check_switches(self)
        for name in ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "n_ctx", "n_key_value_heads"):
            check_size(name, getattr(self, name))
        for name, kind in (("rope_scaling", RopeScaling), ("moe", MixtureOfExperts)):
            if not isinstance(part := getattr(self, name), (kind, NoneType)):
                raise ValueError(f"{name} must be a {kind.__name__} or None, got {type(part).__name__}")
        for name in ("n_encoder_layers", "n_segments", "rotary_dim", "window_size"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        start = self.decoder_start_token_id
        whole = isinstance(start, int) and not isinstance(start, bool)
        if start is not None and not (whole and 0 <= start < self.d_vocab):
            raise ValueError(f"decoder_start_token_id must be a token id from 0 to {self.d_vocab - 1}, got {start!r}")
        for name in ("n_relative_buckets", "relative_max_distance"):
            check_size(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("eps", "rotary_base", "attn_temperature", "embed_scale", "logit_scale", "initializer_range"):
            check_positive(name, getattr(self, name))
        for name in ("attn_scale", "attn_scores_soft_cap", "output_logits_soft_cap", "rotary_base_local", "glu_limit"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        for slope in self.alibi_slopes or ():
            check_positive("alibi_slopes", slope)
        offset = self.glu_linear_offset
        if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not abs(offset) <= LARGEST_NUMBER:
            raise ValueError(f"glu_linear_offset must be a finite number, got {offset!r}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point torch.dtype such as torch.float32, got {self.dtype!r}")
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
                check_choice("attn_types", kind, get_args(AttentionType))
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
        if self.moe is not None and (beyond := [at for at in self.moe.dense_layers if at >= self.n_layers]):
            raise ValueError(f"dense_layers names layer {beyond[0]}, but there are {self.n_layers}, counted from 0")
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
        if not isinstance(fields, dict):
            raise ValueError(f"the configuration must be a dictionary of fields, got {fields!r:.80}")
        nested = {
            name: _from_fields(kind, fields[name], name) for name, kind in parts.items() if fields.get(name) is not None
        }
        return _from_fields(cls, {**fields, **nested}, "the configuration")


def _from_fields(kind: Any, fields: dict[str, Any], what: str) -> Any:
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"{what} must be a dictionary of fields, got {fields!r:.80}")
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
