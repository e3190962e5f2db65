"""BERT, RoBERTa and DistilBERT with their odd options on, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertModel,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
)

from workbench import HookedTransformer, TransformerConfig
from workbench.errors import CorruptWeightsError, UnsupportedModelError
from workbench.loading.families import bert
from workbench.parity import measure_parity

_BERT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 300, "type_vocab_size": 3, "layer_norm_eps": 1e-3, "initializer_range": 0.03,
}  # fmt: skip
_ROBERTA = _BERT | {"type_vocab_size": 1}
_DISTILBERT: dict[str, Any] = {
    "vocab_size": 61, "dim": 48, "hidden_dim": 52, "n_layers": 3, "n_heads": 6, "max_position_embeddings": 300,
}  # fmt: skip

Case = tuple[type[PreTrainedModel], PreTrainedConfig, dict[str, Any]]
CASES: dict[str, Case] = {
    "bert": (BertForMaskedLM, BertConfig(**_BERT, hidden_act="gelu_new"), {}),
    "bert untied": (BertForMaskedLM, BertConfig(**_BERT, hidden_act="relu", tie_word_embeddings=False), {}),
    "bert without a head": (BertModel, BertConfig(**_BERT), {}),
    # RoBERTa finds its positions in the ids of the pads.
    "roberta": (RobertaForMaskedLM, RobertaConfig(**_ROBERTA), {"position_ids": None}),
    "roberta without a head": (RobertaModel, RobertaConfig(**_ROBERTA), {"position_ids": None}),
    "distilbert": (DistilBertForMaskedLM, DistilBertConfig(**_DISTILBERT, activation="relu"), {}),
    "distilbert without a head": (DistilBertModel, DistilBertConfig(**_DISTILBERT), {}),
}


@pytest.fixture
def build_random(build_random: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """As elsewhere; the bias that BERT keeps under two names stays one where nothing else is tied."""

    def build(*arguments: Any) -> PreTrainedModel:
        model = build_random(*arguments)
        if isinstance(model, BertForMaskedLM):
            model.cls.predictions.decoder.bias = model.cls.predictions.bias
        return model

    return build


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, check_family: Callable[..., HookedTransformer]) -> None:
    kind, config, hf_arguments = CASES[case]
    model = check_family(kind, config, **hf_arguments)
    assert model.cfg.use_unembed == ("head" not in case)


def test_segments(build_random: Callable[..., PreTrainedModel]) -> None:
    """The segment of each token counts, and without a word about it all are of the first."""
    reference = build_random(BertForMaskedLM, BertConfig(**_BERT))
    model = HookedTransformer.from_pretrained(reference)
    tokens = torch.randint(3, 61, (2, 40))
    segments = torch.arange(40).div(15, rounding_mode="floor").expand(2, -1)
    hf_arguments = {"token_type_ids": segments}
    errors = measure_parity(model, reference, tokens, hf_arguments=hf_arguments, token_type_ids=segments)
    assert errors.largest < 1e-5
    assert measure_parity(model, reference, tokens, hf_arguments=hf_arguments).logits > 1e-2


def test_every_token_sees_every_other(build_random: Callable[..., PreTrainedModel]) -> None:
    """A change of the last token moves what the model says of the first one, unless the last one is a pad."""
    model = HookedTransformer.from_pretrained(build_random(DistilBertForMaskedLM, DistilBertConfig(**_DISTILBERT)))
    tokens = torch.randint(3, 61, (1, 10))
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 61
    assert not torch.allclose(model(tokens)[0, 0], model(other)[0, 0])
    mask = torch.ones_like(tokens).index_fill(1, torch.tensor([9]), 0)
    torch.testing.assert_close(model(tokens, attention_mask=mask)[:, :9], model(other, attention_mask=mask)[:, :9])


def test_a_model_without_a_head_gives_streams_and_no_logits(build_random: Callable[..., PreTrainedModel]) -> None:
    reference = build_random(BertModel, BertConfig(**_BERT))
    model = HookedTransformer.from_pretrained(reference)
    tokens = torch.randint(3, 61, (2, 12))
    _, cache = model.run_with_cache(tokens, return_type=None)
    torch.testing.assert_close(cache["blocks.2.hook_resid_post"], reference(tokens).last_hidden_state)
    with pytest.raises(ValueError, match="head"):
        model(tokens)


def test_pretraining_checkpoints_load_without_what_they_add(build_random: Callable[..., PreTrainedModel]) -> None:
    reference = build_random(BertForPreTraining, BertConfig(**_BERT))
    model = HookedTransformer.from_pretrained(reference)
    tokens = torch.randint(3, 61, (2, 12))
    torch.testing.assert_close(model(tokens), reference(tokens).prediction_logits, rtol=1e-4, atol=1e-4)


def test_norms_of_the_first_checkpoints(build_random: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """google-bert/bert-base-uncased calls gains and biases of its norms gamma and beta."""
    reference = build_random(BertForMaskedLM, BertConfig(**_BERT))
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    assert any("gamma" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, expected = HookedTransformer.from_pretrained(tmp_path), HookedTransformer.from_pretrained(reference)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_bias_under_two_names_must_be_one(build_random: Callable[..., PreTrainedModel]) -> None:
    reference = build_random(BertForMaskedLM, BertConfig(**_BERT, tie_word_embeddings=False))
    reference.cls.predictions.decoder.bias = torch.nn.Parameter(torch.randn(61))
    with pytest.raises(CorruptWeightsError, match="cls.predictions.decoder.bias to cls.predictions.bias, but they dif"):
        HookedTransformer.from_pretrained(reference)


# As published, attribute by attribute.
BERT_BASE: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
    "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
ROBERTA_BASE: dict[str, Any] = {
    "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
    "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
    "model_type": "roberta", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
    "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip
DISTILBERT_BASE: dict[str, Any] = {
    "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
    "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
    "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True,
    "transformers_version": "4.10.0.dev0", "vocab_size": 30522,
}  # fmt: skip
_AS_PUBLISHED: dict[str, Any] = {
    "d_model": 768, "n_heads": 12, "d_head": 64, "d_mlp": 3072, "n_ctx": 512, "attention_dir": "bidirectional",
    "norm_placement": "post", "use_embed_norm": True, "use_qkv_bias": True, "use_attn_out_bias": True,
    "use_mlp_bias": True, "use_unembed_bias": True, "use_mlm_head": True, "tie_word_embeddings": True,
    "init_mode": "normal",
}  # fmt: skip


def test_as_published() -> None:
    assert bert.map_bert(BERT_BASE) == TransformerConfig(
        **_AS_PUBLISHED, n_layers=12, d_vocab=30522, n_segments=2, eps=1e-12
    )
    assert bert.map_bert(ROBERTA_BASE) == TransformerConfig(
        **_AS_PUBLISHED, n_layers=12, d_vocab=50265, n_segments=1, eps=1e-5
    )
    assert bert.map_distilbert(DISTILBERT_BASE) == TransformerConfig(
        **_AS_PUBLISHED, n_layers=6, d_vocab=30522, eps=1e-12
    )


@pytest.mark.parametrize(
    ("config", "attribute", "value"),
    [
        (BERT_BASE, "position_embedding_type", "relative_key_query"),
        (BERT_BASE, "is_decoder", True),
        (BERT_BASE, "add_cross_attention", True),
        (BERT_BASE, "hidden_act", "mish"),
        (BERT_BASE, "num_attention_heads", 7),
        (BERT_BASE, "embedding_size", 128),
        (ROBERTA_BASE, "pad_token_id", 0),
        (ROBERTA_BASE, "hidden_act", "relu"),
        (ROBERTA_BASE, "max_position_embeddings", 2),
        (DISTILBERT_BASE, "tie_weights_", False),
        (DISTILBERT_BASE, "n_heads", 7),
        (DISTILBERT_BASE, "is_decoder", True),
    ],
)
def test_what_would_change_the_numbers_is_refused(config: dict[str, Any], attribute: str, value: Any) -> None:
    map_config = bert.map_distilbert if config is DISTILBERT_BASE else bert.map_bert
    with pytest.raises(UnsupportedModelError, match=f"{attribute} = {value!r} is not supported"):
        map_config(config | {attribute: value})


def test_learned_positions_cannot_be_stretched() -> None:
    assert bert.map_bert(ROBERTA_BASE, n_ctx=100).n_ctx == 100
    with pytest.raises(ValueError, match="n_ctx = 513 exceeds the 512 positions"):
        bert.map_bert(ROBERTA_BASE, n_ctx=513)


def test_other_heads_are_refused(build_random: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(UnsupportedModelError, match="BertForSequenceClassification is not supported.*or a BertModel"):
        HookedTransformer.from_pretrained(build_random(BertForSequenceClassification, BertConfig(**_BERT)))
