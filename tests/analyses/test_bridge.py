"""A TransformerBridge of transformer_lens gives what our model gives for the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import (
    PromptSet,
    attention_sinks,
    attribution_agreement,
    first_token_sinks,
    head_pattern,
    head_statistics,
    induction_heads,
    massive_activations,
    sink_interventions,
    source_attribution,
    streaming_perplexity,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[HookedTransformer, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(58)} | {"<s>": 58, "<unk>": 59}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<s>", "unk_token": "<unk>"}
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    reference = LlamaForCausalLM(config).eval()
    ours = HookedTransformer.from_pretrained(copy.deepcopy(reference), tokenizer=tokenizer)
    bridge = TransformerBridge.boot_transformers("tiny", hf_model=reference, tokenizer=tokenizer)
    return ours, bridge


def test_all_analyses_agree(models: tuple[HookedTransformer, Any]) -> None:
    tokens = torch.randint(0, 58, (3, 30), generator=torch.Generator().manual_seed(0))
    for analyse in (
        lambda model: head_statistics(model, tokens),
        lambda model: attention_sinks(model, tokens, epsilon=0.06),
        lambda model: first_token_sinks(model, tokens, epsilon=0.06),
        lambda model: sink_interventions(model, tokens, n_heads=2),
        lambda model: head_pattern(model, tokens[0], 1, 2),
        lambda model: head_pattern(model, tokens[0], 1, 2, max_cells=7, pooling="mean"),
        lambda model: head_pattern(model, "w1 w2 w3 w1", 0, 1),
        lambda model: induction_heads(model, length=12, n_sequences=2, n_ablated=2, pattern_threshold=0.01),
    ):
        ours, theirs = (analyse(model) for model in models)
        # What goes straight to the logits is known of our own models only.
        assert [name for name in ours.quantities if "direct" not in name] == list(theirs.quantities)
        for name in theirs.quantities:
            if ours[name].dtype.kind == "f":
                np.testing.assert_allclose(theirs[name], ours[name], atol=2e-5, err_msg=name)
        assert theirs.provenance.inputs_sha256 == ours.provenance.inputs_sha256
        assert "TransformerBridge" in theirs.provenance.weights


def test_attention_against_ablation(models: tuple[HookedTransformer, Any]) -> None:
    tokens, corrupted = torch.randint(0, 58, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens, dtype=torch.bool)
    prompts = PromptSet(tokens, real, torch.arange(3), torch.arange(3, 6), corrupted, "random", "random tokens")
    for analyse in (attribution_agreement, source_attribution):
        ours, theirs = (analyse(model, prompts, n_permutations=9) for model in models)
        # What goes straight to the logits is known of our own models only; ranks of near ties may differ.
        assert {name.split("_")[-1] for name in set(ours.quantities) - set(theirs.quantities)} <= {"direct", "repair"}
        for name in ours.names("layer", "head") + ours.names("prompt", "pos"):
            if name in theirs and ours[name].dtype.kind == "f":
                np.testing.assert_allclose(theirs[name], ours[name], atol=5e-5, err_msg=name)


def test_what_a_bridge_cannot_do_is_refused(models: tuple[HookedTransformer, Any]) -> None:
    with pytest.raises(ValueError, match="one length"):
        head_statistics(models[1], torch.tensor([[1, 2], [3, 4]]), attention_mask=torch.tensor([[1, 1], [1, 0]]))
    with pytest.raises(ValueError, match="one length"):
        head_statistics(models[1], ["w1 w2", "w3"])
    tokens = torch.arange(30)
    for analyse in (massive_activations, lambda model, tokens: streaming_perplexity(model, tokens, window=8)):
        with pytest.raises(ValueError, match="needs a HookedTransformer"):
            analyse(models[1], tokens)
