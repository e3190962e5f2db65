from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import chunked_text, repeated_random_tokens
from workbench.analyses.inputs import filled_sequences, text_to_sequences, text_to_tokens
from workbench.analyses.prompts import quoted
from workbench.analyses.running import Sequences
from workbench.errors import WorkbenchError


class Tokenizer:
    """Ten ordinary tokens, two special ones; one token per character of a text."""

    bos_token_id = 0
    all_special_ids = (0,)
    added_tokens_decoder = {0: SimpleNamespace(special=True), 11: SimpleNamespace(special=True)}

    def __len__(self) -> int:
        return 12

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [1 + ord(character) % 10 for character in text]}


def model_with(d_vocab: int, n_ctx: int = 512, tokenizer: Any = None) -> Any:
    return SimpleNamespace(cfg=SimpleNamespace(d_vocab=d_vocab, n_ctx=n_ctx), tokenizer=tokenizer)


@settings(deadline=None)
@given(length=st.integers(2, 20), n_copies=st.integers(2, 3), gaps=st.booleans(), seed=st.integers(0, 99))
def test_tokens_repeat_as_they_say(length: int, n_copies: int, gaps: bool, seed: int) -> None:
    gaps = gaps and length > 2
    spacing = "random gaps" if gaps else "fixed"
    prompts = repeated_random_tokens(
        model_with(100), length=length, n_sequences=3, n_copies=n_copies, spacing=spacing, seed=seed
    )
    for tokens, copy, index, predictable in zip(
        prompts.tokens, prompts.copy, prompts.index, prompts.predictable, strict=True
    ):
        first = tokens[copy == 0]
        assert len(set(first.tolist())) == length
        for n in range(n_copies):
            assert tokens[copy == n].tolist() == first.tolist()
            assert index[copy == n].tolist() == list(range(length))
        fillers = tokens[copy < 0].tolist()
        assert len(fillers) == (length * (n_copies - 1) if gaps else 0)
        assert len({*fillers, *first.tolist()}) == length + len(fillers)  # without replacement
        pairs = list(zip(first.tolist(), first.tolist()[1:], strict=False))
        for position in range(1, len(tokens)):
            pair = tuple(tokens[position - 1 : position + 1].tolist())
            assert bool(predictable[position]) == (pair in pairs and copy[position] > 0)
        assert not predictable[0]
        assert all(predictable[copy == n].any() for n in range(1, n_copies))  # so that every copy has a loss


def test_random_gaps_vary_the_distance_and_a_fixed_period_does_not() -> None:
    def distances(spacing: str) -> set[int]:
        prompts = repeated_random_tokens(model_with(300), length=32, spacing=spacing, n_sequences=4)
        rows = zip(prompts.copy, prompts.index, strict=True)
        return {
            int((copy == 1).nonzero()[i] - (copy == 0).nonzero()[i]) for copy, index in rows for i in range(32)
        }  # fmt: skip

    assert distances("fixed") == {32}
    assert len(distances("random gaps")) > 10


def test_special_and_unused_tokens_are_never_drawn() -> None:
    prompts = repeated_random_tokens(model_with(40, tokenizer=Tokenizer()), length=10, n_sequences=20)
    assert prompts.has_bos and (prompts.tokens[:, 0] == 0).all()
    assert sorted(set(prompts.tokens[:, 1:].flatten().tolist())) == list(range(1, 11))
    assert (prompts.copy[:, 0] == -1).all()


def test_the_same_seed_gives_the_same_tokens_and_another_one_others() -> None:
    draw = [repeated_random_tokens(model_with(500), seed=seed).tokens for seed in (3, 3, 4)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])


