"""Parts of a model that are switched off, each under a short name: what an interface can hold in one line of text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from workbench.analyses.interventions.edits import cut_edges, replace_activation, replace_head, together
from workbench.analyses.interventions.sweeps import Intervention

WRITTEN_AS = (
    "a head as L3H7, an attention layer as L3, an MLP as M3, and attention from query 12 to key 5 as L3H7:12>5, "
    "L3:12>5 (every head) or *:12>5 (every layer); without a query, as in L3H7:>0, from every query"
)
_NAME = re.compile(r"(?:M(?P<mlp>\d+)|(?:L(?P<layer>\d+)(?:H(?P<head>\d+))?|\*)(?::(?P<query>\d*)>(?P<key>\d+))?)")


def switched_off(model: Any, names: Sequence[str], n_tokens: int) -> Intervention:
    """What ``names`` name, switched off together: outputs become zeros, attention edges are cut before the softmax.

    Args:
        n_tokens: of the one prompt that it will run on; edges are between its positions.

    Raises:
        ValueError: a name that is none, or that names what the model or the prompt does not have.
    """
    if isinstance(names, str):
        raise ValueError(f"names of what is switched off come in a list, such as [{names!r}], got a single text")
    parts = [part for name in names for part in _parts(model, name, n_tokens)]
    return together(parts, ", ".join(names))


def _parts(model: Any, name: str, n_tokens: int) -> list[Intervention]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None or name == "*":
        raise ValueError(f"{name!r} names nothing that can be switched off; write {WRITTEN_AS}")
    mlp, layer, head, query, key = (None if part is None else _number(part, name) for part in match.groups())
    _check(name, "layer", mlp if layer is None else layer, model.cfg.n_layers)
    if mlp is not None:
        return [replace_activation(f"blocks.{mlp}.hook_mlp_out", name=name)]
    _check(name, "head", head, model.cfg.n_heads)
    if key is not None:
        _check(name, "position", key, n_tokens)
        _check(name, "position", query, n_tokens)
        positions = torch.arange(n_tokens)
        destinations = None if query is None else positions == query
        layers = range(model.cfg.n_layers) if layer is None else [layer]
        return [cut_edges(at, sources=positions == key, destinations=destinations, head=head) for at in layers]
    assert layer is not None
    if head is not None:
        return [replace_head(layer, head)]
    return [replace_activation(f"blocks.{layer}.hook_attn_out", name=name)]


def _number(text: str, name: str) -> int | None:
    """The number that a part of a name holds; None for a query that is left out."""
    if len(text) > 9:
        raise ValueError(f"{name[:40]!r} holds a number that no model or prompt reaches")
    return int(text) if text else None


def _check(name: str, what: str, number: int | None, n: int) -> None:
    if number is not None and number >= n:
        raise ValueError(f"{name!r}: there is no {what} {number}; the last one is {n - 1}")
