"""What a cache with a window forgets, what it weighs, and the statistics of queries that read one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench import HookedTransformer, KVCache, StatisticsRequest, TransformerConfig
from workbench.components.positions import relative_buckets
from workbench.testing import read_in_pieces

SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 6, "n_key_value_heads": 2, "d_mlp": 20, "d_vocab": 23,
    "n_ctx": 32, "dtype": torch.float64, "normalization_type": "RMS", "positional_embedding_type": "rotary",
}  # fmt: skip


def build(**options: Any) -> HookedTransformer:
    """A model whose every parameter is random and large enough to matter."""
    cfg = TransformerConfig(**SIZES | options)
    model = HookedTransformer(cfg).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = 1 + 0.3 * noise if name.endswith(".w") else 0.5 * noise
    return model


def text(n_rows: int, n_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 23, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: tuple[int, ...], n_tokens: int) -> Tensor:
    """bool [batch, n_tokens], the last ``lengths`` of each row true."""
    return torch.arange(n_tokens) >= n_tokens - torch.tensor(lengths)[:, None]


def assert_same(found: Tensor, expected: Tensor, real: Tensor | None = None, tolerance: float = 1e-9) -> None:
    if real is not None:  # what stands at a pad is nobody's business
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.detach().abs().max()))


# Eviction


def visible(t: int, window: int, n_sink: int) -> list[int]:
    """The keys of the query at t: the first n_sink tokens and the last window − n_sink."""
    return [j for j in range(t + 1) if j < n_sink or j > t - (window - n_sink)]


def turned(x: Tensor, position: int, base: float) -> Tensor:
    """One head's vector [d_head], its pairs (i, i + d_head / 2) turned as complex numbers."""
    half = len(x) // 2
    angles = position * base ** (-torch.arange(half, dtype=torch.float64) / half)
    product = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((product.real, product.imag))


@torch.no_grad()
def by_definition(model: HookedTransformer, tokens: Tensor, window: int, n_sink: int) -> Tensor:
    """Logits [pos, d_vocab] of one text by loops over layers, heads, queries and keys, positions counted anew."""
    cfg, kind = model.cfg, model.cfg.positional_embedding_type
    x = model.embed(tokens[None])[0]
    if kind == "learned":
        x = x + model.pos_embed.W_pos[: len(tokens)]
    for block in model.blocks:
        h, attn = block.ln1(x[None])[0], block.attn
        out = torch.zeros_like(x)
        for head in range(cfg.n_heads):
            group = head // (cfg.n_heads // cfg.n_key_value_heads)
            q, k, v = h @ attn.W_Q[head], h @ attn.W_K[group], h @ attn.W_V[group]
            for t in range(len(tokens)):
                keys = visible(t, window, n_sink)
                own = len(keys) - 1  # the query's rank among what it sees
                scores = []
                for rank, j in enumerate(keys):
                    query, key, bias = q[t], k[j], torch.tensor(0.0)
                    if kind == "rotary":
                        query, key = turned(query, own, cfg.rotary_base), turned(key, rank, cfg.rotary_base)
                    elif kind == "alibi":
                        bias = -(2.0 ** (-8 * (head + 1) / cfg.n_heads)) * torch.tensor(own - rank)
                    elif kind == "relative":
                        away = torch.tensor(rank - own)
                        bucket = relative_buckets(away, cfg.n_relative_buckets, cfg.relative_max_distance, False)
                        bias = model.relative_bias.W_rel[bucket, head]
                    scores.append(query @ key / math.sqrt(cfg.d_head) + bias)
                weights = torch.stack(scores).softmax(0)
                out[t] += sum(w * v[j] for w, j in zip(weights, keys, strict=True)) @ attn.W_O[head]
        x = x + out
        x = x + block.mlp(block.ln2(x[None]))[0]
    return model.unembed(model.ln_final(x[None]))[0]


POLICIES = [(1, 0), (5, 0), (5, 2), (4, 3), (40, 4)]


@pytest.mark.parametrize(("n_layers", "positions"), [(1, "rotary"), (3, "rotary"), (3, "alibi"), (2, "none")])
def test_eviction_is_what_its_definition_says(n_layers, positions):
    model = build(n_layers=n_layers, positional_embedding_type=positions, n_heads=2, n_key_value_heads=1)
    lengths = (13, 7, 2)
    tokens, real = text(3, 13), left_padded(lengths, 13)
    for window, n_sink in POLICIES:
        expected = [by_definition(model, tokens[i, 13 - n :], window, n_sink) for i, n in enumerate(lengths)]
        for sizes in ([1] * 13, [7, 6], [13], [2, 1, 4, 6]):
            found = read_in_pieces(model, tokens, sizes, real, KVCache(window=window, n_sink_tokens=n_sink))
            for row, logits in zip(zip(found, real, strict=True), expected, strict=True):
                assert_same(row[0][row[1]], logits, tolerance=1e-5)  # the model's angles are float32


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_eviction_where_positions_are_tables(positions):
    options = {"n_relative_buckets": 6, "relative_max_distance": 7} if positions == "relative" else {}
    model = build(positional_embedding_type=positions, **options)
    tokens = text(1, 12)
    for window, n_sink in POLICIES[:2] if positions == "learned" else POLICIES:
        expected = by_definition(model, tokens[0], window, n_sink)
        assert_same(read_in_pieces(model, tokens, [5, 7], kv_cache=KVCache(window, n_sink))[0], expected)


