"""Positions as pure functions: rotations, sinusoids, and what scores gain or lose with distance."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from workbench.config_parts import RopeScaling, RopeScalingType

Rotation = tuple[Tensor, Tensor]  # cosine and sine, each [batch, pos, rotated dimension]


# Rotary positions


def rotary_tables(
    position_ids: Tensor,
    rotary_dim: int,
    base: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    length: int | None = None,
    adjacent_pairs: bool = False,
) -> Rotation:
    """Cosine and sine of the angles m · θ_i, each [batch, pos, rotary_dim], as ``rotate`` reads them.

    Frequencies and angles are float32 as in the models' reference implementations: at position 4,000 a wider type
    would differ from what the weights were trained with by 1e-4 rad.

    Args:
        position_ids: [batch, pos], the m.
        scaling: changes the θ_i (see ``rotary_frequencies``) and may lengthen what it rotates.
        length: tokens of the input, for the scalings that depend on it; None: the largest position + 1.
        adjacent_pairs: whether ``rotate`` is told so.

    Source: Su et al. 2021, equation 15 (equation 34 for the element-wise form).
    """
    if length is None and scaling is not None and scaling.depends_on_length:
        length = int(position_ids.max()) + 1
    frequencies, factor = rotary_frequencies(rotary_dim, base, scaling, length, position_ids.device)
    angles = position_ids[..., None].float() * frequencies  # [batch, pos, rotary_dim / 2]
    angles = angles.repeat_interleave(2, dim=-1) if adjacent_pairs else torch.cat((angles, angles), dim=-1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x: Tensor, rotation: Rotation, adjacent_pairs: bool = False) -> Tensor:
    """Rotates pairs of dimensions of x [batch, pos, head, d_head] by their position's angles; the type stays x's.

    The first ``rotary_dim`` dimensions (as many as the tables have) rotate, the others pass. Dimension i is paired with
    i + rotary_dim / 2, the layout of Llama checkpoints, or with ``adjacent_pairs`` 2i with 2i + 1, that of the paper.

    Under torch.autocast x is narrower than the tables; q and k then keep the type of v, as attention wants it.
    """
    cosine, sine = rotation
    rotary_dim = cosine.shape[-1]
    pairs, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if adjacent_pairs:
        turned = torch.stack((-pairs[..., 1::2], pairs[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = pairs.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    rotated = (pairs * cosine[:, :, None] + turned * sine[:, :, None]).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def rotary_frequencies(
    rotary_dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    length: int | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, float]:
    """The frequencies θ_i in radians per position, float32 [rotary_dim / 2], and the factor on cosine and sine.

    Unscaled, θ_i = base^(−2i / rotary_dim) (Su et al. 2021, equation 15). The steps and their order are those of the
    models' reference implementations, so that float32 rounds alike.

    Args:
        length: tokens of the input, which "dynamic" and "longrope" go by; None: no more than the original context.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    if scaling is None:
        return _plain(exponents, base), 1.0
    return _SCALED[scaling.type](exponents, base, scaling, length), _attention_factor(scaling)


def _plain(exponents: Tensor, base: float) -> Tensor:
    return 1.0 / base**exponents


def _linear(exponents: Tensor, base: float, scaling: RopeScaling, length: int | None) -> Tensor:
    """θ_i / factor: positions are interpolated into the original context. Source: Chen et al. 2023, equation 4."""
    return _plain(exponents, base) / scaling.factor


def _ntk(exponents: Tensor, base: float, scaling: RopeScaling, length: int | None) -> Tensor:
    """Another base: base · factor^(d / (d − 2)), d = rotary_dim.

    The first frequency stays, the last is divided by factor. Source: Peng et al. 2023 (YaRN), section 3.1.
    """
    return _plain(exponents, base * scaling.factor ** _ntk_exponent(exponents))


def _dynamic(exponents: Tensor, base: float, scaling: RopeScaling, length: int | None) -> Tensor:
    """NTK with a factor that grows with the input: factor · length / original_context − (factor − 1), at least 1.

    Source: Peng et al. 2023 (YaRN), section 3.3, with ``factor`` as transformers has it (1 gives the paper's form).
    """
    original = scaling.original_context
    assert original is not None  # RopeScaling has seen to it, here and below
    stretch = scaling.factor * max(length or 0, original) / original - (scaling.factor - 1)
    return _plain(exponents, base * stretch ** _ntk_exponent(exponents))


def _ntk_exponent(exponents: Tensor) -> float:
    """d / (d − 2); where a single pair rotates, its frequency is 1 for any base, so any exponent will do."""
    rotary_dim = 2 * len(exponents)
    return rotary_dim / max(rotary_dim - 2, 1)


