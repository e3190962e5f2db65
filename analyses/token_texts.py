"""What tokens are called where people read them."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any

# Byte-level BPE writes a byte that is no printable character of Latin-1 as one of the characters from 256 on, in order.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}


def token_texts(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """The text of each token; bytes that are a part of a character only are written as <E6>. #5 without a tokenizer."""
    return [f"#{i}" if tokenizer is None else _token_text(tokenizer, i) for i in ids]


def _token_text(tokenizer: Any, token: int) -> str:
    text, piece = tokenizer.decode([token]), str(tokenizer.convert_ids_to_tokens(token))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    if single := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):  # how SentencePiece names a byte
        return f"<{single[1]}>"
    if all(character in _BYTE_OF for character in piece):
        return bytes(_BYTE_OF[character] for character in piece).decode("utf-8", "hexadecimal")
    return text


def _hexadecimal(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(f"<{byte:02X}>" for byte in error.object[error.start : error.end]), error.end


codecs.register_error("hexadecimal", _hexadecimal)
