"""From the numbers of every head and prompt to agreement and verdicts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import scipy.stats

from workbench.analyses.attribution import agreement
from workbench.analyses.attribution.head_evidence import MEASURES, Ablated, Observed
from workbench.analyses.result import Quantity

ATTENDED, UNATTENDED = 0.75, 0.5  # quantiles over heads of the attention measure: at or above, at or below
MOST_UNATTENDED = 0.5  # a weight from here on is attention, whatever other heads do
DECISIVE, INERT = 0.05, 0.02  # shares of the baseline above chance that a head's effect reaches, or stays below
SIGNIFICANT = 0.05
SOLVES = 1e-3  # p of a baseline above chance, without which no head is said to decide anything
VERDICTS = (
    "attended, decisive", "attended, inert", "unattended, decisive", "unattended, inert", "in between",
)  # fmt: skip


def head_verdicts(
    attention: np.ndarray, effects: Ablated, *, is_share: bool, chance: float, seed: int
) -> tuple[str, np.ndarray]:
    """Which heads attend and decide: called so on one half of the prompts, and tested on the other.

    Args:
        attention: [prompt, layer, head].
        is_share: whether it is a share of 1.
        chance: the metric of a model that knows nothing.

    Returns:
        why there are none ("" where there are), and one of VERDICTS for each head, or "untested".
    """
    shape = attention.shape[1:]
    n, untested = len(attention), np.full(shape, "untested")
    gain = effects.baseline - chance
    if n < agreement.MIN_FOR_INTERVAL:
        return f"both halves together need {agreement.MIN_FOR_INTERVAL} prompts, and there are {n}", untested
    error = max(gain.std(ddof=1) / n**0.5, 1e-12)
    if scipy.stats.t.sf(gain.mean() / error, n - 1) >= SOLVES:
        return "the model does not do the task: its metric is not above chance", untested
    first, second = np.array_split(np.random.default_rng(seed).permutation(n), 2)
    means = [attention[half].mean(axis=0) for half in (first, second)]
    attended = np.all([mean >= np.quantile(mean, ATTENDED) for mean in means], axis=0)
    unattended = np.all([mean <= np.quantile(mean, UNATTENDED) for mean in means], axis=0) & ~attended
    if is_share:
        unattended &= np.max(means, axis=0) < MOST_UNATTENDED
    decisive, inert = np.ones(shape, dtype=bool), np.ones(shape, dtype=bool)
    for effect in effects.total.values():
        shares = effect / gain.mean()
        selected, tested = shares[first].mean(axis=0), shares[second].mean(axis=0)
        p = agreement.sign_flip_p(shares[second].reshape(len(second), -1), seed=seed).reshape(shape)
        errors = shares[second].std(axis=0, ddof=1) / len(second) ** 0.5
        same_sign = np.sign(selected) == np.sign(tested)
        decisive &= (np.minimum(np.abs(selected), np.abs(tested)) >= DECISIVE) & same_sign & (p < SIGNIFICANT)
        inert &= (np.abs(selected) < INERT) & (np.abs(tested) + 2 * errors < INERT)
    found = np.full(shape, "in between", dtype="<U20")
    for attends, name in ((attended, "attended"), (unattended, "unattended")):
        for acts, what in ((decisive, "decisive"), (inert, "inert")):
            found[attends & acts] = f"{name}, {what}"
    return "", found


def verdict_definition(measure: str) -> str:
    is_share = MEASURES[measure].unit == "share of 1"
    return (
        f"attended: {measure.replace('_', ' ')} at or above the {ATTENDED:.0%} quantile of all heads, unattended: at "
        f"or below the {UNATTENDED:.0%} quantile{f' and below {MOST_UNATTENDED}' if is_share else ''}; decisive: every "
        f"ablation moves the metric by {DECISIVE:.0%} or more of its distance from chance, inert: none by {INERT:.0%}; "
        "on one half of the prompts and, tested, on the other"
    )


def head_quantities(observed: Observed, effects: Ablated, unit: str) -> dict[str, Quantity]:
    axes, n = ("layer", "head"), len(effects.baseline)
    found = {
        name: Quantity(
            values.mean(axis=0), axes, MEASURES[name].unit, f"{MEASURES[name].definition}, mean over prompts"
        )
        for name, values in observed.measures.items()
    }
    for name, values in effects.total.items():
        mean = values.mean(axis=0)
        found[f"{name}_effect"] = Quantity(
            mean, axes, unit, f"metric under {name} ablation of the head less the metric without, mean over prompts"
        )
        if n > 1:
            error = values.std(axis=0, ddof=1) / n**0.5
            found[f"{name}_effect_sem"] = Quantity(error, axes, unit, f"standard error of {name}_effect over prompts")
        if name in effects.direct:
            direct = effects.direct[name].mean(axis=0)
            found[f"{name}_direct"] = Quantity(
                direct, axes, unit,
                "what of the effect the head's output at the answer position makes by itself, later layers and the "
                "final norm's scale held, mean over prompts",
            )  # fmt: skip
            rest = "the effect less the direct effect: what later layers and other positions make of it"
            found[f"{name}_self_repair"] = Quantity(mean - direct, axes, unit, rest)
    found["baseline"] = Quantity(effects.baseline, ("prompt",), unit, "the metric of the model as it is")
    for axis, of_all, what in (
        ("measure", observed.measures, "every measure of every prompt"),
        ("ablation", effects.total, "every effect of every prompt"),
    ):
        name = "prompt_measure" if axis == "measure" else "prompt_effect"
        found[name] = Quantity(np.stack(list(of_all.values())), (axis, "prompt", *axes), "", what)
    return found


def agreement_quantities(
    measures: Mapping[str, np.ndarray], effects: Mapping[str, np.ndarray], n_permutations: int, seed: int
) -> dict[str, Quantity]:
    """Statistics of every measure with every ablation, over heads [prompt, layer · head]."""
    layers = np.indices(next(iter(effects.values())).shape[1:])[0].reshape(-1)
    x = {name: values.reshape(len(values), -1) for name, values in measures.items()}
    y = {name: np.abs(values).reshape(len(values), -1) for name, values in effects.items()}
    signed = {name: values.reshape(len(values), -1) for name, values in effects.items()}
    averaged = {name: np.abs(values.mean(axis=0)) for name, values in signed.items()}
    shape, k = (len(x), len(y)), max(1, round(0.05 * len(layers)))
    found = {name: np.full(shape, np.nan) for name in _AGREEMENT}
    stacked = np.stack(list(x.values()), axis=1)  # [prompt, measure, item]
    for column, name in enumerate(y):
        found["tau_p"][:, column] = agreement.permutation_p(
            list(stacked), list(y[name]), groups=layers, n_permutations=n_permutations, seed=seed
        )
        for row, of_measure in enumerate(x.values()):
            for statistic, of_prompt in (("tau", agreement.kendall), ("rho", agreement.spearman)):
                values = np.array([of_prompt(*pair) for pair in zip(of_measure, y[name], strict=True)])
                found["n_prompts"][row, column] = np.isfinite(values).sum()
                if np.isfinite(values).any():
                    found[statistic][row, column] = np.nanmean(values)
                low, high = agreement.mean_interval(values, seed=seed)
                found[f"{statistic}_low"][row, column], found[f"{statistic}_high"][row, column] = low, high
            mean = of_measure.mean(axis=0)
            found["tau_of_means"][row, column] = agreement.kendall(mean, averaged[name])
            found["top_overlap"][row, column] = agreement.top_overlap(mean, averaged[name], k)
    found["tau_p_adjusted"] = agreement.adjusted_for_many(found["tau_p"])
    axes = ("measure", "ablation")
    quantities = {
        name: Quantity(found[name], axes, "share of 1" if name == "top_overlap" else "", text.format(k=k))
        for name, text in _AGREEMENT.items()
    }
    for axis, of_all in (("measure", x), ("ablation", signed)):
        values = np.array([agreement.split_half(v, seed=seed) for v in of_all.values()])
        quantities[f"{axis}_reliability"] = Quantity(
            values, (axis,), "", "split-half reliability of the ranking of heads by their mean (Spearman–Brown)"
        )
    return quantities


_AGREEMENT = {
    "tau": "Kendall's τ-b over heads of the measure and the size of the effect in one prompt, mean over prompts",
    "n_prompts": "prompts in which neither the measure nor the size of the effect is the same for all heads",
    "tau_low": "lower end of the 95 % bootstrap interval of tau over prompts",
    "tau_high": "upper end of the 95 % bootstrap interval of tau over prompts",
    "tau_p": "share of shuffles of heads within layers, alike in all prompts, with a tau at least as far from 0",
    "tau_p_adjusted": "p of tau adjusted for all measures and ablations (Benjamini–Hochberg)",
    "rho": "Spearman's ρ over heads of the measure and the size of the effect in one prompt, mean over prompts",
    "rho_low": "lower end of the 95 % bootstrap interval of rho over prompts",
    "rho_high": "upper end of the 95 % bootstrap interval of rho over prompts",
    "tau_of_means": "Kendall's τ-b of the measure's mean over prompts with the size of the mean effect",
    "top_overlap": "share of the top {k} heads by the measure's mean that are in the top {k} by the size of the effect",
}
