"""What takes much asks before it starts, once for all who ask."""

from __future__ import annotations

import pytest

from workbench import HookedTransformer
from workbench import estimates as core
from workbench.app import estimates, models
from workbench.app.estimates import AsksFirst
from workbench.app.jobs import Job, Task
from workbench.app.models import ModelStore
from workbench.app.services import Services
from workbench.app.shell import progress_of
from workbench.app.state import View
from workbench.cli import main
from workbench.loading import sizes

TINY = View(model="tiny", text="a b c a b", page="lens")


@pytest.fixture
def services(tiny: HookedTransformer) -> Services:
    return Services(ModelStore(load=lambda source, job, make_room: tiny), TINY, {})


def until_settled(services: Services, **how: bool) -> tuple:
    while True:
        found = progress_of(services, TINY, "page", "", **({"again": False} | how))
        if found[3] is not False:  # the progress bar is hidden
            return found
        how = {}


def test_long_work_asks_and_starts_once_it_is_agreed_to(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "LONGEST_SECONDS", 0.0)
    alert = until_settled(services)[2]
    assert "message-question" in alert.className and "Logit lens will take about" in str(alert)
    assert "of memory, of which" in str(alert) and until_settled(services)[2].title == "This takes much"
    assert "message-question" in until_settled(services, again=True)[2].className  # Analyse alone is no agreement
    ended = until_settled(services, again=True, agreed=True)
    while ended[2]:  # the page's other tasks ask for themselves
        ended = until_settled(services, again=True, agreed=True)
    assert ended[0] and ended[3] is True


def test_two_clicks_on_run_it_start_one_job(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "LONGEST_SECONDS", 0.0)
    runs: list[bool] = []

    def work(job: Job) -> str:
        runs.append(job.agreed)
        if not job.agreed:
            raise AsksFirst("much")
        return "done"

    task = Task("key", "title", work)
    services.jobs.request("page", task).wait(10)
    one = services.jobs.request("page", task, again=True, agreed=True)
    other = services.jobs.request("page", task, again=True, agreed=True)
    assert one is other and one.wait(10) and one.result == "done" and runs == [False, True]


def test_short_work_says_what_it_takes_and_does_not_ask(tiny: HookedTransformer) -> None:
    job = Job(Task("key", "Logit lens", lambda job: None))
    estimates.weigh(job, "cpu", "shorten the text", core.Estimate(n_bytes=2.5e6, calls=3000))
    assert job.expected == "about 3 s, 2.5 MB"
    estimates.weigh(job, "cpu", "shorten the text", None)  # of an analysis of which nothing is known
    with pytest.raises(AsksFirst, match="Logit lens will take about less than 1 s and 1,000,000 GB of memory"):
        estimates.weigh(job, "cpu", "shorten the text", core.Estimate(n_bytes=1e15))


@pytest.mark.parametrize(("free", "said"), [(6e6, "are free. Load"), (3e6, "are free, so it does not fit. Load")])
def test_a_model_that_would_fill_the_memory_asks_before_it_is_loaded(
    free: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "free_memory", lambda device: free)
    job, rooms = Job(Task("key", "title", lambda job: None)), list[str]()
    with pytest.raises(
        AsksFirst, match=f"The weights of demo take 4.1 MB of memory, of which {free / 1e6:.1f} MB {said}"
    ):
        models.load_model("demo", job, lambda: rooms.append("too early"))
    job.agreed = True
    assert models.load_model("demo", job, lambda: rooms.append("made")).cfg.model_name == "demo"
    assert set(rooms) == {"made"}


def test_the_command_line_says_so_of_a_model_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "workbench: the weights of demo take 4.1 MB of memory, but 1.0 MB are free\n"
    arguments = ["heads", "demo", "--prompt", "Mara met Mara."]
    assert main(arguments) == 0 and said not in capsys.readouterr().err
    monkeypatch.setattr(sizes, "free_memory", lambda: 1e6)
    assert main(arguments) == 0 and said in capsys.readouterr().err
