"""One table of every per-head attention statistic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from workbench.analyses.attention.scores import MIN_FOR_INTERVAL, SCORES, measure_heads
from workbench.analyses.labels import HEAD_SCORES
from workbench.analyses.options import check_seed, check_share, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.sinks.rates import MIN_OTHER_QUERIES
from workbench.analyses.support import check_model


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadStatistics(Result):
    """Scores [layer, head] (the names of SCORES), with ``…_low`` and ``…_high`` where 20 sequences or more count.

    ``received`` [layer, head, key] is the mean weight that each key position gets from the real queries that see it.
    ``virtual_sink_mass`` is there for models with learned sinks only.
    """

    kind: ClassVar[str] = "head_statistics"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "scatter", "received")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """Attention received is drawn where enough queries see some key."""
        evaluated = "n_other_queries" in self and (self["n_other_queries"] >= MIN_OTHER_QUERIES).any()
        return self.all_figure_kinds if evaluated else ("map", "scatter")

    @property
    def score_names(self) -> list[str]:
        """The scores that some query rows are defined for."""
        return [name for name in SCORES if name in self and np.isfinite(self[name]).any()]

    def top(self, score: str, n: int = 5) -> list[tuple[int, int]]:
        """(layer, head) of the ``n`` heads with the largest score, in order.

        Raises:
            ValueError: an unknown score, or one that no row of these inputs is defined for.
        """
        score = self._default("prefix_matching", "entropy") if score is None else score
        values = self._score(score)
        order = np.argsort(-values, axis=None, kind="stable")[:n]
        return [(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, values.shape), strict=True)]

    def summary(self) -> str:
        lines = [self.provenance.sentence(), f"{'score':<28}{'largest':>9}  head      mean over heads  rows used"]
        for name in self.score_names:
            layer, head = self.top(name, 1)[0]
            lines.append(
                f"{name + self._which(name):<28}{self[name][layer, head]:>z9.3f}  {f'L{layer}H{head}':<10}"
                f"{np.nanmean(self[name]):>z14.3f}{self.coverage[name]:>11.0%}"
            )
        if absent := [name for name in SCORES if name in self and name not in self.score_names]:
            lines.append(f"Without a value, as no query of these inputs counts: {', '.join(absent)}.")
        if self.provenance.n_sequences < MIN_FOR_INTERVAL:
            lines.append(f"Fewer than {MIN_FOR_INTERVAL} sequences: no intervals.")
        return "\n".join(lines)

    def _score(self, name: str) -> np.ndarray:
        if name not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}, got {name!r}")
        if name not in self:
            raise ValueError(f"this model has no {name}: {SCORES[name].definition}")
        if name not in self.score_names:
            raise ValueError(f"no query of these inputs counts for {name}: {self.quantities[name].definition}")
        return self[name]

    def _default(self, score: str, otherwise: str) -> str:
        """A score, or another where no row of the inputs is defined for it."""
        return score if score in self.score_names else otherwise

    def _label(self, score: str) -> str:
        from workbench.analyses.figures import axis_label

        return axis_label(score, self.quantities[score].unit) + self._which(score)

    def _which(self, score: str) -> str:
        """What a score's name leaves open."""
        return f" (first {self.settings['sink_keys']} tokens)" if score == "sink_mass" else ""

    def _draw_map(
        self, *, score: str | None = None, chosen: tuple[int, int] | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        score = self._default("prefix_matching", "entropy") if score is None else score
        values, upper = self._score(score), SCORES[score].upper
        return Drawing(
            figures.head_map(values, label=self._label(score), upper=upper, chosen=chosen, theme=theme),
            f"{HEAD_SCORES[score]} of every head",
            self.define(score) + figures.framed(chosen),
        )

    def _draw_scatter(self, *, x: str | None = None, y: str | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        x = self._default("previous_token", "entropy") if x is None else x
        y = self._default("prefix_matching", "sink_mass") if y is None else y
        return Drawing(
            figures.head_scatter(
                self._score(x), self._score(y), x_label=self._label(x), y_label=self._label(y), theme=theme
            ),
            f"{HEAD_SCORES[y]} against {HEAD_SCORES[x].lower()}, every head",
            self.define(y, x),
        )

    def _draw_received(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        received = self["received"].copy()
        few = self["n_other_queries"] < MIN_OTHER_QUERIES  # [layer, key]
        received[np.broadcast_to(few[:, None], received.shape)] = np.nan  # means over a few queries
        missing = f"not evaluated: seen by fewer than {MIN_OTHER_QUERIES} other queries"
        figure = figures.position_map(received, label="mean weight received", missing=missing, theme=theme)
        return Drawing(figure, "Attention that each key position receives, every head", self.define("received"))


def head_statistics(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    sink_keys: int = 4,
    confidence: float = 0.95,
    seed: int = 0,
    progress: Progress = silent,
) -> HeadStatistics:
    """Every per-head attention statistic of a model on some inputs, in one run per batch and O(n) memory.

    Means are taken over all rows of all sequences together. Where at least 20 sequences have such rows, they come with
    a percentile bootstrap interval over these sequences.

    Args:
        model: a HookedTransformer, or a TransformerBridge (O(n²) memory, sequences of one length).
        tokens: text, texts, token ids [batch, pos] with their ``attention_mask`` (1 or true = real), or tokens that say
            what they are, such as repeated_random_tokens'.
        sink_keys: so many first real tokens of a sequence make up ``sink_mass``.
        confidence: of the intervals.
        seed: of the bootstrap.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that it is not for (docs/definitions.md), inputs that the model refuses, a sequence
            without a real token, or an option out of its range.
    """
    check_model(model)
    check_whole(sink_keys=sink_keys)
    check_share(confidence=confidence)
    check_seed(seed)
    sequences = Sequences.read(model, tokens, attention_mask)
    measured = measure_heads(model, sequences, sink_keys, progress)
    quantities: dict[str, Quantity] = {}
    for name, score in measured.scores.items():
        about = SCORES[name]
        values: Sequence[tuple[str, np.ndarray, str]] = [("", score.mean, about.definition.format(k=sink_keys))]
        if (interval := score.interval(confidence, seed)) is not None:
            low, high = interval
            end = f"end of the {confidence:.0%} bootstrap interval of {name} over sequences"
            values = [*values, ("_low", low, f"lower {end}"), ("_high", high, f"upper {end}")]
        for suffix, array, definition in values:
            quantities[name + suffix] = Quantity(array, ("layer", "head"), about.unit, definition)
    quantities["received"] = Quantity(
        measured.received,
        ("layer", "head", "key"),
        "share of 1",
        "weight that the key-th real token gets, mean over the real queries that see it, then over sequences",
    )
    quantities["n_other_queries"] = Quantity(
        measured.n_other_queries,
        ("layer", "key"),
        "queries",
        "how many queries besides its own see the key-th real token, in the sequence where most do",
    )
    return HeadStatistics(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings={"sink_keys": sink_keys, "confidence": confidence, "seed": seed},
        coverage={name: score.coverage for name, score in measured.scores.items()},
    )
