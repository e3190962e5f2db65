"""Parts of a layer's patterns as cells: single pairs where they fit on a screen, blocks of pairs where they do not."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.options import check_whole
from workbench.analyses.running import Input, Sequences, cached
from workbench.analyses.support import check_model, check_plain_causal, emits_statistics
from workbench.kernels import AttentionMask, StatisticsRequest, attention, attention_pattern, pattern_statistics
from workbench.kernels.masks import VisibleKeys, is_whole

Pooling = Literal["max", "mean"]
Range = tuple[int, int]  # first position, and the one after the last


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is asked of a layer's patterns.

    Args:
        heads: the first, and the one after the last.
        queries, keys: positions. Keys are whole blocks, which count from position 0.
        block: (queries, keys) of a cell.
        without_first: weights are over all keys but the first token, scaled to sum to 1.
        value_weighted: cells are p_ij ‖v_j W_O‖ instead of p_ij.
    """

    layer: int
    heads: Range
    queries: Range
    keys: Range
    block: Range
    pooling: Pooling
    without_first: bool
    value_weighted: bool

    @property
    def is_exact(self) -> bool:
        return self.block == (1, 1)


@dataclass(frozen=True, eq=False)
class Cells:
    """What a part holds.

    Args:
        values: float64 [head, query block, key block], NaN where no pair is visible.
        statistics: entropy, max_weight, first_weight and perhaps virtual_mass [head, query], over all keys, and
            received [head, key] of all keys. NaN for queries that see no key.
        seen_keys: from which key on, up to which, some of the queries see keys.
    """

    values: np.ndarray
    statistics: Mapping[str, np.ndarray]
    seen_keys: Range


