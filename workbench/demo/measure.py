"""What the model card says in numbers: losses, head scores, ablations and small tasks."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench import HookedTransformer, StatisticsRequest
from workbench.demo import corpus, words
from workbench.demo.rows import ordinary_tokens

SEGMENT = 64
N_REPEATS, N_TEXTS = 16, 64  # sequences and texts that the card measures the model on
N_REPEATS_ALONG, N_TEXTS_ALONG = 8, 32  # the first of them, in the many measurements along training
_REQUEST = StatisticsRequest(sink_keys=1, offsets=(1,), match=("induction",))


@dataclass(frozen=True, kw_only=True)
class HeadScores:
    """Per head, each [layer, head].

    ``prefix_matching``: mean mass on the tokens that followed the query's token before, over the second copy of
    repeated random tokens. ``previous_token``: mean mass on the token before the query, over the same sequences.
    ``bos_mass``: mean mass on BOS, over all later tokens of ordinary texts.
    """

    prefix_matching: Tensor
    previous_token: Tensor
    bos_mass: Tensor


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """What changes when one head's output is set to zero: losses in nats, and the top induction head's score."""

    second_copy_loss: float
    text_loss: float
    prefix_matching: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a training run after so many steps; losses in nats per token."""

    step: int
    text_loss: float
    first_copy_loss: float
    second_copy_loss: float
    prefix_matching: float
    previous_token: float
    bos_mass: float


def held_out_texts(n: int) -> list[str]:
    """Texts of pages that training does not see."""
    return [next(itertools.islice(corpus.page(f"held out.{index}"), index % 4, None)) for index in range(n)]


def random_repeats(tokenizer: Any, n_sequences: int, seed: int = 0) -> Tensor:
    """BOS and SEGMENT random tokens twice, drawn without replacement and without special tokens.

    int64 [n_sequences, 1 + 2 · SEGMENT]
    """
    rng, rows = random.Random(seed), []
    for _ in range(n_sequences):
        segment = rng.sample(ordinary_tokens(tokenizer), SEGMENT)
        rows.append([tokenizer.bos_token_id, *segment, *segment])
    return torch.tensor(rows)


@torch.no_grad()
def head_scores(model: HookedTransformer, repeats: Tensor, texts: list[str]) -> HeadScores:
    """Prefix matching and previous-token mass on ``repeats``, mass on BOS on ``texts``."""
    _, statistics = model.run_with_statistics(repeats, _REQUEST, return_type=None)
    induction = statistics["match_mass"]["induction"][..., 1 + SEGMENT :]  # [layer, batch, head, query]
    previous = statistics["offset_mass"][..., 1:, 0]
    tokens, mask = model.to_tokens(texts, return_attention_mask=True)
    _, statistics = model.run_with_statistics(tokens, _REQUEST, attention_mask=mask, return_type=None)
    later = mask[:, None, 1:].bool()  # [batch, 1, query]: real queries after BOS
    on_bos = statistics["sink_mass"][..., 1:].where(later, 0).sum((1, 3)) / later.sum()
    return HeadScores(prefix_matching=induction.mean((1, 3)), previous_token=previous.mean((1, 3)), bos_mass=on_bos)


@torch.no_grad()
def copy_losses(model: HookedTransformer, repeats: Tensor) -> tuple[float, float]:
    """Mean loss over the first copy and over the second one without its first token, which nothing predicts."""
    losses = model(repeats, return_type="loss", loss_per_token=True)  # [batch, pos − 1]
    return float(losses[:, :SEGMENT].mean()), float(losses[:, SEGMENT + 1 :].mean())


@torch.no_grad()
def text_loss(model: HookedTransformer, texts: list[str]) -> float:
    return float(model(texts, return_type="loss"))


def measure_progress(model: HookedTransformer, step: int) -> Progress:
    repeats, texts = random_repeats(model.tokenizer, N_REPEATS_ALONG), held_out_texts(N_TEXTS_ALONG)
    scores = head_scores(model, repeats, texts)
    first, second = copy_losses(model, repeats)
    return Progress(
        step=step,
        text_loss=text_loss(model, texts),
        first_copy_loss=first,
        second_copy_loss=second,
        prefix_matching=float(scores.prefix_matching.max()),
        previous_token=float(scores.previous_token.max()),
        bos_mass=float(scores.bos_mass.max()),
    )


