"""Generation against transformers, alone and in padded batches; draws against the shares they are drawn from."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from workbench import HookedTransformer, KVCache, RopeScaling
from workbench.generation import Sampling


def test_tokens_equal_transformers(pair, tokens):
    """Prompts of unequal lengths, too."""
    prompt, mask = tokens[:, :9], torch.ones_like(tokens[:, :9])
    mask[1, :4], mask[2, :8] = 0, 0
    expected = pair.reference.generate(
        prompt, attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=1
    )
    found = pair.model.generate(prompt, max_new_tokens=64, attention_mask=mask, stop_at_eos=False)
    assert torch.equal(found, expected)


def test_a_batch_equals_each_prompt_alone(pair):
    prompts = ["a b c", "d e f g h i j", "k"]
    together = pair.model.generate(prompts, max_new_tokens=10)
    assert together == [pair.model.generate(prompt, max_new_tokens=10) for prompt in prompts]
    assert all(text.startswith(prompt) for text, prompt in zip(together, prompts, strict=True))


def test_generation_stops_at_eos(pair):
    """A hook makes EOS (id 1) the likeliest token from the third step on; the other row never ends."""
    steps = []

    def end_row_0(x, hook):
        steps.append(1)
        if len(steps) >= 3:
            x[0, -1] = 1e4 * pair.model.W_U[:, 1] - pair.model.W_U.mean(1)
        return x

    prompt = torch.tensor([[0, 3, 4], [0, 5, 6]])
    with pair.model.hooks([("ln_final.hook_normalized", end_row_0)]):
        out = pair.model.generate(prompt, max_new_tokens=6)
    assert (out[0, 5:] == 1).all()
    assert (out[0, 3:5] != 1).all()


def test_no_room_in_the_context_is_refused(pair, tokens):
    with pytest.raises(ValueError, match="between 1 and 10"):
        pair.model.generate(tokens, max_new_tokens=11)


@pytest.mark.parametrize("max_new_tokens", [0, -1, 1.5, "x"])
def test_a_number_of_tokens_that_is_none_is_refused(pair, tokens, max_new_tokens):
    with pytest.raises(ValueError, match="max_new_tokens must be between"):
        pair.model.generate(tokens[:, :9], max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("mask", [torch.full((3, 9), 0.5), torch.ones(9)])
def test_a_mask_that_does_not_fit_is_refused(pair, tokens, mask):
    with pytest.raises(ValueError, match="attention_mask must"):
        pair.model.generate(tokens[:, :9], max_new_tokens=2, attention_mask=mask)


def test_pads_on_the_right_are_refused(pair, tokens):
    mask = torch.ones_like(tokens[:, :9])
    mask[0, -1] = 0
    with pytest.raises(ValueError, match="on the left"):
        pair.model.generate(tokens[:, :9], max_new_tokens=2, attention_mask=mask)


def test_arguments_for_text_and_for_tokens_are_kept_apart(pair, tokens):
    with pytest.raises(ValueError, match="prepend_bos applies to text"):
        pair.model.generate(tokens[:, :9], prepend_bos=True)
    with pytest.raises(ValueError, match="leave attention_mask out"):
        pair.model.generate("a b", attention_mask=torch.ones(1, 3))


# The cache


def greedy(model: HookedTransformer, tokens: torch.Tensor, n: int) -> torch.Tensor:
    """Without a cache: the whole text for every token."""
    for _ in range(n):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens


def test_hooks_fire_at_every_step_and_know_where(pair, tokens):
    """Every token from position 6 on has head 1 ablated, the prompt's included."""
    seen = []

    def ablate(z, hook):
        seen.append(hook.position_ids[0].tolist())
        z[:, :, 1] = torch.where(hook.position_ids[..., None] >= 6, 0.0, z[:, :, 1])
        return z

    with pair.model.hooks([("blocks.1.attn.hook_z", ablate)]):
        found = pair.model.generate(tokens[:, :9], max_new_tokens=5, stop_at_eos=False)
        assert seen == [list(range(9)), [9], [10], [11], [12]]
        assert torch.equal(found, greedy(pair.model, tokens[:, :9], 5))