def test_bos_can_be_left_out_and_is_refused_where_there_is_none() -> None:
    without = repeated_random_tokens(model_with(12, tokenizer=Tokenizer()), length=5, prepend_bos=False)
    assert not without.has_bos and without.tokens.shape[1] == 10
    with pytest.raises(ValueError, match="no BOS token"):
        repeated_random_tokens(model_with(100), prepend_bos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 51}, "vocabulary has 50 ordinary tokens"),
        ({"length": 26, "spacing": "random gaps"}, "vocabulary has 50 ordinary tokens"),
        ({"length": 40, "n_copies": 3}, "120 positions"),
        ({"length": 1}, "length must be at least 2"),
        ({"length": 2, "spacing": "random gaps"}, "length must be at least 3"),
        ({"n_sequences": 0}, "n_sequences must be at least 1"),
        ({"n_copies": 1}, "n_copies must be at least 2"),
        ({"length": 4.5}, "length must be at least 2 and whole"),
        ({"seed": -1}, "seed must be a whole number from 0"),
        ({"seed": 2**64}, "seed must be a whole number from 0"),
        ({"spacing": "loose"}, "spacing must be one of"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repeated_random_tokens(model_with(50, n_ctx=110), **options)


def test_text_is_cut_into_sequences_that_each_start_with_bos() -> None:
    model = model_with(12, tokenizer=Tokenizer())
    text = "abcdefghij" * 3
    ids = Tokenizer()(text, add_special_tokens=False)["input_ids"]
    chunks = chunked_text(model, text, length=8)
    assert chunks.shape == (4, 8) and (chunks[:, 0] == 0).all()
    assert chunks[:, 1:].flatten().tolist() == ids[:28]
    assert chunked_text(model, text, length=8, max_chunks=2).tolist() == chunks[:2].tolist()
    assert chunked_text(model, text, length=8, prepend_bos=False).flatten().tolist() == ids[:24]


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("abc", 8, "3 tokens, which do not fill"),
        ("abc", 1, "length must be between 2"),
        ("abc", 999, "between 2 and 512"),
    ],
)
def test_text_that_cannot_be_cut_is_refused(text: str, length: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_text(model_with(12, tokenizer=Tokenizer()), text, length=length)
    with pytest.raises(ValueError, match="no tokenizer"):
        chunked_text(model_with(12), text, length=length)


def test_sequences_cover_the_text_up_to_the_limit() -> None:
    model = model_with(12, tokenizer=Tokenizer())
    text = "".join(chr(97 + place % 10) for place in range(63))
    everything = [1 + ord(character) % 10 for character in text]
    for max_tokens, n_sequences in ((None, 9), (1000, 9), (64, 9), (63, 8), (15, 2), (14, 1), (9, 1)):
        found = text_to_sequences(model, text, max_tokens, length=8)  # seven tokens of the text and BOS each
        assert found.tokens.shape == (n_sequences, 8) and (found.tokens[:, 0] == 0).all()
        assert found.tokens[:, 1:].flatten().tolist() == everything[: 7 * n_sequences]
        used = f"sequences of BOS and 7 tokens, {7 * n_sequences} of the text's 63"
        assert found.description == f"“{text[:59]}…” in {used}"
    model.cfg.n_ctx, model.cfg.model_name = 1, "short"  # BOS and nothing else
    with pytest.raises(WorkbenchError, match="short reads 1 at a time, so no token of a text fits"):
        text_to_sequences(model, text, None, length=8)


def test_a_short_text_fills_sequences_over_and_over() -> None:
    model = model_with(12, tokenizer=Tokenizer())
    own = [1 + ord(character) % 10 for character in "abcdefghi"]
    for max_tokens, n_used in ((None, 9), (6, 5), (1, 1)):  # BOS counts among them
        found = filled_sequences(model, "abcdefghi", max_tokens, length=8, n_sequences=3)
        assert found.tokens.shape == (3, 8) and (found.tokens[:, 0] == 0).all()
        assert found.tokens[:, 1:].flatten().tolist() == [own[place % n_used] for place in range(21)]
        over = f"its {n_used} tokens over and over in 3 sequences of BOS and 7 tokens"
        assert found.description == f"“abcdefghi”, {over}"
    found = filled_sequences(model, "abcdefghi", None, length=8, n_sequences=1)
    assert found.tokens.tolist() == [[0, *own[:7]]]
    assert found.description == "“abcdefghi” in 1 sequence of BOS and 7 tokens, 7 of the text's 9"


def test_a_text_of_which_no_token_is_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "__call__", lambda self, text, **options: {"input_ids": []})  # as some of U+200B
    model = model_with(12, tokenizer=Tokenizer())
    with pytest.raises(WorkbenchError, match="holds nothing that this model's tokenizer reads"):
        filled_sequences(model, "\u200b", None, length=8, n_sequences=1)
    with pytest.raises(WorkbenchError, match="holds nothing that this model's tokenizer reads"):
        text_to_tokens(model, "\u200b", None)


class Reader(Tokenizer):
    """A model that reads one token per character, for what is said of its inputs."""

    def __init__(self, n_ctx: int) -> None:
        self.tokenizer = self
        self.cfg = SimpleNamespace(d_vocab=12, n_ctx=n_ctx, model_name="m")

    def to_tokens(self, text: str, truncate: bool = False) -> torch.Tensor:
        tokens = torch.tensor([[0, *self(text, add_special_tokens=False)["input_ids"]]])
        assert truncate or tokens.shape[1] <= self.cfg.n_ctx
        return tokens[:, : self.cfg.n_ctx]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + i) for i in ids)


