"""Greater-than: a year that must be later than another one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from workbench.analyses.tasks import vocabulary
from workbench.analyses.tasks.prompt_set import YearPrompts
from workbench.analyses.tasks.scoring import N_PROMPTS, Example, continuation, draw, encode, stacked, such_as
from workbench.analyses.tasks.vocabulary import Domain, usable

CENTURIES = range(11, 18)  # years 1100 to 1799, as in the paper
LEAST_SPLIT = 0.9  # share of the endings that must be tokens of their own somewhere
FIRST_YEAR_CORRUPTED = {2: 1, 1: 0}  # by the digits that are told: year 1 of the century, or 0 of the decade


def greater_than(model: Any, *, n_prompts: int = N_PROMPTS, seed: int = 0, domain: Domain = "auto") -> YearPrompts:
    """ "The war lasted from the year 1732 to the year 17" → a later year (Hanna et al. 2023).

    Target and foil are one of the later years and one of the others; ``probability_difference()`` reads all of them.
    Corrupted prompts begin in the year 01 of the century, after which nearly every year is later. For a tokenizer that
    has no token for the two digits, prompts lack only the last one ("from the year 1732 to the year 173") and begin in
    the year 0 of the decade when corrupted.

    Raises:
        ValueError: options out of range, a model without a tokenizer, or one that lacks the words or writes years in
            other pieces.
    """
    words = usable(model, domain, vocabulary.EVENTS_ENGLISH, vocabulary.EVENTS_DEMO)
    events, endings = words.words("event"), _endings(model)
    lowest = FIRST_YEAR_CORRUPTED[endings.n_digits]
    begun = {stem: [year for year in found if lowest < year < found[-1]] for stem, found in endings.after.items()}
    stems = [stem for stem, found in begun.items() if found]
    starts: dict[str, int] = {}

    def example(rng: Random, index: int) -> Example:
        event, stem = rng.choice(events), rng.choice(stems)
        start = rng.choice(begun[stem])
        later = [year for year in endings.after[stem] if year > start]
        others = [year for year in endings.after[stem] if year <= start]
        clean, corrupted = (
            f"The {event} lasted from the year {stem}{endings.text(first)} to the year {stem}"
            for first in (start, lowest)
        )
        starts[clean] = start
        return Example(clean, endings.text(rng.choice(later)), endings.text(rng.choice(others)), corrupted)

    examples, scorables = zip(*draw(model, n_prompts, seed, example), strict=True)
    told = "the last two digits are told" if endings.n_digits == 2 else "the last digit is told"
    corrupted = f"corrupted with a first year that ends in {endings.text(lowest)}"
    return YearPrompts(
        **stacked(scorables),
        name="greater than",
        description=f"{such_as(examples)}; {told}; {corrupted}; {words.in_words}; seed {seed}",
        years=torch.tensor(endings.tokens),
        start=torch.tensor([starts[one.prompt] for one in examples]),
    )


@dataclass(frozen=True)
class _Endings:
    """How a tokenizer ends years.

    Args:
        n_digits: of an ending.
        tokens: of the endings 0 to 99, or 0 to 9.
        after: by the digits before, the endings that are tokens of their own there.
    """

    n_digits: int
    tokens: list[int]
    after: dict[int, list[int]]

    def text(self, ending: int) -> str:
        return f"{ending:0{self.n_digits}d}"


def _endings(model: Any) -> _Endings:
    """Two digits where these have tokens of their own whatever stands before them, or else one digit.

    A few may be split off nowhere, as "00" where every full century is one token; theirs is that of the bare digits.
    """
    for n_digits in (2, 1):
        stems = range(CENTURIES.start * 10 ** (2 - n_digits), CENTURIES.stop * 10 ** (2 - n_digits))
        texts = [f"{ending:0{n_digits}d}" for ending in range(10**n_digits)]
        tokens: list[set[int]] = [set() for _ in texts]
        after: dict[int, list[int]] = {}
        for stem in stems:
            for ending, text in enumerate(texts):
                added = continuation(model, f"to the year {stem}", text)
                if added is not None and len(added) == 1:
                    tokens[ending].update(added)
                    after.setdefault(stem, []).append(ending)
        if sum(map(bool, tokens)) < LEAST_SPLIT * len(texts):
            continue
        ids = [sorted(found or encode(model, text)) for found, text in zip(tokens, texts, strict=True)]
        if all(len(found) == 1 for found in ids) and len({found[0] for found in ids}) == len(ids):
            return _Endings(n_digits, [found[0] for found in ids], after)
    raise ValueError(
        "this model's tokenizer ends years neither in a token of two digits nor of one, so greater-than cannot be "
        "scored; write prompts that suit it and read them with read_prompts"
    )
