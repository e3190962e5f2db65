"""What attention, gradients and cuts say of each source token, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attribution.deletion import without_sources
from workbench.analyses.attribution.flow import MAX_EDGES, attention_flow, n_edges
from workbench.analyses.attribution.head_evidence import WEIGHTS_PER_RUN, Measure, MetricName, metric_of
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Progress
from workbench.analyses.support import emits_statistics
from workbench.analyses.tasks import PromptSet

MAX_TOKENS = 512  # of a prompt: rollout holds a whole pattern of every layer

SOURCE_MEASURES = {
    "attention_mean": Measure(
        "attention", "share of 1", "weight, mean of heads", "weight on the token, mean of all heads"
    ),
    "attention_max": Measure(
        "attention", "share of 1", "weight, largest head", "largest weight of any head on the token"
    ),
    "last_layer": Measure(
        "attention", "share of 1", "weight, last layer", "weight on the token, mean over the heads of the last layer"
    ),
    "value_weighted": Measure(
        "attention", "", "‖Σ p v W<sub>O</sub>‖",
        "norm of what all heads of a layer carry over from the token, Σ_h p v W_O with value biases, mean over layers",
    ),
    "rollout": Measure(
        "attention", "share of 1", "rollout", "entry of Π(½ Ā + ½ I) over layers, Ā the mean pattern of a layer's heads"
    ),
    "flow": Measure(
        "attention", "share of 1", "flow",
        "maximum flow from above the last layer at the answer to the token, ½ Ā + ½ I of each layer as capacities",
    ),
    "gradient_input": Measure(
        "gradient", "", "Σ |x · ∂m/∂x|", "Σ |x · ∂m/∂x| over the elements of what enters the first layer at the token"
    ),
    "recency": Measure("position", "tokens", "recency", "minus the distance from the answer position"),
}  # fmt: skip
EFFECTS = {
    "effect": "size of the effect on the metric",
    "total_variation": "total variation distance of the next token's distribution, ½ Σ |p − q|",
    "jensen_shannon": "Jensen–Shannon divergence of the next token's distribution, in nats",
}


def observe_sources(
    model: Any, prompts: PromptSet, metric: MetricName, progress: Progress
) -> tuple[dict[str, np.ndarray], Tensor]:
    """Every measure of SOURCE_MEASURES at the answer position, [prompt, pos] each, of which those of pads mean nothing;
    and the probabilities of the next token, float64 [prompt, d_vocab]. Without "flow" where ``flow_is_left_out``."""
    cfg = model.cfg
    size = max(1, WEIGHTS_PER_RUN // (cfg.n_layers * cfg.n_heads * prompts.tokens.shape[1] ** 2))
    parts: list[dict[str, Tensor]] = []
    for places in torch.arange(len(prompts)).split(size):
        some = prompts.subset(places)
        parts.append(_observe(model, some, metric_of(some, metric), with_flow=not flow_is_left_out(model, prompts)))
        progress(int(places[-1] + 1) / len(prompts), f"attention and gradients of {places[-1] + 1} of {len(prompts)}")
    joined = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
    next_token = joined.pop("next_token")
    distance = prompts.rows.numpy() - np.arange(prompts.tokens.shape[1])
    return {name: x.cpu().numpy() for name, x in joined.items()} | {"recency": -distance.astype(float)}, next_token


def flow_is_left_out(model: Any, prompts: PromptSet) -> str:
    """Why there is no attention flow, "" where there is."""
    n = n_edges(model.cfg.n_layers, prompts.tokens.shape[1])
    return f"its graph would have {n:,} edges, above {MAX_EDGES:,}" if n > MAX_EDGES else ""


@torch.enable_grad()
def _observe(model: Any, prompts: PromptSet, metric: Metric, *, with_flow: bool) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}

    def keep(x: Tensor, hook: Any) -> Tensor:
        values[first] = x.detach().requires_grad_()
        return values[first]

    def look(name: str) -> Callable:  # a bridge's hook points have further names
        return lambda x, hook: values.update({name: x.detach()})

    layers, device = range(model.cfg.n_layers), model.cfg.device
    batch, rows = prompts.sequences.to(device), prompts.rows.to(device)
    at, first = torch.arange(len(prompts), device=device), "blocks.0.hook_resid_pre"
    names = [f"blocks.{layer}.attn.hook_{what}" for layer in layers for what in ("pattern", "v")]
    hooks = [(name, look(name)) for name in names]
    arguments = {"attention_mask": batch.real} if emits_statistics(model) else {}
    with model.hooks(fwd_hooks=[(first, keep), *hooks]):
        logits = model(batch.tokens, return_type="logits", **arguments)[at, rows[:, 0]][:, None]
    (gradient,) = torch.autograd.grad(metric(logits).sum(), values[first])
    weights, norms, mixed = [], [], []
    for layer in layers:
        pattern = values[f"blocks.{layer}.attn.hook_pattern"]  # [prompt, head, query, key]
        v = values[f"blocks.{layer}.attn.hook_v"]  # [prompt, key, key/value head, d_head]
        W_O = model.blocks[layer].attn.W_O.detach()
        v = v.repeat_interleave(len(W_O) // v.shape[2], dim=2)
        at_answer = pattern[at, :, rows[:, 0]]  # [prompt, head, key]
        weights.append(at_answer)
        norms.append(torch.einsum("phk,pkhe,hed->pkd", at_answer.to(v.dtype), v, W_O).norm(dim=-1))
        mixed.append(0.5 * pattern.double().mean(dim=1) + 0.5 * torch.eye(pattern.shape[-1], device=device))
    stacked = torch.stack(weights, dim=1)  # [prompt, layer, head, key]
    rolled = reduce(lambda below, of_layer: of_layer @ below, mixed)
    return {
        "next_token": logits[:, 0].detach().double().softmax(dim=-1),
        "attention_mean": stacked.mean(dim=(1, 2)),
        "attention_max": stacked.amax(dim=(1, 2)),
        "last_layer": stacked[:, -1].mean(dim=1),
        "value_weighted": torch.stack(norms).mean(dim=0),
        "rollout": rolled[at, rows[:, 0]],
        **({"flow": _flows(mixed, rows[:, 0].tolist())} if with_flow else {}),
        "gradient_input": (values[first].detach() * gradient).abs().sum(dim=-1),
    }


def _flows(mixed: Sequence[Tensor], answers: Sequence[int]) -> Tensor:
    """The flow to each token between first and answer, 0 elsewhere; mixed [prompt, query, key] of each layer."""
    flows = torch.zeros(mixed[0].shape[:2], dtype=torch.float64)
    for prompt, answer in enumerate(answers):
        of_prompt = [of_layer[prompt, : answer + 1, : answer + 1].cpu().numpy() for of_layer in mixed]
        flows[prompt, 1:answer] = torch.from_numpy(attention_flow(of_prompt, answer, range(1, answer)))
    return flows


def cut_sources(
    model: Any, prompts: PromptSet, metric: Metric, next_token: Tensor, sources: Tensor, progress: Progress
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The metric as it is [prompt], and what cutting each source alone does, NaN elsewhere.

    Args:
        next_token: the model's own probabilities, [prompt, d_vocab].

    Returns:
        "signed" (metric without the token less metric with it) and all of EFFECTS, [prompt, pos] each.
    """
    three = prompts.rows.expand(-1, 3)
    n_positions = prompts.tokens.shape[1]

    def score(logits: Tensor) -> Tensor:  # [prompt, 3, d_vocab], three times the same
        p, q = next_token.to(logits.device), logits[:, 0].double().softmax(dim=-1)
        middle = (p + q) / 2
        divergences = [(x * (x / middle).clamp(min=1e-300).log()).nan_to_num(0.0).sum(dim=-1) for x in (p, q)]
        variation, shannon = (p - q).abs().sum(dim=-1) / 2, (divergences[0] + divergences[1]) / 2
        return torch.stack([metric(logits[:, :1]), variation, shannon], dim=1)

    places = [place for place in range(n_positions) if bool(sources[:, place].any())]
    one = torch.eye(n_positions, dtype=torch.bool)
    cuts = [Intervention()] + [without_sources(model, one[place], f"position {place}") for place in places]
    all_three = Metric("effects of cuts", "", three, score, per_row=True)
    values = measure(model, prompts.sequences, cuts, all_three, progress=progress).numpy()
    found = {name: np.full((len(prompts), n_positions), np.nan) for name in ("signed", *EFFECTS)}
    for place, value in zip(places, values[1:], strict=True):
        found["signed"][:, place] = value[:, 0] - values[0, :, 0]
        found["total_variation"][:, place], found["jensen_shannon"][:, place] = value[:, 1], value[:, 2]
    found["effect"] = np.abs(found["signed"])
    return values[0, :, 0], {name: np.where(sources.numpy(), x, np.nan) for name, x in found.items()}
