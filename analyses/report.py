"""Reports: results as one HTML file that can be sent to a colleague."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.analyses.files import write_together
from workbench.analyses.result import Provenance, Result

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 300  # of a table; the rest is in the result
MOST_COLUMNS = 12  # of a table on paper
MOST_LETTERS = 400  # of a setting
# Whatever a text says, the page asks for nothing and sends nothing.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_report(
    results: Result | Sequence[Result], path: str | os.PathLike, *, title: str | None = None, command: str = ""
) -> Path:
    """Writes results as one HTML file that needs nothing from outside, about 5 MB, and returns its path.

    It holds each result's summary, figures, tables (their first 300 rows) and settings, what every number is, and which
    model, inputs and software they come from. Figures can be explored, follow the reader's light or dark theme, and
    print.

    Args:
        title: of the page; None names the analysis and the model.
        command: the command line that makes the results again, if there is one.

    Raises:
        ValueError: no results.
        OSError: the file cannot be written.
    """
    results = [results] if isinstance(results, Result) else list(results)
    if not results or not all(isinstance(result, Result) for result in results):
        raise ValueError("results must hold at least one result, and nothing else")
    path = Path(path)
    write_together({path: _page(results, title or _title(results), command).encode("utf-8", "replace")})
    return path


def _page(results: Sequence[Result], title: str, command: str) -> str:
    from plotly.offline import get_plotlyjs

    figures: list[dict[str, Any]] = []
    sections = [_section(result, place, figures) for place, result in enumerate(results)]
    asked = f"<p class='soft'>Made by</p><pre>{_text(command)}</pre>" if command else ""
    contents = [f"<li><a href='#r{place}'>{_text(_name(result))}</a></li>" for place, result in enumerate(results)]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html lang='en'><head><meta charset='utf-8'>",
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<title>{_text(title)}</title><style>{_beside('css')}</style></head><body>",
            f"<header><div class='bar'><h1>{_text(title)}</h1>",
            "<button id='theme' type='button' aria-label='Switch between light and dark'>Dark</button></div>",
            asked,
            f"<nav><ul>{''.join(contents)}</ul></nav>" if len(results) > 1 else "",
            "<noscript><p>The figures need JavaScript, which this page brings along.</p></noscript></header>",
            f"<main>{''.join(sections)}</main>",
            f"<script type='application/json' id='figures'>{_json(figures)}</script>",
            f"<script>{get_plotlyjs()}</script><script>{_beside('js')}</script>",
            "</body></html>",
        ]
    )


def _section(result: Result, place: int, figures: list[dict[str, Any]]) -> str:
    """A result's part of the page; its figures are appended to ``figures``."""
    summary = _summary(result.summary())
    drawn = "".join(_figure(result, kind, figures) for kind in result.figure_kinds)
    tables = "".join(_table(result, name, frame) for name, frame in result.tables().items())
    made = _pairs(_made(result.provenance)) + _pairs(dict(result.provenance.versions))
    return (
        f"<section id='r{place}'><h2>{_text(_name(result))}</h2><div class='card'>{summary}</div>{drawn}{tables}"
        f"{_folded('What the numbers are', _definitions(result))}"
        f"{_folded('Settings', _pairs(result.settings)) if result.settings else ''}"
        f"{_folded('Where they come from', made)}</section>"
    )


def _summary(text: str) -> str:
    """Its lines as paragraphs, those that are set in columns together and as they are."""
    parts = []
    for in_columns, lines in groupby(text.splitlines(), key=lambda line: "  " in line):
        if in_columns:
            parts.append(f"<pre class='columns'>{_text(chr(10).join(lines))}</pre>")
        else:
            parts.extend(f"<p>{_text(line)}</p>" for line in lines)
    return "".join(parts)


def _figure(result: Result, kind: str, figures: list[dict[str, Any]]) -> str:
    from workbench.analyses.figures import config, indexed

    drawing = result.drawing(kind, theme="light")
    light, dark = (json.loads(figure.to_json()) for figure in (drawing.figure, result.figure(kind, theme="dark")))
    figures.append({"light": light, "dark": _changes(light, dark), "config": config(f"{result.kind}_{kind}")})
    title = _text(drawing.title)
    return (
        f"<figure><h3>{title}</h3>"
        f"<div class='plot' role='img' aria-label='{title}' style='height: {drawing.figure.layout.height:.0f}px'></div>"
        f"<figcaption>{indexed(_text(drawing.note))}</figcaption></figure>"
    )


