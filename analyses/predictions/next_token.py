"""One position of a text as a prompt: its next token against another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.analyses.options import check_position, is_whole
from workbench.analyses.running import Input, Sequences, unembedded
from workbench.analyses.support import emits_statistics
from workbench.analyses.tasks.prompt_set import PromptSet
from workbench.analyses.tasks.scoring import continuation, encode
from workbench.analyses.token_texts import token_texts

VISIBLE_SPACE = "␣"  # as tokens are written where people read them


def next_token_prompt(
    model: Any, tokens: Input, position: int | None, target: str | int | None, foil: str | int | None
) -> PromptSet:
    """The text up to a position as one prompt.

    Args:
        tokens: one text, or token ids [pos] or [1, pos].
        position: of the last token that is read; negative ones count from the end, None is the last one that another
            token follows (or the only one).
        target: a word, or a token id; None is the token that follows, and the likeliest where none does.
        foil: as ``target``; None is the likeliest token that is not the target.

    Raises:
        ValueError: several texts, a position that there is not, or an answer that is not one token.
    """
    sequences = Sequences.read(model, tokens)
    if len(sequences) > 1:
        raise ValueError(f"a text is one sequence here, got {len(sequences)}; index the batch first, or pass prompts")
    ids = sequences.tokens[0]
    if position is not None:
        check_position(position, len(ids))
    place = max(len(ids) - 2, 0) if position is None else position % len(ids)
    read = ids[: place + 1]
    logits = _last_logits(model, read)
    following = int(ids[place + 1]) if place + 1 < len(ids) else int(logits.argmax())
    right = following if target is None else _token(model, "target", target, logits)
    others = logits.index_fill(0, torch.tensor(right, device=logits.device), -torch.inf)
    wrong = int(others.argmax()) if foil is None else _token(model, "foil", foil, others)
    if wrong == right:
        raise ValueError("the foil is the same token as the target; give another one")
    tokenizer = getattr(model, "tokenizer", None)
    query, *answers = token_texts(tokenizer, [int(read[-1]), right, wrong])
    return PromptSet(
        read[None],
        torch.ones(1, len(read), dtype=torch.bool),
        torch.tensor([right]),
        torch.tensor([wrong]),
        None,
        name="next token",
        description=f"{answers[0]!r} against {answers[1]!r} after {query!r}, token {place} of {sequences.description}",
    )


def _last_logits(model: Any, read: Tensor) -> Tensor:
    """Logits of the token after those, float64 [d_vocab]."""
    tokens = read[None].to(model.cfg.device)
    if emits_statistics(model):
        stream = model(tokens, stop_at_layer=model.cfg.n_layers)[:, -1:]
        return unembedded(model, stream)[0, 0].double()
    return model(tokens)[0, -1].double()


def _token(model: Any, name: str, given: Any, logits: Tensor) -> int:
    """A token id from an id or a word. A word without a space before it may be meant with one: the likelier counts."""
    if is_whole(given):
        if not 0 <= given < len(logits):
            raise ValueError(f"{name} must be a token id from 0 to {len(logits) - 1}, or a word, got {given}")
        return int(given)
    tokenizer = getattr(model, "tokenizer", None)
    if not isinstance(given, str) or not given.strip(" " + VISIBLE_SPACE):
        raise ValueError(f"{name} must be a word or a token id, got {given!r}")
    if tokenizer is None:
        raise ValueError(f"{name} is a word, but this model has no tokenizer; give a token id")
    word = given.replace(VISIBLE_SPACE, " ")
    # Behind another word, as some tokenizers write a space before whatever comes first.
    spaced = continuation(model, "The", word if word.startswith(" ") else f" {word}") or []
    readings = [spaced] if word.startswith(" ") else [spaced, encode(model, word)]
    unknown = getattr(tokenizer, "unk_token_id", None)
    single = {ids[0] for ids in readings if len(ids) == 1 and ids[0] < len(logits) and ids[0] != unknown}
    if not single:
        parts = ", ".join(map(repr, token_texts(tokenizer, spaced)))
        raise ValueError(f"{name} {given!r} is no single token of this model ({parts}); give a word that is one")
    return max(single, key=lambda token: float(logits[token]))
