"""Identities that hold whatever the inputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kernels import AttentionMask, StatisticsRequest, attention, match_labels

BACKENDS = ("reference", "streaming")
SETTINGS = settings(max_examples=25, deadline=None)
windows = st.none() | st.integers(1, 80)


def draw_inputs(seed, n, heads=(4, 2), batch=2, d_head=6):
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads[0], heads[1], heads[1])
    return tuple(torch.randn(batch, h, n, d_head, generator=generator, dtype=torch.float64) for h in sizes)


def ask(q, k, v, mask, backend="streaming", **request):
    return attention(q, k, v, mask=mask, statistics=StatisticsRequest(**request), backend=backend)


@SETTINGS
@given(st.integers(0, 99), st.integers(1, 70), st.booleans(), windows, st.sampled_from([(1, 1), (4, 3), (16, 100)]))
def test_masses_add_up(seed, n, causal, window, pooled):
    mask = AttentionMask(causal=causal, window=window)
    offsets = tuple(range(0 if causal else 1 - n, n))
    request = {"received": True, "pooled": pooled, "offsets": offsets, "sink_keys": n, "max_weight": True}
    found = ask(*draw_inputs(seed, n), mask, **request)
    statistics, ones = found.statistics, torch.ones(2, 4, n, dtype=torch.float64)
    torch.testing.assert_close(statistics["sink_mass"], ones)
    torch.testing.assert_close(statistics["offset_mass"].sum(3), ones)
    torch.testing.assert_close(statistics["received"].sum(2), n * ones[..., 0])
    torch.testing.assert_close(statistics["pooled_sum"].sum((2, 3)), n * ones[..., 0])
    torch.testing.assert_close(statistics["pooled_max"].amax((2, 3)), statistics["max_weight"].amax(2))
    rows = torch.nn.functional.pad(ones, (0, -n % pooled[0])).unflatten(2, (-1, pooled[0])).sum(3)
    torch.testing.assert_close(statistics["pooled_sum"].sum(3), rows)
    if pooled == (1, 1):
        torch.testing.assert_close(statistics["pooled_sum"].sum(2), statistics["received"])


@SETTINGS
@given(st.integers(1, 70), st.booleans(), windows, st.sampled_from(BACKENDS))
def test_equal_scores_spread_evenly(n, causal, window, backend):
    """q = 0: entropy is the log of the number of visible keys, every key is received at lift 1."""
    q, k, v = draw_inputs(0, n)
    mask = AttentionMask(causal=causal, window=window)
    found = ask(0 * q, k, v, mask, backend, entropy=True, received=True, mean_distance=True, max_weight=True).statistics
    visible = mask.bind(2, n, n)
    counts = visible.keys_per_query()[:, None].expand(2, 4, n).double()
    torch.testing.assert_close(found["entropy"], counts.log())
    torch.testing.assert_close(found["max_weight"], 1 / counts)
    torch.testing.assert_close(found["received_lift"], torch.ones_like(counts))
    torch.testing.assert_close(found["received"], visible.sum_over_queries(1 / counts))
    if causal:
        torch.testing.assert_close(found["mean_distance"], (counts - 1) / 2)
        assert torch.equal(found["argmax_key"], torch.arange(n).sub(counts.long() - 1).expand(2, 4, n))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_weight_on_one_key(backend):
    """Keys are far apart, queries copies of keys: entropy 0, and the arg-max is the copied key."""
    n = 50
    k = 100 * torch.eye(n, dtype=torch.float64)[None, None]
    target = torch.randint(0, n, (n,), generator=torch.Generator().manual_seed(0))
    mask, request = AttentionMask(causal=False), {"entropy": True, "max_weight": True, "mean_distance": True}
    found = ask(k[:, :, target], k, k, mask, backend, **request)
    assert torch.equal(found.statistics["argmax_key"][0, 0], target)
    assert (found.statistics["entropy"] < 1e-12).all()
    torch.testing.assert_close(found.statistics["mean_distance"][0, 0], (torch.arange(n) - target).abs().double())


@SETTINGS
@given(st.integers(0, 99), st.integers(2, 70), st.booleans())
def test_a_vector_added_to_every_key_shifts_lse_alone(seed, n, causal):
    q, k, v = draw_inputs(seed, n)
    shift = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mask = AttentionMask(causal=causal)
    before, after = (ask(q, keys, v, mask, entropy=True, received=True, sink_keys=1) for keys in (k, k + shift))
    torch.testing.assert_close(after.z, before.z)
    torch.testing.assert_close(after.lse, before.lse + q @ shift / math.sqrt(6))
    for name in ("entropy", "received", "sink_mass"):
        torch.testing.assert_close(after.statistics[name], before.statistics[name])


@SETTINGS
@given(st.integers(0, 99), st.integers(2, 70))
def test_without_causality_keys_may_be_permuted(seed, n):
    q, k, v = draw_inputs(seed, n)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    mask = AttentionMask(causal=False)
    before = ask(q, k, v, mask, received=True, max_weight=True, entropy=True)
    after = ask(q, k[:, :, order], v[:, :, order], mask, received=True, max_weight=True, entropy=True)
    torch.testing.assert_close(after.z, before.z)
    torch.testing.assert_close(after.statistics["received"], before.statistics["received"][..., order])
    assert torch.equal(order[after.statistics["argmax_key"]], before.statistics["argmax_key"])


@SETTINGS
@given(st.integers(0, 99), st.integers(2, 70), st.integers(1, 69), windows)
def test_attention_to_parts_of_the_keys_merges_to_the_whole(seed, n, cut, window):
    cut = min(cut, n - 1)
    q, k, v = draw_inputs(seed, n)
    whole = attention(q, k, v, mask=AttentionMask(window=window))
    left = attention(q, k[:, :, :cut], v[:, :, :cut], mask=AttentionMask(window=window, query_offset=0))
    right = attention(q, k[:, :, cut:], v[:, :, cut:], mask=AttentionMask(window=window, query_offset=-cut))
    lse = torch.logaddexp(left.lse, right.lse)
    merged = sum(part.z * (part.lse - lse).exp()[..., None] for part in (left, right))
    torch.testing.assert_close(lse, whole.lse)
    torch.testing.assert_close(merged, whole.z)


@SETTINGS
@given(st.integers(0, 99), st.integers(1, 70), st.integers(1, 70), windows)
def test_the_last_queries_alone_are_the_last_rows(seed, n, last, window):
    """Decoding: positions, window, distance and offsets count from the key's end."""
    last = min(last, n)
    q, k, v = draw_inputs(seed, n)
    mask, request = AttentionMask(window=window), {"entropy": True, "mean_distance": True, "offsets": (0, 1)}
    whole, part = ask(q, k, v, mask, **request), ask(q[:, :, n - last :], k, v, mask, **request)
    torch.testing.assert_close(part.z, whole.z[:, :, n - last :])
    for name in ("lse", "entropy", "mean_distance", "offset_mass"):
        torch.testing.assert_close(part.statistics[name], whole.statistics[name][:, :, n - last :])


