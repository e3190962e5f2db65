"""Models are loaded once, a few are kept, and a device computes one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from workbench.app import jobs
from workbench.app.jobs import Cancelled, Job, JobRunner, Task
from workbench.app.models import ModelStore


def job() -> Job:
    return Job(Task("key", "title", lambda job: None))


def test_a_model_is_loaded_once_however_many_ask() -> None:
    loads: list[str] = []

    def load(source: str, job: Job, make_room: Callable[[], None]) -> object:
        loads.append(source)
        threading.Event().wait(0.05)
        return object()

    store = ModelStore(load=load)
    with ThreadPoolExecutor(6) as pool:
        models = list(pool.map(lambda _: store.get("m", job()), range(6)))
    assert loads == ["m"]
    assert len(set(map(id, models))) == 1
    assert store.loaded("m") is models[0] and store.loaded("other") is None


def test_room_is_made_before_another_model_is_loaded() -> None:
    held: list[int] = []

    def load(source: str, job: Job, make_room: Callable[[], None]) -> str:
        if source == "mistyped":
            raise OSError("there is no such model")
        make_room()
        held.append(len(store._models))
        return source

    store = ModelStore(capacity=2, load=load)
    for source in ("one", "two", "one"):
        store.get(source, job())
    with pytest.raises(OSError, match="no such model"):
        store.get("mistyped", job())
    assert store.loaded("one") and store.loaded("two")  # nothing had to go for what there is not
    store.get("three", job())
    assert held == [0, 1, 1]
    assert store.loaded("one") and store.loaded("three") and store.loaded("two") is None


def test_a_model_that_fails_to_load_can_be_tried_again() -> None:
    outcomes = iter([OSError("gone"), "model"])

    def load(source: str, job: Job, make_room: Callable[[], None]) -> object:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    store = ModelStore(load=load)
    with pytest.raises(OSError, match="gone"):
        store.get("m", job())
    assert store.get("m", job()) == "model"


CPU = SimpleNamespace(cfg=SimpleNamespace(device="cpu"))


def test_a_device_computes_one_thing_at_a_time_and_waiting_says_for_what_and_can_be_cancelled() -> None:
    store, waiting = ModelStore(), job()

    def wait() -> None:
        with store.computing(CPU, waiting):
            raise AssertionError("the device is taken")

    running = Job(Task("other", "Pattern of L0H1", lambda job: None), fraction=0.25)
    with store.computing(CPU, running), ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(wait)
        while not waiting.text:
            threading.Event().wait(0.005)
        assert waiting.text == "Waiting for “Pattern of L0H1”, which runs on cpu (25% done)"
        waiting.stop()
        assert isinstance(outcome.exception(timeout=10), Cancelled)
    assert not running.is_stopping  # somebody may still be looking at it
    with store.computing(CPU, job()):
        pass


def test_what_no_page_asks_for_any_more_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def long(job: Job) -> None:
        with store.computing(CPU, job):
            while True:
                threading.Event().wait(0.005)
                job.report(0.5, "half way")

    def short(job: Job) -> str:
        with store.computing(CPU, job):
            return "result"

    store, runner = ModelStore(), JobRunner()
    left = runner.request("closed", Task("long", "long", long))
    while left.fraction == 0:
        threading.Event().wait(0.005)
    wanted = runner.request("open", Task("short", "short", short))
    assert not wanted.wait(0.3)
    monkeypatch.setattr(jobs, "ALIVE_SECONDS", 0.0)
    assert wanted.wait(10) and wanted.result == "result"
    assert left.wait(10) and left.state == "cancelled"
    asleep = runner.request("closed", Task("long", "long", short))  # the page was only asleep
    assert asleep is not left and asleep.wait(10) and asleep.result == "result"
