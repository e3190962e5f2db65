"""What can be asked of attention besides its output, and what comes back. The README gives every definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.kernels.masks import FARTHEST, VisibleKeys, is_whole

MAX_CLASSES = 16


@dataclass(frozen=True, eq=False)
class MatchLabels:
    """Query i matches key j < i when ``key[j] == query[i]``; -1 matches nothing.

    Args:
        query: int64 [batch, n_queries].
        key: int64 [batch, n_keys].
    """

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            _check_labels(f"{name} labels", getattr(self, name))

    def pairs(self) -> Tensor:
        """Which pairs match, wherever the key lies: bool [batch, query, key]."""
        return (self.query[:, :, None] == self.key[:, None]) & (self.key >= 0)[:, None]


@dataclass(frozen=True, eq=False, kw_only=True)
class StatisticsRequest:
    """Which statistics to compute. A field left at its default costs nothing; lse always comes with the output.

    Args:
        entropy: entropy of every query's weights, in nats.
        max_weight: the largest weight of every query and the column it is on (``argmax_key``).
        mean_distance: weighted mean of i - j, of its absolute value without causality.
        sink_keys: k for the mass on the first k columns, or positions, int64 [batch, m] with -1 for unused.
        offsets: weights on the key that lies this far back; 0 is the query's own, 1 the previous one.
        match: name -> labels, for the mass on earlier keys whose label matches. A model, which knows its tokens, takes
            the names alone.
        classes: int64 [batch, n_keys] from 0 to 15, -1 for none, for the mass on every class of keys.
        received: attention that every key receives, as sum, as mean, and against uniform attention.
        query_weights: weights of the queries in ``received``, [batch, n_queries] or [batch, n_heads, n_queries].
        pooled: (rows, columns) of the blocks over which the map is pooled, by maximum and by sum.
        top_keys: this many largest weights of every query, and their columns.

    Raises:
        ValueError: a value outside its range, or a tensor of the wrong type.
    """

    entropy: bool = False
    max_weight: bool = False
    mean_distance: bool = False
    sink_keys: int | Tensor | None = None
    offsets: tuple[int, ...] = ()
    match: Mapping[str, MatchLabels] | tuple[str, ...] = field(default_factory=dict)
    classes: Tensor | None = None
    received: bool = False
    query_weights: Tensor | None = None
    pooled: tuple[int, int] | None = None
    top_keys: int = 0

    def __post_init__(self) -> None:
        for name in ("entropy", "max_weight", "mean_distance", "received"):
            if not isinstance(switch := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {switch!r}")
        if isinstance(self.sink_keys, Tensor):
            _check_labels("sink_keys", self.sink_keys)
        elif self.sink_keys is not None and (not is_whole(self.sink_keys) or self.sink_keys < 1):
            raise ValueError(f"sink_keys must be a positive count, positions or None, got {self.sink_keys!r}")
        offsets = self.offsets if isinstance(self.offsets, tuple) else (None,)
        if not all(is_whole(offset) and abs(offset) <= FARTHEST for offset in offsets):
            raise ValueError(f"offsets must be a tuple of whole numbers of at most 2³⁰, got {self.offsets!r}")
        if len(set(self.offsets)) < len(self.offsets):
            raise ValueError(f"offsets must differ from each other, got {self.offsets}")
        if not isinstance(self.match, (Mapping, tuple)):
            raise ValueError(f"match must map names to MatchLabels, or be a tuple of names, got {self.match!r}")
        if not all(isinstance(name, str) for name in self.match):
            raise ValueError(f"match must have strings as names, got {list(self.match)!r}")
        for name, labels in self.match.items() if isinstance(self.match, Mapping) else ():
            if not isinstance(labels, MatchLabels):
                raise ValueError(f"match[{name!r}] must be MatchLabels, got {type(labels).__name__}")
        if self.classes is not None:
            _check_labels("classes", self.classes)
            if self.classes.numel() and self.classes.max() >= MAX_CLASSES:
                raise ValueError(f"classes must be below {MAX_CLASSES}, got {int(self.classes.max())}")
        if self.pooled is not None:
            sizes = self.pooled if isinstance(self.pooled, tuple) else ()
            if len(sizes) != 2 or not all(is_whole(size) and size >= 1 for size in sizes):
                raise ValueError(f"pooled must be two positive block sizes (rows, columns), got {self.pooled!r}")
        weights = self.query_weights
        if weights is not None and not (isinstance(weights, Tensor) and weights.is_floating_point()):
            found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"query_weights must be a floating point tensor, got {found}")
        if self.query_weights is not None and not self.received:
            raise ValueError("query_weights are the weights of queries in received: ask for received=True as well")
        if not is_whole(self.top_keys) or self.top_keys < 0:
            raise ValueError(f"top_keys must be a whole number, not negative, got {self.top_keys!r}")

    @classmethod
    def all(
        cls, tokens: Tensor, *, key_padding: Tensor | None = None, documents: Tensor | None = None
    ) -> StatisticsRequest:
        """Everything but classes and top keys, for ``tokens`` int64 [batch, n] that attend to themselves.

        Labels come from the tokens; the pooled map has at most 256 blocks a side.
        """
        names = ("induction", "duplicate")
        match = {name: match_labels(tokens, name, key_padding=key_padding, documents=documents) for name in names}
        block = max(1, -(-tokens.shape[1] // 256))
        return cls(
            entropy=True,
            max_weight=True,
            mean_distance=True,
            sink_keys=4,
            offsets=(0, 1),
            match=match,
            received=True,
            pooled=(block, block),
        )

    def check(self, batch: int, n_heads: int, n_queries: int, n_keys: int, device: torch.device) -> None:
        """Refuses what does not fit attention of these sizes.

        Raises:
            ValueError: naming the field.
        """
        expected: list[tuple[str, Tensor, list[int]]] = []
        for name, labels in self.labels().items():
            expected.append((f"match[{name!r}].query", labels.query, [batch, n_queries]))
            expected.append((f"match[{name!r}].key", labels.key, [batch, n_keys]))
        if self.classes is not None:
            expected.append(("classes", self.classes, [batch, n_keys]))
        if self.query_weights is not None:
            heads = [n_heads] if self.query_weights.ndim == 3 else []
            expected.append(("query_weights", self.query_weights, [batch, *heads, n_queries]))
        if isinstance(self.sink_keys, Tensor):
            expected.append(("sink_keys", self.sink_keys, [batch, self.sink_keys.shape[1]]))
            if self.sink_keys.numel() and self.sink_keys.max() >= n_keys:
                raise ValueError(f"sink_keys holds position {int(self.sink_keys.max())}, but there are {n_keys} keys")
        for name, tensor, shape in expected:
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the queries on {device}: move it there")
        if self.top_keys > n_keys:
            raise ValueError(f"top_keys asks for {self.top_keys} of {n_keys} keys")

    def of_real_queries(self, query_padding: Tensor | None) -> StatisticsRequest:
        """Itself with weights of 0 for padding, behind which anything may stand."""
        weights = self.query_weights
        if weights is None or query_padding is None:
            return self
        real = query_padding if weights.ndim == 2 else query_padding[:, None]
        return replace(self, query_weights=torch.where(real, weights, 0.0))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for."""
        return not any(
            (
                self.entropy,
                self.max_weight,
                self.mean_distance,
                self.sink_keys is not None,
                self.offsets,
                self.match,
                self.classes is not None,
                self.received,
                self.pooled,
                self.top_keys,
            )
        )

    def labels(self) -> Mapping[str, MatchLabels]:
        """``match`` as attention needs it.

        Raises:
            ValueError: names without labels.
        """
        if not isinstance(self.match, Mapping):
            raise ValueError("match must map names to MatchLabels here (match_labels makes them); names are for models")
        return self.match

    def sink_positions(self, batch: int, n_keys: int, device: torch.device) -> Tensor:
        """Columns of the sink, each once, -1 for unused: int64 [batch, m]."""
        if isinstance(self.sink_keys, Tensor):
            ordered = self.sink_keys.sort(dim=1).values
            repeated = pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))[:, : ordered.shape[1]]
            return ordered.masked_fill(repeated, -1)
        return torch.arange(min(self.sink_keys or 0, n_keys), device=device).expand(batch, -1)

    def class_indicators(self, dtype: torch.dtype) -> Tensor:
        """One column per class, up to the largest that occurs: [batch, key, class] of 0 and 1."""
        assert self.classes is not None
        n_classes = int(self.classes.max()) + 1 if self.classes.numel() else 0
        return (self.classes[..., None] == torch.arange(n_classes, device=self.classes.device)).to(dtype)


