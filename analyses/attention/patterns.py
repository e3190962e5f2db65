"""The attention pattern of one head: exact where it fits on a screen, pooled in blocks where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.options import check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Sequences, cached, provenance
from workbench.analyses.support import check_model, check_plain_causal, emits_statistics
from workbench.analyses.token_texts import token_texts
from workbench.kernels import AttentionMask, StatisticsRequest, attention, attention_pattern, pattern_statistics
from workbench.kernels.masks import VisibleKeys, is_whole

Pooling = Literal["max", "mean"]
Range = tuple[int, int]  # first position, and the one after the last


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadPattern(Result):
    """weight [query block, key block] of one head on one sequence; entropy [query] and received [key] beside it.

    In models with learned sinks, ``virtual_mass`` [query] is what the keys leave of a query's weight.

    A block is one position where the ranges fit, and ``settings["block"]`` = (queries, keys) positions otherwise; the
    weight is then the maximum or the mean over its visible pairs. NaN means that the mask hides the whole block.
    ``coordinates["query"]`` and ``["key"]`` hold the tokens.
    """

    kind: ClassVar[str] = "head_pattern"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("pattern",)
    frame_axes: ClassVar[tuple[str, ...]] = ("query block", "key block")

    @property
    def is_exact(self) -> bool:
        """Whether every cell is one query and one key."""
        return tuple(self.settings["block"]) == (1, 1)

    def summary(self) -> str:
        settings = self.settings
        over = "" if self._shows_all_keys else ", over all keys"
        largest = f"mean largest weight {self['max_weight'].mean():.3f}{over}"
        virtual = f", mean on the virtual sink {self['virtual_mass'].mean():.3f}" if "virtual_mass" in self else ""
        return "\n".join((
            self.provenance.sentence(),
            f"L{settings['layer']}H{settings['head']}. {self._shown()}",
            f"Mean entropy {self['entropy'].mean():z.3f} nats, {largest}{virtual}.",
            self._most_attended(),
        ))  # fmt: skip

    @property
    def _shows_all_keys(self) -> bool:
        """Whether every key that the shown queries may see is shown."""
        (first_key, end_key), (first_seen, end_seen) = self.settings["keys"], self.settings["seen_keys"]
        return first_key <= first_seen and end_key >= end_seen

    def _most_attended(self) -> str:
        received, first_key = self["received"] / len(self["entropy"]), self.settings["keys"][0]
        if not received.any():
            hidden = ", which the mask hides from them" if np.isnan(self["weight"]).all() else ""
            return f"These queries give no weight to the keys shown{hidden}."
        most = int(received.argmax())
        of = "" if self._shows_all_keys else " of the keys shown"
        return (
            f"Most attended{of}: {self.coordinates['key'][most]!r} at {first_key + most}, with {received[most]:.1%} of "
            "the weight of these queries."
        )

    def _draw_pattern(self, *, scale: str = "linear", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        settings = self.settings
        rows, columns = settings["block"]
        label = "weight" if self.is_exact else f"{settings['pooling']} weight of {rows} × {columns} block"
        figure = figures.pattern_map(
            self["weight"],
            query_labels=self._labels("query", "queries", rows),
            key_labels=self._labels("key", "keys", columns),
            query_marginal=_block_sums(self["entropy"], rows) / _block_sums(np.ones(len(self["entropy"])), rows),
            key_marginal=_block_sums(self["received"], columns),
            block=(rows, columns),
            query_marginal_label="entropy (nats)" if rows == 1 else "mean entropy<br>(nats)",
            key_marginal_label="received<br>(queries)",
            label=label,
            scale=scale,
            theme=theme,
        )
        return Drawing(
            figure,
            f"Attention pattern of L{settings['layer']}H{settings['head']}",
            f"{self._shown()} Bars: the sum of the weights on {'each key' if columns == 1 else 'all keys of a block'}, "
            f"and the {'entropy of each query' if rows == 1 else 'mean entropy of the queries of a block'}.",
        )

    def _shown(self) -> str:
        (first_query, end_query), (first_key, end_key) = self.settings["queries"], self.settings["keys"]
        rows, columns = self.settings["block"]
        how = "exact" if self.is_exact else f"{self.settings['pooling']} over blocks of {rows} queries × {columns} keys"
        return f"Queries {first_query} to {end_query - 1}, keys {first_key} to {end_key - 1}, {how}."

    def _labels(self, axis: str, range_name: str, block: int) -> list[str]:
        from workbench.analyses.figures import token_labels

        first, end = self.settings[range_name]
        if block == 1:
            return token_labels([str(token) for token in self.coordinates[axis]], first)
        return [f"{start}–{min(start + block, end) - 1}" for start in range(first, end, block)]


def head_pattern(
    model: Any,
    tokens: Input,
    layer: int,
    head: int,
    *,
    attention_mask: Tensor | None = None,
    queries: Range | None = None,
    keys: Range | None = None,
    max_cells: int = 512,
    pooling: Pooling = "max",
) -> HeadPattern:
    """One head's attention on one sequence, with at most ``max_cells`` cells a side. Pads are left out.

    Memory is O(n + max_cells²) on a HookedTransformer, never n × n: the layers up to ``layer`` run once, and the cells
    are computed from the queries and keys of that head alone. Hooks that are active apply; where one is on the layer's
    own scores or weights, they are computed in full.

    Args:
        tokens: a text, or token ids [pos] or [1, pos] with their ``attention_mask``.
        queries, keys: ranges (first, end) of positions among the real tokens; None is all. Where cells are blocks, the
            keys widen to whole blocks.
        pooling: "max" keeps one-token-wide stripes; "mean" is over the visible pairs of a block.

    Raises:
        ValueError: a layer without attention weights, several sequences, a head, range or option that does not exist.
    """
    for name, value, size in (("layer", layer, model.cfg.n_layers), ("head", head, model.cfg.n_heads)):
        if not is_whole(value) or not 0 <= value < size:
            raise ValueError(f"{name} must be between 0 and {size - 1}, got {value!r}")
    check_model(model, layer=layer)
    sequences = Sequences.read(model, tokens, attention_mask)
    if len(sequences) > 1:
        raise ValueError(f"head_pattern shows one sequence, got {len(sequences)}; index the batch first")
    check_whole(max_cells=max_cells)
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(map(repr, get_args(Pooling)))}, got {pooling!r}")
    n = sequences.tokens.shape[1]
    queries, keys = _checked_range("queries", queries, n), _checked_range("keys", keys, n)
    block, keys = _blocks(queries, keys, max_cells, n)
    view = _View(layer, head, queries, keys, block, pooling)
    weight, statistics, seen_keys = _measure(model, sequences.to(model.cfg.device), view)
    names = token_texts(getattr(model, "tokenizer", None), sequences.tokens[0].tolist())
    shown = f"queries {queries[0]} to {queries[1] - 1}"
    how = "p_ij" if block == (1, 1) else f"{pooling} of p_ij over the visible pairs of a block"
    share = "share of 1"
    quantities = {
        "weight": Quantity(weight, ("query block", "key block"), share, f"{how}; NaN where no pair is visible"),
        "entropy": Quantity(statistics["entropy"], ("query",), "nats", "entropy of each query's weights"),
        "max_weight": Quantity(statistics["max_weight"], ("query",), share, "each query's largest weight"),
        "received": Quantity(
            statistics["received"][slice(*keys)], ("key",), "queries", f"sum of weights on each key over {shown}"
        ),
    }
    if "virtual_mass" in statistics:
        quantities["virtual_mass"] = Quantity(
            statistics["virtual_mass"], ("query",), share, "weight of each query on the learned sink, which is no key"
        )
    return HeadPattern(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings={
            "layer": layer, "head": head, "queries": queries, "keys": keys, "block": block, "pooling": pooling,
            "max_cells": max_cells, "seen_keys": seen_keys,
        },
        coordinates={"query": names[slice(*queries)], "key": names[slice(*keys)]},
    )  # fmt: skip


def _checked_range(name: str, given: Range | None, n: int) -> Range:
    first, end = (0, n) if given is None else given
    if not 0 <= first < end <= n:
        raise ValueError(f"{name} must be a range (first, end) within the {n} real tokens, got {given}")
    return int(first), int(end)


def _blocks(queries: Range, keys: Range, max_cells: int, n: int) -> tuple[Range, Range]:
    """Positions per cell, and the keys widened to whole blocks, as blocks of keys count from position 0."""
    rows = -(-(queries[1] - queries[0]) // max_cells)
    columns = -(-(keys[1] - keys[0]) // max_cells)
    if rows == columns == 1:
        return (1, 1), keys
    while -(-keys[1] // columns) - keys[0] // columns > max_cells:
        columns += 1
    return (rows, columns), (keys[0] // columns * columns, min(n, -(-keys[1] // columns) * columns))


@dataclass(frozen=True)
class _View:
    """What head_pattern was asked for; ``block`` is (queries, keys) per cell."""

    layer: int
    head: int
    queries: Range
    keys: Range
    block: Range
    pooling: Pooling

    @property
    def is_exact(self) -> bool:
        return self.block == (1, 1)


@torch.no_grad()
def _measure(model: Any, sequence: Sequences, view: _View) -> tuple[np.ndarray, dict[str, np.ndarray], Range]:
    """Weights of the cells, [query block, key block]; the statistics of the chosen queries over all keys; and from
    which key on, up to which, some of these queries see keys."""
    statistics_of = StatisticsRequest(
        entropy=True, max_weight=True, received=True, pooled=None if view.is_exact else view.block
    )
    columns, n = slice(*view.keys), sequence.tokens.shape[1]
    statistics: Mapping[str, Any]
    if emits_statistics(model) and not _is_edited(model, view.layer):
        q, k, options = _score_inputs(model, sequence, view)
        statistics = attention(q, k, k, statistics=statistics_of, **options).statistics  # any v does: z is not read
        cells = attention_pattern(q, k, rows=slice(None), cols=columns, **options) if view.is_exact else None
        mask = options["mask"]
    else:
        name = f"blocks.{view.layer}.attn.hook_pattern"
        pattern = cached(model, sequence, [name])[name]
        if emits_statistics(model):
            mask = replace(model.score_inputs(sequence.tokens, view.layer)[2]["mask"], query_offset=view.queries[0])
        else:
            check_plain_causal(pattern, view.layer)
            mask = AttentionMask(causal=True, query_offset=view.queries[0])
        pattern = pattern[:, view.head : view.head + 1, slice(*view.queries)]
        statistics = pattern_statistics(pattern, mask=mask, request=statistics_of)
        cells = pattern[..., columns] if view.is_exact else None
    found = {name: statistics[name][0, 0].double().cpu().numpy() for name in statistics if name in _KEPT}
    seen = mask.bind(1, view.queries[1] - view.queries[0], n)
    seen_keys = int(torch.minimum(seen.first, seen.global_first).min()), int(seen.end.max())
    n_visible = _visible_pairs(seen, view)
    if cells is not None:
        weight = cells[0, 0].double().cpu().numpy()
    else:
        pooled = statistics["pooled_max" if view.pooling == "max" else "pooled_sum"][0, 0]
        blocks = slice(view.keys[0] // view.block[1], -(-view.keys[1] // view.block[1]))
        weight = pooled[:, blocks].double().cpu().numpy()
        if view.pooling == "mean":
            weight = weight / np.maximum(n_visible, 1)
    return np.where(n_visible > 0, weight, np.nan), found, seen_keys


def _is_edited(model: Any, layer: int) -> bool:
    """Whether hooks on the layer's scores or weights may make its pattern another than its queries and keys give."""
    attention_of = model.blocks[layer].attn
    return attention_of.hook_attn_scores.has_hooks() or attention_of.hook_pattern.has_hooks()


