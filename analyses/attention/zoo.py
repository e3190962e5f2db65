"""The head zoo: every score of every head in one table, and what kind of head they make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from workbench.analyses.attention.outputs import compare_outputs
from workbench.analyses.attention.scores import SCORES, HeadScore, measure_heads, reaches
from workbench.analyses.attention.windows import default_windows, effective_context, window_masses
from workbench.analyses.labels import HEAD_SCORES
from workbench.analyses.prompts import repeated_random_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model, is_bidirectional

LEAST_TOKENS = 16
CONTEXT_SHARE = 0.9  # of a head's weight, that its effective context holds
NEAR = 1 / 8  # of a text: a head whose effective context is no more than that is local
ON_REPEATED = ("prefix_matching", "duplicate_token", "previous_token")  # measured on repeated random tokens as well

# The first that applies is the head's kind. Broad attention is none: heads with random weights have that, too.
KINDS = {
    "induction": "prefix matching of {induction:g} or more on repeated random tokens",
    "previous token": "previous-token weight of {previous token:g} or more, on the text and on repeated random tokens",
    "duplicate token": "duplicate-token mass of {duplicate token:g} or more on repeated random tokens",
    "resting": "{resting:g} or more of the weight on the first token of the text",
    "local": "an effective context of {local:.0f} tokens or less on the text",
    "none": "none of these",
}
THRESHOLDS = {"induction": 0.3, "previous token": 0.4, "duplicate token": 0.3, "resting": 0.5}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadZoo(Result):
    """Scores [layer, head] on a text, those on repeated random tokens (``…_repeated``), and ``kind`` [layer, head].

    ``mass_within`` and ``mass_within_or_first`` [layer, head, window] are the weight on the last W tokens, and on these
    and the first. ``output_correlation`` [head a, head b] compares what any two heads write.
    """

    kind: ClassVar[str] = "head_zoo"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("kinds", "map", "outputs")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "windows": ("layer", "head", "window"),
        "outputs": ("head a", "head b"),
    }

    @property
    def score_names(self) -> list[str]:
        """The scores that have a value for some head."""
        return [name for name in self.names("layer", "head") if name != "kind" and np.isfinite(self[name]).any()]

    def of_kind(self, kind: str) -> list[tuple[int, int]]:
        """(layer, head) of all heads of a kind, in order of layers.

        Raises:
            ValueError: an unknown kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
        return [(int(layer), int(head)) for layer, head in np.argwhere(self["kind"] == kind)]

    def most_alike(self, n: int = 5) -> list[tuple[str, str, float]]:
        """The ``n`` pairs of heads with the largest correlation of their outputs, whatever its sign, and that."""
        values = np.triu(np.nan_to_num(np.abs(self["output_correlation"])), 1)
        pairs = np.column_stack(np.unravel_index(np.argsort(-values, axis=None, kind="stable")[:n], values.shape))
        names = self.coordinates["head a"]
        return [
            (str(names[a]), str(names[b]), float(self["output_correlation"][a, b]))
            for a, b in pairs
            if values[a, b] > 0
        ]

    def summary(self) -> str:
        lines = [self.provenance.sentence(), f"Kinds of heads, of {self['kind'].size}:"]
        for kind in KINDS:
            heads = self.of_kind(kind)
            named = ", ".join(f"L{layer}H{head}" for layer, head in heads[:12]) if kind != "none" else ""
            more = f" and {len(heads) - 12} more" if named and len(heads) > 12 else ""
            lines.append(f"{kind}: {len(heads)}" + (f" ({named}{more})" if named else "") + f"; {self._rule(kind)}.")
        lines.append(f"{'score':<32}{'largest':>9}  head      mean over heads")
        for name in self.score_names:
            layer, head = np.unravel_index(np.nanargmax(self[name]), self[name].shape)
            at = f"L{layer}H{head}"
            n = int(np.isfinite(self[name]).sum())
            among = f"  of the {n} that have one" if n < self[name].size else ""
            lines.append(f"{name:<32}{self[name][layer, head]:>z9.3f}  {at:<10}{np.nanmean(self[name]):>z14.3f}{among}")
        alike = ", ".join(f"{a} and {b} {value:+.2f}" for a, b, value in self.most_alike())
        lines.append(f"Outputs most alike: {alike}." if alike else "No head's output changes.")
        lines.append(f"Repeated: on {self.settings['repeated']}.")
        return "\n".join(lines)

    def _rule(self, kind: str) -> str:
        return KINDS[kind].format(**self.settings["thresholds"])

    def _draw_kinds(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_kinds(self["kind"], list(KINDS), theme=theme)
        rules = " ".join(f"{kind.capitalize()}: {self._rule(kind)}." for kind in KINDS if kind in self["kind"])
        return Drawing(figure, "What kind of head each is", rules)

    def _draw_map(self, *, score: str | None = None, theme: str = "light") -> Drawing:
        """``score`` None is how far back heads read, or the first that has a value where none holds enough weight."""
        from workbench.analyses import figures

        if score is None:
            score = "effective_context" if "effective_context" in self.score_names else self.score_names[0]
        if score not in self.score_names:
            raise ValueError(f"score must be one of {', '.join(self.score_names)}, got {score!r}")
        quantity = self.quantities[score]
        figure = figures.head_map(
            self[score],
            label=figures.axis_label(score, quantity.unit),
            upper=1.0 if quantity.unit == "share of 1" else None,
            theme=theme,
        )
        label = HEAD_SCORES.get(score.removesuffix("_repeated"), score.replace("_", " ").capitalize())
        where = " on repeated random tokens" if score.endswith("_repeated") else ""
        return Drawing(figure, f"{label} of every head{where}", self.define(score))

    def _draw_outputs(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_pairs(
            self["output_correlation"], [str(name) for name in self.coordinates["head a"]],
            n_heads=self["kind"].shape[1], label="correlation of outputs", theme=theme,
        )  # fmt: skip
        return Drawing(figure, "Whose outputs are alike", self.define("output_correlation"))


def head_zoo(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    length: int = 32,
    n_sequences: int = 8,
    seed: int = 0,
    progress: Progress = silent,
) -> HeadZoo:
    """Every score of every head in one table: attention on a text and on repeated random tokens, how far back a head
    reads, what it writes, and what kind of head that makes it.

    A head is of a kind by thresholds (``KINDS``), of attention alone: what the model would do without it, ablations
    say (``induction_heads``, ``sink_interventions``). Most heads are of none.

    Args:
        tokens: text, texts, or token ids [batch, pos] with their ``attention_mask`` (1 or true = real); at least 16
            tokens each. With all of one length the windows are asked of as many queries as can be.
        length, n_sequences, seed: of the repeated random tokens, which are broken up by random gaps.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that it is not for (docs/definitions.md), sequences of fewer than 16 tokens, or what
            repeated_random_tokens refuses.
    """
    check_model(model)
    sequences = Sequences.read(model, tokens, attention_mask)
    shortest = int(sequences.lengths.min())
    if shortest < LEAST_TOKENS:
        raise ValueError(
            f"a sequence has {shortest} tokens, too few to tell a head that rests or reads what is near from any "
            f"other; use {LEAST_TOKENS} or more"
        )
    repeated = repeated_random_tokens(model, length=length, n_sequences=n_sequences, spacing="random gaps", seed=seed)

    def part(first: float, end: float) -> Progress:
        return lambda done, message: progress(first + (end - first) * done, message)

    on_text = measure_heads(model, sequences, 1, part(0.0, 0.3)).scores
    on_repeated = measure_heads(model, Sequences.read(model, repeated), 1, part(0.3, 0.5)).scores
    windows = default_windows(shortest)
    masses = window_masses(model, sequences, windows, part(0.5, 0.8))
    correlations, ranks = compare_outputs(model, sequences, part(0.8, 1.0))
    quantities = _scores(on_text, on_repeated) | _reach(masses, windows, is_bidirectional(model))
    thresholds = {**THRESHOLDS, "local": NEAR * shortest}
    kinds = _kinds({name: quantity.values for name, quantity in quantities.items()}, thresholds)
    axes = ("layer", "head")
    quantities |= {
        "output_rank": Quantity(
            ranks, axes, "directions",
            "effective rank (Σ λ)² / Σ λ² of the covariance of the head's output z W_O over the text's tokens",
        ),
        "kind": Quantity(kinds, axes, "", "the first of these kinds whose rule the head meets: " + ", ".join(KINDS)),
        "output_correlation": Quantity(
            correlations, ("head a", "head b"), "",
            "Σ over the text's tokens of the inner product of two heads' outputs z W_O, each less its mean, over the "
            "root of the product of their squared lengths: 1 where both write the same",
        ),
    }  # fmt: skip
    heads = [f"L{layer}H{head}" for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    return HeadZoo(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings={
            "length": length, "n_sequences": n_sequences, "seed": seed, "repeated": repeated.description,
            "context_share": CONTEXT_SHARE, "thresholds": thresholds,
        },
        coverage={name: score.coverage for name, score in on_text.items()},
        coordinates={"window": windows, "head a": heads, "head b": heads},
    )  # fmt: skip


def _scores(on_text: Mapping[str, HeadScore], on_repeated: Mapping[str, HeadScore]) -> dict[str, Quantity]:
    found = {}
    for name, score in on_text.items():
        about = SCORES[name]
        found[name] = Quantity(
            score.mean, ("layer", "head"), about.unit, f"{about.definition.format(k=1)}; on the text"
        )
    for name in ON_REPEATED:
        about = SCORES[name]
        found[f"{name}_repeated"] = Quantity(
            on_repeated[name].mean, ("layer", "head"), about.unit, f"{about.definition}; on repeated random tokens"
        )
    return found


def _reach(masses: np.ndarray, windows: list[int], both_ways: bool) -> dict[str, Quantity]:
    """masses [2, layer, head, window]."""
    axes = ("layer", "head")
    rows = f"mean over the text's queries that have {windows[-1]} tokens, themselves included"
    sizes = ", ".join(map(str, windows))
    found = {}
    for which, (suffix, more) in enumerate((("", ""), ("_or_first", " or the first"))):
        keys = f"{'all tokens less than W away on either side' if both_ways else 'the last W tokens'}{more}"
        found[f"mass_within{suffix}"] = Quantity(
            masses[which], (*axes, "window"), "share of 1", f"weight on {keys}, exp(lse_W − lse), {rows}"
        )
        found[f"effective_context{suffix}"] = Quantity(
            effective_context(masses[which], windows, CONTEXT_SHARE), axes, "tokens",
            f"the smallest W of {sizes} with {CONTEXT_SHARE} of the weight on {keys}, {rows}; no value where none has",
        )  # fmt: skip
    return found


def _kinds(scores: Mapping[str, np.ndarray], thresholds: Mapping[str, float]) -> np.ndarray:
    previous = np.fmin(scores["previous_token"], scores["previous_token_repeated"])
    meets = {
        "induction": reaches(scores["prefix_matching_repeated"], thresholds["induction"]),
        "previous token": reaches(previous, thresholds["previous token"]),
        "duplicate token": reaches(scores["duplicate_token_repeated"], thresholds["duplicate token"]),
        "resting": reaches(scores["sink_mass"], thresholds["resting"]),
        "local": scores["effective_context"] <= thresholds["local"],
    }
    return np.select(list(meets.values()), list(meets), default="none")
