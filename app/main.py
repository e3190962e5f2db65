"""The dashboard's server: the app, its port, and the browser that opens on it."""

from __future__ import annotations

import socket
import threading
import uuid
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas  # noqa: F401  (complete before threads start: plotly uses it as soon as another thread begins to import it)
from dash import Dash
from werkzeug.serving import WSGIRequestHandler, make_server

from workbench.app import registry, requests, shell
from workbench.app.layout import INDEX, document
from workbench.app.models import ModelStore, load_model
from workbench.app.services import Services
from workbench.app.state import View
from workbench.errors import WorkbenchError

if TYPE_CHECKING:
    from workbench.analyses import Result

HOST = "127.0.0.1"
PORTS_TO_TRY = 100


def create_app(*, model: str = "demo", models: ModelStore | None = None) -> Dash:
    """The dashboard as a Dash app; ``app.server`` is its Flask server.

    Args:
        model: what it opens on: a name that ``workbench models`` lists, a folder, a GGUF file or a Hugging Face id.
        models: where models are loaded and kept; None makes a store of its own.
    """
    return app_of(services_on(model, models or ModelStore()))


def serve(
    *,
    model: str,
    device: str,
    port: int,
    open_browser: bool,
    say: Callable[[str], None],
    text: str | None = None,
    opened: Result | None = None,
) -> None:
    """Runs the dashboard on this machine until it is interrupted.

    Args:
        model: what it opens on, as for ``create_app``.
        device: where models run.
        port: where to listen; when it is taken, the next free port.
        say: told in words where the dashboard is.
        text: to open on; None takes a sample.
        opened: a saved result to open on.

    Raises:
        WorkbenchError: no free port.
    """
    listener = listen(port)
    url = f"http://{HOST}:{listener.getsockname()[1]}/"
    services = services_on(model, ModelStore(load=partial(load_model, device=device)))
    if text is not None:
        services.default = replace(services.default, text=services.texts.put(text, for_good=True))
    if opened is not None:
        services.default = replace(services.default, page="result", opened=services.opened.put(opened))
    server = make_server(
        HOST, port, app_of(services).server, threaded=True, request_handler=QuietHandler, fd=listener.fileno()
    )
    if listener.getsockname()[1] != port:
        say(f"Port {port} is taken; using {listener.getsockname()[1]}.")
    say(f"Attention Workbench is at {url} (Ctrl+C stops it)")
    # What the page asks for first is computed while the browser starts.
    services.jobs.request("start", registry.BY_NAME[services.default.page].tasks(services, services.default)[0])
    if open_browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    try:
        server.serve_forever()
    finally:
        server.server_close()
        listener.close()


def listen(port: int) -> socket.socket:
    """A socket that listens on ``port`` of this machine, or on the next free one."""
    for candidate in range(port, min(port + PORTS_TO_TRY, 65536)):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just left is free
        try:
            listener.bind((HOST, candidate))
            listener.listen(64)
            return listener
        except PermissionError:
            listener.close()
            raise WorkbenchError(f"port {port} needs administrator rights; choose one from 1024 up") from None
        except OSError:
            listener.close()
    raise WorkbenchError(f"no free port from {port} to {candidate}; name another one with --port")


class QuietHandler(WSGIRequestHandler):
    """Keeps connections open between requests, and logs none of them."""

    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


def services_on(model: str, models: ModelStore) -> Services:
    """What a server's pages work with, on which they open."""
    from workbench.loading.sources import list_models

    about = {}
    for known in list_models():
        missing = "" if known.fetched else ", fetched on first use"
        about[known.name] = f"{known.description}. {known.n_bytes / 1e6:,.0f} MB{missing}"
    return Services(models, View(model=model), about)


def app_of(services: Services) -> Dash:
    """The app whose pages work with these services."""
    app = Dash(
        "workbench.app",
        assets_folder=str(Path(__file__).parent / "assets"),
        title="Attention Workbench",
        update_title="",
        index_string=INDEX,
        on_error=shell.show_error,
        add_log_handler=False,
        prevent_initial_callbacks=True,
        suppress_callback_exceptions=True,  # a page's components come when it is opened
    )
    first = services.default
    app.layout = lambda: document(
        uuid.uuid4().hex, replace(first, text=services.texts.get(first.text)), services.known_models
    )
    shell.register(app, services)
    requests.guard(app, HOST)
    started = uuid.uuid4().hex
    app.server.add_url_rule("/_started", view_func=lambda: started)
    return app