@SETTINGS
@given(st.integers(0, 99), st.integers(1, 70), st.booleans())
def test_options_that_do_nothing(seed, n, causal):
    q, k, v = draw_inputs(seed, n)
    plain = attention(q, k, v, mask=AttentionMask(causal=causal))
    for mask, options in (
        (AttentionMask(causal=causal, window=n), {}),
        (AttentionMask(causal=causal, window=1, n_global=n), {}),
        (AttentionMask(causal=causal, documents=torch.full((2, n), 7)), {}),
        (AttentionMask(causal=causal, key_padding=torch.ones(2, n, dtype=torch.bool)), {}),
        (AttentionMask(causal=causal), {"softcap": 1e8}),
        (AttentionMask(causal=causal), {"alibi_slopes": torch.zeros(4)}),
        (AttentionMask(causal=causal), {"sink_logits": torch.full((4,), -torch.inf)}),
        (AttentionMask(causal=causal), {"offset_bias": torch.zeros(4, 2 * n - 1)}),
    ):
        found = attention(q, k, v, mask=mask, **options)
        torch.testing.assert_close(found.z, plain.z)
        torch.testing.assert_close(found.lse, plain.lse)


def test_a_window_of_one_sees_itself():
    q, k, v = draw_inputs(0, 40)
    found = ask(q, k, v, AttentionMask(window=1), offsets=(0,), mean_distance=True, entropy=True)
    torch.testing.assert_close(found.z, v.repeat_interleave(2, 1))
    torch.testing.assert_close(found.statistics["offset_mass"][..., 0], torch.ones(2, 4, 40, dtype=torch.float64))
    assert (found.statistics["mean_distance"] == 0).all()


