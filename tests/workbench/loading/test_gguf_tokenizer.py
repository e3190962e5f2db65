"""Tokenizers rebuilt from GGUF metadata against the ones whose vocabulary they carry."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from workbench.errors import CorruptWeightsError, UnsupportedModelError
from workbench.loading.gguf_tokenizer import build_tokenizer

CORPUS = (
    "The sum of 1234 and 5678 is 6912. The summer of 1999 wasn't the hottest; I'll say it's been hotter since.\n"
    "    def sum(values):\n        return sum(values)\n\n\nDon't you think they're  somewhat  théâtral? Ça va, naïve!\n"
)
TEXTS = [
    "The summer of 2024 wasn't", "I'LL say:  don’t!", "  two  spaces\n\n\n   and\ttabs \r\n", "12345678 ½ ٣٤ Ⅷ",
    "日本語 théâtre naïve", "👩‍👩‍👧 flags 🇫🇷", "", " ", "\n", "x=1;y+=22", "\u00a0\u2003nbsp", "a\x00b",
    "<|end|>in<|end|>", "'s 't'",
]  # fmt: skip
SPECIAL, USER_DEFINED = "<|end|>", "<tool>"


@functools.cache
def _trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE that has seen the corpus, in pieces as long as any cut allows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=[SPECIAL])
    tokenizer.train_from_iterator([CORPUS], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return state["vocab"], [tuple(merge) for merge in state["merges"]]


def _fields(cut: str | None) -> dict[str, Any]:
    vocabulary, merges = _trained()
    tokens = [*sorted(vocabulary, key=lambda token: vocabulary[token]), USER_DEFINED]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 2) + [4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    return fields if cut is None else fields | {"tokenizer.ggml.pre": cut}


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("cut", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers_own_class(cut: str, kind: Any, text: str) -> None:
    vocabulary, merges = _trained()
    reference = kind(
        vocab=dict(vocabulary), merges=list(merges), unk_token=SPECIAL, bos_token=SPECIAL, eos_token=SPECIAL
    )
    assert _encode(build_tokenizer(_fields(cut), "x"), text) == _encode(reference, text)


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("gpt-2", ["I", "'", "M", " 12345", " don", "'t", "\n\n ", " x", "!", " "]),
        ("smollm", ["I", "'", "M", " ", "1", "2", "3", "4", "5", " don", "'t", "\n\n ", " x", "!", " "]),
        ("qwen2", ["I", "'M", " ", "1", "2", "3", "4", "5", " don", "'t", "\n\n", " ", " x", "!", " "]),
        ("llama-bpe", ["I", "'M", " ", "123", "45", " don", "'t", "\n\n", " ", " x", "!", " "]),
    ],
)
def test_where_text_is_cut_before_merging(cut: str, pieces: list[str]) -> None:
    """By hand from the published expressions: digits, contractions and runs of white space tell them apart."""
    tokenizer = build_tokenizer(_fields(cut), "x")
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("I'M 12345 don't\n\n  x! ")
    assert ["".join(_bytes(piece)) for piece, _ in found] == pieces


def _bytes(piece: str) -> str:
    return {"Ġ": " ", "Ċ": "\n"}.get(piece, piece) if len(piece) == 1 else piece.replace("Ġ", " ").replace("Ċ", "\n")


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe"])
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_decoding_gives_the_text_back(cut: str, text: str) -> None:
    tokenizer = _built(cut)
    assert tokenizer.decode(_encode(tokenizer, text), clean_up_tokenization_spaces=False) == text


@functools.cache
def _built(cut: str) -> Any:
    return build_tokenizer(_fields(cut), "x")


def test_special_tokens() -> None:
    tokenizer = _built("smollm")
    assert _encode(tokenizer, f"a{SPECIAL}b")[1] == 0
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, None)
    assert tokenizer.all_special_tokens == [SPECIAL]
    last = len(tokenizer) - 1
    assert _encode(tokenizer, f"a{USER_DEFINED}b")[1] == last  # one token, and yet not a special one
    assert tokenizer.decode([last, 0], skip_special_tokens=True) == USER_DEFINED


def test_qwen2_has_no_bos_whatever_its_file_names() -> None:
    """As transformers' own tokenizer of Qwen2 has none."""
    assert _fields("qwen2")["tokenizer.ggml.bos_token_id"] is not None
    assert _built("qwen2").bos_token is None
    assert _built("gpt-2").bos_token is not None


