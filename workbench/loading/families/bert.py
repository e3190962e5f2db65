"""Encoders with a masked-LM head: BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), DistilBERT (Sanh et al. 2019).

Norms come after each sublayer and after the embeddings. BERT's pooler and next-sentence head are left out, and there is
no dropout: the published weights are evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.config import TransformerConfig
from workbench.loading.families.common import ANY, ConfigAttributes, Family, Harmless, learned_context
from workbench.loading.weights import (
    Op,
    WeightRule,
    first_positions,
    keep,
    positions_after,
    split_heads_bias,
    split_input_heads_of_linear,
    split_output_heads,
    transpose,
)

# RoBERTa numbers positions from padding_idx + 1, and its pad has the id 1.
_ROBERTA_PAD, _ROBERTA_OFFSET = 1, 2

_HARMLESS: Harmless = {
    "is_decoder": (False,),  # which would mask the future
    "position_embedding_type": ("absolute",),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), ANY),
    # of BERT's pooler
    **dict.fromkeys(("directionality", "pooler_fc_size", "pooler_num_attention_heads"), ANY),
    **dict.fromkeys(("pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"), ANY),
}
_HARMLESS_DISTILBERT: Harmless = {
    "is_decoder": (False,),
    "sinusoidal_pos_embds": ANY,  # how the table of positions began
    "tie_weights_": (True,),
    **dict.fromkeys(("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"), ANY),
}


def map_bert(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face BERT or RoBERTa.

    Raises:
        UnsupportedModelError: an attribute that the model cannot express.
        ValueError: ``n_ctx`` exceeds the learned positions.
    """
    attributes = ConfigAttributes(hf_config)
    n_positions = attributes.take_size("max_position_embeddings")
    if attributes.family == "roberta":
        if (pad := attributes.take("pad_token_id", _ROBERTA_PAD)) != _ROBERTA_PAD:
            raise attributes.refusal("pad_token_id", pad, f"positions are counted from the pad's id, {_ROBERTA_PAD}")
        if n_positions <= _ROBERTA_OFFSET:
            raise attributes.refusal("max_position_embeddings", n_positions, f"the first {_ROBERTA_OFFSET} are unused")
        n_positions -= _ROBERTA_OFFSET
        if (activation := attributes.take("hidden_act", "gelu")) != "gelu":
            raise attributes.refusal("hidden_act", activation, "supported is 'gelu', which the head has in any case")
    return _encoder(
        attributes,
        n_ctx,
        n_positions,
        n_layers=attributes.take_size("num_hidden_layers"),
        d_model=attributes.take_size("hidden_size"),
        n_heads=attributes.take_size("num_attention_heads"),
        d_mlp=attributes.take_size("intermediate_size"),
        act_fn=attributes.take_activation("hidden_act", "gelu"),
        eps=attributes.take_number("layer_norm_eps", 1e-12),
        n_segments=attributes.take_size("type_vocab_size", 2),
        harmless=_HARMLESS,
    )


