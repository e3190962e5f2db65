"""Prompts of the user's own, one JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from workbench.analyses.inputs import read_text
from workbench.analyses.prompts import quoted
from workbench.analyses.tasks.prompt_set import PromptSet
from workbench.analyses.tasks.scoring import Example, Scorable, Unscorable, encode, scorable, stacked, such_as
from workbench.errors import WorkbenchError

_REQUIRED, _OPTIONAL = ("prompt", "target"), ("foil", "corrupted")
_EXAMPLE = '{"prompt": "The capital of France is", "target": " Paris", "foil": " Rome"}'


class PromptFileError(WorkbenchError, ValueError):
    """A file of prompts that cannot be read or scored: it names the line, the field and what to do."""


def read_prompts(model: Any, path: str | os.PathLike) -> PromptSet:
    """Prompts of a UTF-8 file with one JSON object a line: prompt, target, and perhaps foil and corrupted.

    Every line has the same fields. An answer goes on where its prompt ends, so it brings its space along (" Paris");
    where it starts with a letter right after a letter or a mark such as a comma, that space is put in, and the
    description says so. Nothing is left out: a line that cannot be scored is an error.

    Raises:
        ValueError: a model without a tokenizer.
        WorkbenchError: a file that cannot be read, or holds no prompt (as ``inputs.read_text`` says).
        PromptFileError: as ``parse_prompts``.
    """
    return parse_prompts(model, read_text(path), name=Path(path).stem, source=str(path))


def parse_prompts(model: Any, text: str, *, name: str = "own prompts", source: str = "your prompts") -> PromptSet:
    """The prompts of a text in the form of ``read_prompts``.

    Args:
        source: what the text is, in the words of errors and of the description.

    Raises:
        ValueError: a model without a tokenizer.
        PromptFileError: no prompt, a line that is no such object, has other fields than the first one, or cannot be
            scored with the model's tokenizer (answers that are not one token, a corrupted prompt of another length, …).
    """
    encode(model, "")
    examples: list[Example] = []
    scorables: list[Scorable] = []
    n_spaced, first_line = 0, 0
    # Lines end at line feeds alone: JSON texts may hold the other marks that str.splitlines takes for ends.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        example, spaced = _spaced(_example(line, where))
        if examples:
            _check_same_fields(example, examples[0], where, first_line)
        try:
            scorables.append(scorable(model, example))
        except Unscorable as error:
            raise PromptFileError(f"{where}: {error}") from None
        examples.append(example)
        n_spaced, first_line = n_spaced + spaced, first_line or number
    if not examples:
        raise PromptFileError(f"there are no prompts in {source}; write one JSON object a line, such as {_EXAMPLE}")
    space = f"; a space put before the answers of {n_spaced}" if n_spaced else ""
    return PromptSet(
        **stacked(scorables), name=name, description=f"{such_as(examples)}; from {Path(source).name}{space}"
    )


def _example(line: str, where: str) -> Example:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        raise PromptFileError(
            f"{where}: {quoted(line)} is not JSON ({reason}); write one object a line, such as {_EXAMPLE}"
        ) from None
    if not isinstance(found, dict):
        raise PromptFileError(f"{where}: {quoted(line)} is no JSON object; write one, such as {_EXAMPLE}")
    if unknown := sorted(set(found) - {*_REQUIRED, *_OPTIONAL}):
        raise PromptFileError(
            f"{where}: there is no field {unknown[0]!r}; the fields are {', '.join((*_REQUIRED, *_OPTIONAL))}"
        )
    for field in _REQUIRED:
        if field not in found:
            raise PromptFileError(f"{where}: the field {field!r} is missing; write one such as {_EXAMPLE}")
    for field, value in found.items():
        if not isinstance(value, str):
            raise PromptFileError(f"{where}: {field} must be text in quotation marks, got {json.dumps(value)[:40]}")
    return Example(**found)


def _check_same_fields(example: Example, first: Example, where: str, first_line: int) -> None:
    for field in _OPTIONAL:
        here, there = (getattr(one, field) is not None for one in (example, first))
        if here != there:
            has, lacks = (where, f"line {first_line}") if here else (f"line {first_line}", where)
            raise PromptFileError(
                f"{lacks} has no field {field!r}, but {has} has one; give it to every prompt, or to none"
            )


def _spaced(example: Example) -> tuple[Example, bool]:
    """The example with spaces between its prompt and answers that are words, and whether one was put in."""
    answers = {name: value for name in ("target", "foil") if (value := getattr(example, name))}
    spaced = {name: f" {value}" for name, value in answers.items() if _is_new_word(example.prompt, value)}
    return Example(**{**vars(example), **spaced}), bool(spaced)


def _is_new_word(prompt: str, answer: str) -> bool:
    """Whether a word follows a word, in a script that parts words by spaces (those with capitals do)."""
    return _is_letter(answer[:1]) and (_is_letter(prompt[-1:]) or prompt[-1:] in tuple(",;:.!?)"))


def _is_letter(character: str) -> bool:
    return character.lower() != character.upper()
