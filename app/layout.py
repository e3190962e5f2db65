"""The frame around the pages: pure functions from values to components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from workbench.app import registry
from workbench.app.components import definitions, number
from workbench.app.controls import fields
from workbench.app.state import View

BLUE = ["#eef4f9", "#d9e5f0", "#b3cae0", "#8aadd0", "#6793c1", "#4f82b8", "#3f76b0", "#31649a", "#28588a", "#1a4b7a"]
SLATE = ["#d5d9e0", "#b4bac5", "#8d95a3", "#6b7382", "#3d434f", "#313742", "#272c35", "#1c2028", "#16191f", "#101318"]
THEME = {
    "primaryColor": "blue",
    "primaryShade": {"light": 7, "dark": 6},
    "colors": {"blue": BLUE, "dark": SLATE},
    "fontFamily": "var(--font)",
    "fontFamilyMonospace": "var(--mono)",
    "defaultRadius": "md",
    "respectReducedMotion": True,
}
DARK, LIGHT = SLATE[8], "#f6f7f9"

# What Dash would load only once a figure or a table is drawn. Loaded before the page starts, it cannot be late, and a
# load that failed is tried once more.
CHUNKS = "".join(
    f'<script src="/_dash-component-suites/{path}"></script>'
    for path in ("plotly/package_data/plotly.min.js", "dash/dcc/async-graph.js", "dash_ag_grid/async-community.js")
)

# Before anything else draws: the colour scheme that Mantine will choose, so that dark pages do not flash white.
INDEX = f"""<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<title>{{%title%}}</title>
<link rel="icon" type="image/svg+xml" href="/assets/logo.svg">
<style>html {{ background: {LIGHT}; }} html.dark-start {{ background: {DARK}; }}</style>
<script>
(function () {{
  var chosen = "auto";
  try {{ chosen = localStorage.getItem("mantine-color-scheme-value") || "auto"; }} catch (error) {{}}
  var dark = chosen === "dark" || (chosen === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.classList.toggle("dark-start", dark);
}})();
</script>
{{%css%}}
</head>
<body>
{{%app_entry%}}
<footer>{{%config%}}{CHUNKS}{{%scripts%}}{{%renderer%}}</footer>
</body>
</html>"""


def document(session: str, view: View, models: Mapping[str, str]) -> Any:
    """The whole page for one session.

    Args:
        models: the names that the model field suggests, and what each is.
    """
    return dmc.MantineProvider(
        theme=THEME,
        defaultColorScheme="auto",
        children=[
            dcc.Store(id="session", data=session),
            dcc.Store(id="fields", data=fields()),
            *(
                dcc.Store(id=name, data={})
                for name in ("visited", "address", "submission", "input", "correction", "chosen", "choices")
            ),
            *(dcc.Store(id=name, data="") for name in ("view", "open-page", "missing-page")),
            dcc.Store(id="mounted", data=[]),
            dcc.Store(id="ready", data=""),
            dcc.Store(id="scheme", data=""),
            dcc.Store(id="asked", data=list(view.asked)),
            dcc.Store(id="ask-again", data=0),
            dcc.Store(id="tick", data=0),
            dcc.Store(id="again", data=0),
            dcc.Store(id="export-problem", data=""),
            *(dcc.Store(id=f"draw-{page.NAME}", data="") for page in registry.PAGES),
            html.A("Skip to the results", href="#main", className="skip-link"),
            html.Div([_sidebar(view, models), _main(view)], className="shell"),
            _export_panel(),
            _code_dialog(),
        ],
    )


def _export_panel() -> html.Div:
    """What a figure can be saved as; export.js does what the data-export of a button says."""
    sizes = {"one-column": "1 column", "two-column": "2 columns", "slide": "Slide"}

    def item(text: str, format: str) -> html.Button:
        return html.Button(text, type="button", className="export-item", **{"data-export": format})

    return html.Div(
        id="export-panel",
        className="export-panel",
        role="dialog",
        hidden=True,
        **{"aria-label": "Export the figure"},
        children=[
            html.Div("Picture, 3.3, 6.9 or 10 inches wide", className="export-label"),
            dmc.SegmentedControl(
                id="export-size",
                value="two-column",
                data=[{"value": value, "label": label} for value, label in sizes.items()],
                size="xs",
                fullWidth=True,
                **{"aria-label": "Size of the picture"},
            ),
            html.Div([item("SVG", "svg"), item("PDF", "pdf"), item("PNG", "png")], className="export-row"),
            html.Div("Everything in it", className="export-label"),
            item("Page to explore (HTML)", "html"),
            item("Numbers drawn (CSV and JSON)", "csv"),
            item("Result, to open again (npz and JSON)", "result"),
            item("Python that makes it", "py"),
        ],
    )


def _code_dialog() -> html.Dialog:
    """Shows the code that makes a figure."""
    return html.Dialog(
        id="code-dialog",
        className="code-dialog",
        **{"aria-labelledby": "code-title"},
        children=[
            html.H2("The same in Python", id="code-title", className="card-title"),
            html.Pre("", id="code-text", className="code", tabIndex="0"),
            html.Div(
                [
                    html.Span("", id="code-copied", role="status", className="muted"),
                    dmc.Button("Copy", id="copy-code", n_clicks=0, size="compact-sm"),
                    dmc.Button("Close", id="close-code", n_clicks=0, size="compact-sm", variant="default"),
                ],
                className="buttons",
            ),
        ],
    )


def _sidebar(view: View, models: Mapping[str, str]) -> html.Aside:
    brand = html.Div(
        className="brand",
        children=[
            html.Span(className="logo", **{"aria-hidden": "true"}),
            html.Span("Attention Workbench", className="brand-name"),
            dmc.ColorSchemeToggle(
                id="toggle-scheme",
                lightIcon=html.Span(className="glyph glyph-sun"),
                darkIcon=html.Span(className="glyph glyph-moon"),
                variant="subtle",
                color="gray",
                **{"aria-label": "Switch between light and dark"},
            ),
        ],
    )
    links = [
        html.Button(
            [html.Span(className=f"glyph glyph-{page.NAME}", **{"aria-hidden": "true"}), html.Span(page.TITLE)],
            id=f"go-{page.NAME}",
            n_clicks=0,
            type="button",
            className="nav-link",
            **{"aria-current": "page" if view.page == page.NAME else "false"},
        )
        for page in registry.PAGES
    ]
    return html.Aside(
        [
            brand,
            html.Nav(links, className="nav", **{"aria-label": "Pages"}),
            _input_form(view, models),
            html.Div(
                [
                    html.Button("Copy link", id="copy-link", className="text-button", type="button"),
                    html.Span("", id="copied", role="status", className="muted"),
                    html.Button(
                        "Export notebook",
                        id="export-notebook",
                        className="text-button",
                        type="button",
                        **{"data-export": "ipynb"},
                    ),
                ],
                className="sidebar-foot",
            ),
        ],
        className="sidebar",
    )


def model_description(loaded: Sequence[str]) -> str:
    """What the model field takes, and which models are in memory."""
    in_memory = f". In memory: {', '.join(loaded)}" if loaded else ""
    return f"A name, a folder, a GGUF file or a Hugging Face id{in_memory}"


def _input_form(view: View, models: Mapping[str, str]) -> html.Div:
    order = ["label", "input", "description", "error"]
    return html.Div(
        className="input-form",
        role="form",
        **{"aria-label": "What to analyse"},
        children=[
            dmc.Autocomplete(
                id="model",
                label="Model",
                data=list(models),
                filter={"function": "everyModel"},
                renderOption={"function": "modelOption", "options": {"about": dict(models)}},
                value=view.model,
                description=model_description([]),
                inputWrapperOrder=order,
                size="sm",
                inputProps={"spellCheck": False},
            ),
            dmc.Textarea(
                id="text",
                label="Text",
                value=view.text,
                placeholder="Type or paste some text",
                autosize=True,
                minRows=6,
                maxRows=16,
                size="sm",
                spellCheck=False,
            ),
            html.Div(
                [
                    html.Button("Open a text file", id="open-text", className="text-button", type="button"),
                    html.Span("", id="text-file", role="status", className="muted"),
                ],
                className="text-file",
            ),
            dmc.NumberInput(
                id="max-tokens",
                label="Shorten to",
                value=view.max_tokens,
                placeholder="the whole text",
                suffix=" tokens",
                min=1,
                step=64,
                allowDecimal=False,
                allowNegative=False,
                size="sm",
            ),
            dmc.Button("Analyse", id="analyse", n_clicks=0, fullWidth=True, size="sm"),
            html.P(
                [
                    html.Span([dmc.Kbd("Ctrl", size="xs"), " + ", dmc.Kbd("Enter", size="xs")], className="unchanged"),
                    html.Span("Changed, not analysed yet", className="changed"),
                ],
                className="shortcut",
                role="status",
            ),
        ],
    )


def _main(view: View) -> html.Main:
    return html.Main(
        id="main",
        className="main",
        tabIndex="-1",
        children=[
            html.Div([_context_bar(view), *_messages()], className="top"),
            *(_page(page) for page in registry.PAGES),
        ],
    )


def _messages() -> list[Any]:
    """What stands in the way of a result, and how far it is; in sight however far the page is scrolled."""
    return [
        html.Div(
            [
                html.Span("", id="connection-text"),
                html.Button("Reload", id="reload", className="text-button", type="button", hidden=True),
            ],
            id="connection",
            className="connection",
            role="alert",
            hidden=True,
        ),
        html.Div(id="alert", role="alert"),
        html.Div(dmc.Button("Run it", id="run-it", n_clicks=0, size="compact-md"), className="run-it"),
        html.Div(id="notice", role="status"),
        html.Div(
            id="progress",
            className="progress",
            hidden=True,
            children=[
                html.Span("", id="progress-text", role="status", className="progress-text"),
                dmc.Progress(id="progress-bar", value=0, size="sm", transitionDuration=200, className="progress-bar"),
                dmc.Button("Cancel", id="cancel", n_clicks=0, variant="default", size="compact-sm"),
            ],
        ),
    ]


def _context_bar(view: View) -> html.Div:
    """What is analysed, and the head that is looked at: the same on every page."""
    return html.Div(
        className="context",
        children=[
            html.Div(
                [html.Div("", id="context-facts"), html.Div("from before your changes", className="changed earlier")],
                className="context-facts",
            ),
            html.Div(
                className="head-picker",
                role="group",
                **{"aria-label": "The head that is looked at"},
                children=[
                    number("layer", "Layer", view.layer, width=72),
                    number("head", "Head", view.head, width=72),
                    dmc.Button("Open pattern", id="open-pattern", n_clicks=0, size="compact-sm", variant="default"),
                ],
            ),
        ],
    )


def _page(page: Any) -> html.Section:
    """The place of a page, empty until it is opened: thousands of parts that nobody looks at would slow the others."""
    about = {"aria-labelledby": f"title-{page.NAME}"}
    return html.Section([], id=f"page-{page.NAME}", className="page", hidden=True, **about)


def page_content(page: Any, view: View) -> list[Any]:
    """What a page consists of, as it begins on a view."""
    about = html.Details(
        [html.Summary("Definitions and sources"), definitions(page.DEFINITIONS)], className="definitions"
    )
    title = html.H1(page.TITLE, id=f"title-{page.NAME}")
    head = html.Header([title, html.P(page.EXPLANATION, className="lead"), about], className="page-head")
    return [head, *page.layout(view)]
