"""One job a key, progress, cancellation, and results that are let go in the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from workbench.app import jobs
from workbench.app.jobs import Job, JobRunner, Task


class Gate:
    """Work that waits at a gate and counts its runs."""

    def __init__(self, result: object = "result") -> None:
        self.open = threading.Event()
        self.runs = 0
        self.result = result

    def __call__(self, job: Job) -> object:
        self.runs += 1
        job.report(0.5, "half way")
        while not self.open.wait(0.005):
            job.check()
        return self.result


def task(key: str, work: object) -> Task:
    return Task(key, f"title of {key}", work)  # type: ignore[arg-type]


def ended(job: Job) -> Job:
    assert job.wait(10)
    return job


def test_many_clicks_and_tabs_start_one_job() -> None:
    runner, gate = JobRunner(), Gate()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: runner.request(f"tab {i % 3}", task("same", gate)), range(24)))
    gate.open.set()
    assert {id(job) for job in found} == {id(found[0])}
    assert ended(found[0]).state == "done" and found[0].result == "result"
    assert gate.runs == 1
    assert runner.request("tab 9", task("same", gate)).result == "result"
    assert gate.runs == 1


def test_progress_is_seen_while_it_runs() -> None:
    runner, gate = JobRunner(), Gate()
    job = runner.request("tab", task("key", gate))
    assert not job.wait(0.05)
    assert (job.state, job.fraction, job.text) == ("running", 0.5, "half way")
    assert runner.result("key") is None
    gate.open.set()
    assert ended(job).state == "done" and runner.result("key") == "result"


def test_cancel_ends_the_work_and_the_page_is_told_until_it_asks_again() -> None:
    runner, gate = JobRunner(), Gate()
    job = runner.request("tab", task("key", gate))
    runner.cancel("tab")
    assert ended(job).state == "cancelled"
    assert runner.request("tab", task("key", gate)).state == "cancelled"
    assert gate.runs == 1
    gate.open.set()
    assert ended(runner.request("tab", task("key", gate), again=True)).state == "done"


def test_cancel_leaves_what_another_open_page_wants() -> None:
    runner, gate = JobRunner(), Gate()
    job = runner.request("one", task("key", gate))
    assert runner.request("two", task("key", gate)) is job
    runner.cancel("one")
    assert not job.wait(0.05)
    assert runner.request("two", task("key", gate)) is job
    runner.cancel("two")
    assert ended(job).state == "cancelled"


def test_a_closed_page_keeps_no_job_from_being_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ALIVE_SECONDS", 0.0)
    runner, gate = JobRunner(), Gate()
    job = runner.request("closed", task("key", gate))
    runner.request("open", task("key", gate))
    runner.cancel("open")
    assert ended(job).state == "cancelled"


def test_moving_on_cancels_what_is_left_behind_and_coming_back_starts_it_anew() -> None:
    runner, first, second = JobRunner(), Gate("first"), Gate("second")
    left = runner.request("tab", task("first", first))
    runner.request("tab", task("second", second))
    assert ended(left).state == "cancelled"
    first.open.set()
    assert ended(runner.request("tab", task("first", first))).result == "first"


def test_a_failure_is_kept_until_it_is_asked_for_again() -> None:
    outcomes = iter([ValueError("no"), "yes"])

    def work(job: Job) -> object:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    runner = JobRunner()
    job = ended(runner.request("tab", task("key", work)))
    assert job.state == "failed" and str(job.error) == "no"
    assert runner.request("tab", task("key", work)) is job
    assert ended(runner.request("tab", task("key", work), again=True)).result == "yes"


def test_only_the_latest_results_are_kept() -> None:
    runner = JobRunner(keep=3)
    for number in range(6):
        ended(runner.request("tab", task(str(number), lambda job: "result")))
        runner.request("tab", task("0", lambda job: "result"))  # used again and again, so it stays
    kept = [number for number in range(6) if runner.result(str(number)) is not None]
    assert 0 in kept and 5 in kept and len(kept) <= 4
