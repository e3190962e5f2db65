"""A saved result: what it says, all its figures and tables, and where it comes from. No model is needed."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
from dash import Dash, Input, Output, dcc, html, no_update, set_props
from dash.exceptions import PreventUpdate

from workbench.analyses.result import figure_kinds_of
from workbench.app.components import card, definitions, graph, message, on_card, plain_table
from workbench.app.jobs import Task
from workbench.app.opened import read_files
from workbench.app.recipes import Opened, Shown
from workbench.app.services import Services, when_drawn
from workbench.app.state import View
from workbench.errors import WorkbenchError

NAME, TITLE = "result", "Saved result"
EXPLANATION = (
    "A result from a file: everything it holds, without the model that it comes from. Save one with “Export” at any "
    "figure, in Python with result.save, or on the command line with --save."
)
CONTROLS = {"opened": ("opened", "data")}
DEFINITIONS = (
    ("Files", "A .json that says what the numbers are and an .npz that holds them, or a .zip of both."),
    ("Checked", "The .json holds digests of itself and of the .npz. Files that were edited or mixed up are refused."),
)
MOST_ROWS = 300  # of a table; all of them are in the file


def layout(view: View) -> list[Any]:
    button = dmc.Button("Open a saved result", id="open-result", n_clicks=0, size="compact-md", variant="default")
    hint = html.Span("A .zip from “Export”, or a .json and its .npz together, up to 32 MB.", className="muted")
    return [
        dcc.Store(id="opened", data=view.opened),
        dcc.Store(id="chosen-files", data=[]),
        html.Div([button, hint], className="toolbar"),
        html.Div(id="result-body"),
    ]


def figures(view: View) -> dict[str, Shown]:
    if not view.opened:
        return {}
    recipe = Opened(view.opened)
    return {f"result-{kind}": Shown(recipe, kind) for kind in figure_kinds_of(view.opened.partition(".")[0])}


def tasks(services: Services, view: View) -> list[Task]:
    return [services.task(view, Opened(view.opened))] if view.opened else []


def register(app: Dash, services: Services) -> None:
    @app.callback(
        Output("result-body", "children"),
        *when_drawn(NAME),
    )
    def draw(ready: str, query: str, scheme: str) -> Any:
        view = services.view_on(NAME, query)
        if not view.opened:
            return html.P("Nothing is open. Choose the files of a saved result.", className="empty")
        return shown_result(services.result(view, Opened(view.opened)), figures(view), scheme)

    @app.callback(
        Output("opened", "data", allow_duplicate=True),
        Input("chosen-files", "data"),
    )
    def open_files(chosen: list) -> Any:
        if not chosen:
            raise PreventUpdate
        try:
            return services.opened.put(read_files(decoded(chosen)))
        except WorkbenchError as error:
            set_props("alert", {"children": message("error", "Not opened", str(error))})
            return no_update


def decoded(chosen: list) -> dict[str, bytes]:
    """Files as the page sends them: name and content, in base64."""
    files = {}
    for entry in chosen:
        match entry:
            case {"name": str(name), "content": str(content)}:
                try:
                    files[name] = base64.b64decode(content, validate=True)
                except (binascii.Error, ValueError):
                    raise WorkbenchError("the files did not arrive whole; choose them again") from None
            case _:
                raise WorkbenchError("the files did not arrive whole; choose them again")
    return files


def shown_result(result: Any, shown: dict[str, Shown], scheme: str) -> list[Any]:
    """All that a result holds, as cards."""
    kind = result.kind.replace("_", " ")
    summary = card(
        kind[:1].upper() + kind[1:], html.Pre(result.summary(), className="summary", tabIndex="0"), className="wide"
    )
    drawn = [_figure_card(result, id, how, scheme) for id, how in shown.items() if how.kind in result.figure_kinds]
    tables = [_table_card(name, frame) for name, frame in result.tables().items()]
    made = result.provenance
    sequences = f"{made.n_sequences:,} sequence{'s' * (made.n_sequences != 1)}"
    facts = [
        ("Model", made.model_name), ("Revision", made.revision or "–"), ("Weights", made.weights),
        ("Read", made.inputs), ("Tokens", f"{made.n_tokens:,} in {sequences}, {made.bos}"),
        ("Digest of the tokens", made.inputs_sha256), *made.versions.items(),
    ]  # fmt: skip
    settings = [(name, _short(value)) for name, value in result.settings.items()]
    about = [(name, f"{quantity.definition}{_unit(quantity.unit)}.") for name, quantity in result.quantities.items()]
    return [
        html.Div(
            [
                summary,
                *drawn,
                *tables,
                card("Where it comes from", plain_table(("What", ""), facts)),
                *([card("Settings", plain_table(("Option", "Value"), settings))] if settings else []),
                card("What the numbers are", definitions(about), className="wide"),
            ],
            className="columns",
        )
    ]


def _figure_card(result: Any, id: str, shown: Shown, scheme: str) -> html.Section:
    drawing = result.drawing(shown.kind, theme=scheme or "light")
    height = max(400, int(drawing.figure.layout.height))
    box = graph(id, drawing.title, height)
    box.children.figure = on_card(shown.draw(result, scheme or "light"), height, revision=shown.kind)
    return card(drawing.title, box, note=drawing.note)


def _table_card(name: str, frame: Any) -> html.Section:
    title = f"Table: {name.replace('_', ' ')}" if name else "Table"
    note = f"The first {MOST_ROWS} of {len(frame):,} rows." if len(frame) > MOST_ROWS else None
    rows = frame.head(MOST_ROWS).astype(object).where(frame.head(MOST_ROWS).notna(), None).to_dict("records")
    grid = dag.AgGrid(
        columnDefs=[_column(str(name), values.dtype.kind == "f") for name, values in frame.items()],
        rowData=rows,
        className="ag-theme-quartz grid",
        style={"height": "400px"},
        defaultColDef={"sortable": True, "resizable": True, "flex": 1, "minWidth": 96},
        dashGridOptions={
            "rowHeight": 30,
            "suppressFieldDotNotation": True,
            "tabToNextCell": {"function": "leaveTable(params)"},
            "tabToNextHeader": {"function": "leaveTable(params)"},
        },
    )
    return card(title, html.Div(grid, role="group", **{"aria-label": title}), note=note)


def _column(name: str, is_number: bool) -> dict[str, Any]:
    digits = "params.value == null ? '–' : d3.format('.4~g')(params.value)"  # none is no zero
    shown = {"type": "rightAligned", "valueFormatter": {"function": digits}}
    return {"field": name, "headerName": name, "wrapHeaderText": True} | (shown if is_number else {})


def _unit(unit: str) -> str:
    return f" ({unit})" if unit not in ("", "share of 1") else ""


def _short(value: Any, most: int = 300) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}…"
