"""Greedy generation against transformers, alone and in padded batches."""

from __future__ import annotations

import pytest
import torch


def test_tokens_equal_transformers(pair, tokens):
    prompt = tokens[:, :9]
    expected = pair.reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None,
        pad_token_id=1, use_cache=False,
    )  # fmt: skip
    assert torch.equal(pair.model.generate(prompt, max_new_tokens=12, stop_at_eos=False), expected)


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
