"""``workbench.app.show``: a dashboard on what a notebook holds."""

from __future__ import annotations

import copy
import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import head_pattern, head_statistics
from workbench.app import show
from workbench.app.inline import Dashboard, _Server
from workbench.app.jobs import Job, Task
from workbench.app.recipes import pattern_of
from workbench.app.state import View, from_query
from workbench.errors import WorkbenchError


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as answer:
            return b"Attention Workbench" in answer.read()
    except OSError:
        return False


def test_a_script_gets_the_address_and_one_server_serves_all(
    tiny: HookedTransformer, capsys: pytest.CaptureFixture[str]
) -> None:
    one = show(tiny, text="a b a b", page="pattern", layer=1, head=2)
    other = show("demo")
    try:
        assert capsys.readouterr().out.splitlines() == [f"Attention Workbench is at {x.url}" for x in (one, other)]
        assert urlsplit(one.url).hostname == "127.0.0.1" and urlsplit(one.url).netloc == urlsplit(other.url).netloc
        fields = {name: value for name, (value,) in parse_qs(urlsplit(one.url).query).items()}
        assert fields == {
            "v": "1", "page": "pattern", "model": "tiny (in memory)", "text": "a b a b", "layer": "1", "head": "2",
        }  # fmt: skip
        assert answers(one.url) and answers(other.url)
        assert _Server._current is not None
        store = _Server._current.services.models
        assert store.loaded("tiny (in memory)") is tiny
        again = show(tiny)
        assert "in+memory+2" in again.url
        one.close()
        one.close()
        assert answers(other.url) and store.loaded("tiny (in memory)") is None
        with pytest.raises(WorkbenchError, match="no longer in memory"):
            store.get("tiny (in memory)", Job(Task("key", "title", lambda job: None)))
        again.close()
    finally:
        other.close()
    assert not answers(other.url)  # nobody needs the server any more


def test_a_model_that_was_changed_is_shown_as_it_is_now(tiny: HookedTransformer) -> None:
    """The queries and keys that are kept for zooming belong to what was shown before."""
    model = copy.deepcopy(tiny)

    def weights(shown: Dashboard) -> np.ndarray:
        assert _Server._current is not None
        services = _Server._current.services
        view = services.view(f"?{urlsplit(shown.url).query}")
        task = services.task(view, pattern_of(view))
        return task.work(Job(task))["weight"]

    first = show(model, text="a b c a b c d", layer=1, head=2)
    before = weights(first)
    with torch.no_grad():
        model.blocks[1].attn.W_Q.mul_(20)
    second = show(model, text="a b c a b c d", layer=1, head=2)
    try:
        after = weights(second)
        np.testing.assert_array_equal(after, head_pattern(model, "a b c a b c d", 1, 2)["weight"])
        assert np.nanmax(np.abs(after - before)) > 0.01
    finally:
        first.close()
        second.close()


def test_a_notebook_gets_a_frame(tiny: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    display = SimpleNamespace(display=shown.append, IFrame=lambda url, width, height: (url, width, height))
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    dashboard = show(tiny, height=500)
    dashboard.close()
    assert shown == [(dashboard.url, "100%", 500)]


def test_lists_odd_numbers_and_half_characters_make_an_address_that_is_read_back(tiny: HookedTransformer) -> None:
    dashboard = show(
        tiny, off=["L0H0", "L1"], queries=[0, 5], temperature=0.1 + 0.2, target="\ud800", text="a b"
    )  # fmt: skip
    dashboard.close()
    view, notices = from_query(urlsplit(dashboard.url).query, View())
    assert not notices
    assert (view.off, view.queries, view.temperature, view.target) == (("L0H0", "L1"), (0, 5), 0.3, "?")


def test_a_result_that_lacks_what_its_kind_holds_is_refused(tiny: HookedTransformer) -> None:
    whole = head_statistics(tiny, "a b a b")
    with pytest.raises(
        WorkbenchError, match="lacks what one of the kind head_statistics holds.*run its analysis again"
    ):
        show(dataclasses.replace(whole, quantities={}))
    assert _Server._current is None


def test_what_cannot_be_shown_is_refused(tiny: HookedTransformer) -> None:
    for arguments, message in (
        ({"shown": 3}, "give a HookedTransformer, the name of one, or a result; got int"),
        ({"shown": tiny, "colour": "red"}, "there is no colour in a view; there are max_tokens, page"),
        ({"shown": tiny, "page": "cover"}, "“page” must be one of heads, pattern"),
        ({"shown": tiny, "layer": -1}, "“layer” must be a whole number"),
        ({"shown": HookedTransformer}, "give a HookedTransformer, the name of one, or a result; got type"),
        ({"shown": tiny, "text": 5}, "text must be a string, got int"),
        ({"shown": tiny, "temperature": float("nan")}, "“temperature” must be a number from 0 to 5"),
    ):
        with pytest.raises(ValueError, match=message):
            show(**arguments)  # type: ignore[arg-type]
    assert _Server._current is None


def test_the_page_draws_the_object_itself_and_a_result(tiny: HookedTransformer, watched: Any) -> None:
    with_own_name = show(tiny, text="a b c a b c a", layer=0, head=1)
    result = head_statistics(tiny, "a b c a b c a")
    of_result = show(result)
    try:
        page = watched()
        page.goto(with_own_name.url)
        page.drawn("heads-map")
        drawn = page.evaluate("document.querySelector('#heads-map .js-plotly-plot')._fullData[0].z[1][2]")
        assert drawn == pytest.approx(float(result["prefix_matching"][1, 2]), abs=1e-6)
        page.goto(of_result.url)
        page.drawn("result-map")
    finally:
        with_own_name.close()
        of_result.close()