def test_llama_3_takes_whole_words_before_it_merges() -> None:
    """A word that is a token needs no merges that lead to it."""
    fields = _fields("llama-bpe")
    fields["tokenizer.ggml.tokens"][-1] = "Zyx"
    fields["tokenizer.ggml.token_type"][-1] = 1
    last = len(fields["tokenizer.ggml.tokens"]) - 1
    assert _encode(build_tokenizer(fields, "x"), "Zyx") == [last]
    assert len(_encode(build_tokenizer(fields | {"tokenizer.ggml.pre": "gpt-2"}, "x"), "Zyx")) == 3


TRAINED_TEXTS = [text for text in TEXTS if SPECIAL not in text] + [CORPUS, "▁literal", "tab\tand\nline"]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text(CORPUS * 3)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), model_type="bpe", vocab_size=400,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.98, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def _sentencepiece_fields(model: Any) -> dict[str, Any]:
    n = len(model)
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(n)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(n)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
    }


def test_sentencepiece_ids_equal_sentencepieces(sentencepiece_model: Any) -> None:
    tokenizer = build_tokenizer(_sentencepiece_fields(sentencepiece_model), "x")
    for text in filter(None, TRAINED_TEXTS):
        assert _encode(tokenizer, text) == sentencepiece_model.encode(text), text
        assert tokenizer.decode(_encode(tokenizer, text), clean_up_tokenization_spaces=False) == text.replace("▁", " ")
    assert tokenizer.bos_token == "<s>"


def test_sentencepiece_normalisation_is_refused(sentencepiece_model: Any) -> None:
    fields = _sentencepiece_fields(sentencepiece_model) | {"tokenizer.ggml.remove_extra_whitespaces": True}
    with pytest.raises(UnsupportedModelError, match="normalises text"):
        build_tokenizer(fields, "x")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"tokenizer.ggml.pre": "tekken"},
            UnsupportedModelError,
            "pre-tokenizer 'tekken' is not supported.*tokenizer=",
        ),
        ({"tokenizer.ggml.pre": "default"}, UnsupportedModelError, "pre-tokenizer 'default'"),
        ({"tokenizer.ggml.model": "bert"}, UnsupportedModelError, "tokenizer 'bert' is not supported"),
        ({"tokenizer.ggml.token_type": [1]}, CorruptWeightsError, "tokens but 1 token types"),
        ({"tokenizer.ggml.merges": ["no such"]}, CorruptWeightsError, "merges do not fit"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, CorruptWeightsError, "bos_token_id is 1000000"),
    ],
    ids=str,
)
def test_what_cannot_be_rebuilt(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^the file: .*{message}"):
        build_tokenizer(_fields("gpt-2") | changes, "the file")


def test_file_without_a_pre_tokenizer_or_tokenizer() -> None:
    with pytest.raises(UnsupportedModelError, match="'default' is not supported"):
        build_tokenizer(_fields(None), "x")
    assert build_tokenizer({}, "x") is None


def test_saved_tokenizer_reads_back_equal(tmp_path: Path) -> None:
    from workbench.loading.huggingface import load_tokenizer

    tokenizer = _built("smollm")
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert all(_encode(again, text) == _encode(tokenizer, text) for text in TEXTS)
    assert again.bos_token == SPECIAL


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", 5), ("tokens", [1, 2]), ("token_type", 5), ("merges", 4), ("merges", [1]), ("merges", ["a b c"]),
        ("pre", [1]), ("bos_token_id", "x"), ("bos_token_id", 1.5), ("bos_token_id", [1]),
    ],
)  # fmt: skip
def test_values_of_other_types_than_the_format_has(key: str, value: Any) -> None:
    fields = _fields("gpt-2") | {f"tokenizer.ggml.{key}": value}
    if key == "tokens" and value == [1, 2]:
        del fields["tokenizer.ggml.token_type"]  # whose length would tell first
    with pytest.raises(CorruptWeightsError, match="^x: the tokenizer") as caught:
        build_tokenizer(fields, "x")
    assert "\n" not in str(caught.value)
