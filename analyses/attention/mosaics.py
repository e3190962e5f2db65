"""The attention patterns of all heads of a layer at once, each as coarse as it must be to stand beside the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from workbench.analyses.attention.cells import (
    Cells,
    Pooling,
    Range,
    ScoreMemory,
    checked_part,
    is_edited,
    measured,
    read_sequence,
)
from workbench.analyses.attention.patterns import NORM, known_mean
from workbench.analyses.labels import number_or_dash
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, provenance, silent
from workbench.analyses.support import emits_statistics

PAIRS_AT_A_TIME = 2**26  # of a query and a key, over the heads that are measured together


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LayerPatterns(Result):
    """weight [head, query block, key block] of all heads of a layer on one sequence; entropy, max_weight and
    first_weight (that on token 0) [head] beside it, means over the queries shown.

    With ``value_weighted``, the cells are ``value_weighted`` in place of weight. What a block is stands in
    ``settings["block"]``, as in ``HeadPattern``. NaN means that the mask hides the whole block.
    """

    kind: ClassVar[str] = "layer_patterns"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("mosaic",)
    frame_axes: ClassVar[tuple[str, ...]] = ("head",)
    further_tables: ClassVar[dict[str, tuple[str, ...]]] = {"cells": ("head", "query block", "key block")}

    @property
    def cells(self) -> np.ndarray:
        """What is drawn, [head, query block, key block]."""
        return self["value_weighted" if "value_weighted" in self else "weight"]

    @property
    def is_exact(self) -> bool:
        """Whether every cell is one query and one key."""
        return tuple(self.settings["block"]) == (1, 1)

    def summary(self) -> str:
        first, entropy = self["first_weight"], self["entropy"]
        most, least = int(first.argmax()), int(first.argmin())
        lines = [
            self.provenance.sentence(),
            f"Layer {self.settings['layer']}, {len(first)} head{'s' if len(first) > 1 else ''}. {self._shown()}",
            f"Token 0 gets {first.mean():.1%} of the attention of these queries, most in H{most} ({first[most]:.1%}), "
            f"least in H{least} ({first[least]:.1%}).",
        ]
        if np.isfinite(entropy).all():
            low, high = int(entropy.argmin()), int(entropy.argmax())
            lines.append(
                f"Mean entropy: lowest in H{low} ({number_or_dash(entropy[low], 'z.3f')} nats), highest in H{high} "
                f"({number_or_dash(entropy[high], 'z.3f')} nats)."
            )
        return "\n".join(lines)

    def _shown(self) -> str:
        (first_query, end_query), (first_key, end_key) = self.settings["queries"], self.settings["keys"]
        rows, columns = self.settings["block"]
        pooled = f"{self.settings['pooling']} over blocks of {rows} queries × {columns} keys"
        shown = f"Queries {first_query} to {end_query - 1}, keys {first_key} to {end_key - 1}, "
        shown += f"{'exact' if self.is_exact else pooled}."
        if "value_weighted" in self:
            shown += f" Colour: {NORM}, the length of what a key's value adds to the head's output."
        if self.settings["without_first"]:
            shown += " Token 0 is left out, the weights on the other keys are scaled to sum to 1."
        return shown

    def _draw_mosaic(
        self, *, scale: str = "linear", first_apart: bool = False, chosen: int | None = None, theme: str = "light"
    ) -> Drawing:
        """``first_apart`` colours token 0's columns on a scale of their own; ``chosen`` is a head to frame."""
        from workbench.analyses import figures

        settings, weighted = self.settings, "value_weighted" in self
        rows, columns = settings["block"]
        what = "‖p v W<sub>O</sub>‖" if weighted else "weight"
        label = what if self.is_exact else f"{settings['pooling']} {what} of {rows} × {columns} block"
        apart = first_apart and settings["keys"][0] == 0 and not settings["without_first"]
        (first_query, end_query), (first_key, end_key) = settings["queries"], settings["keys"]
        edges = [*range(first_query, end_query, rows), end_query], [*range(first_key, end_key, columns), end_key]
        figure = figures.layer_mosaic(
            self.cells,
            edges=edges,
            label=label + (", token 0 left out" if settings["without_first"] else ""),
            upper=None if weighted else 1.0,
            first_apart=apart,
            chosen=chosen,
            scale=scale,
            theme=theme,
        )
        notes = [self._shown(), *(["Token 0's columns are coloured on a scale of their own."] if apart else [])]
        kind = ", value-weighted" if weighted else ""
        return Drawing(figure, f"Attention patterns of layer {settings['layer']}{kind}", " ".join(notes))


