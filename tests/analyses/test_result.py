from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from workbench.analyses import (
    HeadStatistics,
    Provenance,
    Quantity,
    Result,
    ResultFileError,
    attention_sinks,
    head_pattern,
    head_statistics,
    induction_heads,
    load_result,
    repeated_random_tokens,
)
from workbench.analyses.result import _digest

PROVENANCE = Provenance(
    model_name="m", revision=None, weights="float32", inputs="“a b”", inputs_sha256="0" * 64, n_sequences=1, n_tokens=3,
    bos="starting with BOS", versions={"python": "3"},
)  # fmt: skip


def result(**arrays: tuple[np.ndarray, tuple[str, ...]]) -> HeadStatistics:
    quantities = {name: Quantity(values, axes, "nats", f"what {name} is") for name, (values, axes) in arrays.items()}
    return HeadStatistics(quantities=quantities, provenance=PROVENANCE)


def assert_same(left: Result, right: Result) -> None:
    assert type(left) is type(right)
    assert list(left.quantities) == list(right.quantities)
    for name, quantity in left.quantities.items():
        other = right.quantities[name]
        assert (quantity.axes, quantity.unit, quantity.definition) == (other.axes, other.unit, other.definition)
        assert quantity.values.dtype == other.values.dtype
        np.testing.assert_array_equal(quantity.values, other.values)
    for name in ("settings", "coverage", "coordinates", "provenance"):
        assert getattr(left, name) == getattr(right, name)


@pytest.mark.parametrize(
    "analyse",
    [
        lambda model, tokens: head_statistics(model, tokens),
        lambda model, tokens: attention_sinks(model, tokens),
        lambda model, tokens: head_pattern(model, tokens[0], 1, 2, max_cells=16),
        lambda model, tokens: induction_heads(model, length=12, n_sequences=2, n_ablated=2),
    ],
    ids=["heads", "sinks", "pattern", "induction"],
)
def test_every_analysis_survives_a_round_trip(analyse: Callable, random_model: Any, tmp_path: Path) -> None:
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    found = analyse(random_model, tokens)
    found.save(tmp_path / "found.v1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.v1.json", "found.v1.npz"]
    for name in ("found.v1", "found.v1.json", "found.v1.npz"):
        assert_same(load_result(tmp_path / name), found)
    loaded = load_result(tmp_path / "found.v1")
    assert found.summary() == loaded.summary()
    for kind in found.figure_kinds:
        assert found.figure(kind, theme="dark").to_json() == loaded.figure(kind, theme="dark").to_json()


def test_captioned_figures_say_what_they_show_and_of_what(random_model: Any) -> None:
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    prompts = repeated_random_tokens(random_model, length=12, n_sequences=2, seed=5)
    drawn = "12 random tokens twice, seed 5; 2 sequences, 48 tokens"
    loss, one = "± 1 standard error over sequences", "One sequence gives no standard error"
    for found, expected in (
        (
            head_statistics(random_model, prompts),
            {"map": [drawn, "Prefix matching: weight on"], "received": [drawn, "every head"]},
        ),
        (
            attention_sinks(random_model, tokens),
            {"map": ["token ids; 2 sequences"], "positions": ["0 to 23 of 0 to 39"]},
        ),
        (head_pattern(random_model, tokens[0], 1, 2), {"pattern": ["L1H2", "Queries 0 to 39", "exact"]}),
        (induction_heads(random_model, length=12, n_sequences=2, seed=5), {"loss": [drawn, loss], "ablation": [loss]}),
        (induction_heads(random_model, length=12, n_sequences=1), {"loss": [one], "ablation": [one]}),
    ):
        for kind in found.figure_kinds:
            assert found.figure(kind).layout.title.text is None
            title = found.figure(kind, captioned=True).layout.title
            said = f"{title.text} {title.subtitle.text}".replace("<br>", " ")
            assert len(title.text) > 10
            for part in [found.provenance.sentence(), *expected.get(kind, [])]:
                assert part in said


