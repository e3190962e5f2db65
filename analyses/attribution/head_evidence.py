"""What attention, gradients and ablations say of each head, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.interventions.edits import replace_head
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.options import check_choice
from workbench.analyses.running import Progress, Sequences, cached
from workbench.analyses.support import emits_statistics
from workbench.analyses.tasks import PromptSet

MetricName = Literal["logit_difference", "log_probability"]
Ablation = Literal["zero", "mean", "resample"]
ROUNDING = 1e-5  # of the largest baseline: a smaller effect is none
WEIGHTS_PER_RUN = 2**25  # attention weights held with their gradients, over all layers


@dataclass(frozen=True)
class Measure:
    """A number that is read off one run of the model, without intervening. ``side``: "attention" or "gradient"."""

    side: str
    unit: str
    label: str
    definition: str


MEASURES = {
    "max_weight": Measure(
        "attention", "share of 1", "largest weight", "largest weight of the answer position on a source"
    ),
    "mean_weight": Measure(
        "attention", "share of 1", "mean weight", "mean weight of the answer position on the sources"
    ),
    "off_sink_mass": Measure(
        "attention", "share of 1", "weight off the first token",
        "weight of the answer position on all tokens but the first, and not on a learned sink either",
    ),
    "entropy": Measure(
        "attention", "nats", "entropy", "entropy of the weights of the answer position, that on a learned sink included"
    ),
    "value_weighted": Measure(
        "attention", "", "‖Σ p v W<sub>O</sub>‖",
        "norm of the head's output z W_O at the answer position, value biases included",
    ),
    "gradient_output": Measure(
        "gradient", "", "|z · ∂m/∂z|", "|Σ z · ∂m/∂z| over positions: the effect of zero ablation to first order"
    ),
    "gradient_attention": Measure(
        "gradient", "", "Σ |p · ∂m/∂p|", "Σ |p · ∂m/∂p| over all pairs of query and key"
    ),
}  # fmt: skip


def chosen_metric(prompts: Any, metric: MetricName | None) -> MetricName:
    """The metric's name; None is the logit difference where prompts have foils, else the log-probability.

    Raises:
        ValueError: an unknown metric.
    """
    if metric is None:
        return "log_probability" if getattr(prompts, "foil", None) is None else "logit_difference"
    check_choice("metric", metric, get_args(MetricName))
    return metric


def metric_of(prompts: PromptSet, name: MetricName) -> Metric:
    return prompts.logit_difference() if name == "logit_difference" else prompts.log_probability()


@dataclass(frozen=True, eq=False)
class Observed:
    """One run of the model as it is.

    Args:
        measures: name of MEASURES → [prompt, layer, head].
        z: the heads' outputs at the answer position, [prompt, layer, head, d_head].
        direction: what a unit of z there adds to the metric by itself, later layers and the final norm's scale held
            (exactly for a logit difference, to first order otherwise), as z; None where the stream is no sum.
    """

    measures: Mapping[str, np.ndarray]
    z: Tensor
    direction: Tensor | None


def observe(model: Any, prompts: PromptSet, metric: MetricName, sources: Tensor | None, progress: Progress) -> Observed:
    """Every measure of MEASURES, with one run and one gradient. Patterns are materialised, some prompts at a time.

    Args:
        sources: bool [prompt, pos]; None is every token but the first.
    """
    cfg = model.cfg
    size = max(1, WEIGHTS_PER_RUN // (cfg.n_layers * cfg.n_heads * prompts.tokens.shape[1] ** 2))
    parts: list[Observed] = []
    for places in torch.arange(len(prompts)).split(size):
        some = prompts.subset(places)
        parts.append(_observe(model, some, metric_of(some, metric), None if sources is None else sources[places]))
        progress(int(places[-1] + 1) / len(prompts), f"attention and gradients of {places[-1] + 1} of {len(prompts)}")
    directions = [part.direction for part in parts if part.direction is not None]
    return Observed(
        {name: np.concatenate([part.measures[name] for part in parts]) for name in parts[0].measures},
        torch.cat([part.z for part in parts]),
        torch.cat(directions) if directions else None,
    )


@torch.enable_grad()
def _observe(model: Any, prompts: PromptSet, metric: Metric, sources: Tensor | None) -> Observed:
    values: dict[str, Tensor] = {}

    def keep(name: str) -> Callable:  # a bridge's hook points have further names
        def hook(x: Tensor, hook: Any) -> Tensor:
            values[name] = x if x.requires_grad else x.detach().requires_grad_()
            return values[name]

        return hook

    def look(name: str) -> Callable:
        return lambda x, hook: values.update({name: x.detach()})

    layers, device = range(model.cfg.n_layers), model.cfg.device
    batch, rows = prompts.sequences.to(device), prompts.rows.to(device)
    at = torch.arange(len(prompts), device=device)
    names = {what: [f"blocks.{layer}.attn.hook_{what}" for layer in layers] for what in ("pattern", "z")}
    post_norms = [f"blocks.{layer}.ln1_post.hook_scale" for layer in layers]
    post_norms = [name for name in post_norms if name in model.hook_dict]
    hooks = [(name, keep(name)) for of_what in names.values() for name in of_what]
    hooks += [(name, look(name)) for name in post_norms]
    direction = None
    if emits_statistics(model):
        with model.hooks(fwd_hooks=hooks):
            stream = model(batch.tokens, attention_mask=batch.real, stop_at_layer=len(layers))[at, rows[:, 0]][:, None]
        logits = model.to_logits(stream)
        if model.cfg.norm_placement != "post":
            into_stream = _gradient_into_stream(model, stream, metric)
            scales = [values[name][at, rows[:, 0]] for name in post_norms]
            direction = _into_heads(model, into_stream, scales)
    else:
        logits = model.run_with_hooks(batch.tokens, return_type="logits", fwd_hooks=hooks)[at, rows[:, 0]][:, None]
    kept = [values[name] for of_what in names.values() for name in of_what]
    gradients = torch.autograd.grad(metric(logits).sum(), kept)
    of_pattern, of_z = gradients[: len(layers)], gradients[len(layers) :]
    patterns, zs = ([values[name].detach() for name in names[what]] for what in ("pattern", "z"))
    z = torch.stack([x[at, rows[:, 0]] for x in zs], dim=1)  # [prompt, layer, head, d_head]
    weights = torch.stack([p[at, :, rows[:, 0]] for p in patterns], dim=1).double()  # [prompt, layer, head, key]
    W_O = torch.stack([model.blocks[layer].attn.W_O.detach() for layer in layers])
    measures = _of_weights(model, weights, batch.real, sources)
    measures["value_weighted"] = torch.einsum("plhe,lhed->plhd", z, W_O).double().norm(dim=-1)
    products = [(x * g).sum(dim=(1, 3)) for x, g in zip(zs, of_z, strict=True)]
    measures["gradient_output"] = torch.stack(products, dim=1).double().abs()
    products = [(p * g).abs().sum(dim=(2, 3)) for p, g in zip(patterns, of_pattern, strict=True)]
    measures["gradient_attention"] = torch.stack(products, dim=1).double()
    return Observed({name: value.cpu().numpy() for name, value in measures.items()}, z, direction)


def _of_weights(model: Any, weights: Tensor, real: Tensor, sources: Tensor | None) -> dict[str, Tensor]:
    """Measures of the answer position's weights [prompt, layer, head, key]."""
    not_first = real & (torch.arange(real.shape[1], device=real.device) > 0)
    chosen = (not_first if sources is None else sources.to(real.device) & real)[:, None, None]
    logarithms = torch.where(weights > 0, weights, 1.0).log()
    entropy = -(weights * logarithms).sum(dim=-1)
    if getattr(model.cfg, "use_sink_logits", False):
        rest = (1 - weights.sum(dim=-1)).clamp(min=0)
        entropy = entropy - rest * torch.where(rest > 0, rest, 1.0).log()
    found = {"max_weight": torch.where(chosen, weights, 0.0).amax(dim=-1)}
    if sources is not None:  # every token but the first: the mean ranks heads as off_sink_mass does
        found["mean_weight"] = (weights * chosen).sum(dim=-1) / chosen.sum(dim=-1)
    found["off_sink_mass"] = (weights * not_first[:, None, None]).sum(dim=-1)
    return found | {"entropy": entropy}


