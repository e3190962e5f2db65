"""The pieces that pages are put together from: pure functions from values to components."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import dash_ag_grid as dag
import dash_mantine_components as dmc
import numpy as np
import plotly.graph_objects as go
from dash import dcc, html

from workbench.analyses import figures

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"
CLEAR, SOFT, ACCENT = "rgba(0,0,0,0)", "#8d95a3", "#4f82b8"


def card(
    title: Any, *content: Any, controls: Sequence[Any] = (), note: Any = None, className: str = ""
) -> html.Section:
    """A titled box. ``controls`` stand at the right of the title, ``note`` small below the content.

    Each figure in it can be exported, and a card with figures can fill the window.
    """
    graphs = [part.id for part in html.Div(list(content))._traverse() if isinstance(part, dcc.Graph)]
    beside = [*controls, *map(export_button, graphs), *([_maximise()] if graphs else [])]
    head = html.Div(
        [html.H2(title, className="card-title"), html.Div(beside, className="card-controls")],
        className="card-head",
    )
    foot = [] if note is None else [html.Div(note, className="card-note")]
    return html.Section([head, *content, *foot], className=f"card {className}")


def _maximise() -> html.Button:
    """Lets its card fill the window; maximise.js listens."""
    said = {"aria-label": "Fill the window", "aria-pressed": "false"}
    return html.Button(className="maximise", title="Fill the window (Esc: back)", type="button", **said)


def graph(id: str, label: str, height: int, *, square: bool = False) -> html.Div:
    """A figure to be filled by a callback; ``label`` tells those who cannot see it what it is.

    A ``square`` figure does not grow with the window's width.
    """
    unneeded = ["lasso2d", "select2d", "zoomIn2d", "zoomOut2d", "autoScale2d"]
    config = figures.config(id) | {"modeBarButtonsToRemove": unneeded, "showTips": False}
    return html.Div(
        dcc.Graph(id=id, figure=empty_figure(height), config=config, responsive=True, style={"height": f"{height}px"}),
        role="group",
        **{"aria-label": label},
        className="graph",
        style={"maxWidth": f"{1.4 * height:.0f}px"} if square else {},
    )


def export_button(figure: str) -> html.Button:
    """Opens the export panel, which all figures share, for the figure of a graph; export.js listens."""
    about = {"data-figure": figure, "aria-haspopup": "dialog", "aria-expanded": "false"}
    return html.Button("Export", className="export-button", type="button", **about)


def empty_figure(height: int, text: str = "") -> go.Figure:
    """A figure that draws nothing but says ``text``."""
    return go.Figure(
        layout={
            "height": height,
            "template": {},  # without it plotly's own goes along, some 7 kB
            "paper_bgcolor": CLEAR,
            "plot_bgcolor": CLEAR,
            "xaxis": {"visible": False},
            "yaxis": {"visible": False},
            # In the middle, whatever axes the figure had that stood here before.
            "annotations": [
                {
                    "text": text,
                    "showarrow": False,
                    "font": {"family": FONT, "size": 13, "color": SOFT},
                    "xref": "paper",
                    "yref": "paper",
                    "x": 0.5,
                    "y": 0.5,
                }
            ],
        }
    )


def on_card(figure: go.Figure, height: int, *, revision: str = "") -> go.Figure:
    """A captioned figure as it sits on a card: the card's colour and font, and its zoom kept while ``revision`` stays.

    The card says what the figure is; its title, caption and ground are kept in ``layout.meta`` for the downloaded file.
    """
    layout = figure.layout
    download = {
        "title": layout.title.to_plotly_json(),
        "height": layout.height,
        "margin": layout.margin.to_plotly_json(),
        "paper_bgcolor": layout.template.layout.paper_bgcolor,
    }
    for trace in figure.select_traces({"type": "heatmap"}):  # half the bytes, and more digits than colours show
        trace.z = np.asarray(trace.z, dtype=np.float32)
    figure.update_layout(title=None, margin_t=None, width=None).update_layout(
        font_family=FONT,
        hoverlabel_font_family=FONT,
        paper_bgcolor=CLEAR,
        height=height,
        uirevision=revision,
        modebar={"bgcolor": CLEAR, "color": SOFT, "activecolor": ACCENT},
        meta={"download": download},
    )
    if figure.layout.plot_bgcolor is None:
        figure.update_layout(plot_bgcolor=CLEAR)
    return figure


def select(id: str, label: str, value: str, options: Mapping[str, str], width: int = 190) -> dmc.Select:
    """A choice among options, value → label."""
    return dmc.Select(
        id=id,
        value=value,
        data=[{"value": name, "label": text} for name, text in options.items()],
        allowDeselect=False,
        size="xs",
        w=width,
        maxDropdownHeight=400,
        **{"aria-label": label},
    )


def number(
    id: str,
    label: str,
    value: int | None,
    *,
    low: int = 0,
    high: int | None = None,
    width: int = 84,
    wait: int = 250,
    placeholder: str = "",
) -> Any:
    """A whole number, with its label before it. It counts once nothing has been typed for ``wait`` milliseconds."""
    field = dmc.NumberInput(
        id=id,
        value=value,
        min=low,
        max=high,
        allowDecimal=False,
        allowNegative=False,
        # Strict limits would refuse the first digit of 16 where 4 is the least, and keep what stood there before.
        clampBehavior="strict" if low <= 1 else "blur",
        debounce=wait,
        size="xs",
        w=width,
        placeholder=placeholder,
        **{"aria-label": label},
    )
    return typed_field(label, field)


def typed_field(label: str, field: Any) -> html.Label:
    """A box whose content counts after a pause in typing (see view.js), with its label before it."""
    return html.Label([html.Span(label, className="inline-label"), field], className="inline-field typed")


def table(id: str, label: str, height: int) -> html.Div:
    """A sortable table whose rows are data, never markup."""
    return html.Div(
        role="group",
        **{"aria-label": label},
        children=dag.AgGrid(
            id=id,
            getRowId="params.data.name",
            columnDefs=[],
            rowData=[],
            className="ag-theme-quartz grid",
            style={"height": f"{height}px"},
            defaultColDef={"sortable": True, "resizable": True, "suppressMovable": True, "minWidth": 62},
            dashGridOptions={
                "rowHeight": 30,
                "headerHeight": 42,
                "animateRows": False,
                "suppressCellFocus": False,
                "rowSelection": {"mode": "singleRow", "checkboxes": False, "enableClickSelection": True},
                "suppressNoRowsOverlay": True,
                "tabToNextCell": {"function": "leaveTable(params)"},
                "tabToNextHeader": {"function": "leaveTable(params)"},
            },
        ),
    )


def tiles(*entries: tuple[str, str, str]) -> html.Div:
    """Numbers to see first: (what, value, unit or where)."""
    return html.Div(
        [
            html.Div(
                [
                    html.Div(what, className="tile-what"),
                    html.Div(value, className="tile-value"),
                    html.Div(note, className="tile-note"),
                ],
                className="tile",
            )
            for what, value, note in entries
        ],
        className="tiles",
    )


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> html.Table:
    """A small table; the first column names the rows."""
    body = [html.Tr([html.Th(row[0], scope="row"), *(html.Td(cell) for cell in row[1:])]) for row in rows]
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))
    return html.Table([*([html.Caption(caption)] if caption else []), head, html.Tbody(body)], className="plain-table")


def definitions(entries: Sequence[tuple[str, str]]) -> html.Dl:
    """Terms and what they mean."""
    return html.Dl([part for term, meaning in entries for part in (html.Dt(term), html.Dd(typeset(meaning)))])


def typeset(text: str) -> list[Any]:
    """Text whose p_ij becomes p with an index."""
    parts = re.split(r"_(\w+)", text)
    return [html.Sub(part) if place % 2 else part for place, part in enumerate(parts)]


def about_score(label: str, quantity: Any) -> list[Any]:
    """What a score means, in the words of the result that holds it."""
    unit = "" if quantity.unit in ("", "share of 1") else f" Unit: {quantity.unit}."
    return typeset(f"{label}: {quantity.definition}.{unit}")


def message(kind: str, title: str, text: str, *, details: str = "") -> dmc.Alert:
    """A message in words: what happened, and what to do. ``kind`` is "error", "notice" or "question"."""
    more = []
    if details:
        more = [html.Details([html.Summary("Details for a report"), html.Pre(details)], className="details")]
    return dmc.Alert(
        [html.Div(text, className="message-text"), *more],
        title=title,
        color="red" if kind == "error" else "blue",
        variant="default",
        withCloseButton=True,
        className=f"message message-{kind}",
    )
