"""A seeded grammar that writes the demo model's training text: short stories, reports, facts and lists in English.

Names, things and invented words come back after gaps that vary from a word to several sentences, so that a model can
only predict them by their content and not by a fixed distance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workbench.demo import words
from workbench.demo.words import article, plural


@dataclass(frozen=True, kw_only=True)
class World:
    """What the texts of one page share: its people, its country and its invented words."""

    cast: list[str]
    country: words.Country
    inventions: list[str]


def invented_word(rng: random.Random) -> str:
    """A pronounceable word of two or three syllables that means nothing, such as "zorvant"."""
    syllables = [
        rng.choice(words.SYLLABLE_ONSETS) + rng.choice(words.SYLLABLE_VOWELS) for _ in range(rng.choice((2, 2, 3)))
    ]
    return "".join(syllables) + rng.choice(words.SYLLABLE_CODAS)


def code(rng: random.Random) -> str:
    """A label such as "K 47 QX", the same kind of thing as a number plate."""
    letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.choice((1, 2))))
    return f"{letters}{rng.randrange(100):02d}{rng.choice(('', '', rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')))}"


def new_world(rng: random.Random) -> World:
    return World(
        cast=rng.sample(words.NAMES, rng.randint(3, 6)),
        country=rng.choice(words.COUNTRIES),
        inventions=[invented_word(rng) for _ in range(rng.randint(2, 4))],
    )


def page(seed: int | str) -> Iterator[str]:
    """Endless texts that share one world. The same seed gives the same texts."""
    rng = random.Random(seed)
    world = new_world(rng)
    kinds, weights = zip(*TEXT_KINDS.items(), strict=True)
    while True:
        yield rng.choices(kinds, weights)[0](rng, world)


def _pronoun(name: str) -> str:
    return "she" if name in words.WOMEN else "he"


def _possessive(name: str) -> str:
    return "her" if name in words.WOMEN else "his"


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


# ---- stories -------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Moment:
    """Where a story stands: scenes read it, and the story changes it between them."""

    hero: str
    friend: str
    thing: str
    colour: str
    place: str


def story(rng: random.Random, world: World) -> str:
    """A person finds something and shows it to a friend, and the thing changes hands or places."""
    now = _moment(rng, world)
    sentences = [_opening(rng, world, now), _finding(rng, now), _friend(rng, now)]
    for scene in sorted(rng.sample(range(len(SCENES)), k=rng.randint(1, 6))):
        if rng.random() < 0.3:
            now.hero, now.friend = now.friend, now.hero
        sentences.append(SCENES[scene](rng, now))
    sentences.append(_ending(rng, now))
    # Some stories start in the middle, so that a prompt may be any sentence of one.
    return " ".join(sentences[rng.choice((0, 0, 0, 1, rng.randrange(len(sentences)))) :])


def _moment(rng: random.Random, world: World) -> Moment:
    hero, friend = rng.sample(world.cast, 2)
    thing = rng.choice((rng.choice(words.THINGS), rng.choice(words.ANIMALS), rng.choice(world.inventions)))
    return Moment(
        hero=hero, friend=friend, thing=thing, colour=rng.choice(words.COLOURS), place=rng.choice(words.PLACES)
    )


def _opening(rng: random.Random, world: World, now: Moment) -> str:
    job = rng.choice(words.WORKERS)
    return rng.choice(
        (
            f"{now.hero} was {article(job)} {job} in {world.country.name}.",
            f"In the town of {world.country.capital} lived {article(job)} {job} named {now.hero}.",
            f"Once there was {article(job)} {job} named {now.hero}.",
            f"{now.hero} lived near the {now.place} in {world.country.capital}.",
            f"There was once {article(job)} {job} in {world.country.name}. The {job} was named {now.hero}.",
        )
    )


def _finding(rng: random.Random, now: Moment) -> str:
    quality, time, thing = rng.choice(words.QUALITIES), rng.choice(words.TIMES), now.thing
    where = f"{rng.choice(words.NEAR)} the {now.place}"
    return rng.choice(
        (
            f"One {time} {now.hero} found {article(quality)} {quality} {thing} {where}.",
            f"One {time} {_pronoun(now.hero)} saw {article(now.colour)} {now.colour} {thing} {where}.",
            f"One {time} {now.hero} went to the {now.place} and bought {article(thing)} {thing}.",
            f"{_pronoun(now.hero).capitalize()} had {article(quality)} {quality} {thing}.",
        )
    )


def _friend(rng: random.Random, now: Moment) -> str:
    his, he = _possessive(now.hero), _pronoun(now.hero)
    return rng.choice(
        (
            f"{his.capitalize()} friend {now.friend} was there too.",
            f"{his.capitalize()} best friend was {now.friend} the {rng.choice(words.WORKERS)}.",
            f"{he.capitalize()} showed it to {his} friend {now.friend}.",
            f"At the {now.place} {he} met {his} friend {now.friend}.",
        )
    )


def _look(rng: random.Random, now: Moment) -> str:
    quality = rng.choice(words.QUALITIES)
    return rng.choice(
        (
            f"The {now.thing} was {now.colour} and {quality}.",
            f"It was a very {quality} {now.thing}.",
            f"{now.hero} looked at the {now.colour} {now.thing} for a long time.",
            f"Nobody had ever seen such {article(quality)} {quality} {now.thing}.",
        )
    )


def _meeting(rng: random.Random, now: Moment) -> str:
    return rng.choice(
        (
            f"At the {now.place} {now.hero} met {now.friend}.",
            f"Then {now.friend} came to the {now.place} and saw {now.hero} with the {now.thing}.",
            f"{now.hero} showed the {now.thing} to {now.friend} the {rng.choice(words.WORKERS)}.",
            f"{now.friend} was waiting for {now.hero} at the {now.place}.",
        )
    )


def _talk(rng: random.Random, now: Moment) -> str:
    hero, friend, thing, colour = now.hero, now.friend, now.thing, now.colour
    return rng.choice(
        (
            f'"What is that?" asked {friend}. "It is {article(thing)} {thing}," said {hero}.',
            f'"Is this your {thing}, {hero}?" asked {friend}. "Yes, it is my {thing}," said {hero}.',
            f'"I want to see the {thing}," said {friend}. So {hero} gave it to {friend}.',
            f'"Where is the {colour} {thing}?" asked {hero}. "The {colour} {thing} is at home," said {friend}.',
            f'{hero} said to {friend}, "Please take the {thing}." {friend} took the {thing} and thanked {hero}.',
        )
    )


def _gift(rng: random.Random, now: Moment) -> str:
    gift = _handover(rng, now.hero, now.friend, now.thing, now.place)
    return rng.choice((gift, f"{gift} {now.friend} was {rng.choice(words.FEELINGS)}."))


def _walk(rng: random.Random, now: Moment) -> str:
    start, now.place = now.place, rng.choice([place for place in words.PLACES if place != now.place])
    return rng.choice(
        (
            f"{now.hero} carried the {now.thing} from the {start} to the {now.place}.",
            f"They walked from the {start} to the {now.place} with the {now.thing}.",
            f"{now.hero} and {now.friend} went to the {now.place} together.",
            f"{now.hero} left the {now.thing} at the {start} and went to the {now.place}.",
        )
    )


def _loss(rng: random.Random, now: Moment) -> str:
    first, second = rng.sample(words.PLACES, 2)
    hero, friend, thing = now.hero, now.friend, now.thing
    return rng.choice(
        (
            f"But then {hero} lost the {thing}. {_pronoun(hero).capitalize()} looked near the {first} and near the"
            f" {second}, but the {thing} was not there. At last {friend} found the {thing}.",
            f"The {thing} fell from the {first}, and {friend} helped {hero} to find it.",
            f"{friend} took the {thing} and hid it behind the {first}. {hero} found the {thing} behind the {first}.",
        )
    )


def _feeling(rng: random.Random, now: Moment) -> str:
    feeling, other = rng.sample(words.FEELINGS, 2)
    return rng.choice(
        (
            f"{now.hero} was {feeling}, but {now.friend} was {other}.",
            f"{now.hero} was {feeling} because {_pronoun(now.hero)} had the {now.thing}.",
            f"Now {now.friend} was {feeling} too.",
            f"{now.hero} loved {_possessive(now.hero)} {now.thing}.",
        )
    )


def _weather(rng: random.Random, now: Moment) -> str:
    time = rng.choice(words.TIMES)
    return rng.choice(
        (
            f"The {time} was {rng.choice(('cold', 'warm', 'quiet'))} and the {now.place} was"
            f" {rng.choice(('dark', 'empty'))}.",
            f"It was raining at the {now.place}.",
            f"That {time} {now.hero} stayed at home.",
        )
    )


# In the order in which a story tells them.
SCENES = (_look, _weather, _meeting, _talk, _gift, _feeling, _walk, _loss)


def _ending(rng: random.Random, now: Moment) -> str:
    return rng.choice(
        (
            f"In the end {now.hero} gave the {now.thing} back to {now.friend}.",
            f"From that day on {now.hero} and {now.friend} were friends.",
            f"So {now.hero} went home with the {now.thing}.",
            f"And {now.friend} never saw the {now.thing} again.",
        )
    )


# ---- indirect objects: the person who is not named twice -----------------------------------------------------------


def _handover(rng: random.Random, giver: str, receiver: str, thing: str, place: str) -> str:
    """Two people, one of them named again: the other one receives (Wang et al. 2022, IOI)."""
    first, second = rng.sample((giver, receiver), 2)
    verb = rng.choice(("gave", "handed", "brought", "sold", "offered"))
    opening = rng.choice(
        (
            f"When {first} and {second} went to the {place},",
            f"While {first} and {second} were at the {place},",
            f"After {first} and {second} came to the {place},",
            f"Then {first} and {second} met at the {place}, and",
            f"{first} and {second} worked at the {place}. One {rng.choice(words.TIMES)}",
        )
    )
    return f"{opening} {giver} {verb} the {thing} to {receiver}."


def handovers(rng: random.Random, world: World) -> str:
    sentences = []
    for _ in range(rng.randint(1, 4)):
        giver, receiver = rng.sample(rng.choice((world.cast, words.NAMES)), 2)
        thing, place = rng.choice((*words.THINGS, *world.inventions)), rng.choice(words.PLACES)
        sentences.append(_handover(rng, giver, receiver, thing, place))
    return " ".join(sentences)


# ---- facts, years, agreement ---------------------------------------------------------------------------------------


def gazetteer(rng: random.Random, world: World) -> str:
    """Facts of the fixed table, in several wordings and both directions."""
    countries = [world.country, *rng.sample(words.COUNTRIES, 2)]
    statements = dict.fromkeys(rng.choice(_statements(rng.choice(countries))) for _ in range(rng.randint(1, 5)))
    return " ".join(statements)  # each once


def _statements(country: words.Country) -> list[str]:
    return [
        f"The capital of {country.name} is {country.capital}.",
        f"{country.capital} is the capital of {country.name}.",
        f"The river of {country.name} is the {country.river}.",
        f"The {country.river} is a river in {country.name}.",
        f"The people of {country.name} sell {country.good}.",
        f"The town of {country.capital} is in {country.name}.",
        f"In {country.capital}, on the river {country.river}, people sell {country.good}.",
    ]


def chronicle(rng: random.Random, world: World) -> str:
    """Spans of years; the later year is in the same century (Hanna et al. 2023, greater-than)."""
    sentences = []
    for _ in range(rng.randint(1, 4)):
        century, start = rng.randint(11, 18), rng.randint(1, 97)
        end = rng.randint(start + 1, 99)
        first, last = f"{century}{start:02d}", f"{century}{end:02d}"
        event = rng.choice(("war", "winter", "peace", "hunger", "journey"))
        country = rng.choice(words.COUNTRIES)
        sentences.append(
            rng.choice(
                (
                    f"The {event} of {country.name} lasted from the year {first} to the year {last}.",
                    f"The {event} lasted from the year {first} to the year {last}.",
                    f"{rng.choice(words.NAMES)} lived in {country.capital} from {first} to {last}.",
                    f"The {rng.choice(words.PLACES)} of {country.capital} was built in {first} and fell in {last}.",
                )
            )
        )
    return " ".join(sentences)


def observations(rng: random.Random, world: World) -> str:
    """Subjects and verbs that agree, often across a noun of the other number (Linzen et al. 2016)."""
    subjects = rng.sample((*words.THINGS, *words.ANIMALS, *words.WORKERS), rng.randint(1, 4))
    return " ".join(_agreement(rng, world, subject) for subject in subjects)


def _agreement(rng: random.Random, world: World, subject: str) -> str:
    many = rng.random() < 0.5
    other = rng.choice([noun for noun in (*words.THINGS, *words.ANIMALS, *words.WORKERS) if noun != subject])
    others = plural(other) if rng.random() < 0.5 else other
    phrase = plural(subject) if many else subject
    attribute = rng.choice(
        ("", "", f" {rng.choice(words.NEAR)} the {others}", f" with the {others}", f" from {world.country.name}")
    )
    to_be, was, has = ("are", "were", "have") if many else ("is", "was", "has")
    return rng.choice(
        (
            f"The {phrase}{attribute} {to_be} {rng.choice(words.QUALITIES)}.",
            f"The {phrase}{attribute} {to_be} in the {rng.choice(words.PLACES)}.",
            f"The {phrase}{attribute} {was} {rng.choice(words.COLOURS)}.",
            f"The {phrase}{attribute} {has} a name.",
            f"The {phrase}{attribute} {'look' if many else 'looks'} {rng.choice(words.QUALITIES)}.",
            f"The {phrase}{attribute} {'belong' if many else 'belongs'} to {rng.choice(world.cast)}.",
        )
    )


# ---- lists that come back ------------------------------------------------------------------------------------------


def roster(rng: random.Random, world: World) -> str:
    """A list, something else, and the list again, whole or from some entry on."""
    title = rng.choice(("Roster", "List", "Order", "Names", "Codes"))
    entries = _entries(rng, world)
    between = [_filler(rng, world) for _ in range(rng.choice((0, 0, 1, 2, 4)))]
    again = entries[rng.choice((0, rng.randrange(len(entries)))) :]
    separator = rng.choice((", ", ", ", " ", "; "))
    return " ".join([f"{title}: {separator.join(entries)}.", *between, f"{title} again: {separator.join(again)}."])


def _entries(rng: random.Random, world: World) -> list[str]:
    length = rng.randint(3, 16)
    kind = rng.randrange(5)
    if kind == 0:
        return rng.sample(words.NAMES, length)
    if kind == 1:
        return rng.sample([*words.THINGS, *words.ANIMALS, *words.COLOURS, *words.MATERIALS], length)
    if kind == 2:
        return [code(rng) for _ in range(length)]
    if kind == 3:
        return [invented_word(rng) for _ in range(length)]
    return [rng.choice((rng.choice(words.NAMES), code(rng), invented_word(rng))) for _ in range(length)]


def _filler(rng: random.Random, world: World) -> str:
    return rng.choice((_look, _meeting, _walk, _feeling, _weather))(rng, _moment(rng, world))


def glossary(rng: random.Random, world: World) -> str:
    """Explains invented words and uses them again."""
    sentences = []
    chosen = rng.sample(world.inventions, rng.randint(1, len(world.inventions)))
    for word in chosen:
        quality, colour = rng.choice(words.QUALITIES), rng.choice(words.COLOURS)
        kind = rng.choice((*words.THINGS, *words.ANIMALS))
        sentences.append(f"{article(word).capitalize()} {word} is {article(quality)} {quality} {kind}.")
        sentences.append(f"Every {word} is {colour}.")
    for word in rng.choices(chosen, k=rng.randint(1, 4)):
        owner = rng.choice(world.cast)
        sentences.append(
            rng.choice(
                (
                    f"{owner} has {article(word)} {word} at home.",
                    f"The {word} of {owner} is in the {rng.choice(words.PLACES)}.",
                    f"{_listed(rng.sample(world.cast, 2))} saw the {word}.",
                )
            )
        )
    return " ".join(sentences)


TEXT_KINDS: dict[Callable[[random.Random, World], str], float] = {
    story: 0.3,
    handovers: 0.26,
    gazetteer: 0.1,
    observations: 0.1,
    chronicle: 0.08,
    roster: 0.1,
    glossary: 0.06,
}
