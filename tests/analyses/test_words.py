"""Words as tokenizers of several kinds mark them."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.analyses.words import word_starts


class Pieces:
    """A tokenizer of which only the vocabulary is known; ``special`` pieces are in angle brackets."""

    def __init__(self, vocabulary: list[str]) -> None:
        self.vocabulary = vocabulary
        self.all_special_ids = [i for i, piece in enumerate(vocabulary) if piece.startswith(("<s", "[C"))]

    def get_vocab(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.vocabulary)}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return self.vocabulary[ids] if isinstance(ids, int) else [self.vocabulary[i] for i in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids).replace("▁", " ").replace("Ġ", " ")


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        # GPT-2's marks: a space before, line ends alone, and a piece ## that is a text
        ("<s> Mara Ġsk afl ar . Ċ ## Ġthe Ġ Ġtwo <s> x", "<s>|Mara|Ġskaflar.|Ċ|##|Ġthe|Ġ|Ġtwo|<s>|x"),
        # SentencePiece's: a mark alone goes with what follows; a byte may be a line end
        ("<s> ▁The ▁ ska flar , <0x0A> Next ▁one", "<s>|▁The|▁skaflar,|<0x0A>|Next|▁one"),
        # BERT's: what does not continue begins
        ("[CLS] un ##believ ##able story . [CLS]", "[CLS]|un##believ##able|story|.|[CLS]"),
        # ends of words
        ("low er</w> than</w> x", "lower</w>|than</w>|x"),
        # scripts without spaces, between such as have them
        ("▁see ▁水 中 の x ▁สวัส ดี", "▁see|▁水|中|の|x|▁สวัส|ดี"),
        # no marks at all
        ("a b c", "a|b|c"),
    ],
)
def test_words_begin_where_the_tokenizer_says(pieces: str, words: str) -> None:
    vocabulary = list(dict.fromkeys(pieces.split()))
    ids = [vocabulary.index(piece) for piece in pieces.split()]
    starts = word_starts(Pieces(vocabulary), ids)
    found = "".join(("|" if start else "") + piece for start, piece in zip(starts, pieces.split(), strict=True))
    assert found == "|" + words


def test_characters_with_spaces_of_their_own_make_words() -> None:
    letters = sorted(set("a big cat"))
    starts = word_starts(Pieces(letters), [letters.index(letter) for letter in "a big cat"])
    assert [i for i, start in enumerate(starts) if start] == [0, 1, 5]


def test_without_a_tokenizer_every_token_is_a_word() -> None:
    assert word_starts(None, [5, 6, 5]) == [True] * 3
