"""What the page would not ask for is refused in a few words, and writes one line to the log."""

from __future__ import annotations

import copy
import json
import logging
import random
from typing import Any

import pytest
from dash import Dash
from flask.testing import FlaskClient

from workbench import HookedTransformer
from workbench.app import create_app
from workbench.app.models import ModelStore
from workbench.app.requests import _PROPERTIES, _STORES, accepted_types

HERE = {"Host": "127.0.0.1:8050"}
VIEW = "?v=1&page=pattern&model=demo&layer=0&head=0"


@pytest.fixture(scope="module")
def app() -> Dash:
    app = create_app()
    app.server.test_client().get("/", headers=HERE)  # Dash sets its callbacks up on the first request
    return app


@pytest.fixture
def client(app: Dash) -> FlaskClient:
    return app.server.test_client()


def place(name: str, value: Any) -> dict[str, Any]:
    component, _, prop = name.partition(".")
    return {"id": component, "property": prop, "value": value}


def zoom_request(app: Dash) -> dict[str, Any]:
    """What the page sends when the button “Show all” is clicked."""
    output = next(
        name
        for name, callback in app.callback_map.items()
        if {"id": "zoom-out", "property": "n_clicks"} in callback["inputs"]
    )
    first, second = output.strip(".").split("...")
    outputs = [{"id": part.partition(".")[0], "property": part.partition(".")[2]} for part in (first, second)]
    return {
        "output": output,
        "outputs": outputs,
        "inputs": [place("typed-part.data", []), place("zoom-out.n_clicks", 1)],
        "changedPropIds": ["zoom-out.n_clicks"],
        "state": [place("view.data", VIEW)],
    }


def test_the_pages_own_request_is_answered(app: Dash, client: FlaskClient) -> None:
    answer = client.post("/_dash-update-component", json=zoom_request(app), headers=HERE)
    assert answer.status_code == 200
    assert answer.json["response"] == {"queries": {"data": None}, "keys": {"data": None}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("output",), "nothing.data"),
        (("output",), {"a": 1}),
        (("output",), None),
        (("outputs",), 5),
        (("outputs",), []),
        (("outputs", 0), "queries.data"),
        (("inputs",), {}),
        (("inputs",), []),
        (("inputs", 0), None),
        (("inputs", 0, "id"), ["typed-part"]),
        (("inputs", 0, "value"), {"deep": [1]}),
        (("inputs", 0, "value"), "<script>"),
        (("inputs", 0, "value"), [float("inf")]),
        (("state", 0, "property"), "value"),
        (("state", 0, "value"), None),
        (("state", 0, "value"), 7),
        (("changedPropIds",), "zoom-out.n_clicks"),
        (("changedPropIds",), [{}]),
        (("changedPropIds",), ["view.data"]),
    ],
)
def test_a_hand_made_request_is_refused_in_one_line(
    path: tuple, value: Any, app: Dash, client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = copy.deepcopy(zoom_request(app))
    part: Any = body
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    refused(client, json.dumps(body), caplog)


@pytest.mark.parametrize("body", ["", "null", "[]", "5", "{}", '{"output"', "[" * 100_000, '{"output": "\\u0000"}'])
def test_what_is_no_request_at_all_is_refused_too(
    body: str, client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    refused(client, body, caplog)


def refused(client: FlaskClient, body: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = client.post("/_dash-update-component", data=body, headers=HERE | {"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.text.startswith("Not a request of this page: ") and len(answer.text) < 150
    assert "Traceback" not in answer.text and "<script>" not in answer.text
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in record.getMessage() and len(record.getMessage()) < 150 and not record.exc_info


def test_every_value_that_a_callback_reads_has_a_type(app: Dash) -> None:
    read = {
        (part["id"], part["property"])
        for callback in app.callback_map.values()
        if "callback" in callback
        for part in (*callback["inputs"], *callback["state"])
    }
    assert len(read) > 30
    assert not [(name, prop) for name, prop in read if prop not in _PROPERTIES and name not in _STORES]


@pytest.mark.parametrize(
    "path", ["os/path.py", "dash/nothing.js", "workbench/app/main.py", "dash/../../etc/passwd", "%00/x.js"]
)
def test_files_that_are_not_the_pages_do_not_exist(path: str, client: FlaskClient) -> None:
    answer = client.get("/_dash-component-suites/" + path, headers=HERE)
    assert answer.status_code == 404
    assert len(answer.text) < 300 and "registered" not in answer.text


def test_what_figures_and_tables_need_is_there_before_the_page_starts(client: FlaskClient) -> None:
    index = client.get("/", headers=HERE).text
    start = index.index("dash_renderer")
    for chunk in ("plotly.min.js", "async-graph.js", "async-community.js"):
        path = next(part for part in index[:start].split('"') if part.endswith(chunk))
        assert client.get(path, headers=HERE).status_code == 200


ODD = [None, -7, 10**30, 1e300, True, "", "x", "L1H2", "?v=1&page=pattern&model=tiny&layer=0&head=0", "\ud800", [], {}]
EVENTS = ("points", "xaxis3.range[0]", "xaxis3.range[1]", "xaxis3.autorange", "model", "text", "number")


def test_values_of_the_right_type_that_make_no_sense_break_nothing(
    tiny: HookedTransformer, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(model="tiny", models=ModelStore(load=lambda source, job, make_room: tiny))
    client, chance = app.server.test_client(), random.Random(0)
    client.get("/", headers=HERE)

    def odd(part: dict[str, str]) -> dict[str, Any]:
        accepted = accepted_types(part["id"], part["property"])
        lists = [[chance.choice(ODD) for _ in range(n)] for n in range(5)]
        dicts = [{name: chance.choice([*ODD, [chance.choice(ODD)]]) for name in EVENTS}, {}]
        return part | {
            "value": chance.choice([value for value in [*ODD, *lists, *dicts] if isinstance(value, accepted)])
        }

    for name, callback in app.callback_map.items():
        places = callback["output"] if isinstance(callback["output"], (list, tuple)) else [callback["output"]]
        outputs = [{"id": place.component_id, "property": place.component_property} for place in places]
        for _ in range(10 if "callback" in callback else 0):
            body = {
                "output": name,
                "outputs": outputs if isinstance(callback["output"], (list, tuple)) else outputs[0],
                "inputs": [odd(part) for part in callback["inputs"]],
                "state": [odd(part) for part in callback["state"]],
                "changedPropIds": ["{id}.{property}".format(**callback["inputs"][0])],
            }
            answer = client.post("/_dash-update-component", json=body, headers=HERE)
            assert answer.status_code in (200, 204), body
            assert "Traceback" not in answer.text and "went wrong" not in answer.text, body
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
