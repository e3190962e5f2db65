"""Reading a text in pieces equals reading it at once, also under hooks; what a cache forgets, refuses and weighs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workbench import (
    HookedEncoderDecoder,
    HookedTransformer,
    KVCache,
    RopeScaling,
    StatisticsRequest,
    TransformerConfig,
)
from workbench.components.positions import relative_buckets

SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 6, "n_key_value_heads": 2, "d_mlp": 20, "d_vocab": 23,
    "n_ctx": 32, "dtype": torch.float64, "normalization_type": "RMS", "positional_embedding_type": "rotary",
}  # fmt: skip


def build(**options: Any) -> HookedTransformer:
    """A model whose every parameter is random and large enough to matter."""
    cfg = TransformerConfig(**SIZES | options)
    model = (HookedTransformer if cfg.n_encoder_layers is None else HookedEncoderDecoder)(cfg).eval()
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


def chunkings(n_tokens: int) -> Iterator[list[int]]:
    """One by one, by sevens, all at once, and irregular."""
    yield [1] * n_tokens
    yield [min(7, n_tokens - start) for start in range(0, n_tokens, 7)]
    yield [n_tokens]
    yield [2, 1, 4, n_tokens - 7]


@torch.no_grad()
def read(
    model: HookedTransformer,
    tokens: Tensor,
    sizes: list[int],
    real: Tensor | None = None,
    cache: KVCache | None = None,
    hooks: list | None = None,
    **arguments: Any,
) -> Tensor:
    """The logits of a text that is read in pieces of these sizes on one cache."""
    cache, outputs = KVCache() if cache is None else cache, []
    is_decoder = model.cfg.n_encoder_layers is not None
    start = 0
    with model.hooks(hooks or []):
        for size in sizes:
            piece = slice(start, start + size)
            mask = None if real is None else real[:, piece]
            own = (
                {"decoder_input": tokens[:, piece], "decoder_attention_mask": mask}
                if is_decoder
                else {"input": tokens[:, piece], "attention_mask": mask}
            )
            outputs.append(model(**own, kv_cache=cache, **arguments))
            start += size
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def read_at_once(
    model: HookedTransformer, tokens: Tensor, real: Tensor | None = None, hooks: list | None = None, **arguments: Any
) -> Tensor:
    """The same in one pass without a cache."""
    is_decoder = model.cfg.n_encoder_layers is not None
    names = ("decoder_input", "decoder_attention_mask") if is_decoder else ("input", "attention_mask")
    with model.hooks(hooks or []):
        return model(**dict(zip(names, (tokens, real), strict=True)), **arguments)


def assert_same(found: Tensor, expected: Tensor, real: Tensor | None = None, tolerance: float = 1e-9) -> None:
    if real is not None:  # what stands at a pad is nobody's business
        found, expected = found[real], expected[real]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


# Edits that know which tokens they mean: the same function serves a whole text and its pieces.


def ablate_head(x: Tensor, hook: Any) -> Tensor:
    x[:, :, 1] = 0
    return x


def edit_each(x: Tensor, hook: Any) -> Tensor:
    """Every token's vectors by its position."""
    return x * (1 + 0.5 * torch.sin(1.0 + hook.position_ids))[..., None, None]


def edit_some(x: Tensor, hook: Any) -> Tensor:
    """Only the tokens at positions 2 and 5."""
    chosen = (hook.position_ids == 2) | (hook.position_ids == 5)
    return torch.where(chosen[..., None], -2 * x, x)


def edit_keys(x: Tensor, hook: Any) -> Tensor:
    """Rotated keys [batch, key, head, d_head] of positions 1 and 4."""
    chosen = (hook.key_position_ids == 1) | (hook.key_position_ids == 4)
    return torch.where(chosen[..., None, None], -x, x)


def edit_pattern(x: Tensor, hook: Any) -> Tensor:
    """What tokens from position 4 on pay to position 3, [batch, head, query, key]."""
    chosen = (hook.position_ids >= 4)[:, :, None] & (hook.key_position_ids == 3)[:, None, :]
    return torch.where(chosen[:, None], 0.25 * x, x)


def hooks_of(model: HookedTransformer) -> dict[str, list]:
    """Sets of hooks by what they edit."""
    softmax = [layer for layer, kind in enumerate(model.cfg.layer_types) if kind != "linear"]
    found = {
        "a head": [("blocks.0.attn.hook_z", ablate_head)],
        "keys and values": [("blocks.0.attn.hook_k", edit_each), ("blocks.1.attn.hook_v", edit_each)],
        "some positions": [("blocks.1.hook_resid_pre", edit_some)],
    }
    if softmax:  # the pattern of a linear layer cannot be had with a cache
        found["the pattern"] = [(f"blocks.{layer}.attn.hook_pattern", edit_pattern) for layer in softmax]
    if softmax and model.cfg.positional_embedding_type == "rotary":
        found["rotated keys"] = [(f"blocks.{layer}.attn.hook_rot_k", edit_keys) for layer in softmax]
    return found


