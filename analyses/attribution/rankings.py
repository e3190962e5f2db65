"""Rankings of heads, and the half of the data that they come from: what pruning and joint ablation share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import measure_heads
from workbench.analyses.attribution.head_evidence import MetricName, metric_of
from workbench.analyses.attribution.patching import gradients_at, pieces, some_of
from workbench.analyses.interventions.edits import mean_outputs, replace_head
from workbench.analyses.interventions.metrics import Metric, token_losses
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Input, Progress, Sequences, silent
from workbench.analyses.tasks import PromptSet

Ablation = Literal["mean", "zero"]
Data = PromptSet | Sequences

RANDOM = "random"
BUILT_IN = {
    "max weight": "largest weight on a token, mean over queries",
    "off the first token": "1 − weight on the first token, mean over queries",
    "prefix matching": "weight on what followed earlier occurrences of the token, mean over the queries that have one",
    "ablation effect": "|mean change of the metric| when the head alone is ablated",
    "gradient": "|Σ z · ∂metric/∂z| of a prompt, mean over prompts",
}


def read_data(model: Any, prompts: PromptSet | Input, attention_mask: Tensor | None) -> Data:
    """Prompts of a task as they are, all else as sequences of tokens.

    Raises:
        ValueError: a sequence without a token to predict, or what the model cannot read.
    """
    if isinstance(prompts, PromptSet):
        return prompts
    sequences = Sequences.read(model, prompts, attention_mask)
    if int(sequences.lengths.min()) < 2:
        raise ValueError("every sequence needs two tokens, or there is none to predict; leave the shorter ones out")
    return sequences


def sequences_of(data: Data) -> Sequences:
    return data.sequences if isinstance(data, PromptSet) else data


def halves_of(data: Data, seed: int) -> tuple[Data, Data]:
    """Two random halves, the first to rank heads on. Raises ValueError for a single prompt or text."""
    if isinstance(data, PromptSet):
        return data.halves(seed)
    if len(data) < 2:
        raise ValueError("one text has no two halves; pass several, such as those of chunked_text")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    middle = (len(data) + 1) // 2
    return some_of(data, order[:middle].sort().values), some_of(data, order[middle:].sort().values)


def data_metric(data: Data, name: MetricName) -> Metric:
    """The metric of prompts, and of sequences the mean loss of their next tokens."""
    if isinstance(data, PromptSet):
        return metric_of(data, name)
    rows = torch.arange(data.tokens.shape[1] - 1).repeat(len(data), 1)
    losses, real = token_losses(data.tokens, rows), data.real[:, 1:]

    def score(logits: Tensor) -> Tensor:
        of_rows = losses(logits)
        return (of_rows * real.to(of_rows)).sum(dim=1) / real.sum(dim=1).to(of_rows)

    return Metric("loss", "nats per token", rows, score)


def checked_rankings(model: Any, rankings: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rankings that were passed, score [layer, head] each.

    Raises:
        ValueError: one of another shape, with NaN, or with the name of one that is made here.
    """
    shape = (model.cfg.n_layers, model.cfg.n_heads)
    found = {name: np.asarray(score, dtype=float) for name, score in rankings.items()}
    for name, score in found.items():
        if score.shape != shape or not np.isfinite(score).all():
            raise ValueError(f"ranking {name!r} must hold a number for each head, {list(shape)}; got {score.shape}")
        if name in BUILT_IN or name == RANDOM:
            raise ValueError(f"ranking {name!r} is one that is made here; give yours another name")
    return found


def replacements(model: Any, reference: Sequences, ablation: Ablation) -> list[Tensor]:
    """What z becomes in each layer, [1, n_heads, d_head]."""
    cfg = model.cfg
    if ablation == "zero":
        return [torch.zeros(1, cfg.n_heads, cfg.d_head, dtype=cfg.dtype, device=cfg.device)] * cfg.n_layers
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(cfg.n_layers)]
    means = mean_outputs(model, reference, names)
    return [means[name] for name in names]


def built_in_rankings(
    model: Any, data: Data, metric: MetricName, outputs: Sequence[Tensor], progress: Progress
) -> dict[str, np.ndarray]:
    """The built-in rankings, score [layer, head] each."""
    sequences, cfg = sequences_of(data), model.cfg
    longest = int(sequences.lengths.max())  # half of the prompts may be shorter than their pads
    scores = measure_heads(model, sequences.first(longest), 1, silent).scores
    found = {
        "max weight": scores["max_weight"].mean,
        "off the first token": 1 - scores["sink_mass"].mean,
        "prefix matching": scores["prefix_matching"].mean,
    }
    found = {name: score for name, score in found.items() if np.isfinite(score).all()}
    ablated = [
        replace_head(layer, head, outputs[layer][:, head])
        for layer in range(cfg.n_layers)
        for head in range(cfg.n_heads)
    ]
    values = measure(model, sequences, [Intervention(), *ablated], data_metric(data, metric), progress=progress).numpy()
    effects = (values[1:] - values[0]).mean(axis=1).reshape(cfg.n_layers, cfg.n_heads)
    return found | {"ablation effect": np.abs(effects), "gradient": _by_gradient(model, data, metric)}


def _by_gradient(model: Any, data: Data, metric: MetricName) -> np.ndarray:
    """|Σ z · ∂metric/∂z| over positions, mean over prompts, [layer, head]."""
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(model.cfg.n_layers)]
    parts = []
    for places in pieces(len(data), sequences_of(data).tokens.shape[1]):
        some = data.subset(places) if isinstance(data, PromptSet) else some_of(data, places)
        values, gradients, _ = gradients_at(model, sequences_of(some), data_metric(some, metric), names)
        products = [(values[name].double() * gradients[name].double()).sum(dim=(1, 3)) for name in names]
        parts.append(torch.stack(products, dim=1).abs())
    return torch.cat(parts).mean(dim=0).cpu().numpy()


def order_of(score: np.ndarray) -> np.ndarray:
    """Heads as numbers, layer · n_heads + head, the largest score first; ties to the lower head."""
    return np.argsort(-score, axis=None, kind="stable")


def ranked_by(rankings: Iterable[str]) -> str:
    """What each ranking goes by, in words."""
    return "what heads are ranked by: " + "; ".join(f"{name}: {BUILT_IN.get(name, 'as passed')}" for name in rankings)


def without_heads(model: Any, heads: np.ndarray, outputs: Sequence[Tensor]) -> Intervention:
    """Heads, as numbers, ablated together: their z becomes ``outputs``."""
    cfg = model.cfg
    ablated = torch.zeros(cfg.n_layers * cfg.n_heads, dtype=torch.bool)
    ablated[torch.as_tensor(heads, dtype=torch.int64)] = True
    edits = {}
    for layer, of_layer in enumerate(ablated.view(cfg.n_layers, cfg.n_heads)):

        def edit(z: Tensor, hook: Any, of_layer: Tensor = of_layer, output: Tensor = outputs[layer]) -> Tensor:
            return torch.where(of_layer.to(z.device)[:, None], output, z)  # [prompt, pos, n_heads, d_head]

        if bool(of_layer.any()):
            edits[f"blocks.{layer}.attn.hook_z"] = edit
    return Intervention(edits, f"without {len(heads)} heads")
