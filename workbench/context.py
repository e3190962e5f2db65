"""What the layers of one forward pass share: masks, positions, and what they compute of their attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from workbench.components.positions import Rotation, alibi_slopes, relative_offset_bias, rotary_tables
from workbench.config import AttentionType, TransformerConfig
from workbench.kernels import AttentionMask, AttentionOutput, MatchLabels, StatisticsRequest, match_labels
from workbench.kv_cache import KVCache
from workbench.statistics import STATISTIC_HOOKS, StatisticsCollector, rank_in_document


@dataclass(frozen=True, eq=False)
class PositionRules:
    """How attention learns where queries and keys stand; absent parts do not apply.

    ``query_rotation`` and ``key_rotation`` are tables [batch, pos, rotated dim]; ``alibi_slopes`` [n_heads];
    ``offset_bias`` [n_heads, n_queries + n_keys − 1], as ``workbench.kernels.attention`` reads it.
    """

    query_rotation: Rotation | None = None
    key_rotation: Rotation | None = None
    alibi_slopes: Tensor | None = None
    offset_bias: Tensor | None = None


@dataclass(eq=False)
class AttentionContext:
    """What all layers with one kind of attention share in one forward pass.

    ``tokens`` [batch, key] are absent in a run that starts from a residual, ``memory`` [batch, key, d_model] in
    self-attention. ``collector`` is None unless run_with_statistics asked for ``user_request`` in these layers.
    """

    mask: AttentionMask
    positions: PositionRules
    tokens: Tensor | None
    n_queries: int
    n_keys: int
    user_request: StatisticsRequest
    collector: StatisticsCollector | None = None
    cache: KVCache | None = None
    memory: Tensor | None = None

    @cached_property
    def request(self) -> StatisticsRequest:
        """The user's request with label names and sink counts turned into tensors of this run."""
        request = self.user_request
        if self.memory is not None:
            if self.collector is not None and (request.offsets or request.match or request.mean_distance):
                raise ValueError(
                    "offsets, match and mean_distance compare positions of one text, but cross-attention reads "
                    "another; pass a StatisticsRequest without them"
                )
            request = request_across_texts(request)
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
            self.collector.real = self.mask.query_padding

    def _first_real_tokens(self, count: int) -> Tensor | int:
        """Positions [batch, m] of the first ``count`` real tokens of each sequence and document; −1 fills the rest."""
        padding, documents = self.mask.key_padding, self.mask.documents
        if padding is None and documents is None:
            return min(count, self.n_keys)
        given = documents if padding is None else padding
        assert given is not None
        real = torch.ones_like(given, dtype=torch.bool) if padding is None else padding
        rank = rank_in_document(real, documents)
        chosen = real & (rank < count)
        width = max(int(chosen.sum(dim=1).max()), 1)
        positions = torch.arange(self.n_keys, device=real.device).expand(real.shape)
        ordered = positions.masked_fill(~chosen, self.n_keys).sort(dim=1).values[:, :width]
        return ordered.masked_fill(ordered == self.n_keys, -1)

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
            keys = own.key
            if self.cache is not None and self.cache.previous is not None and name == "induction":
                keys = self.cache.previous  # the token before a remembered one may have been evicted
            own = MatchLabels(own.query[:, -self.n_queries :], keys)
            if value is not None and not _same_labels(value, own):
                raise ValueError(
                    f"the request's {name!r} labels were made from other tokens than this run's; "
                    f"pass match=({name!r},) and the model builds them"
                )
            labels[name] = own
        return labels


def request_across_texts(request: StatisticsRequest) -> StatisticsRequest:
    """The request without what compares positions of one text."""
    return dataclasses.replace(request, offsets=(), match={}, mean_distance=False)


@dataclass(frozen=True, eq=False)
class Memory:
    """What cross-attention reads: the encoder's stream [batch, key, d_model], and which of it is real [batch, key].

    ``collector`` is None unless the statistics of cross-attention were asked for.
    """

    stream: Tensor
    real: Tensor | None
    collector: StatisticsCollector | None = None

    def context(self, sequence: KeysAndQueries, request: StatisticsRequest) -> AttentionContext:
        """The context in which the queries of ``sequence`` read this memory."""
        return AttentionContext(
            mask=AttentionMask(causal=False, key_padding=self.real, query_padding=sequence.query_real),
            positions=PositionRules(),
            tokens=None,
            n_queries=sequence.n_queries,
            n_keys=self.stream.shape[1],
            user_request=request if self.collector is None else self.collector.request,
            collector=self.collector,
            memory=self.stream,
        )


