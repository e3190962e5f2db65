"""The test of induction heads: what the loss of repeated tokens does without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import reaches
from workbench.analyses.interventions.losses import Ablation, Head, ablated_losses, mean_head_outputs
from workbench.analyses.prompts import RepeatedTokens
from workbench.analyses.result import Quantity
from workbench.analyses.running import Progress

LEAST_EFFECT = 0.01  # nats per token; a smaller change of the loss is none, whatever the controls do


@dataclass(frozen=True, eq=False)
class Repetition:
    """What the ablations are run on.

    Args:
        others: sequences of the same kind, whose mean outputs replace those of ablated heads.
        losses: [sequence, pos], the model's own on ``prompts``.
    """

    prompts: RepeatedTokens
    others: RepeatedTokens
    losses: Tensor


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
    prompts, rows = repetition.prompts, repetition.prompts.predictable
    has_pattern = reaches(scores, threshold)
    candidates = highest(scores, n_candidates)
    group = highest(scores, int(has_pattern.sum()))
    tested = [head for head in candidates if head in group]
    allowed = ~has_pattern
    allowed[tuple(np.array(candidates).T)] = False
    ablated = candidates + control_heads(tested, allowed, seed)
    is_control = np.arange(len(ablated)) >= len(candidates)
    without = [[peer for peer in group if peer != head] for head in tested]
    means = mean_head_outputs(model, repetition.others.tokens, sorted({layer for layer, _ in ablated + group}))
    with_means = [*([head] for head in ablated), group, *without]
    ablations = [Ablation(heads, means) for heads in with_means] + [Ablation([head]) for head in ablated]
    losses = ablated_losses(model, prompts.tokens, rows, ablations, progress)
    change = torch.where(rows, losses - repetition.losses, 0.0).sum(dim=2) / rows.sum(dim=1)
    effects = change.numpy()  # of the mean loss of the predictable tokens, float64 [ablation, sequence]
    n = len(ablated)
    mean, mean_error = mean_and_error(effects[:n].T)
    zero, zero_error = mean_and_error(effects[-n:].T)
    peer, peer_error = np.full((2, n), np.nan)
    for place, head in enumerate(tested):
        further = effects[n] - effects[n + 1 + place]
        peer[candidates.index(head)], peer_error[candidates.index(head)] = mean_and_error(further)
    control = control_effect(mean[is_control])
    verdicts = ["control"] * n
    for place, head in enumerate(candidates):
        found = (mean[place], mean_error[place]), (peer[place], peer_error[place])
        verdicts[place] = verdict(has_pattern[head], *found, control)
    names = [
        f"L{layer}H{head}{' (control)' if c else ''}" for (layer, head), c in zip(ablated, is_control, strict=True)
    ]
    return names, {
        "ablated_head": Quantity(np.array(ablated), ("ablated", "layer and head"), "", "layer and head"),
        "is_control": Quantity(is_control, ("ablated",), "", "whether it is a random head beside one with the pattern"),
        "verdict": Quantity(np.array(verdicts), ("ablated",), "", "see InductionHeads"),
        **_effect("mean", mean, mean_error, f"{_REPLACED} its mean per position on other sequences"),
        **_effect("zero", zero, zero_error, f"{_REPLACED} zeros"),
        **_effect("peer", peer, peer_error, f"further {_REPLACED} its mean, after those of all its peers"),
        "group_effect": Quantity(effects[n].mean(), (), _UNIT, "mean_effect of all heads with the pattern together"),
    }


_REPLACED = "change of the repeated tokens' loss when the head's output is replaced by"
_UNIT = "nats per token"


def _effect(name: str, values: np.ndarray, errors: np.ndarray, definition: str) -> dict[str, Quantity]:
    return {
        f"{name}_effect": Quantity(values, ("ablated",), _UNIT, definition),
        f"{name}_effect_sem": Quantity(errors, ("ablated",), _UNIT, f"standard error of {name}_effect over sequences"),
    }


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