def check_pieces(model: HookedTransformer, tokens: Tensor, real: Tensor | None = None, **arguments: Any) -> None:
    """Every chunking equals one pass, without hooks and, in irregular pieces, under each set of them."""
    plain = read_at_once(model, tokens, real, **arguments)
    *regular, irregular = chunkings(tokens.shape[1])
    for sizes in (*regular, irregular):
        assert_same(read(model, tokens, sizes, real, **arguments), plain, real)
    for hooks in hooks_of(model).values():
        edited = read_at_once(model, tokens, real, hooks=hooks, **arguments)
        assert not torch.allclose(edited, plain, rtol=0, atol=1e-3)
        assert_same(read(model, tokens, irregular, real, hooks=hooks, **arguments), edited, real)


def test_pieces_equal_one_pass_for_every_mechanism(mechanism):
    model, arguments = mechanism.model, dict(mechanism.arguments)
    if model.cfg.attention_dir != "causal":
        with pytest.raises(ValueError, match="needs causal attention"):
            model(**arguments, return_type=None, kv_cache=KVCache())
        return
    tokens = arguments.pop("decoder_input" if model.cfg.n_encoder_layers is not None else "input")
    if model.cfg.n_encoder_layers is not None:
        arguments = {"encoder_output": model.encode(arguments["input"])[0].detach()}
    real = left_padded((tokens.shape[1], 6), tokens.shape[1])
    if model.cfg.n_global_tokens:  # those count from the first column
        check_pieces(model, tokens)
        with pytest.raises(ValueError, match="must not be padded on the left"):
            read(model, tokens, [12], real)
    else:
        assert_same(
            read(model, tokens, [5, 1, tokens.shape[1] - 6], **arguments), read_at_once(model, tokens, **arguments)
        )
        check_pieces(model, tokens, real, **arguments)


FACTORS = {"short_factor": (1.0, 1.5, 2.0), "long_factor": (2.0, 3.0, 4.0)}


@pytest.mark.parametrize(
    "options",
    [
        {"n_key_value_heads": 1, "rotary_adjacent_pairs": True, "rotary_dim": 4, "rope_scaling": scaling}
        for scaling in (
            RopeScaling(type="linear", factor=3.0),
            RopeScaling(type="ntk", factor=3.0),
            RopeScaling(type="llama3", factor=3.0, original_context=8),
        )
    ]
    + [
        {"rope_scaling": RopeScaling(type="dynamic", factor=2.0, original_context=16)},
        {"rope_scaling": RopeScaling(type="longrope", factor=4.0, original_context=16, **FACTORS)},
        {"rope_scaling": RopeScaling(type="yarn", factor=4.0, original_context=8), "n_key_value_heads": 4},
        {"attn_types": ("local", "global", "local"), "n_layers": 3, "window_size": 4, "use_sink_logits": True},
        {"positional_embedding_type": "alibi", "window_size": 5, "n_key_value_heads": 4},
        {"positional_embedding_type": "relative", "n_relative_buckets": 8, "relative_max_distance": 12},
        {"attention_backend": "materialised", "attn_temperature": 0.5},
        {"use_split_qkv_input": True, "use_attn_result": True},
        {"attn_types": ("linear", "linear"), "qk_norm": "per_head"},
    ],
    ids=str,
)
def test_pieces_equal_one_pass(options):
    model = build(**options)
    tokens = text(3, 14)
    check_pieces(model, tokens, left_padded((14, 9, 3), 14))


def test_encoder_decoders_read_padded_texts_in_pieces():
    model = build(n_encoder_layers=2, positional_embedding_type="sinusoidal")
    source, source_real, real = text(3, 8, seed=2), left_padded((8, 3, 5), 8), left_padded((11, 9, 3), 11)
    check_pieces(model, text(3, 11), real, input=source, attention_mask=source_real)
    encoded, mask = model.encode(source, attention_mask=source_real)
    expected = read_at_once(model, text(3, 11), real, input=source, attention_mask=source_real)
    found = read(model, text(3, 11), [5, 6], real, encoder_output=encoded, attention_mask=mask)
    assert_same(found, expected, real)


