"""How much memory a model's weights take, from the headers of its files."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from workbench.estimates import bytes_in_words, free_memory
from workbench.loading import huggingface, sources
from workbench.loading.gguf_file import GGUFFile
from workbench.loading.pretrained import local_path


def weights_bytes(source: str | Path, dtype: torch.dtype = torch.float32) -> int | None:
    """Bytes of a model's weights once it is loaded in ``dtype``; None where its files are not on this machine.

    Raises:
        ModelNotFoundError, CorruptWeightsError: as ``load_pretrained``, of what can be told without a connection.
    """
    if source in sources.KNOWN_MODELS:
        known = sources.KNOWN_MODELS[str(source)]
        return _of_folder(known.path, dtype) if known.fetched else None
    path = local_path(source)
    if path is None:
        path = huggingface.folder_in_cache(str(source))
    if path is None:
        return None
    return _of_folder(path, dtype) if path.is_dir() else _of_gguf(path, dtype)


def size_problem(source: str | Path) -> str:
    """What to say of a model whose weights do not fit into the free memory; empty where they do, or none can tell.

    Raises:
        ModelNotFoundError, CorruptWeightsError: as ``weights_bytes``.
    """
    needed, free = weights_bytes(source), free_memory()
    if needed is None or needed <= free:
        return ""
    return f"the weights of {source} take {bytes_in_words(needed)} of memory, but {bytes_in_words(free)} are free"


def _of_folder(folder: Path, dtype: torch.dtype) -> int | None:
    if not (folder / "config.json").exists():  # no model, which loading it says in its own words
        return None
    return huggingface.folder_tensors(folder).n_elements() * dtype.itemsize


def _of_gguf(path: Path, dtype: torch.dtype) -> int | None:
    try:
        return sum(math.prod(tensor.shape) for tensor in GGUFFile(path).tensors.values()) * dtype.itemsize
    except (ValueError, NotImplementedError, OSError):  # which loading it says in its own words
        return None