def _gradient_into_stream(model: Any, stream: Tensor, metric: Metric) -> Tensor:
    """∂m/∂(stream behind the last layer) at the answer position, the final norm's scale held, [prompt, d_model]."""
    stream = stream.detach().requires_grad_()
    name = "ln_final.hook_scale"
    hooks = [(name, lambda scale, hook: scale.detach())] if name in model.hook_dict else []
    with model.hooks(fwd_hooks=hooks) if hooks else nullcontext():
        logits = model.to_logits(stream)
    return torch.autograd.grad(metric(logits).sum(), stream)[0][:, 0]


@torch.no_grad()
def _into_heads(model: Any, into_stream: Tensor, scales: Sequence[Tensor]) -> Tensor:
    """∂m/∂z along the direct path alone, norms on the attention's output held; [prompt, layer, head, d_head]."""
    found = []
    for layer, block in enumerate(model.blocks):
        direction = into_stream
        if scales:
            norm = block.ln1_post
            direction = direction * norm.gain / scales[layer]
            direction = direction - direction.mean(dim=-1, keepdim=True) if norm.centred else direction
        found.append(torch.einsum("hed,pd->phe", block.attn.W_O, direction.to(block.attn.W_O.dtype)))
    return torch.stack(found, dim=1)


@dataclass(frozen=True, eq=False)
class Ablated:
    """Effects of ablating every head: metric(ablated) − metric(as it is).

    Args:
        baseline: [prompt], the metric of the model as it is.
        total: ablation → [prompt, layer, head].
        direct: what of it goes straight to the logits, as ``total``; empty where the stream is no sum.
    """

    baseline: np.ndarray
    total: dict[str, np.ndarray] = field(default_factory=dict)
    direct: dict[str, np.ndarray] = field(default_factory=dict)