class AttentionStatistics(Mapping[str, Any]):
    """Name -> tensor; ``match_mass`` maps the names of the request to tensors. The README gives names and shapes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"{name!r} was not requested; there are: {', '.join(self._values) or 'none'}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"AttentionStatistics({', '.join(self._values)})"


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """What attention returns.

    Args:
        z: [batch, head, query, d_head], in the dtype of the inputs.
        lse: [batch, head, query], float32 (float64 for float64 inputs), in nats; -inf for a row without a key.
        statistics: what was requested, without gradients, always with ``lse`` and, where there are sink logits,
            ``virtual_mass``.
    """

    z: Tensor
    lse: Tensor
    statistics: AttentionStatistics


def match_labels(
    tokens: Tensor, name: str, *, key_padding: Tensor | None = None, documents: Tensor | None = None
) -> MatchLabels:
    """Labels for tokens int64 [batch, n] that attend to themselves.

    "induction" marks the keys that follow an earlier occurrence of the query's token (Olsson et al. 2022), "duplicate"
    the earlier occurrences themselves (Wang et al. 2022). Padding matches nothing, and the first real token of a
    sequence or document follows nothing.

    Raises:
        ValueError: an unknown name, or tensors that do not fit.
    """
    _check_labels("tokens", tokens)
    real = tokens >= 0
    for argument, tensor, dtype in (("key_padding", key_padding, torch.bool), ("documents", documents, torch.int64)):
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.shape != tokens.shape:
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"{argument} must be a {dtype} tensor of the tokens' shape {list(tokens.shape)}, got {found}"
            )
    if key_padding is not None:
        real = real & key_padding
    labels = tokens.masked_fill(~real, -1)
    if name == "duplicate":
        return MatchLabels(query=labels, key=labels)
    if name == "induction":
        previous = pad(labels[:, :-1], (1, 0), value=-1)[:, : labels.shape[1]]
        if documents is not None:
            first = pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
            previous = previous.masked_fill(first[:, : labels.shape[1]], -1)
        return MatchLabels(query=labels, key=previous.masked_fill(~real, -1))
    raise ValueError(f'name must be "induction" or "duplicate", got {name!r}')


def received_statistics(received: Tensor, mask: VisibleKeys, query_weights: Tensor | None) -> dict[str, Tensor]:
    """The three forms of attention received, from its sum over queries [batch, head, key].

    ``received_mean`` is per query that may see the key, ``received_lift`` is relative to what the key would receive if
    every query spread its weight evenly over the keys it sees; both are NaN for a key that no query sees.
    """
    n_visible = mask.keys_per_query()[:, None]  # [batch, 1, query]
    n_seeing = mask.sum_over_queries((n_visible > 0).double())  # [batch, 1, key]
    share = torch.where(n_visible > 0, 1 / n_visible.double(), 0.0)
    even = mask.sum_over_queries(share if query_weights is None else share * weights_per_head(query_weights))
    unseen = n_seeing == 0
    return {
        "received": received,
        "received_mean": (received / n_seeing).masked_fill(unseen, torch.nan).to(received.dtype),
        "received_lift": (received / even).masked_fill(unseen, torch.nan).to(received.dtype),
    }


def weights_per_head(query_weights: Tensor) -> Tensor:
    """Query weights with a head axis: [batch, head or 1, query]."""
    return query_weights if query_weights.ndim == 3 else query_weights[:, None]


def _check_labels(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or tensor.ndim != 2:
        found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be an int64 tensor with two axes, got {found}")
    if tensor.numel() and tensor.min() < -1:
        raise ValueError(f"{name} must not be below -1, got {int(tensor.min())}")
