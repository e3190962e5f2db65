"""The callbacks of the frame: address ↔ controls ↔ view, and the jobs that a view needs."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, ctx, html, no_update, set_props
from dash.exceptions import PreventUpdate

from workbench.app import corrections, exports, registry
from workbench.app.components import message
from workbench.app.controls import BY_PAGE
from workbench.app.estimates import AsksFirst
from workbench.app.jobs import Job
from workbench.app.layout import model_description, page_content
from workbench.app.messages import error_message
from workbench.app.selection import CHOSEN
from workbench.app.services import Services
from workbench.app.state import View, from_query, to_query, typed_model
from workbench.errors import WorkbenchError

# What belongs to a model, and what to a text; let go with them.
PARTS_OF_A_MODEL = ("layer", "head", "off")
PARTS_OF_A_TEXT = ("position", "lens_position", "step", "target", "foil", "queries", "keys", "asked")

AT_ONCE_SECONDS = 0.3  # what is done by then is shown without a progress bar


def register(app: Dash, services: Services) -> None:
    """Adds the callbacks of the frame and of every page."""
    _register_view(app, services)
    _register_pages(app, services)
    _register_jobs(app, services)
    exports.register(app, services)
    for page in registry.PAGES:
        page.register(app, services)


def _register_view(app: Dash, services: Services) -> None:
    """Address → view ↔ controls, view → address; view.js keeps the view."""
    # The address, the page that is open, and the one whose components are asked for.
    told = [Output(name, "data", allow_duplicate=True) for name in ("view", "open-page", "missing-page")]

    @app.callback(
        Output("address", "data"),
        Output("model", "value"),
        Output("text", "value"),
        Output("max-tokens", "value"),
        Output("notice", "children"),
        Input("visited", "data"),
    )
    def read_address(visited: dict) -> Any:
        return opened_with(services, str(visited.get("search", "")), str(visited.get("path", "/")))

    @app.callback(Output("input", "data"), Input("submission", "data"), State("view", "data"))
    def submit(submission: dict, query: str) -> Any:
        return submitted(services, submission, services.view(query))

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
        Input("address", "data"),
        State("model", "value"),
        State("text", "value"),
        State("max-tokens", "value"),
    )
    app.clientside_callback(
        ClientsideFunction("view", "amend"),
        *told,
        Output("again", "data"),
        *(Input(name, "data") for name in ("address", "input", "correction", "choices")),
        State("fields", "data"),
    )
    app.clientside_callback(ClientsideFunction("view", "choose"), Output("choices", "data"), Input("chosen", "data"))
    for controls in BY_PAGE.values():
        app.clientside_callback(
            ClientsideFunction("view", "collect"), *told, *(Input(*control) for control in controls.values())
        )
    app.clientside_callback(ClientsideFunction("view", "writeAddress"), Input("view", "data"))


def _register_pages(app: Dash, services: Services) -> None:
    """Which page is open. The components of a page come when it is first opened."""
    app.clientside_callback(
        ClientsideFunction("view", "go"),
        CHOSEN,
        *(Input(f"go-{page.NAME}", "n_clicks") for page in registry.PAGES),
        Input("open-pattern", "n_clicks"),
    )
    app.clientside_callback(
        ClientsideFunction("view", "showPage"),
        *(Output(f"page-{page.NAME}", "hidden") for page in registry.PAGES),
        *(Output(f"go-{page.NAME}", "aria-current") for page in registry.PAGES),
        Input("open-page", "data"),
    )

    @app.callback(
        *(Output(f"page-{page.NAME}", "children") for page in registry.PAGES),
        Output("mounted", "data"),
        Input("missing-page", "data"),
        State("mounted", "data"),
        State("view", "data"),
    )
    def mount(missing: str, mounted: list[str], query: str) -> Any:
        view = services.view(query)
        pages = (page_content(page, view) if missing == page.NAME else no_update for page in registry.PAGES)
        return *pages, [*mounted, missing]

    app.clientside_callback(ClientsideFunction("view", "mount"), Input("mounted", "data"))

    # Only the open page is told, so that the others' callbacks need not be asked.
    app.clientside_callback(
        ClientsideFunction("view", "tellPage"),
        *(Output(f"draw-{page.NAME}", "data") for page in registry.PAGES),
        *(Input(name, "data") for name in ("ready", "scheme", "mounted")),
    )


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
        Input("again", "data"),
        Input("tick", "data"),
        Input("run-it", "n_clicks"),
        State("session", "data"),
        State("ready", "data"),
    )
    def follow(query: str, again: int, tick: int, clicks: int, session: str, ready: str) -> Any:
        if not query:
            raise PreventUpdate
        view, problems = from_query(query, services.default)
        if problems:
            return *stopped(message("error", "This cannot be shown", "\n".join(problems))), *(no_update,) * 4
        if (found := corrections.needed(services, view)) is not None:
            correct(query, found)
            return *stopped([]), *(no_update,) * 4
        agreed = "run-it.n_clicks" in ctx.triggered_prop_ids
        is_anew = agreed or "again.data" in ctx.triggered_prop_ids
        progress = progress_of(services, view, session, ready, again=is_anew, agreed=agreed)
        if (found := corrections.by_results(services, view)) is not None:
            correct(query, found)
        return *progress, *shown_facts(services, view)

    # The page asks again a moment after each answer: a fixed interval would drop answers that take longer than it.
    app.clientside_callback(ClientsideFunction("workbench", "askAgain"), Input("ask-again", "data"))

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


CANCELLED = message("notice", "Cancelled", "Press Analyse to start again.")


def opened_with(services: Services, search: str, path: str = "/") -> tuple:
    """The fields of the view for an address, which anyone may have written; what stands in the three boxes; and what of
    the address could not be used."""
    view, notices = from_query(search, services.default)
    if path != "/":
        notices.insert(0, f"There is no page {path[:60]!r} here; pages are chosen at the left.")
    try:
        text = services.texts.get(view.text)
    except WorkbenchError as error:
        view, notices = dataclasses.replace(view, text=services.default.text), [*notices, str(error)]
        text = services.texts.get(view.text)
    notice = message("notice", "Not everything in the link could be used", "\n".join(notices)) if notices else []
    return dataclasses.asdict(view), view.model, text, view.max_tokens, notice


def submitted(services: Services, submission: dict, before: View) -> dict[str, Any]:
    """What of the view changes with a submission: the input, and what belongs to another model or text.

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
    }
    other_model = given["model"] != before.model
    other_text = any(given[name] != getattr(before, name) for name in ("text", "max_tokens"))
    parts = (PARTS_OF_A_MODEL if other_model else ()) + (PARTS_OF_A_TEXT if other_model or other_text else ())
    plain = View()
    return given | {field: getattr(plain, field) for field in parts} | {"submission": submission.get("number")}


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


