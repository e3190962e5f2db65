"""Tiny random models of both families beside transformers' own, and a word-level tokenizer to talk to them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from workbench import HookedTransformer

# Tensors this small gain nothing from a second thread, and wait for it on a busy machine.
torch.set_num_threads(1)

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t"]
N_CTX = 160


class Pair(NamedTuple):
    """One set of weights in transformers' implementation (eager attention) and in ours."""

    reference: PreTrainedModel
    model: HookedTransformer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """<bos> is 0, <eos> is 1, <unk> is 2, then a word per token."""
    vocabulary = {word: i for i, word in enumerate(["<bos>", "<eos>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", add_bos_token=True
    )


def _reference(family: str) -> PreTrainedModel:
    """Odd sizes; weights large enough that attention is far from uniform and logits far from flat."""
    torch.manual_seed(0)
    if family == "gpt2":
        cfg = GPT2Config(
            vocab_size=23, n_positions=N_CTX, n_embd=30, n_layer=3, n_head=5, n_inner=44, initializer_range=0.35,
            attn_implementation="eager", bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        reference: PreTrainedModel = GPT2LMHeadModel(cfg)
    else:
        cfg = LlamaConfig(
            vocab_size=23, hidden_size=30, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=10, max_position_embeddings=N_CTX, rms_norm_eps=1e-6, rope_theta=500.0,
            tie_word_embeddings=False, initializer_range=0.35, bos_token_id=0, eos_token_id=1,
            attn_implementation="eager",
        )  # fmt: skip
        reference = LlamaForCausalLM(cfg)
    for name, parameter in reference.named_parameters():
        if name.endswith("bias"):  # zero at initialisation, so that a forgotten one would go unnoticed
            torch.nn.init.normal_(parameter, std=0.3)
        elif parameter.dim() == 1:  # gains, one at initialisation
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return reference.eval()


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> Pair:
    """Both families in turn. Read-only: a test that reconfigures the model takes ``model``."""
    reference = _reference(request.param)
    return Pair(reference, HookedTransformer.from_pretrained(reference, tokenizer=tokenizer))


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast) -> HookedTransformer:
    """A model of each family that a test may reconfigure."""
    return HookedTransformer.from_pretrained(_reference(request.param), tokenizer=tokenizer)


@pytest.fixture(scope="session")
def tokens() -> torch.Tensor:
    """[3, 150]: long enough for a mistake in rotary pairs to show."""
    return torch.randint(0, 23, (3, 150), generator=torch.Generator().manual_seed(1))
