"""Ablation versus attention, token by token: do the tokens that are attended decide the answer?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attribution import agreement
from workbench.analyses.attribution.deletion import SHARES, deletion_curves
from workbench.analyses.attribution.head_evidence import MetricName, chosen_metric, metric_of
from workbench.analyses.attribution.source_evidence import (
    EFFECTS,
    MAX_TOKENS,
    SOURCE_MEASURES,
    cut_sources,
    flow_is_left_out,
    observe_sources,
)
from workbench.analyses.options import check_seed, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, provenance, silent
from workbench.analyses.support import check_model
from workbench.analyses.tasks import PromptSet
from workbench.analyses.tasks.prompt_set import check_prompts
from workbench.analyses.token_texts import token_texts

MIN_SOURCES = 3


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SourceAttribution(Result):
    """Attention measures, a gradient and knock-outs of every source token, and how far their rankings agree.

    Per token, [prompt, pos] with NaN for what is no source: every measure, ``signed_effect`` and the causal sizes
    ``effect``, ``total_variation`` and ``jensen_shannon``. By measure and causal size: ``tau``, its interval, p and
    ``partial_tau`` given the position. By ranking: ``comprehensiveness`` and ``sufficiency`` and their means, the AOPC.
    """

    kind: ClassVar[str] = "source_attribution"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("agreement", "deletion", "prompt")
    frame_axes: ClassVar[tuple[str, ...]] = ("measure", "causal")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "tokens": ("prompt", "pos"), "rankings": ("ranking",), "deletion": ("ranking", "share"), "prompts": ("prompt",),
    }  # fmt: skip

    @property
    def measures(self) -> Sequence[str]:
        return [str(name) for name in self.coordinates["measure"]]

    def summary(self) -> str:
        n = len(self["baseline"])
        lines = [
            self.provenance.sentence(),
            f"{int(np.isfinite(self['effect']).sum())} source tokens: all but the first token and the last, whose "
            "prediction is read.",
        ]
        for row, name in enumerate(self.measures):
            low, high = self["tau_low"][row, 0], self["tau_high"][row, 0]
            interval = f" [{low:+.2f}, {high:+.2f}]" if np.isfinite(low) else ""
            partial = self["partial_tau"][row, 0]
            given = f"; given position {partial:+.2f}" if np.isfinite(partial) else ""
            what = f"τ of {name.replace('_', ' ')} with the size of the knock-out's effect"
            if not np.isfinite(self["tau"][row, 0]):
                lines.append(f"{what}: none, as it ranks no source of these prompts.")
                continue
            p = self["tau_p_adjusted"][row, 0]
            lines.append(f"{what}: {self['tau'][row, 0]:+.2f}{interval}{given} (p {p:.3f}, n = {n}).")
        if self.settings["flow_left_out"]:
            lines.append(f"Attention flow is left out: {self.settings['flow_left_out']}.")
        rankings = zip(
            self.coordinates["ranking"], self["comprehensiveness_aopc"], self["sufficiency_aopc"], strict=True
        )
        lines.append(
            "Probability of the target lost without a ranking's first tokens / with only these (AOPC): "
            + "; ".join(f"{str(name).replace('_', ' ')} {c:.3f} / {s:.3f}" for name, c, s in rankings)
            + "."
        )
        return "\n".join(lines)

    def _draw_agreement(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        significant = self["tau_p_adjusted"] < 0.05
        columns = (
            ("with the effect", "tau", 0),
            ("given position", "partial_tau", 0),
            ("with the change (JS)", "tau", 2),
        )
        series = {
            name: (self[what][:, column], self[f"{what}_low"][:, column], self[f"{what}_high"][:, column])
            for name, what, column in columns
        }
        figure = figures.agreement_dots(
            [SOURCE_MEASURES[name].label for name in self.measures],
            series,
            filled=[significant[:, 0], np.ones(len(self.measures), dtype=bool), significant[:, 2]],
            x_label="Kendall τ-b with knock-out, mean over prompts",
            theme=theme,
        )
        return Drawing(
            figure,
            "How far measures of source tokens agree with knocking them out",
            f"{self.define('tau', 'partial_tau')} Hollow: adjusted p of τ ≥ 0.05.",
        )

    def _draw_deletion(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        labels = [self._label(str(name)) for name in self.coordinates["ranking"]]
        figure = figures.deletion(
            labels,
            np.array(SHARES),
            {
                "without the first": self["comprehensiveness"],
                "with only the first": self["sufficiency"],
            },
            y_label="probability of the target lost",
            theme=theme,
        )
        return Drawing(
            figure, "The answer without the first tokens of a ranking, and with only them",
            self.define("comprehensiveness", "sufficiency"),
        )  # fmt: skip

    def _draw_prompt(self, *, prompt: int = 0, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        if not 0 <= prompt < len(self["baseline"]):
            raise ValueError(f"prompt must be one of 0 to {len(self['baseline']) - 1}, got {prompt}")
        names = [name for name in self.measures if name != "recency"]
        values = np.stack([self[name][prompt] for name in [*names, "effect"]])
        known = np.isfinite(values[-1])
        labels = figures.token_labels(self.settings["tokens"][prompt])
        figure = figures.source_map(
            values[:, known],
            names=[*(SOURCE_MEASURES[name].label for name in names), "|effect| of the knock-out"],
            tokens=[label for label, is_source in zip(labels, known, strict=False) if is_source],
            theme=theme,
        )
        return Drawing(figure, f"Source tokens of prompt {prompt}, each row over its largest", self.define("effect"))

    def _label(self, ranking: str) -> str:
        return SOURCE_MEASURES[ranking].label if ranking in SOURCE_MEASURES else ranking.replace("_", " ")


def source_attribution(
    model: Any,
    prompts: PromptSet,
    *,
    metric: MetricName | None = None,
    n_permutations: int = 1000,
    seed: int = 0,
    progress: Progress = silent,
) -> SourceAttribution:
    """Whether attention to source tokens, at the last token of each prompt, says which of them the answer hangs on.

    Each source is knocked out alone: no query reads it in any layer or head, and the other keys share its weight. The
    first token is no source, as attention goes there that is not needed (a sink) and cutting it breaks the model.

    Args:
        metric: None takes the logit difference where prompts have foils, else the log-probability.
        n_permutations: shuffles for p-values.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that this cannot be asked of, prompts of more than 512 tokens or of fewer than 5, an unknown
            metric, or one that the prompts do not have.
    """
    check_model(model, predicts=True)
    check_prompts(prompts)
    metric = chosen_metric(prompts, metric)
    check_whole(n_permutations=n_permutations)
    check_seed(seed)
    if prompts.tokens.shape[1] > MAX_TOKENS:
        raise ValueError(
            f"a prompt has {prompts.tokens.shape[1]} tokens; rollout multiplies whole patterns, of {MAX_TOKENS} at most"
        )
    sources = _sources(prompts)
    measures, next_token = observe_sources(model, prompts, metric, lambda done, what: progress(0.1 * done, what))
    measures = {name: np.where(sources.numpy(), values, np.nan) for name, values in measures.items()}
    baseline, effects = cut_sources(
        model, prompts, metric_of(prompts, metric), next_token, sources,
        lambda done, what: progress(0.1 + 0.5 * done, what),
    )  # fmt: skip
    at_random = np.random.default_rng(seed).random(sources.shape)
    rankings = measures | {"knock_out": effects["effect"], "random": at_random}
    curves = deletion_curves(model, prompts, rankings, sources, lambda done, what: progress(0.6 + 0.4 * done, what))
    quantities = _by_token(measures, effects, metric_of(prompts, metric).unit)
    quantities |= _agreement(measures, effects, sources.numpy(), n_permutations, seed)
    quantities |= _curves(*curves)
    quantities["baseline"] = Quantity(baseline, ("prompt",), metric_of(prompts, metric).unit, "the metric as it is")
    tokenizer = getattr(model, "tokenizer", None)
    rows = [row[mask].tolist() for row, mask in zip(prompts.tokens, prompts.real, strict=True)]
    return SourceAttribution(
        quantities=quantities,
        provenance=provenance(model, prompts.sequences),
        settings={
            "task": prompts.name, "metric": metric, "n_permutations": n_permutations, "seed": seed,
            "flow_left_out": flow_is_left_out(model, prompts),
            "tokens": [token_texts(tokenizer, row) for row in rows],
        },
        coordinates={
            "measure": list(measures), "causal": list(EFFECTS), "ranking": list(rankings),
            "share": [f"{share:.0%}" for share in SHARES],
        },
    )  # fmt: skip


def _sources(prompts: PromptSet) -> Tensor:
    """bool [prompt, pos]: every token but the first and the one whose prediction is read."""
    positions = torch.arange(prompts.tokens.shape[1])
    sources = (positions > 0) & (positions < prompts.rows)
    fewest, place = sources.sum(dim=1).min(dim=0)
    if fewest < MIN_SOURCES:
        raise ValueError(
            f"prompt {int(place)} has {int(fewest)} tokens between its first and its last, and a ranking needs "
            f"{MIN_SOURCES}; leave it out or use longer prompts"
        )
    return sources


def _by_token(measures: Mapping[str, np.ndarray], effects: Mapping[str, np.ndarray], unit: str) -> dict[str, Quantity]:
    axes = ("prompt", "pos")
    found = {
        name: Quantity(values, axes, SOURCE_MEASURES[name].unit, SOURCE_MEASURES[name].definition)
        for name, values in measures.items()
    }
    found["signed_effect"] = Quantity(effects["signed"], axes, unit, "metric without the token less metric with it")
    units = {"effect": unit, "total_variation": "share of 1", "jensen_shannon": "nats"}
    return found | {name: Quantity(effects[name], axes, units[name], text) for name, text in EFFECTS.items()}


def _agreement(
    measures: Mapping[str, np.ndarray], effects: Mapping[str, np.ndarray], sources: np.ndarray, n_permutations: int,
    seed: int,
) -> dict[str, Quantity]:  # fmt: skip
    """Statistics of every measure with every causal size, over the source tokens of each prompt."""
    shape = (len(measures), len(EFFECTS))
    found = {name: np.full(shape, np.nan) for name in _AGREEMENT}
    x = [np.stack([values[row, mask] for values in measures.values()]) for row, mask in enumerate(sources)]
    position = list(measures).index("recency")
    for column, name in enumerate(EFFECTS):
        y = [effects[name][row, mask] for row, mask in enumerate(sources)]
        found["tau_p"][:, column] = agreement.permutation_p(x, y, n_permutations=n_permutations, seed=seed)
        for row in range(len(measures)):
            pairs = [(of_prompt[row], of_y, of_prompt[position]) for of_prompt, of_y in zip(x, y, strict=True)]
            values = {
                "tau": np.array([agreement.kendall(a, b) for a, b, _ in pairs]),
                "rho": np.array([agreement.spearman(a, b) for a, b, _ in pairs]),
                "partial_tau": np.array([agreement.partial_kendall(*of_pair) for of_pair in pairs]),
            }
            for statistic, of_prompts in values.items():
                if np.isfinite(of_prompts).any():
                    found[statistic][row, column] = np.nanmean(of_prompts)
                low, high = agreement.mean_interval(of_prompts, seed=seed)
                found[f"{statistic}_low"][row, column], found[f"{statistic}_high"][row, column] = low, high
    found["tau_p_adjusted"] = agreement.adjusted_for_many(found["tau_p"])
    return {name: Quantity(found[name], ("measure", "causal"), "", text) for name, text in _AGREEMENT.items()}


_STATISTICS = {
    "tau": "Kendall's τ-b over a prompt's source tokens of the measure and the causal size, mean over prompts",
    "rho": "Spearman's ρ of the same, mean over prompts",
    "partial_tau": "tau with what the tokens' position explains taken out, mean over prompts",
}
_AGREEMENT = {
    f"{name}{end}": text if not end else f"{what} end of the 95 % bootstrap interval of {name} over prompts"
    for name, text in _STATISTICS.items()
    for end, what in (("", ""), ("_low", "lower"), ("_high", "upper"))
} | {
    "tau_p": "share of shuffles of each prompt's source tokens with a tau at least as far from 0",
    "tau_p_adjusted": "p of tau adjusted for all measures and causal sizes (Benjamini–Hochberg)",
}


def _curves(comprehensiveness: np.ndarray, sufficiency: np.ndarray) -> dict[str, Quantity]:
    """Of losses [ranking, share, prompt]."""
    found = {}
    for name, values, what in (
        ("comprehensiveness", comprehensiveness, "without the share of the sources that a ranking puts first"),
        ("sufficiency", sufficiency, "with only the share of the sources that a ranking puts first"),
    ):
        text = f"probability of the target less that {what}, mean over prompts"
        found[name] = Quantity(values.mean(axis=2), ("ranking", "share"), "share of 1", text)
        area = values.mean(axis=1)  # [ranking, prompt]
        found[f"{name}_aopc"] = Quantity(area.mean(axis=1), ("ranking",), "share of 1", f"mean of {name} over shares")
        ends = np.array([agreement.mean_interval(of_ranking) for of_ranking in area])
        for end, values_of_end in zip(("low", "high"), ends.T, strict=True):
            found[f"{name}_aopc_{end}"] = Quantity(
                values_of_end, ("ranking",), "share of 1", f"95 % bootstrap interval of {name}_aopc, {end}"
            )
    return found
