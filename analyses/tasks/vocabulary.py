"""The words of the built-in tasks: common English ones, and those of the demo model's world.

An entry is used when its words are single tokens for the model's tokenizer, so that prompts line up word by word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from workbench.analyses.tasks.scoring import continuation
from workbench.demo import words as demo

Domain = Literal["auto", "english", "demo"]


@dataclass(frozen=True)
class Entry:
    """Words that are used together.

    Args:
        kind: what they are used for.
        words: singular and plural, subject and answer, or a single one.
        n_single: how many of the last words must be single tokens; None means all.
    """

    kind: str
    words: tuple[str, ...]
    n_single: int | None = None


@dataclass(frozen=True)
class Vocabulary:
    """The entries that a tokenizer has as single tokens."""

    domain: str
    entries: tuple[Entry, ...]
    n_left_out: int

    def of(self, kind: str) -> list[Entry]:
        """The entries of a kind, in their order."""
        return [entry for entry in self.entries if entry.kind == kind]

    def words(self, kind: str, least: int = 1) -> list[str]:
        """The single words of a kind. Raises ValueError where there are fewer than ``least``."""
        found = [entry.words[0] for entry in self.of(kind)]
        if len(found) < least:
            raise ValueError(
                f"the task needs {least} {kind}s that are single tokens, and this model's tokenizer has {len(found)} "
                f"of its {self.in_words}; write prompts of your own and read them with read_prompts"
            )
        return found

    @property
    def in_words(self) -> str:
        """The domain, and how much of it is left out."""
        language = "English words" if self.domain == "english" else "words of the demo model's world"
        if not self.n_left_out:
            return language
        n_all = self.n_left_out + len(self.entries)
        return f"{language} without {self.n_left_out} of {n_all} that are not single tokens"


def usable(model: Any, domain: Domain, english: Sequence[Entry], of_demo: Sequence[Entry]) -> Vocabulary:
    """The entries of a domain whose words are single tokens.

    "auto" takes the domain of which the tokenizer has the greater share, English where they are equal.

    Raises:
        ValueError: another domain.
    """
    if domain not in get_args(Domain):
        raise ValueError(f"domain must be one of {', '.join(map(repr, get_args(Domain)))}, got {domain!r}")
    found = {
        name: [entry for entry in entries if _is_single(model, entry)]
        for name, entries in (("english", english), ("demo", of_demo))
        if domain in ("auto", name)
    }
    n_all = {"english": len(english), "demo": len(of_demo)}
    best = max(found, key=lambda name: len(found[name]) / n_all[name])
    return Vocabulary(best, tuple(found[best]), n_all[best] - len(found[best]))


def _is_single(model: Any, entry: Entry) -> bool:
    """In the middle of a sentence, after a space."""
    needed = entry.words if entry.n_single is None else entry.words[-entry.n_single :]
    return all(len(continuation(model, "The", f" {word}") or ()) == 1 for word in needed)


def _entries(kind: str, text: str) -> list[Entry]:
    return [Entry(kind, (word,)) for word in text.split()]


def _table(kind: str, text: str) -> list[Entry]:
    """Subjects and answers, of which only the answers must be single tokens; subjects are matched by their length."""
    rows = [row.rsplit(" ", 1) for row in text.replace("\n", "").split("; ")]
    return [Entry(kind, (subject, answer), n_single=1) for subject, answer in rows]


# ---- people, places, things -----------------------------------------------------------------------------------------

SCENES_ENGLISH = [
    *_entries(
        "name",
        "Mary John Tom James Daniel Michael David Sarah Emily Anna Kate Laura Robert William Richard Thomas Charles "
        "George Henry Edward Paul Mark Peter Simon Andrew Jack Adam Alex Ben Sam Max Luke Martin Scott Jane Alice Lucy "
        "Emma Grace Helen Lisa Maria Susan Rachel Julia Karen Linda Amy Nancy Elizabeth Victoria Ruth Jason Kevin",
    ),
    *_entries(
        "place",
        "store school park office station church garden hospital restaurant library museum market beach house theater "
        "farm bank hotel airport",
    ),
    *_entries(
        "thing", "book ring ball key letter drink bottle phone box bag map coat cup flower gift camera watch ticket hat"
    ),
]
SCENES_DEMO = [
    *_entries("name", " ".join(demo.NAMES)),
    *_entries("place", " ".join(demo.PLACES)),
    *_entries("thing", " ".join(demo.THINGS)),
]
HANDOVERS = (
    "When {first} and {second} went to the {place}, {giver} gave the {thing} to",
    "While {first} and {second} were at the {place}, {giver} handed the {thing} to",
    "After {first} and {second} came to the {place}, {giver} offered the {thing} to",
    "Then {first} and {second} met at the {place}, and {giver} brought the {thing} to",
)

# ---- events that last ----------------------------------------------------------------------------------------------

EVENTS_ENGLISH = _entries(
    "event", "war siege strike crisis trial conflict campaign reign drought dispute voyage rebellion project expedition"
)
EVENTS_DEMO = _entries("event", "war winter peace hunger journey")

# ---- nouns with their plurals --------------------------------------------------------------------------------------

NOUNS_ENGLISH = [
    *(
        Entry("noun", (one.words[0], f"{one.words[0]}s"))
        for one in _entries(
            "noun",
            "key book car dog cat tree door table letter picture window house boy girl teacher doctor king farmer "
            "student author river road ship bird horse bottle chair wheel garden tower bridge mountain machine song "
            "building driver soldier lawyer writer singer",
        )
    ),
    *(Entry("noun", pair) for pair in (("box", "boxes"), ("church", "churches"), ("child", "children"))),
    *(Entry("noun", pair) for pair in (("man", "men"), ("woman", "women"), ("knife", "knives"))),
]
NOUNS_DEMO = [Entry("noun", (noun, demo.plural(noun))) for noun in (*demo.THINGS, *demo.WORKERS)]
NEAR = tuple(demo.NEAR)

# ---- facts: relation → subjects and answers ------------------------------------------------------------------------

RELATIONS = {
    "capital": "The capital of {subject} is",
    "language": "The official language of {subject} is",
    "river": "The river of {subject} is the",
    "good": "The people of {subject} sell",
}
FACTS_ENGLISH = [
    *_table(
        "capital",
        "France Paris; Germany Berlin; Italy Rome; Spain Madrid; England London; Russia Moscow; China Beijing; "
        "Japan Tokyo; Egypt Cairo; Greece Athens; Portugal Lisbon; Austria Vienna; Ireland Dublin; Norway Oslo; "
        "Sweden Stockholm; Denmark Copenhagen; Finland Helsinki; Poland Warsaw; Hungary Budapest; Turkey Ankara; "
        "Iran Tehran; Iraq Baghdad; Syria Damascus; Lebanon Beirut; Cuba Havana; Peru Lima; Chile Santiago; "
        "Canada Ottawa; Kenya Nairobi; Thailand Bangkok; Vietnam Hanoi; Scotland Edinburgh; Belgium Brussels; "
        "Afghanistan Kabul; Venezuela Caracas; Australia Canberra; Philippines Manila; Romania Bucharest; "
        "Serbia Belgrade; Bulgaria Sofia; Switzerland Bern; Wales Cardiff; Tunisia Tunis; Qatar Doha; Ghana Accra",
    ),
    *_table(
        "language",
        "France French; Germany German; Italy Italian; Spain Spanish; Russia Russian; China Chinese; Japan Japanese; "
        "Egypt Arabic; Greece Greek; Portugal Portuguese; Austria German; Norway Norwegian; Sweden Swedish; "
        "Denmark Danish; Poland Polish; Hungary Hungarian; Turkey Turkish; Iran Persian; Brazil Portuguese; "
        "Cuba Spanish; Vietnam Vietnamese; Thailand Thai; Romania Romanian; Ukraine Ukrainian; Bulgaria Bulgarian; "
        "Iceland Icelandic; Israel Hebrew; Jamaica English",
    ),
]
FACTS_DEMO = [
    Entry(kind, (country.name, getattr(country, kind)), n_single=1)
    for kind in ("capital", "river", "good")
    for country in demo.COUNTRIES
]
