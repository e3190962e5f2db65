"""From texts to prompts that can be scored: the answer is one token, and clean and corrupted prompts line up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from workbench.analyses.prompts import MAX_SEED, bos_token, quoted
from workbench.tokens import check_characters

N_PROMPTS = 40  # of a task, unless told otherwise: enough for intervals, and for two halves that have them
TRIES_PER_PROMPT = 50  # draws before a task is said to have no more different prompts


@dataclass(frozen=True)
class Example:
    """A prompt and its answers as text; answers go on where the prompt ends, their leading space included."""

    prompt: str
    target: str
    foil: str | None = None
    corrupted: str | None = None


@dataclass(frozen=True)
class Scorable:
    """An example as token ids."""

    tokens: list[int]
    target: int
    foil: int | None
    corrupted: list[int] | None


class Unscorable(ValueError):  # noqa: N818  a finding about a text, which callers pass on or count
    """A field of an example that no number can be had for, and what would mend it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}")


def scorable(model: Any, example: Example) -> Scorable:
    """The example's tokens, BOS first where the tokenizer has one.

    Raises:
        ValueError: a model without a tokenizer.
        Unscorable: an answer that is not one token after its prompt, a foil that is the target, a corrupted prompt that
            is the prompt or has another number of tokens, or a prompt that is empty or exceeds the context.
    """
    tokens = _prompt(model, "prompt", example.prompt)
    target = _answer(model, "target", example.prompt, example.target)
    foil = None if example.foil is None else _answer(model, "foil", example.prompt, example.foil)
    if foil == target:
        raise Unscorable("foil", f"{quoted(example.foil or '')} is the same token as the target; give a wrong answer")
    if example.corrupted is None:
        return Scorable(tokens, target, foil, None)
    corrupted = _prompt(model, "corrupted", example.corrupted)
    if corrupted == tokens:
        raise Unscorable("corrupted", "is the prompt itself; change the words that decide the answer")
    if len(corrupted) != len(tokens):
        raise Unscorable(
            "corrupted",
            f"{quoted(example.corrupted)} has {len(corrupted)} tokens and the prompt {len(tokens)}; "
            "choose words of as many tokens, so that the two line up",
        )
    return Scorable(tokens, target, foil, corrupted)


def continuation(model: Any, prompt: str, answer: str) -> list[int] | None:
    """The tokens that an answer adds to a prompt's, or None where it changes those of the prompt."""
    before, both = encode(model, prompt), encode(model, prompt + answer)
    return both[len(before) :] if both[: len(before)] == before else None


def encode(model: Any, text: str) -> list[int]:
    """Token ids without BOS. Raises ValueError for a model without a tokenizer."""
    if getattr(model, "tokenizer", None) is None:
        raise ValueError("this model has no tokenizer, which prompts in words need; load it with tokenizer=…")
    return model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _prompt(model: Any, field: str, text: str) -> list[int]:
    _check_text(field, text)
    bos = bos_token(model, None)
    ids = encode(model, text) if bos is None else [bos, *encode(model, text)]
    if len(ids) > model.cfg.n_ctx:
        raise Unscorable(field, f"has {len(ids)} tokens, but the model's context holds {model.cfg.n_ctx}; shorten it")
    if max(ids) >= model.cfg.d_vocab:  # a token that was added to the tokenizer alone
        raise Unscorable(field, f"{quoted(text)} holds a token that the model has no embedding for; use ordinary words")
    return ids


def _answer(model: Any, field: str, prompt: str, answer: str) -> int:
    _check_text(field, answer)
    added = continuation(model, prompt, answer)
    if added is None:
        raise Unscorable(
            field,
            f"{answer!r} runs together with the end of the prompt when both become tokens; "
            "end the prompt with a whole word, and start the answer with the space between them",
        )
    if len(added) != 1:
        texts = [model.tokenizer.decode([token]) for token in added]
        raise Unscorable(
            field, f"{answer!r} is {len(added)} tokens after the prompt ({texts}), not one; give an answer that is one"
        )
    if added[0] >= model.cfg.d_vocab:
        raise Unscorable(field, f"{answer!r} is a token that the model has no logit for; give another answer")
    return added[0]


def _check_text(field: str, text: str) -> None:
    if not text:
        raise Unscorable(field, "is empty; write some text")
    try:
        check_characters(text)
    except ValueError as error:
        raise Unscorable(field, f"cannot be read: {error}") from None


def stacked(examples: Sequence[Scorable]) -> dict[str, Any]:
    """The tensors of a PromptSet: tokens, real, target, foil and corrupted. All examples have the same fields."""
    width = max(len(example.tokens) for example in examples)
    lengths = torch.tensor([len(example.tokens) for example in examples])

    def filled(rows: list[list[int]]) -> Tensor:
        return torch.tensor([row + [0] * (width - len(row)) for row in rows])

    foils = [example.foil for example in examples if example.foil is not None]
    corrupted = [example.corrupted for example in examples if example.corrupted is not None]
    return {
        "tokens": filled([example.tokens for example in examples]),
        "real": torch.arange(width) < lengths[:, None],
        "target": torch.tensor([example.target for example in examples]),
        "foil": torch.tensor(foils) if foils else None,
        "corrupted": filled(corrupted) if corrupted else None,
    }


def draw(
    model: Any, n_prompts: int, seed: int, example: Callable[[Random, int], Example]
) -> list[tuple[Example, Scorable]]:
    """``n_prompts`` different examples that can be scored.

    Args:
        example: draws one; its second argument counts from 0, so that kinds of prompts can take turns.

    Raises:
        ValueError: options out of their range, or fewer different examples than asked for.
    """
    check_options(n_prompts, seed)
    rng, found, refusal = Random(seed), dict[str, tuple[Example, Scorable]](), ""
    for _ in range(TRIES_PER_PROMPT * n_prompts):
        if len(found) == n_prompts:
            break
        drawn = example(rng, len(found))
        try:
            found.setdefault(drawn.prompt, (drawn, scorable(model, drawn)))
        except Unscorable as error:
            refusal = f" (the last one left out: {error})"
    if len(found) < n_prompts:
        raise ValueError(
            f"only {len(found)} different prompts of this task can be scored with this tokenizer{refusal}, "
            f"fewer than n_prompts={n_prompts}; ask for fewer"
        )
    return list(found.values())


def check_options(n_prompts: int, seed: int) -> None:
    """Raises ValueError where they are out of range."""
    if isinstance(n_prompts, bool) or not isinstance(n_prompts, int) or n_prompts < 1:
        raise ValueError(f"n_prompts must be at least 1 and whole, got {n_prompts!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be a whole number from 0 to {MAX_SEED}, got {seed!r}")


def such_as(examples: Sequence[Example]) -> str:
    """How many prompts, and the first of them with its answer."""
    first = examples[0]
    how_many = "1 prompt," if len(examples) == 1 else f"{len(examples):,} prompts such as"
    return f"{how_many} {quoted(first.prompt, most=120)} → {quoted(first.target)}"
