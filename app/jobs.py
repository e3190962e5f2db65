"""Work that takes longer than a click: one thread a job, progress, cancellation, and the latest results.

A job is named by its key, and the same key is the same computation: however many clicks or tabs ask for it, it runs
once. A session (one open page) wants one job at a time; a job that no session wants any more is cancelled. One whose
page was closed goes on as long as it is in nobody's way.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

ALIVE_SECONDS = 5.0  # a page that has not asked for so long is closed or asleep; its job gives way to those of others
FORGET_SECONDS = 3600.0


class Cancelled(Exception):
    """Nobody wants the work's result any more."""


@dataclass(frozen=True)
class Task:
    """A computation by name. ``work`` runs in a thread of its own, gets its job and reports to it.

    A page goes on without an ``optional`` one that fails.
    """

    key: str
    title: str
    work: Callable[[Job], Any] = field(compare=False, repr=False)
    optional: bool = False


@dataclass(eq=False)
class Job:
    """One run of a task, and where it stands."""

    task: Task
    state: Literal["running", "done", "failed", "cancelled"] = "running"
    fraction: float = 0.0
    text: str = ""
    agreed: bool = False  # to whatever it takes
    expected: str = ""  # what it is going to take, in words
    result: Any = field(default=None, repr=False)
    error: Exception | None = None
    started: float = field(default_factory=time.monotonic)
    asked: float = field(default_factory=time.monotonic)  # when a page last asked for it
    _stop: threading.Event = field(default_factory=threading.Event, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.started

    @property
    def is_abandoned(self) -> bool:
        """Whether no page has asked for it for some seconds."""
        return time.monotonic() - self.asked >= ALIVE_SECONDS

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._stop.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for the end, but no longer than so many seconds. True when it has ended."""
        return self._ended.wait(seconds)

    def run(self) -> None:
        try:
            self.result = self.task.work(self)
            self.state = "done"
        except Cancelled:
            self.state = "cancelled"
        except Exception as error:  # shown to the user; the thread has nobody else to tell
            self.error = error
            self.state = "failed"
        finally:
            self._ended.set()

    def stop(self) -> None:
        """Asks the work to end, which it does at its next report or check."""
        self._stop.set()

    def report(self, fraction: float, text: str) -> None:
        """Called by the work: the share done between 0 and 1, and what is being done. Raises Cancelled as ``check``."""
        self.check()
        self.fraction, self.text = min(max(fraction, 0.0), 1.0), text

    def check(self) -> None:
        """Raises Cancelled where nobody wants the result any more."""
        if self._stop.is_set():
            raise Cancelled


@dataclass
class _Wish:
    """What a session wants, when it last asked for it, and whether its user cancelled it."""

    key: str
    asked: float
    declined: bool = False


class JobRunner:
    """Runs tasks and keeps the ended jobs of the ``keep`` keys that were asked for last."""

    def __init__(self, keep: int = 48) -> None:
        self._keep = keep
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._wishes: dict[str, _Wish] = {}
        self._lock = threading.Lock()

    def request(self, session: str, task: Task, *, again: bool = False, agreed: bool = False) -> Job:
        """The job of a task, started if there is none. What the session wanted before is let go.

        Args:
            again: start afresh what failed or what this session cancelled; otherwise such a job comes back as it is.
            agreed: start it even if it takes much.
        """
        with self._lock:
            now = time.monotonic()
            before = self._wishes.get(session)
            if before is not None and before.key == task.key and before.declined and not again:
                return Job(task, state="cancelled")
            self._wishes[session] = _Wish(task.key, now)
            if before is not None and before.key != task.key:
                self._stop_if_unwanted(before.key, now)
            job = self._jobs.get(task.key)
            if job is None or (job.is_stopping and job.state != "done") or (again and job.state == "failed"):
                job = self._jobs[task.key] = Job(task, agreed=agreed)
                threading.Thread(target=job.run, name=task.title, daemon=True).start()
            job.asked = now
            self._jobs.move_to_end(task.key)
            self._forget(now)
            return job

    def cancel(self, session: str) -> None:
        """Lets go of what the session wants. It stops, unless another open page wants it too."""
        with self._lock:
            wish = self._wishes.get(session)
            if wish is not None:
                wish.declined = True
                self._stop_if_unwanted(wish.key, time.monotonic())

    def error(self, key: str) -> Exception | None:
        """What a job failed with, or None where none failed."""
        with self._lock:
            job = self._jobs.get(key)
            return job.error if job is not None and job.state == "failed" else None

    def result(self, key: str) -> Any:
        """The result of a job that is done, or None where there is none (any more)."""
        with self._lock:
            job = self._jobs.get(key)
        return job.result if job is not None and job.state == "done" else None

    def _stop_if_unwanted(self, key: str, now: float) -> None:
        wishes = self._wishes.values()
        wanted = any(wish.key == key and not wish.declined and now - wish.asked < ALIVE_SECONDS for wish in wishes)
        job = self._jobs.get(key)
        if not wanted and job is not None and job.state == "running":
            job.stop()
            del self._jobs[key]

    def _forget(self, now: float) -> None:
        ended = [key for key, job in self._jobs.items() if job.state != "running"]
        for key in ended[: max(len(ended) - self._keep, 0)]:
            del self._jobs[key]
        self._wishes = {name: wish for name, wish in self._wishes.items() if now - wish.asked < FORGET_SECONDS}
