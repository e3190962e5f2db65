"""One Transformer block: attention, perhaps cross-attention, and a feed-forward layer around the residual stream."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from workbench.components.attention import Attention
from workbench.components.heads import at_rows
from workbench.components.linear_attention import LinearAttention
from workbench.components.mlp import MLP
from workbench.components.moe import MoE
from workbench.components.norms import Norm
from workbench.config import AttentionType, TransformerConfig
from workbench.context import AttentionContext, Contexts
from workbench.hooks import HookPoint, ReadOnlyHookPoint, fresh


class Block(nn.Module):
    """Sublayers f in turn, by ``norm_placement``:

    - "pre": x + f(ln(x)) (Xiong et al. 2020)
    - "post": ln(x + f(x)) (Vaswani et al. 2017, section 3.1)
    - "sandwich": x + ln_post(f(ln(x))) (Gemma 2)
    - "output": x + ln_post(f(x)) (OLMo 2)
    - with ``parallel_attn_mlp``: x + attn(ln1(x)) + mlp(ln2(x)), where one norm may serve both (GPT-J, GPT-NeoX)

    ``hook_attn_out`` and ``hook_mlp_out`` are exactly what is added to the stream, except that a post-norm block
    normalises the sum: resid_mid = ln1(resid_pre + attn_out), resid_post = ln2(resid_mid + mlp_out). A parallel block
    has no hook_resid_mid. Every hook is [batch, pos, d_model].
    """

    # transformer_lens' logit lens asks whether hook_resid_post is the stream that the model unembeds.
    hook_out_is_single_residual_stream = True

    def __init__(
        self, cfg: TransformerConfig, layer: int, attn_type: AttentionType = "global", *, reads_encoder: bool = False
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.attn_type: AttentionType = attn_type
        placement = cfg.norm_placement
        self.attn = LinearAttention(cfg, layer) if attn_type == "linear" else Attention(cfg, layer)
        self.mlp = MoE(cfg) if cfg.has_experts(layer) else MLP(cfg)
        if placement != "output":
            self.ln1 = Norm(cfg)
            if not cfg.shared_parallel_norm:
                self.ln2 = Norm(cfg)
        if placement in ("sandwich", "output"):
            self.ln1_post, self.ln2_post = Norm(cfg), Norm(cfg)
        self.hook_resid_pre, self.hook_resid_post = HookPoint(), HookPoint()
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()
        if not cfg.parallel_attn_mlp:
            self.hook_resid_mid = HookPoint()
        self.reads_encoder = reads_encoder
        if reads_encoder:
            self.ln_cross, self.cross_attn = Norm(cfg), Attention(cfg, layer, cross=True)
            self.hook_cross_attn_out, self.hook_resid_cross = HookPoint(), HookPoint()

    def forward(
        self, residual: Tensor, contexts: Contexts, *, rows: Tensor | None = None, z: Tensor | None = None
    ) -> Tensor:
        """The stream [batch, pos, d_model] that enters → the one that leaves.

        With ``rows``, int64 [batch, row], it returns those positions alone, [batch, row, d_model], and what lies behind
        attn.hook_z runs at no others, unless somebody listens there. With ``z``, [batch, pos, n_heads, d_head], no
        attention runs: it is what enters attn.hook_z.
        """
        narrow = None if rows is None or self._listens_behind_z() else rows
        resid_pre = self.hook_resid_pre(residual)
        inputs = self.attention_inputs(resid_pre)
        if z is None:
            attn_out = self.attn(*inputs, contexts.of(self.attn_type), rows=narrow)
        else:
            attn_out = self.attn.out(self.attn.hook_z(z), narrow)
        if narrow is not None:
            return self._after_attention(at_rows(resid_pre, narrow), at_rows(inputs[0], narrow), attn_out, contexts)
        resid_post = self._after_attention(resid_pre, inputs[0], attn_out, contexts)
        return resid_post if rows is None else at_rows(resid_post, rows)

    def _after_attention(self, resid_pre: Tensor, normed: Tensor, attn_out: Tensor, contexts: Contexts) -> Tensor:
        """The stream behind this block; ``normed`` is what queries were projected from.

        Each position depends on its own values alone, unless an encoder is read.
        """
        if self.cfg.parallel_attn_mlp:
            shares_norm = self.cfg.shared_parallel_norm and not self.cfg.use_split_qkv_input
            mlp_input = normed if shares_norm else getattr(self, self._mlp_norm)(resid_pre)
            attn_out = self.hook_attn_out(self._dropped(attn_out))
            return self.hook_resid_post(resid_pre + attn_out + self.hook_mlp_out(self._dropped(self.mlp(mlp_input))))
        stream = self.hook_resid_mid(self._add(resid_pre, attn_out, self.hook_attn_out, "ln1"))
        if self.reads_encoder:
            stream = self._cross_attend(stream, contexts.cross)
        mlp_out = self.mlp(stream if self._reads_raw else self.ln2(stream))
        return self.hook_resid_post(self._add(stream, mlp_out, self.hook_mlp_out, "ln2"))

    def _listens_behind_z(self) -> bool:
        """Whether anything reads or edits what this block computes behind attn.hook_z; ln1 may be in front of it."""
        for name, point in self.named_modules():
            in_front = name == "hook_resid_pre" or (name.startswith("attn.") and name != "attn.hook_result")
            if not in_front and isinstance(point, (HookPoint, ReadOnlyHookPoint)) and point.has_hooks():
                return True
        return False

    def attention_inputs(self, resid_pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are projected from: [batch, pos, d_model], or a copy for each head."""
        norm: Callable[[Tensor], Tensor] = nn.Identity() if self._reads_raw else self.ln1
        if not self.cfg.use_split_qkv_input:
            return (norm(resid_pre),) * 3
        heads, kv_heads = self.cfg.n_heads, self.cfg.n_key_value_heads
        return (
            norm(self.attn.hook_q_input(fresh(resid_pre, heads))),
            norm(self.attn.hook_k_input(fresh(resid_pre, kv_heads))),
            norm(self.attn.hook_v_input(fresh(resid_pre, kv_heads))),
        )

    @property
    def _mlp_norm(self) -> str:
        return "ln1" if self.cfg.shared_parallel_norm else "ln2"

    @property
    def _reads_raw(self) -> bool:
        """Whether sublayers read the stream itself."""
        return self.cfg.norm_placement in ("post", "output")

    def _cross_attend(self, stream: Tensor, context: AttentionContext) -> Tensor:
        query_input = stream if self._reads_raw else self.ln_cross(stream)
        out = self.cross_attn(query_input, context.memory, context.memory, context)
        return self.hook_resid_cross(self._add(stream, out, self.hook_cross_attn_out, "ln_cross"))

    def _add(self, stream: Tensor, out: Tensor, hook: HookPoint, norm: str) -> Tensor:
        """The stream after a sublayer's output, whose norm is called ``norm`` or, on the output, ``norm`` + "_post"."""
        if self.cfg.norm_placement in ("sandwich", "output"):
            out = getattr(self, f"{norm}_post")(out)
        added = stream + hook(self._dropped(out))
        return getattr(self, norm)(added) if self.cfg.norm_placement == "post" else added

    def _dropped(self, out: Tensor) -> Tensor:
        """Dropout where the original Transformer has it, in training mode alone (Vaswani et al. 2017, section 5.4)."""
        return nn.functional.dropout(out, self.cfg.dropout, self.training)
