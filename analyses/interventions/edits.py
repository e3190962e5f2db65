"""Interventions of the literature, ready for ``sweeps.measure``: ablations, patches, and cuts of attention edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.analyses.interventions.sweeps import Intervention
from workbench.analyses.running import Sequences, cached

Replacement = Tensor | float  # 0.0 (zero ablation), a mean, or another run's activation


def replace_head(layer: int, head: int, value: Replacement = 0.0, positions: Tensor | None = None) -> Intervention:
    """A head's output z becomes ``value``, [d_head], [pos, d_head] or [prompt, pos, d_head].

    Zeros are zero ablation, a mean over a reference set mean ablation (Wang et al. 2022, section 2), another prompt's
    output resample ablation (Chan et al. 2022), that of a corrupted or clean prompt activation patching.

    Args:
        positions: bool [pos] or [prompt, pos], where; None is everywhere.
    """

    def edit(z: Tensor, hook: Any) -> Tensor:  # [prompt, pos, n_heads, d_head]
        z = z.clone()
        z[:, :, head] = _mixed(z[:, :, head], value, positions)
        return z

    return Intervention({f"blocks.{layer}.attn.hook_z": edit}, f"L{layer}H{head}")


def replace_activation(
    hook_name: str, value: Replacement = 0.0, positions: Tensor | None = None, name: str = ""
) -> Intervention:
    """What passes a hook point [prompt, pos, …] becomes ``value``, as in ``replace_head``: an MLP's output
    (``blocks.{l}.hook_mlp_out``), the residual stream (``hook_resid_pre``), an attention layer's output."""

    def edit(x: Tensor, hook: Any) -> Tensor:
        return _mixed(x, value, positions)

    return Intervention({hook_name: edit}, name or hook_name)


def cut_edges(
    layer: int,
    *,
    sources: Tensor,
    destinations: Tensor | None = None,
    head: int | None = None,
    renormalise: bool = True,
) -> Intervention:
    """No query of ``destinations`` reads a key of ``sources`` (attention knock-out; Geva et al. 2023, section 3).

    Args:
        sources: bool [key] or [prompt, key].
        destinations: bool [query] or [prompt, query]; None is every query.
        head: one head, or None for the whole layer.
        renormalise: True removes the edge before the softmax, so that the other keys share its weight; False removes
            its weight and leaves the others as they are. A query that can read nothing else keeps its edges when they
            would be renormalised, as there is nothing to share among.
    """

    def edit(x: Tensor, hook: Any) -> Tensor:  # [prompt, n_heads, query, key]
        cut = _of_prompts(sources, x)[:, None, None, :]
        if destinations is not None:
            cut = cut & _of_prompts(destinations, x)[:, None, :, None]
        which = slice(None) if head is None else slice(head, head + 1)
        x = x.clone()
        if renormalise:
            scores = x[:, which]
            left = scores.masked_fill(cut, -torch.inf)
            hidden = torch.finfo(scores.dtype).min / 2  # some models mask by the least number in place of −∞
            empty = (left <= hidden).all(dim=-1, keepdim=True)
            x[:, which] = torch.where(empty, scores, left)
        else:
            x[:, which] = x[:, which].masked_fill(cut, 0)
        return x

    hook_name = f"blocks.{layer}.attn.hook_{'attn_scores' if renormalise else 'pattern'}"
    return Intervention({hook_name: edit}, f"L{layer}" if head is None else f"L{layer}H{head}")


def replace_contribution(
    layer: int, value: Tensor, *, sources: Tensor, destinations: Tensor | None = None, head: int | None = None
) -> Intervention:
    """What a query reads from the keys of ``sources``, Σ_j p_ij v_j over them, becomes ``value``.

    Its other weights stay. A constant makes the keys an implicit bias (Sun et al. 2024, section 4.2); zeros drop their
    values, as ``cut_edges`` without renormalising does.

    Args:
        value: [n_heads, d_head] or [prompt, n_heads, d_head], also where only one ``head`` is meant.
        sources, destinations, head: as in ``cut_edges``. Destinations should see the sources: they get
            the value anyway.
    """
    dropped = cut_edges(layer, sources=sources, destinations=destinations, head=head, renormalise=False)

    def edit(z: Tensor, hook: Any) -> Tensor:  # [prompt, pos, n_heads, d_head]
        added = (value if value.dim() == 3 else value[None])[:, None].to(z)  # [prompt or 1, 1, n_heads, d_head]
        if head is not None:
            added = added * (torch.arange(z.shape[2], device=z.device) == head)[:, None]
        return z + (added if destinations is None else added * _of_prompts(destinations, z)[:, :, None, None])

    return Intervention({**dropped.edits, f"blocks.{layer}.attn.hook_z": edit}, dropped.name)


def together(interventions: Sequence[Intervention], name: str) -> Intervention:
    """Several at once, under one name."""
    joined = Intervention()
    for intervention in interventions:
        joined |= intervention
    return Intervention(joined.edits, name)


@torch.no_grad()
def mean_outputs(
    model: Any, reference: Sequences, names: Sequence[str], *, by: Literal["position", "all"] = "all"
) -> Mapping[str, Tensor]:
    """Hook point → the mean of its activation over a reference set, for mean ablation.

    The reference set is another than the prompts: a mean that contains what it replaces is no ablation.

    Args:
        by: "all" averages over real tokens, [1, …]; "position" over the sequences at each position, [pos, …], NaN where
            no sequence is that long.
    """
    reference = reference.to(model.cfg.device)
    values = cached(model, reference, list(names))
    found: dict[str, Tensor] = {}
    for name in names:
        x = values[name]  # [sequence, pos, …]
        real = reference.real.view(*reference.real.shape, *[1] * (x.dim() - 2))
        sums, counts = (x * real).double(), real.double()
        if by == "all":
            found[name] = (sums.sum(dim=(0, 1)) / counts.sum(dim=(0, 1))).to(x.dtype)[None]
        else:
            found[name] = (sums.sum(dim=0) / counts.sum(dim=0)).to(x.dtype)
    return found


def _mixed(x: Tensor, value: Replacement, positions: Tensor | None) -> Tensor:
    """x [prompt, pos, …] with ``value`` at ``positions``."""
    replacement = torch.as_tensor(value, dtype=x.dtype, device=x.device).expand_as(x)
    if positions is None:
        return replacement.clone()
    where = _of_prompts(positions, x)
    return torch.where(where.view(*where.shape, *[1] * (x.dim() - 2)), replacement, x)


def _of_prompts(which: Tensor, x: Tensor) -> Tensor:
    """bool [pos] or [prompt, pos] as [prompt or 1, pos] on x's device."""
    return torch.atleast_2d(which).to(x.device)
