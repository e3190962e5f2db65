"""LayerNorm and RMSNorm with their scale and their normalised value exposed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.config import TransformerConfig
from workbench.hooks import HookPoint


class Norm(nn.Module):
    """x̂ = (x − mean) / scale, out = x̂ · w + b; RMSNorm leaves out the mean and b.

    scale = sqrt(mean(x²) + eps) of the (centred) input, so it is what x is divided by.
    ``hook_scale`` is [batch, pos, 1], ``hook_normalized`` is x̂ [batch, pos, d_model], before gain and bias.
    Half-precision inputs are normalised in float32, as the published models were.

    Sources: Ba, Kiros & Hinton 2016 (LayerNorm, equation 4); Zhang & Sennrich 2019 (RMSNorm, equation 4).
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.centred = cfg.normalization_type == "LN"
        self.eps = cfg.eps
        self.w = nn.Parameter(torch.ones(cfg.d_model))
        self.b: Tensor | None = nn.Parameter(torch.zeros(cfg.d_model)) if self.centred else None
        self.hook_scale = HookPoint()
        self.hook_normalized = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()  # [batch, pos, (copies,) d_model]
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        scale = self.hook_scale((wide.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())
        normalized = self.hook_normalized((wide / scale).to(x.dtype)) * self.w
        return normalized if self.b is None else normalized + self.b