def map_distilbert(hf_config: Mapping[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    """Our configuration of a Hugging Face DistilBERT.

    Raises:
        UnsupportedModelError, ValueError: as ``map_bert``.
    """
    attributes = ConfigAttributes(hf_config)
    return _encoder(
        attributes,
        n_ctx,
        attributes.take_size("max_position_embeddings"),
        n_layers=attributes.take_size("n_layers"),
        d_model=attributes.take_size("dim"),
        n_heads=attributes.take_size("n_heads"),
        d_mlp=attributes.take_size("hidden_dim"),
        act_fn=attributes.take_activation("activation", "gelu"),
        eps=1e-12,
        harmless=_HARMLESS_DISTILBERT,
    )


def _encoder(
    attributes: ConfigAttributes, n_ctx: int | None, n_positions: int, *, harmless: Harmless, **sizes: Any
) -> TransformerConfig:
    heads_name = "n_heads" if attributes.family == "distilbert" else "num_attention_heads"
    config = TransformerConfig(
        **sizes,
        d_head=attributes.head_width(sizes["d_model"], heads_name, sizes["n_heads"]),
        d_vocab=attributes.take_size("vocab_size"),
        n_ctx=learned_context(n_ctx, n_positions),
        attention_dir="bidirectional",
        normalization_type="LN",
        norm_placement="post",
        use_embed_norm=True,
        positional_embedding_type="learned",
        use_qkv_bias=True,
        use_attn_out_bias=True,
        use_mlp_bias=True,
        use_unembed_bias=True,
        use_mlm_head=True,
        tie_word_embeddings=attributes.take_switch("tie_word_embeddings", True),
        init_mode="normal",
        initializer_range=attributes.take_number("initializer_range", 0.02),
    )
    attributes.finish(harmless)
    return config


# Hugging Face keeps matrices as [out, in]; ours are [in, out].


def _linear(source: str, weight: str, bias: str, split: Op, split_bias: Op = keep) -> tuple[WeightRule, ...]:
    return WeightRule(f"{source}.weight", weight, split), WeightRule(f"{source}.bias", bias, split_bias)


def _norm(source: str, target: str) -> tuple[WeightRule, ...]:
    return WeightRule(f"{source}.weight", f"{target}.w", keep), WeightRule(f"{source}.bias", f"{target}.b", keep)


def _layer(
    q: str, k: str, v: str, out: str, norm1: str, mlp_in: str, mlp_out: str, norm2: str
) -> tuple[WeightRule, ...]:
    """The rules of a block from the names of its parts."""
    block = "blocks.{layer}"
    return (
        *_linear(q, f"{block}.attn.W_Q", f"{block}.attn.b_Q", split_output_heads, split_heads_bias),
        *_linear(k, f"{block}.attn.W_K", f"{block}.attn.b_K", split_output_heads, split_heads_bias),
        *_linear(v, f"{block}.attn.W_V", f"{block}.attn.b_V", split_output_heads, split_heads_bias),
        *_linear(out, f"{block}.attn.W_O", f"{block}.attn.b_O", split_input_heads_of_linear),
        *_norm(norm1, f"{block}.ln1"),
        *_linear(mlp_in, f"{block}.mlp.W_in", f"{block}.mlp.b_in", transpose),
        *_linear(mlp_out, f"{block}.mlp.W_out", f"{block}.mlp.b_out", transpose),
        *_norm(norm2, f"{block}.ln2"),
    )


def _bert_body(positions: Op) -> tuple[WeightRule, ...]:
    layer = "encoder.layer.{layer}"
    return (
        WeightRule("embeddings.word_embeddings.weight", "embed.W_E", keep),
        WeightRule("embeddings.position_embeddings.weight", "pos_embed.W_pos", positions),
        WeightRule("embeddings.token_type_embeddings.weight", "segment_embed.W_seg", keep),
        *_norm("embeddings.LayerNorm", "ln_embed"),
        *_layer(
            q=f"{layer}.attention.self.query",
            k=f"{layer}.attention.self.key",
            v=f"{layer}.attention.self.value",
            out=f"{layer}.attention.output.dense",
            norm1=f"{layer}.attention.output.LayerNorm",
            mlp_in=f"{layer}.intermediate.dense",
            mlp_out=f"{layer}.output.dense",
            norm2=f"{layer}.output.LayerNorm",
        ),
    )


def _as_by_google(rules: tuple[WeightRule, ...]) -> tuple[WeightRule, ...]:
    """BERT's first checkpoints call the gain and the bias of a norm gamma and beta."""
    names = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    return tuple(
        WeightRule(rule.source.replace(new, old), rule.target, rule.op)
        for rule in rules
        for new, old in names
        if new in rule.source
    )


_BERT_RULES = (
    *_bert_body(first_positions),
    *_linear("cls.predictions.transform.dense", "mlm_head.W", "mlm_head.b", transpose),
    *_norm("cls.predictions.transform.LayerNorm", "mlm_head.ln"),
    WeightRule("cls.predictions.decoder.weight", "unembed.W_U", transpose),
    WeightRule("cls.predictions.bias", "unembed.b_U", keep),
)
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")

BERT = Family(
    architectures={"bert": ("BertForMaskedLM", "BertForPreTraining")},
    base_models={"bert": "BertModel"},
    map_config=map_bert,
    weight_rules=(*_BERT_RULES, *_as_by_google(_BERT_RULES)),
    base_prefix="bert.",
    tied=("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    harmless_tensors=(
        "embeddings.position_ids",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
        *_POOLER,
    ),
)

ROBERTA = Family(
    architectures={"roberta": "RobertaForMaskedLM"},
    base_models={"roberta": "RobertaModel"},
    map_config=map_bert,
    weight_rules=(
        *_bert_body(positions_after(_ROBERTA_OFFSET)),
        *_linear("lm_head.dense", "mlm_head.W", "mlm_head.b", transpose),
        *_norm("lm_head.layer_norm", "mlm_head.ln"),
        WeightRule("lm_head.decoder.weight", "unembed.W_U", transpose),
        WeightRule("lm_head.bias", "unembed.b_U", keep),
    ),
    base_prefix="roberta.",
    tied=("lm_head.decoder.weight", "embeddings.word_embeddings.weight"),
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    harmless_tensors=("embeddings.position_ids", *_POOLER),
)

_DISTILBERT_LAYER = "transformer.layer.{layer}"

DISTILBERT = Family(
    architectures={"distilbert": "DistilBertForMaskedLM"},
    base_models={"distilbert": "DistilBertModel"},
    map_config=map_distilbert,
    weight_rules=(
        WeightRule("embeddings.word_embeddings.weight", "embed.W_E", keep),
        WeightRule("embeddings.position_embeddings.weight", "pos_embed.W_pos", first_positions),
        *_norm("embeddings.LayerNorm", "ln_embed"),
        *_layer(
            q=f"{_DISTILBERT_LAYER}.attention.q_lin",
            k=f"{_DISTILBERT_LAYER}.attention.k_lin",
            v=f"{_DISTILBERT_LAYER}.attention.v_lin",
            out=f"{_DISTILBERT_LAYER}.attention.out_lin",
            norm1=f"{_DISTILBERT_LAYER}.sa_layer_norm",
            mlp_in=f"{_DISTILBERT_LAYER}.ffn.lin1",
            mlp_out=f"{_DISTILBERT_LAYER}.ffn.lin2",
            norm2=f"{_DISTILBERT_LAYER}.output_layer_norm",
        ),
        *_linear("vocab_transform", "mlm_head.W", "mlm_head.b", transpose),
        *_norm("vocab_layer_norm", "mlm_head.ln"),
        WeightRule("vocab_projector.weight", "unembed.W_U", transpose),
        WeightRule("vocab_projector.bias", "unembed.b_U", keep),
    ),
    base_prefix="distilbert.",
    tied=("vocab_projector.weight", "embeddings.word_embeddings.weight"),
    harmless_tensors=("embeddings.position_ids",),
)
