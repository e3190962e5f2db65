"""Continuing a prompt, one token at a time on a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.kv_cache import KVCache
from workbench.tokens import check_tokens

Forward = Callable[..., Tensor]  # (tokens [batch, pos], attention_mask=…, kv_cache=…) → logits [batch, pos, d_vocab]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits.

    Args:
        temperature: 0 takes the most likely token, ties to the lowest id; above, logits are divided by it.
        top_k: only the k most likely tokens (Fan et al. 2018), and those as likely as the k-th.
        top_p: only the most likely tokens that together reach this probability (Holtzman et al. 2020), after ``top_k``.
        seed: of the draws; None takes torch's present state.

    Raises:
        ValueError: a value outside its range, or a filter or seed where nothing is drawn.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (the most likely token) or a positive number, got {self.temperature}"
            )
        if self.top_k is not None and (not _is_whole(self.top_k) or self.top_k < 1):
            raise ValueError(f"top_k must be a positive integer or None, got {self.top_k!r}")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, or None, got {self.top_p!r}")
        if self.seed is not None and (not _is_whole(self.seed) or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed must be a whole number from 0 up, or None, got {self.seed!r}")
        given = [name for name in ("top_k", "top_p", "seed") if getattr(self, name) is not None]
        if given and self.temperature == 0:
            raise ValueError(f"{given[0]} has no effect at temperature 0, which draws nothing; set temperature=1.0")

    def probabilities(self, logits: Tensor) -> Tensor:
        """What the next token is drawn from: logits [batch, d_vocab] → float64 shares of 1 [batch, d_vocab]."""
        if self.temperature == 0:
            return nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
        wide = logits.double()
        scaled = (wide - wide.amax(dim=-1, keepdim=True)) / self.temperature  # at most 0: nothing overflows
        if self.top_k is not None:
            kth = wide.topk(min(self.top_k, wide.shape[-1])).values[:, -1:]
            scaled = scaled.masked_fill(wide < kth, -torch.inf)
        probabilities = scaled.softmax(dim=-1)
        if self.top_p is not None:
            ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
            more_likely = ranked.cumsum(dim=-1) - ranked
            dropped = torch.zeros_like(ranked, dtype=torch.bool).scatter(-1, order, more_likely >= self.top_p)
            probabilities = probabilities.masked_fill(dropped, 0)
        return probabilities / probabilities.sum(dim=-1, keepdim=True)

    def chooser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """A function from logits [batch, d_vocab] to token ids [batch], with draws of its own."""
        if self.temperature == 0:
            return lambda logits: logits.argmax(dim=-1)
        generator = None if self.seed is None else torch.Generator(device).manual_seed(self.seed)
        return lambda logits: torch.multinomial(self.probabilities(logits), 1, generator=generator)[:, 0]


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
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        kv_cache: KVCache | None = None,
    ) -> Any:
        """Continues each prompt. Greedy by default; a positive ``temperature`` draws.

        The model reads the prompt at once and then one token at a time. Hooks fire at every step, on the new tokens;
        ``hook.position_ids`` tells where they stand. A batch is padded on the left, and a row that has ended with EOS
        is filled up with EOS.

        Args:
            input: text, several texts, or tokens [batch, pos] (left-padded ones with their ``attention_mask``).
            max_new_tokens: at most so many are added; fewer when every row has ended.
            temperature: 0 takes the most likely token; above, logits are divided by it and a token is drawn.
            top_k: draws only from the k most likely tokens.
            top_p: draws only from the most likely tokens that together reach this probability.
            seed: of the draws; None takes torch's present state.
            kv_cache: an empty cache, whose policy says what is remembered; by default everything is.

        Returns:
            Prompt and continuation as text, a list of texts, or tokens [batch, pos + new], as the input was.

        Raises:
            ValueError: a prompt that leaves no room in the context for ``max_new_tokens``, or an argument that does
                not fit.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        if self.cfg.attention_dir != "causal":
            raise ValueError(f"{self.cfg.model_name} is bidirectional, and generation needs a causal model")
        if isinstance(input, Tensor):
            if prepend_bos is not None:
                raise ValueError("prepend_bos applies to text; the input is already tokens")
            tokens = check_tokens(input, self.cfg).to(self.cfg.device)
            real = self._real_tokens(attention_mask, tuple(tokens.shape))
            mask = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
            if not bool(mask[:, -1].all()):
                raise ValueError("generate continues the last token of each row, so pads belong on the left")
        else:
            if attention_mask is not None:
                raise ValueError("text is padded and masked by the model; leave attention_mask out, or pass tokens")
            tokens, mask = self.to_tokens(
                input, prepend_bos=prepend_bos, padding_side="left", return_attention_mask=True
            )
        tokens, mask = self._continue(self, tokens, mask, max_new_tokens, sampling, stop_at_eos, kv_cache)
        if isinstance(input, Tensor):
            return tokens
        texts = [
            self.tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(tokens, mask, strict=True)
        ]
        return texts[0] if isinstance(input, str) else texts

    def _continue(
        self: Any, forward: Forward, tokens: Tensor, mask: Tensor, max_new_tokens: int, sampling: Sampling,
        stop_at_eos: bool, kv_cache: KVCache | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Adds up to ``max_new_tokens`` columns to tokens and mask [batch, pos]."""
        if kv_cache is not None and (not isinstance(kv_cache, KVCache) or len(kv_cache)):
            raise ValueError("kv_cache must be an empty workbench.KVCache, which says what generation remembers")
        cache = KVCache() if kv_cache is None else kv_cache
        self._check_room(int(mask.sum(dim=1).max()), max_new_tokens, cache)
        eos = self.tokenizer.eos_token_id if self.tokenizer is not None and stop_at_eos else None
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        choose = sampling.chooser(tokens.device)
        scaling, n_read = self.cfg.rope_scaling, 0
        for _ in range(max_new_tokens):
            before, after = cache.length(), cache.length(mask[:, n_read:])
            if n_read and scaling is not None and scaling.changes_between(before, after):
                # What it holds was rotated otherwise.
                cache, n_read = KVCache(cache.window, cache.n_sink_tokens, cache.sink_start), 0
            logits = forward(tokens[:, n_read:], attention_mask=mask[:, n_read:], kv_cache=cache)
            n_read = tokens.shape[1]
            if bool(logits[:, -1].isnan().any()):
                raise ValueError(
                    "the logits are not numbers: the weights hold NaN or infinity, or a hook's edit made them"
                )
            next_tokens = choose(logits[:, -1])
            if eos is not None:
                next_tokens = torch.where(ended, eos, next_tokens)
                ended |= next_tokens == eos
            tokens = torch.cat((tokens, next_tokens[:, None]), dim=1)
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            if bool(ended.all()):
                break
        return tokens, mask

    def _check_room(self: Any, longest: int, max_new_tokens: Any, cache: KVCache) -> None:
        n_ctx, absolute = self.cfg.n_ctx, self.cfg.positional_embedding_type in ("learned", "sinusoidal")
        if cache.window is not None and not absolute:
            if cache.window > n_ctx:
                raise ValueError(f"the kv_cache's window of {cache.window} exceeds the context of {n_ctx}; narrow it")
            if not _is_whole(max_new_tokens) or max_new_tokens < 1:
                raise ValueError(f"max_new_tokens must be a positive integer, got {max_new_tokens!r}")
        elif not _is_whole(max_new_tokens) or max_new_tokens < 1 or longest + max_new_tokens > n_ctx:
            raise ValueError(
                f"max_new_tokens must be between 1 and {n_ctx - longest}, which is what the context of "
                f"{n_ctx} leaves after a prompt of {longest} tokens; got {max_new_tokens!r}"
                + (f" (a window does not help: positions are {self.cfg.positional_embedding_type})" if absolute else "")
            )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
