"""Reading a text in pieces equals reading it at once, also under hooks; what an edit means; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import (
    HookedEncoderDecoder,
    HookedTransformer,
    KVCache,
    RopeScaling,
    TransformerConfig,
)
from workbench.testing import check_cache, read_in_pieces

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


def read(
    model: HookedTransformer, tokens: Tensor, sizes: list[int], real: Tensor | None = None,
    cache: KVCache | None = None, hooks: list | None = None, **arguments: Any,
) -> Tensor:  # fmt: skip
    """The logits of a text that is read in pieces of these sizes on one cache, under hooks."""
    with model.hooks(hooks or []):
        return read_in_pieces(model, tokens, sizes, real, cache, **arguments)


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


def test_the_check_of_a_cache_finds_what_pieces_change():
    """An edit of the last token of every piece is another text for every chunking."""
    model, tokens = build(), text(2, 9)

    def edit_last(x: Tensor, hook: Any) -> Tensor:
        x[:, -1] = 0
        return x

    check_cache(model, tokens, tolerance=1e-9)
    with model.hooks([("blocks.0.attn.hook_v", edit_last)]), pytest.raises(AssertionError, match="cached = uncached"):
        check_cache(model, tokens)


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
        ({"window": 4, "n_sink_tokens": None}, "n_sink_tokens must be a whole number"),
        ({"window": 4, "n_sink_tokens": 1, "sink_start": 1.5}, "sink_start must be a whole number"),
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
        found = read(model, tokens[:, :7], sizes, real[:, :7])
        assert_same(found, read_at_once(model, tokens[:, :7], real[:, :7]), real[:, :7])
    with pytest.raises(ValueError, match=f"{kind}.*has other frequencies at 7 tokens than at 6"):
        read(model, tokens[:, :8], [7, 1], real[:, :8])
    assert_same(read(model, tokens, [12], real), read_at_once(model, tokens, real), real)
    beyond = [8, 1, 3]  # from 7 tokens on
    if kind == "longrope":
        assert_same(read(model, tokens, beyond, real), read_at_once(model, tokens, real), real)
    else:
        with pytest.raises(ValueError, match="has other frequencies"):
            read(model, tokens, beyond, real)


def test_a_cache_of_another_model_is_refused_and_stays_usable(pair, model, tokens):
    cache = KVCache()
    with torch.no_grad():
        pair.model(tokens[:, :5], kv_cache=cache)
        with pytest.raises(ValueError, match="another model's keys"):
            model(tokens[:, 5:9], kv_cache=cache)
        continued = pair.model(tokens[:, 5:9], kv_cache=cache)
        torch.testing.assert_close(continued, pair.model(tokens[:, :9])[:, 5:], rtol=1e-4, atol=1e-4)
