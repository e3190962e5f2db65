"""How long work reports where it stands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, units done, units in all). The units are bytes or tensors: only the ratio matters."""

_QUIET_SECONDS = 1.0


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A bar on standard error for work that takes longer than a second; silent when nobody watches a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bars = Bars(*columns, console=console, transient=True, disable=not (console.is_terminal or console.is_jupyter))
    tasks: dict[str, TaskID] = {}
    started_at = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            for finished in tasks.values():
                bars.remove_task(finished)
            tasks.clear()
            tasks[stage] = bars.add_task(stage, total=total)
        if time.monotonic() - started_at > _QUIET_SECONDS:
            bars.start()
        bars.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        bars.stop()
