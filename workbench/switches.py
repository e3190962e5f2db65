"""What of a loaded model's configuration can be changed, in all of its parts at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn

from workbench.components.block import Block
from workbench.components.heads import HeadWeights
from workbench.config import AttentionBackend, TransformerConfig


class SwitchMethods(nn.Module):
    """Setters of the model; its device and type follow its weights."""

    cfg: TransformerConfig
    embed: Any

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Switches attn.hook_result [batch, pos, n_heads, d_model] on or off."""
        self._reconfigure(use_attn_result=use_attn_result)

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Switches attn.hook_q_input, hook_k_input and hook_v_input [batch, pos, head, d_model] on or off.

        While it is on, ln1's hooks fire once for each of the three, with a head axis.
        """
        self._reconfigure(use_split_qkv_input=use_split_qkv_input)

    def set_attention_backend(self, attention_backend: AttentionBackend) -> None:
        """Chooses "auto" (materialise where a hook needs it), "flash" (never) or "materialised" (always)."""
        self._reconfigure(attention_backend=attention_backend)

    def set_attn_temperature(self, attn_temperature: float) -> None:
        """Divides all attention scores by a number: below 1 attention is sharper than trained, above it flatter."""
        self._reconfigure(attn_temperature=attn_temperature)

    def _reconfigure(self, **changes: Any) -> None:
        cfg = dataclasses.replace(self.cfg, **changes)
        for module in self.modules():
            if isinstance(module, (SwitchMethods, Block, HeadWeights)):
                module.cfg = cfg

    def _apply(self, fn: Callable, recurse: bool = True) -> SwitchMethods:
        """What to(), half(), double() and cuda() come down to; the configuration's device and dtype follow."""
        super()._apply(fn, recurse)
        weight = self.embed.W_E
        if (weight.device, weight.dtype) != (self.cfg.device, self.cfg.dtype):
            self._reconfigure(device=weight.device, dtype=weight.dtype)
        return self
