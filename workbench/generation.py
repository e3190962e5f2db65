"""Continuing a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.tokens import check_tokens


class GenerationMethods:
    """Text generation on a model's forward pass."""

    @torch.no_grad()
    def generate(
        self: Any,
        input: str | Sequence[str] | Tensor,
        max_new_tokens: int = 20,
        *,
        attention_mask: Tensor | None = None,
        stop_at_eos: bool = True,
        prepend_bos: bool | None = None,
    ) -> Any:
        """Continues each prompt greedily: the most likely token, ties to the lowest id. Hooks fire at every step.

        Each step runs the whole sequence, so hooks see it whole. A batch is padded on the left, and a row that has
        ended with EOS is filled up with EOS.

        Args:
            input: text, several texts, or tokens [batch, pos] (left-padded ones with their ``attention_mask``).
            max_new_tokens: at most so many are added; fewer when every row has ended.

        Returns:
            Prompt and continuation as text, a list of texts, or tokens [batch, pos + new], as the input was.

        Raises:
            ValueError: a prompt that leaves no room in the context for ``max_new_tokens``.
        """
        if isinstance(input, Tensor):
            tokens = check_tokens(input, self.cfg).to(self.cfg.device)
            real = self._real_tokens(attention_mask, tuple(tokens.shape))
            mask = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
            if not bool(mask[:, -1].all()):
                raise ValueError("generate continues the last token of each row, so pads belong on the left")
        else:
            tokens, mask = self.to_tokens(
                input, prepend_bos=prepend_bos, padding_side="left", return_attention_mask=True
            )
        longest = int(mask.sum(dim=1).max())
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1 or longest + max_new_tokens > self.cfg.n_ctx:
            raise ValueError(
                f"max_new_tokens must be between 1 and {self.cfg.n_ctx - longest}, which is what the context of "
                f"{self.cfg.n_ctx} leaves after a prompt of {longest} tokens; got {max_new_tokens!r}"
            )
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None and stop_at_eos else None
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        for _ in range(max_new_tokens):
            logits = self(tokens, attention_mask=mask)  # [batch, pos, d_vocab]
            next_tokens = logits[:, -1].argmax(dim=-1)
            if eos is not None:
                next_tokens = torch.where(ended, eos, next_tokens)
                ended |= next_tokens == eos
            tokens = torch.cat((tokens, next_tokens[:, None]), dim=1)
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            if bool(ended.all()):
                break
        if isinstance(input, Tensor):
            return tokens
        texts = [
            self.tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(tokens, mask, strict=True)
        ]
        return texts[0] if isinstance(input, str) else texts
