"""Tokens that are bytes, of every kind of tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workbench.analyses.token_texts import token_texts

TEXT = "a 字é😀 \n�\x00"


def byte_level() -> PreTrainedTokenizerFast:
    """A vocabulary of the 256 bytes, and one token that is a letter with the first byte of the next one."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a字")[0][0][:2]
    vocabulary = {piece: i for i, piece in enumerate([*bytes_, split])}
    backend = Tokenizer(models.BPE(vocabulary, [tuple(split)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_fallback() -> PreTrainedTokenizerFast:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, "�": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_bytes_of_a_split_character_are_told_apart(tokenizer: PreTrainedTokenizerFast) -> None:
    assert token_texts(tokenizer, tokenizer("字", add_special_tokens=False)["input_ids"]) == ["<E5>", "<AD>", "<97>"]
    for character in TEXT:
        written = character.encode()
        ids = tokenizer(character, add_special_tokens=False)["input_ids"]
        if len(ids) == len(written) > 1:
            assert token_texts(tokenizer, ids) == [f"<{byte:02X}>" for byte in written]


def test_letters_beside_a_split_character_stay_letters() -> None:
    tokenizer = byte_level()
    ids = tokenizer("a字", add_special_tokens=False)["input_ids"]
    assert token_texts(tokenizer, ids) == ["a<E5>", "<AD>", "<97>"]


def test_a_replacement_character_of_the_text_stays_one() -> None:
    tokenizer = byte_fallback()
    assert token_texts(tokenizer, [2, 3]) == ["a", "�"]


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    assert token_texts(None, [5, 0]) == ["#5", "#0"]
