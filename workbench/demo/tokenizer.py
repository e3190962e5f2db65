"""The demo model's tokenizer: a small byte-level BPE that keeps the corpus' words whole."""

from __future__ import annotations

import itertools
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from workbench.demo import corpus

BOS, EOS = "<|bos|>", "<|eos|>"

# Words, marks and spaces apart; at most two digits together, so that a year is a century and a year in it.
_PIECES = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train_tokenizer(n_tokens: int, *, n_context: int, n_pages: int = 4000, texts_per_page: int = 6) -> Any:
    """A transformers tokenizer of ``n_tokens`` tokens, special ones and all 256 bytes among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (
        text for page in range(n_pages) for text in itertools.islice(corpus.page(f"tokenizer.{page}"), texts_per_page)
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=n_context,
    )
