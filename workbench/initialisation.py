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
            draw(parameter, name, cfg)


def _gpt2(weight: Tensor, name: str, cfg: TransformerConfig) -> None:
    """Normal with initializer_range; what writes to the stream is divided by the root of how many do in its stack.

    That is sqrt(2 · n_layers), with cross-attention sqrt(3 · n_layers). Radford et al. 2019, section 2.3.
    """
    std = cfg.initializer_range
    if _kind(name) in ("W_O", "W_out"):
        std /= _n_writers(name, cfg) ** 0.5
    nn.init.normal_(weight, std=std)


def _normal(weight: Tensor, name: str, cfg: TransformerConfig) -> None:
    """Normal with initializer_range, the same for all. Devlin et al. 2019 (BERT's code)."""
    nn.init.normal_(weight, std=cfg.initializer_range)


def _xavier(weight: Tensor, name: str, cfg: TransformerConfig) -> None:
    """Uniform in ± sqrt(6 / (inputs + outputs)) of the whole matrix; embeddings normal with 1 / sqrt(d_model).

    Glorot & Bengio 2010, equation 16, as the original Transformer's code has it.
    """
    kind = _kind(name)
    if kind in (*_EMBEDDINGS, "W_rel"):
        nn.init.normal_(weight, std=cfg.d_model**-0.5)
    else:
        nn.init.uniform_(weight, -1, 1).mul_((6 / sum(_fans(weight, kind))) ** 0.5)


def _t5(weight: Tensor, name: str, cfg: TransformerConfig) -> None:
    """Normal with 1 / sqrt(inputs), W_Q by a further 1 / sqrt(d_head), as T5 does not scale its scores; embeddings 1.

    ``initializer_range`` is a factor on all of them (T5's is 1). Raffel et al. 2020 (the code of the release).
    """
    kind = _kind(name)
    if kind in _EMBEDDINGS:
        std = 1.0
    elif kind == "W_rel":
        std = cfg.d_model**-0.5
    else:
        std = _fans(weight, kind)[0] ** -0.5 * (cfg.d_head**-0.5 if kind == "W_Q" else 1)
    nn.init.normal_(weight, std=cfg.initializer_range * std)


_MODES: dict[InitMode, Draw] = {"gpt2": _gpt2, "normal": _normal, "xavier": _xavier, "t5": _t5}
_EMBEDDINGS = ("W_E", "W_pos", "W_seg", "W_U")


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _n_writers(name: str, cfg: TransformerConfig) -> int:
    """How many sublayers write to the stream to which the parameter's stack adds."""
    if name.startswith("encoder_blocks."):
        return 2 * (cfg.n_encoder_layers or 0)
    return (2 if cfg.n_encoder_layers is None else 3) * cfg.n_layers


def _fans(weight: Tensor, kind: str) -> tuple[int, int]:
    """The inputs and outputs of a matrix, all heads taken together; experts are matrices of their own."""
    if kind in ("W_Q", "W_K", "W_V"):  # [head, d_model, d_head]
        return weight.shape[1], weight.shape[0] * weight.shape[2]
    if kind == "W_O":  # [head, d_head, d_model]
        return weight.shape[0] * weight.shape[1], weight.shape[2]
    return weight.shape[-2], weight.shape[-1]