def test_alibi_is_a_bias_on_the_offset():
    q, k, v = draw_inputs(0, 30)
    slopes, mask = torch.tensor([0.5, 0.25, 0.1, 0.0]), AttentionMask(causal=False)
    offsets = torch.arange(-29, 30)
    given_as_bias = attention(q, k, v, mask=mask, offset_bias=-slopes[:, None] * offsets.abs())
    found = attention(q, k, v, mask=mask, alibi_slopes=slopes)
    torch.testing.assert_close(found.z, given_as_bias.z)
    torch.testing.assert_close(found.lse, given_as_bias.lse)


@SETTINGS
@given(st.integers(0, 99), st.integers(1, 70), windows)
def test_grouped_heads_are_heads_with_repeated_keys(seed, n, window):
    q, k, v = draw_inputs(seed, n)
    mask, request = AttentionMask(window=window), {"entropy": True, "received": True}
    grouped = ask(q, k, v, mask, **request)
    repeated = ask(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), mask, **request)
    torch.testing.assert_close(grouped.z, repeated.z)
    torch.testing.assert_close(grouped.statistics["entropy"], repeated.statistics["entropy"])
    torch.testing.assert_close(grouped.statistics["received"], repeated.statistics["received"])


@SETTINGS
@given(st.integers(0, 99), st.integers(1, 40), st.integers(1, 40))
def test_documents_do_not_see_each_other(seed, first, second):
    """Two documents in one row are what each is alone."""
    q, k, v = draw_inputs(seed, first + second)
    documents = torch.arange(first + second).ge(first).long().expand(2, -1)
    packed = ask(q, k, v, AttentionMask(documents=documents), entropy=True)
    for rows in (slice(0, first), slice(first, None)):
        alone = ask(q[:, :, rows], k[:, :, rows], v[:, :, rows], AttentionMask(), entropy=True)
        torch.testing.assert_close(packed.z[:, :, rows], alone.z)
        torch.testing.assert_close(packed.statistics["entropy"][:, :, rows], alone.statistics["entropy"])


@SETTINGS
@given(st.integers(0, 99), st.integers(1, 30), st.integers(1, 30))
def test_left_padding_changes_nothing(seed, n, pads):
    q, k, v = draw_inputs(seed, n + pads)
    real = torch.arange(n + pads).ge(pads).expand(2, -1)
    request = {"entropy": True, "received": True, "mean_distance": True}
    padded = ask(q, k, v, AttentionMask(key_padding=real, query_padding=real), **request)
    alone = ask(q[:, :, pads:], k[:, :, pads:], v[:, :, pads:], AttentionMask(), **request)
    for name in ("entropy", "received", "received_mean", "received_lift", "mean_distance"):
        torch.testing.assert_close(padded.statistics[name][..., pads:], alone.statistics[name])


def test_induction_mass_of_a_perfect_induction_head():
    """A sequence of 20 distinct tokens, twice, and a head that looks at the token after the earlier copy."""
    tokens = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:20].repeat(2)[None]
    directions = torch.eye(101, dtype=torch.float64)
    before = torch.cat((torch.tensor([[100]]), tokens[:, :-1]), 1)
    q, k = 200 * directions[tokens][:, None], directions[before][:, None]
    match = {name: match_labels(tokens, name) for name in ("induction", "duplicate")}
    mass = ask(q, k, k, AttentionMask(), match=match).statistics["match_mass"]
    assert not mass["induction"][..., :20].any() and not mass["duplicate"][..., :20].any()
    assert (mass["induction"][..., 20:] > 0.999).all()
    assert (mass["duplicate"][..., 20:] < 1e-3).all()
