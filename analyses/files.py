"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping
from pathlib import Path


def write_together(files: Mapping[Path, bytes]) -> None:
    """Writes every file; all are complete before any takes its name, and what fails leaves nothing behind.

    Raises:
        OSError: a file cannot be written.
    """
    for path in files:
        if not path.parent.is_dir():
            raise FileNotFoundError(f"cannot write {path}: there is no folder {path.parent}")
    temporary = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex}") for path in files}
    try:
        for path, content in files.items():
            temporary[path].write_bytes(content)
        for path, written in temporary.items():
            written.replace(path)
    finally:
        for written in temporary.values():
            with contextlib.suppress(OSError):
                written.unlink()
