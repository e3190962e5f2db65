"""Positions against transformers' functions, and against what their papers promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from workbench.components.positions import (
    alibi_slopes,
    relative_buckets,
    relative_offset_bias,
    rotary_frequencies,
    rotary_tables,
    rotate,
    sinusoidal_table,
)
from workbench.config import RopeScaling
from workbench.kernels import AttentionMask, attention

SETTINGS = settings(max_examples=20, deadline=None)

# A context of 64 tokens whose slow frequencies turn less than once, so that every type has something to do.
ORIGINAL = 64
SCALINGS = {
    "none": None,
    "linear": RopeScaling(type="linear", factor=4.0),
    "ntk": RopeScaling(type="ntk", factor=4.0),
    "dynamic": RopeScaling(type="dynamic", factor=2.0, original_context=ORIGINAL),
    "yarn": RopeScaling(type="yarn", factor=4.0, original_context=ORIGINAL, beta_fast=8.0),
    "llama3": RopeScaling(type="llama3", factor=4.0, original_context=ORIGINAL),
    "longrope": RopeScaling(
        type="longrope",
        factor=4.0,
        original_context=ORIGINAL,
        short_factor=(1.0, 1.1, 1.2, 1.3),
        long_factor=(1.0, 2.0, 3.0, 4.5),
    ),
}
ROTARY_DIM = 8
every_scaling = pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
both_layouts = pytest.mark.parametrize("adjacent_pairs", [False, True])


def plain_frequencies(rotary_dim: int, base: float) -> Tensor:
    return torch.tensor([base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Frequencies as transformers computes them


def reference_config(scaling: RopeScaling, rotary_dim: int, base: float, partial: float = 1.0) -> Any:
    """The configuration in transformers that asks for the same frequencies."""
    kind = Phi3Config if scaling.type == "longrope" else LlamaConfig
    fields: dict[str, Any] = {"rope_type": scaling.type, "rope_theta": base, "factor": scaling.factor}
    if scaling.type not in ("linear", "dynamic"):
        fields["original_max_position_embeddings"] = scaling.original_context
    if scaling.type in ("yarn", "longrope") and scaling.attention_factor is not None:
        fields["attention_factor"] = scaling.attention_factor
    if scaling.type == "yarn":
        fields |= {name: getattr(scaling, name) for name in ("beta_fast", "beta_slow", "truncate")}
    if scaling.type == "llama3":
        fields |= {name: getattr(scaling, name) for name in ("low_freq_factor", "high_freq_factor")}
    if scaling.type == "longrope":
        fields |= {name: list(getattr(scaling, name)) for name in ("short_factor", "long_factor")}
        del fields["factor"]  # it follows from the two contexts
    if partial != 1.0:
        fields["partial_rotary_factor"] = partial
    original = scaling.original_context or 128
    stretched = round(original * scaling.factor) if scaling.type == "longrope" else original
    d_head = round(rotary_dim / partial)
    sizes = {"hidden_size": 2 * d_head, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": None}
    if kind is Phi3Config:
        sizes["original_max_position_embeddings"] = original
    return kind(**sizes, max_position_embeddings=stretched, rope_parameters=fields)


def factors(n: int, step: float) -> tuple[float, ...]:
    return tuple(1 + step * i for i in range(n))


def compared_scalings(rotary_dim: int) -> list[RopeScaling]:
    n = rotary_dim // 2
    long = {"short_factor": factors(n, 0.03), "long_factor": factors(n, 1.7)}
    return [
        RopeScaling(type="linear", factor=2.5),
        RopeScaling(type="linear", factor=8.0),
        RopeScaling(type="dynamic", factor=2.0, original_context=2048),
        RopeScaling(type="dynamic", factor=5.5, original_context=512),
        RopeScaling(type="yarn", factor=4.0, original_context=4096),
        RopeScaling(type="yarn", factor=32.0, original_context=4096, truncate=False),
        RopeScaling(type="yarn", factor=0.5, original_context=512),
        RopeScaling(type="yarn", factor=8.0, original_context=128),  # nothing turns 32 times: the ramp starts at once
        RopeScaling(type="yarn", factor=8.0, original_context=4096, beta_slow=0.001),  # it would end behind the last
        RopeScaling(type="yarn", factor=8.0, original_context=6),  # nothing turns once: it has no width
        RopeScaling(type="yarn", factor=16.0, original_context=1000, beta_fast=20.0, beta_slow=2.0),
        RopeScaling(type="yarn", factor=40.0, original_context=4096, attention_factor=0.9),
        RopeScaling(type="llama3", factor=8.0, original_context=8192),
        RopeScaling(type="llama3", factor=32.0, original_context=256, low_freq_factor=2.0, high_freq_factor=9.0),
        RopeScaling(type="longrope", factor=32.0, original_context=4096, **long),
        RopeScaling(type="longrope", factor=0.5, original_context=512, **long),
        RopeScaling(type="longrope", factor=2.0, original_context=512, attention_factor=1.25, **long),
    ]


@pytest.mark.parametrize("base", [500.0, 10_000.0, 500_000.0])
@pytest.mark.parametrize("rotary_dim", [4, 10, 64, 128])
def test_frequencies_are_those_of_transformers(rotary_dim: int, base: float) -> None:
    for scaling in compared_scalings(rotary_dim):
        for length in (None, 1, scaling.original_context, 513, 3000, 100_000):
            cfg = reference_config(scaling, rotary_dim, base)
            expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling.type](cfg, torch.device("cpu"), seq_len=length)
            found, factor = rotary_frequencies(rotary_dim, base, scaling, length)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=lambda m: f"{scaling} {length}: {m}")  # noqa: B023
            assert factor == expected_factor


def test_partial_rotation_scales_the_rotated_dimensions_alone() -> None:
    """Ramps and exponents go by the rotated dimensions, not by the head's."""
    for scaling in compared_scalings(16):
        cfg = reference_config(scaling, 16, 10_000.0, partial=0.25)
        expected, _ = ROPE_INIT_FUNCTIONS[scaling.type](cfg, torch.device("cpu"), seq_len=5000)
        assert torch.equal(rotary_frequencies(16, 10_000.0, scaling, 5000)[0], expected)


