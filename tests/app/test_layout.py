"""The layout holds everything that callbacks name, and nothing that asks the outside world."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from dash import Dash, html
from dash.development.base_component import Component

from workbench.app import create_app, registry
from workbench.app.layout import document, page_content
from workbench.app.state import View


@pytest.fixture(scope="module")
def app() -> Dash:
    return create_app()


def components(app: Dash) -> Iterator[Component]:
    """Those of the document and of every page, which come when it is opened."""
    root = app.layout() if callable(app.layout) else app.layout
    yield root
    yield from root._traverse()
    for page in registry.PAGES:
        yield from html.Div(page_content(page, View()))._traverse()


def named(app: Dash) -> dict[str, Component]:
    return {part.id: part for part in components(app) if isinstance(part, Component) and getattr(part, "id", None)}


def test_every_callback_speaks_of_components_and_properties_that_exist(app: Dash) -> None:
    parts = named(app)
    wanted = set()
    for callback in app.callback_map.values():
        for place in (*callback["inputs"], *callback["state"]):
            wanted.add((place["id"], place["property"]))
        output = callback["output"]
        for place in output if isinstance(output, (list, tuple)) else [output]:
            if place is not None and hasattr(place, "component_id"):
                wanted.add((place.component_id, place.component_property))
    assert len(wanted) > 60
    unknown = [(name, prop) for name, prop in wanted if name not in parts]
    assert not unknown
    wrong = [
        (name, prop)
        for name, prop in wanted
        if prop not in parts[name].available_properties and not prop.startswith("aria-")
    ]
    assert not wrong


def test_ids_are_unique(app: Dash) -> None:
    ids = [part.id for part in components(app) if isinstance(part, Component) and getattr(part, "id", None)]
    assert len(ids) == len(set(ids))


def test_no_figure_offers_to_upload_itself(app: Dash) -> None:
    graphs = [part for part in components(app) if type(part).__name__ == "Graph"]
    assert len(graphs) >= 9
    assert all(graph.config["showSendToCloud"] is False and graph.config["displaylogo"] is False for graph in graphs)


def test_figures_tables_and_controls_have_names_for_those_who_cannot_see_them(app: Dash) -> None:
    controls = ("Select", "NumberInput", "Textarea", "Autocomplete", "ColorSchemeToggle")
    unnamed = [
        part.id
        for part in components(app)
        if type(part).__name__ in controls and not (getattr(part, "label", None) or getattr(part, "aria-label", None))
    ]
    assert not unnamed
    wrapped = [getattr(part, "aria-label", "") for part in components(app) if getattr(part, "role", None) == "group"]
    assert all(wrapped)


def test_stores_hold_ids_and_short_values_only() -> None:
    long = "word " * 10_000
    page = document("session", View(), {"demo": "the bundled model"})
    stores = [part for part in page._traverse() if type(part).__name__ == "Store" and part.id != "fields"]
    assert sum(len(json.dumps(store.to_plotly_json()["props"])) for store in stores) < 1500
    assert long not in json.dumps(page, default=lambda part: part.to_plotly_json())


def test_each_page_load_is_a_session_of_its_own(app: Dash) -> None:
    def session(layout: Any) -> str:
        return next(part.data for part in layout._traverse() if getattr(part, "id", None) == "session")

    assert session(app._layout_value()) != session(app._layout_value())