def test_a_given_cache_says_what_is_remembered(pair, tokens):
    """A window as long as the context forgets nothing; the caller finds in the cache what the model has read."""
    cache = KVCache(window=20)
    found = pair.model.generate(tokens[:, :9], max_new_tokens=11, stop_at_eos=False, kv_cache=cache)
    assert torch.equal(found, pair.model.generate(tokens[:, :9], max_new_tokens=11, stop_at_eos=False))
    assert torch.equal(cache.tokens, found[:, :-1])


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_rotary_models_write_on_beyond_their_context_within_a_window(pair, tokens):
    cache = KVCache(window=100)
    found = pair.model.generate(tokens, max_new_tokens=30, stop_at_eos=False, kv_cache=cache)
    assert found.shape == (3, 180) and cache.n_seen.tolist() == [179] * 3


@pytest.mark.parametrize("pair", ["gpt2"], indirect=True)
def test_learned_positions_end_with_their_table(pair, tokens):
    with pytest.raises(ValueError, match="between 1 and 10"):
        pair.model.generate(tokens, max_new_tokens=30, kv_cache=KVCache(window=100))


@pytest.mark.parametrize("kv_cache", [{}, "full", "used"])
def test_a_cache_that_is_none_or_not_empty_is_refused(pair, tokens, kv_cache):
    if kv_cache == "used":
        kv_cache = KVCache()
        pair.model(tokens[:, :2], kv_cache=kv_cache)
    with pytest.raises(ValueError, match="kv_cache must be an empty"):
        pair.model.generate(tokens[:, :9], kv_cache=kv_cache)


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_windows_beyond_the_context_are_refused(pair, tokens):
    with pytest.raises(ValueError, match="window of 161 exceeds the context of 160"):
        pair.model.generate(tokens, kv_cache=KVCache(window=161))
    with pytest.raises(ValueError, match="max_new_tokens must be a positive integer"):
        pair.model.generate(tokens, max_new_tokens=0, kv_cache=KVCache(window=10))


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_scaling_that_changes_on_the_way_is_heeded(pair, tokens, kind):
    """Where the frequencies change, what has been read is read again."""
    factors = {"short_factor": (1.0,) * 5, "long_factor": (1.0, 2.0, 4.0, 8.0, 8.0)} if kind == "longrope" else {}
    scaling = RopeScaling(type=kind, factor=4.0, original_context=14, **factors)
    model = HookedTransformer(dataclasses.replace(pair.model.cfg, rope_scaling=scaling))
    model.load_state_dict(pair.model.state_dict())
    assert torch.equal(model.generate(tokens[:, :9], max_new_tokens=12), greedy(model, tokens[:, :9], 12))


@pytest.mark.parametrize("pair", ["llama"], indirect=True)
def test_a_full_window_reads_nothing_again(pair, tokens):
    """From then on the frequencies stay."""
    scaling = RopeScaling(type="dynamic", factor=4.0, original_context=6)
    model = HookedTransformer(dataclasses.replace(pair.model.cfg, rope_scaling=scaling)).eval()
    lengths = []
    with model.hooks([("hook_embed", lambda x, hook: lengths.append(x.shape[1]))]):
        model.generate(tokens[:, :9], max_new_tokens=6, kv_cache=KVCache(window=8))
    assert lengths == [8, 1, 1, 1, 1, 1, 1]


# Sampling


# Without ties, of which a filter may keep either.
LOGITS = st.lists(st.integers(-80, 80).map(lambda tenths: tenths / 10), min_size=2, max_size=12, unique=True)


