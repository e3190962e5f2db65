"""The position-wise feed-forward layer, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from workbench.config import TransformerConfig
from workbench.hooks import HookPoint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": nn.functional.silu,
}


class MLP(nn.Module):
    """out = act(x W_in + b_in) W_out + b_out, or with a gate (act(x W_gate) ⊙ (x W_in + b_in)) W_out + b_out.

    W_in, W_gate [d_model, d_mlp]; W_out [d_mlp, d_model]. ``hook_pre`` is what the activation function reads
    (the gate's value where there is a gate), ``hook_pre_linear`` the gated factor, ``hook_post`` what W_out reads,
    each [batch, pos, d_mlp].

    Sources: Vaswani et al. 2017, equation 2; Shazeer 2020 (GLU variants), equation 6.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[cfg.act_fn]
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_in: Tensor | None = nn.Parameter(torch.zeros(cfg.d_mlp)) if cfg.use_mlp_bias else None
        self.b_out: Tensor | None = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.use_mlp_bias else None
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()
        self.gated = cfg.gated_mlp
        if self.gated:
            self.W_gate = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
            self.hook_pre_linear = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear(x, self.W_in.T, self.b_in)  # [batch, pos, d_mlp]
        if self.gated:
            pre = self.hook_pre(x @ self.W_gate)
            post = self.activation(pre) * self.hook_pre_linear(linear)
        else:
            post = self.activation(self.hook_pre(linear))
        return nn.functional.linear(self.hook_post(post), self.W_out.T, self.b_out)
