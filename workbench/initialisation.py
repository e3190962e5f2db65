"""How weights begin, for each family's way of training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from workbench.config import InitMode, TransformerConfig

Draw = Callable[[Tensor, str, TransformerConfig], None]


@torch.no_grad()
def initialise(model: nn.Module, cfg: TransformerConfig) -> None:
    """Draws every matrix of a model by ``cfg.init_mode``; biases, gains and sink logits keep their constants."""
    draw = _MODES[cfg.init_mode]
    for name, parameter in model.named_parameters():
        # Without memory there is nothing to draw, and torch would import its compiler for it.
        if parameter.dim() > 1 and not parameter.is_meta and not _kind(name).startswith("b_"):
            draw(parameter, _kind(name), cfg)


def _gpt2(weight: Tensor, kind: str, cfg: TransformerConfig) -> None:
    """Normal; what writes into the residual stream is divided by sqrt(2 · n_layers). Radford et al. 2019, 2.3."""
    writes = kind in ("W_O", "W_out")
    nn.init.normal_(weight, std=cfg.initializer_range / ((2 * cfg.n_layers) ** 0.5 if writes else 1))


def _normal(weight: Tensor, kind: str, cfg: TransformerConfig) -> None:
    """Normal, the same for all. Devlin et al. 2019 (BERT's code)."""
    nn.init.normal_(weight, std=cfg.initializer_range)


def _xavier(weight: Tensor, kind: str, cfg: TransformerConfig) -> None:
    """Uniform in ± sqrt(6 / (inputs + outputs)) of the whole matrix; embeddings normal with 1 / sqrt(d_model).

    Glorot & Bengio 2010, equation 16, as the original Transformer's code has it.
    """
    if kind in _TABLES:
        nn.init.normal_(weight, std=cfg.d_model**-0.5)
    else:
        nn.init.uniform_(weight, -1, 1).mul_((6 / sum(_fans(weight, kind))) ** 0.5)


def _t5(weight: Tensor, kind: str, cfg: TransformerConfig) -> None:
    """Normal with 1 / sqrt(inputs), W_Q by a further 1 / sqrt(d_head), as T5 does not scale its scores; embeddings 1.

    ``initializer_range`` is a factor on all of them (T5's is 1). Raffel et al. 2020 (the code of the release).
    """
    if kind in ("W_E", "W_U"):
        std = 1.0
    elif kind == "W_rel":
        std = cfg.d_model**-0.5
    else:
        std = _fans(weight, kind)[0] ** -0.5 * (cfg.d_head**-0.5 if kind == "W_Q" else 1)
    nn.init.normal_(weight, std=cfg.initializer_range * std)


_MODES: dict[InitMode, Draw] = {"gpt2": _gpt2, "normal": _normal, "xavier": _xavier, "t5": _t5}
_TABLES = ("W_E", "W_pos", "W_seg", "W_rel", "W_U")


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _fans(weight: Tensor, kind: str) -> tuple[int, int]:
    """The inputs and outputs of a matrix, all heads taken together; experts are matrices of their own."""
    if kind in ("W_Q", "W_K", "W_V"):  # [head, d_model, d_head]
        return weight.shape[1], weight.shape[0] * weight.shape[2]
    if kind == "W_O":  # [head, d_head, d_model]
        return weight.shape[0] * weight.shape[1], weight.shape[2]
    return weight.shape[-2], weight.shape[-1]
