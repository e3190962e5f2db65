"""Models and inputs with hardly anything in them: every analysis refuses them in words, or says only what is known."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig, analyses
from workbench.analyses import PromptSet, Result
from workbench.analyses.support import check_model

SIZES: dict[str, Any] = {"d_model": 8, "d_head": 2, "d_mlp": 8, "d_vocab": 24, "n_ctx": 48}
NO_NUMBER = re.compile(r"\b(nan|inf)\b", re.IGNORECASE)


def build(n_layers: int, n_heads: int, strength: float) -> HookedTransformer:
    cfg = TransformerConfig(
        n_layers=n_layers, n_heads=n_heads, positional_embedding_type="rotary", normalization_type="RMS", **SIZES
    )
    generator = torch.Generator().manual_seed(0)
    model = HookedTransformer(cfg).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * strength)
    return model


MODELS = {"one head": (1, 1, 0.5), "two heads": (2, 1, 0.5), "all zero": (2, 3, 0.0)}
Ask = Callable[[HookedTransformer, Any], Result]
OF_TOKENS: dict[str, Ask] = {
    "head_statistics": lambda model, tokens: analyses.head_statistics(model, tokens),
    "head_zoo": lambda model, tokens: analyses.head_zoo(model, tokens, length=6, n_sequences=2),
    "head_circuits": lambda model, tokens: analyses.head_circuits(model, 0, 0, tokens),
    "head_pattern": lambda model, tokens: analyses.head_pattern(model, tokens, 0, 0),
    "layer_patterns": lambda model, tokens: analyses.layer_patterns(model, tokens, 0),
    "attention_sinks": lambda model, tokens: analyses.attention_sinks(model, tokens),
    "first_token_sinks": lambda model, tokens: analyses.first_token_sinks(model, tokens),
    "massive_activations": lambda model, tokens: analyses.massive_activations(model, tokens),
    "sink_interventions": lambda model, tokens: analyses.sink_interventions(model, tokens, n_heads=1),
    "streaming_perplexity": lambda model, tokens: analyses.streaming_perplexity(model, tokens, window=6),
    "logit_lens": lambda model, tokens: analyses.logit_lens(model, tokens),
    "what_if": lambda model, tokens: analyses.what_if(model, tokens, ["L0H0"]),
    "generation_statistics": lambda model, tokens: analyses.generation_statistics(model, tokens, n_tokens=3),
    "in_context_learning": lambda model, tokens: analyses.in_context_learning(model, tokens, early=2, late=5),
    "prefix_matching_in_text": lambda model, tokens: analyses.prefix_matching_in_text(model, tokens),
}
OF_PROMPTS: dict[str, Ask] = {
    "attribution_agreement": lambda model, some: analyses.attribution_agreement(model, some, n_permutations=9),
    "attribution_patching": lambda model, some: analyses.attribution_patching(model, some),
    "source_attribution": lambda model, some: analyses.source_attribution(model, some, n_permutations=9),
    "integrated_gradients": lambda model, some: analyses.integrated_gradients(model, some, n_steps=2),
    "direct_logit_attribution": lambda model, some: analyses.direct_logit_attribution(model, some),
    "joint_ablation": lambda model, some: analyses.joint_ablation(model, some, n_random=2),
    "head_pruning": lambda model, some: analyses.head_pruning(model, some, n_random=2),
    "alternative_attention": lambda model, some: analyses.alternative_attention(
        model, some, n_permutations=3, n_starts=1, n_steps=2
    ),
    "function_vector_heads": lambda model, some: analyses.function_vector_heads(
        model, some, length=6, n_random=1, n_permutations=9
    ),
}
OF_THE_MODEL: dict[str, Ask] = {
    "induction_heads": lambda model, _: analyses.induction_heads(model, length=6, n_sequences=2),
    "induction_circuit": lambda model, _: analyses.induction_circuit(
        model, length=6, n_sequences=2, n_receivers=1, n_feeders=1
    ),
    "head_composition": lambda model, _: analyses.head_composition(model, n_draws=2),
    "prefix_matching_conditions": lambda model, _: analyses.prefix_matching_conditions(
        model, lengths=[4], seeds=(0, 1), n_sequences=10
    ),
    "copying_scores": lambda model, _: analyses.copying_scores(model, length=6, n_sequences=2),
}


def prompts(length: int) -> PromptSet:
    tokens = torch.randint(0, 24, (4, length), generator=torch.Generator().manual_seed(1))
    target = torch.arange(4)
    return PromptSet(
        tokens, torch.ones_like(tokens, dtype=torch.bool), target, target + 1, (tokens + 1) % 24, "edges", "tokens"
    )


SOME = torch.randint(0, 24, (1, 40), generator=torch.Generator().manual_seed(2))
GIVEN: dict[str, list[Any]] = {
    **dict.fromkeys(OF_TOKENS, [SOME[:, :1], SOME[:, :2], SOME * 0, SOME]),
    **dict.fromkeys(OF_PROMPTS, [prompts(1), prompts(2), prompts(6)]),
    **dict.fromkeys(OF_THE_MODEL, [None]),
}
ALL = OF_TOKENS | OF_PROMPTS | OF_THE_MODEL
NEVER_REFUSED = {"head_statistics", "head_pattern", "layer_patterns", "logit_lens", "what_if", "attribution_patching",
                 "head_pruning", "generation_statistics"}  # fmt: skip


@pytest.mark.parametrize("what", ALL)
@pytest.mark.parametrize("name", MODELS)
def test_nothing_that_is_unknown_is_given_as_a_number(name: str, what: str) -> None:
    model = build(*MODELS[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for given in GIVEN[what]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            try:
                result = ALL[what](model, given)
            except ValueError as error:
                assert "/workbench/" in traceback.extract_tb(error.__traceback__)[-1].filename  # in words of our own
                assert what not in NEVER_REFUSED
            else:
                check_says_what_it_knows(result)
    assert not any(point.fwd_hooks or point.bwd_hooks for point in model.hook_dict.values())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training and all(parameter.grad is None for parameter in model.parameters())


def check_says_what_it_knows(result: Result) -> None:
    assert not NO_NUMBER.search(result.summary())
    for kind in result.figure_kinds:
        assert result.figure(kind, captioned=True).data
    assert len(result.tables()[""])
    floats = (quantity.values for quantity in result.quantities.values() if quantity.values.dtype.kind == "f")
    assert not any(np.isinf(values).any() for values in floats)


@pytest.mark.parametrize("what", ALL)
def test_weights_that_are_no_numbers_are_refused(what: str) -> None:
    model = build(2, 3, 0.5)
    model.blocks[1].mlp.W_out.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.W_out of custom holds NaN or infinity"):
        ALL[what](model, GIVEN[what][-1])


@pytest.mark.parametrize("bad", [[float("inf")], [float("inf"), -float("inf")], [float("nan"), 1.0]])
def test_no_sum_hides_weights_that_are_no_numbers_nor_invents_any(bad: list[float]) -> None:
    model = build(2, 3, 0.5)
    model.embed.W_E.data[0, :2] = 3e38  # finite, as their sum is not
    check_model(model)
    model.embed.W_E.data[1, : len(bad)] = torch.tensor(bad)
    with pytest.raises(ValueError, match=r"embed\.W_E of custom holds NaN or infinity"):
        check_model(model)


ARGUMENTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(OF_TOKENS, {"tokens": SOME}),
    **dict.fromkeys(OF_PROMPTS, {"prompts": prompts(6)}),
    "head_circuits": {"tokens": SOME, "layer": 0, "head": 0},
    "head_pattern": {"tokens": SOME, "layer": 0, "head": 0},
    "layer_patterns": {"tokens": SOME, "layer": 0},
    "sink_interventions": {"tokens": SOME.expand(2, -1), "n_heads": 2},
    "prefix_matching_conditions": {"lengths": [4]},
    "streaming_perplexity": {"tokens": SOME, "window": 6},
    "in_context_learning": {"tokens": SOME.expand(20, -1)},
    "generation_statistics": {"tokens": SOME, "n_tokens": 3, "temperature": 1.0},
}
NUMBERS = [
    (what, parameter.name, str(parameter.annotation))
    for what in ALL
    for parameter in inspect.signature(getattr(analyses, what)).parameters.values()
    if str(parameter.annotation).split(" ")[0] in ("int", "float")
]


SOMETIMES_RIGHT = ("position", "threshold", "ratio", "n_tokens")  # from the end; any size; more than there are


@pytest.mark.parametrize(("what", "option", "annotation"), NUMBERS)
def test_an_option_that_is_no_such_number_is_refused_by_name(what: str, option: str, annotation: str) -> None:
    model = build(2, 3, 0.5)
    wrong = ["3", [3], torch.tensor([1.5]), True, float("nan"), float("inf"), -5, 10**30]
    wrong += [1.5, np.float64(2.0)] * annotation.startswith("int") + [None] * ("None" not in annotation)
    for value in wrong:
        if option in SOMETIMES_RIGHT and type(value) is int and abs(value) > 4:
            continue
        with pytest.raises(ValueError, match=rf"{option}\b|copies of .* tokens|a sequence has 40 tokens"):
            getattr(analyses, what)(model, **{**ARGUMENTS.get(what, {}), option: value})
