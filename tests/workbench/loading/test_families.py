"""Configurations: what the published ones map to, and that nothing passes which would change the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.config import TransformerConfig
from workbench.errors import UnsupportedModelError
from workbench.loading.families import find_family, gpt2, llama

# As published, attribute by attribute.
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 131072, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_gpt2_as_published() -> None:
    assert gpt2.map_config(GPT2) == TransformerConfig(
        n_layers=12, d_model=768, n_heads=12, d_head=64, d_mlp=3072, d_vocab=50257, n_ctx=1024, act_fn="gelu_tanh",
        eps=1e-5, use_qkv_bias=True, use_attn_out_bias=True, use_mlp_bias=True, tie_word_embeddings=True,
    )  # fmt: skip


def test_smollm2_as_published() -> None:
    assert llama.map_config(SMOLLM2) == TransformerConfig(
        n_layers=30, d_model=576, n_heads=9, n_key_value_heads=3, d_head=64, d_mlp=1536, d_vocab=49152, n_ctx=8192,
        act_fn="silu", gated_mlp=True, normalization_type="RMS", eps=1e-5, positional_embedding_type="rotary",
        rotary_base=100_000.0, tie_word_embeddings=True, init_mode="normal", initializer_range=0.041666666666666664,
    )  # fmt: skip


def test_qwen2_as_published() -> None:
    """Its window is switched off; biases on q, k and v only."""
    assert llama.map_config(QWEN2) == TransformerConfig(
        n_layers=24, d_model=896, n_heads=14, n_key_value_heads=2, d_head=64, d_mlp=4864, d_vocab=151936, n_ctx=131072,
        act_fn="silu", gated_mlp=True, normalization_type="RMS", eps=1e-6, positional_embedding_type="rotary",
        rotary_base=1_000_000.0, use_qkv_bias=True, tie_word_embeddings=True, init_mode="normal",
    )  # fmt: skip


def test_windows_as_published() -> None:
    """Mistral's is in every layer, whatever the context; Qwen's from a layer on, once it is switched on."""
    for n_ctx in (None, 4096, 100):
        mistral = llama.map_config(MISTRAL, n_ctx)
        assert mistral.layer_types == ("local",) * 32 and mistral.window_size == 4096
    assert llama.map_config(MISTRAL | {"sliding_window": None}).layer_types == ("global",) * 32
    switched_on = QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}
    qwen = llama.map_config(switched_on)
    assert qwen.layer_types == ("global",) * 21 + ("local",) * 3 and qwen.window_size == 4096
    assert llama.map_config(switched_on | {"max_window_layers": 24}).layer_types == ("global",) * 24
    types = ["sliding_attention", "full_attention"] * 12
    assert llama.map_config(switched_on | {"layer_types": types}).layer_types == ("local", "global") * 12


@pytest.mark.parametrize(
    ("config", "attribute", "value"),
    [
        (SMOLLM2, "partial_rotary_factor", 0.5),
        (SMOLLM2, "rope_interleaved", True),
        (SMOLLM2, "hidden_act", "mish"),
        (SMOLLM2, "layer_types", ["full_attention", "sliding_attention"]),
        (SMOLLM2, "layer_types", ["full_attention"] * 29 + ["sliding_attention"]),
        (SMOLLM2, "layer_types", ["chunked_attention"] * 30),
        (MISTRAL, "layer_types", ["full_attention"] * 32),
        (QWEN2, "layer_types", ["sliding_attention"] * 24),
        (SMOLLM2, "no_rope_layers", [1, 1, 0]),
        (SMOLLM2, "attn_logit_softcapping", 50.0),
        (SMOLLM2, "logits_scaling", 8.0),
        (SMOLLM2, "quantization_config", {"quant_method": "gptq"}),
        (SMOLLM2, "auto_map", {"AutoModelForCausalLM": "modeling_x.X"}),
        (SMOLLM2, "some_new_attribute", None),
        (MISTRAL | {"sliding_window": None}, "attention_bias", True),
        (QWEN2, "use_mrope", True),
        (QWEN2, "use_qk_norm", True),
        (GPT2, "scale_attn_by_inverse_layer_idx", True),
        (GPT2, "add_cross_attention", True),
        (GPT2, "activation_function", "tanh"),
        (GPT2, "n_head", 7),
        (GPT2, "is_encoder_decoder", True),
        (GPT2, "rope_theta", 1e4),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_attributes_that_would_change_the_numbers_are_named(config: dict[str, Any], attribute: str, value: Any) -> None:
    family = find_family(config, "x")
    with pytest.raises(UnsupportedModelError, match=f"^{config['model_type']}: {attribute}") as caught:
        family.map_config(config | {attribute: value}, None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("name", "ours"), [("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("quick_gelu", "gelu_quick")]
)
def test_activations(name: str, ours: str) -> None:
    assert gpt2.map_config(GPT2 | {"activation_function": name}).act_fn == ours


def test_gpt2_without_attention_scale() -> None:
    assert gpt2.map_config(GPT2 | {"scale_attn_weights": False}).query_key_scale == 1.0


@pytest.mark.parametrize("attribute", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_size_that_is_missing_is_not_guessed(attribute: str) -> None:
    config = {name: value for name, value in SMOLLM2.items() if name != attribute}
    with pytest.raises(UnsupportedModelError, match=f"lacks {attribute}"):
        llama.map_config(config)


def test_unknown_architectures_list_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModelError, match="supported are gpt2, .*llama, mistral, qwen2"):
        find_family({"model_type": "rwkv"}, "x")
    with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification is not supported"):
        find_family(SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"]}, "x")


@pytest.mark.parametrize("value", ["24", 0, -1, True, 1.5, [8], {}, 10**30], ids=repr)
@pytest.mark.parametrize(
    ("config", "attribute"),
    [(SMOLLM2, "hidden_size"), (SMOLLM2, "num_attention_heads"), (SMOLLM2, "num_key_value_heads"), (GPT2, "n_head")],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_size_that_is_no_count_is_named(config: dict[str, Any], attribute: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{attribute} = .* expected a whole number from 1 to"):
        find_family(config, "x").map_config(config | {attribute: value}, None)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("rms_norm_eps", None), ("rms_norm_eps", "1e-5"), ("rms_norm_eps", float("nan")), ("rope_theta", "wide"),
        ("rope_scaling", "linear"), ("rope_scaling", [2.0]), ("rope_parameters", 5), ("layer_types", 5),
        ("rope_parameters", []), ("rope_scaling", ""), ("rope_parameters", False), ("layer_types", {}),
        ("hidden_act", ["silu"]), ("tie_word_embeddings", "no"), ("attention_bias", 1),
    ],
)  # fmt: skip
def test_an_attribute_of_a_wrong_type_is_named(attribute: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^llama: {attribute} = "):
        llama.map_config(SMOLLM2 | {attribute: value}, None)
