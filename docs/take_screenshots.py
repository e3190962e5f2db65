"""Takes the pictures in docs/screens: ``python docs/take_screenshots.py [PAGE …]``.

Every page on the demo model, that of saved results on one of its results, at three widths of the window, light and
dark. Needs Chromium, as the dashboard's tests do.
"""

from __future__ import annotations

import base64
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright
from werkzeug.serving import make_server

from workbench import HookedTransformer
from workbench.analyses import induction_heads
from workbench.app import registry
from workbench.app.main import QuietHandler, app_of, services_on
from workbench.app.models import ModelStore

FOLDER = Path(__file__).parent / "screens"
WIDTHS = (900, 1440, 2560)
SHOWN_WIDTH = 960  # pixels of a picture; a wider window is scaled down
# What a page shows beyond its defaults.
STATES: dict[str, dict[str, Any]] = {"what-if": {"off": "L2H2,M3"}}
QUIET = """
() => document.getElementById("progress")?.hidden && !document.querySelector("main.stale")
    && document.getElementById("context-facts").textContent
"""
QUIET_SECONDS = 3  # between one job and the next, too, nothing is in progress for a moment


def wait(page: Page) -> None:
    """Until everything that the page asked for is there."""
    since = None
    while since is None or time.monotonic() - since < QUIET_SECONDS:
        page.wait_for_timeout(200)
        since = (since or time.monotonic()) if page.evaluate(QUIET) else None


def picture(page: Page, width: int) -> bytes:
    """The whole page, however long, as WebP."""
    whole = "Math.max(document.documentElement.scrollHeight, document.getElementById('main').scrollHeight)"
    height = page.evaluate(whole)
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(700)  # figures follow the window's size
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": SHOWN_WIDTH / width}
    shot = page.context.new_cdp_session(page).send(
        "Page.captureScreenshot", {"format": "webp", "quality": 70, "clip": clip, "captureBeyondViewport": True}
    )
    return base64.b64decode(shot["data"])


def main() -> None:
    names = sys.argv[1:] or [page.NAME for page in registry.PAGES]
    FOLDER.mkdir(exist_ok=True)
    services = services_on("demo", ModelStore())
    saved = services.opened.put(induction_heads(HookedTransformer.from_pretrained("demo")))
    states = STATES | {"result": {"opened": saved}}
    app = app_of(services).server
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser_path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in WIDTHS:
                page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
                for name in names:
                    query = urlencode({"v": 1, "page": name, "model": "demo"} | states.get(name, {}))
                    page.goto(f"http://127.0.0.1:{server.port}/?{query}")
                    wait(page)
                    (FOLDER / f"{name}-{scheme}-{width}.webp").write_bytes(picture(page, width))
                    page.set_viewport_size({"width": width, "height": 900})
                page.close()
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
