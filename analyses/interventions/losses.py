"""Losses under ablation of heads: one code path for one head, for groups, for none, and for every kind of ablation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from workbench.analyses.running import TOKENS_PER_RUN, Progress, Sequences, cached, silent
from workbench.analyses.support import emits_statistics

Head = tuple[int, int]  # layer, head

ROWS_PER_UNEMBEDDING = 1024  # logits of so many positions are held at a time


@dataclass(frozen=True, eq=False)
class Ablation:
    """Heads whose output z is replaced at every position; without heads, the model as it is.

    Args:
        replacement: layer → what z becomes, [pos, n_heads, d_head]; None means zeros.
    """

    heads: Sequence[Head] = ()
    replacement: Mapping[int, Tensor] | None = None


@torch.no_grad()
def ablated_losses(
    model: Any, tokens: Tensor, rows: Tensor, ablations: Sequence[Ablation], progress: Progress = silent
) -> Tensor:
    """Next-token losses in nats under each ablation.

    A HookedTransformer restarts from the residual stream that enters the first ablated layer, which changes nothing as
    the earlier layers do not read the ablated ones; it runs several ablations as one batch and unembeds only ``rows``.
    Other models run whole.

    Args:
        tokens: int64 [batch, pos], without pads.
        rows: bool [batch, pos], the tokens whose loss is wanted (each is predicted at the position before it).

    Returns:
        float64 [ablation, batch, pos], NaN outside ``rows``.
    """
    last = model.cfg.n_layers - 1
    tokens, rows = tokens.to(model.cfg.device), rows.to(model.cfg.device)
    first_layer = [min((layer for layer, _ in ablation.heads), default=last) for ablation in ablations]
    names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in sorted(set(first_layer))}
    restart = cached(model, _all_real(tokens), list(names.values())) if emits_statistics(model) else None
    size = 1 if restart is None else max(1, TOKENS_PER_RUN // tokens.numel())
    losses = torch.full((len(ablations), *tokens.shape), torch.nan, dtype=torch.float64)
    done = 0
    for layer, name in names.items():
        places = [place for place, first in enumerate(first_layer) if first == layer]
        for start in range(0, len(places), size):
            chunk = places[start : start + size]
            hooks = _hooks([ablations[place] for place in chunk], len(tokens))
            if restart is None:
                logits = model.run_with_hooks(tokens, return_type="logits", fwd_hooks=hooks)
                found = _losses(logits[None], tokens, rows)
            else:
                residual = restart[name].repeat(len(chunk), 1, 1)  # [ablation · batch, pos, d_model]
                with model.hooks(fwd_hooks=hooks):
                    residual = model(residual, start_at_layer=layer, stop_at_layer=last + 1)
                found = _losses(residual.unflatten(0, (len(chunk), -1)), tokens, rows, model)
            losses[chunk] = found.cpu()
            done += len(chunk)
            progress(done / len(ablations), f"{done} of {len(ablations)} ablations")
    return losses


@torch.no_grad()
def mean_head_outputs(model: Any, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Layer → mean over sequences of z at each position, [pos, n_heads, d_head]. ``tokens`` are int64 [batch, pos]."""
    names = {layer: f"blocks.{layer}.attn.hook_z" for layer in layers}
    values = cached(model, _all_real(tokens.to(model.cfg.device)), list(names.values()))
    return {layer: values[name].mean(dim=0) for layer, name in names.items()}


def _all_real(tokens: Tensor) -> Sequences:
    return Sequences(tokens, torch.ones_like(tokens, dtype=torch.bool))


def _hooks(ablations: Sequence[Ablation], batch: int) -> list[tuple[str, Callable]]:
    """Hooks for a batch that holds the ``batch`` sequences once per ablation."""

    def editor(layer: int) -> Callable:
        def edit(z: Tensor, hook: Any) -> Tensor:  # [ablation · batch, pos, n_heads, d_head]
            z = z.clone()
            for place, ablation in enumerate(ablations):
                for head in (head for at, head in ablation.heads if at == layer):
                    value = 0.0 if ablation.replacement is None else ablation.replacement[layer][:, head]
                    z[place * batch : (place + 1) * batch, :, head] = value
            return z

        return edit

    layers = sorted({layer for ablation in ablations for layer, _ in ablation.heads})
    return [(f"blocks.{layer}.attn.hook_z", editor(layer)) for layer in layers]


def _losses(values: Tensor, tokens: Tensor, rows: Tensor, unembedding: Any = None) -> Tensor:
    """Losses [ablation, batch, pos] from logits [ablation, batch, pos, d], or from the stream that is unembedded."""
    batch, pos = rows.nonzero(as_tuple=True)
    losses = torch.full(values.shape[:3], torch.nan, dtype=torch.float64, device=values.device)
    for ablation, of_ablation in enumerate(values):
        parts = []
        for some in torch.arange(len(pos), device=pos.device).split(ROWS_PER_UNEMBEDDING):
            logits = of_ablation[batch[some], pos[some] - 1]  # each token is predicted at the position before it
            if unembedding is not None:
                logits = unembedding.to_logits(logits)
            wide = logits if logits.dtype == torch.float64 else logits.float()
            parts.append(cross_entropy(wide, tokens[batch[some], pos[some]], reduction="none").double())
        losses[ablation, batch, pos] = torch.cat(parts)
    return losses
