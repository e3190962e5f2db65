"""How few heads a model can do with, and which ranking of heads finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
from torch import Tensor

from workbench.analyses.attribution.agreement import mean_interval
from workbench.analyses.attribution.head_evidence import MetricName, chosen_metric
from workbench.analyses.attribution.rankings import (
    RANDOM,
    Ablation,
    built_in_rankings,
    checked_rankings,
    data_metric,
    halves_of,
    order_of,
    ranked_by,
    read_data,
    replacements,
    sequences_of,
    without_heads,
)
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.options import check_choice, check_seed, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model
from workbench.analyses.tasks import PromptSet

N_COUNTS = 13  # points of a curve, both ends among them


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadPruning(Result):
    """The metric while only the best heads of a ranking are kept.

    ``curve`` [ranking, kept] is the mean over the prompts of the second half, ``prompt_curve`` [ranking, kept, prompt]
    that of each; the coordinates of "kept" are numbers of heads. ``area`` [ranking] is the mean of the curve over
    shares of heads kept (trapezoid rule), with ``area_low`` and ``area_high`` where there are 20 prompts. The ranking
    "random" is the mean over ``settings["n_random"]`` orders, ``random_low`` and ``random_high`` [kept] their extremes.
    ``score`` [ranking, layer, head] is what heads were ranked by, on the first half.
    """

    kind: ClassVar[str] = "head_pruning"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("curves", "map")
    frame_axes: ClassVar[tuple[str, ...]] = ("ranking", "kept")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "areas": ("ranking",), "random": ("kept",), "scores": ("ranking_with_scores", "layer", "head"),
    }  # fmt: skip

    @property
    def rankings(self) -> Sequence[str]:
        """All rankings, "random" last."""
        return [str(name) for name in self.coordinates["ranking"]]

    @property
    def best(self) -> str:
        """The ranking with the best area."""
        sign = -1 if self.settings["lower_is_better"] else 1
        return self.rankings[int((sign * self["area"]).argmax())]

    def needed(self, ranking: str, share: float = 0.9) -> int | None:
        """The fewest heads of the curve's points with which, and with all larger numbers, the metric keeps ``share`` of
        the way from no head to all of them; None where all heads do no better than none.

        Raises:
            ValueError: no such ranking.
        """
        curve = self["curve"][self._row(ranking)]
        whole = curve[-1] - curve[0]
        if whole == 0 or (whole > 0) == self.settings["lower_is_better"]:
            return None
        enough = np.logical_and.accumulate(((curve - curve[0]) / whole >= share)[::-1])[::-1]
        return int(self.coordinates["kept"][int(enough.argmax())])

    def _row(self, ranking: str) -> int:
        if ranking not in self.rankings:
            raise ValueError(f"ranking must be one of {', '.join(map(repr, self.rankings))}, got {ranking!r}")
        return self.rankings.index(ranking)

    def summary(self) -> str:
        unit, n_heads = self.settings["unit"], self.coordinates["kept"][-1]
        curve = self["curve"]
        better = "lower" if self.settings["lower_is_better"] else "higher"
        lines = [
            self.provenance.sentence(),
            f"{self.settings['metric'].replace('_', ' ').capitalize()} with all {n_heads} heads {curve[0, -1]:.3f}, "
            f"with none {curve[0, 0]:.3f} {unit} ({better} is better; {self.settings['ablation']} ablation, "
            f"mean over the second half of the prompts, n = {len(self['all_heads'])}).",
            f"{'ranking':<24}{'area':>9}{'95 % interval':>20}  heads for 90 % of the way",
        ]
        for row, name in enumerate(self.rankings):
            low, high = self["area_low"][row], self["area_high"][row]
            interval = f"[{low:.3f}, {high:.3f}]" if np.isfinite(low) else "–"
            needed = self.needed(name)
            lines.append(f"{name:<24}{self['area'][row]:>9.3f}{interval:>20}  {'–' if needed is None else needed}")
        return "\n".join(lines)

    def _draw_curves(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        kept = np.array(self.coordinates["kept"])
        figure = figures.pruning_curves(
            kept,
            {name: self["curve"][row] for row, name in enumerate(self.rankings)},
            band=(RANDOM, self["random_low"], self["random_high"]),
            y_label=figures.axis_label(self.settings["metric"], self.settings["unit"]),
            theme=theme,
        )
        what = self.settings["metric"].replace("_", " ").capitalize()
        band = f" Band: all curves of {self.settings['n_random']} random orders; the line in it is their mean."
        return Drawing(figure, f"{what} against the number of heads kept", self.define("curve") + band)

    def _draw_map(self, *, ranking: str = "ablation effect", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        known = list(self.coordinates["ranking_with_scores"])
        if ranking not in known:
            raise ValueError(f"ranking must be one of {', '.join(map(repr, known))}, got {ranking!r}")
        unit = {"ablation effect": self.settings["unit"], "gradient": self.settings["unit"]}.get(ranking, "")
        label = figures.axis_label(ranking, unit)
        figure = figures.head_map(self["score"][known.index(ranking)], label=label, theme=theme)
        return Drawing(figure, f"What the ranking by {ranking} goes by", self.define("score"))


def head_pruning(
    model: Any,
    prompts: PromptSet | Input,
    rankings: Mapping[str, np.ndarray] | None = None,
    *,
    attention_mask: Tensor | None = None,
    metric: MetricName | None = None,
    ablation: Ablation = "mean",
    n_random: int = 5,
    seed: int = 0,
    progress: Progress = silent,
) -> HeadPruning:
    """Ablates all heads but the best ones of a ranking, for several numbers of heads kept and several rankings.

    Rankings are made on a random half of the prompts, which also gives the means that replace ablated outputs; curves
    are measured on the other half. Beside the rankings that are passed there are two or three by attention (largest
    weight; weight off the first token; prefix matching, where tokens repeat), one by ablating each head alone, one by
    gradient (Michel et al. 2019, section 4.1, without their normalisation within layers), and random ones.

    Args:
        prompts: prompts of a task; or text, texts or tokens, scored by the mean loss of their next tokens.
        rankings: name → score [layer, head], the largest kept longest; make them on ``prompts.halves(seed)[0]``.
        attention_mask: as for tokens.
        metric: of a PromptSet; None takes the logit difference where prompts have foils, else the log-probability.
        ablation: "mean" over all tokens of the first half (a head's constant part stays), or "zero".
        n_random: random orders.
        seed: of the halves and of these.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: fewer than two prompts, a ranking of another shape or with NaN, an unknown option, or a model that
            this cannot be asked of.
    """
    check_model(model, predicts=True)
    metric = chosen_metric(prompts, metric)
    check_choice("ablation", ablation, get_args(Ablation))
    check_whole(n_random=n_random, least=2)  # fewer make no band
    check_seed(seed)
    data = read_data(model, prompts, attention_mask)
    seen, unseen = halves_of(data, seed)
    scores = checked_rankings(model, rankings or {})
    outputs = replacements(model, sequences_of(seen), ablation)
    scores = built_in_rankings(model, seen, metric, outputs, lambda x, what: progress(0.4 * x, what)) | scores
    orders = {name: [order_of(score)] for name, score in scores.items()}
    rng = np.random.default_rng(seed)
    orders[RANDOM] = [rng.permutation(model.cfg.n_layers * model.cfg.n_heads) for _ in range(n_random)]
    kept = np.unique(np.linspace(0, model.cfg.n_layers * model.cfg.n_heads, N_COUNTS).round().astype(int))
    chosen = data_metric(unseen, metric)
    interventions = [
        without_heads(model, order[n:], outputs) for of_one in orders.values() for order in of_one for n in kept[:-1]
    ]
    values = measure(
        model, sequences_of(unseen), [Intervention(), *interventions], chosen,
        progress=lambda x, what: progress(0.4 + 0.6 * x, what),
    ).numpy()  # fmt: skip
    curves = values[1:].reshape(-1, len(kept) - 1, len(unseen))
    whole = np.broadcast_to(values[0], (len(curves), 1, len(unseen)))
    curves = np.concatenate((curves, whole), axis=1)  # [order, kept, prompt]
    return HeadPruning(
        quantities=_quantities(curves, kept, scores, values[0], n_random, chosen, seed),
        provenance=provenance(model, sequences_of(data)),
        settings={
            "prompts": data.name if isinstance(data, PromptSet) else "tokens", "metric": chosen.name,
            "unit": chosen.unit, "lower_is_better": isinstance(data, Sequences), "ablation": ablation,
            "n_random": n_random, "seed": seed,
        },
        coordinates={
            "ranking": [*scores, RANDOM], "kept": kept.tolist(), "ranking_with_scores": list(scores),
        },
    )  # fmt: skip


def _quantities(
    curves: np.ndarray, kept: np.ndarray, scores: Mapping[str, np.ndarray], whole: np.ndarray, n_random: int,
    metric: Metric, seed: int,
) -> dict[str, Quantity]:  # fmt: skip
    random = curves[-n_random:]
    curves = np.concatenate((curves[:-n_random], random.mean(axis=0, keepdims=True)))  # [ranking, kept, prompt]
    areas = np.trapezoid(curves, kept / kept[-1], axis=1)  # [ranking, prompt]
    low, high = np.array([mean_interval(of_one, seed=seed) for of_one in areas]).T
    unit, means = metric.unit, random.mean(axis=2)
    what = f"{metric.name} with the heads that a ranking keeps, all others ablated"
    end = "end of the 95% bootstrap interval of area over prompts, NaN for fewer than 20"
    return {
        "curve": Quantity(curves.mean(axis=2), ("ranking", "kept"), unit, f"{what}, mean over prompts"),
        "prompt_curve": Quantity(curves, ("ranking", "kept", "prompt"), unit, f"{what}, of each prompt"),
        "area": Quantity(areas.mean(axis=1), ("ranking",), unit, "mean of curve over the share of heads kept"),
        "area_low": Quantity(low, ("ranking",), unit, f"lower {end}"),
        "area_high": Quantity(high, ("ranking",), unit, f"upper {end}"),
        "random_low": Quantity(means.min(axis=0), ("kept",), unit, f"smallest curve of {n_random} random orders"),
        "random_high": Quantity(means.max(axis=0), ("kept",), unit, f"largest curve of {n_random} random orders"),
        "all_heads": Quantity(whole, ("prompt",), unit, f"{metric.name} of the model as it is"),
        "score": Quantity(
            np.stack(list(scores.values())), ("ranking_with_scores", "layer", "head"), "",
            ranked_by(scores),
        ),
    }  # fmt: skip
