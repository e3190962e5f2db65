"""What every kind of attention shares: the heads' weights, their projections and the sum of their results."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workbench.components.norms import Norm
from workbench.components.positions import Rotation, rotate
from workbench.config import TransformerConfig
from workbench.hooks import HookPoint


class HeadWeights(nn.Module):
    """Weights and hook points of n_heads query heads and n_key_value_heads key and value heads.

    W_Q [n_heads, d_model, d_head]; W_K, W_V [n_key_value_heads, d_model, d_head]; W_O [n_heads, d_head, d_model].
    Query head h reads key/value head h // (n_heads // n_key_value_heads) (Ainslie et al. 2023). With ``qk_norm``,
    ``q_norm`` and ``k_norm`` normalise q and k (Henry et al. 2020), within each head or across all of them.
    """

    def __init__(self, cfg: TransformerConfig, *, rotary: bool) -> None:
        super().__init__()
        self.cfg = cfg
        heads, kv_heads, bias = cfg.n_heads, cfg.n_key_value_heads, cfg.use_qkv_bias
        self.W_Q = nn.Parameter(torch.empty(heads, cfg.d_model, cfg.d_head))
        self.W_K = nn.Parameter(torch.empty(kv_heads, cfg.d_model, cfg.d_head))
        self.W_V = nn.Parameter(torch.empty(kv_heads, cfg.d_model, cfg.d_head))
        self.W_O = nn.Parameter(torch.empty(heads, cfg.d_head, cfg.d_model))
        self.b_Q: Tensor | None = nn.Parameter(torch.zeros(heads, cfg.d_head)) if bias else None
        self.b_K: Tensor | None = nn.Parameter(torch.zeros(kv_heads, cfg.d_head)) if bias else None
        self.b_V: Tensor | None = nn.Parameter(torch.zeros(kv_heads, cfg.d_head)) if bias else None
        self.b_O: Tensor | None = nn.Parameter(torch.zeros(cfg.d_model)) if cfg.use_attn_out_bias else None
        if cfg.qk_norm is not None:
            across = cfg.qk_norm == "across_heads"
            self.q_norm = Norm(cfg, cfg.d_head * (heads if across else 1))
            self.k_norm = Norm(cfg, cfg.d_head * (kv_heads if across else 1))

        self.hook_q_input, self.hook_k_input, self.hook_v_input = HookPoint(), HookPoint(), HookPoint()
        self.hook_q, self.hook_k, self.hook_v = HookPoint(), HookPoint(), HookPoint()
        if rotary:
            self.hook_rot_q, self.hook_rot_k = HookPoint(), HookPoint()
        self.hook_z, self.hook_result = HookPoint(), HookPoint()

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate(x, rotation, adjacent_pairs=self.cfg.rotary_adjacent_pairs)

    def _normalise(self, x: Tensor, norm: Norm) -> Tensor:
        """x [batch, pos, head, d_head], normalised within each head or across all of them; its type stays.

        Under torch.autocast x is narrower than the gain.
        """
        normalised = norm(x) if self.cfg.qk_norm == "per_head" else norm(x.flatten(2)).view_as(x)
        return normalised.to(x.dtype)

    def out(self, z: Tensor, rows: Tensor | None = None) -> Tensor:
        """Σ_heads z W_O + b_O: z [batch, pos, n_heads, d_head] → [batch, pos, d_model]; each head's part on request.

        ``rows`` int64 [batch, row] are the only positions that are made, None is all.
        """
        z = z if rows is None else at_rows(z, rows)
        if not self.cfg.use_attn_result:
            return mix_heads(z, self.W_O, self.b_O)
        result = self.hook_result(torch.einsum("bphe,hed->bphd", z, self.W_O))
        out = result.sum(dim=2)
        return out if self.b_O is None else out + self.b_O


def at_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values [batch, pos, …] at rows, int64 [batch, row] → [batch, row, …]."""
    rows = rows.to(values.device, torch.int64)
    return values[torch.arange(len(rows), device=rows.device)[:, None], rows]


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [batch, pos, (head,) d_model], weight [head, d_model, d_head] → [batch, pos, head, d_head]."""
    if x.dim() == 4:
        projected = torch.einsum("bphd,hde->bphe", x, weight)
        return projected if bias is None else projected + bias
    flat_bias = None if bias is None else bias.flatten()
    flat = nn.functional.linear(x, weight.transpose(1, 2).flatten(0, 1), flat_bias)
    return flat.unflatten(-1, (weight.shape[0], weight.shape[2]))


def mix_heads(z: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z [batch, pos, head, d_head], weight [head, d_head, d_model] → [batch, pos, d_model], the sum over heads."""
    return nn.functional.linear(z.flatten(2), weight.flatten(0, 1).T, bias)
