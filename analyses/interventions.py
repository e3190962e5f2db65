"""Losses under ablation of heads: one code path for one head, for groups, and for none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from workbench.analyses.running import TOKENS_PER_RUN, Progress, emits_statistics, silent

Head = tuple[int, int]  # layer, head

ROWS_PER_UNEMBEDDING = 1024  # logits of so many positions are held at a time


@torch.no_grad()
def ablated_losses(
    model: Any,
    tokens: Tensor,
    rows: Tensor,
    ablations: Sequence[Sequence[Head]],
    replacement: Mapping[int, Tensor] | None = None,
    progress: Progress = silent,
) -> Tensor:
    """Next-token losses in nats with the outputs z of some heads replaced at every position.

    A HookedTransformer restarts from the residual stream that enters the first ablated layer, which changes nothing as
    the earlier layers do not read the ablated ones; it runs several ablations as one batch and unembeds only ``rows``.
    Other models run whole.

    Args:
        tokens: int64 [batch, pos], without pads.
        rows: bool [batch, pos], the tokens whose loss is wanted (each is predicted at the position before it).
        ablations: sets of heads; () is the model itself.
        replacement: layer → what z becomes, [pos, n_heads, d_head]; None means zeros.

    Returns:
        [ablation, batch, pos], NaN outside ``rows``.
    """
    n_layers = model.cfg.n_layers
    tokens, rows = tokens.to(model.cfg.device), rows.to(model.cfg.device)
    first_layer = [min((layer for layer, _ in heads), default=n_layers - 1) for heads in ablations]
    restart = _residuals(model, tokens, set(first_layer)) if emits_statistics(model) else None
    size = max(1, TOKENS_PER_RUN // tokens.numel())
    losses = torch.full((len(ablations), *tokens.shape), torch.nan)
    done = 0
    for layer in sorted(set(first_layer)):
        places = [place for place, first in enumerate(first_layer) if first == layer]
        for start in range(0, len(places), size):
            chunk = places[start : start + size]
            hooks = _hooks([ablations[place] for place in chunk], len(tokens), replacement)
            if restart is None:
                logits = model.run_with_hooks(tokens.repeat(len(chunk), 1), return_type="logits", fwd_hooks=hooks)
                found = _losses(lambda logits: logits, logits.unflatten(0, (len(chunk), -1)), tokens, rows)
            else:
                with model.hooks(fwd_hooks=hooks):
                    residual = model(
                        restart[layer].repeat(len(chunk), 1, 1), start_at_layer=layer, stop_at_layer=n_layers
                    )
                found = _losses(
                    lambda residual: model.unembed(model.ln_final(residual)),
                    residual.unflatten(0, (len(chunk), -1)),
                    tokens,
                    rows,
                )
            losses[chunk] = found.cpu()
            done += len(chunk)
            progress(done / len(ablations), f"{done} of {len(ablations)} ablations")
    return losses


@torch.no_grad()
def mean_head_outputs(model: Any, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Layer → mean over sequences of z at each position, [pos, n_heads, d_head]. ``tokens`` are int64 [batch, pos]."""
    names = {layer: f"blocks.{layer}.attn.hook_z" for layer in layers}
    _, cache = model.run_with_cache(tokens.to(model.cfg.device), names_filter=list(names.values()), return_type=None)
    return {layer: cache[name].mean(dim=0) for layer, name in names.items()}


def _residuals(model: Any, tokens: Tensor, layers: set[int]) -> dict[int, Tensor]:
    """Layer → the residual stream that enters it, [batch, pos, d_model]."""
    names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in layers}
    _, cache = model.run_with_cache(tokens, names_filter=list(names.values()), stop_at_layer=max(layers) + 1)
    return {layer: cache[name] for layer, name in names.items()}


def _hooks(
    ablations: Sequence[Sequence[Head]], batch: int, replacement: Mapping[int, Tensor] | None
) -> list[tuple[str, Callable]]:
    """Hooks for a batch that holds the sequences once per ablation."""
    edits: dict[int, list[tuple[int, int]]] = {}
    for place, heads in enumerate(ablations):
        for layer, head in heads:
            edits.setdefault(layer, []).append((place, head))

    def editor(layer: int) -> Callable:
        def edit(z: Tensor, hook: Any) -> Tensor:  # [ablation · batch, pos, n_heads, d_head]
            z = z.clone()
            for place, head in edits[layer]:
                z[place * batch : (place + 1) * batch, :, head] = (
                    0.0 if replacement is None else replacement[layer][:, head]
                )
            return z

        return edit

    return [(f"blocks.{layer}.attn.hook_z", editor(layer)) for layer in edits]


def _losses(to_logits: Callable[[Tensor], Tensor], values: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """values [ablation, batch, pos, d] at the positions before ``rows`` → losses [ablation, batch, pos]."""
    batch, pos = rows.nonzero(as_tuple=True)
    losses = torch.full(values.shape[:3], torch.nan, dtype=torch.float32, device=values.device)
    for ablation, of_ablation in enumerate(values):
        read, targets = of_ablation[batch, pos - 1], tokens[batch, pos]
        parts = [
            cross_entropy(to_logits(some).float(), expected, reduction="none")
            for some, expected in zip(
                read.split(ROWS_PER_UNEMBEDDING), targets.split(ROWS_PER_UNEMBEDDING), strict=True
            )
        ]
        losses[ablation, batch, pos] = torch.cat(parts)
    return losses
