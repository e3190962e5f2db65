"""What kind of token each of a text is, by its characters."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analyses.running import Sequences

TOKEN_KINDS = ("first token", "special", "white space", "punctuation", "digits", "start of word", "rest of word")


def token_kinds(model: Any, sequences: Sequences) -> np.ndarray | None:
    """Index into TOKEN_KINDS of every token, int [sequence, pos], −1 for pads; None for a model without a tokenizer.

    The first token of a sequence is a kind of its own, whatever it is.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return None
    special = set(tokenizer.all_special_ids)
    ids = sequences.tokens[sequences.real].unique().tolist()
    kind_of = {i: TOKEN_KINDS.index("special" if i in special else _text_kind(tokenizer.decode([i]))) for i in ids}
    kinds = np.full(sequences.tokens.shape, -1)
    for row, (tokens, length) in enumerate(zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)):
        kinds[row, :length] = [kind_of[token] for token in tokens[:length]]
    kinds[:, 0] = TOKEN_KINDS.index("first token")
    return kinds


def _text_kind(text: str) -> str:
    if not text.strip():
        return "white space"
    if not any(character.isalnum() for character in text):
        return "punctuation"
    if text.strip().isdigit():
        return "digits"
    return "start of word" if text[0].isspace() else "rest of word"
