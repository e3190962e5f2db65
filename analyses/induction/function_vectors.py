"""Function-vector heads: the rival explanation of in-context learning, beside induction heads on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from workbench.analyses.attention.scores import SCORES, measure_heads, reaches
from workbench.analyses.attribution import agreement
from workbench.analyses.induction.ablation import highest
from workbench.analyses.interventions.edits import mean_outputs, replace_head, together
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Head, Intervention, measure
from workbench.analyses.labels import number_or_dash
from workbench.analyses.options import check_seed, check_share, check_whole, is_whole
from workbench.analyses.prompts import repeated_random_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, cached, provenance, silent
from workbench.analyses.support import check_model
from workbench.analyses.tasks import PromptSet
from workbench.analyses.tasks.prompt_set import check_prompts

LEAST_EFFECT = 0.01  # of the answer's probability; a smaller effect is none
ROUNDING = 1e-5  # nats; a smaller gain is none
SIGNIFICANT, ABLE = 0.05, 0.001  # p of a head's effect, and of the model's doing the task
CONDITIONS = ("examples", "shuffled answers")
SETS = ("none", "largest effects", "highest prefix matching", "random heads")


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class FunctionVectorHeads(Result):
    """By head: ``indirect_effect`` (AIE), its standard error and interval, ``prefix_matching`` and ``verdict``; by
    condition and prompt ``answer_log_probability`` and ``is_correct``; by set of ablated heads ``set_accuracy`` and
    ``set_loss``; and ``tau``, the agreement of effect and prefix matching over heads.

    - *function vector*: putting the head's mean output into prompts with shuffled answers raises the answer's
      probability, by 0.01 or more and beyond chance (sign flips of prompts, max-T over all heads, p < 0.05).
    - *induction pattern*: prefix matching on random tokens reaches ``settings["pattern_threshold"]``. *Both*: both.
    - *neither*.
    - *untested*: ``settings["untested"]`` says why; nothing is claimed.
    """

    kind: ClassVar[str] = "function_vector_heads"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "scatter", "ablation")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"conditions": ("condition",), "sets": ("set",)}

    def top(self, n: int = 5) -> list[Head]:
        """(layer, head) of the ``n`` heads with the largest indirect effect, in order."""
        return highest(self["indirect_effect"], n)

    def heads(self, verdict: str) -> list[Head]:
        """(layer, head) of the heads with a verdict, in order of their indirect effect."""
        n = self["verdict"].size
        return [head for head in highest(self["indirect_effect"], n) if self["verdict"][head] == verdict]

    def summary(self) -> str:
        accuracy, untested = self["accuracy"], self.settings["untested"]
        log_p = self["answer_log_probability"].mean(axis=1)
        lines = [
            self.provenance.sentence(),
            f"{self.settings['task']}: accuracy {accuracy[0]:.2f} after {CONDITIONS[0]}, {accuracy[1]:.2f} after "
            f"{CONDITIONS[1]}; log-probability of the answer {log_p[0]:.2f} and {log_p[1]:.2f} nats; "
            f"n = {self['is_correct'].shape[1]}.",
        ]
        if untested:
            lines.append(f"No head is called anything: {untested}.")
        top = ", ".join(self._in_words(head) for head in self.top())
        lines.append(
            f"Largest mean effects on the answer's probability of a head's mean output put into prompts with shuffled "
            f"answers (n = {self.settings['n_tested']}): {top}."
        )
        if not untested:
            found = self.heads("both") + self.heads("function vector")
            named = ", ".join(f"L{layer}H{head}" for layer, head in found)
            lines.append(f"Function-vector heads: {named or 'none'}.")
        lines.append(
            f"Agreement with prefix matching over heads: τ {number_or_dash(self['tau'], '+.2f')} "
            f"(p {number_or_dash(self['tau_p'])}); "
            f"{float(self['top_overlap']):.0%} of the top {self.settings['n_ablated']} are the same."
        )
        for place, name in enumerate(self.coordinates["set"]):
            which = self.settings["sets"].get(name, "")
            lines.append(
                f"Ablated: {name}{f' ({which})' if which else ''}: accuracy {self['set_accuracy'][place]:.2f}, "
                f"loss {self['set_loss'][place]:.2f} ± {self['set_loss_sem'][place]:.2f} nats."
            )
        return "\n".join(lines)

    def _in_words(self, head: Head) -> str:
        low, high = self["indirect_effect_low"][head], self["indirect_effect_high"][head]
        interval = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ""
        return f"L{head[0]}H{head[1]} {self['indirect_effect'][head]:+.3f}{interval}"

    def _draw_map(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        marked = self.heads("both") + self.heads("function vector")
        figure = figures.head_map(
            self["indirect_effect"], label="indirect effect (probability)", signed=True, marked=marked, theme=theme
        )
        note = self.define("indirect_effect") + (" Framed: function-vector heads." if marked else self._no_claim())
        return Drawing(figure, f"Which heads carry the task: {self.settings['task']}", note)

    def _draw_scatter(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_scatter(
            self["prefix_matching"], self["indirect_effect"], x_label="prefix matching (share of 1)",
            y_label="indirect effect (probability)", theme=theme,
        )  # fmt: skip
        tau = number_or_dash(self["tau"], "+.2f")
        note = f"{self.define('indirect_effect', 'prefix_matching', 'tau')} Here τ = {tau}."
        return Drawing(figure, "Function vectors against induction, every head", note + self._no_claim())

    def _draw_ablation(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        names = [
            f"{name}: accuracy {accuracy:.2f}"
            for name, accuracy in zip(self.coordinates["set"], self["set_accuracy"], strict=True)
        ]
        figure = figures.effects(
            names, {"mean ablation": (self["set_loss"], self["set_loss_sem"])}, control=float("nan"),
            x_label="loss of the answer (nats)", y_label="ablated heads", theme=theme,
        )  # fmt: skip
        note = f"{self.define('set_loss')} Bars: ± 1 standard error over prompts."
        k = self.settings["n_ablated"]
        title = f"Loss of the answer without {k} head{'s' * (k > 1)} of each kind"
        return Drawing(figure, title, note + self._no_claim())

    def _no_claim(self) -> str:
        return f" No head is called anything: {self.settings['untested']}." if self.settings["untested"] else ""


def function_vector_heads(
    model: Any,
    prompts: PromptSet,
    *,
    n_ablated: int | None = None,
    n_random: int = 5,
    length: int = 64,
    pattern_threshold: float = 0.3,
    n_permutations: int = 1000,
    seed: int = 0,
    progress: Progress = silent,
) -> FunctionVectorHeads:
    """Which heads carry a task that the prompt's examples show (Todd et al. 2024), and are they induction heads?

    A head's mean output at the last position of one half of the prompts is put into each prompt of the other half with
    its answers shuffled, at the last position: its mean effect on the probability of the right answer is the average
    indirect effect (AIE; Todd et al., section 2.3). Then the heads with the largest effects, those with the highest
    prefix matching and random ones are ablated in the first half as it is (Yin and Steinhardt 2025).

    Args:
        prompts: with corrupted versions that do not show the task, as few_shot_prompts makes them; 40 or more for
            verdicts, as one half is tested.
        n_ablated: heads in each ablated set; None is 5 % of all heads, at least 2 where there are 6.
        n_random: random sets, drawn from the heads that are in neither of the others.
        length: of the repeated random tokens on which prefix matching is measured.
        n_permutations: shuffles for the p-value of τ.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that this cannot be asked of, prompts without corrupted versions, fewer than 4 prompts, an
            option out of its range, or what repeated_random_tokens refuses.
    """
    check_model(model, predicts=True)
    check_prompts(prompts)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    usual = min(max(2, round(0.05 * n_layers * n_heads)), n_layers * n_heads // 3)
    k = usual if n_ablated is None else n_ablated
    _check(prompts, k, n_layers * n_heads, n_random, n_permutations, pattern_threshold)
    check_seed(seed)
    repeated = Sequences.read(model, repeated_random_tokens(model, length=length, seed=seed))
    prefix = measure_heads(model, repeated, 1, lambda done, what: progress(0.1 * done, what)).scores["prefix_matching"]
    examples = _answers(model, prompts, prompts.tokens, [Intervention()])[0]  # [prompt, 2]
    shuffled = _answers(model, prompts, _corrupted(prompts), [Intervention()])[0]
    source, tested = prompts.halves(seed)
    effects = _indirect_effects(model, source, tested, lambda done, what: progress(0.2 + 0.5 * done, what))
    mean = effects.mean(axis=0)
    untested = _untested(prompts, examples, shuffled, len(tested))
    sets = _head_sets(mean, prefix.mean, k, n_random, seed)
    ablated = _ablated(model, tested, source, sets, lambda done, what: progress(0.7 + 0.3 * done, what))
    verdicts = _verdicts(effects, prefix.mean, pattern_threshold, untested, seed)
    quantities = _head_quantities(effects, prefix.mean, verdicts, seed)
    quantities |= _agreement(mean, prefix.mean, k, n_permutations, seed)
    quantities |= _prompt_quantities(np.stack([examples, shuffled])) | _set_quantities(ablated)
    return FunctionVectorHeads(
        quantities=quantities,
        provenance=provenance(model, prompts.sequences),
        settings={
            "task": prompts.name, "untested": untested, "n_tested": len(tested), "n_ablated": k, "n_random": n_random,
            "length": length, "pattern_threshold": pattern_threshold, "n_permutations": n_permutations, "seed": seed,
            "sets": {name: _named(sets[name][0]) for name in SETS[1:3]},
        },
        coverage={"prefix_matching": prefix.coverage},
        coordinates={"condition": list(CONDITIONS), "set": list(SETS)},
    )  # fmt: skip


def _check(
    prompts: PromptSet, k: int, n_heads: int, n_random: int, n_permutations: int, pattern_threshold: float
) -> None:
    if prompts.corrupted is None:
        raise ValueError(
            f"{prompts.name} has no corrupted prompts to put outputs into; few_shot_prompts makes prompts that have"
        )
    if len(prompts) < 4:
        raise ValueError(f"{len(prompts)} prompts have no two halves with a mean and an error each; take 4 or more")
    if n_heads < 3:
        raise ValueError(
            f"the model has {n_heads} heads, too few to ablate one function-vector head, one induction head and one "
            "random one beside each other; take a model of 3 heads or more"
        )
    if not is_whole(k) or not 1 <= k <= n_heads // 3:
        raise ValueError(
            f"n_ablated must be between 1 and {n_heads // 3}, so that of the model's {n_heads} heads as many random "
            f"ones are left; got {k}"
        )
    check_whole(n_random=n_random, n_permutations=n_permutations)
    check_share(pattern_threshold=pattern_threshold, with_one=True)


def _corrupted(prompts: PromptSet) -> Tensor:
    assert prompts.corrupted is not None  # _check refuses others
    return prompts.corrupted


def _answers(
    model: Any,
    prompts: PromptSet,
    tokens: Tensor,
    interventions: Sequence[Intervention],
    progress: Progress = silent,
) -> np.ndarray:
    """Log-probability of each prompt's target, and whether it comes first, [intervention, prompt, 2]."""

    def score(logits: Tensor) -> Tensor:  # [prompt, 2, d_vocab], twice the same
        target = prompts.target.to(logits.device)
        log_p = logits[:, 0].double().log_softmax(dim=-1)
        of_target = log_p.gather(1, target[:, None])[:, 0]
        return torch.stack([of_target, (log_p.argmax(dim=-1) == target).double()], dim=1)

    both = Metric("log-probability and accuracy", "", prompts.rows.expand(-1, 2), score, per_row=True)
    return measure(model, Sequences(tokens, prompts.real), interventions, both, progress=progress).numpy()


