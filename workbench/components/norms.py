"""LayerNorm and RMSNorm with their scale and their normalised value exposed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.config import TransformerConfig
from workbench.hooks import HookPoint


class Norm(nn.Module):
    """x̂ = (x − mean) / scale, out = x̂ · gain + b; RMSNorm leaves out the mean and b.

    scale = sqrt(mean(x²) + eps) of the (centred) input, so it is what x is divided by. The gain is w, or 1 + w
    where ``norm_gain_plus_one`` is set (Gemma Team 2024).
    ``hook_scale`` is [batch, pos, 1], ``hook_normalized`` is x̂ [batch, pos, width], before gain and bias.
    Half-precision inputs are normalised in float32, as the published models were.

    Sources: Ba, Kiros & Hinton 2016 (LayerNorm, equation 4); Zhang & Sennrich 2019 (RMSNorm, equation 4).
    """

    def __init__(self, cfg: TransformerConfig, width: int | None = None) -> None:
        super().__init__()
        self.centred = cfg.normalization_type == "LN"
        self.eps = cfg.eps
        self.plus_one = cfg.norm_gain_plus_one
        width = cfg.d_model if width is None else width
        self.w = nn.Parameter(torch.zeros(width) if self.plus_one else torch.ones(width))
        has_bias = self.centred and cfg.use_norm_bias
        self.b: Tensor | None = nn.Parameter(torch.zeros(width)) if has_bias else None
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    @property
    def gain(self) -> Tensor:
        """What x̂ is multiplied by, [width]."""
        return 1 + self.w if self.plus_one else self.w

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()  # [batch, pos, (copies,) width]
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        scale = self.hook_scale((wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        normalized = self.hook_normalized((wide / scale).to(x.dtype)) * self.gain
        return normalized if self.b is None else normalized + self.b
