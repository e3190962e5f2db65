"""What every test relies on: no top-level ``kernels``, no model hub, and a real browser for the app's tests."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

ROOT = Path(__file__).parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is first imported
if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores: one thread each
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is first imported: its kernels then run without a GPU


def pytest_addoption(parser: pytest.Parser) -> None:
    message = "write the measured errors of every family that the tests load into ARCHITECTURE.md"
    parser.addoption("--write-family-table", action="store_true", help=message)


def pytest_configure() -> None:
    if any(Path(entry or ".").resolve() == ROOT for entry in sys.path):
        raise pytest.UsageError(
            "the repository root is on sys.path, where its folder `kernels` passes for Hugging Face's package of that "
            "name: run `pytest`, not `python -m pytest`, or set PYTHONSAFEPATH=1"
        )


def chromium() -> str:
    """The browser's path: the variable CHROMIUM, or the first known name on PATH. Without one the test skips."""
    if found := os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None):
        return found
    message = f"no browser: install one (`apt install chromium`) or set CHROMIUM to its path; looked for {BROWSERS}"
    if os.environ.get("REQUIRE_BROWSER") == "1":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium."""
    executable = chromium()
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to run as root inside its sandbox
    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield instance
        instance.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[[], Page]]:
    """Opens a page in a session of its own (its own cookies and storage), as another user would.

    Every request that leaves 127.0.0.1 is aborted, and fails the test when it ends.
    """
    outside: list[str] = []

    def guard(route: Route) -> None:
        if urlsplit(route.request.url).hostname == "127.0.0.1":
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    contexts = []

    def open_page() -> Page:
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        contexts.append(context)
        context.route("**/*", guard)
        return context.new_page()

    yield open_page
    for context in contexts:
        context.close()
    assert not outside, f"the page asked the outside world for {outside}"


@pytest.fixture
def page(new_page: Callable[[], Page]) -> Page:
    """One page; see ``new_page``."""
    return new_page()
