"""Deletion curves (DeYoung et al. 2020, section 4): the answer without the sources that a ranking puts first, and with
only these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.interventions.edits import cut_edges, together
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Progress
from workbench.analyses.tasks import PromptSet

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # of the sources


def without_sources(model: Any, sources: Tensor, name: str) -> Intervention:
    """No query reads these keys, bool [key] or [prompt, key], in any layer or head; the others share their weight.

    What a cut token computes itself no longer matters, as only it would read it.
    """
    return together([cut_edges(layer, sources=sources) for layer in range(model.cfg.n_layers)], name)


def target_probability(prompts: PromptSet) -> Metric:
    """Probability of the target as the next token."""
    log_probability = prompts.log_probability()
    return Metric("probability", "share of 1", prompts.rows, lambda logits: log_probability(logits).exp())


def deletion_curves(
    model: Any, prompts: PromptSet, rankings: Mapping[str, np.ndarray], sources: Tensor, progress: Progress
) -> tuple[np.ndarray, np.ndarray]:
    """Comprehensiveness and sufficiency of each ranking: how much probability of the target is lost.

    Args:
        rankings: name → [prompt, pos], larger is more important.
        sources: bool [prompt, pos], the tokens that are ranked; the rest are never cut.

    Returns:
        p(target) less p(target without the first tokens), and less p(target with only them); each
        [ranking, share, prompt] for SHARES of a prompt's sources, rounded up to whole tokens.
    """
    interventions = [Intervention()]
    for name, values in rankings.items():
        chosen = [first_sources(values, sources, share) for share in SHARES]
        interventions += [without_sources(model, first, f"without {name}") for first in chosen]
        interventions += [without_sources(model, sources & ~first, f"only {name}") for first in chosen]
    found = measure(model, prompts.sequences, interventions, target_probability(prompts), progress=progress).numpy()
    lost = (found[0] - found[1:]).reshape(len(rankings), 2, len(SHARES), len(prompts))
    return lost[:, 0], lost[:, 1]


def first_sources(values: np.ndarray, sources: Tensor, share: float) -> Tensor:
    """bool [prompt, pos], the largest of the values [prompt, pos] at the sources; ties to the earlier token."""
    ranked = np.where(sources.numpy(), values, -np.inf)
    places = np.argsort(np.argsort(-ranked, axis=1, kind="stable"), axis=1, kind="stable")
    n = np.ceil(share * sources.sum(dim=1, keepdim=True).numpy())
    return torch.from_numpy(places < n) & sources
