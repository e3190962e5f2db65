"""Reports: all of a result on a page of its own, in both themes, and nothing that a text could do there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from workbench.analyses import HeadStatistics, Provenance, Quantity, Result, write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<script>document.title='broken'</script>"
PROVENANCE = Provenance(
    model_name=HOSTILE, revision=None, weights="float32", inputs=f"“{HOSTILE} </script>”", inputs_sha256="0" * 64,
    n_sequences=1, n_tokens=3, bos="starting with BOS", versions={"torch": "9.9", "python": "3"},
)  # fmt: skip
COLOURS = "[...document.querySelectorAll('.plot')].map(node => node.querySelector('.main-svg').style.background)"


def heads(n_layers: int = 3) -> HeadStatistics:
    values = np.random.default_rng(0).uniform(size=(n_layers, 2))
    values[0, 0] = np.nan
    return HeadStatistics(
        quantities={
            "prefix_matching": Quantity(values, ("layer", "head"), "share of 1", "what prefix matching is"),
            "entropy": Quantity(values * 9, ("layer", "head"), "nats", f"how wide, {HOSTILE}"),
            "previous_token": Quantity(values**2, ("layer", "head"), "share of 1", "what comes before"),
        },
        settings={"seed": 3, "text": HOSTILE, "list": list(range(1000))},
        provenance=PROVENANCE,
    )  # fmt: skip


@pytest.fixture
def hostile_results(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """Results of a model and a text that are named like code; their summaries need more than is here."""
    monkeypatch.setattr(HeadStatistics, "summary", lambda self: f"{self.provenance.sentence()}\nA line about {HOSTILE}")
    monkeypatch.setattr(HeadStatistics, "all_figure_kinds", ("map", "scatter"))
    return [heads()]


def written(results: list[Result], folder: Path, **options: str) -> str:
    return write_report(results, folder / "report.html", **options).read_text(encoding="utf-8")


def test_a_report_holds_everything_and_needs_nothing(hostile_results: list[Result], tmp_path: Path) -> None:
    page = written(hostile_results, tmp_path, command="workbench heads demo --prompt '<b>'")
    assert page.count("plotly.js v") == 1 and not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert "default-src 'none'" in page
    for part in (
        "<h1>Head statistics: &lt;script&gt;", "workbench heads demo --prompt &#x27;&lt;b&gt;&#x27;", "A line about",
        "what prefix matching is", "share of 1", "[layer × head], nats", "seed", "9.9", "SHA-256",
        "starting with BOS", "Table by layer × head (6 rows)",
    ):  # fmt: skip
        assert part in page, part
    assert HOSTILE not in page and [file.name for file in tmp_path.iterdir()] == ["report.html"]
    values = [cell for row in hostile_results[0].to_frame().itertuples(index=False) for cell in row]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.partition("class='numbers'")[2].partition("</table>")[0])
    assert cells == ["–" if value != value else f"{value:.4g}" for value in values]


def test_columns_of_a_summary_stay_columns(monkeypatch: pytest.MonkeyPatch, page: Page, tmp_path: Path) -> None:
    lines = ["One sentence.", "head   effect", "L0H0    +0.10", "L10H0  -10.00", "Another."]
    monkeypatch.setattr(HeadStatistics, "summary", lambda self: "\n".join(lines))
    page.set_content(written([heads()], tmp_path))
    assert page.locator(".card > p").all_inner_texts() == [lines[0], lines[-1]]
    columns = page.locator(".card > .columns")
    assert columns.inner_text().splitlines() == lines[1:-1]
    assert columns.evaluate("element => getComputedStyle(element).whiteSpace") == "pre"


def test_tables_end_where_a_page_would_be_too_long(hostile_results: list[Result], tmp_path: Path) -> None:
    page = written([heads(200)], tmp_path)
    assert "the first 300 of 400 rows" in page and page.count("<tr>") < 350


def test_a_browser_draws_it_in_both_themes_and_runs_no_text(
    hostile_results: list[Result], page: Page, tmp_path: Path
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.emulate_media(color_scheme="light")
    page.set_content(written(hostile_results, tmp_path, command=HOSTILE))
    page.locator(".plot .main-svg").nth(2).wait_for(state="attached")
    light = page.evaluate(COLOURS)
    assert page.title().endswith(HOSTILE) and HOSTILE in page.locator("pre").text_content()
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-theme=dark]")
    dark = page.evaluate(COLOURS)
    assert len(light) == len(dark) == 2 and all(one != other for one, other in zip(light, dark, strict=True))
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(COLOURS) == light and page.locator("html").get_attribute("data-theme") == "light"
    assert not errors


@pytest.mark.parametrize("width", [900, 1440])
def test_it_fits_the_window_and_the_paper(
    width: int, hostile_results: list[Result], page: Page, tmp_path: Path
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark")
    page.set_content(written(hostile_results, tmp_path))
    page.wait_for_selector(".plot .main-svg")
    rights = "[...document.querySelectorAll('.main-svg')].map(node => node.getBoundingClientRect().right)"
    assert max(page.evaluate(rights)) <= width >= page.evaluate("document.documentElement.scrollWidth")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("html").get_attribute("data-theme") == "light"
    assert page.locator("details:not([open])").count() == 0
    drawn = page.evaluate("[...document.querySelectorAll('.main-svg')].map(node => node.getBoundingClientRect().width)")
    assert max(drawn) <= 660
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark" and page.locator("details:not([open])").count()


def test_several_results_share_a_page(hostile_results: list[Result], page: Page, tmp_path: Path) -> None:
    text = written([heads(), heads(5)], tmp_path, title="Two & more")
    assert text.count("plotly.js v") == 1 and "<title>Two &amp; more</title>" in text
    page.set_content(text)
    page.locator(".plot").nth(3).locator(".main-svg").first.wait_for(state="attached")
    assert page.locator("section").count() == page.locator("nav a").count() == 2


def test_no_results_and_no_folder_are_refused(hostile_results: list[Result], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="and nothing else"):
        write_report(["no result"], tmp_path / "none.html")  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one result"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(FileNotFoundError, match="no folder .*missing"):
        write_report(hostile_results, tmp_path / "missing" / "report.html")
    assert not list(tmp_path.iterdir())
