"""The dashboard within a notebook: on a model in memory, on one by its name, or on a result."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from werkzeug.serving import make_server

from workbench.app.main import HOST, QuietHandler, app_of, listen, services_on
from workbench.app.models import ModelStore
from workbench.app.state import View, from_query, to_query
from workbench.errors import WorkbenchError

FIRST_PORT = 8060  # apart from that of `workbench app`


@dataclass(eq=False)
class Dashboard:
    """An open dashboard.

    Args:
        url: where it is, on this machine.
    """

    url: str
    _leave: Callable[[], None] = field(repr=False)
    _closed: bool = field(default=False, repr=False)

    def close(self) -> None:
        """Lets go of the model. The server stops with the last dashboard."""
        if not self._closed:
            self._closed = True
            self._leave()


def show(shown: Any, *, text: str | None = None, height: int = 900, **view: Any) -> Dashboard:
    """Opens the dashboard on a model or a result: in Jupyter below the cell, elsewhere its address is printed.

    Its server runs in a thread of this process, listens on this machine only, and serves all dashboards of the process.
    A model in memory is used as it is, hooks included, whenever a page is drawn; do not run it in a cell meanwhile.

    Args:
        shown: a HookedTransformer in memory, what ``workbench app --model`` takes (a name, a folder, a GGUF file or a
            Hugging Face id), or a result.
        text: to begin with; None takes a sample.
        height: of the frame below the cell, in pixels.
        view: where to begin, named as the fields of ``workbench.app.state.View``, such as page="pattern", layer=2,
            head=0.

    Raises:
        ValueError: something else to show, or a view that there is not.
        WorkbenchError: no free port, or a result that lacks what results of its kind hold.
    """
    from workbench.analyses import Result

    is_model = hasattr(shown, "run_with_statistics") and not isinstance(shown, type)
    if not is_model and not isinstance(shown, (str, PathLike, Result)):
        raise ValueError(f"give a HookedTransformer, the name of one, or a result; got {type(shown).__name__}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}")
    _check_view(view)
    server = _Server.running()
    fields = dict(view)
    if text is not None:
        fields["text"] = server.services.texts.put(text)
    if is_model:
        fields["model"] = server.services.models.hold(shown)
    elif isinstance(shown, Result):
        try:
            fields |= {"page": "result", "opened": server.services.opened.put(shown)}
        except WorkbenchError:
            server.leave(None)
            raise
    else:
        fields["model"] = fspath(shown)
    url = f"{server.address}{to_query(View(**fields))}"
    _display(url, height)
    return Dashboard(url, lambda: server.leave(fields["model"] if is_model else None))


def _check_view(view: dict[str, Any]) -> None:
    """Checks the fields as those of a link are checked."""
    known = [name.name for name in dataclasses.fields(View) if name.name not in ("model", "text", "opened")]
    if unknown := sorted(set(view) - set(known)):
        raise ValueError(f"there is no {unknown[0]} in a view; there are {', '.join(known)}")
    if problems := from_query(to_query(View(**view)), View())[1]:
        raise ValueError(problems[0])


class _Server:
    """The process's server, and how many dashboards need it."""

    _current: _Server | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._n_open = 0
        self._listener = listen(FIRST_PORT)
        port = self._listener.getsockname()[1]
        self.address = f"http://{HOST}:{port}/"
        self.services = services_on("demo", ModelStore())
        self._server = make_server(
            HOST, port, app_of(self.services).server, threaded=True, request_handler=QuietHandler,
            fd=self._listener.fileno(),
        )  # fmt: skip
        threading.Thread(target=self._server.serve_forever, name="dashboard", daemon=True).start()

    @classmethod
    def running(cls) -> _Server:
        """The server, started if it does not run, for one dashboard more."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current._n_open += 1
            return cls._current

    def leave(self, model: str | None) -> None:
        """One dashboard less, and perhaps a model."""
        if model is not None:
            self.services.models.release(model)
        with self._lock:
            self._n_open -= 1
            if self._n_open:
                return
            _Server._current = None
        self._server.shutdown()
        self._server.server_close()
        self._listener.close()


def _display(url: str, height: int) -> None:
    if not _in_notebook():
        sys.stdout.write(f"Attention Workbench is at {url}\n")
        return
    from IPython.display import IFrame, display

    display(IFrame(url, width="100%", height=height))


def _in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")