def ablate(
    model: Any,
    prompts: PromptSet,
    metric: Metric,
    replacements: Mapping[str, Sequence[Tensor]],
    observed: Observed,
    *,
    at_answer: bool,
    progress: Progress,
) -> Ablated:
    """Each head of the model under each ablation, alone.

    Args:
        replacements: ablation → for each layer what z becomes, [prompt or 1, pos or 1, head, d_head].
        at_answer: only at the answer position.
    """
    n_layers, n_heads, n = model.cfg.n_layers, model.cfg.n_heads, len(prompts)
    answer = torch.arange(prompts.tokens.shape[1]) == prompts.rows  # [prompt, pos]
    interventions = [Intervention()] + [
        replace_head(layer, head, of_layer[..., head, :], answer if at_answer else None)
        for of_all in replacements.values()
        for layer, of_layer in enumerate(of_all)
        for head in range(n_heads)
    ]
    values = measure(model, prompts.sequences, interventions, metric, progress=progress).numpy()
    changes = values[1:] - values[0]
    changes[np.abs(changes) < ROUNDING * max(1.0, float(np.abs(values[0]).max()))] = 0.0
    effects = changes.reshape(len(replacements), n_layers, n_heads, n).transpose(0, 3, 1, 2)
    found = Ablated(values[0], dict(zip(replacements, effects, strict=True)))
    if observed.direction is not None:
        rows, at = prompts.rows[:, 0], torch.arange(n)
        for name, of_all in replacements.items():
            new = [x.expand(n, -1, -1, -1)[at, rows.clamp(max=x.shape[1] - 1)] for x in of_all]
            change = torch.stack(new, dim=1) - observed.z
            found.direct[name] = (change * observed.direction).double().sum(dim=-1).cpu().numpy()
    return found


