"""The built-in tasks of words: indirect objects, factual recall, and agreement of subject and verb."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Literal, get_args

from workbench.analyses.tasks import vocabulary
from workbench.analyses.tasks.prompt_set import PromptSet
from workbench.analyses.tasks.scoring import (
    N_PROMPTS,
    Example,
    Scorable,
    check_options,
    continuation,
    draw,
    stacked,
    such_as,
)
from workbench.analyses.tasks.vocabulary import Domain, Entry, usable

Corruption = Literal["third name", "other names", "swapped"]

_CORRUPTIONS: dict[Corruption, str] = {
    "third name": "with a third name in place of the giver's second mention",
    "other names": "with three other names (ABC)",
    "swapped": "with giver and receiver swapped",
}


def indirect_objects(
    model: Any,
    *,
    n_prompts: int = N_PROMPTS,
    seed: int = 0,
    domain: Domain = "auto",
    corruption: Corruption = "third name",
) -> PromptSet:
    """ "When A and B went to the park, B gave the book to" → A, against B (Wang et al. 2022).

    The receiver A is named once, the giver B twice. A comes first (ABBA) and second (BABA) in turn.

    Args:
        domain: whose words: "english", "demo" (the demo model's world), or "auto", the one of which the tokenizer has
            the greater share.
        corruption: "third name" puts another name where the giver is named again, so that nothing tells A from B and
            one token differs. "other names" is the paper's p_ABC, three names that are not in the prompt. "swapped"
            names the receiver there, which calls for the foil (Zhang and Nanda 2023, symmetric token replacement).

    Raises:
        ValueError: options out of range, a model without a tokenizer, or one that lacks the words.
    """
    if corruption not in get_args(Corruption):
        raise ValueError(f"corruption must be one of {', '.join(map(repr, get_args(Corruption)))}, got {corruption!r}")
    words = usable(model, domain, vocabulary.SCENES_ENGLISH, vocabulary.SCENES_DEMO)
    names, places, things = words.words("name", least=5), words.words("place"), words.words("thing")

    def example(rng: Random, index: int) -> Example:
        receiver, giver, *others = rng.sample(names, 5)
        template, place, thing = rng.choice(vocabulary.HANDOVERS), rng.choice(places), rng.choice(things)

        def sentence(receiver: str, giver: str, again: str) -> str:
            first, second = (receiver, giver) if index % 2 == 0 else (giver, receiver)
            return template.format(first=first, second=second, giver=again, place=place, thing=thing)

        corrupted = {
            "third name": sentence(receiver, giver, others[0]),
            "other names": sentence(*others),
            "swapped": sentence(receiver, giver, receiver),
        }
        return Example(sentence(receiver, giver, giver), f" {receiver}", f" {giver}", corrupted[corruption])

    how = f"names in the orders ABBA and BABA in turn; corrupted {_CORRUPTIONS[corruption]}; {words.in_words}"
    return _prompt_set(draw(model, n_prompts, seed, example), "indirect objects", f"{how}; seed {seed}")


def factual_recall(model: Any, *, n_prompts: int = N_PROMPTS, seed: int = 0, domain: Domain = "auto") -> PromptSet:
    """ "The capital of France is" → Paris, against the answer for another subject (Meng et al. 2022).

    Every fact comes at most once. The other subject, which the corrupted prompt names, is one of the same relation with
    as many tokens and another answer.

    Raises:
        ValueError: options out of range, a model without a tokenizer, or fewer facts than ``n_prompts``.
    """
    check_options(n_prompts, seed)
    facts = usable(model, domain, vocabulary.FACTS_ENGLISH, vocabulary.FACTS_DEMO)
    lengths = {fact: len(continuation(model, "The capital of", f" {fact.words[0]}") or ()) for fact in facts.entries}

    def others(fact: Entry) -> list[Entry]:
        same = [other for other in facts.of(fact.kind) if lengths[other] == lengths[fact]]
        return [other for other in same if other.words[1] != fact.words[1]]

    pairs = {fact: found for fact in facts.entries if (found := others(fact))}
    if n_prompts > len(pairs):
        raise ValueError(
            f"{len(pairs)} facts can be scored with this model's tokenizer, of {facts.in_words}; "
            f"ask for at most so many, not n_prompts={n_prompts}"
        )

    def example(rng: Random, index: int) -> Example:
        fact = rng.choice(list(pairs))
        other = rng.choice(pairs[fact])
        clean, corrupted = (vocabulary.RELATIONS[fact.kind].format(subject=one.words[0]) for one in (fact, other))
        return Example(clean, f" {fact.words[1]}", f" {other.words[1]}", corrupted)

    n_alone = len(facts.entries) - len(pairs)
    alone = f" and without {n_alone} that no other subject is as long as" if n_alone else ""
    how = f"corrupted with another subject, whose answer is the foil; {facts.in_words}{alone}"
    return _prompt_set(draw(model, n_prompts, seed, example), "factual recall", f"{how}; seed {seed}")


def subject_verb_agreement(
    model: Any, *, n_prompts: int = N_PROMPTS, seed: int = 0, domain: Domain = "auto"
) -> PromptSet:
    """ "The keys near the chair" → are, against is (Linzen et al. 2016).

    The noun in between has the other number. Subjects are plural and singular in turn; corrupted prompts have the
    subject in the other number, which calls for the foil.

    Raises:
        ValueError: options out of range, a model without a tokenizer, or one that lacks the words.
    """
    words = usable(model, domain, vocabulary.NOUNS_ENGLISH, vocabulary.NOUNS_DEMO)
    nouns = [noun.words for noun in words.of("noun")]
    words.words("noun", least=2)

    def example(rng: Random, index: int) -> Example:
        subject, attractor = rng.sample(nouns, 2)
        near, plural = rng.choice(vocabulary.NEAR), index % 2 == 0
        verbs = (" is", " are")
        clean, corrupted = (
            f"The {subject[number]} {near} the {attractor[not plural]}" for number in (plural, not plural)
        )
        return Example(clean, verbs[plural], verbs[not plural], corrupted)

    how = f"nouns in between of the other number; corrupted in the subject's number; {words.in_words}"
    return _prompt_set(draw(model, n_prompts, seed, example), "subject–verb agreement", f"{how}; seed {seed}")


def _prompt_set(drawn: Sequence[tuple[Example, Scorable]], name: str, how: str) -> PromptSet:
    examples, scorables = zip(*drawn, strict=True)
    return PromptSet(**stacked(scorables), name=name, description=f"{such_as(examples)}; {how}")
