"""Text from the user's hand to token ids, with every mistake named in words that the command line and the app show."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

from workbench.analyses.prompts import DescribedTokens, chunked_text, quoted, text_frame
from workbench.errors import WorkbenchError

_NOT_IN_TEXT = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\x1b")  # bytes, in any of the encodings of one byte


def read_text(path: str | os.PathLike) -> str:
    """The text of a UTF-8 file.

    Raises:
        WorkbenchError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # without the mark that some editors put first
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        if not is_utf16 and not _NOT_IN_TEXT.isdisjoint(error.object):
            raise WorkbenchError(f"{path} does not look like text; give a UTF-8 text file") from None
        encoding = "utf-16" if is_utf16 else "latin1"
        raise WorkbenchError(
            f"{path} is not UTF-8 text (its byte {error.start} cannot be read); convert it, "
            f"for instance with: iconv -f {encoding} -t utf-8 {path}"
        ) from None
    except OSError as error:
        raise WorkbenchError(f"cannot read the text file {path}: {error.strerror}") from None


def shuffled_words(text: str, seed: int = 0) -> str:
    """The text's words in another order: the same tokens, more or less, without what their order says."""
    words = text.split()
    random.Random(seed).shuffle(words)
    return " ".join(words)


def text_to_tokens(
    model: Any, text: str, max_tokens: int | None, *, shorten: str = "keep its beginning with max_tokens"
) -> DescribedTokens:
    """Token ids [1, pos] of a text, as the model reads it, and how much of the text they are.

    Args:
        max_tokens: keeps so many tokens, BOS or an encoder's template included, as far as the model's context holds
            them; None keeps the whole text.
        shorten: how the user shortens a text, for the error on one that is too long.

    Raises:
        WorkbenchError: no tokenizer, an empty text, or a text longer than the model's context.
    """
    n_tokens = _count_tokens(model, text)
    if max_tokens is None and n_tokens > model.cfg.n_ctx:
        raise WorkbenchError(
            f"the text has {n_tokens:,} tokens, but {model.cfg.model_name} takes at most {model.cfg.n_ctx:,}; {shorten}"
        )
    return _beginning(model, text, max_tokens, n_tokens)


def text_to_sequences(model: Any, text: str, max_tokens: int | None, *, length: int) -> DescribedTokens:
    """Token ids [sequence, pos]: a text longer than ``length`` tokens is cut into sequences of that length.

    Tokens that fill no whole sequence at the end are left out.

    Args:
        max_tokens: cuts only the first so many tokens, BOS included; None takes the whole text.

    Raises:
        WorkbenchError: no tokenizer, an empty text, or a context that holds no token of a text.
    """
    length = min(length, model.cfg.n_ctx)
    n_tokens = _count_tokens(model, text)
    n_wanted = n_tokens if max_tokens is None else min(n_tokens, max_tokens)
    if n_wanted <= length:
        return _beginning(model, text, n_wanted, n_tokens)
    frame = text_frame(model)  # each sequence has its own
    n_own = length - len(frame)
    if n_own < 1:
        raise WorkbenchError(
            f"{model.cfg.model_name} reads {length:,} at a time, so no token of a text fits beside its special ones; "
            "choose another model"
        )
    tokens = chunked_text(model, text, length=length, max_chunks=(n_wanted - len(frame)) // n_own)
    description = (
        f"{quoted(text)} in sequences of {frame.in_words(f'{n_own} tokens')}, "
        f"{len(tokens) * n_own:,} of the text's {n_tokens - len(frame):,}"
    )
    return DescribedTokens(tokens, description)


def filled_sequences(
    model: Any, text: str, max_tokens: int | None, *, length: int, n_sequences: int
) -> DescribedTokens:
    """Token ids [n_sequences, length]: a text in sequences, its tokens over and over where they do not fill them.

    Args:
        max_tokens: takes only the first so many tokens of the text, BOS included; None takes the whole.

    Raises:
        WorkbenchError: no tokenizer, or an empty text.
    """
    n_all = _count_tokens(model, text)
    frame = text_frame(model)
    n_own = length - len(frame)
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = ids if max_tokens is None else ids[: max(1, max_tokens - len(frame))]
    n_needed = n_sequences * n_own
    tokens = frame.around(torch.tensor(ids).repeat(-(-n_needed // len(ids)))[:n_needed].view(n_sequences, n_own))
    how = f"{n_sequences} sequence{'s' if n_sequences > 1 else ''} of {frame.in_words(f'{n_own} tokens')}"
    if len(ids) < n_needed:
        return DescribedTokens(tokens, f"{quoted(text)}, its {len(ids):,} tokens over and over in {how}")
    return DescribedTokens(tokens, f"{quoted(text)} in {how}, {n_needed:,} of the text's {n_all - len(frame):,}")


def _beginning(model: Any, text: str, max_tokens: int | None, n_tokens: int) -> DescribedTokens:
    """The first ``max_tokens`` of a text's ``n_tokens`` tokens, as far as the model's context holds them."""
    tokens = model.to_tokens(text, truncate=True)
    if max_tokens is not None and max_tokens < tokens.shape[1]:
        end = torch.tensor([text_frame(model).after], dtype=tokens.dtype, device=tokens.device)
        tokens = torch.cat((tokens[:, : max(max_tokens - end.shape[1], 0)], end), dim=1)  # an encoder's [SEP] stays
    n_kept, description = tokens.shape[1], quoted(text)
    if n_kept < n_tokens:
        limit = "" if n_kept == max_tokens else " (the model takes no more)"
        description = f"the first {n_kept:,} of {n_tokens:,} tokens{limit} of {description}"
    return DescribedTokens(tokens, description)


def _count_tokens(model: Any, text: str) -> int:
    """Tokens of a text, with what the model reads around it."""
    if model.tokenizer is None:
        raise WorkbenchError(f"{model.cfg.model_name} has no tokenizer, so it cannot read text; use random tokens")
    if not text.strip():
        raise WorkbenchError("the text is empty; give some words to analyse")
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise WorkbenchError("the text holds nothing that this model's tokenizer reads; give some words to analyse")
    return len(ids) + len(text_frame(model))
