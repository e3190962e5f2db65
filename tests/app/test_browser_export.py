"""The export panel in Chromium: by keyboard, pictures, without a browser on the server, and results opened again."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Tab
    from playwright.sync_api import Download

PNG = b"\x89PNG\r\n\x1a\n"


def content(download: Download) -> bytes:
    return Path(download.path()).read_bytes()


def choose(tab: Tab, figure: str, name: str) -> None:
    """Opens a figure's export panel and clicks on a button of it."""
    tab.locator(f".card:has(#{figure}) .export-button").click()
    tab.locator("#export-panel").get_by_role("button", name=name, exact=True).click()


def test_the_panel_works_by_keyboard_and_gives_pictures(
    dashboard: str, watched: Callable[[], Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    tab = watched()
    tab.open(dashboard, page="heads", layer=2, head=3)
    tab.drawn("heads-pattern")
    tab.locator(".card:has(#heads-map) .export-button").focus()
    tab.keyboard.press("Enter")
    focused = "document.activeElement.textContent === '{}'"
    tab.wait_for_function(focused.format("SVG"))
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate(focused.format("PDF"))
    tab.keyboard.press("Escape")
    assert tab.evaluate(focused.format("Export")) and not tab.locator("#export-panel").is_visible()
    tab.keyboard.press("Enter")
    tab.locator("#export-size").get_by_text("1 column").click()
    with tab.expect_download() as saved:
        tab.locator("#export-panel").get_by_role("button", name="SVG").press("Enter")
    assert saved.value.suggested_filename == "demo_L2H3_heads-map.svg"
    picture = content(saved.value).decode()
    assert picture.startswith("<svg") and "L2H3" in picture and "rgb(255, 255, 255)" in picture
    for format in ("png", "pdf"):
        with tab.expect_download() as saved:
            choose(tab, "heads-map", format.upper())
        assert saved.value.suggested_filename == f"demo_L2H3_heads-map.{format}"
        if format == "png":
            file = content(saved.value)
            assert file.startswith(PNG) and abs(int.from_bytes(file[16:20]) - 990) <= 1  # 300 dots per inch
        elif format == "pdf":
            assert content(saved.value).startswith(b"%PDF")
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")  # as on a machine without one
    choose(tab, "heads-map", "PDF")
    said = tab.locator("#notice").inner_text
    tab.wait_for_function("document.getElementById('notice').textContent.includes('/nowhere/chromium')")
    assert "SVG and PNG need neither" in said()
    with tab.expect_download() as saved:  # drawn by the page
        choose(tab, "heads-map", "SVG")
    assert content(saved.value).startswith(b"<svg")
    tab.wait_for_function("!document.getElementById('notice').textContent")


def test_code_can_be_read_and_copied_and_a_result_opens_again(dashboard: str, watched: Callable[[], Tab]) -> None:
    tab = watched()
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open(dashboard, page="what-if", layer=2, head=3, off="L1H1")
    tab.drawn("pattern-after")
    choose(tab, "off-text", "Python that makes it")
    dialog = tab.locator("#code-dialog[open]")
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_text("Copied").wait_for()
    code = tab.evaluate("navigator.clipboard.readText()")
    assert "what_if(model, text, ['L1H1'])" in code and compile(code, "copied", "exec")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#code-dialog:not([open])", state="attached")
    with tab.expect_download() as saved:
        tab.click("#export-notebook")
    cells = json.loads(content(saved.value))["cells"]
    assert saved.value.suggested_filename == "demo_workbench.ipynb"
    assert sum("what_if(model, text, ['L1H1'])" in cell["source"] for cell in cells) == 1
    with tab.expect_download() as saved:
        choose(tab, "off-text", "Result, to open again (npz and JSON)")
    archive = content(saved.value)
    tab.click("#go-result")
    tab.get_by_text("Nothing is open.").wait_for()
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        described = next(name for name in files.namelist() if name.endswith(".json"))
        half = {"name": "half.json", "mimeType": "application/json", "buffer": files.read(described)}
    with tab.expect_file_chooser() as chooser:
        tab.click("#open-result")
    chooser.value.set_files([half])  # type: ignore[list-item]
    tab.get_by_text("choose both files").wait_for()
    with tab.expect_file_chooser() as chooser:
        tab.click("#open-result")
    chooser.value.set_files([{"name": "saved.zip", "mimeType": "application/zip", "buffer": archive}])  # type: ignore[list-item]
    tab.wait_for_selector("#result-text .scatterlayer path")
    tab.wait_for_function("!document.getElementById('alert').textContent")
    assert tab.view()["opened"].startswith("switched_off.")
    assert "Switched off: L1H1" in tab.locator("#result-body .summary").inner_text()
    tab.reload()  # from the address alone
    tab.wait_for_selector("#result-next_token .barlayer path")
    assert tab.faint_text() == []
