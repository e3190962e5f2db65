"""The statistics of a model: what is computed by default, where hooks read it, and one tensor for all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.kernels import AttentionOutput, AttentionStatistics, StatisticsRequest

# What run_with_statistics computes, and where the statistics' hooks find their parameters, unless the user says else.
DEFAULT_REQUEST = StatisticsRequest(
    entropy=True,
    max_weight=True,
    mean_distance=True,
    sink_keys=4,
    offsets=(0, 1),
    match=("induction", "duplicate"),
    received=True,
)


@dataclass(frozen=True)
class StatisticHook:
    """A statistic's hook point: the request field that switches it on, and its value [batch, head, pos, width]."""

    field: str | None
    read: Callable[[AttentionOutput], Tensor]


def _column(key: str) -> Callable[[AttentionOutput], Tensor]:
    return lambda output: output.statistics[key][..., None]


STATISTIC_HOOKS: dict[str, StatisticHook] = {
    "hook_lse": StatisticHook(None, _column("lse")),
    "hook_entropy": StatisticHook("entropy", _column("entropy")),
    "hook_max_weight": StatisticHook("max_weight", _column("max_weight")),
    "hook_mean_distance": StatisticHook("mean_distance", _column("mean_distance")),
    "hook_sink_mass": StatisticHook("sink_keys", _column("sink_mass")),
    "hook_offset_mass": StatisticHook("offsets", lambda output: output.statistics["offset_mass"]),
    "hook_match_mass": StatisticHook(
        "match", lambda output: torch.stack(list(output.statistics["match_mass"].values()), dim=-1)
    ),
    "hook_class_mass": StatisticHook("classes", lambda output: output.statistics["class_mass"]),
    "hook_received": StatisticHook("received", _column("received")),
}

# They compare positions of one text, so cross-attention has none.
WITHIN_ONE_TEXT = frozenset({"hook_mean_distance", "hook_offset_mass", "hook_match_mass"})


class ModelStatistics(AttentionStatistics):
    """Statistics of every layer that ran, by name: the kernel's shapes with a leading layer axis.

    ``entropy`` is [layer, batch, head, query], ``received`` [layer, batch, head, key], ``match_mass`` a mapping from
    label name to [layer, batch, head, query], and so on (see StatisticsRequest). Index i of the layer axis is the layer
    ``layer_indices[i]`` of the model.

    The rows of pads are 0: of padded texts take means over the rows that ``real`` marks, bool [batch, query] (None
    where every query is real).
    """

    def __init__(
        self, layers: Sequence[Mapping[str, Any]], layer_indices: Sequence[int], real: Tensor | None = None
    ) -> None:
        super().__init__({name: _stack([layer[name] for layer in layers]) for name in layers[0]})
        self.layer_indices = tuple(layer_indices)
        self.real = real
        self.n_layers = len(layers)

    def __repr__(self) -> str:
        return f"ModelStatistics({self.n_layers} layers: {', '.join(self)})"


def _stack(values: list[Any]) -> Tensor | dict[str, Tensor]:
    if isinstance(values[0], Mapping):
        return {name: torch.stack([value[name] for value in values]) for name in values[0]}
    return torch.stack(values)


@dataclass(eq=False)
class StatisticsCollector:
    """What every layer of one forward pass computes, and what the layers have computed so far.

    Raises:
        ValueError: ``request`` is no StatisticsRequest.
    """

    request: StatisticsRequest
    layers: list[AttentionStatistics] = field(default_factory=list)
    real: Tensor | None = None  # bool [batch, query], of the layers that have run

    def __post_init__(self) -> None:
        if not isinstance(self.request, StatisticsRequest):
            raise ValueError(f"the request must be a StatisticsRequest, got {type(self.request).__name__}")


def rank_in_document(real: Tensor, documents: Tensor | None) -> Tensor:
    """The index of each token among the real tokens of its sequence, or of its document; real is bool [batch, pos].

    Returns int64 [batch, pos]; the rank of a pad is that of the next real token.
    """
    rank = real.long().cumsum(dim=1) - real.long()
    if documents is None:
        return rank
    starts = torch.ones_like(real)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    rank_at_start = torch.where(starts, rank, -1).cummax(dim=1).values
    return rank - rank_at_start
