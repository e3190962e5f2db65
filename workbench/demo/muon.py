"""The optimiser of the demo model's matrices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is the nearest orthogonal matrix, so that every direction of a weight learns equally fast.

    Parameters [..., rows, columns]; leading axes such as heads are matrices of their own. Source: Jordan et al. 2024,
    "Muon: an optimizer for hidden layers in neural networks". ``torch.optim.Muon`` takes single matrices only.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing here evaluates the loss again
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])  # Nesterov's look-ahead
                parameter.add_(orthogonalised(update), alpha=-group["lr"])


def orthogonalised(matrices: Tensor, n_steps: int = 5) -> Tensor:
    """Pushes the singular values of [..., rows, columns] towards 1 (between about 0.7 and 1.2).

    Newton–Schulz iteration with the quintic of Jordan et al., which needs products only.
    """
    x = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(n_steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x if matrices.shape[-2] <= matrices.shape[-1] else x.mT
