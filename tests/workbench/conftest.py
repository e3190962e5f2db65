"""Tiny random models of both families beside transformers' own, and a word-level tokenizer to talk to them."""

from __future__ import annotations

from typing import Any, NamedTuple

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

from workbench import HookedEncoderDecoder, HookedTransformer, MixtureOfExperts, RopeScaling, TransformerConfig

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


# A tiny model with each mechanism, alone or with what it is usually found with.
_SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 6, "d_mlp": 20, "d_vocab": 23, "n_ctx": 32,
    "init_mode": "xavier",
}  # fmt: skip
_ROTARY: dict[str, Any] = {"positional_embedding_type": "rotary", "normalization_type": "RMS"}
_GATED: dict[str, Any] = {"gated_mlp": True, "act_fn": "silu"}
_BIASES: dict[str, Any] = dict.fromkeys(("use_qkv_bias", "use_attn_out_bias", "use_mlp_bias", "use_unembed_bias"), True)
_ENCODER: dict[str, Any] = {"attention_dir": "bidirectional", "n_segments": 2}
_MECHANISMS: dict[str, dict[str, Any]] = {
    "learned positions": _BIASES,
    "learned positions, no biases, tied": {"use_norm_bias": False, "tie_word_embeddings": True},
    "tied, with norm biases": {"tie_word_embeddings": True},
    "sinusoidal": {"positional_embedding_type": "sinusoidal", "embed_scale": 4.0, "act_fn": "relu"},
    "no positions": {"positional_embedding_type": "none"},
    "rotary": {**_ROTARY, **_GATED},
    "rotary, partial, grouped": {**_ROTARY, "rotary_dim": 4, "rotary_adjacent_pairs": True, "n_key_value_heads": 2},
    "rotary, scaled": {**_ROTARY, "rope_scaling": RopeScaling(type="yarn", factor=4.0, original_context=8)},
    "alibi, embedding norm": {"positional_embedding_type": "alibi", "use_embed_norm": True, "n_key_value_heads": 1},
    "relative": {"positional_embedding_type": "relative", "normalization_type": "RMS", "attn_scale": 1.0},
    "post": {"norm_placement": "post", **_BIASES},
    "sandwich, soft caps": {
        **_ROTARY, **_GATED, "norm_placement": "sandwich", "norm_gain_plus_one": True, "attn_scores_soft_cap": 5.0,
        "output_logits_soft_cap": 8.0,
    },
    "output": {**_ROTARY, "norm_placement": "output", "qk_norm": "across_heads"},
    "parallel": {**_ROTARY, "parallel_attn_mlp": True, "normalization_type": "LN", **_BIASES},
    "parallel, one norm": {"parallel_attn_mlp": True, "shared_parallel_norm": True},
    "norms of q and k": {**_ROTARY, "qk_norm": "per_head"},
    "norms of q and k, rotated": {**_ROTARY, "qk_norm": "per_head", "qk_norm_after_rotary": True},
    "windows, global token": {**_ROTARY, "window_size": 3, "n_global_tokens": 1, "attn_types": ("local", "global"),
                              "rotary_base_local": 100.0},
    "sink logits": {**_ROTARY, **_GATED, "use_sink_logits": True, "glu_limit": 2.0, "glu_linear_offset": 1.0},
    "linear": {**_ROTARY, "attn_types": ("linear", "global"), "normalization_type": "LN"},
    "experts": {**_GATED, "moe": MixtureOfExperts(n_experts=4, n_experts_per_token=2, d_expert=8)},
    "experts, router bias, a dense layer": {
        "moe": MixtureOfExperts(n_experts=3, n_experts_per_token=2, use_router_bias=True, renormalise=False,
                                dense_layers=(1,)),
        "use_mlp_bias": True,
    },
    "scaled logits": {"logit_scale": 0.3},
    "encoder": {**_ENCODER, "use_mlm_head": True, **_BIASES, "tie_word_embeddings": True},
    "encoder, post": {**_ENCODER, "use_mlm_head": True, "norm_placement": "post", "use_embed_norm": True},
    "encoder without a head": {**_ENCODER, "use_unembed": False},
    "encoder–decoder": {"n_encoder_layers": 1, "positional_embedding_type": "sinusoidal", "tie_word_embeddings": True},
    "encoder–decoder, post": {"n_encoder_layers": 2, "norm_placement": "post", **_BIASES},
    "encoder–decoder, relative": {
        "n_encoder_layers": 2, "positional_embedding_type": "relative", "normalization_type": "RMS", "attn_scale": 1.0,
        "logit_scale": 0.25, "init_mode": "t5", "initializer_range": 1.0,
    },
}  # fmt: skip


class Mechanism(NamedTuple):
    """A mechanism's model, whose every parameter is random, and what its call takes beside tokens."""

    model: HookedTransformer
    arguments: dict[str, Any]

    def output(self, model: HookedTransformer | None = None, **arguments: Any) -> torch.Tensor:
        """Logits [2, 12, d_vocab], of another model where one is given; of a model without a head its last stream."""
        chosen, arguments = self.model if model is None else model, {**self.arguments, **arguments}
        if chosen.cfg.use_unembed:
            return chosen(**arguments)
        return chosen.ln_final(chosen(**arguments, stop_at_layer=chosen.cfg.n_layers))


@pytest.fixture(params=_MECHANISMS)
def mechanism(request: pytest.FixtureRequest) -> Mechanism:
    """Each mechanism in turn, in float64 and eval mode; a test may do with the model as it likes."""
    torch.manual_seed(0)
    cfg = TransformerConfig(**{**_SIZES, **_MECHANISMS[request.param], "dtype": torch.float64})
    model = (HookedTransformer if cfg.n_encoder_layers is None else HookedEncoderDecoder)(cfg).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 or parameter.std() == 0:  # gains, biases, sink logits
            parameter.data += 0.3 * torch.randn_like(parameter)
    tokens = torch.randint(0, cfg.d_vocab, (2, 12))
    arguments = {"input": tokens}
    if cfg.n_encoder_layers is not None:
        arguments["decoder_input"] = torch.randint(0, cfg.d_vocab, (2, 9))
    return Mechanism(model, arguments)
