"""The test of induction heads: what the loss of repeated tokens does without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import reaches
from workbench.analyses.interventions.edits import mean_outputs, replace_head, together
from workbench.analyses.interventions.metrics import losses_of
from workbench.analyses.interventions.paths import CleanRun, has_paths
from workbench.analyses.interventions.sweeps import Head, Intervention, measure
from workbench.analyses.prompts import RepeatedTokens
from workbench.analyses.result import Quantity
from workbench.analyses.running import Progress, Sequences

LEAST_EFFECT = 0.01  # nats per token; a smaller change of the loss is none, whatever the controls do


@dataclass(frozen=True, eq=False)
class Repetition:
    """What the ablations are run on.

    Args:
        others: sequences of the same kind, whose mean outputs replace those of ablated heads.
    """

    prompts: RepeatedTokens
    others: RepeatedTokens


def ablation_check(
    model: Any,
    repetition: Repetition,
    scores: np.ndarray,
    *,
    n_candidates: int,
    threshold: float,
    seed: int,
    progress: Progress,
) -> tuple[list[str], dict[str, Quantity]]:
    """Ablates the ``n_candidates`` heads with the largest ``scores`` [layer, head], and controls.

    The peers of a head with the pattern are all others with it, whether or not they are ablated alone as well.

    Returns:
        The names of the ablated heads, and the quantities along the axis "ablated".
    """
    has_pattern = reaches(scores, threshold)
    candidates = highest(scores, n_candidates)
    group = highest(scores, int(has_pattern.sum()))
    tested = [head for head in candidates if head in group]
    allowed = ~has_pattern
    allowed[tuple(np.array(candidates).T)] = False
    ablated = candidates + control_heads(tested, allowed, seed)
    is_control = np.arange(len(ablated)) >= len(candidates)
    without = [[peer for peer in group if peer != head] for head in tested]
    means = mean_z(model, repetition.others, sorted({layer for layer, _ in ablated + group}))
    found = _measured(model, repetition.prompts, _plans(model, repetition, means, ablated, group, without), progress)
    effects = {kind: np.stack(mean_and_error(found[kind].T)) for kind in found if kind != "peers"}  # [2, ablated]
    of_group, *of_others = found["peers"]
    effects["peer"] = np.full((2, len(ablated)), np.nan)
    for head, of_other in zip(tested, of_others, strict=True):
        effects["peer"][:, candidates.index(head)] = mean_and_error(of_group - of_other)
    mean, peer = np.transpose(effects["mean"]).tolist(), np.transpose(effects["peer"]).tolist()  # effect, error
    control = control_effect(effects["mean"][0][is_control])
    verdicts = ["control"] * len(ablated)
    for place, head in enumerate(candidates):
        verdicts[place] = verdict(has_pattern[head], mean[place], peer[place], control)
    names = [
        f"L{layer}H{head}{' (control)' if c else ''}" for (layer, head), c in zip(ablated, is_control, strict=True)
    ]
    return names, {
        "ablated_head": Quantity(np.array(ablated), ("ablated", "layer and head"), "", "layer and head"),
        "is_control": Quantity(is_control, ("ablated",), "", "whether it is a random head beside one with the pattern"),
        "verdict": Quantity(np.array(verdicts), ("ablated",), "", "see InductionHeads"),
        **_effect_quantities(effects),
        "group_effect": Quantity(of_group.mean(), (), _UNIT, "mean_effect of all heads with the pattern together"),
    }


_UNIT = "nats per token"
_REPLACED = "change of the repeated tokens' loss when the head's output is replaced by"
_DEFINITIONS = {
    "mean": f"{_REPLACED} its mean per position on other sequences",
    "zero": f"{_REPLACED} zeros",
    "direct": "what of mean_effect the head does without any later head or MLP: these write what they wrote, and the "
    "final norm is computed anew",
    "patterns_kept": "what is left of mean_effect when every attention pattern stays as it is",
    "peer": f"further {_REPLACED} its mean, after those of all its peers",
}


def _plans(
    model: Any,
    repetition: Repetition,
    means: Mapping[int, Tensor],
    ablated: Sequence[Head],
    group: Sequence[Head],
    without: Sequence[Sequence[Head]],
) -> dict[str, list[Intervention]]:
    """Kind of ablation → interventions: one for each ablated head, and for the peers those of groups."""
    run = CleanRun.of(model, Sequences.read(model, repetition.prompts))
    values = [(layer, head, means[layer][:, head]) for layer, head in ablated]
    plans = {
        "mean": [replace_head(*head) for head in values],
        "zero": [replace_head(*head) for head in ablated],
        "patterns_kept": [run.keeping_patterns(*head) for head in values],
        "peers": [without_heads(heads, means) for heads in (group, *without)],
    }
    if has_paths(model):
        plans["direct"] = [run.along_path((layer, head), value, "logits") for layer, head, value in values]
    return plans


def _measured(
    model: Any, prompts: RepeatedTokens, plans: Mapping[str, Sequence[Intervention]], progress: Progress
) -> dict[str, np.ndarray]:
    """Effects on the loss under each plan, [intervention, sequence], of one sweep."""
    effects = loss_effects(model, prompts, [one for plan in plans.values() for one in plan], progress)
    ends = np.cumsum([len(plan) for plan in plans.values()])
    return dict(zip(plans, np.split(effects, ends[:-1]), strict=True))


def _effect_quantities(effects: Mapping[str, np.ndarray]) -> dict[str, Quantity]:
    found = {}
    for kind, definition in _DEFINITIONS.items():
        if kind in effects:
            name, (values, errors) = f"{kind}_effect", effects[kind]
            found[name] = Quantity(values, ("ablated",), _UNIT, definition)
            found[f"{name}_sem"] = Quantity(errors, ("ablated",), _UNIT, f"standard error of {name} over sequences")
    return found


def mean_z(model: Any, others: RepeatedTokens, layers: Sequence[int]) -> Mapping[int, Tensor]:
    """Layer → the mean over sequences of every head's output at each position, [pos, n_heads, d_head]."""
    names = {layer: f"blocks.{layer}.attn.hook_z" for layer in layers}
    found = mean_outputs(model, Sequences.read(model, others), list(names.values()), by="position")
    return {layer: found[name] for layer, name in names.items()}