def test_a_shortened_text_says_how_much_of_it_is_left() -> None:
    text, short = "abcdefghi" * 4, "shorten it"
    for max_tokens, n_kept, expected in (
        (None, 37, f"“{text}”"),
        (37, 37, f"“{text}”"),
        (99, 37, f"“{text}”"),
        (20, 20, f"the first 20 of 37 tokens of “{text}”"),
    ):
        found = text_to_tokens(Reader(n_ctx=40), text, max_tokens, shorten=short)
        assert (found.tokens.shape, found.description) == ((1, n_kept), expected)
    for max_tokens in (31, 99):  # more than the context
        found = text_to_tokens(Reader(n_ctx=30), text, max_tokens, shorten=short)
        assert found.tokens.shape == (1, 30)
        assert found.description == f"the first 30 of 37 tokens (the model takes no more) of “{text}”"
    found = text_to_sequences(Reader(n_ctx=99), text, 12, length=16)
    assert (found.tokens.shape, found.description) == ((1, 12), f"the first 12 of 37 tokens of “{text}”")


def test_random_tokens_say_how_they_were_drawn() -> None:
    options: dict[str, Any] = {"length": 5, "seed": 3}
    with_bos = repeated_random_tokens(model_with(12, tokenizer=Tokenizer()), **options)
    assert with_bos.description == "BOS and 5 random tokens twice, seed 3"
    without = repeated_random_tokens(model_with(40), **options, n_copies=3, spacing="random gaps")
    assert without.description == "5 random tokens 3 times with random gaps, seed 3"
    assert Sequences.read(model_with(40), without).description == without.description


def test_bare_tokens_are_described_by_the_text_that_they_begin_with() -> None:
    reader = Reader(n_ctx=99)
    assert Sequences.read(reader, torch.tensor([0, 1, 2, 3])).description == "“abc”"
    assert Sequences.read(reader, torch.arange(1, 11).repeat(3, 5)).description == f"“{'abcdefghij' * 4}…” and 2 more"
    assert Sequences.read(model_with(40), torch.tensor([1, 2])).description == "token ids"


@given(st.text())
def test_a_quotation_is_one_printable_line(text: str) -> None:
    shown = quoted(text, most=20)
    assert shown.isprintable() and shown[0] == "“" and shown[-1] == "”" and len(shown) <= 22
    if len(" ".join(text.split())) > 20:
        assert shown.endswith("…”")


@pytest.fixture(scope="module")
def encoder() -> HookedTransformer:
    """Its tokenizer makes [CLS] text [SEP] of a text, as ids 0, …, 1; letters are ids from 3 on."""
    words = ["[CLS]", "[SEP]", "[UNK]", *"abcdefghijklmnop"]
    backend = Tokenizers(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )  # fmt: skip
    cfg = TransformerConfig(
        n_layers=1, d_model=8, n_heads=1, d_head=8, d_mlp=8, d_vocab=19, n_ctx=32, attention_dir="bidirectional"
    )
    return HookedTransformer(cfg, tokenizer).eval()


def test_encoders_read_their_template_around_every_text(encoder: HookedTransformer) -> None:
    text = "a b c d e f g h i j"
    assert text_to_tokens(encoder, text, None, shorten="").tokens.tolist() == [[0, *range(3, 13), 1]]
    short = text_to_tokens(encoder, text, 5, shorten="")
    assert short.tokens.tolist() == [[0, 3, 4, 5, 1]]
    assert short.description.startswith("the first 5 of 12 tokens of")
    chunks = text_to_sequences(encoder, text, None, length=6)
    assert chunks.tokens.tolist() == [[0, 3, 4, 5, 6, 1], [0, 7, 8, 9, 10, 1]]
    assert chunks.description.endswith("in sequences of [CLS], 4 tokens and [SEP], 8 of the text's 10")
    assert chunked_text(encoder, text, length=5, prepend_bos=False).tolist() == [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    sequences = Sequences.read(encoder, [text, "a b"])
    assert sequences.description == "“a b c d e f g h i j” and 1 more"
    assert sequences.tokens[1, :5].tolist() == [0, 3, 4, 1, 0] and sequences.lengths.tolist() == [12, 4]


def test_random_tokens_for_encoders_stand_within_the_template(encoder: HookedTransformer) -> None:
    prompts = repeated_random_tokens(encoder, length=4, n_sequences=2)
    assert prompts.tokens.shape == (2, 10) and prompts.has_bos
    assert prompts.tokens[:, 0].tolist() == [0, 0] and prompts.tokens[:, -1].tolist() == [1, 1]
    assert (prompts.tokens[:, 1:5] == prompts.tokens[:, 5:9]).all() and (prompts.tokens[:, 1:9] > 2).all()
    assert prompts.copy[0].tolist() == [-1, 0, 0, 0, 0, 1, 1, 1, 1, -1] and prompts.index[0, -1] == -1
    assert prompts.description == "[CLS], 4 random tokens twice and [SEP], seed 0"
    with pytest.raises(ValueError, match="make 34 positions"):
        repeated_random_tokens(encoder, length=16)
