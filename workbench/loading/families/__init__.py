"""The supported architectures, one module each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import UnsupportedModelError
from workbench.loading.families import gpt2, llama
from workbench.loading.families.common import Family

FAMILIES: Mapping[str, Family] = {
    model_type: module.FAMILY for module in (gpt2, llama) for model_type in module.FAMILY.architectures
}


def find_family(hf_config: Mapping[str, Any], described_as: str) -> Family:
    """The family of a Hugging Face configuration.

    Raises:
        UnsupportedModelError: an architecture that is not supported, or one without a language-model head.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{described_as}: the model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    wanted = family.architectures[model_type]
    architectures = hf_config.get("architectures") or []
    for architecture in architectures if isinstance(architectures, list) else [architectures]:
        if architecture != wanted:
            raise UnsupportedModelError(
                f"{described_as}: {architecture} is not supported; load a {wanted}, which has the language-model head"
            )
    return family
