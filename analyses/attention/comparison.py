"""Two results side by side: two models, two texts, two heads, or one model before and after a change."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import scipy.stats

from workbench.analyses.attention.patterns import HeadPattern
from workbench.analyses.attention.scores import ROUNDING, SCORES
from workbench.analyses.labels import HEAD_SCORES, number_or_dash
from workbench.analyses.result import Drawing, Provenance, Quantity, Result

Head = tuple[int, int]  # layer, head
SIDES = ("a", "b")


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadComparison(Result):
    """Per-head numbers of two results: of each ``score`` of ``scores``, ``score_a`` and ``score_b`` [layer, head].

    Where both models have as many layers and heads, also ``score_change``, which is B − A. Otherwise B's axes are
    ``layer of B`` and ``head of B``.
    """

    kind: ClassVar[str] = "head_comparison"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("maps", "change", "scatter")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar = {"b": ("layer of B", "head of B")}

    @property
    def same_shape(self) -> bool:
        """Whether the two have as many layers and heads, so that each head of A has one of B to be compared with."""
        return f"{self.settings['scores'][0]}_change" in self

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        return self.all_figure_kinds if self.same_shape else ("maps",)

    @property
    def scores(self) -> list[str]:
        """The numbers that both results have a value of."""
        return [
            name for name in self.settings["scores"] if all(np.isfinite(self[f"{name}_{side}"]).any() for side in SIDES)
        ]

    def about(self, score: str) -> Quantity:
        """A score as it is defined in both results, with A's values."""
        of_a = self.quantities[f"{score}_a"]
        return replace(of_a, definition=of_a.definition.removesuffix(", in A"))

    def most_changed(self, score: str, n: int = 5) -> list[Head]:
        """(layer, head) of the ``n`` heads that differ most, in order; those without a value are left out.

        Raises:
            ValueError: an unknown score, or models of other sizes.
        """
        change = np.abs(self._change(score))
        order = np.argsort(-np.nan_to_num(change, nan=-1.0), axis=None, kind="stable")[:n]
        heads = np.stack(np.unravel_index(order, change.shape), axis=1).tolist()
        return [(layer, head) for layer, head in heads if np.isfinite(change[layer, head])]

    def rank_correlation(self, score: str) -> float:
        """Spearman's ρ of the two over heads; NaN where fewer than three heads have both, or one side is constant.

        Raises:
            ValueError: as ``most_changed``.
        """
        self._change(score)
        pair = np.stack([self[f"{score}_{side}"].reshape(-1) for side in SIDES])
        pair = pair[:, np.isfinite(pair).all(axis=0)]
        if pair.shape[1] < 3 or (np.ptp(pair, axis=1) == 0).any():
            return float("nan")
        return float(scipy.stats.spearmanr(*pair).statistic)

    def summary(self) -> str:
        lines = [f"{side.upper()}: {self.settings['sources'][side]}" for side in SIDES]
        for name in self.scores:
            means = [f"mean {np.nanmean(self[f'{name}_{side}']):z.3f} in {side.upper()}" for side in SIDES]
            line = f"{name}: {', '.join(means)}"
            if self.same_shape:
                heads = [f"L{at[0]}H{at[1]} {self[f'{name}_change'][at]:+z.3f}" for at in self.most_changed(name, 3)]
                line += f"; most changed {', '.join(heads)}"
            lines.append(f"{line}.")
        if absent := [name for name in self.settings["scores"] if name not in self.scores]:
            lines.append(f"Without a value in one of the two: {', '.join(absent)}.")
        return "\n".join(lines)

    def _checked(self, score: str | None) -> str:
        """A score that both have a value of; None is the first."""
        if score is None and self.scores:
            return self.scores[0]
        if score is None or score not in self.settings["scores"]:
            raise ValueError(f"score must be one of {', '.join(self.settings['scores'])}, got {score!r}")
        for side in SIDES:
            if not np.isfinite(self[f"{score}_{side}"]).any():
                raise ValueError(f"{side.upper()} has no value of {score}, as nothing in its inputs counts for it")
        return score

    def _change(self, score: str) -> np.ndarray:
        score = self._checked(score)
        if not self.same_shape:
            raise ValueError(
                f"A has {_size(self[f'{score}_a'])}, B {_size(self[f'{score}_b'])}, so no head of one is a head of the "
                "other; the figure “maps” shows both"
            )
        return self[f"{score}_change"]

    def _label(self, score: str) -> str:
        from workbench.analyses.figures import axis_label

        return axis_label(score, self.quantities[f"{score}_a"].unit)

    def _draw_maps(
        self, *, score: str | None = None, chosen: Head | None = None, other: Head | None = None, theme: str = "light"
    ) -> Drawing:
        """``chosen`` is a head of A to put a frame around, ``other`` one of B."""
        from workbench.analyses import figures

        score = self._checked(score)
        a, b = (self[f"{score}_{side}"] for side in SIDES)
        for name, head, values in (("chosen", chosen, a), ("other", other, b)):
            if head is not None and not (0 <= head[0] < values.shape[0] and 0 <= head[1] < values.shape[1]):
                raise ValueError(f"{name} must be a head among {_size(values)}, got L{head[0]}H{head[1]}")
        figure = figures.head_map_pair(
            (a, b),
            names=_panel_names(self),
            label=self._label(score),
            upper=SCORES[score].upper if score in SCORES else None,
            signed=bool(min(np.nanmin(a), np.nanmin(b)) < -ROUNDING * max(np.nanmax(np.abs(a)), np.nanmax(np.abs(b)))),
            chosen=(chosen, other),
            theme=theme,
        )
        return Drawing(figure, f"{_in_words(score)} of every head, twice", self._note(score))

    def _draw_change(self, *, score: str | None = None, chosen: Head | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        score = self._checked(score)
        figure = figures.head_map(
            self._change(score), label=f"{self._label(score)}, B − A", signed=True, chosen=chosen, theme=theme
        )
        return Drawing(figure, f"{_in_words(score)}: B − A", self._note(score))

    def _draw_scatter(self, *, score: str | None = None, n_labels: int = 8, theme: str = "light") -> Drawing:
        """``n_labels`` heads that differ most are named."""
        from workbench.analyses import figures

        score = self._checked(score)
        shape = self._change(score).shape
        figure = figures.diagonal(
            self[f"{score}_a"],
            self[f"{score}_b"],
            names=[f"L{layer}H{head}" for layer, head in np.ndindex(shape)],
            x_label=f"{self._label(score)}, A",
            y_label=f"{self._label(score)}, B",
            n_labels=n_labels,
            theme=theme,
        )
        return Drawing(
            figure,
            f"{_in_words(score)} of every head, B against A",
            f"{self._note(score)} On the line nothing differs. Spearman’s ρ over heads: "
            f"{number_or_dash(self.rank_correlation(score), '.2f')}.",
        )

    def _note(self, score: str) -> str:
        return f"{_in_words(score)}: {self.about(score).definition}. {_sides_in_words(self)}"


def compare_heads(a: Result, b: Result) -> HeadComparison:
    """Every per-head number that two results of one kind have in common, side by side.

    Args:
        a, b: such as two of ``head_statistics``: of two models, of two texts, or of one model before and after.

    Raises:
        ValueError: results of two kinds, without numbers per head, or whose numbers mean different things because they
            were made with different options.
    """
    _check_kinds(a, b, Result)
    names = [
        name
        for name in a.names("layer", "head")
        if name in b and b.quantities[name].axes == ("layer", "head") and a[name].dtype.kind in "iuf"
    ]
    if not names:
        raise ValueError(f"a {a.kind.replace('_', ' ')} has no number per head; compare head_statistics, for instance")
    quantities: dict[str, Quantity] = {}
    same = a[names[0]].shape == b[names[0]].shape
    for name in names:
        of_a, of_b = a.quantities[name], b.quantities[name]
        if of_a.definition != of_b.definition:
            raise ValueError(
                f"{name} is “{of_a.definition}” in A and “{of_b.definition}” in B; make both with the same options"
            )
        unit, meaning, axes = of_a.unit, of_a.definition, ("layer", "head")
        quantities[f"{name}_a"] = Quantity(of_a.values, axes, unit, f"{meaning}, in A")
        other = axes if same else ("layer of B", "head of B")
        quantities[f"{name}_b"] = Quantity(of_b.values, other, unit, f"{meaning}, in B")
        if same:
            change = of_b.values.astype(np.float64) - of_a.values
            quantities[f"{name}_change"] = Quantity(change, axes, unit, f"{meaning}, B − A")
    return HeadComparison(quantities=quantities, provenance=_joined(a, b), settings={"scores": names, **_sources(a, b)})


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PatternComparison(Result):
    """Two heads' patterns: ``cells_a`` [query of A, key of A] and ``cells_b`` [query of B, key of B], as HeadPattern's.

    ``coordinates`` hold the labels of rows and columns.
    """

    kind: ClassVar[str] = "pattern_comparison"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("patterns",)
    frame_axes: ClassVar[tuple[str, ...]] = ("query of A", "key of A")
    further_tables: ClassVar = {"b": ("query of B", "key of B")}

    def summary(self) -> str:
        lines = []
        for side in SIDES:
            lines.append(f"{side.upper()}: {self.settings['heads'][side]} of {self.settings['sources'][side]}")
            lines.append(self.settings["shown"][side])
        return "\n".join(lines)

    def _draw_patterns(self, *, scale: str = "linear", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        heads, axes = self.settings["heads"], self.coordinates
        names = [f"{side.upper()}: {heads[side]} {self.settings['panels'][side]}".strip() for side in SIDES]
        figure = figures.pattern_pair(
            (self["cells_a"], self["cells_b"]),
            names=(names[0], names[1]),
            labels=(
                ([str(x) for x in axes["query of A"]], [str(x) for x in axes["key of A"]]),
                ([str(x) for x in axes["query of B"]], [str(x) for x in axes["key of B"]]),
            ),
            label=self.settings["label"],
            upper=1.0 if self.settings["is_weight"] else None,
            scale=scale,
            theme=theme,
        )
        shown = [f"{side.upper()}: {self.settings['shown'][side]}" for side in SIDES]
        return Drawing(figure, f"Patterns of {heads['a']} and {heads['b']}", " ".join([_sides_in_words(self), *shown]))


def compare_patterns(a: HeadPattern, b: HeadPattern) -> PatternComparison:
    """The patterns of two heads side by side: of one model or two, on one text or two.

    Raises:
        ValueError: something else than two of ``head_pattern``, or two whose cells mean different things: weights and
            weights times values, tokens and words, maxima and means.
    """
    _check_kinds(a, b, HeadPattern)
    for what, values in {
        "pooling": [side.settings["pooling"] for side in (a, b)],
        "words": [side.has_words for side in (a, b)],
        "value_weighted": ["value_weighted" in side for side in (a, b)],
        "without_first": [bool(side.settings.get("without_first")) for side in (a, b)],
    }.items():
        if values[0] != values[1]:
            raise ValueError(f"A has {what} = {values[0]!r}, B {values[1]!r}; make both with the same options")
    both = dict(zip(SIDES, (a, b), strict=True))
    quantities: dict[str, Quantity] = {}
    coordinates: dict[str, list[str]] = {}
    for side, pattern in both.items():
        axes = (f"query of {side.upper()}", f"key of {side.upper()}")
        about = pattern.quantities["value_weighted" if "value_weighted" in pattern else "weight"]
        quantities[f"cells_{side}"] = Quantity(
            pattern.cells, axes, about.unit, f"{about.definition}, in {side.upper()}"
        )
        coordinates |= {axes[0]: pattern.labels("query"), axes[1]: pattern.labels("key")}
    return PatternComparison(
        quantities=quantities,
        provenance=_joined(a, b),
        settings={
            "heads": {side: f"L{x.settings['layer']}H{x.settings['head']}" for side, x in both.items()},
            "shown": {side: x.shown() for side, x in both.items()},
            "label": " / ".join(dict.fromkeys(x.cell_label() for x in both.values())),
            "is_weight": "value_weighted" not in a,
            **_sources(a, b),
        },
        coordinates=coordinates,
    )  # fmt: skip


def _check_kinds(a: Any, b: Any, kind: type) -> None:
    for name, side in (("a", a), ("b", b)):
        if not isinstance(side, kind):
            wanted = "a result of an analysis" if kind is Result else "a result of head_pattern"
            raise ValueError(f"{name} must be {wanted}, got {type(side).__name__}")
    if a.kind != b.kind:
        raise ValueError(f"a is a {a.kind}, b a {b.kind}; compare two results of the same analysis")


def _joined(a: Result, b: Result) -> Provenance:
    """Where a comparison comes from; what is the same in both is said once."""
    one, other = a.provenance, b.provenance

    def both(first: str | None, second: str | None) -> str:
        return str(first) if first == second else f"A: {first}; B: {second}"

    return Provenance(
        model_name=both(one.model_name, other.model_name),
        revision=both(one.revision, other.revision) if one.revision or other.revision else None,
        weights=both(one.weights, other.weights),
        inputs=both(one.inputs, other.inputs),
        inputs_sha256=hashlib.sha256(f"{one.inputs_sha256} {other.inputs_sha256}".encode()).hexdigest(),
        n_sequences=one.n_sequences + other.n_sequences,
        n_tokens=one.n_tokens + other.n_tokens,
        bos=both(one.bos, other.bos),
        versions=one.versions,
    )


def _sources(a: Result, b: Result) -> dict[str, Any]:
    """What each side is, for settings: in a sentence, and in as few words as tell the two apart."""
    sides = dict(zip(SIDES, (a.provenance, b.provenance), strict=True))
    differing = [
        name for name in ("model_name", "inputs") if getattr(a.provenance, name) != getattr(b.provenance, name)
    ]
    return {
        "sources": {side: provenance.sentence() for side, provenance in sides.items()},
        "panels": {
            side: ", ".join([getattr(provenance, name) for name in differing]) for side, provenance in sides.items()
        },
        "about": {
            side: {name: getattr(made, name) for name in ("model_name", "weights", "inputs", "n_tokens")}
            for side, made in sides.items()
        },
        "options": {side: dict(x.settings) for side, x in zip(SIDES, (a, b), strict=True)},
    }


def _panel_names(result: Result) -> tuple[str, str]:
    a, b = (f"{side.upper()}: {what}" if (what := result.settings["panels"][side]) else side.upper() for side in SIDES)
    return a, b


def _sides_in_words(result: Result) -> str:
    return " ".join(f"{side.upper()}: {result.settings['sources'][side]}" for side in SIDES)


def _size(values: np.ndarray) -> str:
    return f"{values.shape[0]} layers of {values.shape[1]} heads"


def _in_words(score: str) -> str:
    return HEAD_SCORES.get(score, score.replace("_", " ").capitalize())