def test_hooks_are_told_where_the_tokens_stand():
    """Row 1 has two pads: its tokens count from 0, and so do its pads."""
    model, cache, seen = build(), KVCache(), []
    note = lambda x, hook: seen.append((hook.position_ids.tolist(), hook.key_position_ids.tolist()))  # noqa: E731
    with model.hooks([("blocks.1.attn.hook_q", note)]):
        model(text(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), kv_cache=cache)
        model(text(2, 1), kv_cache=cache)
    first, second = [[0, 1, 2, 3], [0, 0, 0, 1]], [[4], [2]]
    assert seen == [(first, first), (second, [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])]


def test_hooks_are_told_absolute_positions_after_eviction():
    model, cache, seen = build(), KVCache(window=4, n_sink_tokens=1), []
    note = lambda x, hook: seen.append((hook.position_ids.tolist(), hook.key_position_ids.tolist()))  # noqa: E731
    with model.hooks([("blocks.1.attn.hook_q", note)]):
        read(model, text(1, 7), [7], cache=cache)
    assert seen[-1] == ([[6]], [[0, 4, 5, 6]])


def test_hooks_on_cross_attention_are_told_where_both_texts_stand():
    model, cache, seen = build(n_encoder_layers=1, positional_embedding_type="sinusoidal"), KVCache(), []
    note = lambda x, hook: seen.append((hook.position_ids.tolist(), hook.key_position_ids.tolist()))  # noqa: E731
    arguments = {"input": text(1, 3), "attention_mask": torch.tensor([[0, 1, 1]]), "kv_cache": cache}
    with model.hooks([("blocks.0.cross_attn.hook_pattern", note)]):
        model(**arguments, decoder_input=text(1, 2))
        model(**arguments, decoder_input=text(1, 1))
    assert seen == [([[0, 1]], [[0, 0, 1]]), ([[2]], [[0, 0, 1]])]


# What an edit to cached positions means


def only(first: int, last: int) -> Callable[[Tensor, Any], Tensor]:
    """Doubles keys or values of the positions from ``first`` up to ``last``."""

    def edit(x: Tensor, hook: Any) -> Tensor:
        chosen = (hook.position_ids >= first) & (hook.position_ids < last)
        return torch.where(chosen[..., None, None], 2 * x + 1, x)

    return edit


@pytest.mark.parametrize("name", ["hook_k", "hook_v"])
def test_a_hook_changes_what_is_remembered_of_the_tokens_that_it_sees_read(name):
    """Active for the first 6 of 12 tokens, it acts as one that edits those positions in one pass."""
    model, tokens, cache, name = build(), text(2, 12), KVCache(), f"blocks.0.attn.{name}"
    read(model, tokens[:, :6], [6], cache=cache, hooks=[(name, only(0, 99))])
    found = read(model, tokens[:, 6:], [1] * 6, cache=cache)
    assert_same(found, read_at_once(model, tokens, hooks=[(name, only(0, 6))])[:, 6:])


@pytest.mark.parametrize("name", ["hook_k", "hook_v"])
def test_later_hooks_do_not_reach_back_to_keys_and_values(name):
    model, tokens, cache, name = build(), text(2, 12), KVCache(), f"blocks.0.attn.{name}"
    read(model, tokens[:, :6], [6], cache=cache)
    found = read(model, tokens[:, 6:], [2] * 3, cache=cache, hooks=[(name, only(0, 99))])
    assert_same(found, read_at_once(model, tokens, hooks=[(name, only(6, 99))])[:, 6:])


def test_later_hooks_see_all_rotated_keys():
    """In a single layer no query hears what earlier queries read, so one pass under the hook has the same rows."""
    model, tokens, cache = build(n_layers=1), text(2, 12), KVCache()
    hooks = [("blocks.0.attn.hook_rot_k", edit_keys)]
    plain = read(model, tokens, [6, 6])
    read(model, tokens[:, :6], [6], cache=cache)
    found = read(model, tokens[:, 6:], [3, 3], cache=cache, hooks=hooks)
    assert not torch.allclose(found, plain[:, 6:], atol=1e-3)
    assert_same(found, read_at_once(model, tokens, hooks=hooks)[:, 6:])


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
        for sizes in chunkings(13):
            found = read(model, tokens, sizes, real, KVCache(window=window, n_sink_tokens=n_sink))
            for row, logits in zip(zip(found, real, strict=True), expected, strict=True):
                assert_same(row[0][row[1]], logits, tolerance=1e-5)  # the model's angles are float32


