"""The view as a notebook: a cell that loads the model, then every analysis with its figures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from workbench.app import registry
from workbench.app.recipes import Code
from workbench.app.services import Services
from workbench.app.state import View
from workbench.errors import WorkbenchError

LANGUAGE = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook(services: Services, view: View) -> bytes:
    """An ``.ipynb`` of all figures that have been computed for the view, on any page.

    Raises:
        WorkbenchError: nothing is computed yet.
    """
    sections: list[tuple[str, Code, list[str]]] = []  # title, code, and the calls that draw
    for page in registry.PAGES:
        on_page = dataclasses.replace(view, page=page.NAME)
        for shown in page.figures(on_page).values():
            result = services.jobs.result(shown.recipe.key(on_page))
            if result is None or shown.kind not in result.figure_kinds:
                continue
            code = shown.recipe.code(on_page, services.text(on_page, shown.recipe))
            if not sections or sections[-1][:2] != (page.TITLE, code):
                sections.append((page.TITLE, code, []))
            sections[-1][2].append(f"{shown.call(result)}.show()")
    if not sections:
        raise WorkbenchError("nothing is computed yet; wait until the page shows its figures")
    imports = sorted({line for _, code, _ in sections for line in code.imports})
    cells = [_cell("markdown", ["# Attention Workbench", "", "What the dashboard showed, to be run from the top."])]
    cells.append(_cell("code", _merged(imports)))
    done: dict[str, str] = {}  # the names that are set, and how
    heading = ""
    for title, code, calls in sections:
        if title != heading:
            cells.append(_cell("markdown", [f"## {title}"]))
            heading = title
        cells.append(_cell("code", [*_new_lines(code, done), "print(result.summary())"]))
        cells.extend(_cell("code", [call]) for call in calls)
    for place, cell in enumerate(cells):
        cell["id"] = f"cell-{place}"
    content = {"cells": cells, "metadata": {"kernelspec": LANGUAGE}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "replace")


def _new_lines(code: Code, done: dict[str, str]) -> list[str]:
    """The code's lines without those that would set a name to what it is already."""
    lines = []
    for line in [*code.model, *code.result]:
        name = line.partition(" = ")[0]
        if done.get(name) == line:
            continue
        lines.append(line)
        if name == "result" or not name.isidentifier():  # the analysis itself, of which nothing else is made
            continue
        kept = {"model": (), "text": ("model",)}.get(name, ("model", "text"))  # the rest is made of what changes here
        for other in [other for other in done if other not in kept]:
            del done[other]
        done[name] = line
    return lines


def _merged(imports: Sequence[str]) -> list[str]:
    """Imports from one module in one line."""
    names: dict[str, set[str]] = {}
    for line in imports:
        module, _, imported = line.removeprefix("from ").partition(" import ")
        names.setdefault(module, set()).update(imported.split(", "))
    return [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]


def _cell(kind: str, lines: Sequence[str]) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": "\n".join(lines)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})
