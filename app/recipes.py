"""What a card shows, as data: an analysis with its options, and which figure of its result.

Drawing, exporting, the code to copy and the notebook all follow the same recipe, so that what is exported is what is
seen.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dash.exceptions import PreventUpdate

from workbench.app.models import IN_MEMORY
from workbench.app.state import OWN_PROMPTS, View

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from workbench.analyses import Result
    from workbench.estimates import Estimate

SINK_LENGTH = 64  # tokens of a sequence in which sinks are counted (Gu et al. 2024)
SHORTEN = "shorten it, or keep its beginning with the field “Shorten to”"
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Code:
    """Python in parts, each a list of lines: what is imported, how the model is loaded, and what makes ``result``."""

    imports: list[str]
    model: list[str]
    result: list[str]


@dataclass(frozen=True)
class Recipe:
    """An analysis, what it reads, and its options. It depends on a view only through what it reads.

    Args:
        analysis: its public name in workbench.analyses.
        title: what it is called while it runs.
        reads: what it gets after the model: the text's tokens, the text in sequences of SINK_LENGTH tokens, the text
            over and over until it fills sequences of the shape ``filling``, the prompts of the view's task (or the
            user's own), or nothing.
        arguments, options: what else it gets, as values that Python's ``repr`` writes. Options that are None are left
            to the analysis.
        off: parts that are switched off meanwhile (workbench.analyses.interventions.switches); of texts only.
        model, text: in place of the view's; the text as in ``View.text``.
        shuffled: whether the text's words come in another order.
    """

    analysis: str
    title: str = field(compare=False, repr=False)
    reads: Literal["text", "sequences", "filled", "task", "nothing"] = "text"
    arguments: tuple[Any, ...] = ()
    options: Options = field(default_factory=dict)
    off: tuple[str, ...] = ()
    model: str | None = None
    text: str | None = None
    shuffled: bool = False
    filling: tuple[int, int] = (1, SINK_LENGTH)  # (sequences, tokens of each)

    def model_of(self, view: View) -> str:
        return view.model if self.model is None else self.model

    @property
    def to_take_less(self) -> str:
        """What the user can do where it takes too much; empty where its size is fixed."""
        own = {"task": "take fewer or shorter prompts of your own", "nothing": "take fewer or shorter sequences"}
        return (own | {"filled": ""}).get(self.reads, "shorten the text")

    def text_of(self, view: View) -> str:
        """What it reads, as in ``View.text``."""
        if self.reads == "task":
            return view.own_prompts if view.task == OWN_PROMPTS else ""
        return view.text if self.text is None else self.text

    def key(self, view: View) -> str:
        """The same for the same result."""
        text = self.text_of(view), view.max_tokens
        read = {
            "text": text,
            "sequences": text,
            "filled": text,
            "task": (view.task, self.text_of(view)),
            "nothing": None,
        }[self.reads]
        return hashlib.sha256(repr((self, self.model_of(view), read)).encode()).hexdigest()

    def run(
        self,
        model: Any,
        view: View,
        text: str,
        progress: Callable[[float, str], None],
        memory: Any = None,
        before: Callable[[Estimate | None], None] = lambda estimate: None,
    ) -> Result:
        """The result.

        Args:
            text: the words behind ``text_of(view)``.
            memory: for analyses of patterns, a ScoreMemory of the model as it is.
            before: told what it is going to take, and may raise.
        """
        from workbench import analyses
        from workbench.analyses.costs import estimate_analysis

        analysis = getattr(analyses, self.analysis)
        given, options = self._read(model, view, text), self._given_options()
        before(estimate_analysis(self.analysis, model, given[0] if given else None, self.arguments, options))
        helpers = {"progress": progress, "memory": None if self.off else memory}
        takes = inspect.signature(analysis).parameters
        options |= {name: helper for name, helper in helpers.items() if name in takes}
        with self._switched_off(model, given):
            return analysis(model, *given, *self.arguments, **options)

    def _given_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if value is not None}

    def _read(self, model: Any, view: View, text: str) -> list[Any]:
        from workbench import analyses
        from workbench.analyses.inputs import filled_sequences, text_to_sequences, text_to_tokens
        from workbench.analyses.support import check_model

        if self.reads == "text":
            return [text_to_tokens(model, text, view.max_tokens, shorten=SHORTEN)]
        if self.reads == "sequences":
            return [text_to_sequences(model, text, view.max_tokens, length=SINK_LENGTH)]
        if self.reads == "filled":
            n_sequences, length = self.filling
            return [filled_sequences(model, text, view.max_tokens, length=length, n_sequences=n_sequences)]
        if self.reads == "task":
            check_model(model, predicts=True)  # before words are sought, of which such a model may have none
            if view.task == OWN_PROMPTS:
                return [analyses.parse_prompts(model, text, source="the field “Your own prompts”")]
            return [getattr(analyses, view.task)(model)]
        return []

    @contextmanager
    def _switched_off(self, model: Any, given: list[Any]) -> Iterator[None]:
        from workbench.analyses.interventions.switches import switched_off

        if not self.off:
            yield
            return
        off = switched_off(model, self.off, given[0].tokens.shape[-1])
        with model.hooks(fwd_hooks=list(off.edits.items())):
            yield

    def tokens(self, model: Any, view: View, text: str) -> list[list[str]] | None:
        """The tokens of every sequence as text; None of prompts, and where no text is read."""
        from workbench.analyses.token_texts import token_texts

        if self.reads in ("task", "nothing"):
            return None
        return [token_texts(model.tokenizer, ids) for ids in self._read(model, view, text)[0].tokens.tolist()]

    def facts(self, view: View, text: str) -> dict[str, Any]:
        """What makes the result, for a file that is kept beside it."""
        facts: dict[str, Any] = {
            "analysis": self.analysis,
            "arguments": self.arguments,
            "options": self._given_options(),
        }
        facts |= {"switched_off": self.off, "model": self.model_of(view), "reads": self.reads}
        if self.reads == "task":
            facts["task"] = view.task
        if self.reads not in ("task", "nothing"):
            facts["max_tokens"] = view.max_tokens
        return facts | ({"text": text} if self.text_of(view) and self.reads != "nothing" else {})

    def code(self, view: View, text: str, prefix: str = "") -> Code:
        """Python that makes the same result, of the same text.

        Args:
            prefix: of the variables' names, to tell them from those of other code.
        """
        imports = {"workbench": ["HookedTransformer"], "workbench.analyses": [self.analysis]}
        model, words, tokens, prompts = (f"{prefix}{name}" for name in ("model", "text", "tokens", "prompts"))
        lines, given = [], [model]
        if self.reads == "text" and view.max_tokens is None and not self.off:
            lines, given = [f"{words} = {text!r}"], [model, words]
        elif self.reads == "text":
            imports["workbench.analyses.inputs"] = ["text_to_tokens"]
            cut = f"text_to_tokens({model}, {words}, {view.max_tokens})"
            lines, given = [f"{words} = {text!r}", f"{tokens} = {cut}"], [model, tokens]
        elif self.reads == "sequences":
            imports["workbench.analyses.inputs"] = ["text_to_sequences"]
            cut = f"text_to_sequences({model}, {words}, {view.max_tokens}, length={SINK_LENGTH})"
            lines, given = [f"{words} = {text!r}", f"{tokens} = {cut}"], [model, tokens]
        elif self.reads == "filled":
            imports["workbench.analyses.inputs"] = ["filled_sequences"]
            n_sequences, length = self.filling
            shape = f"length={length}, n_sequences={n_sequences}"
            made = f"filled_sequences({model}, {words}, {view.max_tokens}, {shape})"
            lines, given = [f"{words} = {text!r}", f"{tokens} = {made}"], [model, tokens]
        elif self.reads == "task" and view.task == OWN_PROMPTS:
            imports["workbench.analyses"].append("parse_prompts")
            lines, given = [f"{prompts} = parse_prompts({model}, {text!r})"], [model, prompts]
        elif self.reads == "task":
            imports["workbench.analyses"].append(view.task)
            lines, given = [f"{prompts} = {view.task}({model})"], [model, prompts]
        call = f"{prefix}result = {called(self.analysis, given, self.arguments, self._given_options())}"
        if self.off:
            imports["workbench.analyses.interventions.switches"] = ["switched_off"]
            lines.append(f"{prefix}off = switched_off({model}, {list(self.off)!r}, {tokens}.tokens.shape[-1])")
            call = f"with {model}.hooks(fwd_hooks=list({prefix}off.edits.items())):\n    {call}"
        return Code(
            [f"from {module} import {', '.join(sorted(names))}" for module, names in imports.items()],
            [_loading(model, self.model_of(view))],
            [*lines, call],
        )


@dataclass(frozen=True)
class Opened:
    """A result that was opened from its files: there is nothing to compute.

    Args:
        name: of the result in ``Services.opened``.
    """

    name: str

    title: ClassVar[str] = "Opening the result"

    def text_of(self, view: View) -> str:
        return ""

    def key(self, view: View) -> str:
        return self.name

    def facts(self, view: View, text: str) -> dict[str, Any]:
        return {"opened": self.name}

    def code(self, view: View, text: str) -> Code:
        """Python that reads the files anew, under the name that they are saved by."""
        loading = [f"result = load_result({f'{self.name}.json'!r})  # or what its files are called"]
        return Code(["from workbench.analyses import load_result"], [], loading)


@dataclass(frozen=True)
class Compared:
    """What a function of workbench.analyses makes of two results.

    Args:
        analysis: its public name.
        title: what it is called while it runs.
        parts: the recipes of both results.
    """

    analysis: str
    title: str = field(compare=False, repr=False)
    parts: tuple[Recipe, Recipe]

    def key(self, view: View) -> str:
        """The same for the same result."""
        return hashlib.sha256(" ".join([self.analysis, *(part.key(view) for part in self.parts)]).encode()).hexdigest()

    def run(self, results: list[Any]) -> Result:
        from workbench import analyses

        return getattr(analyses, self.analysis)(*results)

    def facts(self, view: View, text: tuple[str, str]) -> dict[str, Any]:
        """What made the result; ``text`` are the words behind both parts."""
        a, b = (part.facts(view, words) for part, words in zip(self.parts, text, strict=True))
        return {"analysis": self.analysis, "a": a, "b": b}

    def code(self, view: View, text: tuple[str, str]) -> Code:
        """Python that makes the same result."""
        a = self.parts[0].code(view, text[0])
        b = self.parts[1].code(view, text[1], prefix="other_")
        both = f"result = {self.analysis}(result, other_result)"
        imports = [*a.imports, *(line for line in b.imports if line not in a.imports)]
        imports.append(f"from workbench.analyses import {self.analysis}")
        return Code(imports, [*a.model, *b.model], [*a.result, *b.result, both])


AnyRecipe = Recipe | Opened | Compared


_ONE_AT_A_TIME = threading.Lock()  # so that the figure that is asked for first is there first


@dataclass(frozen=True)
class Shown:
    """A figure of a recipe's result.

    Args:
        kind: one of the result's ``figure_kinds``.
        options: of the figure, as values that Python's ``repr`` writes, or a function that gives them for the result.
            What is None is left to the figure.
    """

    recipe: AnyRecipe
    kind: str
    options: Options | Callable[[Any], Options] = field(default_factory=dict)

    def options_for(self, result: Any) -> dict[str, Any]:
        options = self.options(result) if callable(self.options) else self.options
        return {name: value for name, value in options.items() if value is not None}

    def draw(self, result: Any, theme: str) -> go.Figure:
        """The figure with its title and caption, in the theme "light" or "dark"."""
        with _ONE_AT_A_TIME:
            return result.figure(self.kind, captioned=True, theme=theme, **self.options_for(result))

    def call(self, result: Any) -> str:
        """The call that draws the figure, as Python."""
        return called("result.figure", [], (self.kind,), self.options_for(result) | {"captioned": True})

    def code(self, view: View, text: Any, result: Any) -> str:
        """Python that makes the figure from nothing."""
        code = self.recipe.code(view, text)
        shown = ["print(result.summary())", f"{self.call(result)}.show()"]
        return "\n".join([*code.imports, "", *code.model, *code.result, *shown])


def _loading(variable: str, model: str) -> str:
    if IN_MEMORY.search(model):
        return f"# {variable}: the one that workbench.app.show was given as {ascii(model)}"
    return f"{variable} = HookedTransformer.from_pretrained({model!r})"


def called(function: str, given: list[str], arguments: tuple[Any, ...], options: Options) -> str:
    """A call as Python: names, then values, then options by name."""
    parts = [*given, *map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
    return f"{function}({', '.join(parts)})"


# What several pages show.

HEAD_STATISTICS = Recipe("head_statistics", "Head statistics")


def pattern_of(view: View, max_cells: int = 320, off: tuple[str, ...] = ()) -> Recipe:
    """The pattern of the view's head, or the part of it that the view shows, in at most so many cells a side.

    The map must have a pixel for each of them, in a narrow window too: what falls between pixels is not drawn.

    Raises:
        PreventUpdate: no head is chosen yet.
    """
    if not view.has_head:
        raise PreventUpdate
    name = f"Pattern of L{view.layer}H{view.head}"
    options = {"queries": view.queries, "keys": view.keys, "max_cells": max_cells, "pooling": view.pooling}
    return Recipe(
        "head_pattern",
        f"{name}, switched off" if off else name,
        arguments=(view.layer, view.head),
        options=options,
        off=off,
    )


def chosen_head(view: View) -> tuple[int, int] | None:
    """(layer, head) of the view's head, which maps of all heads put a frame around."""
    return (view.layer, view.head) if view.layer is not None and view.head is not None else None
