"""How far back a head reads: the share of its weight that the last W tokens hold, in O(n) memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.running import Progress, Sequences, cached
from workbench.analyses.support import check_plain_causal, depends_on_length, emits_statistics
from workbench.kernels import AttentionMask, StatisticsRequest, attention


def default_windows(n_tokens: int) -> list[int]:
    """1, 2, 4, … up to half a text of ``n_tokens``, so that the largest is asked of half its queries or more."""
    return [2**power for power in range(max(1, n_tokens // 2).bit_length())]


@torch.no_grad()
def window_masses(model: Any, sequences: Sequences, windows: Sequence[int], progress: Progress) -> np.ndarray:
    """Weight on the last W keys, and on these and the first token, float64 [2, layer, head, window].

    A query's own key is one of the W. Means over the real queries that have the largest W tokens, themselves included,
    so that all windows are asked of the same queries.
    """
    position = torch.arange(sequences.tokens.shape[1], device=model.cfg.device)
    outside = position >= torch.tensor(windows, device=position.device)[:, None]  # [window, query]: of the first token
    total: Tensor | float = 0.0
    n_rows = n_done = 0
    for batch in sequences.batches(one_length=depends_on_length(model)):
        batch = batch.to(model.cfg.device)
        rows = batch.real.clone()
        rows[:, : max(windows) - 1] = False
        within, first = (_by_lse if emits_statistics(model) else _by_pattern)(model, batch, windows)
        beside = first * outside[:, None, None, None, : batch.tokens.shape[1]]
        both = torch.where(rows[:, None], torch.stack((within, within + beside)), 0.0)
        total = total + both.sum(dim=(3, 5)).permute(0, 2, 3, 1)  # [2, layer, head, window]
        n_rows += int(rows.sum())
        n_done += len(batch)
        progress(n_done / len(sequences), f"windows of {n_done} of {len(sequences)} sequences")
    return torch.as_tensor(total / n_rows).cpu().numpy()


def _by_lse(model: Any, batch: Sequences, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """exp(lse_W − lse), where lse_W is over the keys within W, [window, layer, batch, head, query]; and the weight on
    the first token, [layer, batch, head, query]."""
    within: list[Tensor] = []
    first: list[Tensor] = []

    def read(attn: Any, inputs: tuple, output: Any) -> None:
        q, k, _ = attn.queries_keys_values(*inputs)
        options = attn.score_options(inputs[-1])
        mask: AttentionMask = options.pop("mask")
        request = StatisticsRequest(sink_keys=1)
        whole = attention(q, k, k, mask=mask, sink_logits=attn.sink_logits, statistics=request, **options)
        first.append(whole.statistics["sink_mass"].double())  # any values do: z is not read
        # What a local layer sees beyond its window, its global tokens, is within none of ours.
        sizes = [window if mask.window is None else min(window, mask.window) for window in windows]
        near = [attention(q, k, k, mask=replace(mask, window=size, n_global=0), **options).lse for size in sizes]
        within.append((torch.stack(near).double() - whole.lse.double()).exp())

    handles = [block.attn.register_forward_hook(read) for block in model.blocks]
    try:
        model(batch.tokens, None, attention_mask=None if bool(batch.real.all()) else batch.real)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(within, dim=1), torch.stack(first)


def _by_pattern(model: Any, batch: Sequences, windows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The same of a model that gives its patterns, which are plainly causal."""
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    distance = position[:, None] - position  # [query, key]
    within, first = [], []
    for layer in range(model.cfg.n_layers):
        name = f"blocks.{layer}.attn.hook_pattern"
        pattern = cached(model, batch, [name])[name].double()
        check_plain_causal(pattern, layer)
        within.append(torch.stack([(pattern * (distance < window)).sum(dim=-1) for window in windows]))
        first.append(pattern[..., 0])
    return torch.stack(within, dim=1), torch.stack(first)


def effective_context(masses: np.ndarray, windows: Sequence[int], share: float) -> np.ndarray:
    """The smallest of the windows that holds ``share`` of the weight, [layer, head]; NaN where none does.

    masses are [layer, head, window].
    """
    enough = masses >= share
    return np.where(enough.any(axis=-1), np.asarray(windows, dtype=float)[enough.argmax(axis=-1)], np.nan)