@pytest.mark.parametrize("length", [40, 64, 65, 200])
@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_tables_are_those_of_transformers(name: str, length: int) -> None:
    """Without ``length``, the largest position decides what the scalings that depend on it do."""
    scaling = SCALINGS[name]
    cfg = reference_config(scaling, ROTARY_DIM, 10_000.0)
    module = (Phi3RotaryEmbedding if name == "longrope" else LlamaRotaryEmbedding)(cfg)
    position_ids = torch.stack((torch.arange(length), torch.arange(length).flip(0)))
    expected = module(torch.zeros(1), position_ids)
    found = rotary_tables(position_ids, ROTARY_DIM, 10_000.0, torch.float32, scaling)
    # transformers has the dynamic base in float32, which moves the angles of the slow frequencies by roundings.
    torch.testing.assert_close(found, tuple(expected), rtol=0, atol=2e-6 if name == "dynamic" else 0)


# What the scalings promise


def test_linear_interpolates_positions() -> None:
    """4 divides floats without rounding, so the tables are equal to the bit."""
    position_ids = torch.arange(300)[None]
    found = rotary_tables(position_ids, 16, 10_000.0, torch.float32, SCALINGS["linear"])
    expected = rotary_tables(position_ids / 4, 16, 10_000.0, torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@SETTINGS
@given(n_pairs=st.integers(2, 40), factor=st.floats(1, 50), base=st.floats(10, 1e6))
def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest(n_pairs: int, factor: float, base: float) -> None:
    found, _ = rotary_frequencies(2 * n_pairs, base, RopeScaling(type="ntk", factor=factor))
    ratios = plain_frequencies(2 * n_pairs, base) / found
    torch.testing.assert_close(ratios[[0, -1]], torch.tensor([1, factor]), rtol=1e-4, atol=0)
    assert (ratios.diff() > -1e-5 * factor).all()  # between them, the more the slower


@pytest.mark.parametrize("name", SCALINGS)
def test_one_pair_can_be_scaled(name: str) -> None:
    """d − 2 is 0; its one frequency is 1 whatever the base."""
    scaling = SCALINGS[name]
    if name == "longrope":
        scaling = RopeScaling(type="longrope", original_context=64, short_factor=(1.0,), long_factor=(2.0,))
    found, _ = rotary_frequencies(2, 10_000.0, scaling, 4 * ORIGINAL)
    divided = {"linear": 4.0, "longrope": 2.0}  # the one frequency turns ten times within the original context
    torch.testing.assert_close(found, torch.tensor([1 / divided.get(name, 1.0)]))


def test_dynamic_starts_beyond_the_original_context() -> None:
    scaling = RopeScaling(type="dynamic", factor=1.0, original_context=100)
    for length in (None, 1, 100):
        assert torch.equal(rotary_frequencies(16, 500.0, scaling, length)[0], rotary_frequencies(16, 500.0)[0])
    stretched = rotary_frequencies(16, 500.0, RopeScaling(type="ntk", factor=3.0))[0]
    torch.testing.assert_close(rotary_frequencies(16, 500.0, scaling, 300)[0], stretched)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("rotary_dim", "original", "base"), [(64, 4096, 1e4), (128, 32_768, 1e6), (20, 300, 500.0)])
