"""Attention and its statistics: tensors only, no model."""

from workbench.kernels.dispatch import attention
from workbench.kernels.masks import AttentionMask
from workbench.kernels.pattern import attention_pattern
from workbench.kernels.reference import attention_scores, attention_weights, pattern_statistics
from workbench.kernels.statistics import (
    AttentionOutput,
    AttentionStatistics,
    MatchLabels,
    StatisticsRequest,
    match_labels,
)

__all__ = [
    "AttentionMask",
    "AttentionOutput",
    "AttentionStatistics",
    "MatchLabels",
    "StatisticsRequest",
    "attention",
    "attention_pattern",
    "attention_scores",
    "attention_weights",
    "match_labels",
    "pattern_statistics",
]
