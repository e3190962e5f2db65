"""Models are loaded once, a few are kept, and a device computes one thing at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from workbench.app.jobs import Cancelled, Job, Task
from workbench.app.models import ModelStore


def job() -> Job:
    return Job(Task("key", "title", lambda job: None))


def test_a_model_is_loaded_once_however_many_ask() -> None:
    loads: list[str] = []

    def load(source: str, job: Job) -> object:
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
    store = ModelStore(capacity=2, load=lambda source, job: held.append(len(store._models)) or source)
    for source in ("one", "two", "one", "three"):
        store.get(source, job())
    assert held == [0, 1, 1]
    assert store.loaded("one") and store.loaded("three") and store.loaded("two") is None


def test_a_model_that_fails_to_load_can_be_tried_again() -> None:
    outcomes = iter([OSError("gone"), "model"])

    def load(source: str, job: Job) -> object:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    store = ModelStore(load=load)
    with pytest.raises(OSError, match="gone"):
        store.get("m", job())
    assert store.get("m", job()) == "model"


def test_a_device_computes_one_thing_at_a_time_and_waiting_can_be_cancelled() -> None:
    store, waiting = ModelStore(), job()
    model = SimpleNamespace(cfg=SimpleNamespace(device="cpu"))

    def wait() -> None:
        with store.computing(model, waiting):
            raise AssertionError("the device is taken")

    with store.computing(model, job()), ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(wait)
        while not waiting.text:
            threading.Event().wait(0.005)
        assert waiting.text == "Waiting for another computation on cpu"
        waiting.stop()
        assert isinstance(outcome.exception(timeout=10), Cancelled)
    with store.computing(model, job()):
        pass
