"""T5 in both its forms, with odd sizes, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, T5Config, T5EncoderModel, T5ForConditionalGeneration, T5Model

from workbench import HookedTransformer, TransformerConfig
from workbench.errors import UnsupportedModelError
from workbench.loading.families import t5
from workbench.parity import measure_parity

# Scores are not scaled down, so large weights would saturate the softmax and blow up the last digits.
STD = 0.15
_T5: dict[str, Any] = {
    "vocab_size": 61, "d_model": 48, "d_kv": 10, "d_ff": 52, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 6,
    "relative_attention_num_buckets": 14, "relative_attention_max_distance": 40, "layer_norm_epsilon": 1e-4,
    "decoder_start_token_id": 0, "n_positions": 300,
}  # fmt: skip
CASES = {
    "t5": (T5ForConditionalGeneration, T5Config(**_T5)),
    "t5 1.1": (
        T5ForConditionalGeneration,
        T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "t5 without a head": (T5Model, T5Config(**_T5, feed_forward_proj="gated-silu")),
}


@pytest.fixture
def build_random(build_random: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """As elsewhere, with an unembedding of its own for T5 1.1, which transformers 5 gives only to what it loads."""

    def build(*arguments: Any) -> PreTrainedModel:
        model = build_random(*arguments)
        if not model.config.scale_decoder_outputs and hasattr(model, "lm_head"):
            weight = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
            model.lm_head.weight = torch.nn.Parameter(weight)
        return model

    return build


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, check_family: Callable[..., HookedTransformer]) -> None:
    kind, config = CASES[case]
    model = check_family(kind, config, std=STD)
    assert model.cfg.use_unembed == ("head" not in case)
    assert model.cfg.tie_word_embeddings == (case == "t5")


def test_both_texts_padded(build_random: Callable[..., PreTrainedModel]) -> None:
    """Relative positions do not care where a text begins, so pads go anywhere in either."""
    reference = build_random(*CASES["t5"], STD)
    model = HookedTransformer.from_pretrained(reference)
    tokens, decoder_tokens = torch.randint(3, 61, (2, 30)), torch.randint(3, 61, (2, 20))
    mask, decoder_mask = torch.ones_like(tokens), torch.ones_like(decoder_tokens)
    mask[0, -9:], mask[1, :4], decoder_mask[0, :5], decoder_mask[1, -3:] = 0, 0, 0, 0
    ours = model(tokens, attention_mask=mask, decoder_input=decoder_tokens, decoder_attention_mask=decoder_mask)
    theirs = reference(tokens, mask, decoder_tokens, decoder_mask).logits
    torch.testing.assert_close(ours[decoder_mask.bool()], theirs[decoder_mask.bool()], rtol=1e-4, atol=1e-4)


def test_old_checkpoints(build_random: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """They hold the embedding under every name, and relative positions of the cross-attention that nothing reads."""
    reference = build_random(*CASES["t5"], STD)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {name: tensors["shared.weight"].clone() for name in ("encoder.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors | copies | {unread: torch.ones(14, 6)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens, decoder_tokens = torch.randint(3, 61, (1, 9)), torch.randint(3, 61, (1, 7))
    loaded = HookedTransformer.from_pretrained(tmp_path)
    assert loaded.cfg.tie_word_embeddings
    assert measure_parity(loaded, reference, tokens, decoder_tokens=decoder_tokens).largest < 1e-4


# As published, attribute by attribute.
T5_SMALL: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}}, "vocab_size": 32128,
}  # fmt: skip
FLAN_T5_SMALL: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5",
    "n_positions": 512, "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "output_past": True,
    "pad_token_id": 0, "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False, "transformers_version": "4.23.1", "use_cache": True, "vocab_size": 32128,
}  # fmt: skip
_AS_PUBLISHED: dict[str, Any] = {
    "d_model": 512, "d_head": 64, "d_vocab": 32128, "n_ctx": 512, "normalization_type": "RMS", "eps": 1e-6,
    "positional_embedding_type": "relative", "attn_scale": 1.0, "init_mode": "t5", "initializer_range": 1.0,
    "decoder_start_token_id": 0,
}  # fmt: skip


def test_as_published() -> None:
    assert t5.map_config(T5_SMALL) == TransformerConfig(
        **_AS_PUBLISHED, n_layers=6, n_encoder_layers=6, n_heads=8, d_mlp=2048, act_fn="relu",
        logit_scale=512**-0.5, tie_word_embeddings=True,
    )  # fmt: skip
    assert t5.map_config(FLAN_T5_SMALL, n_ctx=2000) == TransformerConfig(
        **_AS_PUBLISHED | {"n_ctx": 2000}, n_layers=8, n_encoder_layers=8, n_heads=6, d_mlp=1024, act_fn="gelu_tanh",
        gated_mlp=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("feed_forward_proj", "gated-mish"),
        ("feed_forward_proj", 3),
        ("dense_act_fn", "relu"),
        ("is_gated_act", False),
        ("is_encoder_decoder", False),
        ("is_decoder", True),
        ("decoder_start_token_id", -1),
        ("num_experts", 8),
        ("tie_word_embeddings", None),
    ],
)
def test_what_would_change_the_numbers_is_refused(attribute: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{attribute} = {value!r} is not supported"):
        t5.map_config(FLAN_T5_SMALL | {attribute: value})


def test_an_encoder_alone_is_refused(build_random: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(UnsupportedModelError, match="T5EncoderModel is not supported"):
        HookedTransformer.from_pretrained(build_random(T5EncoderModel, T5Config(**_T5)))
