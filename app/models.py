"""The models in memory: a few, loaded once however many ask, and one computation at a time on each device."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.app.estimates import weigh_loading
from workbench.app.jobs import Job
from workbench.errors import WorkbenchError

Load = Callable[[str, Job, Callable[[], None]], Any]
IN_MEMORY = re.compile(r" \(in memory( \d+)?\)$")  # at the end of the names of models that no source names


def load_model(source: str, job: Job, make_room: Callable[[], None], *, device: str = "cpu") -> Any:
    """Loads what ``workbench models`` lists, a Hugging Face id, a folder or a GGUF file.

    Args:
        make_room: called once the model is found, before its weights are read.
    """
    from workbench.loading.pretrained import load_pretrained
    from workbench.loading.sources import CONVERTING
    from workbench.loading.weights import READING

    if not source:
        raise WorkbenchError("no model is named; choose one in the field “Model”")

    weigh_loading(job, source)

    def report(stage: str, done: int, total: int) -> None:
        if stage in (CONVERTING, READING):
            make_room()
        job.report(done / total if total else 0.0, stage)

    return load_pretrained(source, device=device, progress=report)


class ModelStore:
    """Keeps the ``capacity`` models that were used last, and those that it was given."""

    def __init__(self, capacity: int = 2, load: Load = load_model) -> None:
        self._capacity = capacity
        self._load = load
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._held: dict[str, Any] = {}
        self._n_held = 0
        self._loading: dict[str, threading.Lock] = {}
        self._devices: dict[str, threading.Lock] = {}
        self._running: dict[str, Job] = {}  # on each device
        self._lock = threading.RLock()

    def get(self, source: str, job: Job) -> Any:
        """The model of that name, folder, file or id; loads it where need be, with progress."""
        with self._lock:
            if source in self._held:
                return self._held[source]
            if IN_MEMORY.search(source):
                raise WorkbenchError(f"{source} is no longer in memory; show it again, or choose another model")
            loading = self._loading.setdefault(source, threading.Lock())
        with _held(loading, job, lambda: f"Waiting for {source}"):
            with self._lock:
                if source in self._models:
                    self._models.move_to_end(source)
                    return self._models[source]
            job.report(0.0, f"Loading {source}")
            model = self._load(source, job, self._make_room)
            with self._lock:
                self._make_room()
                self._models[source] = model
            return model

    def _make_room(self) -> None:
        """Lets go of models until there is place for one more: two large ones may not fit."""
        with self._lock:
            while len(self._models) >= self._capacity:
                self._models.popitem(last=False)

    def loaded(self, source: str) -> Any:
        """The model, if it is in memory, else None."""
        with self._lock:
            return self._held.get(source, self._models.get(source))

    def names(self) -> list[str]:
        """The models in memory."""
        with self._lock:
            return [*self._held, *self._models]

    def hold(self, model: Any) -> str:
        """Keeps a model that is in memory already until it is released. Returns its name, which no other ever gets:
        what was computed of a model before it was changed is not taken for what it gives now."""
        with self._lock:
            self._n_held += 1
            number = "" if self._n_held == 1 else f" {self._n_held}"
            name = f"{model.cfg.model_name} (in memory{number})"
            self._held[name] = model
            return name

    def release(self, name: str) -> None:
        """Lets go of a model that was held."""
        with self._lock:
            self._held.pop(name, None)

    @contextmanager
    def computing(self, model: Any, job: Job) -> Iterator[None]:
        """Holds the model's device for one computation. One that no page asks for any more makes room for it."""
        name = str(model.cfg.device)
        with self._lock:
            device = self._devices.setdefault(name, threading.Lock())

        def waiting() -> str:
            other = self._running.get(name)
            if other is None:
                return f"Waiting for {name}"
            if other.is_abandoned:
                other.stop()
            return f"Waiting for “{other.task.title}”, which runs on {name} ({other.fraction:.0%} done)"

        with _held(device, job, waiting):
            self._running[name] = job
            try:
                yield
            finally:
                del self._running[name]


@contextmanager
def _held(lock: threading.Lock, job: Job, waiting: Callable[[], str]) -> Iterator[None]:
    """Holds a lock. While it waits it reports what for, so that it can be cancelled."""
    while not lock.acquire(blocking=False) and not lock.acquire(timeout=0.1):
        job.report(0.0, waiting())
    try:
        yield
    finally:
        lock.release()
