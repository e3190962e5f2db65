"""The real artefact, fetched as a user would: it computes what transformers computes and reads text as published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workbench import HookedTransformer
from workbench.errors import ModelNotFoundError
from workbench.loading import sources

TEXT = (
    "A pattern of attention says where a head looks, not what it takes from there. To know what it takes, one switches "
    "it off and watches what becomes of the prediction. "
)
# Ids that an independent implementation of the tokenizer gives for the published vocabulary.
PUBLISHED = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "\n": [198],
}


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return sources.fetch("smollm2-135m", lambda stage, done, total: None)
    except ModelNotFoundError as error:
        pytest.skip(f"SmolLM2-135M is not in the cache and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def smollm2(folder: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained("smollm2-135m")


def test_provenance_names_the_quantisation(smollm2: HookedTransformer) -> None:
    expected = "Q4_1 GGUF (Q8_0 in 21% of the weights), dequantised to float32"
    assert smollm2.cfg.weights_description == expected
    assert (smollm2.cfg.model_name, smollm2.cfg.revision) == ("smollm2-135m", "sha256:b179c9523d0e6a0f")
    assert (smollm2.cfg.n_layers, smollm2.cfg.n_heads, smollm2.cfg.n_key_value_heads) == (30, 9, 3)


def test_logits_equal_transformers(smollm2: HookedTransformer, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    tokens = smollm2.to_tokens(TEXT * 4)[:, :128]
    reference = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        expected, logits = reference(tokens).logits, smollm2(tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_it_speaks_english(smollm2: HookedTransformer) -> None:
    with torch.no_grad():
        best = smollm2(smollm2.to_tokens("The capital of France is"))[0, -1].argmax()
    assert smollm2.to_string(best) == " Paris"


def test_token_ids_are_the_published_ones(smollm2: HookedTransformer) -> None:
    for text, ids in PUBLISHED.items():
        assert smollm2.to_tokens(text, prepend_bos=False)[0].tolist() == ids, text


@pytest.mark.parametrize(
    "text",
    [
        "I'm, you're, WE'LL, don’t", "1234567 3.14 ½ Ⅷ ١٢٣", "a\n\nb\n  c\t\td \r\n", "日本語 🎉👩‍👩‍👧",
        "é and e\u0301", "def f(x):\n    return x**2  # ok\n", "\x00\x7f\u00a0",
        "<|im_start|>user\nHi<|im_end|>", "<|im_start|",
    ],
)  # fmt: skip
def test_text_survives(text: str, smollm2: HookedTransformer) -> None:
    assert smollm2.to_string(smollm2.to_tokens(text, prepend_bos=False)[0]) == text


def test_special_tokens_and_digits_are_single(smollm2: HookedTransformer) -> None:
    assert smollm2.to_str_tokens("<|im_start|>user\n42<|im_end|>") == [
        "<|im_start|>", "<|im_start|>", "user", "\n", "4", "2", "<|im_end|>",
    ]  # fmt: skip
