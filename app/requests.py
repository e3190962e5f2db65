"""What may be asked of the server. A request that the page itself would not make gets a short answer and one line in
the log, before it reaches a callback."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import flask
from dash import Dash
from dash.exceptions import DependencyException

from workbench.app.state import PAGES

Accepted = tuple[type, ...]

UPDATE, EXPORT = "/_dash-update-component", "/export"
_NOTHING = type(None)
_NUMBER: Accepted = (int, float)
_EVENT: Accepted = (dict, _NOTHING)
# The JSON types of the properties that callbacks read, and those of the stores' data.
_PROPERTIES: dict[str, Accepted] = {
    "n_clicks": (*_NUMBER, _NOTHING),
    "value": (str, *_NUMBER, _NOTHING),
    "relayoutData": _EVENT,
}
_LISTS = ("off",)  # components whose value is a list
_STORES: dict[str, Accepted] = {
    "submission": (dict,),
    "visited": (dict,),
    "mounted": (list,),
    "typed-part": (list,),
    "typed-other": (dict,),
    "tick": _NUMBER,
    "again": _NUMBER,
    "chosen-files": (list,),
} | dict.fromkeys(
    (
        "missing-page", "export-problem", "view", "ready", "scheme", "session", "own-prompts", "typed-prompts",
        "chosen-other-model", "chosen-other-text", "tabulated", "scattered",
        *(f"draw-{page}" for page in PAGES),
    ),
    (str,),
)  # fmt: skip


def guard(app: Dash, host: str) -> None:
    """Makes the app's server answer only what its own page, opened on this machine, asks for."""

    def refuse_strangers() -> flask.Response | None:
        """No web page elsewhere can reach the server under its name."""
        asked = flask.request.host.rpartition(":")[0] if ":" in flask.request.host else flask.request.host
        origin = flask.request.headers.get("Origin")
        # A link to a page may come from anywhere; what only a page asks for may not.
        foreign = flask.request.headers.get("Sec-Fetch-Site") == "cross-site" and flask.request.path == EXPORT
        own_origin = origin is None or origin == f"http://{flask.request.host}"
        if asked not in (host, "localhost") or not own_origin or foreign:
            return flask.Response("This server answers only to its own page.", status=403)
        return None

    def refuse_nonsense() -> flask.Response | None:
        if flask.request.path != UPDATE or flask.request.method != "POST":
            return None
        try:
            check_update(flask.request.get_json(silent=True), app.callback_map)
        except (ValueError, RecursionError) as error:
            logging.getLogger(__name__).warning("refused a request: %s", error)
            return flask.Response(f"Not a request of this page: {error}.", status=400, mimetype="text/plain")
        return None

    def not_found(error: Exception) -> flask.Response:
        return flask.Response("There is no such file.", status=404, mimetype="text/plain")

    app.server.before_request(refuse_strangers)
    app.server.before_request(refuse_nonsense)
    app.server.register_error_handler(DependencyException, not_found)
    app.server.register_error_handler(FileNotFoundError, not_found)


def check_update(body: Any, callbacks: Mapping[str, Any]) -> None:
    """Checks that ``body`` asks for one of the callbacks in the way in which Dash's page does.

    Raises:
        ValueError: it does not; says what is wrong in a few words, none of which come from the body.
    """
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    name = body.get("output")
    callback = callbacks.get(name) if isinstance(name, str) else None
    if callback is None or "callback" not in callback:
        raise ValueError("no callback has this output")
    several = isinstance(callback["output"], (list, tuple))
    outputs = body.get("outputs", [])
    if several != isinstance(outputs, list):
        raise ValueError("the outputs are not the callback's")
    wanted = [
        {"id": place.component_id, "property": place.component_property}
        for place in (callback["output"] if several else [callback["output"]])
    ]
    _check_places("outputs", outputs if several else [outputs], wanted)
    _check_places("inputs", body.get("inputs", []), callback["inputs"])
    _check_places("state", body.get("state", []), callback["state"])
    for part in (*body.get("inputs", []), *body.get("state", [])):
        _check_value(part["id"], part["property"], part.get("value"))
    names = {f"{place['id']}.{place['property']}" for place in callback["inputs"]}
    changed = body.get("changedPropIds", [])
    if not isinstance(changed, list) or not all(isinstance(change, str) and change in names for change in changed):
        raise ValueError("what changed is no input of the callback")
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        raise ValueError("a number is not finite") from None


def _check_places(kind: str, given: Any, wanted: list[dict]) -> None:
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise ValueError(f"the {kind} are no list of components' properties")
    found = [{"id": part.get("id"), "property": str(part.get("property")).partition("@")[0]} for part in given]
    if found != wanted:
        raise ValueError(f"the {kind} are not the callback's")


def accepted_types(component: str, name: str) -> Accepted:
    """The types that a property of a component may have."""
    if name == "value" and component in _LISTS:
        return (list, _NOTHING)
    return _STORES[component] if name == "data" else _PROPERTIES[name]


def _check_value(component: str, name: str, value: Any) -> None:
    if not isinstance(value, accepted_types(component, name)):
        raise ValueError(f"the value of {component}.{name} has another type")