_EVICTING = build(n_layers=2, positional_embedding_type="alibi", n_heads=2, n_key_value_heads=1)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_pieces_pads_and_policy(data):
    """Each row alone, in one piece and without pads, is what it is in any batch and any pieces."""
    n_tokens = data.draw(st.integers(1, 14))
    n_sink = data.draw(st.integers(0, 3))
    window = data.draw(st.integers(n_sink + 1, 10))
    lengths = tuple(data.draw(st.lists(st.integers(1, n_tokens), min_size=1, max_size=3)))
    sizes, left = [], n_tokens
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    tokens, real = text(len(lengths), n_tokens), left_padded(lengths, n_tokens)
    cache = KVCache(window=window, n_sink_tokens=n_sink)
    found = read_in_pieces(_EVICTING, tokens, sizes, real, cache)
    assert len(cache) == min(window, n_tokens)
    for row, length in enumerate(lengths):
        alone = tokens[row : row + 1, n_tokens - length :]
        expected = read_in_pieces(_EVICTING, alone, [length], kv_cache=KVCache(window=window, n_sink_tokens=n_sink))
        assert_same(found[row : row + 1, n_tokens - length :], expected)
        kept = visible(length - 1, window, n_sink)
        assert cache.positions[row][cache.real[row]].tolist() == kept
        assert cache.tokens[row][cache.real[row]].tolist() == alone[0, kept].tolist()
        previous = [-1 if j == 0 else int(alone[0, j - 1]) for j in kept]
        assert cache.previous[row][cache.real[row]].tolist() == previous
    assert cache.n_seen.tolist() == list(lengths)


def test_a_window_streams_a_text_beyond_the_context():
    model = build(n_ctx=8)
    tokens = text(1, 30)
    expected = by_definition(model, tokens[0], 8, 2)
    found = read_in_pieces(model, tokens, [12, 18], kv_cache=KVCache(window=8, n_sink_tokens=2))
    assert_same(found[0], expected, tolerance=1e-5)
    with pytest.raises(ValueError, match="n_ctx"):
        read_in_pieces(model, tokens, [30])
    with pytest.raises(ValueError, match="n_ctx"):  # a learned table ends, whatever the cache forgets
        read_in_pieces(
            build(n_ctx=8, positional_embedding_type="learned"), tokens[:, :9], [8, 1], kv_cache=KVCache(window=4)
        )


@pytest.mark.parametrize("start", [1, 3, 9])
def test_other_tokens_than_the_first_can_be_kept(start):
    """Logits of one layer are those of the kept tokens alone; with more layers what was read before stays as it was."""
    model = build(n_layers=1, positional_embedding_type="alibi", n_heads=2, n_key_value_heads=1)
    tokens, lengths = text(2, 14), (14, 11)
    real = left_padded(lengths, 14)
    for sizes in ([1] * 14, [7, 7], [14], [2, 1, 4, 7]):
        cache = KVCache(window=6, n_sink_tokens=2, sink_start=start)
        found = read_in_pieces(model, tokens, sizes, real, cache)
        for row, length in enumerate(lengths):
            own = tokens[row, 14 - length :]
            for t in range(length):
                chosen = {j for j in (start, start + 1) if j <= t}
                others = [j for j in range(t + 1) if j not in chosen]
                kept = sorted(chosen | set(others[len(others) - min(len(others), 6 - len(chosen)) :]))
                expected = model(own[None, kept])[:, -1]
                assert_same(found[row : row + 1, 14 - length + t], expected)
            assert cache.positions[row][cache.real[row]].tolist() == kept


def test_global_tokens_stay_where_sinks_keep_them():
    """Sinks are the first columns of the cache, so a local layer goes on seeing them."""
    model = build(n_layers=1, window_size=2, n_global_tokens=1, positional_embedding_type="none")
    tokens = text(1, 9)
    expected = model(tokens)  # one global token and the last two are within any window of 3 or more
    assert_same(read_in_pieces(model, tokens, [4, 5], kv_cache=KVCache(window=4, n_sink_tokens=1)), expected)
    for cache in (KVCache(window=4), KVCache(window=4, n_sink_tokens=1, sink_start=1)):
        with pytest.raises(ValueError, match="n_global_tokens.*n_sink_tokens=1"):
            read_in_pieces(model, tokens, [9], kv_cache=cache)


