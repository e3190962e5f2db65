"""The words of the demo model's language: people, things, places and a fixed table of fictional facts."""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> list[str]:
    return text.split()


WOMEN = _words(
    "Mara Ilse Petra Lena Nora Wanda Edda Tilda Hanne Sonja Greta Alma "
    "Clara Dora Frida Ingrid Julia Karin Livia Vera Ruth Selma Thea Yrsa"
)
MEN = _words(
    "Tobin Joren Anders Bruno Casper Dirk Emil Felix Gustav Hugo Ivan Jonas "
    "Klaus Lars Magnus Niels Otto Pavel Rolf Stefan Ulrich Viktor Willem Yorick"
)
NAMES = WOMEN + MEN

THINGS = _words(
    "lantern basket kettle hammer ladder blanket mirror bottle candle drum rope bell book letter map key ring coin "
    "cup spoon knife box chair boat wheel clock flute coat hat saddle"
)
ANIMALS = _words("dog cat horse goat cow hen duck owl crow fox bear rabbit")
WORKERS = _words(
    "baker farmer weaver miller sailor teacher hunter painter singer doctor gardener tailor carpenter shepherd "
    "soldier writer"
)
PLACES = _words(
    "market harbour mill forest garden bridge tower kitchen school river church field barn library station bakery "
    "castle beach valley square"
)
MATERIALS = _words("wool salt iron honey grain timber silver wine cloth amber copper pepper")
COLOURS = _words("red blue green yellow white black brown grey")
QUALITIES = _words("old new small large heavy light broken clean cold warm round strange beautiful quiet")
FEELINGS = _words("happy sad tired hungry angry proud afraid glad")
TIMES = _words("morning evening night day winter summer spring autumn")

NEAR = _words("near behind under above beside")
IRREGULAR_PLURALS = {"fox": "foxes", "box": "boxes", "knife": "knives"}

SYLLABLE_ONSETS = _words("b br d dr f fl g gr h j k kl l m n p pl qu r s sk st t tr v w z zw")
SYLLABLE_VOWELS = _words("a e i o u ei ou")
SYLLABLE_CODAS = _words("b d ft g k l lm m n nd p r rk s st t x z")


@dataclass(frozen=True, kw_only=True)
class Country:
    """One row of the fact table: nothing in it is true outside the demo model's world."""

    name: str
    capital: str
    river: str
    good: str


_COUNTRIES = _words("""
Veld Talvik Sarn            Ardun Besko Ivel            Brell Cardun Morra          Corvia Delfor Tesk
Dunmar Emring Lode          Eskel Fosby Aune            Fenrow Grenholt Bister      Galdor Hesk Quist
Harven Ivarn Dray           Ilmar Jomara Welm           Jurland Kolder Neth         Kethra Lindow Orse
Lorne Morvik Pell           Mirov Nellby Skad           Norrin Oskary Thurn         Ostell Pardell Ulm
Pelland Quilby Vask         Quorin Rostell Yare         Rethia Skarn Zell           Sundar Tormel Farn
Tarvos Ulvar Gleam          Umbrel Vintry Hode          Wendar Wexmoor Jass         Zelmar Yarrow Kelm
""")
COUNTRIES = [
    Country(
        name=_COUNTRIES[3 * row],
        capital=_COUNTRIES[3 * row + 1],
        river=_COUNTRIES[3 * row + 2],
        good=MATERIALS[row * 5 % len(MATERIALS)],
    )
    for row in range(len(_COUNTRIES) // 3)
]


def plural(noun: str) -> str:
    """The plural of one of this module's nouns."""
    return IRREGULAR_PLURALS.get(noun, noun + "s")


def article(word: str) -> str:
    """``"a"`` or ``"an"``, by the first letter."""
    return "an" if word[0].lower() in "aeiou" else "a"