def test_yarn_leaves_fast_frequencies_and_divides_slow_ones(
    rotary_dim: int, original: int, base: float, truncate: bool
) -> None:
    scaling = RopeScaling(type="yarn", factor=8.0, original_context=original, truncate=truncate)
    found, attention_factor = rotary_frequencies(rotary_dim, base, scaling)
    plain = plain_frequencies(rotary_dim, base)
    turns, ratios = original * plain / (2 * math.pi), plain / found
    fast, slow = turns >= scaling.beta_fast, turns <= scaling.beta_slow
    assert fast.any() and slow.any() and not (fast | slow).all()
    torch.testing.assert_close(ratios[fast], torch.ones(int(fast.sum())))
    torch.testing.assert_close(ratios[slow], torch.full((int(slow.sum()),), 8.0))
    between = ratios[~fast & ~slow]
    assert (between.diff() > 0).all() and between.min() > 1 and between.max() < 8
    assert attention_factor == pytest.approx(0.1 * math.log(8) + 1)


def test_llama3_leaves_fast_frequencies_and_divides_slow_ones() -> None:
    scaling = RopeScaling(type="llama3", factor=8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    found, attention_factor = rotary_frequencies(128, 500_000.0, scaling)
    plain = plain_frequencies(128, 500_000.0)
    wavelengths, ratios = 2 * math.pi / plain, plain / found
    fast, slow = wavelengths < 8192 / 4, wavelengths > 8192
    torch.testing.assert_close(ratios[fast], torch.ones(int(fast.sum())))
    torch.testing.assert_close(ratios[slow], torch.full((int(slow.sum()),), 8.0))
    between = ratios[~fast & ~slow]
    assert len(between) > 3 and (between.diff() > 0).all() and between.min() > 1 and between.max() < 8
    assert attention_factor == 1.0


def test_longrope_changes_its_divisors_beyond_the_original_context() -> None:
    scaling, plain = SCALINGS["longrope"], plain_frequencies(8, 10_000.0)
    for length, divisors in ((None, scaling.short_factor), (64, scaling.short_factor), (65, scaling.long_factor)):
        found, attention_factor = rotary_frequencies(8, 10_000.0, scaling, length)
        torch.testing.assert_close(found, plain / torch.tensor(divisors))
        assert attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


# What rotations promise


@both_layouts
@every_scaling
@SETTINGS
@given(
    query=st.integers(0, 100), key=st.integers(0, 100), shift=st.integers(1, 100), d_head=st.sampled_from([8, 11, 16])
)
def test_scores_depend_on_the_offset_alone(
    scaling: RopeScaling | None, adjacent_pairs: bool, query: int, key: int, shift: int, d_head: int
) -> None:
    """The dimensions from ``ROTARY_DIM`` on do not rotate, so their products do not depend on positions at all."""
    q, k = normal(1, 2, 3, d_head, seed=1), normal(1, 2, 3, d_head, seed=2)

    def scores(positions: tuple[int, int], x: Tensor, y: Tensor) -> Tensor:
        def rotated(position: int, x: Tensor) -> Tensor:
            ids = torch.full((1, 2), position)
            tables = rotary_tables(ids, ROTARY_DIM, 100.0, torch.float64, scaling, 300, adjacent_pairs)
            return rotate(x, tables, adjacent_pairs)

        return (rotated(positions[0], x) * rotated(positions[1], y)).sum(-1)

    shifted = scores((query + shift, key + shift), q, k)
    torch.testing.assert_close(scores((query, key), q, k), shifted, rtol=0, atol=5e-4)  # angles are float32


@both_layouts
@every_scaling
def test_rotation_preserves_norms(scaling: RopeScaling | None, adjacent_pairs: bool) -> None:
    """Of each pair, but for the attention factor. What does not rotate keeps its values to the bit."""
    x = normal(2, 90, 3, 11)
    ids = torch.stack((torch.arange(90), torch.arange(90) + 100))
    tables = rotary_tables(ids, ROTARY_DIM, 100.0, torch.float64, scaling, None, adjacent_pairs)
    turned = rotate(x, tables, adjacent_pairs)
    factor = rotary_frequencies(ROTARY_DIM, 100.0, scaling, 190)[1]

    def norms(x: Tensor) -> Tensor:
        pairs = x[..., :ROTARY_DIM].unflatten(-1, (-1, 2) if adjacent_pairs else (2, -1))
        return pairs.norm(dim=-1 if adjacent_pairs else -2)

    torch.testing.assert_close(norms(turned), factor * norms(x), rtol=1e-6, atol=0)
    assert torch.equal(turned[..., ROTARY_DIM:], x[..., ROTARY_DIM:])
    assert not torch.allclose(turned[..., :ROTARY_DIM], factor * x[..., :ROTARY_DIM])


def test_adjacent_pairs_turn_as_complex_numbers() -> None:
    """Su et al. 2021, equation 12: dimensions 2i and 2i + 1 are one number, multiplied by exp(i m θ_i)."""
    x = normal(1, 50, 2, 10)
    ids = torch.arange(50)[None]
    angles = ids[0, :, None] * plain_frequencies(10, 30.0).double()  # [pos, pair]
    expected = torch.view_as_complex(x.unflatten(-1, (5, 2))) * torch.exp(1j * angles)[:, None]
    found = rotate(x, rotary_tables(ids, 10, 30.0, torch.float64, adjacent_pairs=True), adjacent_pairs=True)
    torch.testing.assert_close(found, torch.view_as_real(expected).flatten(-2), rtol=0, atol=2e-5)


@SETTINGS
@given(n_pairs=st.integers(1, 9), rest=st.integers(0, 3))
def test_layouts_of_pairs_are_equal_up_to_the_permutation(n_pairs: int, rest: int) -> None:
    """Sorting even dimensions before odd ones turns adjacent pairs into halves."""
    d = 2 * n_pairs
    x, ids = normal(2, 7, 3, d + rest), torch.arange(7).expand(2, 7)
    order = [*range(0, d, 2), *range(1, d, 2), *range(d, d + rest)]
    adjacent = rotate(x, rotary_tables(ids, d, 100.0, torch.float64, adjacent_pairs=True), adjacent_pairs=True)
    halves = rotate(x[..., order], rotary_tables(ids, d, 100.0, torch.float64))
    torch.testing.assert_close(adjacent[..., order], halves, rtol=0, atol=0)


@both_layouts
def test_rotate_keeps_the_type(adjacent_pairs: bool) -> None:
    tables = rotary_tables(torch.arange(5)[None], 4, 100.0, torch.float32, adjacent_pairs=adjacent_pairs)
    for d_head in (4, 6):
        assert rotate(normal(1, 5, 2, d_head).bfloat16(), tables, adjacent_pairs).dtype == torch.bfloat16


# Sinusoids


def test_sinusoids_by_hand() -> None:
    """d_model = 4: angles m and m / 100."""
    rows = [[math.sin(m), math.cos(m), math.sin(m / 100), math.cos(m / 100)] for m in range(6)]
    torch.testing.assert_close(sinusoidal_table(6, 4), torch.tensor(rows), rtol=0, atol=1e-7)
    assert torch.equal(sinusoidal_table(6, 4, halves=True), sinusoidal_table(6, 4)[:, [0, 2, 1, 3]])
    assert sinusoidal_table(3, 4, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("k", [1, 7, 64])
def test_sinusoids_at_a_distance_are_a_fixed_linear_map(k: int) -> None:
    """Vaswani et al. 2017, section 3.5: PE(m + k) is a function of PE(m) that is the same for all m, a rotation."""
    table = sinusoidal_table(200, 10, dtype=torch.float64)
    angles = [k / 10_000 ** (2 * i / 10) for i in range(5)]
    blocks = [
        torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]], dtype=torch.float64) for a in angles
    ]
    torch.testing.assert_close(table[:-k] @ torch.block_diag(*blocks).T, table[k:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("d_model", [2, 12, 13, 512])
def test_halves_are_those_of_marian(d_model: int) -> None:
    expected = MarianSinusoidalPositionalEmbedding(70, d_model).create_weight()
    torch.testing.assert_close(sinusoidal_table(70, d_model, halves=True), expected, rtol=0, atol=1e-7)


def test_an_odd_width_lacks_the_last_cosine() -> None:
    wide, odd = sinusoidal_table(5, 7), sinusoidal_table(5, 7, halves=True)
    assert wide.shape == odd.shape == (5, 7)
    assert torch.equal(wide[:, [0, 2, 4, 6, 1, 3, 5]], odd)


# ALiBi


def test_slopes_of_eight_heads() -> None:
    """Press et al. 2022, section 3: 1/2, 1/4, …, 1/256."""
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5, 12, 16, 20, 32, 71, 112])
def test_slopes_are_those_of_bloom(n_heads: int) -> None:
    """Bloom's bias is slope · position, so position 1 has the slope itself."""
    bias = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float32)
    torch.testing.assert_close(alibi_slopes(n_heads), bias[:, 0, 1], rtol=1e-5, atol=0)  # bloom multiplies float32