def ablations(
    model: HookedTransformer, repeats: Tensor, texts: list[str], top: tuple[int, int]
) -> list[list[Ablation]]:
    """Each head's output set to zero, by layer and head; ``top`` is the head whose prefix matching is watched."""

    def measured() -> Ablation:
        prefix_matching = head_scores(model, repeats, texts[:1]).prefix_matching[top]
        return Ablation(
            second_copy_loss=copy_losses(model, repeats)[1],
            text_loss=text_loss(model, texts),
            prefix_matching=float(prefix_matching),
        )

    def without(layer: int, head: int) -> Ablation:
        def silence(z: Tensor, hook: Any) -> Tensor:
            z[:, :, head] = 0  # z [batch, pos, head, d_head]
            return z

        with model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_z", silence)]):
            return measured()

    whole = measured()
    return [
        [
            Ablation(
                second_copy_loss=ablated.second_copy_loss - whole.second_copy_loss,
                text_loss=ablated.text_loss - whole.text_loss,
                prefix_matching=ablated.prefix_matching - whole.prefix_matching,
            )
            for ablated in (without(layer, head) for head in range(model.cfg.n_heads))
        ]
        for layer in range(model.cfg.n_layers)
    ]


# ---- tasks ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def next_token_probabilities(model: HookedTransformer, prompts: list[str]) -> Tensor:
    """[prompt, d_vocab]"""
    tokens, mask = model.to_tokens(prompts, padding_side="left", return_attention_mask=True)
    return model(tokens, attention_mask=mask)[:, -1].softmax(dim=-1)


def accuracy(model: HookedTransformer, prompts_and_answers: list[tuple[str, str]]) -> float:
    """The share of prompts whose most likely next token is the answer."""
    prompts, answers = zip(*prompts_and_answers, strict=True)
    expected = torch.tensor([model.to_single_token(answer) for answer in answers])
    return float((next_token_probabilities(model, list(prompts)).argmax(dim=-1) == expected).double().mean())


def task_scores(model: HookedTransformer, n_prompts: int = 200, seed: int = 0) -> dict[str, float]:
    """Shares of 1: right next tokens for facts, indirect objects and agreement, probability mass for years."""
    rng = random.Random(seed)
    return {
        "capital": accuracy(model, [(f"The capital of {c.name} is", f" {c.capital}") for c in words.COUNTRIES]),
        "river": accuracy(model, [(f"The river of {c.name} is the", f" {c.river}") for c in words.COUNTRIES]),
        "indirect object": accuracy(model, [indirect_object(rng) for _ in range(n_prompts)]),
        "agreement": agreement(model, rng, n_prompts),
        "greater than": later_years(model, rng, n_prompts),
    }


def indirect_object(rng: random.Random) -> tuple[str, str]:
    giver, receiver = rng.sample(words.NAMES, 2)
    first, second = rng.sample((giver, receiver), 2)
    place, thing = rng.choice(words.PLACES), rng.choice(words.THINGS)
    return f"When {first} and {second} went to the {place}, {giver} gave the {thing} to", f" {receiver}"


def agreement(model: HookedTransformer, rng: random.Random, n_prompts: int) -> float:
    """The share of subjects whose own number is likelier in the verb than that of the noun in between."""
    verbs = {
        True: [model.to_single_token(f" {verb}") for verb in ("are", "were", "have", "look", "belong")],
        False: [model.to_single_token(f" {verb}") for verb in ("is", "was", "has", "looks", "belongs")],
    }
    plurals, prompts = [index % 2 == 0 for index in range(n_prompts)], []
    for many in plurals:
        subject, other = rng.sample(words.THINGS, 2)
        subject, other = (words.plural(subject), other) if many else (subject, words.plural(other))
        prompts.append(f"The {subject} near the {other}")
    probabilities = next_token_probabilities(model, prompts)
    right = [
        row[verbs[many]].sum() > row[verbs[not many]].sum() for row, many in zip(probabilities, plurals, strict=True)
    ]
    return float(sum(right)) / n_prompts


def later_years(model: HookedTransformer, rng: random.Random, n_prompts: int) -> float:
    """Mean probability of the two-digit years that are later than the first one."""
    years = torch.tensor([model.to_single_token(f"{year:02d}") for year in range(100)])
    starts = [rng.randint(2, 97) for _ in range(n_prompts)]
    centuries = [rng.randint(11, 18) for _ in range(n_prompts)]
    prompts = [
        f"The war lasted from the year {century}{start:02d} to the year {century}"
        for century, start in zip(centuries, starts, strict=True)
    ]
    probabilities = next_token_probabilities(model, prompts)[:, years]  # [prompt, year]
    return float(sum(row[start + 1 :].sum() for row, start in zip(probabilities, starts, strict=True))) / n_prompts
