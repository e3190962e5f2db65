"""A folder of results that appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

from workbench.errors import WorkbenchError
from workbench.paths import expand_home


@dataclass
class Output:
    """Where results are written.

    Args:
        target: where they will be.
        partial: where they are gathered.
        advice: what to do where they cannot be written.
        replaced: the names of the earlier files that they have replaced, once they have moved.
    """

    target: Path
    partial: Path
    advice: str
    replaced: list[str] = field(default_factory=list)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises WorkbenchError, which names the target, for whatever the operating system refuses in the block."""
        try:
            yield
        except (OSError, WorkbenchError) as error:
            cause = error.__cause__ if isinstance(error, WorkbenchError) else error
            if not isinstance(cause, OSError):
                raise
            raise WorkbenchError(
                f"cannot write into {self.target}: {_reason(self.target, cause)}; {self.advice}"
            ) from None


@contextmanager
def output_folder(path: str | os.PathLike, *, advice: str = "name another folder with --out") -> Iterator[Output]:
    """A folder to write into, whose files move to ``path`` once the block has ended well, replacing their namesakes.

    ``path`` is made and written to before the block runs, so that whatever forbids that is found out at once; where
    the block fails, or a folder stands where a file would go, nothing is left behind and nothing replaced.

    Raises:
        WorkbenchError: ``path`` cannot be written.
    """
    target = expand_home(path)
    missing = [folder for folder in (target, *target.parents) if not os.path.lexists(folder)]
    output = Output(target, target / f".workbench-{uuid4().hex}", advice)
    with ExitStack() as undo:
        undo.callback(_remove_empty, missing)
        undo.callback(rmtree, output.partial, ignore_errors=True)  # before it is made: a signal may come at any moment
        with output.writing():
            target.mkdir(parents=True, exist_ok=True)
            output.partial.mkdir()
        yield output
        with output.writing():
            files = sorted(output.partial.iterdir())
            there = [file.name for file in files if os.path.lexists(target / file.name)]
            for name in there:
                if (target / name).is_dir() and not (target / name).is_symlink():
                    raise WorkbenchError(f"{target / name} is a folder; move it away, or {advice}")
            for file in files:
                file.replace(target / file.name)
        output.replaced += there


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it holds something, or was never made
            folder.rmdir()


def _reason(target: Path, error: OSError) -> str:
    for place in (target, *target.parents):
        if os.path.lexists(place) and not place.is_dir():
            return f"{place} is {'a link that leads nowhere' if not place.exists() else 'a file'}"
    return error.strerror or str(error)
