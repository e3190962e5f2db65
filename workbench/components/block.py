"""One pre-norm Transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from workbench.components.attention import Attention
from workbench.components.mlp import MLP
from workbench.components.norms import Norm
from workbench.config import TransformerConfig
from workbench.hooks import HookPoint, fresh
from workbench.statistics import AttentionContext


class Block(nn.Module):
    """resid_mid = resid_pre + attn(ln1(resid_pre)); resid_post = resid_mid + mlp(ln2(resid_mid)).

    Source: Xiong et al. 2020 (pre-norm placement). Every hook is [batch, pos, d_model].
    """

    # transformer_lens' logit lens asks whether hook_resid_post is the stream that the model unembeds.
    hook_out_is_single_residual_stream = True

    def __init__(self, cfg: TransformerConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.ln1, self.attn, self.ln2, self.mlp = Norm(cfg), Attention(cfg), Norm(cfg), MLP(cfg)
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()

    def forward(self, residual: Tensor, context: AttentionContext) -> Tensor:
        resid_pre = self.hook_resid_pre(residual)  # [batch, pos, d_model]
        if self.cfg.use_split_qkv_input:
            heads, kv_heads = self.cfg.n_heads, self.cfg.n_key_value_heads
            inputs = (
                self.ln1(self.attn.hook_q_input(fresh(resid_pre, heads))),
                self.ln1(self.attn.hook_k_input(fresh(resid_pre, kv_heads))),
                self.ln1(self.attn.hook_v_input(fresh(resid_pre, kv_heads))),
            )
        else:
            inputs = (self.ln1(resid_pre),) * 3
        resid_mid = self.hook_resid_mid(resid_pre + self.hook_attn_out(self.attn(*inputs, context)))
        return self.hook_resid_post(resid_mid + self.hook_mlp_out(self.mlp(self.ln2(resid_mid))))
