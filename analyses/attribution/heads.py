"""Ablation versus attention: do the heads that attend decide, and do the heads that decide attend?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from torch import Tensor

from workbench.analyses.attribution.head_evidence import (
    MEASURES,
    Ablation,
    MetricName,
    ablate,
    chosen_metric,
    metric_of,
    observe,
    replacement_outputs,
)
from workbench.analyses.attribution.head_verdicts import (
    ATTENDED,
    DECISIVE,
    INERT,
    MOST_UNATTENDED,
    SIGNIFICANT,
    UNATTENDED,
    VERDICTS,
    agreement_quantities,
    head_quantities,
    head_verdicts,
    verdict_definition,
)
from workbench.analyses.labels import number_or_dash
from workbench.analyses.options import check_choice, check_seed, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model
from workbench.analyses.tasks import PromptSet
from workbench.analyses.tasks.prompt_set import check_prompts


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AttributionAgreement(Result):
    """Attention measures, gradients and effects of ablation of every head, and how far their rankings agree.

    By head: each measure, ``{ablation}_effect`` (total, sign kept), ``{ablation}_direct`` and
    ``{ablation}_self_repair`` = effect − direct effect, and ``verdict``. By measure and ablation: ``tau``, ``rho``,
    their intervals and p-values. Per prompt: ``prompt_measure``, ``prompt_effect`` and ``baseline``.
    """

    kind: ClassVar[str] = "attribution_agreement"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("scatter", "agreement", "map", "repair")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "agreement": ("measure", "ablation"), "measures": ("measure",), "ablations": ("ablation",),
        "prompts": ("prompt",),
    }  # fmt: skip

    @property
    def measures(self) -> Sequence[str]:
        return [str(name) for name in self.coordinates["measure"]]

    @property
    def ablations(self) -> Sequence[str]:
        return [str(name) for name in self.coordinates["ablation"]]

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """Without "repair" where direct effects are unknown."""
        has_direct = f"{self.ablations[0]}_direct" in self
        return tuple(kind for kind in self.all_figure_kinds if kind != "repair" or has_direct)

    def heads(self, verdict: str) -> list[tuple[int, int]]:
        """(layer, head) of the heads with a verdict, those with the largest effect first.

        Raises:
            ValueError: no such verdict.
        """
        if verdict not in VERDICTS:
            raise ValueError(f"verdict must be one of {', '.join(map(repr, VERDICTS))}, got {verdict!r}")
        size = np.where(self["verdict"] == verdict, np.abs(self[f"{self.ablations[0]}_effect"]), -1.0)
        order = np.argsort(-size, axis=None, kind="stable")[: int((size >= 0).sum())]
        return [(int(place) // size.shape[1], int(place) % size.shape[1]) for place in order]

    def summary(self) -> str:
        baseline, metric = self["baseline"], self.settings["metric"].replace("_", " ")
        n, named = len(baseline), self.settings["verdict_measure"]
        lines = [
            self.provenance.sentence(),
            f"Baseline {metric}: {baseline.mean():.3f} {self.settings['unit']}, mean over {n} prompt{'s' * (n > 1)}.",
            *(self._agreement_in_words(ablation) for ablation in self.ablations),
        ]
        if self.settings["untested"]:
            lines.append(f"No verdicts: {self.settings['untested']}.")
        for verdict in ("attended, inert", "unattended, decisive", "attended, decisive"):
            found = self.heads(verdict)
            if found or not self.settings["untested"]:
                some = ", ".join(self._in_words(*head) for head in found[:8])
                more = f" and {len(found) - 8} more" if len(found) > 8 else ""
                what = f"{named.replace('_', ' ')}; effect of {self.ablations[0]} ablation"
                lines.append(f"{verdict.capitalize()} ({what}): {some or 'none'}{more}.")
        return "\n".join(lines)

    def _in_words(self, layer: int, head: int) -> str:
        effect = self[f"{self.ablations[0]}_effect"][layer, head]
        return f"L{layer}H{head} ({self[self.settings['verdict_measure']][layer, head]:.2f}; {effect:+.3f})"

    def _agreement_in_words(self, ablation: str) -> str:
        column = self.ablations.index(ablation)
        parts = []
        for row, measure in enumerate(self.measures):
            low, high, p = (self[name][row, column] for name in ("tau_low", "tau_high", "tau_p_adjusted"))
            interval = f" [{low:+.2f}, {high:+.2f}]" if np.isfinite(low) else ""
            tau, n = self["tau"][row, column], int(self["n_prompts"][row, column])
            if np.isfinite(tau):
                few = f", n = {n}" if n < len(self["baseline"]) else ""
                parts.append(f"{measure.replace('_', ' ')} {tau:+.2f}{interval} (p {p:.3f}{few})")
        return f"τ with the size of the effect of {ablation} ablation: {'; '.join(parts) or 'none'}."

    def _draw_scatter(
        self, *, measure: str | None = None, ablation: str | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        measure = self.settings["verdict_measure"] if measure is None else measure
        ablation = self._chosen(ablation)
        if measure not in self.measures:
            raise ValueError(f"measure must be one of {', '.join(self.measures)}, got {measure!r}")
        effect = self[f"{ablation}_effect"]
        row, column = self.measures.index(measure), self.ablations.index(ablation)
        if measure == self.settings["verdict_measure"] and not self.settings["untested"]:
            groups = {verdict: self["verdict"] == verdict for verdict in VERDICTS}
            decisive = ("unattended, decisive", "attended, decisive")
            named = {"attended, inert": self[measure]} | dict.fromkeys(decisive, np.abs(effect))
        else:
            groups = {"ablation lowers the metric": effect < 0, "raises it": effect > 0, "leaves it": effect == 0}
            named = dict.fromkeys([name for name in groups if name != "leaves it"], np.abs(effect))
        figure = figures.quadrants(
            self[measure],
            np.abs(effect),
            groups=groups,
            named=named,
            thresholds=self._thresholds(measure),
            x_label=figures.axis_label(MEASURES[measure].label, MEASURES[measure].unit),
            y_label=f"|effect of {ablation} ablation| ({self.settings['unit']})",
            note=self._tau_in_words(row, column),
            theme=theme,
        )
        title = f"{figures.axis_label(measure).capitalize()} of every head against what its ablation does"
        return Drawing(figure, title, self.define(measure, f"{ablation}_effect", "verdict"))

    def _thresholds(self, measure: str) -> tuple[float, float, float, float]:
        """Unattended and attended on x, inert and decisive on y."""
        attention = np.quantile(self[measure], (UNATTENDED, ATTENDED))
        if MEASURES[measure].unit == "share of 1":
            attention[0] = min(attention[0], MOST_UNATTENDED)
        gain = float(self["baseline"].mean()) - self.settings["chance"]
        return (*map(float, attention), INERT * abs(gain), DECISIVE * abs(gain))

    def _tau_in_words(self, row: int, column: int) -> str:
        low, high = (float(self[f"tau_{side}"][row, column]) for side in ("low", "high"))
        interval = f" [{low:+.2f}, {high:+.2f}]" if np.isfinite(low) else ""
        tau = number_or_dash(self["tau"][row, column], "+.2f")
        return f"Kendall τ-b {tau}{interval}, n = {len(self['baseline'])}"

    def _draw_agreement(self, *, statistic: Literal["tau", "rho"] = "tau", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        if statistic not in ("tau", "rho"):
            raise ValueError(f"statistic must be 'tau' or 'rho', got {statistic!r}")
        labels = [MEASURES[name].label for name in self.measures]
        series = {
            f"{ablation} ablation": (
                self[statistic][:, column], self[f"{statistic}_low"][:, column], self[f"{statistic}_high"][:, column]
            )
            for column, ablation in enumerate(self.ablations)
        }  # fmt: skip
        name = "Kendall τ-b" if statistic == "tau" else "Spearman ρ"
        figure = figures.agreement_dots(
            labels, series, filled=list((self["tau_p_adjusted"] < SIGNIFICANT).T), theme=theme,
            x_label=f"{name} with |effect|, mean over prompts",
        )  # fmt: skip
        note = f"{self.define(statistic, 'tau_p_adjusted')} Hollow: adjusted p of τ ≥ {SIGNIFICANT}."
        return Drawing(figure, "How far measures of heads agree with ablation", note)

    def _draw_map(
        self, *, ablation: str | None = None, chosen: tuple[int, int] | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        name = f"{self._chosen(ablation)}_effect"
        marked = self.heads("unattended, decisive")
        label = f"effect ({self.settings['unit']})"
        figure = figures.head_map(self[name], label=label, signed=True, marked=marked, chosen=chosen, theme=theme)
        note = self.define(name) + (" Framed: unattended, decisive." if marked else "") + figures.framed(chosen)
        return Drawing(figure, f"Effect of {self._chosen(ablation)} ablation, every head", note)

    def _draw_repair(self, *, ablation: str | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        ablation, unit = self._chosen(ablation), self.settings["unit"]
        figure = figures.diagonal(
            self[f"{ablation}_direct"],
            self[f"{ablation}_effect"],
            names=[f"L{layer}H{head}" for layer, head in np.ndindex(self[f"{ablation}_effect"].shape)],
            x_label=f"direct effect of {ablation} ablation ({unit})",
            y_label=f"total effect ({unit})",
            theme=theme,
        )
        return Drawing(
            figure, "Direct and total effect of every head",
            self.define(f"{ablation}_effect", f"{ablation}_direct", f"{ablation}_self_repair"),
        )  # fmt: skip

    def _chosen(self, ablation: str | None) -> str:
        if ablation is not None and ablation not in self.ablations:
            raise ValueError(f"ablation must be one of {', '.join(self.ablations)}, got {ablation!r}")
        return self.ablations[0] if ablation is None else ablation


def attribution_agreement(
    model: Any,
    prompts: PromptSet,
    *,
    metric: MetricName | None = None,
    ablations: Sequence[Ablation] | None = None,
    reference: PromptSet | Sequences | None = None,
    sources: Tensor | None = None,
    ablate_at: Literal["all", "answer"] = "all",
    mean_by: Literal["position", "all"] = "position",
    verdict_measure: str = "max_weight",
    n_permutations: int = 1000,
    seed: int = 0,
    progress: Progress = silent,
) -> AttributionAgreement:
    """Whether attention says which heads matter (Jain and Wallace 2019; Serrano and Smith 2019), head by head.

    Attention is that of the answer position, the last token of each prompt. It is compared with what ablation of the
    head does to the metric, and so are two measures that take gradients. docs/definitions.md says how agreement and
    verdicts come about.

    Args:
        prompts: 20 or more for intervals and verdicts.
        metric: None takes the logit difference where prompts have foils, else the log-probability.
        ablations: what a head's output becomes: zeros, its mean over other prompts ("mean"), or its value on another
            prompt ("resample"); None takes all three where there are other prompts, else zeros.
        reference: the other prompts; None takes the corrupted ones of ``prompts``.
        sources: bool [prompt, pos], the tokens whose weights ``max_weight`` and ``mean_weight`` look at; None is all
            but the first, which is where attention goes that is not needed. The mean is then left out, as it ranks
            heads like ``off_sink_mass``.
        ablate_at: all positions, or only the answer position, where the attention is that of the same output.
        mean_by: "position" takes the mean at each position, "all" over all positions of the reference.
        verdict_measure: the attention that verdicts are about.
        n_permutations: shuffles for p-values.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that this cannot be asked of, an unknown option, mean or resample ablation without other
            prompts, or a metric that the prompts do not have.
    """
    check_model(model, predicts=True)
    check_prompts(prompts)
    metric = chosen_metric(prompts, metric)
    if ablations is None:
        ablations = ("zero",) if reference is None and prompts.corrupted is None else get_args(Ablation)
    _check_options(prompts, ablations, sources, ablate_at, mean_by, verdict_measure, n_permutations)
    check_seed(seed)
    others = reference.sequences if isinstance(reference, PromptSet) else reference
    chosen = metric_of(prompts, metric)
    replacements = replacement_outputs(model, prompts, ablations, others, mean_by=mean_by, seed=seed)
    observed = observe(model, prompts, metric, sources, lambda done, what: progress(0.1 * done, what))
    effects = ablate(
        model, prompts, chosen, replacements, observed,
        at_answer=ablate_at == "answer", progress=lambda done, what: progress(0.1 + 0.8 * done, what),
    )  # fmt: skip
    chance = 0.0 if metric == "logit_difference" else -float(np.log(model.cfg.d_vocab))
    untested, verdicts = head_verdicts(
        observed.measures[verdict_measure], effects, chance=chance, seed=seed,
        is_share=MEASURES[verdict_measure].unit == "share of 1",
    )  # fmt: skip
    quantities = head_quantities(observed, effects, chosen.unit)
    quantities["verdict"] = Quantity(verdicts, ("layer", "head"), "", verdict_definition(verdict_measure))
    quantities |= agreement_quantities(observed.measures, effects.total, n_permutations, seed)
    progress(1.0, "agreement of the rankings")
    described = "corrupted prompts" if others is None else others.description or f"{len(others)} other prompts"
    return AttributionAgreement(
        quantities=quantities,
        provenance=provenance(model, prompts.sequences),
        settings={
            "task": prompts.name, "metric": metric, "unit": chosen.unit, "chance": chance, "ablate_at": ablate_at,
            "reference": described if set(ablations) - {"zero"} else "", "mean_by": mean_by,
            "sources": "all tokens but the first" if sources is None else "as given",
            "verdict_measure": verdict_measure, "untested": untested, "n_permutations": n_permutations, "seed": seed,
        },
        coordinates={"measure": list(observed.measures), "ablation": list(ablations)},
    )  # fmt: skip


def _check_options(
    prompts: PromptSet, ablations: Sequence[str], sources: Tensor | None, ablate_at: str, mean_by: str,
    verdict_measure: str, n_permutations: int,
) -> None:  # fmt: skip
    check_choice("ablate_at", ablate_at, ("all", "answer"))
    check_choice("mean_by", mean_by, ("position", "all"))
    measures = [name for name in MEASURES if sources is not None or name != "mean_weight"]
    check_choice("verdict_measure", verdict_measure, measures)
    if not ablations or len(set(ablations)) < len(ablations) or set(ablations) - set(get_args(Ablation)):
        raise ValueError(f"ablations must be some of {', '.join(map(repr, get_args(Ablation)))}, got {ablations!r}")
    check_whole(n_permutations=n_permutations)
    if sources is not None:
        if sources.shape != prompts.tokens.shape:
            raise ValueError(f"sources must be bool {list(prompts.tokens.shape)}, got shape {list(sources.shape)}")
        if not bool((sources & prompts.real).any(dim=1).all()):
            raise ValueError("sources must mark a real token of every prompt")
