"""GPT-2 and its relatives: parity with transformers with every odd option on, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from workbench import HookedTransformer, TransformerConfig, UnsupportedModelError
from workbench.components.positions import alibi_slopes
from workbench.loading.families import find_family
from workbench.parity import measure_parity

CheckFamily = Callable[..., HookedTransformer]

N_CTX = 280
# Head counts that are no powers of two, for ALiBi.
_GPT2 = {"vocab_size": 71, "n_positions": N_CTX, "n_embd": 30, "n_layer": 2, "n_head": 5}
_NEOX = {
    "vocab_size": 71, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": N_CTX,
}  # fmt: skip
_GPT_NEO = {
    "vocab_size": 71, "hidden_size": 30, "num_heads": 5, "num_layers": 3, "max_position_embeddings": N_CTX,
    "attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 37,
}  # fmt: skip
_OPT = {
    "vocab_size": 71, "hidden_size": 30, "num_attention_heads": 5, "num_hidden_layers": 2, "ffn_dim": 44,
    "max_position_embeddings": N_CTX,
}  # fmt: skip
_BLOOM = {"vocab_size": 71, "hidden_size": 36, "n_head": 6, "n_layer": 2}
_MPT = {"vocab_size": 71, "d_model": 36, "n_heads": 6, "n_layers": 2, "max_seq_len": N_CTX}
_FALCON = {
    "vocab_size": 71, "hidden_size": 36, "num_attention_heads": 6, "num_hidden_layers": 2, "ffn_hidden_size": 52,
    "max_position_embeddings": N_CTX,
}  # fmt: skip

CASES: dict[str, tuple[type[PreTrainedModel], PreTrainedConfig]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**_GPT2, n_inner=44)),
    "gpt2-odd": (
        GPT2LMHeadModel,
        GPT2Config(**_GPT2, activation_function="relu", scale_attn_weights=False, tie_word_embeddings=False),
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**_NEOX, rotary_pct=0.34)),
    "gpt_neox-odd": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(
            **_NEOX,
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            hidden_act="gelu_fast",
            layer_norm_eps=1e-3,
            rope_parameters={
                "rope_type": "yarn", "factor": 3.0, "rope_theta": 300.0, "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 100,
            },
        ),
    ),
    "gptj": (
        GPTJForCausalLM, GPTJConfig(vocab_size=71, n_positions=N_CTX, n_embd=36, n_layer=2, n_head=3, rotary_dim=6)
    ),
    "gptj-odd": (
        GPTJForCausalLM,
        GPTJConfig(
            vocab_size=71, n_positions=N_CTX, n_embd=36, n_layer=2, n_head=3, rotary_dim=12, n_inner=52,
            activation_function="relu", layer_norm_epsilon=1e-3, tie_word_embeddings=True,
        ),
    ),
    "gpt_neo": (GPTNeoForCausalLM, GPTNeoConfig(**_GPT_NEO, intermediate_size=44)),
    "gpt_neo-odd": (
        GPTNeoForCausalLM, GPTNeoConfig(**_GPT_NEO, activation_function="gelu", tie_word_embeddings=False)
    ),
    "opt": (OPTForCausalLM, OPTConfig(**_OPT)),
    "opt-odd": (
        OPTForCausalLM,
        OPTConfig(
            **_OPT, do_layer_norm_before=False, enable_bias=False, activation_function="gelu",
            tie_word_embeddings=False,
        ),
    ),
    "bloom": (BloomForCausalLM, BloomConfig(**_BLOOM)),
    "bloom-odd": (BloomForCausalLM, BloomConfig(**_BLOOM, layer_norm_epsilon=1e-3, tie_word_embeddings=False)),
    "mpt": (MptForCausalLM, MptConfig(**_MPT)),
    "mpt-odd": (
        MptForCausalLM,
        MptConfig(**_MPT, attn_config={"softmax_scale": 0.6}, layer_norm_epsilon=1e-3, tie_word_embeddings=False),
    ),
    "falcon-7b": (FalconForCausalLM, FalconConfig(**_FALCON)),
    "falcon-40b": (
        FalconForCausalLM,
        FalconConfig(
            **_FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True, tie_word_embeddings=False,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
        ),
    ),
    "falcon-one-norm": (
        FalconForCausalLM,
        FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=3, num_ln_in_parallel_attn=1),
    ),
    "falcon-sequential": (
        FalconForCausalLM, FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, bias=True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, check_family: CheckFamily) -> None:
    check_family(*CASES[case], std=0.2)


@pytest.mark.parametrize("case", [case for case in CASES if "-" not in case or case == "falcon-7b"])
def test_without_a_head(case: str, build_random: Callable[..., PreTrainedModel]) -> None:
    """The base models that transformers' AutoModel makes give a residual stream and no logits."""
    _, config = CASES[case]
    reference = build_random(AutoModel.from_config, copy.deepcopy(config), 0.2)
    model = HookedTransformer.from_pretrained(reference)
    tokens = torch.randint(0, 71, (2, 50), generator=torch.Generator().manual_seed(0))
    assert not model.cfg.use_unembed
    assert measure_parity(model, reference, tokens).largest < 1e-4


