"""Many interventions on the same prompts, one number each: as fast as the model allows, exact all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.running import TOKENS_PER_RUN, Progress, Sequences, emits_statistics, silent
from workbench.analyses.support import check_one_length
from workbench.components.heads import at_rows

TOKENS_IN_CACHE = 512  # of one batch on a CPU, whose caches do not hold the activations of many more
# What is computed behind the attention of a layer, z included.
BEHIND_Z = (
    "attn.hook_z", "attn.hook_result", "hook_attn_out", "hook_resid_mid", "mlp.hook_pre", "mlp.hook_post",
    "hook_mlp_out", "hook_resid_post",
)  # fmt: skip
Edit = Callable[[Tensor, Any], Tensor]  # (activation [prompt, pos, …] of one intervention, its hook point) → the same
Head = tuple[int, int]  # layer, head
Start = tuple[int, bool]  # the layer at which a run restarts, and whether behind its attention


@dataclass(frozen=True, eq=False)
class Intervention:
    """What is done to one run of a model. Without edits the model runs as it is.

    Args:
        edits: hook point → what its activation becomes.
        name: in tables and figures.
    """

    edits: Mapping[str, Edit] = field(default_factory=dict)
    name: str = "none"

    def __or__(self, other: Intervention) -> Intervention:
        """Both together; where they edit the same hook point, this one goes first."""
        joined = dict(self.edits)
        for hook_name, edit in other.edits.items():
            joined[hook_name] = _in_turn(joined[hook_name], edit) if hook_name in joined else edit
        return Intervention(joined, f"{self.name} + {other.name}")

    def first_layer(self, n_layers: int) -> int:
        """The first layer whose output may differ; the last one where nothing is edited.

        Raises:
            ValueError: an edit outside the layers, which a run that restarts at one would pass by.
        """
        if outside := [name for name in self.edits if not name.startswith("blocks.")]:
            raise ValueError(
                f"{outside[0]} lies outside the layers; edit blocks.0.hook_resid_pre for the embedding, or "
                f"blocks.{n_layers - 1}.hook_resid_post for what is unembedded"
            )
        return min(self.layers, default=n_layers - 1)

    def starts_behind_z(self, n_layers: int) -> bool:
        """Whether the attention of the first layer that may differ does not, up to its hook_z."""
        first = f"blocks.{self.first_layer(n_layers)}."
        return all(name.removeprefix(first) in BEHIND_Z for name in self.edits if name.startswith(first))

    @property
    def layers(self) -> set[int]:
        """Where the edits are, as long as none lies outside the layers."""
        return {int(name.split(".")[1]) for name in self.edits}


def _in_turn(first: Edit, second: Edit) -> Edit:
    return lambda x, hook: second(first(x, hook), hook)


@torch.no_grad()
def measure(
    model: Any,
    prompts: Sequences,
    interventions: Sequence[Intervention],
    metric: Metric,
    *,
    progress: Progress = silent,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tensor:
    """The metric of every prompt under every intervention.

    A HookedTransformer restarts at the first edited layer, behind its attention where that is not edited, which
    changes nothing, as what was before does not read what is edited; it runs several interventions as one batch.
    Behind the last attention only the positions that the metric reads are run and unembedded, some at a time where
    the metric allows. Other models run whole.

    Args:
        prompts: with the positions that ``metric`` reads.
        progress: called with the fraction done and what was done.
        cancelled: asked between batches; once true, what has not been measured stays NaN.

    Returns:
        float64 [intervention, prompt], or [intervention, prompt, row] for a metric of each row.

    Raises:
        ValueError: an edit outside the layers, one that returns another shape, as its hook point says, prompts of
            several lengths for a model whose rotations depend on them, or a metric that is NaN.
    """
    check_one_length(model, prompts.real)
    n_layers = model.cfg.n_layers
    prompts = prompts.to(model.cfg.device)
    firsts = [intervention.first_layer(n_layers) for intervention in interventions]
    starts = [(first, one.starts_behind_z(n_layers)) for first, one in zip(firsts, interventions, strict=True)]
    restart = _restarts(model, prompts, starts) if emits_statistics(model) else None
    size = 1 if restart is None else max(1, _tokens_at_once(prompts) // prompts.tokens.numel())
    shape = (len(interventions), *metric.shape)
    values = torch.full(shape, torch.nan, dtype=torch.float64)
    done = 0
    for at in sorted(set(starts)):
        places = [place for place, start in enumerate(starts) if start == at]
        for begin in range(0, len(places), size):
            if cancelled():
                return values
            chosen = places[begin : begin + size]
            together = [interventions[place] for place in chosen]
            if restart is None:
                found = _run_whole(model, prompts, together[0], metric)[None]
            else:
                found = _run_from(model, prompts, at[0], restart[at], together, metric)
            values[chosen] = found.cpu()
            if bool(values[chosen].isnan().any()):
                raise ValueError(
                    f"the {metric.name} is not a number ({interventions[chosen[0]].name or 'the model as it is'} and "
                    "what was run with it): values exceed the range of the model's type; load the model in float32"
                )
            done += len(chosen)
            progress(done / len(interventions), f"{done} of {len(interventions)} interventions")
    return values


def _restarts(model: Any, prompts: Sequences, starts: Sequence[Start]) -> dict[Start, tuple[Tensor, Tensor | None]]:
    """The stream [prompt, pos, d_model] that enters each layer, and its z where a run starts behind the attention.

    Each as it is before any hook has seen it: a run that restarts there passes the hooks again.
    """
    streams = {layer: f"blocks.{layer}.hook_resid_pre" for layer, _ in starts}
    zs = {layer: f"blocks.{layer}.attn.hook_z" for layer, is_behind_z in starts if is_behind_z}
    found: dict[str, Tensor] = {}

    def keep(point: Any, inputs: Any, value: Tensor) -> None:
        found[point.name] = value.clone()  # which a later hook may change in place

    points = [model.hook_dict[name] for name in (*streams.values(), *zs.values())]
    handles = [point.register_forward_hook(keep, prepend=True) for point in points]
    try:
        model(prompts.tokens, None, attention_mask=prompts.real, stop_at_layer=max(streams) + 1)
    finally:
        for handle in handles:
            handle.remove()
    return {(layer, behind): (found[streams[layer]], found[zs[layer]] if behind else None) for layer, behind in starts}


def _run_whole(model: Any, prompts: Sequences, intervention: Intervention, metric: Metric) -> Tensor:
    """The metric of one intervention on a whole run, [prompt, …]."""
    hooks = _hooks([intervention], len(prompts))
    logits = model.run_with_hooks(prompts.tokens, return_type="logits", fwd_hooks=hooks)
    return metric(at_rows(logits, metric.rows))


def _run_from(
    model: Any, prompts: Sequences, layer: int, restart: tuple[Tensor, Tensor | None],
    interventions: Sequence[Intervention], metric: Metric,
) -> Tensor:  # fmt: skip
    """The metric of interventions in one batch, [intervention, prompt, …], from what ``_restarts`` found for ``layer``.

    An edit reads all prompts at once. Behind the last edited layer, the batch runs in parts that caches hold.
    """
    n, n_layers = len(interventions), model.cfg.n_layers
    behind = 1 + max({layer}.union(*(intervention.layers for intervention in interventions)))
    real, rows = prompts.real.repeat(n, 1), metric.rows.repeat(n, 1)
    stream, z = restart
    with model.hooks(fwd_hooks=_hooks(interventions, len(prompts))):
        residual = model(
            stream.repeat(n, 1, 1), attention_mask=real, start_at_layer=layer, stop_at_layer=behind,
            rows=rows if behind == n_layers else None, z=None if z is None else z.repeat(n, 1, 1, 1),
        )  # fmt: skip
    if behind < n_layers:
        size = max(1, _tokens_at_once(prompts) // prompts.tokens.shape[1])
        parts = zip(residual.split(size), real.split(size), rows.split(size), strict=True)
        layers = {"start_at_layer": behind, "stop_at_layer": n_layers}
        residual = torch.cat([model(part, attention_mask=mask, rows=some, **layers) for part, mask, some in parts])
    return torch.stack([metric.read(of_one, model.to_logits) for of_one in residual.unflatten(0, (n, -1))])


def _tokens_at_once(prompts: Sequences) -> int:
    return TOKENS_IN_CACHE if prompts.tokens.device.type == "cpu" else TOKENS_PER_RUN


def _hooks(interventions: Sequence[Intervention], n_prompts: int) -> list[tuple[str, Callable]]:
    """Hooks for a batch that holds the prompts once per intervention."""

    def editor(hook_name: str) -> Callable:
        def edit(x: Tensor, hook: Any) -> Tensor:  # [intervention · prompt, …]
            parts = [
                intervention.edits[hook_name](part, hook) if hook_name in intervention.edits else part
                for intervention, part in zip(interventions, x.split(n_prompts), strict=True)
            ]
            return torch.cat(parts)

        return edit

    names = dict.fromkeys(name for intervention in interventions for name in intervention.edits)
    return [(name, editor(name)) for name in names]
