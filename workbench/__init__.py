"""A mechanistic-interpretability workbench: a hookable Transformer whose flash attention emits attention statistics.

Names are imported on first use, so that ``import workbench`` and the command line's help do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.config import MixtureOfExperts as MixtureOfExperts
    from workbench.config import RopeScaling as RopeScaling
    from workbench.config import TransformerConfig as TransformerConfig
    from workbench.encoder_decoder import HookedEncoderDecoder as HookedEncoderDecoder
    from workbench.errors import CorruptWeightsError as CorruptWeightsError
    from workbench.errors import ModelNotFoundError as ModelNotFoundError
    from workbench.errors import UnsupportedModelError as UnsupportedModelError
    from workbench.errors import WorkbenchError as WorkbenchError
    from workbench.kernels import AttentionMask as AttentionMask
    from workbench.kernels import MatchLabels as MatchLabels
    from workbench.kernels import StatisticsRequest as StatisticsRequest
    from workbench.kv_cache import KVCache as KVCache
    from workbench.statistics import ModelStatistics as ModelStatistics
    from workbench.transformer import HookedTransformer as HookedTransformer
    from workbench.weight_processing import center_unembed as center_unembed
    from workbench.weight_processing import fold_layer_norm as fold_layer_norm

    __version__: str

_MODULE_OF = {
    "AttentionMask": "workbench.kernels",
    "CorruptWeightsError": "workbench.errors",
    "HookedEncoderDecoder": "workbench.encoder_decoder",
    "HookedTransformer": "workbench.transformer",
    "KVCache": "workbench.kv_cache",
    "MatchLabels": "workbench.kernels",
    "MixtureOfExperts": "workbench.config",
    "ModelNotFoundError": "workbench.errors",
    "ModelStatistics": "workbench.statistics",
    "RopeScaling": "workbench.config",
    "StatisticsRequest": "workbench.kernels",
    "TransformerConfig": "workbench.config",
    "UnsupportedModelError": "workbench.errors",
    "WorkbenchError": "workbench.errors",
    "center_unembed": "workbench.weight_processing",
    "fold_layer_norm": "workbench.weight_processing",
}
__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("attention-workbench")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
