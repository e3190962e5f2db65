"""The browser that turns figures into pictures: found when first needed, and kept until the process ends."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import plotly.graph_objects as go

from workbench.errors import WorkbenchError

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60  # for the browser to start, and for each picture


class ExportError(WorkbenchError):
    """A figure that cannot become a picture here; the message says what is missing, and what needs nothing."""


def find_browser() -> str:
    """The path of a Chromium or Chrome: the variable CHROMIUM, a known name on PATH, or a usual place.

    Raises:
        ExportError: there is none, or kaleido, which talks to it, is not installed.
    """
    instead = "or write .html, which needs neither and whose camera button saves an SVG"
    if find_spec("kaleido") is None:
        raise ExportError(
            f"SVG, PDF and PNG need kaleido: pip install 'attention-workbench[export]', and a Chromium; {instead}"
        )
    if named := os.environ.get("CHROMIUM"):
        if path := shutil.which(named):
            return path
        raise ExportError(
            f"CHROMIUM is {named}, which is no program that can be run; set it to the path of a Chromium or Chrome, or "
            f"unset it to have one looked for; {instead}"
        )
    from choreographer.browsers.chromium import Chromium  # knows where macOS and Windows keep it

    if path := next(filter(None, map(shutil.which, NAMES)), None) or Chromium.find_browser(skip_local=False):
        return path
    raise ExportError(
        f"SVG, PDF and PNG need a Chromium or Chrome, and none is here (looked for {', '.join(NAMES)}); install one "
        f"(Debian, Ubuntu: apt install chromium), set the variable CHROMIUM to its path, {instead}"
    )


def pictures(figures: Sequence[go.Figure], options: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """The files' contents; the options of each are its format, width and height in pixels, and scale.

    Raises:
        ExportError: there is no browser, or it fails.
    """
    path = find_browser()
    with _lock:
        global _browser
        if _browser is None or _browser.path != path:
            close()
            _browser = _Browser(path)
        try:
            return [_browser.picture(figure, option) for figure, option in zip(figures, options, strict=True)]
        except (Exception, KeyboardInterrupt) as error:  # it may be in any state, so the next call starts afresh
            close()
            if isinstance(error, KeyboardInterrupt | MemoryError):
                raise
            said = next(iter(str(part).strip() for part in error.args), "") or type(error).__name__
            reason = f"no answer in {SECONDS} s" if isinstance(error, TooLate) else said.rstrip(".")
            raise ExportError(
                f"{path} could not draw the figure ({reason}); set CHROMIUM to another Chromium or Chrome, or "
                "write .html"
            ) from error


def close() -> None:
    """Ends the browser, if one runs."""
    global _browser
    atexit.unregister(close)
    if _browser is not None:
        _browser.close()
        _browser = None


class _Browser:
    """A browser on an event loop of its own, so that it serves notebooks, threads and scripts alike.

    kaleido has a server for that, but whoever calls it waits for ever once the browser is gone.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._kaleido: Any = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="figure export", daemon=True).start()

    def picture(self, figure: go.Figure, option: Mapping[str, Any]) -> bytes:
        if self._kaleido is None:
            self._kaleido = self._wait(self._open())
            atexit.register(close)  # only now, so as to run before Python removes the browser's temporary folder
        return self._wait(self._kaleido.calc_fig(figure.to_dict(), opts=dict(option)))

    def close(self) -> None:
        with suppress(Exception):  # it is being given up, whatever it says
            if self._kaleido is not None:
                self._wait(self._kaleido.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _open(self) -> Any:
        from kaleido import Kaleido

        kaleido = Kaleido(path=self.path, timeout=SECONDS, mathjax=False)  # MathJax would come from the network
        await kaleido.open()
        return kaleido

    def _wait(self, coroutine: Any, seconds: float = SECONDS) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)


_browser: _Browser | None = None
_lock = threading.Lock()