def without_heads(heads: Sequence[Head], means: Mapping[int, Tensor]) -> Intervention:
    """Mean ablation of all these heads; means as of ``mean_z``."""
    edits = [replace_head(layer, head, means[layer][:, head]) for layer, head in heads]
    return together(edits, " + ".join(edit.name for edit in edits))


def loss_effects(
    model: Any, prompts: RepeatedTokens, interventions: Sequence[Intervention], progress: Progress
) -> np.ndarray:
    """What each intervention does to the mean loss of a sequence's predictable tokens, [intervention, sequence]."""
    metric, counted = losses_of(prompts.tokens, prompts.predictable)
    everything = [Intervention(), *interventions]
    losses = measure(model, Sequences.read(model, prompts), everything, metric, progress=progress)
    means = torch.where(counted, losses, 0.0).sum(dim=2) / counted.sum(dim=1)
    return (means[1:] - means[0]).numpy()


def highest(scores: np.ndarray, n: int) -> list[Head]:
    """(layer, head) of the ``n`` largest scores [layer, head], in order, ties to the lower head."""
    order = np.argsort(-scores, axis=None, kind="stable")[:n]
    return [(int(place) // scores.shape[1], int(place) % scores.shape[1]) for place in order]


def control_heads(heads: list[Head], allowed: np.ndarray, seed: int) -> list[Head]:
    """For each head a random one of its layer that is ``allowed`` [layer, head], as far as the layer has enough."""
    rng = np.random.default_rng(seed)
    controls: list[Head] = []
    for layer in sorted({layer for layer, _ in heads}):
        others = np.flatnonzero(allowed[layer])
        n = min(len(others), sum(head[0] == layer for head in heads))
        controls += [(layer, int(head)) for head in sorted(rng.choice(others, n, replace=False))]
    return controls


def control_effect(effects: np.ndarray) -> float:
    """What an effect must exceed: the largest |effect| of the controls, at least 0.01; NaN without controls."""
    return float(max(np.abs(effects).max(), LEAST_EFFECT)) if effects.size else float("nan")


def verdict(has_pattern: bool, alone: tuple[float, float], peer: tuple[float, float], control: float) -> str:
    """The verdict on a head from its effects (mean, standard error); InductionHeads says what each one means."""
    if not has_pattern:
        return "no pattern"
    if np.isnan(control):
        return "untested: no control head"
    if np.isnan(alone[1]):
        return "untested: one sequence"  # has no standard error
    if abs(alone[0]) > control + 2 * alone[1]:
        return "induction" if alone[0] > 0 else "anti-induction"
    return "redundant" if peer[0] > control + 2 * peer[1] else "pattern only"


def mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over axis 0 without NaN, and its standard error; NaN for what too few values make undefined."""
    known = np.isfinite(values)
    n = known.sum(axis=0)
    mean = np.where(known, values, 0.0).sum(axis=0) / np.where(n > 0, n, np.nan)
    squares = np.where(known, values - mean, 0.0) ** 2
    return mean, np.sqrt(squares.sum(axis=0) / np.where(n > 1, (n - 1) * n, np.nan))
