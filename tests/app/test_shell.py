"""The frame around the pages: address, controls, view, jobs and messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dash import no_update

from workbench import HookedTransformer
from workbench.app import corrections
from workbench.app.components import message
from workbench.app.jobs import Job, Task
from workbench.app.models import ModelStore
from workbench.app.pages import heads
from workbench.app.recipes import pattern_of
from workbench.app.services import Services, stoppable
from workbench.app.shell import error_message, opened_with, progress_of, submitted
from workbench.app.state import View, to_query
from workbench.errors import WorkbenchError

TEXT = "a b c a b c d e <script>alert(1)</script> a b %{x} d e f a b c"


@pytest.fixture
def services(tiny: HookedTransformer) -> Services:
    return Services(
        ModelStore(load=lambda source, job, make_room: tiny),
        View(model="tiny", text=TEXT),
        {"demo": "the bundled model"},
    )


def shown_text(component: Any) -> str:
    return json.dumps(component, default=lambda part: part.to_plotly_json(), ensure_ascii=False)


def test_an_address_says_what_all_fields_and_boxes_hold(services: Services) -> None:
    view = View(model="m", text="t u", max_tokens=9, page="pattern", layer=3, head=4, pooling="mean", queries=(1, 5))
    fields, model, text, limit, notice = opened_with(services, to_query(view))
    assert (model, text, limit, notice) == ("m", "t u", 9, [])
    assert View(**fields) == view


def test_an_unusable_address_opens_with_a_notice(services: Services) -> None:
    fields, *_, notice = opened_with(services, "?v=1&layer=x&text=@0123456789", "/heads")
    assert fields["text"] == TEXT and fields["layer"] is None
    said = notice.children[0].children
    assert all(part in said for part in ("“layer” must be", "paste it again", "There is no page '/heads'"))


def test_another_model_starts_without_a_head_and_another_text_without_a_zoom(services: Services) -> None:
    before = View(
        model="demo", text="t", layer=1, head=2, position=3, lens_position=4, step=5, target="a", foil="b",
        queries=(0, 2), keys=(0, 2), off=("L0",), asked=("circuit",),
    )  # fmt: skip

    def changed(model: str, text: str, limit: int | None = None) -> dict[str, Any]:
        given = {"model": model, "text": text, "limit": limit, "number": 5}
        changes = submitted(services, given, before)
        assert changes.pop("submission") == 5
        after = dataclasses.replace(before, **changes)
        return {name: value for name, value in vars(after).items() if value != getattr(before, name)}

    of_a_text = {
        "position": None, "lens_position": None, "step": 0, "target": "", "foil": "", "queries": None, "keys": None,
        "asked": (),
    }  # fmt: skip
    assert changed("demo", "another") == {"text": "another"} | of_a_text
    assert changed("demo", "t", 4) == {"max_tokens": 4} | of_a_text
    assert changed("other", "t") == {"model": "other", "layer": None, "head": None, "off": ()} | of_a_text
    assert changed("demo", "t") == {}  # nothing new: everything stays, and what failed is tried again


@pytest.mark.parametrize("model", ["demo", "", "  ", "/a folder/with ünïcode", "x" * 900, "\ud800"])
@pytest.mark.parametrize("text", ["t", "", "\n", "@home", "a" * 5000, "語" * 700, "\ud800 <&?=#"])
def test_what_is_submitted_is_what_is_analysed(model: str, text: str, services: Services) -> None:
    changes = submitted(services, {"model": model, "text": text}, services.default)
    del changes["submission"]
    view = services.view(to_query(dataclasses.replace(services.default, **changes)))
    assert view.model == model.strip().replace("\ud800", "?")[:500]
    assert services.texts.get(view.text) == text.replace("\ud800", "?")


def test_what_the_model_does_not_have_is_replaced_once_it_is_there_to_tell(services: Services) -> None:
    view = dataclasses.replace(services.default, page="what-if", layer=7, head=1, off=("L1H2", "L77", "a?", "M0"))
    assert corrections.needed(services, view) is None
    services.models.get("tiny", Job(Task("key", "title", lambda job: None)))
    nearest = corrections.needed(services, view)
    assert nearest.fields == {"layer": 1, "head": 1} and "the nearest that it has" in shown_text(nearest.notice)
    view = dataclasses.replace(view, **nearest.fields)
    refused = corrections.needed(services, view)
    assert refused.fields == {"off": ["L1H2", "M0"]}
    assert "there is no layer 77; the last one is 1" in shown_text(refused.notice)
    assert corrections.needed(services, dataclasses.replace(view, page="heads")) is None
    assert corrections.needed(services, dataclasses.replace(view, off=("L1H2", "M0"))) is None


def test_progress_goes_from_task_to_task_and_ends_ready(services: Services) -> None:
    view = dataclasses.replace(services.default, layer=0, head=1)
    ready = ""
    for _ in range(100):
        told, ask_again, alert, hidden, *_ = progress_of(services, view, "test", ready, again=False)
        ready = ready if told is no_update else told
        if hidden:
            break
    assert progress_of(services, view, "test", ready, again=False)[0] is no_update  # nothing is drawn twice
    keys = [task.key for task in heads.tasks(services, view)]
    assert ready == "\n".join([to_query(view), *keys]) and alert == []
    assert all(services.jobs.result(key) is not None for key in keys)


def test_names_in_errors_keep_their_case() -> None:
    text = "smollm2-135m not found in /data/Models"
    assert shown_text(text) in shown_text(error_message(WorkbenchError(text)))


def test_errors_are_told_in_words() -> None:
    said = error_message(WorkbenchError("no model 'smol': did you mean smollm2-135m?"))
    assert "no model 'smol': did you mean smollm2-135m?" in shown_text(said)
    assert "Shorten the text" in shown_text(error_message(RuntimeError("CUDA out of memory. Tried to allocate")))
    unexpected = shown_text(error_message(KeyError("boom")))
    assert "boom" in unexpected and "not with your input" in unexpected
    assert "details" not in shown_text(message("error", "title", "text"))


def test_a_job_stops_between_layers(tiny: HookedTransformer) -> None:
    job = Job(Task("key", "title", lambda job: None))
    layers: list[int] = []

    def count(value: torch.Tensor, hook: Any) -> None:
        layers.append(hook.layer())
        job.stop()

    def work(job: Job) -> None:
        with (
            tiny.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", count) for layer in range(2)]),
            stoppable(tiny, job),
        ):
            tiny(torch.arange(5))

    job.task = Task("key", "title", work)  # type: ignore[misc]
    job.run()
    assert job.state == "cancelled" and layers == [0]
    assert not any(point.has_hooks() for point in tiny.hook_dict.values())


def test_a_computation_is_the_same_job_only_for_the_same_input(services: Services) -> None:
    view = dataclasses.replace(services.default, layer=0, head=0)
    changes: list[Callable[[View], View]] = [
        lambda v: dataclasses.replace(v, text="other"),
        lambda v: dataclasses.replace(v, model="other"),
        lambda v: dataclasses.replace(v, max_tokens=3),
        lambda v: dataclasses.replace(v, head=1),
        lambda v: dataclasses.replace(v, layer=1),
        lambda v: dataclasses.replace(v, queries=(0, 2)),
        lambda v: dataclasses.replace(v, keys=(0, 2)),
        lambda v: dataclasses.replace(v, pooling="mean"),
    ]
    keys = [pattern_of(changed).key(changed) for changed in (change(view) for change in changes)]
    assert len({*keys, pattern_of(view).key(view)}) == len(changes) + 1
    other = dataclasses.replace(view, score="entropy")
    assert pattern_of(view).key(view) == pattern_of(other).key(other)
