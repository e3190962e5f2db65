"""The server listens on this machine only, answers only its own page, and finds a free port."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from workbench.app import create_app
from workbench.app.main import listen


def test_a_taken_port_gives_the_next_free_one() -> None:
    with listen(18500) as first:
        port = first.getsockname()[1]
        with listen(port) as second:
            assert second.getsockname()[1] > port
            assert second.getsockname()[0] == "127.0.0.1"
            with socket.create_connection(second.getsockname(), timeout=5):
                pass


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8050"}, 200),
        ({"Host": "localhost:8050"}, 200),
        ({"Host": "127.0.0.1:8050", "Origin": "http://127.0.0.1:8050"}, 200),
        ({"Host": "evil.example:8050"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "127.0.0.1:8050", "Origin": "http://evil.example"}, 403),
        ({"Host": "127.0.0.1:8050", "Origin": "null"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused(headers: dict[str, str], status: int) -> None:
    client = create_app().server.test_client()
    assert client.get("/", headers=headers).status_code == status


def test_the_page_names_nothing_outside() -> None:
    index = create_app().server.test_client().get("/", headers={"Host": "localhost"}).text
    assert "https://" not in index and "http://" not in index.replace("http://www.w3.org/2000/svg", "")


def test_no_thread_has_pandas_left_to_import() -> None:
    """A page that is asked for while the first job's thread imports pandas would find half of it, and fail."""
    code = "import sys, workbench.app.main; assert hasattr(sys.modules['pandas'], 'Series')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
