"""Hugging Face's formats: a folder of config.json and safetensors, a transformers model in memory, an id on the hub."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from workbench.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError
from workbench.loading.checkpoint import Checkpoint

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_TYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsFiles(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files, mapped into memory and read when asked for.

    Raises:
        CorruptWeightsError: a file that is truncated or no safetensors file, or two that hold the same tensor.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.metadata: dict[str, str] = {}
        self._file_of: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CorruptWeightsError(
                    f"{path} is truncated or no safetensors file ({error}); download it again"
                ) from None
            self.metadata |= file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  (a file handle, not a mapping)
                if name in self._file_of:
                    raise CorruptWeightsError(f"{path} holds {name}, which another file of the folder holds too")
                self._file_of[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def n_elements(self) -> int:
        """How many numbers the files hold."""
        return sum(math.prod(file.get_slice(name).get_shape()) for name, file in self._file_of.items())

    def stored_type(self) -> str:
        """The type of the tensors on disk; where there are several, the commonest last."""
        codes = [file.get_slice(name).get_dtype() for name, file in self._file_of.items()]
        names = [_TYPE_NAMES.get(code, code) for code in sorted(set(codes), key=codes.count)]
        return " and ".join(names) or "empty"


def folder_tensors(folder: Path) -> SafetensorsFiles:
    """The weights of a folder in Hugging Face's layout, of which nothing but the headers is read.

    Raises:
        ModelNotFoundError, CorruptWeightsError: as ``folder_checkpoint``.
    """
    config_path = folder / "config.json"
    return SafetensorsFiles(_weight_files(folder, _read_json(config_path) if config_path.is_file() else {}))


def folder_in_cache(repo_id: str) -> Path | None:
    """The folder of a model of the hub that is in its cache, None where it is not; asks nobody."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(repo_id, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None


def folder_checkpoint(folder: Path, *, tokenizer: Any = None, revision: str | None = None) -> Checkpoint:
    """Reads a folder in Hugging Face's layout.

    Raises:
        ModelNotFoundError: no config.json, or no safetensors.
        CorruptWeightsError: a file that cannot be read.
    """
    config_path = folder / "config.json"
    if not config_path.is_file():
        others = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"to load {others[0]}, pass that file" if others else "it is no model in Hugging Face's layout"
        raise ModelNotFoundError(f"the folder {folder} has no config.json; {hint}")
    hf_config = _read_json(config_path)
    if not isinstance(hf_config, dict):
        raise CorruptWeightsError(
            f"{config_path} holds no attributes of a model, but {hf_config!r:.40}; download it again"
        )
    paths = _weight_files(folder, hf_config)
    tensors = SafetensorsFiles(paths)
    return Checkpoint(
        hf_config=hf_config,
        tensors=tensors,
        tokenizer=load_tokenizer(folder) if tokenizer is None else tokenizer,
        model_name=folder.resolve().name,
        revision=revision or tensors.metadata.get("revision") or digest(paths),
        weights_description=tensors.metadata.get("weights_description", "").strip() or tensors.stored_type(),
        described_as=str(folder),
    )


def model_checkpoint(model: nn.Module, *, tokenizer: Any = None) -> Checkpoint:
    """Reads a transformers model in memory, which is left as it is.

    Raises:
        UnsupportedModelError: not a transformers model.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers.") or not hasattr(model, "config"):
        raise UnsupportedModelError(
            f"{kind.__module__}.{kind.__name__} is no transformers model; pass one such as GPT2LMHeadModel, "
            "or a name, folder or GGUF file"
        )
    state = model.state_dict()
    model_config: Any = model.config
    config = model_config.to_dict() | {"architectures": [kind.__name__]}  # what the object is, not what it was saved as
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in state.values()}
    return Checkpoint(
        hf_config=config,
        tensors=state,
        tokenizer=tokenizer,
        model_name=config.get("_name_or_path") or kind.__name__,
        revision=getattr(model_config, "_commit_hash", None),
        weights_description=" and ".join(sorted(types)),
        described_as=f"the {kind.__name__} in memory",
    )


# Subfolders and consolidated files hold the same weights in other formats.
_MODEL_FILES = ("*.safetensors", "*.json", "*.model", "*.spm", "*.txt")
_SAME_WEIGHTS = ("*/*", "consolidated*")


def download_from_hub(repo_id: str, revision: str | None = None, *, files: Sequence[str] = _MODEL_FILES) -> Path:
    """Fetches a model into the hub's own cache, or finds it there, and returns its folder, named after the commit.

    Args:
        files: patterns of the names of its files.

    Raises:
        ModelNotFoundError: no such model or revision, no permission, or no connection.
    """
    from huggingface_hub import constants, errors, snapshot_download

    try:
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=list(files), ignore_patterns=list(_SAME_WEIGHTS)
        )
        return Path(folder)
    except errors.GatedRepoError:
        reason = "is gated: accept its terms on huggingface.co and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "does not exist on the Hugging Face hub, or is private: check the id, or log in with `hf auth login`"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision!r}: pass a branch, tag or commit that it has"
    except errors.HFValidationError:
        reason = "is no valid id for the Hugging Face hub, which looks like owner/name"
    except (errors.HTTPError, OSError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error).removeprefix("Got: ")
        reason = f"is neither a known model nor in the hub's cache, and the hub cannot be reached ({why})"
    raise ModelNotFoundError(f"{repo_id} {reason}")


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where it has none. tokenizer.json counts, whatever class the folder names.

    Raises:
        CorruptWeightsError: it has one that cannot be read.
    """
    if not tokenizer_files(folder):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_json = (folder / "tokenizer.json").is_file()
    kind = PreTrainedTokenizerFast if has_json else AutoTokenizer  # the latter converts older formats
    try:
        tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # A setting of a wrong type is kept as it is, and found out by the first text.
        tokenizer.decode(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"])
        return tokenizer
    except Exception as error:  # tokenizers raises plain Exception, transformers whatever its parsers met
        raise CorruptWeightsError(
            f"the tokenizer in {folder} cannot be read ({_first_line(error)}); pass tokenizer=… instead"
        ) from None


def tokenizer_files(folder: Path) -> list[Path]:
    """The files by which a folder has a tokenizer."""
    return [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]


def digest(paths: Iterable[Path]) -> str:
    """ "sha256:" and the first 16 digits of the files' common SHA-256, in the order given."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                total.update(chunk)
    return f"sha256:{total.hexdigest()[:16]}"


def _weight_files(folder: Path, hf_config: Mapping[str, Any]) -> list[Path]:
    """model.safetensors, the shards that the index names, or the folder's only safetensors file."""
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if (index := folder / _INDEX).is_file():
        try:
            shards = sorted({folder / name for name in _read_json(index)["weight_map"].values()})
        except (KeyError, TypeError, AttributeError):
            raise CorruptWeightsError(f"{index} has no weight_map; download it again") from None
        if absent := [path.name for path in shards if not path.is_file()]:
            raise CorruptWeightsError(
                f"{index} names {absent[0]} (of {len(shards)} files), which is not there; download it again"
            )
        return shards
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelNotFoundError(
            f"the folder {folder} has {len(found)} safetensors files but neither model.safetensors nor {_INDEX}; "
            "add the index that belongs to them"
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        named = hf_config.get("architectures")
        kind = named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"
        raise ModelNotFoundError(
            f"the folder {folder} has weights only as a pickle ({pickles[0]}), which can run code when it is opened; "
            f"convert it: transformers.{kind}.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ModelNotFoundError(f"the folder {folder} has no weights: expected model.safetensors or {_INDEX}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptWeightsError(f"{path} is not valid JSON ({error}); download it again") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