@pytest.mark.parametrize("positions", ["learned", "relative"])
def test_eviction_where_positions_are_tables(positions):
    options = {"n_relative_buckets": 6, "relative_max_distance": 7} if positions == "relative" else {}
    model = build(positional_embedding_type=positions, **options)
    tokens = text(1, 12)
    for window, n_sink in POLICIES[:2] if positions == "learned" else POLICIES:
        expected = by_definition(model, tokens[0], window, n_sink)
        assert_same(read(model, tokens, [5, 7], cache=KVCache(window, n_sink))[0], expected)


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
    found = read(_EVICTING, tokens, sizes, real, cache)
    assert len(cache) == min(window, n_tokens)
    for row, length in enumerate(lengths):
        alone = tokens[row : row + 1, n_tokens - length :]
        expected = read(_EVICTING, alone, [length], cache=KVCache(window=window, n_sink_tokens=n_sink))
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
    found = read(model, tokens, [12, 18], cache=KVCache(window=8, n_sink_tokens=2))
    assert_same(found[0], expected, tolerance=1e-5)
    with pytest.raises(ValueError, match="n_ctx"):
        read(model, tokens, [30])
    with pytest.raises(ValueError, match="n_ctx"):  # a learned table ends, whatever the cache forgets
        read(build(n_ctx=8, positional_embedding_type="learned"), tokens, [8, 1], cache=KVCache(window=4))


@pytest.mark.parametrize("start", [1, 3, 9])
def test_other_tokens_than_the_first_can_be_kept(start):
    """Logits of one layer are those of the kept tokens alone; with more layers what was read before stays as it was."""
    model = build(n_layers=1, positional_embedding_type="alibi", n_heads=2, n_key_value_heads=1)
    tokens, lengths = text(2, 14), (14, 11)
    real = left_padded(lengths, 14)
    for sizes in chunkings(14):
        cache = KVCache(window=6, n_sink_tokens=2, sink_start=start)
        found = read(model, tokens, sizes, real, cache)
        for row, length in enumerate(lengths):
            own = tokens[row, 14 - length :]
            for t in range(length):
                chosen = {j for j in (start, start + 1) if j <= t}
                others = [j for j in range(t + 1) if j not in chosen]
                kept = sorted(chosen | set(others[len(others) - min(len(others), 6 - len(chosen)) :]))
                expected = read_at_once(model, own[None, kept])[:, -1]
                assert_same(found[row : row + 1, 14 - length + t], expected)
            assert cache.positions[row][cache.real[row]].tolist() == kept


def test_global_tokens_stay_where_sinks_keep_them():
    """Sinks are the first columns of the cache, so a local layer goes on seeing them."""
    model = build(n_layers=1, window_size=2, n_global_tokens=1, positional_embedding_type="none")
    tokens = text(1, 9)
    expected = read_at_once(model, tokens)  # one global token and the last two are within any window of 3 or more
    assert_same(read(model, tokens, [4, 5], cache=KVCache(window=4, n_sink_tokens=1)), expected)
    for cache in (KVCache(window=4), KVCache(window=4, n_sink_tokens=1, sink_start=1)):
        with pytest.raises(ValueError, match="n_global_tokens.*n_sink_tokens=1"):
            read(model, tokens, [9], cache=cache)


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
            read(model, text(2, end - len(cache)), [end - len(cache)], cache=cache)
        assert cache.nbytes == 2 * kept * per_token
        assert len(cache) == kept


def test_a_linear_layer_takes_the_same_memory_for_any_text():
    model, cache = build(attn_types=("linear", "global")), KVCache()
    states = 2 * 2 * 6 * (6 + 1) * 8  # rows, key/value heads, S and s, float64
    for seen in (3, 10):
        read(model, text(2, seen - len(cache)), [seen - len(cache)], cache=cache)
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
    read(model, tokens[:, :-1], [13], real[:, :-1], cache)
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
    read(model, tokens[:, :-1], [19], cache=cache)
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


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must exceed n_sink_tokens"),
        ({"window": -1}, "window must be a whole number"),
        ({"window": 2.0}, "window must be a whole number"),
        ({"window": True}, "window must be a whole number"),
        ({"window": 4, "n_sink_tokens": -1}, "n_sink_tokens must be a whole number"),
        ({"window": 4, "n_sink_tokens": 4}, "window must exceed n_sink_tokens"),
        ({"n_sink_tokens": 1}, "give window="),
        ({"window": 4, "sink_start": 1}, "give n_sink_tokens="),
    ],
)
def test_policies_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVCache(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_cache": {}}, "kv_cache must be a workbench.KVCache, got dict"),
        ({"position_ids": torch.arange(4)}, "position_ids cannot be combined"),
        ({"documents": torch.zeros(2, 4, dtype=torch.int64)}, "documents cannot be combined"),
        ({"stop_at_layer": 1}, "stop_at_layer cannot be combined"),
        ({"start_at_layer": 1, "input": torch.zeros(2, 4, 16, dtype=torch.float64)}, "start_at_layer cannot be"),
        ({"return_type": "loss"}, "ask for logits"),
        ({"return_type": "both"}, "ask for logits"),
        ({"attention_mask": torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])}, "pad on the left"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}, "pad on the left"),
    ],
)
def test_arguments_that_a_cache_cannot_serve_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build()(**{"input": text(2, 4), "kv_cache": KVCache(), **arguments})


