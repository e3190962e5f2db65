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
    "sigmoid": torch.sigmoid,
}


def apply_gate(pre: Tensor, linear: Tensor, cfg: TransformerConfig) -> Tensor:
    """act(gate) ⊙ (linear + glu_linear_offset), where glu_limit bounds the gate from above and linear on both sides.

    ``pre`` is the gate's value; the shapes are equal. With act_fn "sigmoid" this is GLU (Dauphin et al. 2017), with
    "gelu" GeGLU, with "silu" SwiGLU (Shazeer 2020, equations 5 and 6). Limit and offset are those of the GPT-OSS model
    card (OpenAI 2025), section 2.2.
    """
    if cfg.glu_limit is not None:
        pre, linear = pre.clamp(max=cfg.glu_limit), linear.clamp(-cfg.glu_limit, cfg.glu_limit)
    return ACTIVATIONS[cfg.act_fn](pre) * (linear + cfg.glu_linear_offset if cfg.glu_linear_offset else linear)


class MLP(nn.Module):
    """out = act(x W_in + b_in) W_out + b_out, or with a gate (act(x W_gate + b_gate) ⊙ (x W_in + b_in)) W_out + b_out.

    W_in, W_gate [d_model, d_mlp]; W_out [d_mlp, d_model]. ``hook_pre`` is what the activation function reads
    (the gate's value where there is a gate), ``hook_pre_linear`` the gated factor, both before ``apply_gate`` bounds
    them, ``hook_post`` what W_out reads, each [batch, pos, d_mlp].

    Sources: Vaswani et al. 2017, equation 2; ``apply_gate`` for the gated forms.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.W_in = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
        self.W_out = nn.Parameter(torch.empty(cfg.d_mlp, cfg.d_model))
        self.b_in: Tensor | None = nn.Parameter(torch.zeros(cfg.d_mlp)) if cfg.use_mlp_bias else None
        self.b_out: Tensor | None = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.use_mlp_bias else None
        self.hook_pre = HookPoint()
        self.hook_post = HookPoint()
        if cfg.gated_mlp:
            self.W_gate = nn.Parameter(torch.empty(cfg.d_model, cfg.d_mlp))
            self.b_gate: Tensor | None = nn.Parameter(torch.zeros(cfg.d_mlp)) if cfg.use_mlp_bias else None
            self.hook_pre_linear = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        linear = nn.functional.linear(x, self.W_in.T, self.b_in)  # [batch, pos, d_mlp]
        if self.cfg.gated_mlp:
            pre = self.hook_pre(nn.functional.linear(x, self.W_gate.T, self.b_gate))
            post = apply_gate(pre, self.hook_pre_linear(linear), self.cfg)
        else:
            post = ACTIVATIONS[self.cfg.act_fn](self.hook_pre(linear))
        return nn.functional.linear(self.hook_post(post), self.W_out.T, self.b_out)
