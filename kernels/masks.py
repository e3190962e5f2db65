"""Which key a query may see, and which tiles of the score matrix hold any visible pair.

Whatever the options, the keys of one query row are two column intervals: what causality, the window and the document
leave (``first <= column < end``), and the global columns before them (``global_first <= column < global_end``). Key
padding then removes single columns. Every backend reads the mask through these, so there is one definition of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor
from torch.nn.functional import pad

Index = Tensor | int
Columns = tuple[int, int]  # from the first up to the second

FARTHEST = 2**30  # positions and distances fit into 32 bits, also their sums


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """Description of a mask that stays O(n) in memory.

    Positions are absolute: query row r sits at ``r + query_offset``, key column c at c. A pair is visible when every
    condition that is set allows it; ``n_global`` exempts the first columns from the window, and only from it.

    Args:
        causal: key j is visible to query i only if j <= i.
        window: visible only if |i - j| < window; causal, that is ``window`` keys including the query's own.
        n_global: this many first columns stay visible whatever the window.
        key_padding: bool [batch, n_keys], True = real.
        query_padding: bool [batch, n_queries], True = real; other rows are empty and count in nothing.
        documents: int64 [batch, n_keys]; each run of equal ids is a document and pairs stay within one. The queries
            own the last n_queries entries.
        query_offset: position of query row 0; None means n_keys - n_queries (the last query sees the last key).

    Raises:
        ValueError: a value outside its range, or a tensor of the wrong type.
    """

    causal: bool = True
    window: int | None = None
    n_global: int = 0
    key_padding: Tensor | None = None
    query_padding: Tensor | None = None
    documents: Tensor | None = None
    query_offset: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.causal, bool):
            raise ValueError(f"causal must be True or False, got {self.causal!r}")
        if self.window is not None and (not is_whole(self.window) or self.window < 1):
            raise ValueError(f"window must be at least 1 (a query's own key) or None, got {self.window!r}")
        if not is_whole(self.n_global) or self.n_global < 0:
            raise ValueError(f"n_global must be a whole number, not negative, got {self.n_global!r}")
        if self.query_offset is not None and not (is_whole(self.query_offset) and abs(self.query_offset) <= FARTHEST):
            raise ValueError(f"query_offset must be a whole number of at most 2³⁰ or None, got {self.query_offset!r}")
        for name, dtype in (("key_padding", torch.bool), ("query_padding", torch.bool), ("documents", torch.int64)):
            tensor = getattr(self, name)
            if tensor is not None and (not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.ndim != 2):
                raise ValueError(f"{name} must be a {dtype} tensor [batch, position], got {_describe(tensor)}")

    def bind(self, batch: int, n_queries: int, n_keys: int, device: torch.device | str = "cpu") -> VisibleKeys:
        """The mask for given sizes.

        Raises:
            ValueError: a mask tensor whose shape or device does not fit.
        """
        self._check(batch, n_queries, n_keys, torch.device(device))
        offset = n_keys - n_queries if self.query_offset is None else self.query_offset
        position = (torch.arange(n_queries, device=device) + offset)[None]  # [1, query]
        first, end = torch.zeros_like(position), torch.full_like(position, n_keys)
        if self.documents is not None:
            first, end = _document_bounds(self.documents)
            first, end = first[:, n_keys - n_queries :], end[:, n_keys - n_queries :]  # [batch, query]
        if self.causal:
            end = torch.minimum(end, position + 1)
        main, global_columns = (first, end), None
        if self.window is not None:
            window = min(self.window, 2 * FARTHEST)  # positions differ by less
            main = torch.maximum(first, position - window + 1), torch.minimum(end, position + window)
            global_columns = first, end.clamp(max=min(self.n_global, n_keys))
        return VisibleKeys(
            causal=self.causal,
            has_documents=self.documents is not None,
            has_global=self.window is not None and self.n_global > 0,
            query_offset=offset,
            n_keys=n_keys,
            key_padding=self.key_padding,
            query_padding=self.query_padding,
            real_before=None if self.key_padding is None else pad(self.key_padding.long().cumsum(1), (1, 0)),
            **_disjoint_intervals(main, global_columns, self.query_padding, (batch, n_queries), n_keys),
        )

    def _check(self, batch: int, n_queries: int, n_keys: int, device: torch.device) -> None:
        expected = {
            "key_padding": (batch, n_keys),
            "query_padding": (batch, n_queries),
            "documents": (batch, n_keys),
        }
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the queries on {device}: move it there")
        if self.documents is not None and n_queries > n_keys:
            raise ValueError(
                f"documents: the queries own the last n_queries entries, but there are {n_queries} queries "
                f"for {n_keys} keys"
            )


@dataclass(frozen=True)
class KeyGrid:
    """Columns in blocks that do not cross multiples of ``period``: the last block of a period is ragged.

    ``size`` is the length of the others, at most ``period``.
    """

    n_keys: int
    size: int = 1
    period: int = 1

    @property
    def blocks_per_period(self) -> int:
        return -(-self.period // self.size)

    def floor(self, column: int) -> int:
        """First column of the block that a column is in."""
        return column - column % self.period % self.size

    def ceil(self, column: int) -> int:
        """The nearest edge of a block at or after a column."""
        start = self.floor(column)
        return start if start == column else self.edges(self.index(column))[1]

    def index(self, column: int) -> int:
        """Index of the block that a column is in."""
        return column // self.period * self.blocks_per_period + column % self.period // self.size

    def edges(self, index: int) -> tuple[int, int]:
        """First column and end of a block."""
        period, part = divmod(index, self.blocks_per_period)
        start = period * self.period + part * self.size
        return start, min(start + self.size, (period + 1) * self.period, self.n_keys)


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """A mask bound to sizes: two disjoint column intervals per query row, and the padding of the keys.

    An interval without columns is [n_keys, 0), so that minima and maxima over rows pass it by. The global interval lies
    left of the main one and does not touch it.
    """

    causal: bool
    has_documents: bool
    has_global: bool  # whether there may be global intervals
    query_offset: int
    n_keys: int
    first: Tensor  # int64 [batch, query]
    end: Tensor  # int64 [batch, query], exclusive
    global_first: Tensor  # int64 [batch, query]
    global_end: Tensor  # int64 [batch, query], exclusive
    key_padding: Tensor | None  # bool [batch, key]
    query_padding: Tensor | None  # bool [batch, query]
    real_before: Tensor | None  # int64 [batch, key + 1], how many keys left of a column are real; None without padding

    @property
    def n_queries(self) -> int:
        return self.first.shape[1]

    @property
    def by_distance(self) -> bool:
        """Whether only their distance decides if a query sees a key."""
        has_padding = self.key_padding is not None or self.query_padding is not None
        return not (self.has_documents or self.has_global or has_padding)

    @cached_property
    def _bounds(self) -> Tensor:
        """All four together, [4, batch, query]."""
        return torch.stack((self.first, self.end, self.global_first, self.global_end))

    def visible(self, batch: Index, row: Tensor | slice, column: Tensor) -> Tensor:
        """Whether the key of a column is visible to the query of a row; index tensors broadcast against each other."""
        inside = (column >= self.first[batch, row]) & (column < self.end[batch, row])
        if self.has_global:
            inside |= (column >= self.global_first[batch, row]) & (column < self.global_end[batch, row])
        if self.key_padding is not None:
            inside &= self.key_padding[batch, column]
        return inside

    def distance(self, row: Tensor, column: Tensor) -> Tensor:
        """i - j, or its absolute value without causality; indices broadcast against each other."""
        offset = row + self.query_offset - column
        return offset if self.causal else offset.abs()

    def keys_per_query(self) -> Tensor:
        """Number of visible keys, int64 [batch, query]."""
        counts = torch.zeros_like(self.first)
        for first, end in ((self.first, self.end), (self.global_first, self.global_end)):
            length = end - first
            if self.real_before is not None:
                length = self.real_before.gather(1, end) - self.real_before.gather(1, first)
            counts += torch.where(end > first, length, 0)
        return counts

    def sum_over_queries(self, weights: Tensor) -> Tensor:
        """For every key, the sum of ``weights`` [batch, head, query] over the queries that see it.

        A row covers the columns from ``first`` to ``end``, so the sum is that of the rows that have begun less that of
        the rows that have ended. Sorting instead of scattering keeps the order of additions fixed on every device.

        Returns:
            float64 [batch, head, key]; sums of integers are exact.
        """
        shape = (*weights.shape[:2], self.n_keys)
        columns = torch.arange(self.n_keys, device=weights.device).expand(shape[0], -1).contiguous()
        total = torch.zeros(shape, dtype=torch.float64, device=weights.device)
        for first, end in ((self.first, self.end), (self.global_first, self.global_end)):
            kept = torch.where((end > first)[:, None], weights.double(), 0.0)
            for bound, sign in ((first, 1.0), (end, -1.0)):
                ordered, order = bound.sort(dim=1, stable=True)
                sums = pad(kept.gather(2, order[:, None].expand(kept.shape)).cumsum(2), (1, 0))
                n_rows = torch.searchsorted(ordered, columns, right=True)  # rows whose bound is at or before a column
                total += sign * sums.gather(2, n_rows[:, None].expand(shape))
        return total if self.key_padding is None else torch.where(self.key_padding[:, None], total, 0.0)

    def spans(self, batch: int, rows: slice, grid: KeyGrid, width: int) -> list[ColumnSpan]:
        """Disjoint spans of columns, left to right, that hold every pair visible to a block of rows.

        Spans are at most ``width`` long, are made of whole blocks of the grid, and lie within one of its periods where
        those end in a shorter block. Outside of its masked parts a span holds visible pairs only; what cannot be told
        from the bounds of the rows alone counts as masked. Spans without any visible pair are left out.
        """
        extremes = self._bounds[:, batch, rows].aminmax(dim=1)
        lowest, highest = extremes.min.tolist(), extremes.max.tolist()
        intervals = [  # (earliest first, latest first, shortest end, longest end)
            (lowest[i], highest[i], lowest[i + 1], highest[i + 1]) for i in (0, 2)
        ]
        cuts = {0, self.n_keys}
        for earliest, latest, shortest, longest in intervals:
            cuts |= {grid.floor(earliest), grid.floor(shortest), grid.ceil(latest), grid.ceil(longest)}
        seen: list[Columns] = []
        masked: list[Columns] = []
        for start, stop in pairwise(sorted(cut for cut in cuts if cut <= self.n_keys)):
            if all(earliest >= stop or longest <= start for earliest, _, _, longest in intervals):
                continue
            _append(seen, start, stop)
            if not any(latest <= start and shortest >= stop for _, latest, shortest, _ in intervals):
                _append(masked, start, stop)
        parts = [part for start, stop in seen for part in _split(start, stop, grid, width)]
        return self._with_padding(batch, [ColumnSpan(*part, masked=_within(masked, *part)) for part in parts])

    def _with_padding(self, batch: int, spans: list[ColumnSpan]) -> list[ColumnSpan]:
        """Drops spans of padding, and marks as masked those that hold some."""
        if self.real_before is None:
            return spans
        before = self.real_before[batch]
        counts = [int(before[span.stop] - before[span.start]) for span in spans]
        return [
            span if count == len(span) else replace(span, masked=((span.start, span.stop),))
            for span, count in zip(spans, counts, strict=True)
            if count
        ]


@dataclass(frozen=True)
class ColumnSpan:
    """Columns from ``start`` up to ``stop``; in the ``masked`` ones some pair may be hidden."""

    start: int
    stop: int
    masked: tuple[Columns, ...]

    def __len__(self) -> int:
        return self.stop - self.start


def _append(ranges: list[Columns], start: int, stop: int) -> None:
    """Adds columns to ranges that end at or before them; what touches becomes one range."""
    if ranges and ranges[-1][1] == start:
        start = ranges.pop()[0]
    ranges.append((start, stop))


def _split(start: int, stop: int, grid: KeyGrid, width: int) -> list[Columns]:
    """Parts of nearly equal length, at most ``width``, made of whole blocks of the grid."""
    edges = [start, stop]
    if grid.period % grid.size:
        edges[1:1] = range((start // grid.period + 1) * grid.period, stop, grid.period)
    parts = []
    for first, end in pairwise(edges):
        n_parts = -(-(end - first) // width)
        length = -(-(end - first) // (n_parts * grid.size)) * grid.size
        parts += [(at, min(at + length, end)) for at in range(first, end, length)]
    return parts


def _within(ranges: list[Columns], start: int, stop: int) -> tuple[Columns, ...]:
    """The ranges cut to the columns from ``start`` up to ``stop``."""
    return tuple((max(first, start), min(end, stop)) for first, end in ranges if first < stop and end > start)


def _document_bounds(documents: Tensor) -> tuple[Tensor, Tensor]:
    """First column and end of the run of equal ids that each column belongs to: two int64 [batch, key]."""
    batch, n_keys = documents.shape
    columns = torch.arange(n_keys, device=documents.device).expand(batch, -1)
    changes = documents[:, 1:] != documents[:, :-1]  # [batch, key - 1]
    starts = pad(changes, (1, 0), value=True)[:, :n_keys]
    ends = pad(changes, (0, 1), value=True)[:, :n_keys]
    first = torch.where(starts, columns, 0).cummax(1).values
    end = torch.where(ends, columns + 1, n_keys).flip(1).cummin(1).values.flip(1)
    return first, end


def _disjoint_intervals(
    main: tuple[Tensor, Tensor],
    global_columns: tuple[Tensor, Tensor] | None,
    query_padding: Tensor | None,
    shape: tuple[int, int],
    n_keys: int,
) -> dict[str, Tensor]:
    """The fields of VisibleKeys: bounds clipped, touching intervals merged, empty ones as [n_keys, 0)."""
    first, end = _clip(*main, n_keys)
    if global_columns is None:
        global_first, global_end = torch.full_like(first, n_keys), torch.zeros_like(end)
    else:
        global_first, global_end = _clip(*global_columns, n_keys)
        merge = global_end >= first  # the global columns reach the others
        first = torch.where(merge, torch.minimum(first, global_first), first)
        end = torch.where(merge, torch.maximum(end, global_end), end)
        global_first, global_end = global_first.masked_fill(merge, n_keys), global_end.masked_fill(merge, 0)
    bounds = {"first": first, "end": end, "global_first": global_first, "global_end": global_end}
    for name, bound in bounds.items():
        bounds[name] = bound.expand(shape)
        if query_padding is not None:
            bounds[name] = bounds[name].masked_fill(~query_padding, n_keys if "first" in name else 0)
    return bounds


def _clip(first: Tensor, end: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    first, end = torch.broadcast_tensors(first.clamp(min=0), end.clamp(max=n_keys))
    return torch.where(first < end, first, n_keys), torch.where(first < end, end, 0)


def is_whole(value: object) -> bool:
    """Whether it is an integer; True and False are none here."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _describe(tensor: object) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
