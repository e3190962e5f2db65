"""What kind of token each of a text is, by its characters."""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.analyses.running import Sequences

TOKEN_KINDS = ("first token", "special", "white space", "punctuation", "digits", "start of word", "rest of word")
_SPACE = "▁"  # how SentencePiece writes it


def token_kinds(model: Any, sequences: Sequences) -> np.ndarray | None:
    """Index into TOKEN_KINDS of every token, int [sequence, pos], −1 for pads; None for a model without a tokenizer.

    The first token of a sequence is a kind of its own, whatever it is.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return None
    special = set(tokenizer.all_special_ids)
    ids = sequences.tokens[sequences.real].unique().tolist()
    mark = _continuation_mark(tokenizer)
    kind_of = {i: TOKEN_KINDS.index("special" if i in special else _text_kind(_text(tokenizer, i, mark))) for i in ids}
    kinds = np.full(sequences.tokens.shape, -1)
    for row, (tokens, length) in enumerate(zip(sequences.tokens.tolist(), sequences.lengths.tolist(), strict=True)):
        kinds[row, :length] = [kind_of[token] for token in tokens[:length]]
    kinds[:, 0] = TOKEN_KINDS.index("first token")
    return kinds


def _continuation_mark(tokenizer: Any) -> str:
    """What WordPiece writes before every token but the first of a word; empty for other tokenizers."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return str(getattr(model, "continuing_subword_prefix", "")) if type(model).__name__ == "WordPiece" else ""


def _text(tokenizer: Any, token: int, mark: str) -> str:
    """A token's text, with the space before a word: decoding a single token may take that away."""
    piece, text = str(tokenizer.convert_ids_to_tokens(token)), tokenizer.decode([token])
    if mark:
        return text.removeprefix(mark) if piece.startswith(mark) else f" {text}"
    return f" {text}" if piece.startswith(_SPACE) else text


def _text_kind(text: str) -> str:
    if not text.strip():
        return "white space"
    if not any(character.isalnum() for character in text):
        return "punctuation"
    if text.strip().isdigit():
        return "digits"
    return "start of word" if text[0].isspace() else "rest of word"