def layer_patterns(
    model: Any,
    tokens: Input,
    layer: int,
    *,
    attention_mask: Tensor | None = None,
    queries: Range | None = None,
    keys: Range | None = None,
    max_cells: int | None = None,
    pooling: Pooling = "max",
    without_first: bool = False,
    value_weighted: bool = False,
    memory: ScoreMemory | None = None,
    progress: Progress = silent,
) -> LayerPatterns:
    """The attention of all heads of a layer on one sequence. Pads are left out.

    Memory is O(n · max_cells) for a head on a HookedTransformer, never n × n, and the layers up to ``layer`` run once.

    Args:
        max_cells: cells a side of each head; None is as many as fit side by side in one figure.
        progress: told the share that is done, and in words what that is.
        The others are those of ``head_pattern``.

    Raises:
        ValueError: as ``head_pattern``.
    """
    from workbench.analyses.figures.mosaic import cells_of_a_panel

    sequences = read_sequence(model, tokens, attention_mask, layer, "layer_patterns")
    n, n_heads = sequences.tokens.shape[1], model.cfg.n_heads
    part = checked_part(
        n, layer, (0, n_heads), queries, keys, cells_of_a_panel(n_heads) if max_cells is None else max_cells, pooling,
        without_first=without_first, value_weighted=value_weighted,
    )  # fmt: skip
    sequence, memory = sequences.to(model.cfg.device), memory or ScoreMemory()
    found: list[Cells] = []
    for heads in pairwise(_cuts(model, layer, n * (part.queries[1] - part.queries[0]))):
        progress(heads[0] / n_heads, f"patterns of {heads[0]} of {n_heads} heads")
        found.append(measured(model, sequence, replace(part, heads=heads), memory))
    statistics = {
        name: np.array([known_mean(of_head) for some in found for of_head in some.statistics[name]])
        for name in ("entropy", "max_weight", "first_weight")
    }  # [head]
    shown = f"mean over queries {part.queries[0]} to {part.queries[1] - 1}"
    what = NORM if part.value_weighted else "p_ij"
    how = what if part.is_exact else f"{pooling} of {what} over the visible pairs of a block"
    others = ", of the keys but token 0, scaled to sum to 1" if part.without_first else ""
    share, axes = "share of 1", ("head", "query block", "key block")
    quantities = {
        "value_weighted" if part.value_weighted else "weight": Quantity(
            np.concatenate([some.values for some in found]), axes,
            "length in the residual stream" if part.value_weighted else share,
            f"{how}; NaN where no pair is visible{others}",
        ),
        "entropy": Quantity(
            statistics["entropy"], ("head",), "nats", f"entropy of the weights{others}, {shown}"
        ),
        "max_weight": Quantity(statistics["max_weight"], ("head",), share, f"largest weight{others}, {shown}"),
        "first_weight": Quantity(
            statistics["first_weight"], ("head",), share, f"weight on token 0, nothing left out, {shown}"
        ),
    }  # fmt: skip
    return LayerPatterns(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings={
            "layer": layer, "queries": part.queries, "keys": part.keys, "block": part.block, "pooling": pooling,
            "max_cells": max_cells, "seen_keys": found[0].seen_keys, "without_first": part.without_first,
            "value_weighted": part.value_weighted,
        },
        coordinates={"head": [f"L{layer}H{head}" for head in range(n_heads)]},
    )  # fmt: skip


def _cuts(model: Any, layer: int, n_pairs: int) -> list[int]:
    """Heads in parts that are measured together, at edges of those that share keys."""
    n_heads = model.cfg.n_heads
    if not emits_statistics(model) or is_edited(model, layer):  # whose patterns are materialised, of all heads
        return [0, n_heads]
    group = n_heads // model.cfg.n_key_value_heads
    return [*range(0, n_heads, max(1, PAIRS_AT_A_TIME // (n_pairs * group)) * group), n_heads]