@settings(deadline=None, max_examples=60)
@example([0.0, 1.0, 2.0, 3.0, 2.0**-54], 1.0, 4, None)  # less than what rounding leaves of it beside 3
@given(LOGITS, st.floats(0.05, 5), st.none() | st.integers(1, 14), st.none() | st.floats(0.01, 1))
def test_probabilities_are_those_of_transformers(logits, temperature, top_k, top_p):
    scores = torch.tensor([logits], dtype=torch.float64)
    expected = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k is not None:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        cumulative = expected.softmax(-1).sort(descending=True).values.cumsum(-1)
        if (cumulative - top_p).abs().min() < 1e-9:  # rounding decides about the last token
            return
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = Sampling(temperature=temperature, top_k=top_k, top_p=top_p).probabilities(scores)
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-9, atol=1e-12)


def test_probabilities_by_hand():
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    cases = {
        (None, None): [0.5, 0.2, 0.2, 0.1],
        (1, None): [1, 0, 0, 0],
        (2, None): [5 / 9, 2 / 9, 2 / 9, 0],  # as likely as the second
        (None, 0.5): [1, 0, 0, 0],
        (None, 0.51): [5 / 7, 2 / 7, 0, 0],
        (None, 0.71): [5 / 9, 2 / 9, 2 / 9, 0],
        (3, 0.8): [5 / 9, 2 / 9, 2 / 9, 0],  # 0.5 + 0.2 of 0.9 is less than 0.8
        (None, 1.0): [0.5, 0.2, 0.2, 0.1],
    }
    for (top_k, top_p), expected in cases.items():
        found = Sampling(temperature=1.0, top_k=top_k, top_p=top_p).probabilities(logits)
        torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-9, 1e-3])
def test_low_temperatures_approach_the_likeliest_token(temperature):
    logits = torch.tensor([[1.0, 3.0, 2.9, -4.0]])
    found = Sampling(temperature=temperature).probabilities(logits)
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64), rtol=0, atol=1e-9)


def test_draws_follow_their_probabilities():
    """20,000 draws, each count within 5 standard deviations of its binomial distribution."""
    sampling, n = Sampling(temperature=0.8, top_k=5, top_p=0.95, seed=3), 20_000
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.5, -1.0, 0.5, 0.7]])
    p = sampling.probabilities(logits)[0]
    draws = sampling.chooser(torch.device("cpu"))(logits.expand(n, -1))
    counts = torch.bincount(draws, minlength=7)
    assert (p == 0).sum() >= 2 and (counts[p == 0] == 0).all()
    assert ((counts - n * p).abs() <= 5 * (n * p * (1 - p)).sqrt()).all()


def test_seeds_reproduce_and_differ(pair, tokens):
    def draw(seed):
        return pair.model.generate(tokens[:, :5], max_new_tokens=20, temperature=1.5, seed=seed, stop_at_eos=False)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    before = torch.get_rng_state()
    draw(1)
    assert torch.equal(torch.get_rng_state(), before)  # a seed has draws of its own
    torch.manual_seed(0)
    first = draw(None)
    torch.manual_seed(0)
    assert torch.equal(first, draw(None))


def test_low_temperature_generates_what_greedy_does(pair, tokens):
    found = pair.model.generate(tokens[:, :5], max_new_tokens=20, temperature=1e-6, stop_at_eos=False)
    assert torch.equal(found, pair.model.generate(tokens[:, :5], max_new_tokens=20, stop_at_eos=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"temperature": "1"}, "temperature must be"),
        ({"temperature": True}, "temperature must be"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be"),
        ({"temperature": 1.0, "top_k": 2.0}, "top_k must be"),
        ({"temperature": 1.0, "top_p": 0}, "top_p must be"),
        ({"temperature": 1.0, "top_p": 1.1}, "top_p must be"),
        ({"temperature": 1.0, "seed": -1}, "seed must be"),
        ({"temperature": 1.0, "seed": 1.5}, "seed must be"),
        ({"top_k": 3}, "top_k has no effect at temperature 0"),
        ({"top_p": 0.5}, "top_p has no effect at temperature 0"),
        ({"seed": 1}, "seed has no effect at temperature 0"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(pair, tokens, arguments, message):
    with pytest.raises(ValueError, match=message):
        pair.model.generate(tokens[:, :9], **arguments)