def _indirect_effects(model: Any, source: PromptSet, tested: PromptSet, progress: Progress) -> np.ndarray:
    """p(target | mean output put in) − p(target) in prompts with shuffled answers, [prompt, layer, head]."""
    layers, heads = range(model.cfg.n_layers), range(model.cfg.n_heads)
    names = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    values = cached(model, source.sequences.to(model.cfg.device), names)
    at, rows = torch.arange(len(source)), source.rows[:, 0]
    means = [values[name][at, rows].double().mean(dim=0).to(values[name].dtype) for name in names]  # [head, d_head]
    last = torch.arange(tested.tokens.shape[1]) == tested.rows  # [prompt, pos]
    patches = [replace_head(layer, head, means[layer][head], last) for layer in layers for head in heads]
    found = np.exp(_answers(model, tested, _corrupted(tested), [Intervention(), *patches], progress)[..., 0])
    return (found[1:] - found[0]).T.reshape(len(tested), len(layers), len(heads))


def _untested(prompts: PromptSet, examples: np.ndarray, shuffled: np.ndarray, n_tested: int) -> str:
    """Why no head is called anything; empty where the model does the task and there are enough prompts."""
    chance = float(prompts.target.bincount().max()) / len(prompts)
    n_correct = int(examples[:, 1].sum())
    if scipy.stats.binomtest(n_correct, len(prompts), chance, alternative="greater").pvalue >= ABLE:
        return (
            f"it is not sure that the model does the task, with {n_correct} of {len(prompts)} answers right (the same "
            f"answer always would be right in {chance:.0%})"
        )
    gain = examples[:, 0] - shuffled[:, 0]
    if gain.mean() < ROUNDING or scipy.stats.wilcoxon(gain, alternative="greater").pvalue >= ABLE:
        return "shuffled answers do no harm, so the model does not take the task from the examples"
    if n_tested < agreement.MIN_FOR_INTERVAL:
        return f"{n_tested} prompts are tested, and verdicts take {agreement.MIN_FOR_INTERVAL} or more"
    return ""


