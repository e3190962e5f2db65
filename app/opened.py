"""Results that were saved and are opened again: their files come in, and nothing is written to disk."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.analyses import Result

MOST_BYTES = 32_000_000  # of the chosen files; the page knows it too (export.js)
MOST_UNPACKED = 1_000_000_000  # of what they hold
SUFFIXES = (".json", ".npz")


class OpenedResults:
    """The results that were opened last, by kind and digest."""

    def __init__(self, keep: int = 8) -> None:
        self._keep = keep
        self._results: OrderedDict[str, Result] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, result: Result) -> str:
        """Keeps a result. Returns its name, which begins with its kind.

        Raises:
            WorkbenchError: it lacks what results of its kind hold, as one from another version may.
        """
        try:
            result.summary()
            result.tables()
        except Exception as error:
            raise WorkbenchError(
                f"the result lacks what one of the kind {result.kind} holds here ({error!r}); run its analysis again"
            ) from error
        name = f"{result.kind}.{hashlib.sha256(result.to_files()['.json']).hexdigest()[:16]}"
        with self._lock:
            self._results[name] = result
            self._results.move_to_end(name)
            while len(self._results) > self._keep:
                self._results.popitem(last=False)
        return name

    def get(self, name: str) -> Result:
        """The result of that name.

        Raises:
            WorkbenchError: this server does not hold it (any more).
        """
        with self._lock:
            if name not in self._results:
                raise WorkbenchError("This server no longer holds the opened result; open its files again.")
            return self._results[name]


def read_files(files: Mapping[str, bytes]) -> Result:
    """The result that was saved in these files: a ``.json`` and its ``.npz``, or the ``.zip`` that “Export” gives.

    Raises:
        WorkbenchError: other files, too much in them, or what is no result; says what to choose instead.
    """
    from workbench.analyses.result import parse_result

    if sum(map(len, files.values())) > MOST_BYTES:
        raise WorkbenchError(
            f"the files have more than {MOST_BYTES // 10**6} MB; start the dashboard with: workbench app --open FILE"
        )
    found: dict[str, tuple[str, bytes]] = {}
    for name, content in files.items():
        parts = _unpacked(name, content) if name.lower().endswith(".zip") else {name: content}
        for part, inside in parts.items():
            suffix = part[-5:].lower() if part.lower().endswith(".json") else part[-4:].lower()
            if suffix in SUFFIXES:
                if suffix in found:
                    raise WorkbenchError(f"there are several {suffix} files; choose those of one result")
                found[suffix] = part, inside
    if set(found) != set(SUFFIXES):
        raise WorkbenchError(
            "a saved result is a .json and an .npz file, or the .zip of both that “Export” gives; choose both files"
        )
    (described, description), (stored, arrays) = found[".json"], found[".npz"]
    _unpacked(stored, arrays, read=False)
    return parse_result(description, arrays, names=(described, stored))


def _unpacked(name: str, content: bytes, *, read: bool = True) -> dict[str, bytes]:
    """What a zip archive holds, by name; its size is looked at before anything is unpacked."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(part.file_size for part in archive.infolist()) > MOST_UNPACKED:
                raise WorkbenchError(f"{name} holds more than {MOST_UNPACKED // 10**9} GB")
            return {part.filename: archive.read(part) for part in archive.infolist()} if read else {}
    except WorkbenchError:
        raise
    except Exception as error:  # of zipfile and of every way to compress: the file may hold anything
        raise WorkbenchError(f"{name} is damaged, or no saved result: {error}") from error