# Memory


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_memory_is_two_vectors_for_each_token_layer_and_key_value_head(n_kv_heads, dtype):
    model = build(n_key_value_heads=n_kv_heads).to(dtype)
    per_token = 2 * 2 * n_kv_heads * 6 * dtype.itemsize  # keys and values, layers
    for cache, kept in ((KVCache(), 14), (KVCache(window=5), 5), (KVCache(window=6, n_sink_tokens=2), 6)):
        assert cache.bytes_per_token(model.cfg) == per_token
        assert cache.nbytes == 0
        for end in (3, 14):
            read_in_pieces(model, text(2, end - len(cache)), [end - len(cache)], kv_cache=cache)
        assert cache.nbytes == 2 * kept * per_token
        assert len(cache) == kept


def test_a_linear_layer_takes_the_same_memory_for_any_text():
    model, cache = build(attn_types=("linear", "global")), KVCache()
    states = 2 * 2 * 6 * (6 + 1) * 8  # rows, key/value heads, S and s, float64
    for seen in (3, 10):
        read_in_pieces(model, text(2, seen - len(cache)), [seen - len(cache)], kv_cache=cache)
        assert cache.nbytes == states + 2 * seen * cache.bytes_per_token(model.cfg)
    assert cache.bytes_per_token(model.cfg) == 2 * 2 * 6 * 8


# Statistics


def rows_of(statistics: Any, query: slice) -> dict[str, Tensor]:
    """Every statistic of the chosen queries, labels apart."""
    found = {name: value[..., query] for name, value in statistics.items() if isinstance(value, Tensor)}
    found |= {f"match {name}": value[..., query] for name, value in statistics["match_mass"].items()}
    found |= {name: statistics[name][..., query, :] for name in ("offset_mass",)}
    return {name: value for name, value in found.items() if not name.startswith("received")}  # those are of keys


@pytest.mark.parametrize(
    "options", [{}, {"use_sink_logits": True, "window_size": 6}, {"attention_backend": "materialised"}]
)
def test_statistics_of_the_last_token(options):
    model, tokens, real = build(**options), text(3, 14) % 4, left_padded((14, 9, 2), 14)
    request = StatisticsRequest(
        entropy=True, max_weight=True, mean_distance=True, sink_keys=2, offsets=(0, 1, 3), received=True,
        match=("induction", "duplicate"),
    )  # fmt: skip
    _, full = model.run_with_statistics(tokens, request, attention_mask=real)
    cache = KVCache()
    read_in_pieces(model, tokens[:, :-1], [13], real[:, :-1], cache)
    _, last = model.run_with_statistics(tokens[:, -1:], request, attention_mask=real[:, -1:], kv_cache=cache)
    expected, found = rows_of(full, slice(-1, None)), rows_of(last, slice(None))
    assert found.keys() == expected.keys() >= {"lse", "entropy", "sink_mass", "offset_mass", "match induction"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("n_sink", [0, 2])
def test_induction_is_found_also_where_the_token_before_a_key_was_evicted(n_sink):
    model, tokens, cache = build(), text(1, 20), KVCache(window=6, n_sink_tokens=n_sink)
    kept = visible(19, 6, n_sink)
    tokens[0, [kept[n_sink] - 1, 17]] = int(tokens[0, 19])  # before the first recent one, and among them
    read_in_pieces(model, tokens[:, :-1], [19], kv_cache=cache)
    patterns = {}
    note = lambda x, hook: patterns.update({hook.layer(): x})  # noqa: E731
    with model.hooks([(lambda name: name.endswith("hook_pattern"), note)]):
        _, statistics = model.run_with_statistics(
            tokens[:, -1:], StatisticsRequest(match=("induction",)), kv_cache=cache
        )
    assert kept[n_sink] - 1 not in kept
    follows = torch.tensor([j > 0 and bool(tokens[0, j - 1] == tokens[0, 19]) for j in kept])
    assert follows[n_sink] and follows[-2]
    for layer, pattern in patterns.items():
        mass = statistics["match_mass"]["induction"][layer, ..., -1]
        torch.testing.assert_close(mass, (pattern[..., 0, :] * follows).sum(-1))


def test_statistics_are_of_one_piece():
    with pytest.raises(ValueError, match="splits these 6 tokens"):
        build().run_with_statistics(text(1, 6), kv_cache=KVCache(window=5))
