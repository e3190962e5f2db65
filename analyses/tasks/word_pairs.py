"""Tasks that are learned from the prompt: a list of word pairs, and a last word whose answer is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args

from workbench.analyses.tasks import vocabulary
from workbench.analyses.tasks.prompt_set import PromptSet
from workbench.analyses.tasks.scoring import (
    N_PROMPTS,
    Example,
    check_options,
    continuation,
    draw,
    stacked,
    such_as,
)
from workbench.analyses.tasks.vocabulary import Domain, Entry, usable

Task = Literal["country-capital", "singular-plural", "antonym", "present-past"]


@dataclass(frozen=True)
class WordPairs:
    """A task as words and their answers, such as (("hot", "cold"), ("big", "small"), …)."""

    name: str
    pairs: tuple[tuple[str, str], ...]


def few_shot_prompts(
    model: Any,
    task: Task | WordPairs = "country-capital",
    *,
    n_shots: int = 10,
    n_prompts: int = N_PROMPTS,
    seed: int = 0,
    domain: Domain = "auto",
) -> PromptSet:
    """ "Q: France↵A: Paris↵↵ … Q: Italy↵A:" → Rome, against one of the other answers (Todd et al. 2024, section 2).

    The corrupted prompt has the answers of its examples shuffled, none of them at its place where all differ, so that
    the examples no longer say what the task is.

    Args:
        task: a built-in one, or pairs of your own.
        n_shots: examples before the question.
        domain: whose words a built-in task has, as in indirect_objects; the demo model's has capitals, plurals.

    Raises:
        ValueError: an unknown task, options out of range, a model without a tokenizer, or too few pairs whose answers
            are single tokens.
    """
    check_options(n_prompts, seed)
    if isinstance(n_shots, bool) or not isinstance(n_shots, int) or n_shots < 2:
        raise ValueError(f"n_shots must be at least 2 and whole, as one answer cannot be shuffled; got {n_shots!r}")
    name, pairs, how = _own(model, task) if isinstance(task, WordPairs) else _built_in(model, task, domain)
    if len(pairs) < n_shots + 1:
        raise ValueError(
            f"{name} has {len(pairs)} pairs whose answers are single tokens for this tokenizer ({how}), and a prompt "
            f"of {n_shots} examples and a question takes {n_shots + 1}; ask for fewer examples, or give more pairs"
        )

    def example(rng: Random, index: int) -> Example:
        *shots, (word, answer) = rng.sample(pairs, n_shots + 1)
        answers = [shot[1] for shot in shots]
        others = [other for other in answers if other != answer]
        turned = answers[1:] + answers[:1]  # the shots are in random order, so that turning their answers shuffles them
        clean, corrupted = (
            "".join(f"Q: {shot[0]}\nA: {given}\n\n" for shot, given in zip(shots, of_shots, strict=True))
            + f"Q: {word}\nA:"
            for of_shots in (answers, turned)
        )
        return Example(clean, f" {answer}", f" {rng.choice(others)}" if others else None, corrupted)

    drawn = draw(model, n_prompts, seed, example)
    examples, scorables = zip(*drawn, strict=True)
    last = Example(examples[0].prompt.rsplit("\n\n", 1)[-1], examples[0].target)
    description = f"{n_shots} examples and a question, {such_as([last, *examples[1:]])}; {how}; seed {seed}"
    return PromptSet(**stacked(scorables), name=f"{name} in context", description=description)


def _built_in(model: Any, task: Task, domain: Domain) -> tuple[str, list[tuple[str, str]], str]:
    if task not in get_args(Task):
        raise ValueError(f"task must be one of {', '.join(map(repr, get_args(Task)))}, or WordPairs, got {task!r}")
    english, of_demo = _ENTRIES[task]
    if not of_demo and domain == "demo":
        raise ValueError(f"the demo model's world has no {task} pairs; it has capitals and plurals")
    words = usable(model, domain if of_demo else "english", english, of_demo)
    return task, [(entry.words[0], entry.words[1]) for entry in words.entries], words.in_words


def _own(model: Any, task: WordPairs) -> tuple[str, list[tuple[str, str]], str]:
    single = [pair for pair in task.pairs if len(continuation(model, "A:", f" {pair[1]}") or ()) == 1]
    n_out = len(task.pairs) - len(single)
    left_out = f" without {n_out} of {len(task.pairs)} that are not single tokens" if n_out else ""
    return task.name, single, f"pairs as given{left_out}"


def _answers(kind: str, text: str) -> list[Entry]:
    """Pairs of which only the answer must be a single token."""
    pairs = (pair.split() for pair in text.split(";"))
    return [Entry(kind, (word, answer), n_single=1) for word, answer in pairs]


def _again(kind: str, entries: list[Entry]) -> list[Entry]:
    return [Entry(kind, entry.words, n_single=1) for entry in entries if entry.kind == kind]


_ANTONYMS = _answers(
    "antonym",
    "hot cold; big small; tall short; fast slow; young old; happy sad; light dark; rich poor; hard soft; strong weak; "
    "early late; high low; wide narrow; clean dirty; full empty; good bad; open closed; true false; new old; "
    "long short; loud quiet; near far; right wrong; easy difficult; thick thin; wet dry; deep shallow; sharp dull; "
    "safe dangerous; up down; in out; on off; left right; first last; alive dead; public private; positive negative; "
    "black white; day night; love hate; begin end; win lose; buy sell; push pull; accept reject; increase decrease; "
    "rise fall; success failure; war peace; north south; east west; male female",
)
_PASTS = _answers(
    "past",
    "go went; see saw; take took; give gave; come came; make made; know knew; think thought; find found; tell told; "
    "become became; leave left; feel felt; bring brought; begin began; keep kept; hold held; write wrote; stand stood; "
    "hear heard; mean meant; meet met; run ran; pay paid; sit sat; speak spoke; lead led; grow grew; lose lost; "
    "fall fell; send sent; build built; draw drew; break broke; spend spent; rise rose; drive drove; buy bought; "
    "wear wore; choose chose; walk walked; talk talked; play played; work worked; call called; ask asked; turn turned; "
    "start started; look looked; want wanted; help helped; move moved; live lived; believe believed; happen happened",
)
_ENTRIES: dict[str, tuple[list[Entry], list[Entry]]] = {
    "country-capital": (_again("capital", vocabulary.FACTS_ENGLISH), _again("capital", vocabulary.FACTS_DEMO)),
    "singular-plural": (_again("noun", vocabulary.NOUNS_ENGLISH), _again("noun", vocabulary.NOUNS_DEMO)),
    "antonym": (_ANTONYMS, []),
    "present-past": (_PASTS, []),
}
