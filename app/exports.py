"""Files of what a page shows, made for whoever asks for them: nothing is kept and nothing is written to disk."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import flask
from dash import Dash, Input, Output

from workbench.analyses.figures import PRESETS
from workbench.app import registry
from workbench.app.components import message
from workbench.app.notebooks import notebook
from workbench.app.recipes import AnyRecipe, Opened, Recipe, Shown
from workbench.app.requests import EXPORT
from workbench.app.services import Services
from workbench.app.state import View
from workbench.errors import WorkbenchError, ran_out_of_memory

FORMATS = ("svg", "png", "pdf", "html", "csv", "result", "py", "ipynb")
MIME = {
    "svg": "application/json", "png": "application/json", "pdf": "application/pdf", "html": "text/html",
    "csv": "application/zip", "result": "application/zip", "py": "text/x-python", "ipynb": "application/x-ipynb+json",
}  # fmt: skip
MOST_CELLS = 1_000_000  # of a CSV file


@dataclass(frozen=True)
class File:
    """What is downloaded, and under which name."""

    name: str
    content: bytes
    mime: str


def export(services: Services, view: View, figure: str, format: str, preset: str = "two-column") -> File:
    """A figure of the view's page in one of FORMATS.

    SVG and PNG are drawn by the page, which gets what to draw as JSON. CSV comes as a zip archive with a JSON that says
    what the numbers are, a result with the code that makes it. ``ipynb`` is a notebook of all figures.

    Args:
        figure: the id of its graph.

    Raises:
        WorkbenchError: no such figure, one that is not computed, too many numbers, or a picture that cannot be drawn.
    """
    if format == "ipynb":
        return File(f"{_safe(view.model)}_workbench.ipynb", notebook(services, view), MIME[format])
    shown = registry.BY_NAME[view.page].figures(view).get(figure)
    if shown is None:
        raise WorkbenchError(f"the page “{view.page}” shows no figure {figure[:40]!r} now")
    result = services.jobs.result(shown.recipe.key(view))
    if result is None:
        raise WorkbenchError("there is no result to export: wait until the page shows the figure")
    if shown.kind not in result.figure_kinds and format != "result":
        raise WorkbenchError("this figure is empty, and there is nothing to export; its card says why")
    name = file_name(view, shown, figure, result)
    if format == "result":
        code = shown.code(view, services.text(view, shown.recipe), result)
        stem = shown.recipe.name if isinstance(shown.recipe, Opened) else f"{name}_result"
        files = {f"{stem}{suffix}": content for suffix, content in result.to_files().items()}
        return File(f"{name}_result.zip", _zip(files | {f"{stem}.py": code.encode("utf-8", "replace")}), MIME[format])
    if format == "py":
        code = shown.code(view, services.text(view, shown.recipe), result)
        return File(f"{name}.py", code.encode("utf-8", "replace"), MIME[format])
    return _drawn(services, view, shown, result, name, format, preset)


def _drawn(services: Services, view: View, shown: Shown, result: Any, name: str, format: str, preset: str) -> File:
    """The figure itself, in a picture, a page or its numbers."""
    from workbench.analyses import figures

    drawn = shown.draw(result, "light")  # for paper, whatever the screen has
    if format in ("svg", "png"):
        to_draw, options = figures.picture_for_page(drawn, format, preset)
        content = f'{{"figure": {to_draw.to_json()}, "options": {json.dumps(options)}}}'.encode()
        return File(f"{name}.{format}", content, MIME[format])
    if format != "csv":
        try:
            content = figures.figure_file(drawn, format, preset=preset, name=name)
        except figures.ExportError as error:
            raise WorkbenchError(f"{error}. SVG and PNG need neither from here: the page draws them itself.") from None
        return File(f"{name}.{format}", content, MIME[format])
    numbers = figures.numbers_of(drawn)
    if numbers.size > MOST_CELLS:
        raise WorkbenchError(f"the figure has {numbers.size:,} numbers, too many for a CSV file; save the result")
    about = json.dumps(sidecar(services, view, shown, result), indent=1, ensure_ascii=False, default=list)
    table = numbers.to_csv(index=False).encode("utf-8", "replace")
    files = {f"{name}_numbers.csv": table, f"{name}_numbers.json": about.encode("utf-8", "replace")}
    return File(f"{name}_numbers.zip", _zip(files), MIME[format])


def sidecar(services: Services, view: View, shown: Shown, result: Any) -> dict[str, Any]:
    """What one must know of a figure's numbers to use them without the page."""
    text = services.text(view, shown.recipe)
    drawing = result.drawing(shown.kind, **shown.options_for(result))
    return {
        "title": drawing.title,
        "note": drawing.note,
        "figure": {"kind": shown.kind, "options": shown.options_for(result), "colours": _colours(drawing.figure)},
        "without_value": "Cells that the mask hides, and numbers that are not defined, are empty; a zero is 0.",
        "chosen_head": f"L{view.layer}H{view.head}" if view.has_head else None,
        "made_by": shown.recipe.facts(view, text),
        "tokens": _tokens(services, view, shown.recipe, text),
        "settings": dict(result.settings),
        "coverage": dict(result.coverage),
        "provenance": dataclasses.asdict(result.provenance),
        "quantities": {
            name: {
                "axes": quantity.axes,
                "unit": quantity.unit,
                "dtype": str(quantity.values.dtype),
                "definition": quantity.definition,
            }
            for name, quantity in result.quantities.items()
        },
        "code": shown.code(view, text, result),
    }


