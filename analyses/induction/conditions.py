"""Prefix matching on random tokens that repeat in several ways: what holds for one period may hold for no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, get_args

import numpy as np
import scipy.stats
import torch
from torch.nn.functional import pad

from workbench.analyses.attention.scores import (
    MIN_FOR_INTERVAL,
    N_RESAMPLES,
    SCORES,
    HeadScore,
    measure_heads,
    reaches,
)
from workbench.analyses.attribution.agreement import spearman, top_overlap
from workbench.analyses.induction.ablation import highest
from workbench.analyses.labels import number_or_dash
from workbench.analyses.options import check_share, check_whole
from workbench.analyses.prompts import RepeatedTokens, Spacing, repeated_random_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model

VARIANTS = ("prefix_matching", "prefix_matching_latest", "prefix_matching_per_entry")
LENGTHS = (32, 64, 128)
TOP = 5  # heads whose place at the top is compared between seeds
READS = ("content", "position", "some conditions", "no pattern")

_CONDITION = ("length", "spacing")
_BY_HEAD = (*_CONDITION, "layer", "head")


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PrefixMatchingConditions(Result):
    """Scores [length, spacing, layer, head] with ``…_low`` and ``…_high``; ``reads`` [layer, head] in words.

    ``seed_prefix_matching`` has an axis for the seed in front; ``rank_stability`` and ``top_stability`` [length,
    spacing] compare seeds. ``period_gain`` [length, layer, head] is what a fixed period adds.

    ``reads`` says what a head goes by, as far as intervals tell:

    - *content*: at or above ``settings["pattern_threshold"]`` in every condition.
    - *position*: so for a fixed period of some length, and at each such length at most half of that for random gaps.
    - *some conditions*: at or above it in some condition, and neither of these.
    - *no pattern*: in none.
    """

    kind: ClassVar[str] = "prefix_matching_conditions"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("conditions", "map")
    frame_axes: ClassVar[tuple[str, ...]] = _BY_HEAD
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "heads": ("layer", "head"), "conditions": _CONDITION, "period": ("length", "layer", "head"),
    }  # fmt: skip

    def heads(self, reads: str) -> list[tuple[int, int]]:
        """(layer, head) of the heads that read so, those with the highest mean score first."""
        if reads not in READS:
            raise ValueError(f"reads must be one of {', '.join(map(repr, READS))}, got {reads!r}")
        chosen = self["reads"] == reads
        return highest(np.where(chosen, self["prefix_matching"].mean(axis=(0, 1)), -1.0), int(chosen.sum()))

    def summary(self) -> str:
        n = self.settings["n_sequences"] * len(self.coordinates["seed"])
        lines = [self.provenance.sentence(), f"{'condition':<22}{'highest prefix matching':<44}seeds agree"]
        for place, length in enumerate(self.coordinates["length"]):
            for column, spacing in enumerate(self.coordinates["spacing"]):
                top = ", ".join(
                    f"L{layer}H{head} {self['prefix_matching'][place, column, layer, head]:.3f}"
                    for layer, head in highest(self["prefix_matching"][place, column], 3)
                )
                stability = number_or_dash(self["rank_stability"][place, column], ".2f")
                lines.append(
                    f"{f'{length}, {spacing}':<22}{top:<44}ρ {stability}, "
                    f"{self['top_stability'][place, column]:.0%} of the top {self.settings['n_top']}"
                )
        threshold = self.settings["pattern_threshold"]
        for reads, what in (
            ("content", f"At {threshold} or above in every condition (content)"),
            ("position", "At most half of it where the period is not fixed (position)"),
            ("some conditions", "In some conditions"),
        ):
            names = ", ".join(f"L{layer}H{head}" for layer, head in self.heads(reads)[:10])
            lines.append(f"{what}: {names or 'none'}.")
        lines.append(f"By 95 % bootstrap intervals over {n} sequences per condition.")
        return "\n".join(lines)

    def _draw_conditions(self, *, length: int | None = None, n: int = 8, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        place = self._place("length", length)
        heads = highest(self["prefix_matching"][place].max(axis=0), n)
        at = tuple(np.array(heads).T)
        series = {
            str(spacing): tuple(self[f"prefix_matching{end}"][place, column][at] for end in ("", "_low", "_high"))
            for column, spacing in enumerate(self.coordinates["spacing"])
        }
        names = [f"L{layer}H{head}: {self['reads'][layer, head]}" for layer, head in heads]
        return Drawing(
            figures.dots(series, names, x_label="prefix matching (share of attention)", theme=theme),
            f"Prefix matching of {self.coordinates['length'][place]} repeated tokens, by spacing",
            f"{self.define('prefix_matching', 'reads')} Bars: 95 % bootstrap intervals over sequences.",
        )

    def _draw_map(
        self,
        *,
        length: int | None = None,
        spacing: Spacing | None = None,
        score: str = "prefix_matching",
        theme: str = "light",
    ) -> Drawing:
        from workbench.analyses import figures

        if score not in VARIANTS:
            raise ValueError(f"score must be one of {', '.join(VARIANTS)}, got {score!r}")
        at = self._place("length", length), self._place("spacing", spacing)
        condition = ", ".join(str(self.coordinates[axis][place]) for axis, place in zip(_CONDITION, at, strict=True))
        return Drawing(
            figures.head_map(self[score][at], label=figures.axis_label(score), upper=1.0, theme=theme),
            f"Prefix matching of every head ({condition})",
            self.define(score),
        )

    def _place(self, axis: str, value: str | int | None) -> int:
        known = list(self.coordinates[axis])
        if value is not None and value not in known:
            raise ValueError(f"{axis} must be one of {', '.join(map(repr, known))}, got {value!r}")
        return 0 if value is None else known.index(value)


def prefix_matching_conditions(
    model: Any,
    *,
    lengths: Sequence[int] | None = None,
    spacings: Sequence[Spacing] = ("fixed", "random gaps"),
    seeds: Sequence[int] = (0, 1, 2),
    n_sequences: int = 20,
    n_copies: int = 2,
    pattern_threshold: float = 0.3,
    prepend_bos: bool | None = None,
    progress: Progress = silent,
) -> PrefixMatchingConditions:
    """Prefix matching (Olsson et al. 2022) for several lengths, with a fixed period and without, over several seeds.

    A head that looks a fixed number of tokens back scores like an induction head where repetitions have that period.
    Random gaps part the two. With two copies a token has one earlier occurrence, so that the three variants of the
    score are the same number; from three copies on they differ.

    Args:
        lengths: tokens of a copy; None takes those of 32, 64 and 128 that the model has room for.
        seeds: two or more; each draws ``n_sequences`` sequences per condition.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: sequences that do not fit the model's context or vocabulary, fewer than 20 of them per condition, or
            an option out of its range.
    """
    check_model(model)
    _check_options(spacings, seeds, n_sequences, pattern_threshold)
    kind: dict[str, Any] = dict(n_sequences=n_sequences, n_copies=n_copies, prepend_bos=prepend_bos)
    lengths = _fitting(model, spacings, kind) if lengths is None else list(lengths)
    if not lengths or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths must be one or more different numbers of tokens, got {lengths!r}")
    prompts = {  # all are drawn first, so that what does not fit is refused before anything runs
        (length, spacing, seed): repeated_random_tokens(model, length=length, spacing=spacing, seed=seed, **kind)
        for length in lengths
        for spacing in spacings
        for seed in seeds
    }
    scores = _measure(model, prompts, progress)
    quantities = _score_quantities(scores, lengths, spacings, seeds)
    quantities |= _stability_quantities(scores, lengths, spacings, seeds)
    if set(spacings) == set(get_args(Spacing)):
        quantities |= _period_quantities(scores, lengths, seeds)
    reads = _reads(quantities, list(spacings), pattern_threshold)
    what = (
        f"content (at or above {pattern_threshold} in every condition), position (so for a fixed period of some "
        "length, and at each such length at most half of it for random gaps), some conditions, or no pattern"
    )
    quantities["reads"] = Quantity(reads, ("layer", "head"), "", what)
    first = next(iter(prompts.values()))
    return PrefixMatchingConditions(
        quantities=quantities,
        provenance=provenance(model, _all_sequences(list(prompts.values()), lengths, spacings, seeds)),
        settings=kind
        | {"pattern_threshold": pattern_threshold, "n_top": min(TOP, reads.size), "has_bos": first.has_bos},
        coordinates={"length": list(lengths), "spacing": list(spacings), "seed": list(seeds)},
    )


def _check_options(spacings: Sequence[str], seeds: Sequence[int], n_sequences: int, threshold: float) -> None:
    known = get_args(Spacing)
    if not spacings or set(spacings) - set(known) or len(set(spacings)) < len(spacings):
        raise ValueError(f"spacings must be one or both of {', '.join(map(repr, known))}, got {spacings!r}")
    if len(set(seeds)) < len(seeds) or len(seeds) < 2:
        raise ValueError(f"seeds must be two or more different numbers, to see what depends on them, got {seeds!r}")
    check_whole(n_sequences=n_sequences)
    if n_sequences * len(seeds) < MIN_FOR_INTERVAL:
        raise ValueError(
            f"{len(seeds)} seeds of {n_sequences} sequences make fewer than the {MIN_FOR_INTERVAL} per condition "
            "that an interval needs; raise n_sequences"
        )
    check_share(pattern_threshold=threshold, with_one=True)


def _fitting(model: Any, spacings: Sequence[Spacing], kind: dict[str, Any]) -> list[int]:
    """Those of LENGTHS whose sequences the model has room for."""

    def fits(length: int) -> bool:
        try:
            for spacing in spacings:
                repeated_random_tokens(model, length=length, spacing=spacing, **(kind | {"n_sequences": 1}))
        except ValueError:
            return False
        return True

    found = [length for length in LENGTHS if fits(length)]
    if not found:
        raise ValueError(f"{LENGTHS[0]} repeated tokens do not fit this model's context or vocabulary; pass lengths=…")
    return found


_Condition = tuple[int, Spacing, int]  # length, spacing, seed


def _measure(
    model: Any, prompts: Mapping[_Condition, RepeatedTokens], progress: Progress
) -> dict[str, dict[_Condition, HeadScore]]:
    """Variant → condition → score."""
    found: dict[str, dict[_Condition, HeadScore]] = {name: {} for name in VARIANTS}
    total, done = sum(tokens.tokens.numel() for tokens in prompts.values()), 0
    for condition, tokens in prompts.items():
        measured = measure_heads(model, Sequences.read(model, tokens), 1, silent)
        for name in VARIANTS:
            found[name][condition] = measured.scores[name]
        done += tokens.tokens.numel()
        length, spacing, seed = condition
        progress(done / total, f"{length} tokens, {spacing}, seed {seed}")
    return found


def _score_quantities(
    scores: Mapping[str, Mapping[_Condition, HeadScore]],
    lengths: Sequence[int],
    spacings: Sequence[Spacing],
    seeds: Sequence[int],
) -> dict[str, Quantity]:
    found: dict[str, Quantity] = {}
    for name, of_condition in scores.items():
        definition = SCORES[name].definition
        joined = [
            [HeadScore.joined([of_condition[length, spacing, seed] for seed in seeds]) for spacing in spacings]
            for length in lengths
        ]
        mean = np.array([[score.mean for score in row] for row in joined])
        ends = np.array([[score.interval(0.95, seeds[0]) for score in row] for row in joined])
        found[name] = Quantity(mean, _BY_HEAD, "share of 1", f"{definition}; sequences of all seeds")
        for place, end in enumerate(("low", "high")):
            what = f"{'lower' if end == 'low' else 'upper'} end of the 95 % bootstrap interval over sequences of {name}"
            found[f"{name}_{end}"] = Quantity(ends[:, :, place], _BY_HEAD, "share of 1", what)
    of_seed = [
        [[scores["prefix_matching"][length, spacing, seed].mean for spacing in spacings] for length in lengths]
        for seed in seeds
    ]
    what = "prefix matching on the sequences of one seed"
    found["seed_prefix_matching"] = Quantity(np.array(of_seed), ("seed", *_BY_HEAD), "share of 1", what)
    return found


def _stability_quantities(
    scores: Mapping[str, Mapping[_Condition, HeadScore]],
    lengths: Sequence[int],
    spacings: Sequence[Spacing],
    seeds: Sequence[int],
) -> dict[str, Quantity]:
    rho, overlap = np.empty((2, len(lengths), len(spacings)))
    k = TOP
    for row, length in enumerate(lengths):
        for column, spacing in enumerate(spacings):
            means = [scores["prefix_matching"][length, spacing, seed].mean.reshape(-1) for seed in seeds]
            k = min(TOP, len(means[0]))
            pairs = list(combinations(means, 2))
            rho[row, column] = np.mean([spearman(*pair) for pair in pairs])
            overlap[row, column] = np.mean([top_overlap(*pair, k) for pair in pairs])
    over = "mean over pairs of seeds"
    return {
        "rank_stability": Quantity(rho, _CONDITION, "", f"Spearman's ρ of all heads' scores between seeds, {over}"),
        "top_stability": Quantity(
            overlap, _CONDITION, "share of 1", f"share of one seed's top {k} heads among the other's, {over}"
        ),
    }


def _period_quantities(
    scores: Mapping[str, Mapping[_Condition, HeadScore]], lengths: Sequence[int], seeds: Sequence[int]
) -> dict[str, Quantity]:
    """What a fixed period adds: the difference of two means over independent sequences."""
    found = np.empty((3, len(lengths), *next(iter(scores["prefix_matching"].values())).mean.shape))
    for place, length in enumerate(lengths):
        samples = []
        for spacing in get_args(Spacing):
            score = HeadScore.joined([scores["prefix_matching"][length, spacing, seed] for seed in seeds])
            samples.append(score.sums / score.counts[:, :, None])  # as many rows in every sequence
        ends = scipy.stats.bootstrap(
            samples, _difference, axis=0, vectorized=True, n_resamples=N_RESAMPLES, batch=50, method="percentile",
            rng=np.random.default_rng(seeds[0]),
        ).confidence_interval  # fmt: skip
        found[:, place] = _difference(samples[0], samples[1], axis=0), ends.low, ends.high
    names = {
        "period_gain": "prefix matching with a fixed period less that with random gaps",
        "period_gain_low": "lower end of the 95 % bootstrap interval over sequences of period_gain",
        "period_gain_high": "upper end of the 95 % bootstrap interval over sequences of period_gain",
    }
    axes = ("length", "layer", "head")
    return {
        name: Quantity(values, axes, "share of 1", what)
        for (name, what), values in zip(names.items(), found, strict=True)
    }


def _difference(fixed: np.ndarray, gaps: np.ndarray, axis: int) -> np.ndarray:
    return fixed.mean(axis=axis) - gaps.mean(axis=axis)


def _reads(quantities: Mapping[str, Quantity], spacings: Sequence[str], threshold: float) -> np.ndarray:
    """[layer, head], as PrefixMatchingConditions says."""
    low, high = (quantities[f"prefix_matching_{end}"].values for end in ("low", "high"))
    has = reaches(low, threshold)  # [length, spacing, layer, head]
    found = np.where(has.any(axis=(0, 1)), "some conditions", "no pattern")
    if len(spacings) == 2:
        fixed, gaps = spacings.index("fixed"), spacings.index("random gaps")
        halves = high[:, gaps] <= low[:, fixed] / 2
        found[has[:, fixed].any(axis=0) & (halves | ~has[:, fixed]).all(axis=0)] = "position"
        found[has.all(axis=(0, 1))] = "content"
    return found


def _all_sequences(
    prompts: Sequence[RepeatedTokens], lengths: Sequence[int], spacings: Sequence[str], seeds: Sequence[int]
) -> Sequences:
    """Everything that ran, as one padded batch: what the provenance counts and digests."""
    longest = max(tokens.tokens.shape[1] for tokens in prompts)
    rows = [pad(tokens.tokens, (0, longest - tokens.tokens.shape[1]), value=-1) for tokens in prompts]
    tokens = torch.cat(rows)
    listed = " and ".join((", ".join(map(str, lengths[:-1])), str(lengths[-1]))) if lengths[1:] else str(lengths[0])
    words = f"{listed} random tokens, repeated ({', '.join(spacings)}; seeds {', '.join(map(str, seeds))})"
    return Sequences(tokens.clamp(min=0), tokens >= 0, words)
