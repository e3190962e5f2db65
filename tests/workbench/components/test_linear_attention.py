"""Linear attention: equal to its quadratic form in any chunks and pieces, and what its layer shows and refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench.components.linear_attention import (
    LinearAttention,
    feature_map,
    linear_attention,
    linear_attention_pattern,
    linear_state,
)
from workbench.components.positions import rotary_tables
from workbench.config import TransformerConfig
from workbench.context import AttentionContext, PositionRules
from workbench.kernels import AttentionMask, StatisticsRequest
from workbench.kv_cache import KVCache

Case = tuple[Tensor, Tensor, Tensor, Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """q, k, v in float64 and which keys are real: odd sizes, grouped heads, padding anywhere."""
    batch, kv_heads, group, n, d = (draw(st.integers(1, most)) for most in (2, 2, 3, 17, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(heads: int) -> Tensor:
        return 2 * torch.randn(batch, heads, n, d, dtype=torch.float64, generator=generator)

    real = torch.rand(batch, n, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    return normal(kv_heads * group), normal(kv_heads), normal(kv_heads), real


def _case(n: int = 13) -> Case:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 3, dtype=torch.float64, generator=generator) for heads in (6, 2, 2))
    return q, k, v, torch.rand(2, n, generator=generator) < 0.8


def _by_loops(q: Tensor, k: Tensor, v: Tensor, causal: bool, real: Tensor) -> Tensor:
    """Equations 7 and 9 pair by pair, from the definition alone."""

    def phi(x: float) -> float:
        return x + 1 if x > 0 else math.exp(x)

    z = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                weights = [
                    sum(phi(x) * phi(y) for x, y in zip(q[b, h, i].tolist(), k[b, h // group, j].tolist(), strict=True))
                    if real[b, j] and (j <= i or not causal)
                    else 0.0
                    for j in range(k.shape[2])
                ]
                if any(weights):
                    z[b, h, i] = sum(w * v[b, h // group, j] for j, w in enumerate(weights)) / sum(weights)
    return z


@pytest.mark.parametrize("causal", [True, False])
def test_equals_the_definition_pair_by_pair(causal: bool) -> None:
    q, k, v, real = _case(7)
    z, _ = linear_attention(q, k, v, causal=causal, key_real=real, chunk=3)
    torch.testing.assert_close(z, _by_loops(q, k, v, causal, real), rtol=1e-12, atol=1e-12)


@given(case=cases(), causal=st.booleans(), chunk=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_equals_the_quadratic_form_in_any_chunks(case: Case, causal: bool, chunk: int) -> None:
    q, k, v, real = case
    pattern = linear_attention_pattern(q, k, causal=causal, key_real=real)
    z, state = linear_attention(q, k, v, causal=causal, key_real=real, chunk=chunk)
    group = q.shape[1] // k.shape[1]
    torch.testing.assert_close(z, pattern @ v.repeat_interleave(group, 1), rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(state, linear_state(k, v, key_real=real), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@given(case=cases(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_fed_in_pieces_equals_at_once(case: Case, data: st.DataObject) -> None:
    q, k, v, real = case
    n = q.shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=4))) if n > 1 else []
    whole, final = linear_attention(q, k, v, causal=True, key_real=real)
    state, pieces = None, []
    for start, end in zip([0, *cuts], [*cuts, n], strict=True):
        piece = slice(start, end)
        z, state = linear_attention(
            q[:, :, piece], k[:, :, piece], v[:, :, piece], causal=True, key_real=real[:, piece], state=state, chunk=4
        )
        pieces.append(z)
    torch.testing.assert_close(torch.cat(pieces, dim=2), whole, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(state, final, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_bidirectional_sums_start_from_a_state() -> None:
    q, k, v, real = _case()
    _, state = linear_attention(q[:, :, :5], k[:, :, :5], v[:, :, :5], causal=False, key_real=real[:, :5])
    z, _ = linear_attention(q, k[:, :, 5:], v[:, :, 5:], causal=False, key_real=real[:, 5:], state=state)
    torch.testing.assert_close(z, linear_attention(q, k, v, causal=False, key_real=real)[0], rtol=1e-12, atol=1e-12)


@given(case=cases(), causal=st.booleans())
@settings(max_examples=40, deadline=None)
def test_pattern_rows_are_shares_of_the_visible_keys(case: Case, causal: bool) -> None:
    q, k, _, real = case
    pattern = linear_attention_pattern(q, k, causal=causal, key_real=real)
    visible = real[:, None, None].expand_as(pattern)
    visible = visible.tril() if causal else visible
    assert ((pattern > 0) == visible).all()
    torch.testing.assert_close(pattern.sum(-1), visible.any(-1).double(), rtol=1e-12, atol=0)


def test_a_pattern_of_the_last_queries_is_the_last_rows() -> None:
    q, k, _, real = _case()
    whole = linear_attention_pattern(q, k, causal=True, key_real=real)
    last = linear_attention_pattern(q[:, :, -4:], k, causal=True, key_real=real)
    torch.testing.assert_close(last, whole[:, :, -4:])


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_later_key_changes_no_earlier_row(chunk: int) -> None:
    q, k, v, _ = _case()
    before, _ = linear_attention(q, k, v, causal=True, chunk=chunk)
    k[:, :, 6] += 1
    v[:, :, 6] -= 1
    after, _ = linear_attention(q, k, v, causal=True, chunk=chunk)
    moved = (before != after).any(dim=-1).any(dim=1).any(dim=0)
    assert moved.tolist() == [i >= 6 for i in range(13)]
    moved = (linear_attention(q, k, v, causal=False)[0] != linear_attention(q, k + 1, v, causal=False)[0]).any(-1)
    assert moved.all()


@pytest.mark.parametrize("causal", [True, False])
def test_padding_counts_for_nothing_whatever_it_holds(causal: bool) -> None:
    q, k, v, real = _case()
    expected, state = linear_attention(q, k, v, causal=causal, key_real=real)
    pads = ~real[:, None, :, None]
    found, found_state = linear_attention(
        q, k.masked_fill(pads, torch.nan), v.masked_fill(pads, torch.inf), causal=causal, key_real=real
    )
    assert torch.equal(found, expected)
    assert all(torch.equal(*pair) for pair in zip(found_state, state, strict=True))


def test_rows_without_keys_are_zero() -> None:
    q, k, v, _ = _case()
    real = (torch.arange(13) >= 5).expand(2, -1)
    z, _ = linear_attention(q, k, v, causal=True, key_real=real)
    assert (z[:, :, :5] == 0).all() and (z[:, :, 5:] != 0).all()
    assert (linear_attention_pattern(q, k, causal=True, key_real=real)[:, :, :5] == 0).all()
    z, _ = linear_attention(q, k, v, causal=False, key_real=torch.zeros_like(real))
    assert (z == 0).all()


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_the_numbers(causal: bool) -> None:
    q, k, v, real = (x[:1] for x in _case(5))
    _, state = linear_attention(q, k, v, causal=causal)

    def run(q: Tensor, k: Tensor, v: Tensor, outer: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        z, final = linear_attention(q, k, v, causal=causal, key_real=real, state=(outer, total), chunk=2)
        return z, *final, linear_attention_pattern(q, k, causal=causal, key_real=real)

    assert torch.autograd.gradcheck(run, tuple(x.detach().requires_grad_() for x in (q, k, v, *state)))


def test_feature_map_is_elu_plus_one_and_never_nothing() -> None:
    x = torch.linspace(-5, 5, 41, dtype=torch.float64)
    torch.testing.assert_close(feature_map(x), torch.nn.functional.elu(x) + 1, rtol=1e-12, atol=1e-15)
    low = torch.tensor([-20.0, -90.0, -1e4])  # elu(x) + 1 is 0 for each of them in float32
    features = feature_map(low)
    assert (features > 0).all()
    torch.testing.assert_close(features[:2], torch.tensor([-20.0, -90.0]).exp())


@pytest.mark.parametrize("causal", [True, False])
def test_features_near_nothing_still_give_shares(causal: bool) -> None:
    q, k, v, _ = (x.float() for x in _case())
    # Products of e⁻⁶⁰ and e⁻⁶⁰ are far below float32; in float64 they are not.
    found, _ = linear_attention(q - 60, k - 60, v, causal=causal)
    expected, _ = linear_attention((q - 60).double(), (k - 60).double(), v.double(), causal=causal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for low in (-200, -1e4):  # e⁻²⁰⁰ itself is below
        shares, _ = linear_attention(q + low, k + low, torch.ones_like(v), causal=causal)
        torch.testing.assert_close(shares, torch.ones_like(shares))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    q, k, v, real = _case(300)
    half = [x.to(dtype) for x in (q, k, v)]
    z, state = linear_attention(*half, causal=True, key_real=real)
    assert z.dtype == dtype and state[0].dtype == state[1].dtype == torch.float32
    expected, _ = linear_attention(*(x.double() for x in half), causal=True, key_real=real)
    torch.testing.assert_close(z.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 6, 4, 3)}, "a query for each key"),
        ({"q": torch.zeros(2, 5, 13, 3)}, "a multiple of k's"),
        ({"v": torch.zeros(2, 2, 12, 3)}, "k and v alike"),
        ({"key_real": torch.ones(2, 13)}, "key_real must be a bool tensor"),
        ({"key_real": torch.ones(2, 12, dtype=torch.bool)}, "key_real must be a bool tensor"),
        ({"chunk": 0}, "chunk must be a positive integer"),
    ],
)
def test_sizes_that_do_not_fit(change: dict[str, object], message: str) -> None:
    q, k, v, _ = _case()
    arguments = {"q": q.float(), "k": k.float(), "v": v.float(), "causal": True, **change}
    with pytest.raises(ValueError, match=message):
        linear_attention(**arguments)


# The layer


def _layer(**options: object) -> LinearAttention:
    """In float64, every parameter drawn."""
    torch.manual_seed(0)
    chosen = {
        "n_layers": 1, "d_model": 10, "n_heads": 4, "n_key_value_heads": 2, "d_head": 4, "d_mlp": 8, "d_vocab": 5,
        "n_ctx": 32, "positional_embedding_type": "none", "attn_types": ("linear",), "use_qkv_bias": True,
        "use_attn_out_bias": True, **options,
    }  # fmt: skip
    layer = LinearAttention(TransformerConfig(**chosen), 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    layer.hook_pattern.name = "blocks.0.attn.hook_pattern"
    return layer


def _x(n: int = 9) -> Tensor:
    return torch.randn(2, n, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _context(
    n_queries: int = 9,
    n_keys: int = 9,
    *,
    rotation: tuple[Tensor, Tensor] | None = None,
    cache: KVCache | None = None,
    **mask: object,
) -> AttentionContext:
    return AttentionContext(
        mask=AttentionMask(**mask), positions=PositionRules(query_rotation=rotation, key_rotation=rotation),
        tokens=None, n_queries=n_queries, n_keys=n_keys, user_request=StatisticsRequest(), cache=cache,
    )  # fmt: skip


def _run(layer: LinearAttention, x: Tensor, context: AttentionContext) -> Tensor:
    return layer(x, x, x, context)


@pytest.mark.parametrize("causal", [True, False])
def test_layer_is_projection_attention_and_sum_over_heads(causal: bool) -> None:
    layer, x = _layer(), _x()
    real = torch.arange(9) >= torch.tensor([[2], [0]])
    q = torch.einsum("bpd,hde->bhpe", x, layer.W_Q) + layer.b_Q[:, None]
    k = torch.einsum("bpd,hde->bhpe", x, layer.W_K) + layer.b_K[:, None]
    v = torch.einsum("bpd,hde->bhpe", x, layer.W_V) + layer.b_V[:, None]
    z = _by_loops(q, k, v, causal, real).masked_fill(~real[:, None, :, None], 0)
    expected = torch.einsum("bhpe,hed->bpd", z, layer.W_O) + layer.b_O
    found = _run(layer, x, _context(causal=causal, key_padding=real, query_padding=real))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["auto", "materialised"])
def test_a_listener_changes_no_number_and_sees_the_shares(backend: str) -> None:
    layer, x, seen = _layer(attention_backend=backend), _x(), {}
    real = torch.arange(9) >= torch.tensor([[2], [0]])
    context = _context(key_padding=real, query_padding=real)
    plain = _run(layer, x, context)
    for name in ("hook_pattern", "hook_state", "hook_z", "hook_q", "hook_k", "hook_v"):
        getattr(layer, name).add_hook(lambda value, hook, name=name: seen.update({name: value.detach()}))
    torch.testing.assert_close(_run(layer, x, context), plain, rtol=1e-10, atol=1e-10)
    assert seen["hook_pattern"].shape == (2, 4, 9, 9)
    torch.testing.assert_close(seen["hook_pattern"].sum(-1), real[:, None].expand(-1, 4, -1).double())
    q, k, v = (seen[name].transpose(1, 2) for name in ("hook_q", "hook_k", "hook_v"))
    expected = seen["hook_pattern"] @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(seen["hook_z"].transpose(1, 2), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        seen["hook_state"], torch.einsum("bhjd,bhje->bhde", feature_map(k) * real[:, None, :, None], v)
    )
    assert q.shape == (2, 4, 9, 4)


@pytest.mark.parametrize("hook", ["hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k", "hook_pattern", "hook_z"])
def test_an_edit_at_any_hook_changes_the_output(hook: str) -> None:
    layer, x = _layer(positional_embedding_type="rotary"), _x()
    rotation = rotary_tables(torch.arange(9)[None].expand(2, -1), 4, 100.0, torch.float64)
    before = _run(layer, x, _context(rotation=rotation))
    getattr(layer, hook).add_hook(lambda value, hook: value * torch.linspace(0, 1, value.shape[-1], dtype=value.dtype))
    assert not torch.allclose(_run(layer, x, _context(rotation=rotation)), before)


def test_the_state_is_read_only() -> None:
    layer = _layer()
    layer.hook_state.add_hook(lambda value, hook: value * 2)
    with pytest.raises(ValueError, match="read-only"):
        _run(layer, _x(), _context())


def test_results_of_heads_sum_to_the_output() -> None:
    layer, x, seen = _layer(use_attn_result=True), _x(), {}
    layer.hook_result.add_hook(lambda value, hook: seen.update(result=value.detach()))
    out = _run(layer, x, _context())
    assert seen["result"].shape == (2, 9, 4, 10)
    torch.testing.assert_close(seen["result"].sum(2) + layer.b_O, out)
    torch.testing.assert_close(_run(_layer(), x, _context()), out, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"qk_norm": "per_head"}, {"qk_norm": "across_heads"}])
@pytest.mark.parametrize("after", [False, True])
def test_norm_and_rotation_act_before_the_feature_map(options: dict[str, str], after: bool) -> None:
    layer = _layer(positional_embedding_type="rotary", rotary_dim=2, qk_norm_after_rotary=after, **options)
    rotation = rotary_tables(torch.arange(9)[None].expand(2, -1), 2, 100.0, torch.float64)
    x, seen = _x(), {}
    for name in ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k", "hook_z"):
        getattr(layer, name).add_hook(lambda value, hook, name=name: seen.update({name: value.detach()}))
    _run(layer, x, _context(rotation=rotation))
    positioned = {}
    for name, norm in (("q", "q_norm"), ("k", "k_norm")):
        value = seen[f"hook_{name}"]

        def normalised(value: Tensor, norm: str = norm) -> Tensor:
            if not options:
                return value
            flat = value if options["qk_norm"] == "per_head" else value.flatten(2)
            return getattr(layer, norm)(flat).view_as(value)

        cosine, sine = (table[:, :, None, :1] for table in rotation)
        value = value if after else normalised(value)
        first, second, rest = value[..., :1], value[..., 1:2], value[..., 2:]
        value = torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)
        torch.testing.assert_close(seen[f"hook_rot_{name}"], value)
        positioned[name] = (normalised(value) if after else value).transpose(1, 2)
    expected, _ = linear_attention(positioned["q"], positioned["k"], seen["hook_v"].transpose(1, 2), causal=True)
    torch.testing.assert_close(seen["hook_z"].transpose(1, 2), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 8], list(range(1, 9))])
def test_with_a_cache_in_pieces_equals_at_once(cuts: list[int]) -> None:
    layer, x, cache = _layer(), _x(), KVCache()
    real = torch.arange(9) >= torch.tensor([[2], [0]])
    whole = _run(layer, x, _context(key_padding=real, query_padding=real))
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, 9], strict=True):
        seen, new = real[:, :end], real[:, start:end]
        context = _context(end - start, end, key_padding=seen, query_padding=new, cache=cache)
        pieces.append(_run(layer, x[:, start:end], context))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-10, atol=1e-10)
    assert cache.nbytes == 2 * 2 * (4 * 4 + 4) * 8  # batch · kv heads · (S and s) · bytes, whatever the text's length


def test_documents_windowed_caches_and_patterns_of_earlier_keys_are_refused() -> None:
    layer, x = _layer(), _x()
    with pytest.raises(ValueError, match="cannot keep packed documents apart"):
        _run(layer, x, _context(documents=torch.zeros(2, 9, dtype=torch.int64)))
    with pytest.raises(ValueError, match="must not have a window"):
        _run(layer, x, _context(cache=KVCache(window=8)))
    cache = KVCache()
    _run(layer, x, _context(cache=cache))
    layer.hook_pattern.add_hook(lambda value, hook: None)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.hook_pattern has a hook, but of earlier keys"):
        _run(layer, x, _context(cache=cache))
    flash = _layer(attention_backend="flash")
    flash.hook_pattern.add_hook(lambda value, hook: None)
    with pytest.raises(ValueError, match="attention_backend='flash' never builds the pattern"):
        _run(flash, x, _context())


def test_sums_stay_wide_under_autocast() -> None:
    layer, x, seen = _layer().float(), _x(9).float(), {}
    layer.hook_k.add_hook(lambda value, hook: seen.update(k=value.detach()))
    layer.hook_v.add_hook(lambda value, hook: seen.update(v=value.detach()))
    cache = KVCache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _run(layer, x, _context(cache=cache))
    assert seen["k"].dtype == torch.bfloat16
    k, v = (seen[name].transpose(1, 2).double() for name in ("k", "v"))
    torch.testing.assert_close(cache.state(0)[0].double(), linear_state(k, v)[0], rtol=1e-5, atol=1e-5)
