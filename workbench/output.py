"""A folder of results that appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from uuid import uuid4

from workbench.errors import WorkbenchError
from workbench.paths import expand_home


@contextmanager
def output_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A folder to write into, whose files move to ``path`` once the block has ended well, replacing their namesakes.

    ``path`` is made and written to before the block runs, so that whatever forbids that is found out at once; where
    the block fails, nothing is left behind.

    Raises:
        WorkbenchError: ``path`` cannot be written.
    """
    target = expand_home(path)
    missing = [folder for folder in (target, *target.parents) if not os.path.lexists(folder)]
    partial = target / f".workbench-{uuid4().hex}"
    with ExitStack() as undo:
        undo.callback(_remove_empty, missing)
        undo.callback(rmtree, partial, ignore_errors=True)  # before it is made: a signal may come at any moment
        try:
            target.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        except OSError as error:
            raise _unwritable(target, error) from None
        yield partial
        try:
            for file in sorted(partial.iterdir()):
                file.replace(target / file.name)
        except OSError as error:
            raise _unwritable(target, error) from None


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # it holds something, or was never made
            folder.rmdir()


def _unwritable(target: Path, error: OSError) -> WorkbenchError:
    reason = error.strerror or str(error)
    for place in (target, *target.parents):
        if os.path.lexists(place) and not place.is_dir():
            reason = f"{place} is {'a link that leads nowhere' if not place.exists() else 'a file'}"
    return WorkbenchError(f"cannot write into {target}: {reason}; name another folder with --out")
