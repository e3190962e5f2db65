"""A TransformerBridge of transformer_lens gives what our model gives for the same weights, or is refused by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import workbench.analyses
from workbench import HookedTransformer
from workbench.analyses import PromptSet, Result, direct_logit_attribution, head_statistics, logit_lens
from workbench.analyses import prompts as prompt_module
from workbench.analyses import tasks as task_module

Models = tuple[HookedTransformer, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
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


def drawn(n: int, length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 58, (n, length), generator=torch.Generator().manual_seed(seed))


TOKENS, LONG = drawn(3, 30, 0), drawn(3, 60, 2)
CLEAN, CORRUPTED = drawn(6, 8, 1).split(3)
PROMPTS = PromptSet(
    CLEAN, torch.ones_like(CLEAN, dtype=torch.bool), torch.arange(3), torch.arange(3, 6), CORRUPTED, "random", "random"
)
MORE = PromptSet(
    drawn(6, 8, 4), torch.ones(6, 8, dtype=torch.bool), torch.arange(6), None, drawn(6, 8, 5), "more", "random"
)
SHORT = {"length": 12, "n_sequences": 2}

# Everything that runs on a bridge, with options that leave nothing out; twice where two ways lead through the model.
RUNS: dict[str, list[tuple[tuple, dict[str, Any]]]] = {
    "alternative_attention": [((PROMPTS,), {"n_permutations": 3, "n_starts": 1, "n_steps": 3})],
    "attention_sinks": [((TOKENS,), {"epsilon": 0.06})],
    "attribution_agreement": [((PROMPTS,), {"n_permutations": 9})],
    "attribution_patching": [((PROMPTS,), {"grad_drop": True}), ((PROMPTS,), {"components": "residual"})],
    "direct_logit_attribution": [((PROMPTS,), {})],
    "first_token_sinks": [((TOKENS,), {"epsilon": 0.06})],
    "function_vector_heads": [((MORE,), {"length": 12, "n_random": 1, "n_permutations": 9})],
    "head_pattern": [((TOKENS[0], 1, 2), {}), ((TOKENS[0], 1, 2), {"max_cells": 7, "pooling": "mean"}),
                     (("w1 w2 w3 w1", 0, 1), {}), ((TOKENS[0], 1, 2), {"max_cells": 7, "value_weighted": True}),
                     ((TOKENS[0], 1, 2), {"without_first": True, "words": True})],
    "head_pruning": [((PROMPTS,), {"n_random": 2}), ((TOKENS,), {"n_random": 2, "ablation": "zero"})],
    "head_statistics": [((TOKENS,), {})],
    "head_zoo": [((TOKENS,), SHORT)],
    "in_context_learning": [((drawn(20, 40, 3),), {"early": 5, "late": 30})],
    "induction_heads": [((), SHORT | {"n_ablated": 2, "pattern_threshold": 0.01})],
    "integrated_gradients": [((PROMPTS,), {}), ((PROMPTS,), {"baseline": "mean embedding"})],
    "joint_ablation": [((PROMPTS,), {"n_random": 2})],
    "layer_patterns": [((TOKENS[0], 1), {}), ((TOKENS[0], 1), {"max_cells": 7, "without_first": True})],
    "logit_lens": [((TOKENS[0],), {})],
    "massive_activations": [((TOKENS,), {"threshold": 3.0, "ratio": 3.0})],
    "prefix_matching_conditions": [((), {"lengths": (8,), "seeds": (0, 1), "n_sequences": 10})],
    "prefix_matching_in_text": [((LONG,), {})],
    "sink_interventions": [((TOKENS,), {"n_heads": 2})],
    "source_attribution": [((PROMPTS,), {"n_permutations": 9})],
}  # fmt: skip
REFUSED: dict[str, tuple[tuple, dict[str, Any]]] = {
    "copying_scores": ((), SHORT),
    "generation_statistics": ((TOKENS[0],), {"n_tokens": 3}),
    "head_circuits": ((0, 0), {}),
    "head_composition": ((), {}),
    "induction_circuit": ((), SHORT | {"pattern_threshold": 0.01}),
    "streaming_perplexity": ((TOKENS,), {"window": 8}),
    "what_if": ((TOKENS[0],), {"off": ("L0H1",)}),
}
# What goes straight to the logits, or with later layers held, is known of our own models only.
ONLY_OURS = {"attribution_agreement": ("direct", "repair"), "induction_heads": ("direct", "pattern")}


def test_every_analysis_is_tried() -> None:
    of_results = {"load_result", "write_report", "compare_heads", "compare_patterns"}
    no_analyses = {*dir(task_module), *dir(prompt_module), *of_results}
    analyses = {name for name in workbench.analyses.__all__ if name.islower()} - no_analyses
    assert analyses == {*RUNS, *REFUSED}


@pytest.mark.parametrize("name", RUNS)
def test_a_bridge_gives_what_our_model_gives(models: Models, name: str) -> None:
    analyse: Callable[..., Result] = getattr(workbench.analyses, name)
    for arguments, options in RUNS[name]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, theirs = (analyse(model, *arguments, **options) for model in models)
        missing = set(ours.quantities) - set(theirs.quantities)
        assert all(any(part in quantity for part in ONLY_OURS.get(name, ())) for quantity in missing), missing
        compared = 0
        for quantity in theirs.quantities:
            if ours[quantity].dtype.kind == "f" and not is_of_ranks(name, quantity):
                np.testing.assert_allclose(theirs[quantity], ours[quantity], atol=1e-4, rtol=1e-4, err_msg=quantity)
                compared += 1
        assert compared
        assert theirs.provenance.inputs_sha256 == ours.provenance.inputs_sha256
        assert theirs.provenance.weights.endswith("as loaded by TransformerBridge, patterns materialised")
        assert len(theirs.summary()) > 100


def is_of_ranks(name: str, quantity: str) -> bool:
    """Whether a number goes by the order of near ties, in which rounding may decide."""
    if name == "function_vector_heads":
        return quantity.startswith(("tau", "top", "set"))
    plain = ("weight", "effect", "zero")
    return name in ("attribution_agreement", "source_attribution") and not quantity.endswith(plain)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_bridge_cannot_do_is_refused_by_name(models: Models, name: str) -> None:
    arguments, options = REFUSED[name]
    with pytest.raises(
        ValueError, match=r"needs? a HookedTransformer; load it with (HookedTransformer\.)?from_pretrained"
    ):
        getattr(workbench.analyses, name)(models[1], *arguments, **options)


def test_sequences_of_unequal_length_are_refused(models: Models) -> None:
    with pytest.raises(ValueError, match="one length"):
        head_statistics(models[1], torch.tensor([[1, 2], [3, 4]]), attention_mask=torch.tensor([[1, 1], [1, 0]]))
    with pytest.raises(ValueError, match="one length"):
        head_statistics(models[1], ["w1 w2", "w3"])


def test_a_bridge_that_caps_its_logits_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = models[1]
    plain = type(bridge).forward

    def capped(self: Any, *arguments: Any, **options: Any) -> Any:
        out = plain(self, *arguments, **options)
        return 0.1 * torch.tanh(out / 0.1) if isinstance(out, torch.Tensor) and out.shape[-1] == 60 else out

    monkeypatch.setattr(type(bridge), "forward", capped)
    with pytest.raises(ValueError, match="not its unembedding"):
        logit_lens(bridge, TOKENS[0])
    with pytest.raises(ValueError, match="soft cap of a bridge"):
        direct_logit_attribution(bridge, PROMPTS)
