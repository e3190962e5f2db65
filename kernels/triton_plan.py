"""What all Triton kernels of one call share: the rule in base 2, the mask as integers, which rows a column meets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from workbench.kernels.masks import VisibleKeys
from workbench.kernels.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class Plan:
    """What every kernel of one call takes: the rule in base 2, the mask as integers, and sizes."""

    natural: ScoreRule
    rule: ScoreRule  # the same in base 2
    bounds: Tensor  # int32 [4, batch, query]
    padding: Tensor  # int8 [batch, key], read only where there is padding
    flags: dict[str, bool]
    group: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, rule: ScoreRule) -> Plan:
        mask = rule.mask
        bounds = torch.stack((mask.first, mask.end, mask.global_first, mask.global_end)).int()
        return cls(
            natural=rule,
            rule=rule.in_base_2(),
            bounds=bounds,
            padding=bounds if mask.key_padding is None else mask.key_padding.to(torch.int8).contiguous(),
            flags={
                "GLOBAL": mask.has_global,
                "PADDING": mask.key_padding is not None,
                "SOFTCAP": rule.softcap is not None,
                "ALIBI": rule.alibi_slopes is not None,
                "BIAS": rule.offset_bias is not None,
            },
            group=q.shape[1] // k.shape[1],
        )

    @property
    def mask(self) -> VisibleKeys:
        return self.rule.mask

    def arguments(self, q: Tensor) -> dict[str, Any]:
        """The arguments that all kernels have in common."""
        rule, unused = self.rule, self.bounds
        return {
            "bounds": self.bounds,
            "key_padding": self.padding,
            "slopes": unused if rule.alibi_slopes is None else rule.alibi_slopes.detach().contiguous(),
            "bias": unused if rule.offset_bias is None else rule.offset_bias.detach().contiguous(),
            "scale": rule.scale,
            "softcap": 0.0 if rule.softcap is None else rule.softcap,
            "n_queries": q.shape[2],
            "n_keys": self.mask.n_keys,
            "query_offset": self.mask.query_offset,
            "n_heads": q.shape[1],
            "group": self.group,
            "bounds_step": self.bounds.stride(0),
            **self.flags,
        }

    def row_tiles(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Which tiles of rows a tile of columns has to visit: int32 [2, batch, column tile], first and end.

        Args:
            rows, columns: first index and end of every tile, int64 [2, tile].
        """
        n_tiles = rows.shape[1]
        longest = int((rows[1] - rows[0]).max())
        within = torch.arange(longest, device=rows.device)
        index = torch.minimum(rows[0][:, None] + within, rows[1][:, None] - 1)  # [row tile, longest]
        first, end = torch.full_like(self.bounds[:2, :, :1], n_tiles).expand(2, -1, columns.shape[1]).unbind()
        end = torch.zeros_like(end)
        for left, right in (self.bounds[:2], self.bounds[2:]) if self.flags["GLOBAL"] else (self.bounds[:2],):
            # Made monotone, bounds can be searched: ranges may become too wide, never too narrow.
            reach = right[:, index].amax(2).cummax(1).values
            start = left[:, index].amin(2).flip(1).cummin(1).values.flip(1)  # [batch, row tile]
            low = torch.searchsorted(reach, columns[0].int().expand(len(reach), -1).contiguous(), right=True)
            high = torch.searchsorted(start, columns[1].int().expand(len(start), -1).contiguous())
            seen = low < high
            first, end = torch.where(seen, torch.minimum(first, low), first), torch.where(seen, end.maximum(high), end)
        return torch.stack((torch.minimum(first, end), end)).int().contiguous()


def edges(n: int, block: int, longest: int, device: torch.device) -> Tensor:
    """First index and end of the tiles that blocks of ``block`` out of n are cut into: int64 [2, tile].

    Every block has as many tiles of at most ``longest``; those of a ragged last block may be empty.
    """
    within = torch.arange(0, block, longest, device=device)
    start = (torch.arange(0, n, block, device=device)[:, None] + within).flatten()
    stop = torch.minimum(start + longest, (start // block + 1) * block).clamp(max=n)
    return torch.stack((start.clamp(max=n), stop))


def strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of [batch, head, position, d] tensors, as the kernels name them."""
    return {
        f"{name}_{axis}": step
        for name, tensor in tensors.items()
        for axis, step in zip(("batch", "head", "row", "dim"), tensor.stride(), strict=True)
    }


def alignment(*tensors: Tensor) -> int:
    """8 where the strides of batches, heads and rows are multiples of it, else 1."""
    steps = [step for tensor in tensors for step in tensor.stride()[:3]]
    return 8 if all(step % 8 == 0 for step in steps) else 1


def padded(d: int) -> int:
    """The width of a tile for d channels: a power of two, which products need to be at least 16."""
    return max(16, triton.next_power_of_2(d))
