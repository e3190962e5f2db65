"""A folder of results that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.paths import expand_home


@contextmanager
def output_folder(path: str | os.PathLike) -> Iterator[Path]:
    """A folder to write into, whose files move to ``path`` once the block has ended well, replacing their namesakes.

    That ``path`` cannot be written is found out before the block runs; where the block fails, nothing is left behind.

    Raises:
        WorkbenchError: ``path`` is a file, or cannot be written.
    """
    target = expand_home(path)
    parent = target
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise WorkbenchError(f"cannot write into {target}: {parent} is a file; name a folder")
    try:
        partial = Path(tempfile.mkdtemp(prefix=".workbench-", dir=parent))
    except OSError as error:
        raise _unwritable(target, error) from None
    try:
        yield partial
        try:
            target.mkdir(parents=True, exist_ok=True)
            for file in sorted(partial.iterdir()):
                file.replace(target / file.name)
        except OSError as error:
            raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unwritable(target: Path, error: OSError) -> WorkbenchError:
    return WorkbenchError(f"cannot write into {target}: {error.strerror or error}; name another folder with --out")