@dataclass(frozen=True, eq=False)
class Contexts:
    """The contexts of one stack of blocks: one for each kind of self-attention in it, and that of cross-attention."""

    self_attention: Mapping[AttentionType, AttentionContext]
    cross_attention: AttentionContext | None = None

    def of(self, kind: AttentionType) -> AttentionContext:
        return self.self_attention[kind]

    @property
    def cross(self) -> AttentionContext:
        assert self.cross_attention is not None, "a block that reads an encoder runs after one"
        return self.cross_attention


@dataclass(frozen=True, eq=False)
class KeysAndQueries:
    """Which tokens attend to which in one forward pass; the queries are the last of the keys.

    Attributes:
        query_ids, key_ids: int64 [batch, pos], positions that rotary tables and relative biases are made from.
        real: bool [batch, key], or None where every token is real.
        documents: int64 [batch, key] or None.
    """

    query_ids: Tensor
    key_ids: Tensor
    real: Tensor | None = None
    documents: Tensor | None = None

    @property
    def n_queries(self) -> int:
        return self.query_ids.shape[1]

    @property
    def n_keys(self) -> int:
        return self.key_ids.shape[1]

    @property
    def query_real(self) -> Tensor | None:
        return None if self.real is None else self.real[:, -self.n_queries :]

    def mask(self, *, causal: bool, window: int | None = None, n_global: int = 0) -> AttentionMask:
        """The mask of self-attention.

        Raises:
            ValueError: global tokens where a column is not the rank of its token.
        """
        if window is not None and n_global and (self.documents is not None or self._starts_with_pads()):
            raise ValueError(
                "n_global_tokens counts from the first column, so texts must not be padded on the left or packed "
                "as documents; pad on the right"
            )
        return AttentionMask(
            causal=causal, window=window, n_global=n_global if window is not None else 0,
            key_padding=self.real, query_padding=self.query_real, documents=self.documents,
        )  # fmt: skip

    def _starts_with_pads(self) -> bool:
        return self.real is not None and not bool(self.real[:, 0].all())


def position_rules(
    cfg: TransformerConfig,
    kind: AttentionType,
    sequence: KeysAndQueries,
    relative_table: Tensor | None,
    *,
    causal: bool,
) -> PositionRules:
    """The rules of one kind of layer; ``relative_table`` is W_rel [n_relative_buckets, n_heads] where there is one."""
    device = sequence.key_ids.device
    if cfg.positional_embedding_type == "rotary":
        has_own_base = kind == "local" and cfg.rotary_base_local is not None
        base = cfg.rotary_base_local if has_own_base else cfg.rotary_base
        scaling = None if has_own_base else cfg.rope_scaling
        assert base is not None
        length = int(sequence.key_ids.max()) + 1 if scaling is not None and scaling.depends_on_length else None
        key_rotation = rotary_tables(
            sequence.key_ids, cfg.rotated_dim, base, cfg.dtype, scaling=scaling, length=length,
            adjacent_pairs=cfg.rotary_adjacent_pairs,
        )  # fmt: skip
        cosine, sine = key_rotation
        query_rotation = cosine[:, -sequence.n_queries :], sine[:, -sequence.n_queries :]
        return PositionRules(query_rotation=query_rotation, key_rotation=key_rotation)
    if cfg.positional_embedding_type == "alibi":
        slopes = alibi_slopes(cfg.n_heads) if cfg.alibi_slopes is None else torch.tensor(cfg.alibi_slopes)
        return PositionRules(alibi_slopes=slopes.to(device))
    if relative_table is not None:
        bias = relative_offset_bias(
            relative_table, sequence.n_queries, sequence.n_keys, sequence.n_keys - sequence.n_queries,
            cfg.relative_max_distance, bidirectional=not causal,
        )  # fmt: skip
        return PositionRules(offset_bias=bias)
    return PositionRules()


_SWITCHES = {f.name for f in dataclasses.fields(StatisticsRequest) if isinstance(f.default, bool)}


def _same_labels(left: MatchLabels, right: MatchLabels) -> bool:
    return left.query.shape == right.query.shape and all(
        torch.equal(getattr(left, side).to(right.query.device), getattr(right, side)) for side in ("query", "key")
    )


def _is_given(parameter: object) -> bool:
    return parameter is not None and (isinstance(parameter, Tensor) or bool(parameter))
