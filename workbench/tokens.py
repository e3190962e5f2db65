"""Text to tokens and back. The model, not the tokenizer, decides about BOS, padding and masks.

Decoders read BOS and the text. Encoders, also those of encoder–decoders, read a text as their tokenizer's template has
it: [CLS] text [SEP], text </s>.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.config import TransformerConfig

PaddingSide = Literal["left", "right"]


class TokenMethods:
    """The token interface of TransformerLens, on the model's ``tokenizer`` (a transformers tokenizer, or None)."""

    cfg: TransformerConfig
    tokenizer: Any

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: PaddingSide | None = None,
        *,
        return_attention_mask: bool = False,
        truncate: bool = False,
    ) -> Any:
        """Token ids [batch, pos]; with ``return_attention_mask`` also the mask, bool [batch, pos], true where real.

        Args:
            prepend_bos: None means: if the tokenizer has a BOS token. For encoders: False leaves out the template.
            padding_side: where unequal texts are filled up, "right" by default.
            truncate: keep the first ``cfg.n_ctx`` tokens of a text that is longer, instead of raising; those of an
                encoder's template are among them.

        Raises:
            ValueError: no tokenizer, no text, a text longer than the context, or texts of unequal length without
                ``return_attention_mask``, so that pads are never attended in silence.
        """
        if not isinstance(input, Sequence):
            raise ValueError(f"expected a text or several, got {type(input).__name__}; token ids go in as a tensor")
        limit = self.cfg.n_ctx if truncate else None
        rows = [self._encode(text, prepend_bos, limit) for text in ([input] if isinstance(input, str) else input)]
        return self._fill_up(rows, padding_side, return_attention_mask)

    def _fill_up(
        self, rows: Sequence[Sequence[int]], padding_side: PaddingSide | None, return_attention_mask: bool
    ) -> Any:
        """Rows of ids as ``to_tokens`` returns them."""
        if not rows or not all(rows):
            raise ValueError("the text is empty: it has no tokens to run the model on")
        width = max(map(len, rows))
        if width > self.cfg.n_ctx:
            raise ValueError(
                f"the text has {width} tokens, but the model's context holds {self.cfg.n_ctx}; "
                "shorten it, or keep its beginning with truncate=True"
            )
        if padding_side not in (None, "left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {padding_side!r}")
        usual = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        filler = next((i for i in usual if i is not None and i < self.cfg.d_vocab), 0)  # some lack an embedding
        tokens = torch.full((len(rows), width), filler, device=self.cfg.device)
        mask = torch.zeros((len(rows), width), dtype=torch.bool, device=self.cfg.device)
        for i, row in enumerate(rows):
            real = slice(width - len(row), width) if padding_side == "left" else slice(0, len(row))
            tokens[i, real] = torch.tensor(row, device=self.cfg.device)
            mask[i, real] = True
        if return_attention_mask:
            return tokens, mask
        if not bool(mask.all()):
            raise ValueError(
                f"the texts have {min(map(len, rows))} to {width} tokens, so some are padded; "
                "take the mask as well: to_tokens(…, return_attention_mask=True)"
            )
        return tokens

    def to_string(self, tokens: Tensor | Sequence[int] | int) -> str | list[str]:
        """The text of token ids [pos] or a single id; of [batch, pos], a list of texts."""
        ids = torch.as_tensor(tokens)
        if ids.dim() == 2:
            return [self._decode(row) for row in ids.tolist()]
        return self._decode(ids.reshape(-1).tolist())

    def to_str_tokens(self, input: str | Tensor | Sequence[int], prepend_bos: bool | None = None) -> list[str]:
        """The text of each token of one text or of one row of ids, BOS included."""
        if isinstance(input, str):
            ids = self.to_tokens(input, prepend_bos)[0].tolist()
        else:
            ids = torch.as_tensor(input)
            if ids.dim() == 2 and ids.shape[0] > 1:
                raise ValueError(f"to_str_tokens takes one row of tokens, got {ids.shape[0]}; index the batch first")
            ids = ids.reshape(-1).tolist()
        return [self._decode([i]) for i in ids]

    def to_single_token(self, text: str) -> int:
        """The id of a text that is exactly one token. Raises ValueError where it is not."""
        ids = self._encode(text, prepend_bos=False)
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens ({self.to_str_tokens(ids)}), not one; mind the leading space"
            )
        return ids[0]

    def to_single_str_token(self, token: int) -> str:
        """The text of one token id."""
        return self._decode([int(token)])

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: Literal["first", "last"] = "first",
        prepend_bos: bool | None = None,
    ) -> int:
        """The first or last position of a token in a text or in a row of ids. Raises ValueError where there is none."""
        if mode not in ("first", "last"):
            raise ValueError(f"mode must be 'first' or 'last', got {mode!r}")
        tokens = self.to_tokens(input, prepend_bos) if isinstance(input, str) else torch.as_tensor(input)
        if tokens.dim() == 2 and tokens.shape[0] > 1:
            raise ValueError(f"get_token_position takes one row of tokens, got {tokens.shape[0]}")
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        positions = (tokens.reshape(-1) == token).nonzero().flatten().tolist()
        if not positions:
            raise ValueError(f"the token {single_token!r} does not occur in the input")
        return positions[0 if mode == "first" else -1]

    def _encode(self, text: str, prepend_bos: bool | None, limit: int | None = None) -> list[int]:
        tokenizer = self._checked_tokenizer(text)
        # verbose=False: transformers warns of lengths beyond a limit that need not be this model's.
        if self.cfg.attention_dir == "bidirectional" or self.cfg.n_encoder_layers is not None:
            length = {} if limit is None else {"truncation": True, "max_length": limit}
            template = prepend_bos is not False
            return self._known(tokenizer(text, add_special_tokens=template, verbose=False, **length)["input_ids"])
        bos = tokenizer.bos_token_id
        if prepend_bos and bos is None:
            raise ValueError("prepend_bos=True, but the tokenizer has no BOS token; leave prepend_bos out")
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self._known([bos, *ids] if bos is not None and prepend_bos is not False else ids)[:limit]

    def _checked_tokenizer(self, text: str) -> Any:
        if not isinstance(text, str):
            raise ValueError(f"expected text, got {type(text).__name__}; token ids go in as a tensor")
        check_characters(text)
        return self._require_tokenizer()

    def _known(self, ids: list[int]) -> list[int]:
        """The ids, all of which the model has a row for."""
        if ids and (highest := max(ids)) >= self.cfg.d_vocab:  # a token that was added to the tokenizer alone
            token = self._require_tokenizer().convert_ids_to_tokens(highest)
            raise ValueError(
                f"the text holds the token {token!r} with the id {highest}, but the "
                f"model's vocabulary has {self.cfg.d_vocab} (0 to {self.cfg.d_vocab - 1}); leave that token out"
            )
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self._require_tokenizer().decode(ids, clean_up_tokenization_spaces=False)

    def _require_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer: pass token ids, or load it with tokenizer=…")
        return self.tokenizer


def check_characters(text: str) -> None:
    """Raises ValueError where a text holds halves of characters, as undecodable bytes of a command line become."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode (its character {error.start} is none); leave that out"
        ) from None


def check_tokens(tokens: Tensor, cfg: TransformerConfig) -> Tensor:
    """Token ids as int64 [batch, pos]. Raises ValueError where they are none of this vocabulary."""
    if tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
        raise ValueError(f"token ids must be integers, got {tokens.dtype}")
    if tokens.dim() not in (1, 2) or tokens.numel() == 0:
        raise ValueError(f"token ids must be [batch, pos] or [pos] and not empty, got shape {tuple(tokens.shape)}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= cfg.d_vocab:
        raise ValueError(
            f"token ids run from {low} to {high}, but the vocabulary has {cfg.d_vocab} (0 to {cfg.d_vocab - 1})"
        )
    return torch.atleast_2d(tokens).long()