def test_gpt_neox_as_older_transformers_saved_it(build_random: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    """The head has another name on disk than in memory, and masks and frequencies lay beside the weights."""
    reference = build_random(*CASES["gpt_neox"], 0.2)
    reference.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "embed_out.weight" in weights
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        weights[f"gpt_neox.layers.1.attention.{name}"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(HookedTransformer.from_pretrained(tmp_path).W_U, reference.lm_head.weight.T)


# As published, attribute by attribute.
PYTHIA: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": True, "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
GPTJ: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "bos_token_id": 50256,
    "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": False, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28,
    "n_positions": 2048, "resid_pdrop": 0.0, "rotary": True, "rotary_dim": 64, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0", "use_cache": True, "vocab_size": 50400,
}  # fmt: skip
GPT_NEO: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0,
    "attention_layers": ["global", "local"] * 6, "attention_types": [[["global", "local"], 6]], "bos_token_id": 50256,
    "embed_dropout": 0, "eos_token_id": 50256, "gradient_checkpointing": False, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": None, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 2048,
    "model_type": "gpt_neo", "num_heads": 12, "num_layers": 12, "resid_dropout": 0, "summary_activation": None,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "transformers_version": "4.9.0.dev0", "use_cache": True, "vocab_size": 50257,
    "window_size": 256,
}  # fmt: skip
OPT: dict[str, Any] = {
    "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
    "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
    "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0,
    "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 12, "num_hidden_layers": 12,
    "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "transformers_version": "4.21.0.dev0",
    "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 768,
}  # fmt: skip
BLOOM: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024, "n_inner": None, "n_layer": 24,
    "num_attention_heads": 16, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048,
    "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0, "use_cache": True,
    "vocab_size": 250880,
}  # fmt: skip
MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
    },
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "d_model": 4096, "emb_pdrop": 0,
    "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu",
    "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32,
    "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "transformers_version": "4.28.1",
    "use_cache": False, "verbose": 0, "vocab_size": 50432,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"}, "bias": False,
    "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": False,
    "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4", "use_cache": True, "vocab_size": 65024,
}  # fmt: skip


def our_config(hf_config: dict[str, Any], n_ctx: int | None = None) -> TransformerConfig:
    return find_family(hf_config, "the checkpoint").map_config(hf_config, n_ctx)