def _yarn(exponents: Tensor, base: float, scaling: RopeScaling, length: int | None) -> Tensor:
    """(1 − γ) θ_i / factor + γ θ_i: fast frequencies stay, slow ones are interpolated.

    γ falls from 1 to 0 between the dimensions whose frequencies turn ``beta_fast`` and ``beta_slow`` times within the
    original context. It is linear in i, as in the authors' code, where the paper has it linear in the turns.

    Source: Peng et al. 2023 (YaRN), sections 3.2 and 3.4.
    """
    original = scaling.original_context
    assert original is not None
    rotary_dim = 2 * len(exponents)

    def dimension(turns: float) -> float:  # the i, not whole, for which θ_i · original / 2π = turns
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low or 0.001  # a step, where the ramp has no width
    indices = torch.arange(len(exponents), dtype=torch.float32, device=exponents.device)
    kept = 1 - ((indices - low) / width).clamp(0, 1)  # γ
    powers = base**exponents
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(exponents: Tensor, base: float, scaling: RopeScaling, length: int | None) -> Tensor:
    """(1 − γ) θ_i / factor + γ θ_i, where γ is linear in the turns within the original context.

    γ is 0 up to ``low_freq_factor`` turns, 1 from ``high_freq_factor`` on. Source: the code of the Llama 3.1 release.
    """
    original, low, high = scaling.original_context, scaling.low_freq_factor, scaling.high_freq_factor
    assert original is not None
    frequencies = _plain(exponents, base)
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # γ
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _longrope(exponents: Tensor, base: float, scaling: RopeScaling, length: int | None) -> Tensor:
    """θ_i / λ_i: a divisor for each frequency, found by search; one set within the original context, one beyond.

    Source: Ding et al. 2024 (LongRoPE), section 3.1, without its first tokens that stay as they are.
    """
    assert scaling.original_context is not None
    is_long = length is not None and length > scaling.original_context
    divisors = exponents.new_tensor(scaling.long_factor if is_long else scaling.short_factor)
    return 1.0 / (divisors * base**exponents)


# From exponents 2i / d, base, scaling and the input's length to frequencies.
_SCALED: dict[RopeScalingType, Callable[[Tensor, float, RopeScaling, int | None], Tensor]] = {
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _attention_factor(scaling: RopeScaling) -> float:
    """Longer texts spread attention, so yarn and longrope lengthen q and k: the scores grow by the factor's square.

    yarn: 0.1 ln(factor) + 1 (Peng et al. 2023, section 3.4). longrope: sqrt(1 + ln(factor) / ln(original_context)),
    from the code of the Phi-3 release.
    """
    if scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.type == "yarn":
        return 0.1 * math.log(scaling.factor) + 1
    assert scaling.original_context is not None
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))


# Absolute positions


def sinusoidal_table(
    n_positions: int,
    d_model: int,
    halves: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[n_positions, d_model]: sin(m / 10000^(2i / d_model)) in column 2i, its cosine in column 2i + 1.

    With ``halves`` all sines come before all cosines. Where d_model is odd, the last cosine is missing.

    Source: Vaswani et al. 2017, section 3.5.
    """
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model  # of the CPU: not every device has float64
    angles = torch.arange(n_positions, dtype=torch.float64)[:, None] / 10_000.0**exponents
    sines, cosines = angles.sin(), angles.cos()  # [n_positions, ceil(d_model / 2)]
    table = torch.cat((sines, cosines), dim=1) if halves else torch.stack((sines, cosines), dim=2).flatten(1)
    return table[:, :d_model].to(device, dtype)


# What scores gain or lose with distance


def alibi_slopes(n_heads: int) -> Tensor:
    """float32 [n_heads], positive: head h loses slope_h · |i − j| from its score.

    2^(−8 (h + 1) / n) for n a power of two. For other counts, the slopes of the next smaller power p, and then every
    second one of those for 2p heads, as in the paper's code.

    Source: Press et al. 2022, section 3.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-4 * h / power) for h in range(1, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes + between, dtype=torch.float32)


def relative_buckets(distance: Tensor, n_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """int64, of distance's shape: the bucket of each distance, which is the key's position minus the query's.

    Half of the buckets hold one distance each, the other half grow by equal ratios up to ``max_distance``; what lies
    beyond shares the last one. ``bidirectional`` gives the second half of all buckets to keys behind the query;
    otherwise those share the bucket of distance 0.

    Raises:
        ValueError: too few buckets, or a ``max_distance`` within the buckets that hold one distance each.

    Source: Raffel et al. 2020, section 2.1.
    """
    n_sided = n_buckets // 2 if bidirectional else n_buckets
    n_exact = n_sided // 2
    if n_exact < 1:
        raise ValueError(f"n_buckets must be at least {4 if bidirectional else 2}, got {n_buckets}")
    if max_distance <= n_exact:
        raise ValueError(f"max_distance must exceed {n_exact}, the buckets of one distance each, got {max_distance}")
    away = distance.abs() if bidirectional else (-distance).clamp(min=0)
    ratio = (away.clamp(min=n_exact).float() / n_exact).log() / math.log(max_distance / n_exact)  # 1 at max_distance
    shared = (n_exact + (ratio * (n_sided - n_exact)).long()).clamp(max=n_sided - 1)
    buckets = torch.where(away < n_exact, away, shared)
    return buckets + (distance > 0) * n_sided if bidirectional else buckets


def relative_offset_bias(
    table: Tensor, n_queries: int, n_keys: int, query_offset: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """T5's bias as ``offset_bias`` of ``workbench.kernels.attention``: [n_heads, n_queries + n_keys − 1].

    There, column c is for row − column = c − (n_keys − 1), and rows count the queries given: row r has position
    ``query_offset`` + r among the keys. So column c holds the bias for the distance n_keys − 1 − c − ``query_offset``.

    Args:
        table: [n_buckets, n_heads], which gradients reach.
        query_offset: the mask's, n_keys − n_queries with a KV cache.

    Raises:
        ValueError: as ``relative_buckets``.
    """
    columns = torch.arange(n_queries + n_keys - 1, device=table.device)
    distance = n_keys - 1 - query_offset - columns  # key − query
    return table[relative_buckets(distance, len(table), max_distance, bidirectional)].mT