def _tokens(services: Services, view: View, recipe: AnyRecipe, text: Any) -> list[list[str]] | None:
    """What the model reads, where it is still in memory to say so."""
    model = services.models.loaded(recipe.model_of(view)) if isinstance(recipe, Recipe) else None
    return recipe.tokens(model, view, text) if model is not None and isinstance(recipe, Recipe) else None


def _colours(figure: Any) -> list[dict[str, Any]]:
    """The range of the colour scale of every map."""
    return [
        {"of": trace.colorbar.title.text, "from": float(trace.zmin), "to": float(trace.zmax)}
        for trace in figure.data
        if trace.type == "heatmap" and trace.zmin is not None
    ]


def file_name(view: View, shown: Shown, figure: str, result: Any) -> str:
    """Such as ``demo_L2H3_pattern-map``: ASCII letters, digits and a few signs, whatever the model is called."""
    about_head = "layer" in result.settings or shown.options_for(result).get("chosen") is not None
    head = f"L{view.layer}H{view.head}" if view.has_head and about_head else ""
    return "_".join(part for part in (_safe(result.provenance.model_name), head, _safe(figure)) if part)


def _safe(name: str) -> str:
    """At most 60 characters that mean nothing to a file system; no dot comes first."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name.rstrip("/").rpartition("/")[2]).strip("-.")[:60] or "model"


def _zip(files: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in files.items():
            archive.writestr(name, part)
    return content.getvalue()


def register(app: Dash, services: Services) -> None:
    """Adds the address from which the page fetches files, and the message that it shows where one cannot be made."""

    def answer() -> flask.Response:
        asked = dict(parse_qsl(flask.request.query_string.decode("utf-8", "replace"), keep_blank_values=True))
        figure, format = asked.pop("figure", ""), asked.pop("export-format", "")
        preset = asked.pop("preset", "two-column")
        if format not in FORMATS or preset not in PRESETS:
            return _message("There is no such format or size.", 400)
        try:
            file = export(services, services.view(urlencode(asked)), figure, format, preset)
        except (WorkbenchError, ValueError) as error:  # a message in place of a file; no fault of the page's
            return _message(str(error), 200)
        except Exception as error:
            logging.getLogger(__name__).exception("no file")
            if ran_out_of_memory(error):
                return _message("There is not enough memory for this file; shorten the text.", 200)
            return _message("Something went wrong here, not with your input; the server’s log says what.", 200)
        answer = flask.Response(file.content, mimetype=file.mime)
        answer.headers["Content-Disposition"] = f'attachment; filename="{file.name}"'
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer

    app.server.add_url_rule(EXPORT, "export", answer, methods=["GET"])

    @app.callback(Output("notice", "children", allow_duplicate=True), Input("export-problem", "data"))
    def tell(problem: str) -> Any:
        return message("notice", "No file", problem) if problem else []


def _message(text: str, status: int) -> flask.Response:
    return flask.Response(text[:1].upper() + text[1:], status=status, mimetype="text/plain")
