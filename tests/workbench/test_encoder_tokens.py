"""What encoders read: a text as their tokenizer's template has it."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from workbench import HookedTransformer, TransformerConfig

WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b": 6, "c": 7}


@pytest.fixture(scope="module")
def encoder() -> HookedTransformer:
    """A random encoder of 8 positions with a tokenizer like BERT's. Read-only."""
    words = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip
    cfg = TransformerConfig(
        n_layers=2, d_model=12, n_heads=2, d_head=6, d_mlp=8, d_vocab=len(WORDS), n_ctx=8,
        attention_dir="bidirectional", norm_placement="post", use_embed_norm=True, use_mlm_head=True,
    )  # fmt: skip
    return HookedTransformer(cfg, tokenizer).eval()


def test_text_comes_in_its_template(encoder: HookedTransformer) -> None:
    assert encoder.to_tokens("a [MASK] c").tolist() == [[2, 5, 4, 7, 3]]
    assert encoder.to_tokens("a b", prepend_bos=True).tolist() == [[2, 5, 6, 3]]
    assert encoder.to_tokens("a b", prepend_bos=False).tolist() == [[5, 6]]
    assert encoder.to_str_tokens("a") == ["[CLS]", "a", "[SEP]"]
    assert encoder.to_single_token("c") == 7
    assert encoder.get_token_position("[MASK]", "a [MASK]") == 2


def test_truncation_keeps_the_template(encoder: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="12 tokens, but the model's context holds 8"):
        encoder.to_tokens("a b " * 5)
    assert encoder.to_tokens("a b " * 5, truncate=True).tolist() == [[2, 5, 6, 5, 6, 5, 6, 3]]
    assert encoder.to_tokens("a b " * 5, prepend_bos=False, truncate=True).tolist() == [[5, 6] * 4]


def test_texts_of_a_batch_see_no_pads(encoder: HookedTransformer) -> None:
    """A padded text gets the logits that it gets alone."""
    together = encoder(["a b c a", "b"])
    torch.testing.assert_close(together[1, :3], encoder("b")[0])
    torch.testing.assert_close(encoder(["a b c a", "b"], padding_side="left")[1, 3:], encoder("b")[0])
