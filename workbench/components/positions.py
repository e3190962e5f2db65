"""Positions as pure functions of position ids."""

from __future__ import annotations

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosine and sine, each [batch, pos, d_head]


def rotary_tables(position_ids: Tensor, d_head: int, base: float, dtype: torch.dtype) -> Rotation:
    """Cosine and sine of the angles m · base^(−2i / d_head), each [batch, pos, d_head].

    Dimension i is paired with i + d_head / 2 (the half-split layout of Llama checkpoints), so both halves of the
    table are equal. Frequencies and angles are float32 as in the models' reference implementations: at position
    4,000 a wider type would differ from what the weights were trained with by 1e-4 rad.

    Source: Su et al. 2021, equation 15 (equation 34 for the element-wise form).
    """
    exponents = torch.arange(0, d_head, 2, dtype=torch.float32, device=position_ids.device) / d_head
    frequencies = 1.0 / base**exponents  # [d_head / 2]
    angles = position_ids[..., None].float() * frequencies  # [batch, pos, d_head / 2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates each pair of dimensions of x [batch, pos, head, d_head] by its position's angle; the type stays x's.

    Under torch.autocast x is narrower than the tables; q and k then keep the type of v, as attention wants it.
    """
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cosine[:, :, None] + turned * sine[:, :, None]).to(x.dtype)
