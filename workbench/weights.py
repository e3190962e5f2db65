"""Weights under TransformerLens' names: stacked over layers, and as directions of the residual stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PER_LAYER = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"), "attn"),
    **dict.fromkeys(("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out"), "mlp"),
}


class WeightViews:
    """``model.W_Q`` [layer, n_heads, d_model, d_head] and so on; ``W_E``, ``W_pos``, ``W_U``, ``b_U``."""

    def __getattr__(self: Any, name: str) -> Any:
        if name in _PER_LAYER:
            weights = [getattr(getattr(block, _PER_LAYER[name]), name, None) for block in self.blocks]
            present = [weight for weight in weights if weight is not None]
            if len(present) < len(weights):
                raise AttributeError(f"this model has no {name}; its configuration leaves it out")
            if len({weight.shape for weight in present}) > 1:  # some layers have experts
                raise AttributeError(f"{name} differs in shape from layer to layer; take it from model.blocks")
            return torch.stack(present)
        return super().__getattr__(name)  # type: ignore[misc]

    @property
    def W_E(self: Any) -> Tensor:
        """[d_vocab, d_model]"""
        return self.embed.W_E

    @property
    def W_pos(self: Any) -> Tensor:
        """[n_ctx, d_model]; AttributeError without learned positions."""
        return self.pos_embed.W_pos

    @property
    def W_U(self: Any) -> Tensor:
        """[d_model, d_vocab]"""
        return self.unembed.W_U

    @property
    def b_U(self: Any) -> Tensor:
        """[d_vocab]; zeros where the model has none."""
        return self.W_U.new_zeros(self.cfg.d_vocab) if self.unembed.b_U is None else self.unembed.b_U

    def tokens_to_residual_directions(self: Any, tokens: str | int | Tensor) -> Tensor:
        """The direction of the *normalised* residual stream that raises each token's logit, tokens.shape + [d_model].

        The final norm's gain is in it: x̂ · direction, summed over the parts of x̂, plus ``logit_bias`` is the logit,
        before ``output_logits_soft_cap`` where there is one.

        Raises:
            ValueError: a head that is not linear in the stream.
        """
        if self.cfg.use_mlm_head:
            raise ValueError(
                "the masked-LM head is not linear in the residual stream, so no direction stands for a token"
            )
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        directions = self.W_U.T[tokens] * self.cfg.logit_scale
        return directions * self.ln_final.gain if self.cfg.has_final_norm else directions

    def logit_bias(self: Any, tokens: int | Tensor) -> Tensor:
        """What the logit of each token gets from no part of the stream: the final norm's bias and b_U; tokens.shape."""
        bias = self.b_U[tokens]
        if not self.cfg.has_final_norm or self.ln_final.b is None:
            return bias
        return bias + self.cfg.logit_scale * (self.W_U.T[tokens] @ self.ln_final.b)

    def accumulated_bias(self: Any, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """Σ of the biases b_O (and b_out) that the layers before ``layer`` wrote to the stream, [d_model].

        ``mlp_input`` adds the attention bias of ``layer`` itself. What a norm on a sublayer's output makes of its bias
        depends on the input, and so does which expert's bias is written.

        Raises:
            ValueError: such norms, or the biases of experts.
        """
        if self.cfg.norm_placement != "pre":
            raise ValueError(
                f"with norm_placement {self.cfg.norm_placement!r} no sublayer writes its bias to the stream as it is"
            )
        if include_mlp_biases and self.cfg.moe is not None and self.cfg.use_mlp_bias:
            raise ValueError("which expert's bias is written depends on the input; pass include_mlp_biases=False")
        total = torch.zeros(self.cfg.d_model, device=self.cfg.device, dtype=self.cfg.dtype)
        for block in self.blocks[:layer]:
            written = (block.attn.b_O, block.mlp.b_out if include_mlp_biases else None)
            total = sum((bias for bias in written if bias is not None), start=total)
        if mlp_input and (bias := self.blocks[layer].attn.b_O) is not None:
            total = total + bias
        return total
