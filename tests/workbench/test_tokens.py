"""Text to tokens and back: exactly one BOS, pads never in silence, positions that mean what they say."""

from __future__ import annotations

import copy

import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import repeated_random_tokens


def test_bos_is_there_once_and_only_when_asked(pair):
    assert pair.model.to_tokens("a b").tolist() == [[0, 3, 4]]
    assert pair.model.to_tokens("a b", prepend_bos=True).tolist() == [[0, 3, 4]]
    assert pair.model.to_tokens("a b", prepend_bos=False).tolist() == [[3, 4]]
    assert pair.model.to_tokens("").tolist() == [[0]]


def test_unequal_texts_need_their_mask(pair):
    with pytest.raises(ValueError, match="return_attention_mask=True"):
        pair.model.to_tokens(["a", "a b"])
    for side, expected in (("left", [[False, True, True], [True] * 3]), ("right", [[True, True, False], [True] * 3])):
        tokens, mask = pair.model.to_tokens(["a", "a b"], padding_side=side, return_attention_mask=True)
        assert mask.tolist() == expected
        assert tokens[0][mask[0]].tolist() == [0, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input": ["a", ""], "prepend_bos": False, "return_attention_mask": True}, "empty"),
        ({"input": "a " * 160}, "truncate=True"),
        ({"input": "a", "padding_side": "middle"}, "padding_side"),
        ({"input": [3, 4]}, "expected text, got int"),
    ],
)
def test_text_that_does_not_fit_is_refused(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        pair.model.to_tokens(**arguments)


def test_truncation_keeps_the_beginning(pair):
    tokens = pair.model.to_tokens("a b " * 100, truncate=True)
    assert tokens.shape == (1, 160)
    assert tokens[0, :3].tolist() == [0, 3, 4]


def test_back_to_text(pair):
    assert pair.model.to_str_tokens("a b") == ["<bos>", "a", "b"]
    assert pair.model.to_str_tokens(torch.tensor([3, 4])) == ["a", "b"]
    assert pair.model.to_string(torch.tensor([[3, 4], [5, 6]])) == ["a b", "c d"]
    assert pair.model.to_single_token("c") == 5
    assert pair.model.to_single_str_token(5) == "c"
    with pytest.raises(ValueError, match="2 tokens"):
        pair.model.to_single_token("a b")


def test_token_positions(pair):
    assert pair.model.get_token_position("b", "a b a b") == 2
    assert pair.model.get_token_position("b", "a b a b", mode="last") == 4
    assert pair.model.get_token_position(4, torch.tensor([4, 3, 4]), mode="last") == 2
    with pytest.raises(ValueError, match="does not occur"):
        pair.model.get_token_position("z", "a b")


def test_a_model_without_tokenizer_says_so(pair):
    bare = HookedTransformer(pair.model.cfg)
    with pytest.raises(ValueError, match="no tokenizer"):
        bare.to_tokens("a")


def test_tokens_that_were_added_to_the_tokenizer_alone(pair):
    """As in checkpoints whose pad token has no row in the embedding: it pads, and is refused in a text."""
    tokenizer = copy.deepcopy(pair.model.tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model = HookedTransformer.from_pretrained(pair.reference, tokenizer=tokenizer)
    assert tokenizer.pad_token_id == model.cfg.d_vocab
    torch.testing.assert_close(model(["a", "a b"])[0, :2], model("a")[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="'<pad>' with the id 23, but the model's vocabulary has 23"):
        model("a <pad>")
    drawn = repeated_random_tokens(model, length=15, n_sequences=40).tokens
    assert int(drawn[:, 1:].min()) >= 3 and int(drawn.max()) == 22  # neither special tokens nor the pad
