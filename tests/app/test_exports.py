"""The files that figures are exported as: what is in them, what they are called, and who may ask for them."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flask.testing import FlaskClient
from plotly.utils import PlotlyJSONEncoder

from workbench import HookedTransformer, cli
from workbench.analyses import ResultFileError, head_statistics
from workbench.analyses.result import _digest, parse_result
from workbench.app import registry
from workbench.app.exports import FORMATS, export, file_name
from workbench.app.main import app_of
from workbench.app.models import ModelStore
from workbench.app.opened import OpenedResults, read_files
from workbench.app.pages.result import decoded, shown_result
from workbench.app.pages.result import figures as figures_of_opened
from workbench.app.recipes import HEAD_STATISTICS
from workbench.app.services import Services
from workbench.app.state import View, to_query
from workbench.errors import WorkbenchError

HERE = {"Host": "127.0.0.1:8050"}
TEXT = "a b c a b c d e <script>alert(1)</script> a b %{x} d e f a b c"


@pytest.fixture(scope="module")
def services(tiny: HookedTransformer) -> Services:
    """Of which the pages "heads" and "what-if" are computed."""
    services = Services(
        ModelStore(load=lambda source, job, make_room: tiny),
        View(model="tiny", text=TEXT, layer=1, head=2, off=("L0H1",)),
        {},
    )
    for page in ("heads", "pattern", "what-if"):
        view = dataclasses.replace(services.default, page=page)
        for task in registry.BY_NAME[page].tasks(services, view):
            job = services.jobs.request("test", task)
            assert job.wait(60) and job.error is None, job.error
    services.models.get("tiny", job)
    return services


@pytest.fixture(scope="module")
def client(services: Services) -> FlaskClient:
    return app_of(services).server.test_client()


def view_on(services: Services, page: str, **changes: Any) -> View:
    return dataclasses.replace(services.default, page=page, **changes)


def unzipped(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_numbers_come_with_what_one_must_know_of_them(services: Services) -> None:
    view = view_on(services, "pattern", pooling="max")
    shown = registry.BY_NAME["pattern"].figures(view)["pattern-map"]
    result = services.jobs.result(shown.recipe.key(view))
    file = export(services, view, "pattern-map", "csv")
    assert file.name == "tiny_L1H2_pattern-map_numbers.zip"
    files = unzipped(file.content)
    assert sorted(files) == ["tiny_L1H2_pattern-map_numbers.csv", "tiny_L1H2_pattern-map_numbers.json"]
    table = pd.read_csv(io.BytesIO(files["tiny_L1H2_pattern-map_numbers.csv"]))
    (column,) = [name for name in table if name == "weight"]
    n = len(result["weight"])
    np.testing.assert_allclose(table[column].to_numpy().reshape(n, n), result["weight"], rtol=1e-12, atol=0)
    assert table[column].isna().sum() == n * (n - 1) / 2  # what comes later is hidden: empty, and not 0
    about = json.loads(files["tiny_L1H2_pattern-map_numbers.json"])
    assert about["provenance"]["model_name"] == "tiny" and "revision" in about["provenance"]
    assert about["provenance"]["versions"]["torch"] and about["provenance"]["weights"]
    assert about["tokens"] == [["<bos>", *TEXT.split()]] and about["made_by"]["text"] == TEXT
    assert about["made_by"]["arguments"] == [1, 2] and about["made_by"]["options"]["pooling"] == "max"
    assert about["chosen_head"] == "L1H2" and about["settings"]["head"] == 2
    assert about["figure"]["colours"] == [{"of": "weight", "from": 0.0, "to": 1.0}]
    assert about["quantities"]["weight"]["dtype"] == "float64" and "mask" in about["without_value"]
    assert about["code"] == shown.code(view, TEXT, result)


def test_what_is_switched_off_is_told(services: Services) -> None:
    view = view_on(services, "what-if")
    before, after = (
        json.loads(next(content for name, content in unzipped(file.content).items() if name.endswith("json")))
        for file in (export(services, view, f"pattern-{when}", "csv") for when in ("before", "after"))
    )
    assert (before["made_by"]["switched_off"], after["made_by"]["switched_off"]) == ([], ["L0H1"])


def test_exports_are_of_the_chosen_head_and_for_paper(services: Services) -> None:
    file = export(services, view_on(services, "heads", score="entropy"), "heads-map", "svg", "slide")
    drawn = json.loads(file.content)
    assert file.name == "tiny_L1H2_heads-map.svg"
    layout, options = drawn["figure"]["layout"], drawn["options"]
    frames = [shape for shape in layout["shapes"] if shape["type"] == "rect"]
    assert {(shape["x0"], shape["y0"]) for shape in frames} == {(1.5, 0.5)}
    assert layout["template"]["layout"]["paper_bgcolor"] == "#ffffff" and "L1H2" in layout["title"]["subtitle"]["text"]
    assert options["width"] * options["scale"] == pytest.approx(10 * 96)  # inches, in pixels of CSS
    png = json.loads(export(services, view_on(services, "heads"), "heads-map", "png", "one-column").content)["options"]
    assert png["width"] * png["scale"] == pytest.approx(3.3 * 300)  # dots per inch


def test_a_saved_result_is_the_result_and_opens_again(services: Services) -> None:
    view = view_on(services, "heads")
    files = unzipped(export(services, view, "heads-map", "result").content)
    assert sorted(files) == [f"tiny_L1H2_heads-map_result.{suffix}" for suffix in ("json", "npz", "py")]
    saved = services.jobs.result(HEAD_STATISTICS.key(view))
    opened = read_files({"x.zip": export(services, view, "heads-map", "result").content})
    for name in saved.quantities:
        np.testing.assert_array_equal(opened[name], saved[name])
    assert opened.provenance == saved.provenance and opened.summary() == saved.summary()
    name = services.opened.put(opened)
    on_page = view_on(services, "result", opened=name)
    shown = figures_of_opened(on_page)
    (task,) = registry.BY_NAME["result"].tasks(services, on_page)
    job = services.jobs.request("test", task)
    assert job.wait(10) and job.result is opened
    for id, figure in shown.items():
        again = json.loads(export(services, on_page, id, "svg").content)
        assert again["figure"]["data"], figure.kind
    code = export(services, on_page, "result-map", "py").content.decode()
    assert f"load_result('{name}.json')" in code and f"{name}.npz" in unzipped(
        export(services, on_page, "result-map", "result").content
    )
    page = json.dumps(shown_result(opened, shown, "dark"), cls=PlotlyJSONEncoder)
    assert opened.provenance.inputs_sha256 in page and f"{opened['entropy'][1, 2]}" in page
    assert opened.quantities["entropy"].definition in page


def export_zip(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, part in files.items():
            archive.writestr(name, part)
    return content.getvalue()


def scrambled(archive: bytes) -> bytes:
    """An archive whose first file is none that deflate has made."""
    return archive[:50] + b"\xff" * 50 + archive[100:]


def forged(files: dict[str, bytes], arrays: bytes) -> dict[str, bytes]:
    """A description whose digests are right, of other arrays."""
    about = json.loads(files[".json"]) | {"arrays_sha256": hashlib.sha256(arrays).hexdigest()}
    about["sha256"] = _digest({name: value for name, value in about.items() if name != "sha256"})
    return {"a.json": json.dumps(about).encode(), "a.npz": arrays}


@pytest.mark.parametrize(
    "content",
    [
        *(f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({size},), }}\n" for size in (10**12, 10**30, -1)),
        "((((\n",
    ],
)
def test_arrays_that_claim_any_size_or_have_no_head_are_refused(content: str, tiny: HookedTransformer) -> None:
    files = head_statistics(tiny, "a b a b").to_files()
    head = b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content.encode()
    arrays = export_zip({f"{name}.npy": head for name in json.loads(files[".json"])["quantities"]})
    with pytest.raises(WorkbenchError, match="a.json does not describe a.npz: .*run the analysis again"):
        read_files(forged(files, arrays))
    with pytest.raises(WorkbenchError, match="does not describe"):
        read_files(forged(files, scrambled(files[".npz"])))


def test_files_that_are_no_result_are_refused_in_words(
    tiny: HookedTransformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = head_statistics(tiny, "a b a b").to_files()
    description, arrays = files[".json"], files[".npz"]
    edited = description.replace(b'"tiny"', b'"huge"')
    refused: list[tuple[dict[str, bytes], str]] = [
        ({"a.json": description}, "choose both files"),
        ({}, "choose both files"),
        ({"a.json": description, "b.json": description, "a.npz": arrays}, "several .json files"),
        ({"a.zip": b"PK nonsense"}, "a.zip is damaged"),
        ({"a.json": description, "a.npz": arrays[:-200]}, "a.npz is damaged"),
        ({"a.json": b"{}", "a.npz": arrays}, "a.json is no saved result"),
        ({"a.json": b"\xff", "a.npz": arrays}, "a.json is not readable as JSON"),
        ({"a.json": edited, "a.npz": arrays}, "a.json was edited"),
        ({"a.json": b" " * 33_000_000, "a.npz": arrays}, "workbench app --open FILE"),
        ({"a.json": b'{"format": %s}' % (b"1" * 5000), "a.npz": arrays}, "a.json is not readable as JSON"),
        ({"a.zip": scrambled(export_zip({"a.json": description, "a.npz": arrays}))}, "a.zip is damaged"),
    ]
    for given, said in refused:
        with pytest.raises(WorkbenchError, match=re.escape(said)):
            read_files(given)
    with pytest.raises(WorkbenchError, match="a.npz holds more than"):
        monkeypatch.setattr("workbench.app.opened.MOST_UNPACKED", 1000)
        read_files({"a.json": description, "a.npz": arrays})


def test_arrays_of_objects_are_not_read(tiny: HookedTransformer) -> None:
    content = io.BytesIO()
    np.savez(content, entropy=np.array([{}], dtype=object))  # a pickle
    broken = json.loads(head_statistics(tiny, "a b a b").to_files()[".json"])
    broken["arrays_sha256"] = hashlib.sha256(content.getvalue()).hexdigest()
    broken["sha256"] = _digest({name: value for name, value in broken.items() if name != "sha256"})
    with pytest.raises(ResultFileError, match="does not describe .npz: Object arrays cannot be loaded"):
        parse_result(json.dumps(broken).encode(), content.getvalue())


def test_files_that_did_not_arrive_whole_are_refused() -> None:
    for chosen in ([1], [{"name": "a.json"}], [{"name": "a.json", "content": "§"}], [{"name": 1, "content": ""}]):
        with pytest.raises(WorkbenchError, match="did not arrive whole"):
            decoded(chosen)


def test_only_the_results_opened_last_are_held(tiny: HookedTransformer) -> None:
    results = [head_statistics(tiny, text) for text in ("a b", "b a", "c d")]
    store = OpenedResults(keep=2)
    names = [store.put(result) for result in results]
    assert store.get(names[2]) is results[2] and store.get(names[1]) is results[1]
    with pytest.raises(WorkbenchError, match="open its files again"):
        store.get(names[0])


@pytest.mark.parametrize(
    ("model", "safe"),
    [
        ("demo", "demo"),
        ("../../etc/passwd", "passwd"),
        ("/a folder/ünï code\r\nX: y", "n-code-X-y"),
        ("..", "model"),
        ("/", "model"),
        ('a"; b=c', "a-b-c"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
    ],
)
def test_names_of_files_mean_nothing_to_a_file_system(model: str, safe: str, services: Services) -> None:
    view = view_on(services, "heads")
    shown = registry.BY_NAME["heads"].figures(view)["heads-map"]
    result = services.jobs.result(HEAD_STATISTICS.key(view))
    named = dataclasses.replace(result, provenance=dataclasses.replace(result.provenance, model_name=model))
    assert file_name(view, shown, "heads-map", named) == f"{safe}_L1H2_heads-map"
    assert file_name(dataclasses.replace(view, layer=None), shown, "heads-map", named).startswith(safe)


def test_tokens_are_text_in_every_file(services: Services) -> None:
    view = view_on(services, "pattern")
    page = export(services, view, "pattern-map", "html").content.decode()
    assert "alert(1)" in page and "<script>alert(1)" not in page
    labels = json.loads(export(services, view, "pattern-map", "svg").content)["figure"]
    shown = json.dumps(labels)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown and "<script>" not in shown
    files = unzipped(export(services, view, "pattern-map", "csv").content)
    table = files["tiny_L1H2_pattern-map_numbers.csv"]
    assert "<script>alert(1)</script> 9" in set(pd.read_csv(io.BytesIO(table)).iloc[:, 0])


def test_the_address_gives_files_and_refuses_in_words(client: FlaskClient, services: Services) -> None:
    def ask(page: str = "heads", headers: dict[str, str] = HERE, **given: str) -> Any:
        asked = {"figure": "heads-map", "export-format": "csv", "preset": "slide"} | given
        query = to_query(view_on(services, page)) + "".join(f"&{name}={value}" for name, value in asked.items())
        return client.get("/export" + query, headers=headers)

    answer = ask()
    assert answer.status_code == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Content-Disposition"] == 'attachment; filename="tiny_L1H2_heads-map_numbers.zip"'
    for format in set(FORMATS) - {"pdf"}:
        assert "Content-Disposition" in ask(**{"export-format": format}).headers, format
    for given, status, said in (
        ({"export-format": "exe"}, 400, "no such format"),
        ({"preset": "poster"}, 400, "no such format or size"),
        ({"figure": "nothing<b>"}, 200, "shows no figure"),
        ({"page": "sinks", "figure": "sinks-map"}, 200, "no result to export"),
    ):
        answer = ask(**given)  # type: ignore[arg-type]
        assert answer.status_code == status and said in answer.text and answer.mimetype == "text/plain"
        assert "Content-Disposition" not in answer.headers  # by which the page tells a message from a file
    for headers in (
        {"Host": "evil.example"},
        HERE | {"Origin": "http://evil.example"},
        HERE | {"Sec-Fetch-Site": "cross-site"},
    ):
        assert ask(headers=headers).status_code == 403
    assert client.post("/export", headers=HERE).status_code == 405
    assert client.get("/?v=1", headers=HERE | {"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link


def test_without_a_browser_a_pdf_says_what_is_missing(
    client: FlaskClient, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHROMIUM", "/nowhere/chromium")
    query = to_query(view_on(services, "heads")) + "&figure=heads-map&export-format="
    answer = client.get(f"/export{query}pdf", headers=HERE)
    assert "Content-Disposition" not in answer.headers
    assert "CHROMIUM is /nowhere/chromium" in answer.text and "the page draws them itself" in answer.text
    assert "Content-Disposition" in client.get(f"/export{query}svg", headers=HERE).headers


def test_the_command_line_opens_a_saved_result(
    tiny: HookedTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = head_statistics(tiny, "a b a b")
    given: dict[str, Any] = {}
    monkeypatch.setattr("workbench.app.main.serve", lambda **arguments: given.update(arguments))
    assert cli.main(["app", "--open", str(saved.save(tmp_path / "run.v1")), "--no-browser"]) == 0
    np.testing.assert_array_equal(given["opened"]["entropy"], saved["entropy"])
    given.clear()
    (tmp_path / "run.v1.npz").unlink()
    assert cli.main(["app", "--open", str(tmp_path / "run.v1.json"), "--no-browser"]) == 1 and not given


@pytest.mark.parametrize(
    ("error", "said"), [(KeyError("x"), "went wrong here, not with"), (MemoryError(), "not enough memory")]
)
def test_a_file_that_fails_for_reasons_of_its_own_gives_words(
    error: Exception, said: str, services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> None:
        raise error

    monkeypatch.setattr("workbench.app.exports.export", fails)
    asked = to_query(services.default) + "&figure=heads-map&export-format=csv"
    answer = app_of(services).server.test_client().get(f"/export{asked}", headers=HERE)
    assert said in answer.text and answer.mimetype == "text/plain" and "Content-Disposition" not in answer.headers
    assert caplog.records[-1].exc_info  # for whoever runs the server
