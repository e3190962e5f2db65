"""Which tokens make a word, by the marks that tokenizers themselves put on their pieces."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.analyses.token_texts import token_texts

# What a byte-level vocabulary writes for a space, a line end, a tab and a return; and what SentencePiece does.
_SPACES = {"Ġ": " ", "Ċ": "\n", "ĉ": "\t", "č": "\r", "▁": " ", "<0x0A>": "\n", "<0x0D>": "\r", "<0x09>": "\t"}
_CONTINUES, _ENDS = "##", "</w>"
_WITHOUT_SPACES = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")


def word_starts(tokenizer: Any, ids: Sequence[int]) -> list[bool]:
    """Whether a word begins with each token; the first always begins one.

    A vocabulary that marks spaces (Ġ, ▁, or the space itself) begins a word with each, so that punctuation stays with
    the word before it; line ends and special tokens are words of their own, and so is every token of a script that
    writes no spaces. One that marks continuations (##) or ends (</w>) begins a word wherever it marks neither. Of any
    other vocabulary, and without a tokenizer, every token is a word.
    """
    if tokenizer is None:
        return [True] * len(ids)
    mark = _mark(tokenizer.get_vocab())
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(list(ids))]
    special = [i in set(tokenizer.all_special_ids) for i in ids]
    if mark == "space":
        spaced = [_with_spaces(piece) for piece in pieces]
        texts = [text.strip() for text in token_texts(tokenizer, ids)]
        begins = [text[:1].isspace() or _writes_no_spaces(shown[:1]) for text, shown in zip(spaced, texts, strict=True)]
        after = [
            text.endswith(("\n", "\r")) or _writes_no_spaces(shown[-1:])
            for text, shown in zip(spaced, texts, strict=True)
        ]
    elif mark == _CONTINUES:
        begins, after = [not piece.startswith(_CONTINUES) for piece in pieces], [False] * len(pieces)
    elif mark == _ENDS:
        begins, after = [False] * len(pieces), [piece.endswith(_ENDS) for piece in pieces]
    else:
        return [True] * len(ids)
    return [
        place == 0 or begins[place] or after[place - 1] or special[place] or special[place - 1]
        for place in range(len(ids))
    ]


def _mark(vocabulary: Iterable[str]) -> str | None:
    """What most pieces of a vocabulary mark: spaces before them, that they continue a word, or that they end one.

    Counted, because each mark is also a text: GPT-2 has a piece ``##``, and Maltese a letter Ġ.
    """
    counts = {"space": 0, _CONTINUES: 0, _ENDS: 0}
    for piece in vocabulary:
        counts["space"] += piece[:1] in ("Ġ", "▁", " ")
        counts[_CONTINUES] += piece.startswith(_CONTINUES) and len(piece) > 2 and piece[2] != "#"
        counts[_ENDS] += piece.endswith(_ENDS)
    most = max(counts, key=lambda mark: counts[mark])
    return most if counts[most] else None


def _with_spaces(piece: str) -> str:
    return _SPACES.get(piece) or "".join(_SPACES.get(sign, sign) for sign in piece)


def _writes_no_spaces(sign: str) -> bool:
    return bool(sign) and unicodedata.name(sign, "").startswith(_WITHOUT_SPACES)