def sizes(n_layers: int, d_model: int, n_heads: int, d_vocab: int, **others: Any) -> TransformerConfig:
    """A configuration of these sizes, with everything else of the paper's usual shape."""
    usual = {"d_head": d_model // n_heads, "d_mlp": 4 * d_model, "n_ctx": 2048, "init_mode": "normal"}
    return TransformerConfig(
        n_layers=n_layers, d_model=d_model, n_heads=n_heads, d_vocab=d_vocab, **usual | others
    )  # fmt: skip


def test_pythia_as_published() -> None:
    assert our_config(PYTHIA) == sizes(
        6, 512, 8, 50304, parallel_attn_mlp=True, positional_embedding_type="rotary", rotary_dim=16,
        use_qkv_bias=True, use_attn_out_bias=True, use_mlp_bias=True,
    )  # fmt: skip


def test_gptj_as_published() -> None:
    assert our_config(GPTJ) == sizes(
        28, 4096, 16, 50400, act_fn="gelu_tanh", parallel_attn_mlp=True, shared_parallel_norm=True,
        positional_embedding_type="rotary", rotary_dim=64, rotary_adjacent_pairs=True, use_mlp_bias=True,
        use_unembed_bias=True,
    )  # fmt: skip


def test_gpt_neo_as_published() -> None:
    assert our_config(GPT_NEO) == sizes(
        12, 768, 12, 50257, act_fn="gelu_tanh", attn_scale=1.0, attn_types=("global", "local") * 6, window_size=256,
        use_attn_out_bias=True, use_mlp_bias=True, tie_word_embeddings=True,
    )  # fmt: skip


def test_opt_as_published() -> None:
    assert our_config(OPT) == sizes(
        12, 768, 12, 50272, act_fn="relu", use_qkv_bias=True, use_attn_out_bias=True, use_mlp_bias=True,
        tie_word_embeddings=True,
    )  # fmt: skip


def test_bloom_as_published() -> None:
    assert our_config(BLOOM) == sizes(
        24, 1024, 16, 250880, act_fn="gelu_tanh", use_embed_norm=True, positional_embedding_type="alibi",
        use_qkv_bias=True, use_attn_out_bias=True, use_mlp_bias=True, tie_word_embeddings=True,
    )  # fmt: skip


def test_mpt_as_published() -> None:
    assert our_config(MPT) == sizes(
        32, 4096, 32, 50432, use_norm_bias=False, positional_embedding_type="alibi", tie_word_embeddings=True
    )  # fmt: skip


def test_falcon_as_published() -> None:
    assert our_config(FALCON) == sizes(
        32, 4544, 71, 65024, n_key_value_heads=1, parallel_attn_mlp=True, shared_parallel_norm=True,
        positional_embedding_type="rotary", tie_word_embeddings=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("published", "change"),
    [
        (PYTHIA, {"rotary_pct": 2.0}),
        (PYTHIA, {"num_attention_heads": 7}),
        (PYTHIA, {"rotary_emb_base": 300.0, "rope_theta": 500.0}),
        (GPTJ, {"rotary_dim": 512}),
        (GPTJ, {"rotary_dim": None}),
        (GPTJ, {"rotary": False}),
        (GPT_NEO, {"attention_types": [[["global", "sparse"], 6]]}),
        (GPT_NEO, {"attention_types": [[["global", "local"], 5]]}),
        (GPT_NEO, {"attention_types": "global"}),
        (GPT_NEO, {"attention_layers": ["global"] * 12}),
        (OPT, {"word_embed_proj_dim": 512}),
        (OPT, {"_remove_final_layer_norm": True}),
        (OPT, {"layer_norm_elementwise_affine": False}),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}),
        (BLOOM, {"n_inner": 1000}),
        (BLOOM, {"num_attention_heads": 8, "n_head": 16}),
        (BLOOM, {"hidden_size": 512, "n_embed": 1024}),
        (MPT, {"expansion_ratio": 3}),
        (MPT, {"logit_scale": 0.5}),
        (MPT, {"logit_scale": "inv_sqrt_d_model"}),
        (MPT, {"no_bias": False}),
        (MPT, {"norm_type": "rmsnorm"}),
        (MPT, {"attn_config": {"clip_qkv": 6.0}}),
        (MPT, {"attn_config": {"alibi": False}}),
        (MPT, {"attn_config": {"alibi_bias_max": 16}}),
        (MPT, {"attn_config": {"attn_type": "multiquery_attention"}}),
        (MPT, {"attn_config": {"prefix_lm": True}}),
        (MPT, {"attn_config": {"qk_ln": True}}),
        (MPT, {"attn_config": {"softmax_scale": 0}}),
        (MPT, {"attn_config": {"sliding_window_size": 512}}),
        (MPT, {"attn_config": "alibi"}),
        (FALCON, {"alibi": True}),
        (FALCON, {"apply_residual_connection_post_layernorm": True}),
        (FALCON, {"num_ln_in_parallel_attn": 2}),
        (FALCON, {"num_ln_in_parallel_attn": 3}),
        (FALCON, {"num_kv_heads": 8, "multi_query": False}),
        (FALCON, {"num_kv_heads": 8, "new_decoder_architecture": True}),
        (FALCON, {"parallel_attn": False, "new_decoder_architecture": True}),
        *[(published, {"clever_trick": 1}) for published in (PYTHIA, GPTJ, GPT_NEO, OPT, BLOOM, MPT, FALCON)],
    ],
    ids=lambda value: value.get("model_type") or str(value),
)
def test_what_would_change_the_numbers_is_refused_by_name(published: dict[str, Any], change: dict[str, Any]) -> None:
    our_config(published)
    (attribute, value), *_ = change.items()
    if isinstance(value, dict):
        (attribute, _), *_ = value.items()
    with pytest.raises(UnsupportedModelError, match=attribute):
        our_config(published | change)


@pytest.mark.parametrize("published", [GPT_NEO, OPT], ids=["gpt_neo", "opt"])
def test_no_position_beyond_the_learned_ones(published: dict[str, Any]) -> None:
    assert our_config(published, 1024).n_ctx == 1024
    with pytest.raises(ValueError, match="n_ctx = 2049 exceeds the 2048 positions"):
        our_config(published, 2049)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 20, 71])
def test_the_slopes_of_mpt_are_those_of_the_paper(n_heads: int) -> None:
    theirs = build_mpt_alibi_tensor(n_heads, 2)[:, 0, 0]  # what the key one position back gains
    torch.testing.assert_close(-theirs, alibi_slopes(n_heads), rtol=1e-6, atol=0)
