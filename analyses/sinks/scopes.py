"""Which edges to a sink are edited: of which layers and heads, and of the queries that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.interventions.edits import cut_edges, replace_contribution, together
from workbench.analyses.interventions.sweeps import Intervention
from workbench.analyses.running import Sequences, cached
from workbench.analyses.support import depends_on_length, layer_masks


@dataclass(frozen=True, eq=False)
class Key:
    """A key whose edges are edited.

    Args:
        source: bool [key], where it is.
        readers: of each layer, bool [sequence, query], the later queries that may see it.
        weight: float64 [layer, head], their mean weight on it; NaN where there is none.
        constant: of each layer, [sequence, head, d_head], the mean of p_ij v_j over the readers of other sequences.
    """

    source: Tensor
    readers: Sequence[Tensor]
    weight: Tensor
    constant: Sequence[Tensor]


@dataclass(frozen=True)
class Scope:
    """Layers, or one head of one layer."""

    name: str
    layers: tuple[int, ...]
    head: int | None = None


def read_key(model: Any, sequences: Sequences, received: Tensor, later: Tensor, position: int) -> Key:
    """What the ``later`` queries [sequence, query] read of a position; ``received`` [layer, sequence, head, key] are
    the sums of their weights."""
    queries = torch.arange(later.shape[1], device=later.device)
    readers = [
        later & (position < mask.n_global or mask.window is None or queries - position < mask.window)
        for mask in layer_masks(model)
    ]
    n_readers = torch.stack([of_layer.sum(dim=1) for of_layer in readers]).double().cpu()  # [layer, sequence]
    sums = received[..., position]  # [layer, sequence, head]
    names = [f"blocks.{layer}.attn.hook_v" for layer in range(model.cfg.n_layers)]
    # Later tokens change none of these values, but where they change the rotations.
    values = cached(model, sequences if depends_on_length(model) else sequences.first(position + 1), names)
    constants = []
    for layer, name in enumerate(names):
        v = values[name][:, position].double().cpu()  # [sequence, n_key_value_heads, d_head]
        total = sums[layer][..., None] * v.repeat_interleave(sums.shape[2] // v.shape[1], dim=1)
        n_others = n_readers[layer].sum() - n_readers[layer]
        constants.append((total.sum(dim=0) - total) / n_others.clamp(min=1)[:, None, None])
    return Key(queries == position, readers, sums.sum(dim=1) / n_readers.sum(dim=1)[:, None], constants)


def key_edits(key: Key, scope: Scope) -> list[Intervention | None]:
    """The interventions of a scope on a key: its edges cut, its value dropped, a constant in its place, and its edges
    cut for every query, for which one head has no use (None)."""

    def everywhere(edits: Sequence[Intervention]) -> Intervention:
        return together(edits, scope.name)

    def cut(layer: int, *, later: bool = True, renormalise: bool = True) -> Intervention:
        readers = key.readers[layer] if later else None
        return cut_edges(layer, sources=key.source, destinations=readers, head=scope.head, renormalise=renormalise)

    return [
        everywhere([cut(layer) for layer in scope.layers]),
        everywhere([cut(layer, renormalise=False) for layer in scope.layers]),
        everywhere(
            [
                replace_contribution(
                    layer, key.constant[layer], sources=key.source, destinations=key.readers[layer], head=scope.head
                )
                for layer in scope.layers
            ]
        ),
        everywhere([cut(layer, later=False) for layer in scope.layers]) if scope.head is None else None,
    ]


def choose_scopes(
    model: Any, layers: Sequence[tuple[int, int]] | None, weight: np.ndarray, n_heads: int
) -> list[Scope]:
    """All layers, ranges of them, and the heads with the largest mean weight [layer, head] on the sink."""
    n_layers = model.cfg.n_layers
    if layers is None:
        parts = np.array_split(np.arange(n_layers), min(3, n_layers)) if n_layers > 1 else []
        layers = [(int(part[0]), int(part[-1])) for part in parts]
    if wrong := [bounds for bounds in layers if not 0 <= bounds[0] <= bounds[1] < n_layers]:
        raise ValueError(f"layers must be ranges (first, last) of layers 0 to {n_layers - 1}, got {wrong[0]}")
    found = [Scope("all layers", tuple(range(n_layers)))]
    for first, last in layers:
        name = f"layers {first}–{last}" if last > first else f"layer {first}"
        found.append(Scope(name, tuple(range(first, last + 1))))
    best = np.argsort(-np.nan_to_num(weight), axis=None, kind="stable")[:n_heads]
    for layer, head in np.stack(np.unravel_index(best, weight.shape), axis=1).tolist():
        found.append(Scope(f"L{layer}H{head}", (layer,), head))
    return found


def weight_on(weight: np.ndarray, scope: Scope, of: Any = np.nanmean) -> float:
    """Mean (or maximum) over the heads of a scope of the weight [layer, head] of later queries on a key."""
    chosen = weight[list(scope.layers)]
    chosen = chosen if scope.head is None else chosen[:, scope.head]
    return float(of(chosen)) if np.isfinite(chosen).any() else 0.0