def _head_sets(
    effects: np.ndarray, prefix: np.ndarray, k: int, n_random: int, seed: int
) -> dict[str, list[list[Head]]]:
    """Name → sets of ``k`` heads each: one, or the random ones."""
    by_effect, by_prefix = highest(effects, k), highest(prefix, k)
    free = [head for head in highest(effects, effects.size) if head not in by_effect and head not in by_prefix]
    rng = np.random.default_rng(seed)
    drawn = [[free[place] for place in sorted(rng.choice(len(free), k, replace=False))] for _ in range(n_random)]
    return dict(zip(SETS, ([[]], [by_effect], [by_prefix], drawn), strict=True))


def _named(heads: Sequence[Head]) -> str:
    return ", ".join(f"L{layer}H{head}" for layer, head in heads)


def _ablated(
    model: Any, others: PromptSet, prompts: PromptSet, sets: Mapping[str, list[list[Head]]], progress: Progress
) -> np.ndarray:
    """Log-probability and accuracy without each set, means over the random ones, [set, prompt, 2]."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    means = mean_outputs(model, others.sequences, names)  # [1, head, d_head] each
    interventions = [
        together([replace_head(layer, head, means[names[layer]][0, head]) for layer, head in heads], _named(heads))
        for of_kind in sets.values()
        for heads in of_kind
    ]
    found = _answers(model, prompts, prompts.tokens, interventions, progress)
    ends = np.cumsum([len(of_kind) for of_kind in sets.values()])
    return np.stack([part.mean(axis=0) for part in np.split(found, ends[:-1])])


def _verdicts(effects: np.ndarray, prefix: np.ndarray, threshold: float, untested: str, seed: int) -> np.ndarray:
    """FunctionVectorHeads says what each one means; effects [prompt, layer, head]."""
    if untested:
        return np.full(prefix.shape, "untested", dtype="<U20")
    p = agreement.sign_flip_p(effects.reshape(len(effects), -1), seed=seed).reshape(prefix.shape)
    carries, matches = (effects.mean(axis=0) >= LEAST_EFFECT) & (p < SIGNIFICANT), reaches(prefix, threshold)
    found = np.full(prefix.shape, "neither", dtype="<U20")
    found[carries], found[matches], found[carries & matches] = "function vector", "induction pattern", "both"
    return found


def _head_quantities(effects: np.ndarray, prefix: np.ndarray, verdicts: np.ndarray, seed: int) -> dict[str, Quantity]:
    axes, n = ("layer", "head"), len(effects)
    flat = effects.reshape(n, -1).T
    ends = np.array([agreement.mean_interval(of_head, seed=seed) for of_head in flat]).T.reshape(2, *prefix.shape)
    found = {
        "indirect_effect": Quantity(
            effects.mean(axis=0), axes, "probability",
            "change of the right answer's probability when the head's mean output at the last position of prompts with "
            "examples is put there into prompts whose examples have shuffled answers, mean over prompts",
        ),
        "indirect_effect_sem": Quantity(
            effects.std(axis=0, ddof=1) / n**0.5, axes, "probability", "standard error of indirect_effect over prompts"
        ),
    }  # fmt: skip
    for side, values in zip(("low", "high"), ends, strict=True):
        found[f"indirect_effect_{side}"] = Quantity(
            values, axes, "probability", f"{side} end of the 95 % bootstrap interval of indirect_effect over prompts"
        )
    about = SCORES["prefix_matching"]
    found["prefix_matching"] = Quantity(prefix, axes, about.unit, f"{about.definition}; on repeated random tokens")
    return found | {"verdict": Quantity(verdicts, axes, "", "see FunctionVectorHeads")}


def _agreement(
    effects: np.ndarray, prefix: np.ndarray, k: int, n_permutations: int, seed: int
) -> dict[str, Quantity]:  # fmt: skip
    layers = np.indices(effects.shape)[0].reshape(-1)
    x, y = prefix.reshape(-1), effects.reshape(-1)
    p = agreement.permutation_p([x[None]], [y], groups=layers, n_permutations=n_permutations, seed=seed)[0]
    return {
        "tau": Quantity(
            np.array(agreement.kendall(x, y)), (), "", "Kendall's τ-b over heads of indirect effect and prefix matching"
        ),
        "tau_p": Quantity(
            np.array(p), (), "",
            "(1 + shuffles of heads within layers with a tau at least as far from 0) / (1 + all shuffles)",
        ),
        "top_overlap": Quantity(
            np.array(agreement.top_overlap(x, y, k)), (), "share of 1",
            f"share of the {k} heads with the highest prefix matching that are among the {k} with the largest effect",
        ),
    }  # fmt: skip


def _prompt_quantities(answers: np.ndarray) -> dict[str, Quantity]:
    """answers [condition, prompt, 2]."""
    axes = ("condition", "prompt")
    return {
        "answer_log_probability": Quantity(answers[..., 0], axes, "nats", "log-probability of the right answer"),
        "is_correct": Quantity(answers[..., 1] > 0, axes, "", "whether the right answer is the likeliest token"),
        "accuracy": Quantity(answers[..., 1].mean(axis=1), axes[:1], "share of 1", "mean of is_correct over prompts"),
    }


def _set_quantities(answers: np.ndarray) -> dict[str, Quantity]:
    """answers [set, prompt, 2]."""
    losses, n = -answers[..., 0], answers.shape[1]
    return {
        "set_accuracy": Quantity(
            answers[..., 1].mean(axis=1), ("set",), "share of 1",
            "share of prompts with examples whose right answer is the likeliest token without these heads",
        ),
        "set_loss": Quantity(
            losses.mean(axis=1), ("set",), "nats",
            "loss of the right answer when these heads' outputs are everywhere their mean over other prompts of the "
            "task; of random heads, the mean over several sets",
        ),
        "set_loss_sem": Quantity(
            losses.std(axis=1, ddof=1) / n**0.5, ("set",), "nats", "standard error of set_loss over prompts"
        ),
    }  # fmt: skip
