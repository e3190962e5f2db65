"""The export menu in Chromium: by keyboard, every format, without a browser on the server, and results opened again."""

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


def choose(tab: Tab, figure: str, *names: str) -> None:
    """Opens a figure's menu and clicks on an item, through submenus."""
    tab.locator(f".card:has(#{figure}) .export-button").click()
    for name in names[:-1]:
        tab.get_by_role("menuitem", name=name, exact=True).hover()
    tab.get_by_role("menuitem", name=names[-1], exact=True).click()


def test_the_menu_works_by_keyboard_and_gives_every_format(
    dashboard: str, watched: Callable[[], Tab], monkeypatch: pytest.MonkeyPatch
) -> None:
    tab = watched()
    tab.open(dashboard, page="heads", layer=2, head=3)
    tab.drawn("heads-pattern")
    button = tab.locator(".card:has(#heads-map) .export-button")
    button.focus()
    tab.keyboard.press("Enter")
    tab.get_by_role("menuitem", name="SVG", exact=True).wait_for()
    for key in ("ArrowDown", "ArrowRight"):  # into the menu, on SVG; into its sizes, on the first
        tab.wait_for_timeout(300)
        tab.keyboard.press(key)
    tab.wait_for_function("document.activeElement.textContent.startsWith('One column')")
    with tab.expect_download() as saved:
        tab.keyboard.press("Enter")
    assert saved.value.suggested_filename == "demo_L2H3_heads-map.svg"
    picture = content(saved.value).decode()
    assert picture.startswith("<svg") and "L2H3" in picture and "rgb(255, 255, 255)" in picture
    for format, names in {
        "png": ("PNG", "One column, 3.3 in"),
        "pdf": ("PDF", "Slide, 10 in"),
    }.items():
        with tab.expect_download() as saved:
            choose(tab, "heads-map", *names)
        assert saved.value.suggested_filename == f"demo_L2H3_heads-map.{format}"
        if format == "png":
            file = content(saved.value)
            assert file.startswith(PNG) and abs(int.from_bytes(file[16:20]) - 990) <= 1  # 300 dots per inch
        elif format == "pdf":
            assert content(saved.value).startswith(b"%PDF")
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")  # as on a machine without one
    choose(tab, "heads-map", "PDF", "Slide, 10 in")
    said = tab.locator("#notice").inner_text
    tab.wait_for_function("document.getElementById('notice').textContent.includes('/nowhere/chromium')")
    assert "SVG and PNG need neither" in said()
    with tab.expect_download() as saved:  # drawn by the page
        choose(tab, "heads-map", "SVG", "Slide, 10 in")
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
        choose(tab, "off-text", "Result, to open again (npz, JSON)")
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
