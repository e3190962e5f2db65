"""Token sequences that analyses run on: repeated random tokens, and text in pieces of equal length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.analyses.support import is_bidirectional
from workbench.kernels.masks import is_whole

Spacing = Literal["fixed", "random gaps"]

MAX_SEED = 2**63 - 2  # an analysis takes the next one as well
MOST_TOKENS = 2**24  # of random sequences in all: some hundred MB
GAPS_PER_COPY = 8  # "random gaps" cuts a copy about once in so many tokens


@dataclass(frozen=True, eq=False)
class DescribedTokens:
    """Token sequences that say what they are; analyses take them in place of bare ids, and results repeat it.

    Args:
        tokens: int64 [sequence, pos].
        description: one line of words.
    """

    tokens: Tensor
    description: str


@dataclass(frozen=True, eq=False)
class RepeatedTokens(DescribedTokens):
    """Random sequences in which every token of a first copy comes again.

    Args:
        copy: int64 [sequence, pos], 0 for the first copy, 1 for its first repetition, …; −1 for all else.
        index: int64 [sequence, pos], place within the copy from 0 to length − 1; −1 for BOS and fillers.
        has_bos: whether position 0 is BOS, or an encoder's [CLS].
    """

    copy: Tensor
    index: Tensor
    has_bos: bool

    @property
    def predictable(self) -> Tensor:
        """bool [sequence, pos]: tokens of a repetition that follow the same token as in the first copy."""
        follows = (self.copy[:, 1:] == self.copy[:, :-1]) & (self.index[:, 1:] == self.index[:, :-1] + 1)
        return pad(follows & (self.copy[:, 1:] > 0), (1, 0))


def repeated_random_tokens(
    model: Any,
    *,
    length: int = 64,
    n_sequences: int = 8,
    n_copies: int = 2,
    spacing: Spacing = "fixed",
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> RepeatedTokens:
    """BOS, ``length`` random tokens, and the same tokens again (Olsson et al. 2022, section on head classification).

    Tokens are drawn without replacement from the vocabulary without special tokens, for each sequence anew. In
    encoders the tokenizer's template, such as [CLS] … [SEP], takes the place of BOS.

    Args:
        spacing: "fixed" puts the copies one after the other, so that every repetition lies ``length`` tokens back.
            "random gaps" breaks each repetition up with ``length`` fresh tokens at random places, other ones in each
            sequence: a head that goes by position alone then misses.
        n_copies: how often the tokens occur.
        prepend_bos: None means: if the model's tokenizer has a BOS token.

    Raises:
        ValueError: a vocabulary or a context too small for that, or an option out of its range.
    """
    if spacing not in get_args(Spacing):
        raise ValueError(f"spacing must be one of {', '.join(map(repr, get_args(Spacing)))}, got {spacing!r}")
    # Two tokens that a gap may part leave sequences in which no token follows the one that it followed before.
    least_length = 3 if spacing == "random gaps" else 2
    for name, value, least in (
        ("length", length, least_length),
        ("n_sequences", n_sequences, 1),
        ("n_copies", n_copies, 2),
    ):
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be at least {least} and whole, got {value!r}")
    if not is_whole(seed) or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be a whole number from 0 to {MAX_SEED}, got {seed!r}")
    frame = text_frame(model, prepend_bos)
    n_fillers = length * (n_copies - 1) if spacing == "random gaps" else 0
    n_positions = len(frame) + length * n_copies + n_fillers
    if n_positions > model.cfg.n_ctx:
        raise ValueError(
            f"{n_copies} copies of {length} tokens make {n_positions} positions with spacing {spacing!r}, but the "
            f"model's context holds {model.cfg.n_ctx}; choose a smaller length"
        )
    if n_sequences * n_positions > MOST_TOKENS:
        raise ValueError(
            f"{n_sequences:,} sequences of {n_positions} positions are more than {MOST_TOKENS:,} tokens; choose fewer "
            "in n_sequences"
        )
    ordinary = ordinary_tokens(model)
    if len(ordinary) < length + n_fillers:
        raise ValueError(
            f"the model's vocabulary has {len(ordinary)} ordinary tokens, too few to draw "
            f"{length + n_fillers} different ones; choose a smaller length"
        )
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n_sequences):
        drawn = ordinary[torch.randperm(len(ordinary), generator=generator)[: length + n_fillers]]
        copy, index = _places(length, n_copies, spacing == "random gaps", generator)
        row = torch.empty_like(copy)
        row[index >= 0] = drawn[index[index >= 0]]
        row[index < 0] = drawn[length:]
        rows.append((row, copy, index))
    tokens, copy, index = (torch.stack(parts) for parts in zip(*rows, strict=True))
    copy, index = (pad(part, (len(frame.before), len(frame.after)), value=-1) for part in (copy, index))
    what = (
        f"{length} random tokens {'twice' if n_copies == 2 else f'{n_copies} times'}"
        f"{' with random gaps' if n_fillers else ''}"
    )
    return RepeatedTokens(
        tokens=frame.around(tokens),
        description=f"{frame.in_words(what)}, seed {seed}",
        copy=copy,
        index=index,
        has_bos=bool(frame.before),
    )


def _places(length: int, n_copies: int, gaps: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Copy and index of every position after BOS, each int64 [pos]; −1 marks fillers."""
    indices, copies = [torch.arange(length)], [torch.zeros(length, dtype=torch.int64)]
    for copy in range(1, n_copies):
        index = torch.arange(length)
        if gaps:
            # Each filler goes before one of a few tokens that are drawn first: long gaps, and runs between them.
            cuts = torch.randperm(length, generator=generator)[: max(1, length // GAPS_PER_COPY)]
            before = cuts[torch.randint(len(cuts), (length,), generator=generator)]
            order = torch.cat((index, before - 0.5)).argsort(stable=True)
            index = torch.cat((index, torch.full((length,), -1)))[order]
        indices.append(index)
        copies.append(torch.where(index >= 0, copy, -1))
    return torch.cat(copies), torch.cat(indices)


def chunked_text(
    model: Any, text: str, *, length: int, prepend_bos: bool | None = None, max_chunks: int | None = None
) -> Tensor:
    """A text as sequences of ``length`` tokens each: int64 [sequence, length].

    BOS of every sequence is among them, or the tokenizer's template where the model is an encoder.

    Tokens that fill no whole sequence at the end are left out.

    Raises:
        ValueError: a text shorter than one sequence, or a length out of range.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass token ids, or load it with tokenizer=…")
    frame = text_frame(model, prepend_bos)
    if not len(frame) < length <= model.cfg.n_ctx:
        raise ValueError(
            f"length must be between {len(frame) + 1} and {model.cfg.n_ctx} (the model's context), got {length}"
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    n_chunks = len(ids) // (length - len(frame))
    if n_chunks == 0:
        raise ValueError(
            f"the text has {len(ids)} tokens, which do not fill one sequence of {length}; "
            "choose a smaller length or a longer text"
        )
    if max_chunks is not None and max_chunks < 1:
        raise ValueError(f"max_chunks must be at least 1, or None for all, got {max_chunks}")
    if max_chunks is not None:
        n_chunks = min(n_chunks, max_chunks)
    n_own = length - len(frame)
    return frame.around(torch.tensor(ids[: n_chunks * n_own]).view(n_chunks, n_own))


def quoted(text: str, most: int = 60) -> str:
    """The beginning of a text as one line in quotation marks, without what could steer a terminal."""
    line = " ".join(text.split())
    line = line if len(line) <= most else line[: most - 1].rstrip() + "…"
    return f"“{''.join(character if character.isprintable() else '�' for character in line)}”"


@dataclass(frozen=True)
class Frame:
    """What a model reads around a text: BOS before it, or in encoders a template such as [CLS] … [SEP].

    Args:
        before, after: token ids.
        name_before, name_after: what people call them.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    name_before: str = ""
    name_after: str = ""

    def __len__(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, tokens: Tensor) -> Tensor:
        """Token ids [sequence, pos] with the frame around each sequence."""
        parts = (torch.tensor(ids, dtype=tokens.dtype).expand(len(tokens), -1) for ids in (self.before, self.after))
        before, after = parts
        return torch.cat((before, tokens, after), dim=1)

    def in_words(self, what: str) -> str:
        """What the sequences are, around whose ``what`` the frame stands."""
        *parts, last = (part for part in (self.name_before, what, self.name_after) if part)
        return f"{', '.join(parts)} and {last}" if parts else last


def text_frame(model: Any, prepend_bos: bool | None = None) -> Frame:
    """What the model reads around a text; nothing with ``prepend_bos=False``.

    Raises:
        ValueError: BOS is asked for and the tokenizer has none.
    """
    tokenizer = getattr(model, "tokenizer", None)
    if is_bidirectional(model) and tokenizer is not None and prepend_bos is not False:
        encoded = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
        n_before, n_after = special.index(0), special[::-1].index(0)
        before, after = ids[:n_before], ids[len(ids) - n_after :]
        names = (" ".join(tokenizer.convert_ids_to_tokens(part)) for part in (before, after))
        return Frame(tuple(before), tuple(after), *names)
    bos = bos_token(model, prepend_bos)
    return Frame() if bos is None else Frame((bos,), name_before="BOS")


def bos_token(model: Any, prepend_bos: bool | None) -> int | None:
    """The id to prepend, or None. Raises ValueError where BOS is asked for and there is none."""
    bos = getattr(getattr(model, "tokenizer", None), "bos_token_id", None)
    if prepend_bos and bos is None:
        raise ValueError("prepend_bos=True, but the model's tokenizer has no BOS token; leave prepend_bos out")
    return None if prepend_bos is False else bos


def ordinary_tokens(model: Any) -> Tensor:
    """Ids that stand for text: all but special tokens and rows of the embedding that the tokenizer never gives."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return torch.arange(model.cfg.d_vocab)
    used = torch.zeros(model.cfg.d_vocab, dtype=torch.bool)
    used[: len(tokenizer)] = True
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    used[[i for i in special if i < model.cfg.d_vocab]] = False
    return used.nonzero().flatten()
