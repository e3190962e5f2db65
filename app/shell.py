"""The callbacks of the frame: address ↔ controls ↔ view, and the jobs that a view needs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, ctx, html, no_update, set_props
from dash.exceptions import PreventUpdate

from workbench.app import exports, registry
from workbench.app.components import message
from workbench.app.estimates import AsksFirst
from workbench.app.jobs import Job
from workbench.app.layout import model_description
from workbench.app.messages import error_message
from workbench.app.recipes import HEAD_STATISTICS
from workbench.app.selection import first_head
from workbench.app.services import Services
from workbench.app.state import MOST_OFF, ON_DEMAND, View, from_query, to_query, typed_model
from workbench.errors import WorkbenchError

# Field of the view → the control that holds it. The input (model, text, max_tokens) counts once it is submitted.
CONTROLS: dict[str, tuple[str, str]] = {
    "page": ("page", "data"),
    "layer": ("layer", "value"),
    "head": ("head", "value"),
    "asked": ("asked", "data"),
} | {field: control for page in registry.PAGES for field, control in page.CONTROLS.items()}

# What belongs to one model, one text, or both, and is let go with them; in the order in which ``submitted`` returns it.
PARTS_OF_A_TEXT = (
    "layer", "head", "position", "lens_position", "step", "target", "foil", "queries", "keys", "off", "asked",
)  # fmt: skip

AT_ONCE_SECONDS = 0.3  # what is done by then is shown without a progress bar


def register(app: Dash, services: Services) -> None:
    """Adds the callbacks of the frame and of every page."""
    _register_view(app, services)
    _register_pages(app)
    _register_jobs(app, services)
    exports.register(app, services)
    for page in registry.PAGES:
        page.register(app, services)


def _register_view(app: Dash, services: Services) -> None:
    """Address → controls → view → address."""

    @app.callback(
        Output("input", "data"),
        Output("model", "value"),
        Output("text", "value"),
        Output("max-tokens", "value"),
        *(Output(*control) for control in CONTROLS.values()),
        Output("notice", "children"),
        Input("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=False,
    )
    def read_address(search: str | None, path: str | None) -> Any:
        return controls_of(services, search or "", path or "/")

    @app.callback(
        Output("input", "data", allow_duplicate=True),
        *(Output(*CONTROLS[field], allow_duplicate=True) for field in PARTS_OF_A_TEXT),
        Input("submission", "data"),
        State("input", "data"),
    )
    def submit(submission: dict, before: dict) -> Any:
        return submitted(services, submission, before)

    # The browser reads the boxes itself: what a component reports to callbacks can be a keystroke behind.
    app.clientside_callback(
        ClientsideFunction("workbench", "submit"),
        Output("submission", "data"),
        Input("analyse", "n_clicks"),
        Input("model", "n_submit"),
        Input("model", "value"),
        State("model", "data"),
    )
    app.clientside_callback(
        ClientsideFunction("workbench", "showsTheBoxes"),
        Input("input", "data"),
        State("model", "value"),
        State("text", "value"),
        State("max-tokens", "value"),
    )

    @app.callback(
        Output("view", "data"),
        Input("input", "data"),
        *(Input(*control) for control in CONTROLS.values()),
        State("view", "data"),
    )
    def collect_view(given: dict, *values: Any) -> Any:
        query = to_query(view_of(services.default, given, dict(zip(CONTROLS, values[:-1], strict=True))))
        return no_update if query == values[-1] else query

    app.clientside_callback(ClientsideFunction("workbench", "writeAddress"), Input("view", "data"))


def _register_pages(app: Dash) -> None:
    """Which page is open."""

    @app.callback(
        *(Output(f"page-{page.NAME}", "hidden") for page in registry.PAGES),
        *(Output(f"go-{page.NAME}", "aria-current") for page in registry.PAGES),
        Input("page", "data"),
    )
    def show_page(name: str) -> Any:
        is_open = [name == page.NAME for page in registry.PAGES]
        return *(not shown for shown in is_open), *("page" if shown else "false" for shown in is_open)

    @app.callback(
        Output("page", "data", allow_duplicate=True),
        *(Input(f"go-{page.NAME}", "n_clicks") for page in registry.PAGES),
        Input("open-pattern", "n_clicks"),
    )
    def go(*clicks: int) -> str:
        return "pattern" if ctx.triggered_id == "open-pattern" else str(ctx.triggered_id).removeprefix("go-")


def _register_jobs(app: Dash, services: Services) -> None:
    """What the view needs is computed, and the page is told where that stands."""

    @app.callback(
        Output("ready", "data"),
        Output("ask-again", "data"),
        Output("alert", "children"),
        Output("progress", "hidden"),
        Output("progress-text", "children"),
        Output("progress-bar", "value"),
        Output("main", "className"),
        Output("context-facts", "children"),
        Output("layer", "max"),
        Output("head", "max"),
        Output("model", "description"),
        Input("view", "data"),
        Input("input", "data"),
        Input("tick", "data"),
        Input("run-it", "n_clicks"),
        State("session", "data"),
        State("ready", "data"),
    )
    def follow(query: str, given: dict, tick: int, agreed: int, session: str, ready: str) -> Any:
        if not query:
            raise PreventUpdate
        view = services.view(query)
        agreed = "run-it.n_clicks" in ctx.triggered_prop_ids
        again = agreed or "input.data" in ctx.triggered_prop_ids
        progress = progress_of(services, view, session, ready, again=again, agreed=agreed)
        nearest = services.nearest_head(view)
        if nearest is not None:
            choose_head(nearest)
            set_props("notice", {"children": no_such_head(view, nearest)})
            return no_update, no_update, [], True, "", 0, "main stale", *(no_update,) * 4
        if not view.has_head and (scores := services.jobs.result(HEAD_STATISTICS.key(view))) is not None:
            choose_head(first_head(scores))
        return *progress, *shown_facts(services, view)

    # The page asks again a moment after each answer: a fixed interval would drop answers that take longer than it.
    app.clientside_callback(ClientsideFunction("workbench", "askAgain"), Input("ask-again", "data"))

    # Only the open page is told, so that the others' callbacks need not be asked.
    app.clientside_callback(
        ClientsideFunction("workbench", "tellPage"),
        *(Output(f"draw-{page.NAME}", "data") for page in registry.PAGES),
        Input("ready", "data"),
        Input("scheme", "data"),
    )

    @app.callback(
        Output("progress", "hidden", allow_duplicate=True),
        Output("main", "className", allow_duplicate=True),
        Output("alert", "children", allow_duplicate=True),
        Input("cancel", "n_clicks"),
        State("session", "data"),
    )
    def cancel(clicks: int, session: str) -> Any:
        services.jobs.cancel(session)
        return True, "main stale", CANCELLED


def choose_head(head: tuple[int, int]) -> None:
    """Puts a head into the fields. As outputs they would close a circle: the head → the view → its jobs → the head."""
    for name, value in zip(("layer", "head"), head, strict=True):
        set_props(name, {"value": value})


def shown_facts(services: Services, view: View) -> tuple:
    """What is analysed, the last layer and head that can be chosen, and which models are in memory."""
    described = model_description(services.models.names())
    model = services.models.loaded(view.model)
    tasks = registry.BY_NAME[view.page].tasks(services, view)
    result = services.jobs.result(tasks[0].key) if tasks else None
    if result is not None and view.page == "result":  # of a model that may not be here
        return facts(None, result.provenance), no_update, no_update, described
    if model is None or result is None:
        return (*(no_update,) * 3, described)
    return facts(model.cfg, result.provenance), model.cfg.n_layers - 1, model.cfg.n_heads - 1, described


def no_such_head(view: View, nearest: tuple[int, int]) -> Any:
    layer, head = nearest
    text = f"{view.model} has no L{view.layer}H{view.head}; this is L{layer}H{head}, the nearest that it has."
    return message("notice", "There is no such head", text)


CANCELLED = message("notice", "Cancelled", "Press Analyse to start again.")


def controls_of(services: Services, search: str, path: str = "/") -> tuple:
    """The values of all controls for an address, which anyone may have written."""
    view, notices = from_query(search, services.default)
    if path != "/":
        notices.insert(0, f"There is no page {path[:60]!r} here; pages are chosen at the left.")
    try:
        text = services.texts.get(view.text)
    except WorkbenchError as error:
        view, notices = dataclasses.replace(view, text=services.default.text), [*notices, str(error)]
        text = services.default.text
    given = {"model": view.model, "text": view.text, "max_tokens": view.max_tokens}
    values = [
        "" if (value := getattr(view, field)) is None and control[1] == "value" else value
        for field, control in CONTROLS.items()
    ]
    notice = message("notice", "Not everything in the link could be used", "\n".join(notices)) if notices else []
    return given, view.model, text, view.max_tokens, *values, notice


def submitted(services: Services, submission: dict, before: dict) -> tuple:
    """What is to be analysed now: the input, and PARTS_OF_A_TEXT.

    Another model starts without a chosen head and with nothing switched off, another text without a chosen part, and
    either without what was asked for on demand.

    Args:
        submission: model, text and limit as they stand in the boxes, and the submission's number.
    """
    limit = submission.get("limit")
    given = {
        "model": typed_model(submission.get("model")),
        "text": services.texts.put(str(submission.get("text") or "")),
        "max_tokens": limit if isinstance(limit, int) and limit > 0 else None,
        "submission": submission.get("number"),
    }
    same_model = given["model"] == before.get("model")
    same = same_model and all(given[name] == before.get(name) for name in ("text", "max_tokens"))
    head = (no_update, no_update) if same_model else ("", "")
    part = (no_update,) * 7 if same else ("", "", 0, "", "", None, None)
    return given, *head, *part, no_update if same_model else [], no_update if same else []


def view_of(default: View, given: dict, values: dict[str, Any]) -> View:
    """The view that the controls describe. A control that is empty, or being typed into, leaves the default."""
    fields = {field: value for field, value in values.items() if value not in (None, "")}
    for span in ("queries", "keys"):
        fields[span] = tuple(values[span]) if values.get(span) else None
    fields["off"] = tuple(str(name).strip()[:40] for name in values.get("off") or () if str(name).strip())[:MOST_OFF]
    fields["asked"] = tuple(name for name in ON_DEMAND if name in (values.get("asked") or ()))
    given = {name: given[name] for name in ("model", "text", "max_tokens") if name in given}
    return dataclasses.replace(default, **given, **fields)


def progress_of(
    services: Services, view: View, session: str, ready: str, *, again: bool, agreed: bool = False
) -> tuple:
    """Brings the view's next unfinished task on its way and says where it stands; values for ``follow``'s outputs.

    Args:
        again: starts afresh what failed or was cancelled.
        agreed: starts what asks first.
    """
    done = [to_query(view)]
    while waiting := [task for task in registry.BY_NAME[view.page].tasks(services, view) if task.key not in done]:
        task = waiting[0]  # what comes behind it may depend on its result
        if services.jobs.result(task.key) is None:
            job = services.jobs.request(session, task, again=again, agreed=agreed)
            job.wait(AT_ONCE_SECONDS)
            goes_on_without = task.optional and job.state == "failed" and not isinstance(job.error, AsksFirst)
            if job.state != "done" and not goes_on_without:
                return _newly("\n".join(done) if done[1:] else ready, ready), *_unfinished(job)
        done.append(task.key)
    return _newly("\n".join(done), ready), no_update, [], True, "", 0, "main"


def _newly(done: str, before: str) -> Any:
    """What is done, where that is news: everything is drawn anew when it is told."""
    return no_update if done == before else done


def _unfinished(job: Job) -> tuple:
    if job.state == "running":
        expected = f" of {job.expected}" if job.expected else ""
        text = f"{job.text or job.task.title} · {job.seconds:.0f} s{expected}"
        return time.monotonic(), [], False, text, 100 * job.fraction, "main stale"
    alert = CANCELLED if job.state == "cancelled" else error_message(job.error)
    return no_update, alert, True, "", 0, "main stale"


def facts(cfg: Any, provenance: Any) -> list[Any]:
    """What is analysed, in two lines: model and tokens, then weights and BOS."""
    sequences = f"{provenance.n_sequences} sequences, " if provenance.n_sequences > 1 else ""
    heads = f" · {cfg.n_layers} layers × {cfg.n_heads} heads" if cfg is not None else ""
    sizes = f"{heads} · {sequences}{provenance.n_tokens:,} tokens"
    return [
        html.Div([html.Strong(provenance.model_name), sizes]),
        html.Div(f"{provenance.weights} · {provenance.bos}", className="context-weights", title=provenance.weights),
    ]


def show_error(error: Exception) -> None:
    """What a callback raised, as the page's alert; the handler of last resort."""
    set_props("alert", {"children": error_message(error)})