def _changes(before: Any, after: Any) -> Any:
    """What turns one JSON value into another: of objects, and of arrays of one length, only the entries that differ."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = (dict(enumerate(values)) for values in (before, after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    keys = [*after, *(before.keys() - after.keys())]
    return {key: _changes(before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _table(result: Result, name: str, frame: pd.DataFrame) -> str:
    heads = []
    for column in frame.columns:
        quantity = result.quantities.get(column)
        unit = f"<span class='unit'>{_text(quantity.unit)}</span>" if quantity and quantity.unit else ""
        about = f" title='{_text(quantity.definition)}'" if quantity else ""
        heads.append(f"<th scope='col'{about}>{_text(_words(column))}{unit}</th>")
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in frame.head(MOST_ROWS).itertuples(index=False))
    axes = " × ".join(_words(axis) for axis in result.further_tables.get(name, result.frame_axes))
    size = f"{len(frame):,} rows" if len(frame) <= MOST_ROWS else f"the first {MOST_ROWS} of {len(frame):,} rows"
    wide = " wide" * (len(heads) > MOST_COLUMNS)
    table = f"<table class='numbers'><thead><tr>{''.join(heads)}</tr></thead>{rows}</table>"
    table = f"<div class='scroll{wide}'>{table}</div>"
    if wide:
        table += f"<p class='in-print soft'>Its {len(heads)} columns do not fit on paper; see the page on a screen.</p>"
    return _folded(f"Table by {axes} ({size})", table, open=not name)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        inner = value.strip(" ")  # of a token, its spaces are shown
        first = len(value) - len(value.lstrip(" "))
        return f"<td>{_text('␣' * first + inner + '␣' * (len(value) - first - len(inner)))}</td>"
    if isinstance(value, float):
        return f"<td class='number'>{'–' if value != value else f'{value:.4g}'}</td>"
    return f"<td class='number'>{_text(str(value))}</td>"


def _definitions(result: Result) -> str:
    entries = []
    for name, quantity in result.quantities.items():
        axes = " × ".join(quantity.axes)
        about = ", ".join(part for part in (f"[{axes}]" if axes else "", quantity.unit) if part)
        words = f"<dt>{_text(_words(name))} <span class='soft'>{_text(about)}</span></dt>"
        entries.append(f"{words}<dd>{_text(quantity.definition)}</dd>")
    return f"<dl>{''.join(entries)}</dl>"


def _made(provenance: Provenance) -> dict[str, Any]:
    return {
        "model": provenance.model_name,
        "revision": provenance.revision or "–",
        "weights": provenance.weights,
        "inputs": provenance.inputs,
        "SHA-256 of the inputs": provenance.inputs_sha256,
        "sequences": provenance.n_sequences,
        "tokens": provenance.n_tokens,
        "BOS": provenance.bos,
    }


def _pairs(entries: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><th scope='row'>{_text(_words(name))}</th><td>{_value(value)}</td></tr>"
        for name, value in entries.items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _text(text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …")


def _folded(title: str, content: str, *, open: bool = False) -> str:
    return f"<details{' open' * open}><summary>{_text(title)}</summary>{content}</details>"


def _name(result: Result) -> str:
    return _words(result.kind).capitalize()


def _title(results: Iterable[Result]) -> str:
    names = ", ".join(dict.fromkeys(_name(result) for result in results))
    models = ", ".join(dict.fromkeys(result.provenance.model_name for result in results))
    return f"{names}: {models}"


def _text(text: str) -> str:
    """Text of which a browser takes nothing for markup, and whose control characters are seen."""
    from workbench.analyses.figures import show_controls

    return html.escape("\n".join(show_controls(line) for line in text.split("\n")))


def _json(value: Any) -> str:
    """JSON in which no text ends the script element that holds it."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _beside(suffix: str) -> str:
    return Path(__file__).with_suffix(f".{suffix}").read_text(encoding="utf-8")
