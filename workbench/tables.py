"""Tables on standard output."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    import pandas as pd

UNPRINTED = {"prefix_matching_latest", "prefix_matching_per_entry", "relative_entropy", "key_concentration"}


class Table(NamedTuple):
    """What ``print_table`` takes: titles of columns, the rows' cells, which columns are aligned on the right, and what
    is said below."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    note: str = ""


def scores_to_print(frame: pd.DataFrame, scores: Sequence[str], sort: str | None) -> list[str]:
    """Those of the scores that some head has a value of, the one to sort by first: ``sort``, or the first.

    Raises:
        WorkbenchError: no head has a value of ``sort``.
    """
    known = [score for score in scores if score in frame and frame[score].notna().any()]
    first = sort or known[0]
    if first not in known:
        raise WorkbenchError(
            f"on these tokens no head of this model has a value of {first}; sort by {', '.join(known)}"
        )
    return [first, *(score for score in known if score not in UNPRINTED | {first})]


def heads_table(frame: pd.DataFrame, titles: Mapping[str, str], n: int) -> Table:
    """The ``n`` heads with the largest values of the first score; ``titles`` are the scores' columns, in order."""
    shown = frame.sort_values(next(iter(titles)), ascending=False, kind="stable").head(n)
    rows = [(head_name(row), *(number(row[score]) for score in titles)) for _, row in shown.iterrows()]
    return Table(("Head", *titles.values()), rows, list(titles.values()), left_out(len(rows), len(frame), "heads"))


def left_out(shown: int, known: int, what: str) -> str:
    """Says that a table does not show all; empty where it does."""
    return f"{shown} of {known} {what}; --top {known} prints all." if shown < known else ""


def head_name(row: pd.Series) -> str:
    return f"L{row['layer']:.0f}H{row['head']:.0f}"


def print_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), note: str = ""
) -> None:
    """A table with a line for each row and the note below; the columns named in ``right`` are aligned there."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not sys.stdout.isatty():
        console.width = 100_000  # a file or pipe has no width of its own: one line a row, and nothing is folded
    sys.stdout.flush()  # by us and not by rich, as below: a reader who leaves early is our business
    with console.capture() as printed:
        console.print(table)
    sys.stdout.write(printed.get() + (f"{note}\n" if note else ""))


def number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:z.3f}"
