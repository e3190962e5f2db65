"""What every kind of source is brought to before a family turns it into a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A model in Hugging Face's terms.

    Attributes:
        hf_config: what a config.json holds.
        tensors: Hugging Face names → tensors, read when they are asked for.
        tokenizer: a transformers tokenizer, or None.
        model_name: what results call the model.
        revision: a commit, or "sha256:" and the beginning of the weights' digest; None where there is neither.
        weights_description: how the weights were stored; its last word is the type that ``tensors`` come in.
        described_as: the source in error messages.
    """

    hf_config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Any
    model_name: str
    revision: str | None
    weights_description: str
    described_as: str
