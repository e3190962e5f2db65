"""What heads do together against what each does alone: redundancy, self-repair, and chains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
from torch import Tensor

from workbench.analyses.attribution.agreement import MIN_FOR_INTERVAL, mean_interval
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
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.options import check_choice, check_seed, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, provenance, silent
from workbench.analyses.support import check_model
from workbench.analyses.tasks import PromptSet

N_COUNTS = 10  # numbers of heads ablated together, evenly on a logarithmic scale


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class JointAblation(Result):
    """The effect of ablating the first k heads of a ranking together, and the sum of what each does alone.

    By ranking and number of heads, means over the prompts of the second half: ``joint``, ``alone`` (the sum) and
    ``excess`` = joint − alone, with ``excess_low`` and ``excess_high`` where there are 20 prompts; ``prompt_joint`` and
    ``prompt_alone`` are of each prompt. "random" is the mean over ``settings["n_random"]`` orders, ``random_low`` and
    ``random_high`` [ablated] their smallest and largest joint effects. ``single`` [layer, head] is the effect of each
    head alone, ``score`` what heads were ranked by, on the first half.
    """

    kind: ClassVar[str] = "joint_ablation"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("curves", "excess", "map")
    frame_axes: ClassVar[tuple[str, ...]] = ("ranking", "ablated")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "heads": ("layer", "head"), "random": ("ablated",), "scores": ("ranking_with_scores", "layer", "head"),
    }  # fmt: skip

    @property
    def rankings(self) -> Sequence[str]:
        """All rankings, "random" last."""
        return [str(name) for name in self.coordinates["ranking"]]

    def peak(self, ranking: str) -> int:
        """The number of heads, short of all, of which together and alone differ most.

        Raises:
            ValueError: no such ranking.
        """
        if ranking not in self.rankings:
            raise ValueError(f"ranking must be one of {', '.join(map(repr, self.rankings))}, got {ranking!r}")
        excess = self["excess"][self.rankings.index(ranking), :-1]
        return int(self.coordinates["ablated"][int(np.abs(excess).argmax())])

    def summary(self) -> str:
        unit, metric = self.settings["unit"], self.settings["metric"].replace("_", " ")
        whole = self["all_heads"]
        lines = [
            self.provenance.sentence(),
            f"{metric.capitalize()} with all heads {whole.mean():.3f} {unit}, mean over the second half of the "
            f"prompts, n = {len(whole)}; {self.settings['ablation']} ablation, rankings from the first half.",
            f"All {self.coordinates['ablated'][-1]} heads: {self._in_words(0, -1)}.",
            "Where the heads together and the sum of each alone differ most, short of all heads:",
        ]
        counts = list(self.coordinates["ablated"])
        for row, name in enumerate(self.rankings):
            n = self.peak(name)
            lines.append(f"{name}, first {n}: {self._in_words(row, counts.index(n))}.")
        lines.append(
            "A difference of the effects' own sign: heads stand in for each other. Of the other sign: a chain, of "
            "which any missing link breaks the whole, or a metric with nothing left to lose."
        )
        return "\n".join(lines)

    def _in_words(self, row: int, column: int) -> str:
        joint, alone, excess, low, high = (
            self[what][row, column] for what in ("joint", "alone", "excess", "excess_low", "excess_high")
        )
        interval = f" [{low:+z.3f}, {high:+z.3f}]" if np.isfinite(low) else ""
        unit = self.settings["unit"]
        return f"together {joint:+z.3f}, alone {alone:+z.3f}, difference {excess:+z.3f}{interval} {unit}"

    def _draw_curves(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.joint_curves(
            np.array(self.coordinates["ablated"]),
            {name: (self["joint"][row], self["alone"][row]) for row, name in enumerate(self.rankings)},
            band=(self["random_low"], self["random_high"]),
            y_label=f"effect ({self.settings['unit']})",
            theme=theme,
        )
        note = f" Band: joint effects of {self.settings['n_random']} random orders."
        return Drawing(
            figure, "Heads ablated together, and the sum of each alone", self.define("joint", "alone") + note
        )

    def _draw_excess(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.excess_curves(
            np.array(self.coordinates["ablated"]),
            {
                name: tuple(self[what][row] for what in ("excess", "excess_low", "excess_high"))
                for row, name in enumerate(self.rankings)
            },
            y_label=f"together less alone ({self.settings['unit']})",
            theme=theme,
        )
        bars = " Bars: 95 % bootstrap intervals over prompts." if np.isfinite(self["excess_low"]).any() else ""
        return Drawing(figure, "What heads do together beyond what each does alone", self.define("excess") + bars)

    def _draw_map(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_map(self["single"], label=f"effect ({self.settings['unit']})", signed=True, theme=theme)
        return Drawing(figure, "What each head does alone", self.define("single"))


def joint_ablation(
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
) -> JointAblation:
    """Ablates the first k heads of a ranking together, for several k, and each of them alone.

    Effects that were independent would add up. Together *more* than alone is redundancy: while one is gone the others,
    or heads that wait for that, stand in (Wang et al. 2022, section 3.4; McGrath et al. 2023). Together *less* is a
    chain, of which any missing link breaks the whole, or a metric that has nothing left to lose.

    Heads are ranked on a random half of the prompts, which also gives the means that replace outputs; effects are
    measured on the other half. The rankings are those of ``head_pruning``.

    Args:
        prompts: prompts of a task; or text, texts or tokens, scored by the mean loss of their next tokens.
        rankings: name → score [layer, head], the largest ablated first; make them on ``prompts.halves(seed)[0]``.
        attention_mask: as for tokens.
        metric: of a PromptSet; None takes the logit difference where prompts have foils, else the log-probability.
        ablation: "mean" over all tokens of the first half (a head's constant part stays), or "zero".
        n_random: random orders.
        seed: of the halves and of these.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: fewer than two prompts, a ranking of another shape or with NaN, an unknown option, or a model that
            this cannot be asked of, such as one with a single head.
    """
    check_model(model, predicts=True)
    metric = chosen_metric(prompts, metric)
    check_choice("ablation", ablation, get_args(Ablation))
    check_whole(n_random=n_random, least=2)  # fewer make no band
    check_seed(seed)
    n_heads = model.cfg.n_layers * model.cfg.n_heads
    if n_heads < 2:
        raise ValueError("the model has one head, and joint ablation compares several; ablate it with head_pruning")
    data = read_data(model, prompts, attention_mask)
    seen, unseen = halves_of(data, seed)
    scores = checked_rankings(model, rankings or {})
    outputs = replacements(model, sequences_of(seen), ablation)
    scores = built_in_rankings(model, seen, metric, outputs, lambda x, what: progress(0.3 * x, what)) | scores
    rng = np.random.default_rng(seed)
    orders = np.stack([*map(order_of, scores.values()), *(rng.permutation(n_heads) for _ in range(n_random))])
    counts = np.unique(np.geomspace(1, n_heads, N_COUNTS).round().astype(int))
    chosen = data_metric(unseen, metric)
    heads = [np.array([head]) for head in range(n_heads)]
    sets = [order[:n] for order in orders for n in counts]
    values = measure(
        model, sequences_of(unseen), [Intervention(), *(without_heads(model, some, outputs) for some in heads + sets)],
        chosen, progress=lambda x, what: progress(0.3 + 0.7 * x, what),
    ).numpy()  # fmt: skip
    single, joint = np.split(values[1:] - values[0], [n_heads])
    joint = joint.reshape(len(orders), len(counts), -1)
    alone = single[orders].cumsum(axis=1)[:, counts - 1]  # [order, ablated, prompt]
    quantities = _quantities(joint, alone, n_random, chosen.unit, seed)
    quantities |= _of_heads(single.reshape(model.cfg.n_layers, model.cfg.n_heads, -1), scores, chosen.unit)
    quantities["all_heads"] = Quantity(values[0], ("prompt",), chosen.unit, f"{chosen.name} of the model as it is")
    return JointAblation(
        quantities=quantities,
        provenance=provenance(model, sequences_of(data)),
        settings={
            "prompts": data.name if isinstance(data, PromptSet) else "tokens", "metric": chosen.name,
            "unit": chosen.unit, "ablation": ablation, "n_random": n_random, "seed": seed,
        },
        coordinates={
            "ranking": [*scores, RANDOM], "ablated": counts.tolist(), "ranking_with_scores": list(scores),
        },
    )  # fmt: skip


def _quantities(joint: np.ndarray, alone: np.ndarray, n_random: int, unit: str, seed: int) -> dict[str, Quantity]:
    """Of effects [order, ablated, prompt], the random orders last."""
    band = joint[-n_random:].mean(axis=2)
    joint, alone = (
        np.concatenate((x[:-n_random], x[-n_random:].mean(axis=0, keepdims=True))) for x in (joint, alone)
    )  # [ranking, ablated, prompt]
    excess = joint - alone
    ends = np.array([[mean_interval(of_count, seed=seed) for of_count in of_ranking] for of_ranking in excess])
    axes, end = ("ranking", "ablated"), f"end of its 95 % bootstrap interval, NaN for fewer than {MIN_FOR_INTERVAL}"
    texts = {
        "joint": "metric with the first heads of a ranking ablated together less metric as it is",
        "alone": "sum over the same heads of the effect of ablating each alone",
    }
    found = {
        name: Quantity(values.mean(axis=2), axes, unit, f"{texts[name]}, mean over prompts")
        for name, values in (("joint", joint), ("alone", alone))
    }
    found["excess"] = Quantity(excess.mean(axis=2), axes, unit, "joint − alone: 0 where effects add up")
    for name, values, which in (("excess_low", ends[..., 0], "lower"), ("excess_high", ends[..., 1], "upper")):
        found[name] = Quantity(values, axes, unit, f"{which} {end}")
    for name, values in (("joint", joint), ("alone", alone)):
        found[f"prompt_{name}"] = Quantity(values, (*axes, "prompt"), unit, f"{texts[name]}, of each prompt")
    for name, values in (("random_low", band.min(axis=0)), ("random_high", band.max(axis=0))):
        which = "smallest" if name == "random_low" else "largest"
        found[name] = Quantity(values, ("ablated",), unit, f"{which} joint effect of {n_random} random orders")
    return found


def _of_heads(single: np.ndarray, scores: Mapping[str, np.ndarray], unit: str) -> dict[str, Quantity]:
    """Of effects [layer, head, prompt] of each head alone, and of what ranks heads."""
    effect = "effect of ablating the head alone, mean over the prompts of the second half"
    values = np.stack(list(scores.values()))
    return {
        "single": Quantity(single.mean(axis=2), ("layer", "head"), unit, effect),
        "score": Quantity(values, ("ranking_with_scores", "layer", "head"), "", ranked_by(scores)),
    }