def replacement_outputs(
    model: Any,
    prompts: PromptSet,
    ablations: Sequence[Ablation],
    reference: Sequences | None,
    *,
    mean_by: Literal["position", "all"],
    seed: int,
) -> dict[str, list[Tensor]]:
    """What the heads' outputs become under each ablation, layer by layer, as ``ablate`` takes it.

    Args:
        reference: other prompts, of which a mean leaves out the one that is ablated; None takes the corrupted prompts,
            each its own in resample ablation.

    Raises:
        ValueError: no other prompts, or none that are long enough.
    """
    cfg = model.cfg
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(cfg.n_layers)]
    zeros = torch.zeros(1, 1, cfg.n_heads, cfg.d_head, dtype=cfg.dtype, device=cfg.device)
    found = {"zero": [zeros] * cfg.n_layers} if "zero" in ablations else {}
    if not set(ablations) - {"zero"}:
        return found
    if reference is None and prompts.corrupted is None:
        raise ValueError(
            "mean and resample ablation replace a head's output by that on other prompts: pass them as reference, give "
            "the prompts corrupted versions, or ask for ablations=('zero',)"
        )
    others = prompts.sequences if reference is None else reference
    if reference is None and prompts.corrupted is not None:
        others = Sequences(prompts.corrupted, prompts.real, "the corrupted prompts")
    if "mean" in ablations:
        values = cached(model, others.to(cfg.device), names)
        found["mean"] = _means(prompts, others, [values[name] for name in names], mean_by)
    if "resample" in ablations:
        donors = others if reference is None else _donors(prompts, others, seed)
        values = cached(model, donors.to(cfg.device), names)
        found["resample"] = [values[name] for name in names]
    return {name: found[name] for name in ablations}


def _means(
    prompts: PromptSet, others: Sequences, outputs: Sequence[Tensor], by: Literal["position", "all"]
) -> list[Tensor]:
    """For each prompt the mean of the outputs [other, pos, …] on all others that are not that prompt itself."""
    own, theirs = (
        [tuple(row[mask].tolist()) for row, mask in zip(x.tokens, x.real, strict=True)] for x in (prompts, others)
    )
    differs = torch.tensor([[one != other for other in theirs] for one in own], dtype=torch.float64)
    width = min(prompts.tokens.shape[1], others.tokens.shape[1])
    counts = differs @ others.real.double()  # [prompt, pos]
    if by == "all":
        counts, reaches = counts.sum(dim=1, keepdim=True), prompts.real[:, :1]
    else:
        counts, reaches = counts[:, :width], prompts.real[:, :width]
    if width < prompts.tokens.shape[1] and by == "position" or bool((reaches & (counts == 0)).any()):
        raise ValueError(
            "a mean by position needs, at every position, prompts of the reference that are other than the one that is "
            "ablated; pass longer ones or more, or mean_by='all'"
        )
    found = []
    for z in outputs:
        real, weights = others.real.to(z.device)[..., None, None], differs.to(z.device, z.dtype)
        sums = torch.einsum("po,oqhe->pqhe", weights, z * real)
        sums = sums.sum(dim=1, keepdim=True) if by == "all" else sums[:, :width]
        found.append(sums / counts.clamp(min=1).to(z.device, z.dtype)[..., None, None])
    return found


def _donors(prompts: PromptSet, others: Sequences, seed: int) -> Sequences:
    """For each prompt another that is at least as long, at random, as far as the prompt goes."""
    generator, width = torch.Generator().manual_seed(seed), prompts.tokens.shape[1]
    chosen = []
    for place, length in enumerate(prompts.real.sum(dim=1)):
        (fitting,) = (others.lengths >= length).nonzero(as_tuple=True)
        if not len(fitting):
            raise ValueError(f"no prompt of the reference is as long as prompt {place}, which has {length} tokens")
        chosen.append(int(fitting[torch.randint(len(fitting), (1,), generator=generator)]))
    missing = max(0, width - others.tokens.shape[1])
    tokens = torch.nn.functional.pad(others.tokens[chosen], (0, missing))[:, :width]
    return Sequences(tokens.where(prompts.real, 0), prompts.real)
