"""Rows of tokens to train on: texts that share a world, and between them random tokens that come back."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from workbench.demo import corpus

LONGEST_SEGMENT = 80
LONGEST_REPEAT = 200  # tokens after which no further copy begins


def training_batch(
    tokenizer: Any, step: int, *, n_rows: int, length: int, random_share: float, seed: int = 0
) -> Tensor:
    """The rows of one training step, int64 [n_rows, length]. The same arguments give the same rows."""
    return torch.tensor(
        [training_row(tokenizer, f"{seed}.{step}.{row}", length, random_share) for row in range(n_rows)]
    )


def training_row(tokenizer: Any, seed: str, length: int, random_share: float) -> list[int]:
    """BOS, then pieces that each end with EOS, cut at ``length`` tokens.

    ``random_share`` of the pieces are repeated random tokens, the others texts.
    """
    rng, texts = random.Random(f"row {seed}"), corpus.page(seed)
    row = [tokenizer.bos_token_id]
    while len(row) < length:
        if rng.random() < random_share:
            row += repeated_tokens(rng, ordinary_tokens(tokenizer))
        else:
            row += tokenizer.encode(next(texts), add_special_tokens=False)
        row.append(tokenizer.eos_token_id)
    return row[:length]


def ordinary_tokens(tokenizer: Any) -> list[int]:
    """Every token but the special ones."""
    special = set(tokenizer.all_special_ids)
    return [token for token in range(len(tokenizer)) if token not in special]


def repeated_tokens(rng: random.Random, alphabet: list[int]) -> list[int]:
    """A random segment and copies of it, whole or from some token on, with other random tokens between them.

    The segment's length, the gaps and the number of different tokens are drawn anew each time, so neither a fixed
    distance nor the tokens alone predict what comes next.
    """
    pool = rng.sample(alphabet, _log_uniform(rng, 4, len(alphabet)))
    segment = rng.choices(pool, k=_log_uniform(rng, 4, LONGEST_SEGMENT))
    tokens = list(segment)
    while len(tokens) < 1.6 * len(segment) or (len(tokens) < LONGEST_REPEAT and rng.random() < 0.6):
        tokens += rng.choices(pool, k=rng.choice((0, 0, rng.randint(1, 12))))
        tokens += segment[rng.choice((0, 0, rng.randrange(len(segment)))) :]
    return tokens


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))
