"""MarianMT, the original Transformer, with its odd options on, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import MarianConfig, MarianModel, MarianMTModel, PreTrainedModel

from workbench import HookedTransformer, TransformerConfig
from workbench.errors import CorruptWeightsError, UnsupportedModelError
from workbench.loading.families import marian

_MARIAN: dict[str, Any] = {
    "vocab_size": 61, "d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 52, "decoder_ffn_dim": 52, "max_position_embeddings": 300,
    "pad_token_id": 2, "decoder_start_token_id": 2, "eos_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
CASES = {
    "marian": (MarianMTModel, MarianConfig(**_MARIAN, scale_embedding=True, activation_function="swish")),
    "marian unscaled": (MarianMTModel, MarianConfig(**_MARIAN, activation_function="relu")),
    "marian without a head": (MarianModel, MarianConfig(**_MARIAN, scale_embedding=True)),
}


@pytest.fixture
def build_random(build_random: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """As elsewhere; positions stay sinusoids, and the bias of the logits, which is a buffer, is random as well."""

    def build(*arguments: Any) -> PreTrainedModel:
        model = build_random(*arguments)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("embed_positions.weight"):
                    parameter.copy_(model.get_submodule(name.removesuffix(".weight")).create_weight())
            if isinstance(model, MarianMTModel):
                model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
        return model

    return build


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, check_family: Callable[..., HookedTransformer]) -> None:
    kind, config = CASES[case]
    model = check_family(kind, config)
    assert model.cfg.use_unembed == ("head" not in case)


def test_positions_that_are_no_sinusoids_are_refused(build_random: Callable[..., PreTrainedModel]) -> None:
    """They would be computed, and the checkpoint's table never read."""
    kind, config = CASES["marian"]
    model = build_random(kind, config, 0.3)
    with torch.no_grad():
        model.model.encoder.embed_positions.weight[3, 5] += 0.5
    with pytest.raises(CorruptWeightsError, match="encoder.embed_positions.weight is not the table"):
        HookedTransformer.from_pretrained(model)


# As published, attribute by attribute.
OPUS_MT: dict[str, Any] = {
    "_num_labels": 3, "activation_dropout": 0.0, "activation_function": "swish", "add_bias_logits": False,
    "add_final_layer_norm": False, "architectures": ["MarianMTModel"], "attention_dropout": 0.0,
    "bad_words_ids": [[58100]], "bos_token_id": 0, "classif_dropout": 0.0, "classifier_dropout": 0.0, "d_model": 512,
    "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layerdrop": 0.0, "decoder_layers": 6,
    "decoder_start_token_id": 58100, "decoder_vocab_size": 58101, "dropout": 0.1, "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048, "encoder_layerdrop": 0.0, "encoder_layers": 6, "eos_token_id": 0,
    "forced_eos_token_id": 0, "id2label": {"0": "LABEL_0"}, "init_std": 0.02, "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0}, "max_length": 512, "max_position_embeddings": 512, "model_type": "marian",
    "normalize_before": False, "normalize_embedding": False, "num_beams": 4, "num_hidden_layers": 6,
    "pad_token_id": 58100, "scale_embedding": True, "share_encoder_decoder_embeddings": True,
    "static_position_embeddings": True, "transformers_version": "4.22.0.dev0", "use_cache": True, "vocab_size": 58101,
}  # fmt: skip


def test_as_published() -> None:
    assert marian.map_config(OPUS_MT) == TransformerConfig(
        n_layers=6, n_encoder_layers=6, d_model=512, n_heads=8, d_head=64, d_mlp=2048, d_vocab=58101, n_ctx=512,
        act_fn="silu", norm_placement="post", embed_scale=512**0.5, positional_embedding_type="sinusoidal",
        sinusoidal_halves=True, use_qkv_bias=True, use_attn_out_bias=True, use_mlp_bias=True, use_unembed_bias=True,
        tie_word_embeddings=True, init_mode="normal", decoder_start_token_id=58100,
    )  # fmt: skip
    assert marian.map_config(OPUS_MT, n_ctx=600).n_ctx == 600


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("decoder_attention_heads", 4),
        ("decoder_ffn_dim", 1024),
        ("decoder_vocab_size", 40000),
        ("num_hidden_layers", 12),
        ("encoder_attention_heads", 7),
        ("share_encoder_decoder_embeddings", False),
        ("tie_word_embeddings", False),
        ("static_position_embeddings", False),
        ("normalize_before", True),
        ("normalize_embedding", True),
        ("add_final_layer_norm", True),
        ("activation_function", "mish"),
        ("decoder_start_token_id", None),
        ("layer_norm_eps", 1e-3),
    ],
)
def test_what_would_change_the_numbers_is_refused(attribute: str, value: Any) -> None:
    other = {"decoder_attention_heads": 7} if attribute == "encoder_attention_heads" else {}
    with pytest.raises(UnsupportedModelError, match=f"{attribute} = {value!r} is not supported"):
        marian.map_config(OPUS_MT | {attribute: value} | other)
