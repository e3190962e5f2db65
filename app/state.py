"""What a page shows, as one value: it lives in the URL, and everything on the page follows from it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

from workbench.analyses.labels import (
    ABLATIONS,
    ATTENTION_MEASURES,
    GENERATION_SCORES,
    HEAD_SCORES,
    INDUCTION_SCORES,
    SINK_SCORES,
    TASKS,
)
from workbench.errors import WorkbenchError

VERSION = "1"
PAGES = ("heads", "pattern", "induction", "sinks", "attribution", "what-if", "lens", "generation", "compare", "result")
ON_DEMAND = ("circuit", "copying", "massive", "streaming", "purpose")  # cards that are computed when they are asked for
MOST_OFF, LONGEST_NAME = 200, 40  # parts that are switched off at once, and characters of each one's name
# In the demo model's language: names, an invented word and a list come back after various distances.
SAMPLE_TEXT = (
    "Mara and Hugo went to the harbour. Mara gave the lantern to Hugo. A skaflar is a broken bottle. "
    "Every skaflar is green. Names: Thea Niels Casper Dora Pavel. Names again: Thea Niels Casper Dora Pavel. "
    "The skaflar of Mara is in the castle. Hugo saw the skaflar."
)
OWN_PROMPTS = "own_prompts"  # the task whose prompts the user writes
MAX_NAME = 500  # characters of a model's name or path
MAX_WORD = 100  # characters
MOST_NEW, MOST_TEMPERATURE = 256, 5.0  # of a generation
MOST_DECIMALS = 4  # of numbers in the address; Python writes more of them as 1e-05
MAX_INLINE = 1500  # bytes; a longer text goes into the URL as its digest
Span = tuple[int, int]


@dataclass(frozen=True)
class View:
    """The state of one open page.

    Attributes:
        text: the prompt, or ``@`` and its digest where it is too long for a URL.
        max_tokens: the text is cut to so many tokens; None leaves it whole.
        layer, head: the head that is looked at; None until the scores are there to choose the first one by.
        queries, keys: the part of the pattern that is shown, [first, last); None is everything.
        show, first_token, weighting, unit: whose pattern it is, what becomes of token 0, what a cell's colour is, and
            what a row is.
        own_prompts: of the task OWN_PROMPTS, one JSON object a line; as ``text``.
        off: names of parts that are switched off (workbench.analyses.interventions.switches).
        position, lens_position: the token whose next one is looked at, on two pages; None is where
            switching off moves most, or the last that a token follows.
        target, foil: words whose logits are held against each other; empty ones are the analysis's choice.
        new_tokens, temperature, draw: of a generation, where ``draw`` is the seed.
        step: of the generation, the one that is looked at.
        other_model, other_text: what the view is compared with; empty where that has the same model or text. Where all
            is the same, it has the text's words in another order.
        other_layer, other_head: the head that is compared; None is the same.
        compared_score: the score by which heads are compared.
        asked: the cards on demand that were asked for, some of ON_DEMAND.
        opened: a saved result that was opened; its name in ``Services.opened``.
    """

    model: str = "demo"
    text: str = SAMPLE_TEXT
    max_tokens: int | None = None
    page: str = "heads"
    layer: int | None = None
    head: int | None = None
    score: str = "prefix_matching"
    x: str = "previous_token"
    y: str = "prefix_matching"
    pooling: Literal["max", "mean"] = "max"
    scale: str = "linear"
    queries: Span | None = None
    keys: Span | None = None
    show: Literal["head", "layer"] = "head"
    first_token: Literal["kept", "apart", "left out"] = "kept"
    weighting: Literal["weight", "value"] = "weight"
    unit: Literal["token", "word"] = "token"
    induction_score: str = "prefix_matching"
    sink_score: str = "sink_weight"
    length: int = 64
    sequences: int = 8
    seed: int = 0
    off: tuple[str, ...] = ()
    position: int | None = None
    lens_position: int | None = None
    task: str = "factual_recall"
    own_prompts: str = ""
    measure: str = "max_weight"
    ablation: str = "zero"
    prompt: int = 0
    target: str = ""
    foil: str = ""
    new_tokens: int = 24
    temperature: float = 0.0
    draw: int = 0
    step: int = 0
    step_score: str = "prompt_mass"
    asked: tuple[str, ...] = ()
    other_model: str = ""
    other_text: str = ""
    other_layer: int | None = None
    other_head: int | None = None
    compared_score: str = "prefix_matching"
    opened: str = ""

    @property
    def has_head(self) -> bool:
        return self.layer is not None and self.head is not None


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _decimal(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if (
            not re.fullmatch(rf"\d{{1,6}}(\.\d{{1,{MOST_DECIMALS}}})?", text, re.ASCII)
            or not low <= float(text) <= high
        ):
            raise ValueError(f"must be a number from {low:g} to {high:g} with at most {MOST_DECIMALS} decimal places")
        return float(text)

    return parse


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _words(limit: int) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if len(text) > limit:
            raise ValueError(f"must have at most {limit} characters")
        return text

    return parse


def _span(text: str) -> Span:
    ends = re.fullmatch(r"(\d{1,8})-(\d{1,8})", text, re.ASCII)
    if ends is None or not int(ends[1]) < int(ends[2]) <= 10**7:
        raise ValueError("must be two increasing whole numbers up to 10000000, as in 0-64")
    return int(ends[1]), int(ends[2])


def _asked(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if any(name not in ON_DEMAND for name in names):
        raise ValueError(f"must be some of {', '.join(ON_DEMAND)} with commas between them")
    return tuple(name for name in ON_DEMAND if name in names)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    if len(names) > MOST_OFF or any(not 0 < len(name) <= LONGEST_NAME for name in names):
        raise ValueError(
            f"must be at most {MOST_OFF} names of at most {LONGEST_NAME} characters with commas between them"
        )
    return names


def typed_model(typed: Any) -> str:
    """The name of a model as it was typed into a field, in characters that an address can hold."""
    return str(typed or "").strip().encode("utf-8", "replace").decode()[:MAX_NAME]


# The names in the address, in the order in which they are written.
_PARAMETERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "page": ("page", _choice(*PAGES)),
    "model": ("model", _words(MAX_NAME)),
    "text": ("text", _words(MAX_INLINE)),
    "max": ("max_tokens", _integer(1, 10**7)),
    "layer": ("layer", _integer(0, 9999)),
    "head": ("head", _integer(0, 9999)),
    "score": ("score", _choice(*HEAD_SCORES)),
    "x": ("x", _choice(*HEAD_SCORES)),
    "y": ("y", _choice(*HEAD_SCORES)),
    "pool": ("pooling", _choice("max", "mean")),
    "scale": ("scale", _choice("linear", "sqrt")),
    "show": ("show", _choice("head", "layer")),
    "first": ("first_token", _choice("kept", "apart", "left out")),
    "by": ("weighting", _choice("weight", "value")),
    "unit": ("unit", _choice("token", "word")),
    "queries": ("queries", _span),
    "keys": ("keys", _span),
    "induction": ("induction_score", _choice(*INDUCTION_SCORES)),
    "sink": ("sink_score", _choice(*SINK_SCORES)),
    "length": ("length", _integer(4, 4096)),
    "sequences": ("sequences", _integer(1, 512)),
    "seed": ("seed", _integer(0, 2**31 - 1)),
    "off": ("off", _names),
    "position": ("position", _integer(0, 10**7)),
    "task": ("task", _choice(*TASKS, OWN_PROMPTS)),
    "prompts": ("own_prompts", _words(MAX_INLINE)),
    "measure": ("measure", _choice(*ATTENTION_MEASURES)),
    "ablation": ("ablation", _choice(*ABLATIONS)),
    "prompt": ("prompt", _integer(0, 9999)),
    "depth-of": ("lens_position", _integer(0, 10**7)),
    "target": ("target", _words(MAX_WORD)),
    "foil": ("foil", _words(MAX_WORD)),
    "new": ("new_tokens", _integer(1, MOST_NEW)),
    "temperature": ("temperature", _decimal(0, MOST_TEMPERATURE)),
    "draw": ("draw", _integer(0, 2**31 - 1)),
    "step": ("step", _integer(0, MOST_NEW)),
    "look": ("step_score", _choice(*GENERATION_SCORES)),
    "asked": ("asked", _asked),
    "other-model": ("other_model", _words(MAX_NAME)),
    "other-text": ("other_text", _words(MAX_INLINE)),
    "other-layer": ("other_layer", _integer(0, 9999)),
    "other-head": ("other_head", _integer(0, 9999)),
    "compared": ("compared_score", _choice(*HEAD_SCORES)),
    "opened": ("opened", _words(120)),
}


NAMES = {name: field for name, (field, _) in _PARAMETERS.items()}  # in the address → of the view
ALWAYS_WRITTEN = ("page", "model")  # a server may open on others than the default


def to_query(view: View) -> str:
    """The view as a query string that starts with ``?``; what equals the default is left out."""
    plain = View()
    pairs = [("v", VERSION)]
    for name, (field, _) in _PARAMETERS.items():
        value = getattr(view, field)
        if field in ALWAYS_WRITTEN or (value is not None and value != getattr(plain, field)):
            between = "," if field in ("off", "asked") else "-"
            several = isinstance(value, (tuple, list))
            number = round(value, MOST_DECIMALS) if isinstance(value, float) else value
            pairs.append((name, between.join(map(str, value)) if several else str(number)))
    return "?" + urlencode(pairs, errors="replace")  # of what is no character at all


def from_query(query: str, default: View) -> tuple[View, list[str]]:
    """Reads a query string, which anyone may have written: (view, one sentence on each thing that was ignored).

    view.js writes such strings too.
    """
    pairs = dict(parse_qsl(query.removeprefix("?"), keep_blank_values=True, max_num_fields=None))
    is_written = "v" in pairs  # by to_query, which leaves out what every view begins with
    version = pairs.pop("v", VERSION)
    if version != VERSION:
        return default, [f"The link was made by another version ({version[:20]!r}); showing the start page."]
    fields: dict[str, Any] = {}
    notices = []
    for name, text in pairs.items():
        if name not in _PARAMETERS:
            notices.append(f"“{name[:40]}” is unknown here.")
            continue
        field, parse = _PARAMETERS[name]
        try:
            fields[field] = parse(text)
        except ValueError as error:
            notices.append(f"“{name}” {error}.")
    first = View(model=default.model, page=default.page) if is_written else default
    return dataclasses.replace(first, **fields), notices


class TextStore:
    """Texts that are too long for a URL, by digest."""

    def __init__(self, keep: int = 32) -> None:
        self._keep = keep
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._kept: set[str] = set()  # for good
        self._lock = threading.Lock()

    def put(self, text: str, *, for_good: bool = False) -> str:
        """What goes into ``View.text``: the text itself, or ``@`` and its digest.

        Args:
            for_good: keeps it however many others come.
        """
        content = text.encode("utf-8", "replace")  # what is no character at all becomes a question mark
        if len(content) <= MAX_INLINE and not text.startswith("@"):
            return content.decode()
        name = "@" + hashlib.sha256(content).hexdigest()[:24]
        with self._lock:
            self._texts[name] = content.decode()
            self._texts.move_to_end(name)
            self._kept |= {name} if for_good else set()
            passing = [other for other in self._texts if other not in self._kept]
            for other in passing[: max(len(passing) - self._keep, 0)]:
                del self._texts[other]
        return name

    def get(self, stored: str) -> str:
        """The text behind ``View.text``.

        Raises:
            WorkbenchError: a digest that this server does not know (any more).
        """
        if not stored.startswith("@"):
            return stored
        with self._lock:
            if stored not in self._texts:
                raise WorkbenchError(
                    "The link's text is too long for a link, and this server no longer holds it; paste it again."
                )
            self._texts.move_to_end(stored)
            return self._texts[stored]
