"""From what a user asks of a model to what the kernel computes in each layer, and back as one tensor per statistic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.components.positions import Rotation
from workbench.kernels import (
    AttentionMask,
    AttentionOutput,
    AttentionStatistics,
    MatchLabels,
    StatisticsRequest,
    match_labels,
)

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


class ModelStatistics(AttentionStatistics):
    """Statistics of every layer that ran, by name: the kernel's shapes with a leading layer axis.

    ``entropy`` is [layer, batch, head, query], ``received`` [layer, batch, head, key], ``match_mass`` a mapping from
    label name to [layer, batch, head, query], and so on (see StatisticsRequest). Layers count from ``first_layer``.
    """

    def __init__(self, layers: Sequence[Mapping[str, Any]], first_layer: int = 0) -> None:
        super().__init__({name: _stack([layer[name] for layer in layers]) for name in layers[0]})
        self.first_layer = first_layer
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

    def __post_init__(self) -> None:
        if not isinstance(self.request, StatisticsRequest):
            raise ValueError(f"the request must be a StatisticsRequest, got {type(self.request).__name__}")


@dataclass(eq=False)
class AttentionContext:
    """What all layers of one forward pass share.

    tokens [batch, pos] are absent in a run that starts from a residual; ``rotation`` is None without rotary positions.
    ``collector`` is None unless run_with_statistics asked for ``user_request`` in every layer.
    """

    mask: AttentionMask
    rotation: Rotation | None
    tokens: Tensor | None
    shape: tuple[int, int]
    device: torch.device
    user_request: StatisticsRequest
    collector: StatisticsCollector | None = None

    @cached_property
    def request(self) -> StatisticsRequest:
        """The user's request with label names and sink counts turned into tensors of this run."""
        request = self.user_request
        if isinstance(request.sink_keys, int):
            request = dataclasses.replace(request, sink_keys=self._first_real_tokens(request.sink_keys))
        if request.match:
            request = dataclasses.replace(request, match=self._match(request.match))
        return request

    def layer_request(self, hooks: Iterable[str]) -> StatisticsRequest | None:
        """What one layer computes: everything that is collected, and what its own hooks listen to.

        Raises:
            ValueError: a hook whose parameters the request does not give.
        """
        fields = {wanted for name in hooks if (wanted := STATISTIC_HOOKS[name].field)}
        for name in fields - _SWITCHES:
            if not _is_given(getattr(self.user_request, name)):
                raise ValueError(
                    f"the hook for {name} needs its parameters: set model.statistics_request to a "
                    f"StatisticsRequest with {name}=…"
                )
        if self.collector is not None:
            switched: dict[str, Any] = dict.fromkeys(fields & _SWITCHES, True)
            return dataclasses.replace(self.request, **switched)
        if not fields:
            return None
        chosen: dict[str, Any] = {name: True if name in _SWITCHES else getattr(self.request, name) for name in fields}
        if "received" in fields:
            chosen["query_weights"] = self.request.query_weights
        return StatisticsRequest(**chosen)

    def collect(self, output: AttentionOutput) -> None:
        if self.collector is not None:
            self.collector.layers.append(output.statistics)

    def _first_real_tokens(self, count: int) -> Tensor | int:
        """Positions [batch, m] of the first ``count`` real tokens of each sequence and document; −1 fills the rest."""
        padding, documents = self.mask.key_padding, self.mask.documents
        if padding is None and documents is None:
            return min(count, self.shape[1])
        real = torch.ones(self.shape, dtype=torch.bool, device=self.device) if padding is None else padding
        rank = rank_in_document(real, documents)
        chosen = real & (rank < count)
        width = max(int(chosen.sum(dim=1).max()), 1)
        positions = torch.arange(self.shape[1], device=self.device).expand(self.shape)
        ordered = positions.masked_fill(~chosen, self.shape[1]).sort(dim=1).values[:, :width]
        return ordered.masked_fill(ordered == self.shape[1], -1)

    def _match(self, match: tuple[str, ...] | Mapping[str, MatchLabels]) -> Mapping[str, MatchLabels]:
        given = match if isinstance(match, Mapping) else dict.fromkeys(match)
        labels = {}
        for name, value in given.items():
            if name not in ("induction", "duplicate"):
                if value is None:
                    raise ValueError(
                        f"match={name!r}: a model builds 'induction' and 'duplicate'; give labels for others"
                    )
                labels[name] = value
                continue
            if self.tokens is None:
                raise ValueError(f"match={name!r} needs tokens, but this run started from a residual (start_at_layer)")
            own = match_labels(self.tokens, name, key_padding=self.mask.key_padding, documents=self.mask.documents)
            if value is not None and not _same_labels(value, own):
                raise ValueError(
                    f"the request's {name!r} labels were made from other tokens than this run's; "
                    f"pass match=({name!r},) and the model builds them"
                )
            labels[name] = own
        return labels


_SWITCHES = {f.name for f in dataclasses.fields(StatisticsRequest) if isinstance(f.default, bool)}


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


def _same_labels(left: MatchLabels, right: MatchLabels) -> bool:
    return left.query.shape == right.query.shape and all(
        torch.equal(getattr(left, side).to(right.query.device), getattr(right, side)) for side in ("query", "key")
    )


def _is_given(parameter: object) -> bool:
    return parameter is not None and (isinstance(parameter, Tensor) or bool(parameter))
