"""What is going to take long or much memory asks before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.app.jobs import Job
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.estimates import Estimate

LONGEST_SECONDS = 60.0  # what takes longer asks first
LARGEST_SHARE = 0.5  # of the free memory, likewise


class AsksFirst(WorkbenchError):
    """What a job would take, which nobody has agreed to yet."""


def weigh(job: Job, device: str, to_take_less: str, estimate: Estimate | None) -> None:
    """Says on the job what it is going to take, as far as that is known.

    Args:
        to_take_less: what the user can do beside choosing a smaller model; empty for nothing.

    Raises:
        AsksFirst: that is much, and nobody has agreed to it.
    """
    from workbench.estimates import bytes_in_words, free_memory, measured_speed, seconds_in_words

    if estimate is None:
        return
    seconds, free = estimate.seconds(measured_speed(device)), free_memory(device)
    time, memory = seconds_in_words(seconds), bytes_in_words(estimate.n_bytes)
    job.expected = f"about {time}, {memory}"
    if job.agreed or (seconds <= LONGEST_SECONDS and estimate.n_bytes <= LARGEST_SHARE * free):
        return
    ways = "Run it all the same", to_take_less, "choose a smaller model"
    raise AsksFirst(
        f"{job.task.title} will take about {time} and {memory} of memory, of which {bytes_in_words(free)} are free. "
        f"{', or '.join(filter(None, ways))}."
    )


def weigh_loading(job: Job, source: str) -> None:
    """As ``weigh``, of a model's weights, where its files are on this machine."""
    from workbench.estimates import bytes_in_words, free_memory
    from workbench.loading.sizes import weights_bytes

    needed = weights_bytes(source)
    free = free_memory("cpu")  # where weights are converted, wherever they go then
    if job.agreed or needed is None or needed <= LARGEST_SHARE * free:
        return
    fits = "" if needed <= free else ", so it does not fit"
    raise AsksFirst(
        f"The weights of {source} take {bytes_in_words(needed)} of memory, of which {bytes_in_words(free)} are "
        f"free{fits}. Load it all the same, or choose a smaller model."
    )