STREAM_BYTES = 2**27  # that a ScoreMemory keeps at most of the stream, in float32


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What a layer's patterns are made of.

    Args:
        q, k, v: [1, n_heads, pos, d_head], [1, n_key_value_heads, pos, d_head] and [pos, n_key_value_heads, d_head].
        options: of ``workbench.kernels.attention_pattern``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Mapping[str, Any]

    def of_part(self, part: Part) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """q [1, heads, chosen queries, d_head], their k [1, …, pos, d_head], and the options of their scores."""
        (first, end), heads, options = part.queries, slice(*part.heads), self.options
        group = self.q.shape[1] // self.k.shape[1]
        if part.heads[0] % group or part.heads[1] % group:  # some of the heads that share a key
            k = self.k.repeat_interleave(group, 1)[:, heads]
        else:
            k = self.k[:, part.heads[0] // group : part.heads[1] // group]
        of_heads = {name: options[name] for name in ("alibi_slopes", "offset_bias", "sink_logits")}
        of_heads = {name: None if value is None else value[heads] for name, value in of_heads.items()}
        if of_heads["offset_bias"] is not None:  # entry row − column + n_keys − 1, where row 0 is now the first query
            of_heads["offset_bias"] = of_heads["offset_bias"][:, first : end + k.shape[2] - 1]
        mask = replace(options["mask"], query_offset=first)
        return self.q[:, heads, first:end], k, {**options, **of_heads, "mask": mask}


class ScoreMemory:
    """Keeps of one text what further patterns are made of.

    Further parts of a layer's patterns then need no run of the model, and another layer's only the layers between, as
    long as the streams of all layers fit into STREAM_BYTES. The model must not have changed meanwhile, nor its hooks.
    """

    def __init__(self) -> None:
        self._text: tuple[weakref.ref, Tensor] | None = None
        self._streams: dict[int, Tensor] = {}  # layer → the stream that enters it, [1, pos, d_model]
        self._last: tuple[int, LayerInputs] | None = None

    def inputs(self, model: Any, tokens: Tensor, layer: int) -> LayerInputs:
        """Those of a layer on tokens [1, pos], under the hooks that are active."""
        if self._text is None or self._text[0]() is not model or not torch.equal(self._text[1], tokens):
            self._text, self._streams, self._last = (weakref.ref(model), tokens), {}, None
        if self._last is None or self._last[0] != layer:
            self._last = layer, self._run(model, tokens, layer)
        return self._last[1]

    def _run(self, model: Any, tokens: Tensor, layer: int) -> LayerInputs:
        first = max((known for known in self._streams if known <= layer), default=None)
        stream = tokens if first is None else self._streams[first].clone()
        values: list[Tensor] = []

        def keep_value(value: Tensor, hook: Any) -> None:
            values.append(value)

        def keep_stream(value: Tensor, hook: Any) -> None:
            self._streams[hook.layer() + 1] = value.clone()  # which a hook of the next layer may change in place

        hooks: list[tuple[str, Any]] = [(f"blocks.{layer}.attn.hook_v", keep_value)]
        if tokens.numel() * model.cfg.d_model * model.cfg.n_layers * 4 <= STREAM_BYTES:
            hooks += [(f"blocks.{before}.hook_resid_post", keep_stream) for before in range(first or 0, layer)]
        with model.hooks(fwd_hooks=hooks):
            q, k, options = model.score_inputs(stream, layer, start_at_layer=first)
        return LayerInputs(q, k, values[0][0], options)


def output_norms(v: Tensor, W_O: Tensor) -> Tensor:
    """‖v_j W_O‖ of every head and position, float64 [n_heads, pos].

    Args:
        v: [pos, n_key_value_heads, d_head]; heads that follow each other share one.
        W_O: [n_heads, d_head, d_model].
    """
    W_O = W_O.detach().double()
    v = v.detach().double().repeat_interleave(len(W_O) // v.shape[1], dim=1)
    squares = torch.einsum("khd,hde,khe->hk", v, W_O @ W_O.transpose(1, 2), v)  # without the d_model numbers a key
    return squares.clamp(min=0).sqrt()


def read_sequence(model: Any, tokens: Input, attention_mask: Tensor | None, layer: int, caller: str) -> Sequences:
    """The one sequence whose patterns are asked for.

    Raises:
        ValueError: a layer without attention weights, or several sequences.
    """
    check_index("layer", layer, model.cfg.n_layers)
    check_model(model, layer=layer)
    sequences = Sequences.read(model, tokens, attention_mask)
    if len(sequences) > 1:
        raise ValueError(f"{caller} shows one sequence, got {len(sequences)}; index the batch first")
    return sequences


def check_index(name: str, value: Any, size: int) -> None:
    """Refuses what is no index. Raises ValueError."""
    if not is_whole(value) or not 0 <= value < size:
        raise ValueError(f"{name} must be between 0 and {size - 1}, got {value!r}")


def checked_part(
    n: int, layer: int, heads: Range, queries: Range | None, keys: Range | None, max_cells: int, pooling: Pooling,
    *, without_first: bool, value_weighted: bool,
) -> Part:  # fmt: skip
    """The part of the patterns of ``n`` tokens, in at most ``max_cells`` cells a side.

    Raises:
        ValueError: an option that does not exist, or nothing that would be left.
    """
    check_whole(max_cells=max_cells)
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(map(repr, get_args(Pooling)))}, got {pooling!r}")
    if without_first and n == 1:
        raise ValueError("without_first leaves nothing of a text of one token; give a longer one")
    chosen_queries, chosen_keys = _checked_range("queries", queries, n), _checked_range("keys", keys, n)
    block, whole_keys = _blocks(chosen_queries, chosen_keys, max_cells, n)
    return Part(
        layer=layer, heads=heads, queries=chosen_queries, keys=whole_keys, block=block, pooling=pooling,
        without_first=bool(without_first), value_weighted=bool(value_weighted),
    )  # fmt: skip


def _checked_range(name: str, given: Range | None, n: int) -> Range:
    try:
        first, end = (0, n) if given is None else map(operator.index, given)
    except (TypeError, ValueError):  # no two numbers, or none that are whole
        first = end = -1
    if not 0 <= first < end <= n:
        raise ValueError(f"{name} must be a range (first, end) within the {n} real tokens, got {given!r}")
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


@torch.no_grad()
def measured(model: Any, sequence: Sequences, part: Part, memory: ScoreMemory | None) -> Cells:
    """The cells of a part, and the statistics of its queries."""
    if emits_statistics(model) and not is_edited(model, part.layer):
        inputs = (memory or ScoreMemory()).inputs(model, sequence.tokens, part.layer)
        found, statistics, mask = _streamed(inputs, part)
        v = inputs.v
    else:
        found, statistics, mask, v = _materialised(model, sequence, part)
    seen = mask.bind(1, part.queries[1] - part.queries[0], sequence.tokens.shape[1])
    pairs = visible_pairs(seen, part)
    norms = None
    if part.value_weighted:
        norms = output_norms(v, model.blocks[part.layer].attn.W_O)[slice(*part.heads)]
    values = _pooled(found, norms, part, pairs)
    first_key = max(int(torch.minimum(seen.first, seen.global_first).min()), int(part.without_first))
    kept = {name: statistics[name][0].double().cpu().numpy() for name in statistics if name in _KEPT}
    if part.without_first:
        empty = seen.keys_per_query()[0].cpu().numpy() <= seen.visible(0, slice(None), torch.tensor(0)).numpy()
        kept |= {name: np.where(empty, np.nan, kept[name]) for name in ("entropy", "max_weight")}
    return Cells(np.where(pairs > 0, values, np.nan), kept, (first_key, int(seen.end.max())))


_KEPT = ("entropy", "max_weight", "received", "virtual_mass", "first_weight")


def is_edited(model: Any, layer: int) -> bool:
    """Whether hooks on the layer's scores or weights may make its pattern another than its queries and keys give."""
    attention_of = model.blocks[layer].attn
    return attention_of.hook_attn_scores.has_hooks() or attention_of.hook_pattern.has_hooks()


def _request(part: Part) -> StatisticsRequest:
    pooled = None if part.is_exact else (part.block[0], 1 if part.value_weighted else part.block[1])
    return StatisticsRequest(entropy=True, max_weight=True, received=True, sink_keys=1, pooled=pooled)


def _streamed(inputs: LayerInputs, part: Part) -> tuple[Tensor, dict[str, Tensor], AttentionMask]:
    """Weights [1, head, …] by cell, or by row of blocks and key where values weigh them; statistics; and the mask."""
    q, k, options = inputs.of_part(part)
    mask = options["mask"]
    plain: Mapping[str, Tensor] = {}
    if part.without_first:
        plain = attention(q, k, k, statistics=StatisticsRequest(sink_keys=1), **options).statistics
        others = torch.ones(1, k.shape[2], dtype=torch.bool, device=k.device)
        others[:, 0] = False
        options |= {"mask": replace(mask, key_padding=others), "sink_logits": None}
    statistics = dict(attention(q, k, k, statistics=_request(part), **options).statistics)  # any v does
    statistics |= {name: plain[name] for name in ("sink_mass", "virtual_mass") if name in plain}
    statistics["first_weight"] = statistics["sink_mass"]
    if part.is_exact:
        return attention_pattern(q, k, rows=slice(None), cols=slice(*part.keys), **options), statistics, mask
    return statistics["pooled_max" if part.pooling == "max" else "pooled_sum"], statistics, mask


def _materialised(
    model: Any, sequence: Sequences, part: Part
) -> tuple[Tensor, dict[str, Tensor], AttentionMask, Tensor]:
    """As ``_streamed``, of a pattern that is given or edited, and the layer's values."""
    name, values = (f"blocks.{part.layer}.attn.{point}" for point in ("hook_pattern", "hook_v"))
    found = cached(model, sequence, [name, values])
    pattern = found[name]
    if emits_statistics(model):
        mask = model.score_inputs(sequence.tokens, part.layer)[2]["mask"]
    else:
        check_plain_causal(pattern, part.layer)
        mask = AttentionMask(causal=True)
    mask = replace(mask, query_offset=part.queries[0])
    pattern = pattern[:, slice(*part.heads), slice(*part.queries)]
    first_weight = pattern[..., 0]
    if part.without_first:
        rest = pattern.index_fill(3, torch.tensor([0], device=pattern.device), 0.0)
        total = rest.sum(3, keepdim=True)
        pattern = rest / torch.where(total > 0, total, 1.0)  # a query that is left with nothing has no weights
    statistics = dict(pattern_statistics(pattern, mask=mask, request=_request(part))) | {"first_weight": first_weight}
    if part.is_exact:
        return pattern[..., slice(*part.keys)], statistics, mask, found[values][0]
    return statistics["pooled_max" if part.pooling == "max" else "pooled_sum"], statistics, mask, found[values][0]


def _pooled(found: Tensor, norms: Tensor | None, part: Part, pairs: np.ndarray) -> np.ndarray:
    """The values of the cells, [head, query block, key block].

    A key's norm is the same for all queries of a block, so it may multiply what they give to the key together.
    """
    values, columns = found[0].double(), part.block[1]
    if norms is not None:
        values = values * norms[:, None, slice(*part.keys) if part.is_exact else slice(None)]
    if part.is_exact:
        return values.cpu().numpy()
    if norms is not None:
        by_block = torch.nn.functional.pad(values, (0, -values.shape[2] % columns)).unflatten(2, (-1, columns))
        values = by_block.amax(3) if part.pooling == "max" else by_block.sum(3)
    values = values[..., part.keys[0] // columns : -(-part.keys[1] // columns)]
    return values.cpu().numpy() / (np.maximum(pairs, 1) if part.pooling == "mean" else 1)


def visible_pairs(seen: VisibleKeys, part: Part) -> np.ndarray:
    """How many pairs of each block can have a weight, int [query block, key block]."""
    starts = np.arange(part.keys[0], part.keys[1], part.block[1])
    ends = np.minimum(starts + part.block[1], part.keys[1])
    if part.without_first:
        starts = np.maximum(starts, 1)
    per_row = np.zeros((seen.n_queries, len(starts)), dtype=int)  # [query, key block]
    for first, end in ((seen.first, seen.end), (seen.global_first, seen.global_end)):
        overlap = np.minimum(end[0, :, None].numpy(), ends) - np.maximum(first[0, :, None].numpy(), starts)
        per_row += np.maximum(overlap, 0)
    return np.add.reduceat(per_row, np.arange(0, len(per_row), part.block[0]), axis=0)
