"""A model on disk in its own terms, from which ``from_pretrained`` loads it as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError
from workbench.loading.families.native import MODEL_TYPE
from workbench.loading.huggingface import tokenizer_files
from workbench.output import output_folder
from workbench.paths import expand_home

if TYPE_CHECKING:
    from workbench.transformer import HookedTransformer


def save_pretrained(model: HookedTransformer, folder: str | Path) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files into a folder, which is made where need be.

    The weights keep their type, names and shapes (``model.state_dict()``). Files of these names are replaced, and only
    once all have been written; others stay.

    Raises:
        WorkbenchError: the folder cannot be written, or holds a tokenizer where the model has none: loading would take
            it for the model's.
    """
    from safetensors.torch import save_file

    if model.tokenizer is None and (found := tokenizer_files(expand_home(folder))):
        raise WorkbenchError(
            f"{found[0]} belongs to another model, and this one has no tokenizer to replace it; name another folder"
        )
    config = {"model_type": MODEL_TYPE, "transformer_config": model.cfg.to_dict()}
    with output_folder(folder, advice="give another folder") as output, output.writing():
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (output.partial / "config.json").write_text(text + "\n", encoding="utf-8")
        weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, output.partial / "model.safetensors", metadata={"format": "pt"})
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(output.partial)
