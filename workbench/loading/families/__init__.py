"""The supported architectures, one module each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import UnsupportedModelError
from workbench.loading.families import (
    bert,
    bloom,
    falcon,
    gemma,
    gpt2,
    gpt_neo,
    gpt_oss,
    gptj,
    llama,
    marian,
    mixtral,
    mpt,
    native,
    neox,
    olmo2,
    opt,
    phi3,
    qwen3,
    t5,
)
from workbench.loading.families.common import Family, named_architectures

_ALL = (
    gpt2.FAMILY, gpt_neo.FAMILY, gptj.FAMILY, neox.FAMILY, opt.FAMILY, bloom.FAMILY, mpt.FAMILY, falcon.FAMILY,
    llama.FAMILY, qwen3.FAMILY, olmo2.FAMILY, phi3.FAMILY,
    gemma.GEMMA, gemma.GEMMA2, gemma.GEMMA3, gemma.GEMMA3_WITH_IMAGES,
    mixtral.FAMILY, gpt_oss.FAMILY,
    bert.BERT, bert.ROBERTA, bert.DISTILBERT, t5.FAMILY, marian.FAMILY,
    native.FAMILY,
)  # fmt: skip
FAMILIES: Mapping[str, Family] = {model_type: family for family in _ALL for model_type in family.architectures}


def find_family(hf_config: Mapping[str, Any], described_as: str) -> Family:
    """The family of a Hugging Face configuration.

    Raises:
        UnsupportedModelError: an architecture that is not supported.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{described_as}: the model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    headed, base_model = family.headed(model_type), family.base_models.get(model_type)
    for architecture in named_architectures(hf_config):
        if architecture not in headed and architecture != base_model:
            raise UnsupportedModelError(
                f"{described_as}: {architecture} is not supported; load a {headed[0]}, which has the language-model "
                f"head{f', or a {base_model}' if base_model else ''}"
            )
    return family
