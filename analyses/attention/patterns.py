"""The attention pattern of one head: exact where it fits on a screen, pooled in blocks where it does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from workbench.analyses.attention.cells import (
    Cells,
    Part,
    Pooling,
    Range,
    ScoreMemory,
    check_index,
    checked_part,
    measured,
    read_sequence,
)
from workbench.analyses.labels import number_or_dash
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, provenance
from workbench.analyses.token_texts import token_texts
from workbench.analyses.words import word_starts

NORM = "p_ij ‖v_j W_O‖"
_NAMES = {
    "query": {"token": "query", "block": "queries", "word": "query word"},
    "key": {"token": "key", "block": "keys", "word": "key word"},
}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadPattern(Result):
    """weight [query block, key block] of one head on one sequence; beside it, of each query, entropy, max_weight and
    first_weight [query] (that on token 0), and received [key].

    With ``value_weighted``, the cells are ``value_weighted`` [query block, key block] in place of weight. In models
    with learned sinks, ``virtual_mass`` [query] is what the keys leave of a query's weight.

    A block is one position where the ranges fit, and ``settings["block"]`` = (queries, keys) positions otherwise; the
    weight is then the maximum or the mean over its visible pairs. With ``settings["words"]`` it is a word each way.
    NaN means that the mask hides the whole block. ``coordinates["query"]`` and ``["key"]`` hold the tokens.
    """

    kind: ClassVar[str] = "head_pattern"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("pattern",)
    frame_axes: ClassVar[tuple[str, ...]] = ("query block", "key block")

    @property
    def is_exact(self) -> bool:
        """Whether every cell is one query and one key."""
        return tuple(self.settings["block"]) == (1, 1) and not self.has_words

    @property
    def has_words(self) -> bool:
        """Whether a cell is a word's queries and a word's keys."""
        return bool(self.settings.get("words"))

    @property
    def cells(self) -> np.ndarray:
        """What is drawn, [query block, key block]."""
        return self["value_weighted" if "value_weighted" in self else "weight"]

    @property
    def first_share(self) -> float:
        """The mean weight of the queries shown on token 0, before anything is left out."""
        return float(self["first_weight"].mean())

    def edges(self, axis: Literal["query", "key"]) -> list[int]:
        """The positions at which rows or columns begin, and the one after the last."""
        if self.has_words:
            return list(self.settings[f"{axis}_edges"])
        name, block = ("queries", 0) if axis == "query" else ("keys", 1)
        first, end = self.settings[name]
        return [*range(first, end, self.settings["block"][block]), end]

    def texts(self, axis: Literal["query", "key"]) -> list[str]:
        """The text of each row or column."""
        edges = np.array(self.edges(axis))
        places = edges - edges[0]
        tokens = [str(token) for token in self.coordinates[axis]]
        return ["".join(tokens[first:end]) for first, end in pairwise(places.tolist())]

    def summary(self) -> str:
        settings = self.settings
        over = "" if self._shows_all_keys else ", over all keys"
        largest = f"mean largest weight {number_or_dash(known_mean(self['max_weight']))}{over}"
        virtual = f", mean on the virtual sink {self['virtual_mass'].mean():.3f}" if "virtual_mass" in self else ""
        return "\n".join((
            self.provenance.sentence(),
            f"L{settings['layer']}H{settings['head']}. {self.shown()}",
            *([self._first_token()] if "first_weight" in self else []),
            f"Mean entropy {number_or_dash(known_mean(self['entropy']), 'z.3f')} nats, {largest}{virtual}.",
            self._most_attended(),
        ))  # fmt: skip

    @property
    def _shows_all_keys(self) -> bool:
        """Whether every key that the shown queries may see is shown."""
        (first_key, end_key), (first_seen, end_seen) = self.settings["keys"], self.settings["seen_keys"]
        return first_key <= first_seen and end_key >= end_seen

    def _first_token(self) -> str:
        left_out = (
            "; it is left out here, the weights on the other keys are scaled to sum to 1"
            if self.settings.get("without_first")
            else ""
        )
        return f"Token 0 gets {self.first_share:.1%} of the attention of these queries{left_out}."

    def _most_attended(self) -> str:
        n_queries = np.isfinite(self["entropy"]).sum()
        received, first_key = self["received"] / max(n_queries, 1), self.settings["keys"][0]
        if not received.any():
            hidden = ", which the mask hides from them" if np.isnan(self.cells).all() else ""
            return f"These queries give no weight to the keys shown{hidden}."
        most = int(received.argmax())
        of = "" if self._shows_all_keys else " of the keys shown"
        return (
            f"Most attended{of}: {self.coordinates['key'][most]!r} at {first_key + most}, with {received[most]:.1%} of "
            "the weight of these queries."
        )

    def _draw_pattern(
        self, *, scale: str = "linear", first_apart: bool = False, bars: bool = True, theme: str = "light"
    ) -> Drawing:
        """``first_apart`` colours the column of token 0 on a scale of its own."""
        from workbench.analyses import figures

        query_edges, key_edges = self.edges("query"), self.edges("key")
        queries, keys = self._unit("query"), self._unit("key")
        apart = first_apart and key_edges[0] == 0 and not self.settings.get("without_first")
        figure = figures.pattern_map(
            self.cells,
            query_labels=self.labels("query"),
            key_labels=self.labels("key"),
            query_marginal=_means(self["entropy"], query_edges),
            key_marginal=np.add.reduceat(self["received"], np.array(key_edges[:-1]) - key_edges[0]),
            names=(_NAMES["query"][queries], _NAMES["key"][keys]),
            edges=(query_edges, key_edges),
            query_marginal_label="entropy (nats)" if queries == "token" else "mean entropy<br>(nats)",
            key_marginal_label="received<br>(queries)",
            label=self.cell_label(),
            upper=None if "value_weighted" in self else 1.0,
            first_apart=apart,
            scale=scale,
            bars=bars,
            theme=theme,
        )
        notes = [self.shown(), *([self._first_token()] if "first_weight" in self else [])]
        if apart:
            notes.append("Its column is coloured on a scale of its own.")
        if bars:
            of_keys = "each key" if keys == "token" else f"all keys of a {keys}"
            of_queries = (
                "entropy of each query" if queries == "token" else f"mean entropy of the queries of a {queries}"
            )
            notes.append(f"Bars: the sum of the weights on {of_keys}, and the {of_queries}.")
        return Drawing(figure, self._title(), " ".join(notes))

    def _unit(self, axis: Literal["query", "key"]) -> Literal["token", "block", "word"]:
        """What a row or a column is."""
        if self.has_words:
            return "word"
        return "token" if self.settings["block"][0 if axis == "query" else 1] == 1 else "block"

    def _title(self) -> str:
        settings = self.settings
        parts = [
            ", value-weighted" if "value_weighted" in self else "",
            ", token 0 left out" if settings.get("without_first") else "",
            ", by words" if self.has_words else "",
        ]
        return f"Attention pattern of L{settings['layer']}H{settings['head']}" + "".join(parts)

    def cell_label(self) -> str:
        """What the colour of a cell is, for a colour bar."""
        what = "‖p v W<sub>O</sub>‖" if "value_weighted" in self else "weight"
        rows, columns = self.settings["block"]
        if self.has_words:
            what += ", by words"
        elif not self.is_exact:
            what = f"{self.settings['pooling']} {what} of {rows} × {columns} block"
        return what + (", token 0 left out" if self.settings.get("without_first") else "")

    def shown(self) -> str:
        """Which queries and keys there are, and what a cell stands for, in a sentence or two."""
        (first_query, end_query), (first_key, end_key) = self.settings["queries"], self.settings["keys"]
        rows, columns = self.settings["block"]
        if self.has_words:
            how = "by words: the sum over a word's keys, the mean over its queries"
        elif self.is_exact:
            how = "exact"
        else:
            how = f"{self.settings['pooling']} over blocks of {rows} queries × {columns} keys"
        shown = f"Queries {first_query} to {end_query - 1}, keys {first_key} to {end_key - 1}, {how}."
        if "value_weighted" in self:
            shown += f" Colour: {NORM}, the length of what a key's value adds to the head's output."
        if self.settings.get("words_do_not_fit"):
            most = self.settings["max_cells"]
            shown += f" Words are shown where every token has a cell: choose at most {most} queries and keys."
        return shown

    def labels(self, axis: Literal["query", "key"]) -> list[str]:
        """A unique label of each row or column."""
        from workbench.analyses.figures import show_token, token_labels

        edges = self.edges(axis)
        if self.has_words:
            return [f"{show_token(text)} {first}" for text, first in zip(self.texts(axis), edges, strict=False)]
        if self._unit(axis) == "token":
            return token_labels(self.texts(axis), edges[0])
        return [f"{first}–{end - 1}" for first, end in pairwise(edges)]


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
    without_first: bool = False,
    value_weighted: bool = False,
    words: bool = False,
    memory: ScoreMemory | None = None,
) -> HeadPattern:
    """One head's attention on one sequence, with at most ``max_cells`` cells a side. Pads are left out.

    Memory is O(n · max_cells) at most on a HookedTransformer, never n × n: the layers up to ``layer`` run once, and the
    cells are computed from the queries and keys of that head alone. Hooks that are active apply; where one is on the
    layer's own scores or weights, they are computed in full.

    Args:
        tokens: a text, or token ids [pos] or [1, pos] with their ``attention_mask``.
        queries, keys: ranges (first, end) of positions among the real tokens; None is all. Where cells are blocks, the
            keys widen to whole blocks; where they are words, both widen to whole words.
        pooling: "max" keeps one-token-wide stripes; "mean" is over the visible pairs of a block.
        without_first: leaves token 0 out, which in many heads takes most of the attention: weights are those on the
            other keys, scaled to sum to 1, and so are entropy, largest weight and attention received.
        value_weighted: p_ij ‖v_j W_O‖ instead of the weight, the length of what the value of key j adds to the head's
            output at query i, bias included and before any norm of that output (Kobayashi et al. 2020, equation 5).
        words: cells are words as the tokenizer marks them (workbench.analyses.words): the sum over a word's keys, the
            mean over its queries. Only where every token would have a cell; else the result says so, and has blocks.
        memory: keeps the layer's queries and keys, so that further parts of its patterns need no run of the model. For
            a model that is the same all the time.

    Raises:
        ValueError: a layer without attention weights, several sequences, a head, range or option that does not exist.
    """
    check_index("layer", layer, model.cfg.n_layers)
    check_index("head", head, model.cfg.n_heads)
    sequences = read_sequence(model, tokens, attention_mask, layer, "head_pattern")
    n, ids = sequences.tokens.shape[1], sequences.tokens[0].tolist()
    part = checked_part(
        n, layer, (head, head + 1), queries, keys, max_cells, pooling,
        without_first=without_first, value_weighted=value_weighted,
    )  # fmt: skip
    tokenizer = getattr(model, "tokenizer", None)
    edges = None
    if words:
        starts = [*np.flatnonzero(word_starts(tokenizer, ids)).tolist(), n]
        edges = _words_of(part.queries, starts), _words_of(part.keys, starts)
        whole = tuple((within[0], within[-1]) for within in edges)
        if max(end - first for first, end in whole) <= max_cells:
            part = replace(part, queries=whole[0], keys=whole[1])
        else:
            edges = None
    found = measured(model, sequences.to(model.cfg.device), part, memory)
    names = token_texts(tokenizer, ids)
    settings = {
        "layer": layer, "head": head, "queries": part.queries, "keys": part.keys, "block": part.block,
        "pooling": pooling, "max_cells": max_cells, "seen_keys": found.seen_keys,
        "without_first": part.without_first, "value_weighted": part.value_weighted, "words": edges is not None,
        "words_do_not_fit": bool(words) and edges is None,
    }  # fmt: skip
    if edges is not None:
        settings |= {"query_edges": edges[0], "key_edges": edges[1]}
    return HeadPattern(
        quantities=_quantities(found, part, edges),
        provenance=provenance(model, sequences),
        settings=settings,
        coordinates={"query": names[slice(*part.queries)], "key": names[slice(*part.keys)]},
    )


def _words_of(chosen: Range, starts: list[int]) -> list[int]:
    """The edges of the words that a range touches; ``starts`` are those of all words, and the end of the text."""
    first, last = (np.searchsorted(starts, place, side="right") - 1 for place in (chosen[0], chosen[1] - 1))
    return starts[first : last + 2]


def _quantities(found: Cells, part: Part, edges: tuple[list[int], list[int]] | None) -> dict[str, Quantity]:
    statistics = {name: values[0] for name, values in found.statistics.items()}
    what, cells = (NORM if part.value_weighted else "p_ij"), found.values[0]
    if edges is not None:
        cells = _by_words(cells, *edges, counts=np.isfinite(statistics["entropy"]))
        how = f"{what}, summed over a word's keys, mean over its queries; NaN where no pair is visible"
    else:
        pooled = f"{part.pooling} of {what} over the visible pairs of a block"
        how = f"{what if part.is_exact else pooled}; NaN where no pair is visible"
    others = ", of the keys but token 0, scaled to sum to 1" if part.without_first else ""
    shown = f"queries {part.queries[0]} to {part.queries[1] - 1}"
    share, axes = "share of 1", ("query block", "key block")
    received = statistics["received"][slice(*part.keys)]
    quantities = {
        "value_weighted" if part.value_weighted else "weight": Quantity(
            cells, axes, "length in the residual stream" if part.value_weighted else share, how + others
        ),
        "entropy": Quantity(statistics["entropy"], ("query",), "nats", f"entropy of each query's weights{others}"),
        "max_weight": Quantity(statistics["max_weight"], ("query",), share, f"each query's largest weight{others}"),
        "received": Quantity(received, ("key",), "queries", f"sum of weights on each key over {shown}{others}"),
        "first_weight": Quantity(
            statistics["first_weight"], ("query",), share, "weight of each query on token 0, nothing left out"
        ),
    }
    if "virtual_mass" in statistics:
        quantities["virtual_mass"] = Quantity(
            statistics["virtual_mass"], ("query",), share, "weight of each query on the learned sink, which is no key"
        )
    return quantities


def _by_words(cells: np.ndarray, queries: list[int], keys: list[int], counts: np.ndarray) -> np.ndarray:
    """Cells [query, key] as [query word, key word]: the sum over keys, the mean over the queries that count."""
    rows, columns = (np.array(edges[:-1]) - edges[0] for edges in (queries, keys))
    sums = np.add.reduceat(np.nan_to_num(cells), columns, axis=1)
    n_visible = np.add.reduceat(np.add.reduceat(np.isfinite(cells).astype(int), columns, axis=1), rows, axis=0)
    n_counted = np.add.reduceat(counts.astype(int), rows)[:, None]
    means = np.add.reduceat(np.where(counts[:, None], sums, 0.0), rows, axis=0) / np.maximum(n_counted, 1)
    return np.where(n_visible > 0, means, np.nan)


def _means(values: np.ndarray, edges: list[int]) -> np.ndarray:
    """Means of the known values between edges, NaN where there is none."""
    starts, known = np.array(edges[:-1]) - edges[0], np.isfinite(values)
    sums, n = np.add.reduceat(np.where(known, values, 0.0), starts), np.add.reduceat(known.astype(int), starts)
    return np.where(n > 0, sums / np.maximum(n, 1), np.nan)


def known_mean(values: np.ndarray) -> float:
    """The mean of the values that are known, NaN where none is."""
    return float(_means(values, [0, len(values)])[0])