_KEPT = ("entropy", "max_weight", "received", "virtual_mass")


def _score_inputs(model: Any, sequence: Sequences, view: _View) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q [1, 1, chosen queries, d_head] and k [1, 1, pos, d_head] of the head alone, and the options of their scores."""
    q, k, options = model.score_inputs(sequence.tokens, view.layer)
    first, end = view.queries
    group = view.head // (q.shape[1] // k.shape[1])
    of_head = {name: options[name] for name in ("alibi_slopes", "offset_bias", "sink_logits")}
    of_head = {name: None if value is None else value[view.head : view.head + 1] for name, value in of_head.items()}
    if of_head["offset_bias"] is not None:  # entry row − column + n_keys − 1, where row 0 is now the first query
        of_head["offset_bias"] = of_head["offset_bias"][:, first : end + k.shape[2] - 1]
    mask = replace(options["mask"], query_offset=first)
    return q[:, view.head : view.head + 1, first:end], k[:, group : group + 1], {**options, **of_head, "mask": mask}


def _visible_pairs(seen: VisibleKeys, view: _View) -> np.ndarray:
    """How many pairs of each block the mask leaves, int [query block, key block]."""
    starts = np.arange(view.keys[0], view.keys[1], view.block[1])
    ends = np.minimum(starts + view.block[1], view.keys[1])
    per_row = np.zeros((seen.n_queries, len(starts)), dtype=int)  # [query, key block]
    for first, end in ((seen.first, seen.end), (seen.global_first, seen.global_end)):
        overlap = np.minimum(end[0, :, None].numpy(), ends) - np.maximum(first[0, :, None].numpy(), starts)
        per_row += np.maximum(overlap, 0)
    return np.add.reduceat(per_row, np.arange(0, len(per_row), view.block[0]), axis=0)


def _block_sums(values: np.ndarray, block: int) -> np.ndarray:
    return np.add.reduceat(values, np.arange(0, len(values), block))