@settings(deadline=None, max_examples=25)
@given(
    values=npst.arrays(
        dtype=st.sampled_from([np.float32, np.float64, np.int64, np.bool_, np.dtype("U3")]),
        shape=npst.array_shapes(min_dims=2, max_dims=2, max_side=4),
    )
)
def test_arrays_survive_exactly(values: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("arrays")
    saved = result(entropy=(values, ("layer", "head")))
    saved.save(folder / "r")
    assert_same(load_result(folder / "r"), saved)


def test_saving_again_replaces_both_files(tmp_path: Path) -> None:
    result(entropy=(np.zeros((1, 2)), ("layer", "head"))).save(tmp_path / "r")
    second = result(entropy=(np.ones((3, 2)), ("layer", "head")))
    second.save(tmp_path / "r.json")
    assert_same(load_result(tmp_path / "r"), second)


def test_an_interrupted_save_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = result(entropy=(np.zeros((1, 2)), ("layer", "head")))
    first.save(tmp_path / "r")
    written = []

    def fails_on_the_second(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        with path.open("wb") as file:
            return file.write(content)

    monkeypatch.setattr(Path, "write_bytes", fails_on_the_second)
    with pytest.raises(ResultFileError, match="No space left"):
        result(entropy=(np.ones((1, 2)), ("layer", "head"))).save(tmp_path / "r")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.npz"]
    assert_same(load_result(tmp_path / "r"), first)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultFileError, match="cannot write .*file"):
        result(entropy=(np.zeros((1, 2)), ("layer", "head"))).save(tmp_path / "file" / "r")


def edit_json(folder: Path, **changes: Any) -> None:
    description = json.loads((folder / "r.json").read_text())
    (folder / "r.json").write_text(json.dumps(description | changes))


def forge_json(folder: Path, **changes: Any) -> None:
    """An edit by somebody who knows that the file holds a checksum of itself."""
    edit_json(folder, **changes)
    description = json.loads((folder / "r.json").read_text())
    edit_json(folder, sha256=_digest({name: value for name, value in description.items() if name != "sha256"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "r.npz").unlink(), "cannot read .*r.npz"),
        (lambda f: (f / "r.json").unlink(), "cannot read .*r.json"),
        (lambda f: (f / "r.npz").write_bytes((f / "r.npz").read_bytes()[:-7]), "damaged"),
        (lambda f: (f / "r.json").write_text("{"), "not readable as JSON"),
        (lambda f: (f / "r.json").write_bytes(b"\xff\xfe\x00"), "not readable as JSON"),
        (lambda f: (f / "r.json").write_text("[1]"), "no saved result"),
        (lambda f: (f / "r.json").write_text('{"format": "other"}'), "no saved result"),
        (lambda f: edit_json(f, format_version=99), "format version 99"),
        (lambda f: edit_json(f, kind="os.system"), "unknown kind"),
        (lambda f: edit_json(f, kind=["head_statistics"]), "unknown kind"),
        (lambda f: edit_json(f, settings={"seed": "0"}), "was edited"),
        (lambda f: edit_json(f, coverage={}, quantities={}), "was edited"),
        (lambda f: edit_json(f, provenance=5), "was edited"),
        (lambda f: edit_json(f, sha256=None), "was edited"),
        (
            lambda f: forge_json(f, quantities={"other": {"axes": [], "unit": "", "definition": ""}}),
            "does not describe",
        ),
        (lambda f: forge_json(f, quantities=3), "does not describe"),
        (lambda f: forge_json(f, provenance={"model_name": "m"}), "does not describe"),
        (lambda f: forge_json(f, provenance=5), "does not describe"),
        (lambda f: forge_json(f, coordinates={"head": ["only one"]}), "does not describe"),
        (lambda f: (f / "r.json").write_text("[" * 100_000), "not readable as JSON"),
        (
            lambda f: ((f / "r.npz").write_bytes(b""), forge_json(f, arrays_sha256=hashlib.sha256(b"").hexdigest())),
            "does not describe",
        ),
    ],
)
def test_foreign_and_damaged_files_are_refused(damage: Callable, message: str, tmp_path: Path) -> None:
    result(entropy=(np.zeros((1, 2)), ("layer", "head"))).save(tmp_path / "r")
    damage(tmp_path)
    with pytest.raises(ResultFileError, match=message):
        load_result(tmp_path / "r")


def test_what_was_laid_out_anew_is_the_same_result(tmp_path: Path) -> None:
    saved = result(entropy=(np.zeros((1, 2)), ("layer", "head")))
    saved.save(tmp_path / "r")
    description = json.loads((tmp_path / "r.json").read_text())
    (tmp_path / "r.json").write_text(json.dumps(dict(sorted(description.items())), indent=3))
    assert_same(load_result(tmp_path / "r"), saved)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    saved = result(entropy=(np.zeros((1, 2)), ("layer", "head")))
    saved.save(tmp_path / "r")
    with (tmp_path / "r.npz").open("wb") as file:
        np.savez(file, entropy=np.array([{"an": "object"}], dtype=object))
    forge_json(tmp_path, arrays_sha256=hashlib.sha256((tmp_path / "r.npz").read_bytes()).hexdigest())
    with pytest.raises(ResultFileError, match="allow_pickle"):
        load_result(tmp_path / "r")


def test_a_frame_has_a_row_per_combination_and_a_column_per_quantity() -> None:
    values = np.arange(6.0).reshape(2, 3)
    frame = result(
        entropy=(values, ("layer", "head")), max_weight=(-values, ("layer", "head")), extra=(values[0], ("head",))
    ).to_frame()
    assert list(frame.columns) == ["layer", "head", "entropy", "max_weight"]
    row = frame[(frame.layer == 1) & (frame["head"] == 2)]
    assert row.entropy.item() == 5.0 and row.max_weight.item() == -5.0 and len(frame) == 6


def test_frames_use_coordinates_and_refuse_unknown_axes() -> None:
    found = HeadStatistics(
        quantities={"a": Quantity(np.array([1.0, 2.0]), ("copy",), "", "")},
        provenance=PROVENANCE,
        coordinates={"copy": ["first", "second"]},
    )
    assert found.to_frame("copy")["copy"].tolist() == ["first", "second"]
    with pytest.raises(ValueError, match="there are copy"):
        found.to_frame("layer")


def test_results_and_their_arrays_are_frozen() -> None:
    given = np.zeros((1, 2))
    found = result(entropy=(given, ("layer", "head")))
    given[0, 0] = 1.0
    assert found["entropy"][0, 0] == 0.0
    with pytest.raises(ValueError, match="read-only"):
        found["entropy"][0, 0] = 1.0
    with pytest.raises(TypeError):
        found.quantities["entropy"] = None  # type: ignore[index]
    with pytest.raises(AttributeError):
        found.settings = {}  # type: ignore[misc]


def test_quantities_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 axes"):
        Quantity(np.zeros((1, 2)), ("layer",), "", "")
    with pytest.raises(ValueError, match="object"):
        Quantity(np.array([None]), ("layer",), "", "")
    with pytest.raises(ValueError, match="3 entries along layer"):
        result(a=(np.zeros(2), ("layer",)), b=(np.zeros(3), ("layer",)))


def test_unknown_names_say_what_there_is() -> None:
    found = result(entropy=(np.zeros((1, 2)), ("layer", "head")))
    with pytest.raises(KeyError, match="holds entropy"):
        found["entropi"]
    with pytest.raises(ValueError, match="'map', 'scatter'"):
        found.figure("pie")