def stopped(alert: Any) -> tuple:
    """As ``progress_of``, where nothing goes on; what is on the page is from before."""
    return no_update, no_update, alert, True, "", 0, "main stale"


def _newly(done: str, before: str) -> Any:
    """What is done, where that is news: everything is drawn anew when it is told."""
    return no_update if done == before else done


def _unfinished(job: Job) -> tuple:
    if job.state == "running":
        expected = f" of {job.expected}" if job.expected else ""
        text = f"{job.text or job.task.title} · {job.seconds:.0f} s{expected}"
        return time.monotonic(), [], False, text, 100 * job.fraction, "main stale"
    return stopped(CANCELLED if job.state == "cancelled" else error_message(job.error))[1:]


def facts(cfg: Any, provenance: Any) -> list[Any]:
    """What is analysed, in two lines: model and tokens, then weights and BOS."""
    sequences = f"{provenance.n_sequences} sequences, " if provenance.n_sequences > 1 else ""
    heads = f" · {cfg.n_layers} layers × {cfg.n_heads} heads" if cfg is not None else ""
    sizes = f"{heads} · {sequences}{provenance.n_tokens:,} tokens"
    return [
        html.Div([html.Strong(provenance.model_name), sizes]),
        html.Div(f"{provenance.weights} · {provenance.bos}", className="context-weights", title=provenance.weights),
    ]


def correct(query: str, found: corrections.Correction) -> None:
    """Tells the browser what becomes of the view in this address."""
    set_props("correction", {"data": {"of": query} | found.fields})
    if found.notice is not no_update:
        set_props("notice", {"children": found.notice})


def show_error(error: Exception) -> None:
    """What a callback raised, as the page's alert; the handler of last resort."""
    set_props("alert", {"children": error_message(error)})