# Relative positions

BUCKETS = [
    (32, 128, True),
    (32, 128, False),
    (8, 20, True),
    (8, 20, False),
    (4, 128, True),
    (2, 30, False),
    (7, 50, True),
]


@pytest.mark.parametrize(("n_buckets", "max_distance", "bidirectional"), BUCKETS)
def test_buckets_are_those_of_t5(n_buckets: int, max_distance: int, bidirectional: bool) -> None:
    distance = torch.arange(-300, 301)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, n_buckets, max_distance)
    found = relative_buckets(distance, n_buckets, max_distance, bidirectional)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)
    assert found.min() >= 0 and found.max() < n_buckets


def test_buckets_by_hand() -> None:
    """8 buckets, one direction: 0 to 3 have their own; 4 · 4^(j/4) starts bucket 4 + j: 4, 5.7, 8, 11.3."""
    distances = [5, 0, -1, -3, -4, -5, -6, -7, -8, -11, -12, -15, -16, -900]
    expected = [0, 0, 1, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]
    assert relative_buckets(torch.tensor(distances), 8, 16, bidirectional=False).tolist() == expected


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_refuse_what_leaves_none(bidirectional: bool) -> None:
    with pytest.raises(ValueError, match="n_buckets must be at least"):
        relative_buckets(torch.arange(3), 3 if bidirectional else 1, 128, bidirectional)
    with pytest.raises(ValueError, match="max_distance must exceed 8"):
        relative_buckets(torch.arange(3), 32 if bidirectional else 16, 8, bidirectional)


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_queries", "n_keys", "offset"), [(7, 7, 0), (3, 9, 6), (1, 9, 8), (3, 9, 2), (9, 4, 0)])
def test_offset_bias_is_t5s(n_queries: int, n_keys: int, offset: int, bidirectional: bool, backend: str) -> None:
    """Attention with the bias by offsets equals attention with the bias of every pair, also in its gradient."""
    heads, n_buckets, max_distance = 3, 8, 12
    q, k, v = normal(2, heads, n_queries, 5), normal(2, heads, n_keys, 5, seed=1), normal(2, heads, n_keys, 5, seed=2)
    module = T5Attention(
        T5Config(
            d_model=15, d_kv=5, num_heads=heads, is_decoder=not bidirectional,
            relative_attention_num_buckets=n_buckets, relative_attention_max_distance=max_distance,
        ),
        has_relative_attention_bias=True, layer_idx=0,
    )  # fmt: skip
    module.relative_attention_bias.weight.data = normal(n_buckets, heads, seed=3)
    scores = q @ k.mT + module.compute_bias(n_queries, n_keys, past_seen_tokens=offset)
    if not bidirectional:
        behind = torch.arange(n_keys) > torch.arange(n_queries)[:, None] + offset
        scores = scores.masked_fill(behind, -math.inf)
    expected = scores.softmax(-1) @ v

    table = module.relative_attention_bias.weight.detach().clone().requires_grad_()
    bias = relative_offset_bias(table, n_queries, n_keys, offset, max_distance, bidirectional)
    assert bias.shape == (heads, n_queries + n_keys - 1)
    mask = AttentionMask(causal=not bidirectional, query_offset=offset)
    found = attention(q, k, v, mask=mask, scale=1.0, offset_bias=bias, backend=backend).z
    torch.testing.assert_close(found, expected)
    weights = normal(*found.shape, seed=4)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(table.grad, module.relative_attention_bias.weight.grad)