def test_models_that_cannot_evict_say_so():
    for options, message in (
        ({"attn_types": ("linear", "global")}, "linear attention"),
        ({"positional_embedding_type": "learned"}, "learned"),
        ({"positional_embedding_type": "sinusoidal"}, "sinusoidal"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)(text(1, 4), kv_cache=KVCache(window=4, n_sink_tokens=1))


@pytest.mark.parametrize("cache", [KVCache, lambda: KVCache(window=5, n_sink_tokens=1)])
def test_a_refused_run_leaves_the_cache_as_it_was(cache):
    model, tokens, cache = build(), text(2, 12), cache()
    real = left_padded((12, 9), 12)
    expected = read(model, tokens, [12], real, type(cache)(cache.window, cache.n_sink_tokens))
    first = read(model, tokens[:, :6], [6], real[:, :6], cache)
    with pytest.raises(ValueError, match="holds 2 texts, but the input has 3"):
        model(text(3, 2), kv_cache=cache)
    with pytest.raises(ValueError, match="pad on the left"):
        model(tokens[:, :3], attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), kv_cache=cache)
    with pytest.raises(ValueError, match="pad on the left"):  # behind what the window takes at once
        model(tokens[:, :3], attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]), kv_cache=cache)
    if cache.window is None:
        with pytest.raises(ValueError, match="n_ctx"):
            model(text(2, 27), kv_cache=cache)
    rest = read(model, tokens[:, 6:], [6], real[:, 6:], cache)
    assert_same(torch.cat((first, rest), dim=1), expected, real)


def test_a_cache_that_never_ran_is_free_after_a_refusal():
    model, cache = build(), KVCache()
    with pytest.raises(ValueError, match="pad on the left"):
        model(text(2, 2), attention_mask=torch.tensor([[1, 0], [1, 1]]), kv_cache=cache)
    assert_same(read(model, text(3, 4), [4], cache=cache), read_at_once(model, text(3, 4)))


@pytest.mark.parametrize("name", ["hook_embed", "blocks.0.attn.hook_k", "blocks.1.attn.hook_z", "ln_final.hook_scale"])
@pytest.mark.parametrize("n_before", [0, 4])
@pytest.mark.parametrize("policy", [{}, {"window": 5}])
def test_a_run_that_failed_halfway_spoils_the_cache(name, n_before, policy):
    model, tokens, cache = build(), text(2, 8), KVCache(**policy)
    if n_before:
        read(model, tokens[:, :n_before], [n_before], cache=cache)

    def fail(x: Tensor, hook: Any) -> None:
        raise RuntimeError("the hook failed")

    with pytest.raises(RuntimeError, match="the hook failed"):
        read(model, tokens[:, n_before:], [8 - n_before], cache=cache, hooks=[(name, fail)])
    for _ in range(2):
        with pytest.raises(ValueError, match="failed halfway.*new cache"):
            read(model, tokens[:, :1], [1], cache=cache)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_scaling_that_changes_with_the_length_is_refused_where_it_changes(kind):
    """Pads do not count: 5 columns, of which no row has more than 4 tokens."""
    factors = FACTORS if kind == "longrope" else {}
    model = build(rope_scaling=RopeScaling(type=kind, factor=2.0, original_context=6, **factors))
    tokens, real = text(2, 12), left_padded((11, 9), 12)
    for sizes in ([1] * 7, [5, 2]):
        found = read(model, tokens, sizes, real)
        assert_same(found, read_at_once(model, tokens[:, :7], real[:, :7]), real[:, :7])
    with pytest.raises(ValueError, match=f"{kind}.*has other frequencies at 7 tokens than at 6"):
        read(model, tokens, [7, 1], real)
    assert_same(read(model, tokens, [12], real), read_at_once(model, tokens, real), real)
    beyond = [8, 1, 3]  # from 7 tokens on
    if kind == "longrope":
        assert_same(read(model, tokens, beyond, real), read_at_once(model, tokens, real), real)
    else:
        with pytest.raises(ValueError, match="has other frequencies"):
            read(model, tokens, beyond, real)
