"""A head that carries the task, where it is known which; effects against whole runs; and a model that cannot do it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import FunctionVectorHeads, WordPairs, few_shot_prompts, function_vector_heads, load_result
from workbench.analyses.tasks import PromptSet

PAIRS = WordPairs("letters", tuple((f"x{i}", f"y{i}") for i in range(12)))
SHOTS, KNOWN, REFUSAL, CONSTANT, SHARP = 4, 4.0, 6.0, 1e6, 60.0
WORDS = ["<s>", "Q:", "A:", "refuse", *(word for pair in PAIRS.pairs for word in pair)]
LENGTH = 1 + 4 * SHOTS + 3  # of a prompt: <s>, then Q: x A: y of each example, and Q: x A:


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="refuse"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> HookedTransformer:
    """Two layers without MLP. The stream has slots for token, position, output and a flag, and a constant so large that
    the norms divide everything by the same.

    L0H0 flags an answer that belongs to the word two before it: it attends to that word where both place and content
    fit, and to <s> elsewhere. L0H1 attends to the previous token and writes its answer with the logit KNOWN. "A:" calls
    for a refusal with the logit REFUSAL. L1H0 spreads its attention and takes the refusal back by the share of flags,
    wholly where every example is right. So it carries what the examples show.
    """
    n, context = len(WORDS), 64
    d_model = 2 * n + context + 2
    token, position, output = torch.arange(n), torch.arange(context) + n, torch.arange(n) + n + context
    flag = 2 * n + context
    words, answers = (torch.tensor([WORDS.index(pair[side]) for pair in PAIRS.pairs]) for side in (0, 1))
    cfg = TransformerConfig(
        n_layers=2, d_model=d_model, n_heads=4, d_head=n + context + 1, d_mlp=1, d_vocab=n, n_ctx=context,
        normalization_type="RMS", attn_scale=1.0, model_name="carrier",
    )  # fmt: skip
    built = HookedTransformer(cfg, tokenizer=tokenizer).eval().double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.zero_()
        built.embed.W_E[token, token] = 1.0
        built.embed.W_E[:, -1] = CONSTANT
        built.pos_embed.W_pos[torch.arange(context), position] = 1.0
        for norm in (*(block.ln1 for block in built.blocks), built.ln_final):
            norm.w.fill_(CONSTANT / d_model**0.5)
        built.unembed.W_U[output, token] = 1.0
        built.unembed.W_U[WORDS.index("A:"), WORDS.index("refuse")] = REFUSAL
        first, second = (block.attn for block in built.blocks)
        places = torch.arange(context)
        for head, offset in ((0, 2), (1, 1)):
            first.W_Q[head, position, n + places] = SHARP
            first.W_K[head, position[:-offset], n + places[offset:]] = 1.0
        first.W_Q[0, answers, answers] = SHARP
        first.W_K[0, words, answers] = 1.0
        first.W_Q[0, token, -1] = 1.5 * SHARP
        first.W_K[0, 0, -1] = 1.0
        first.W_V[0, token[1:], 0] = 1.0
        first.W_O[0, 0, flag] = 1.0
        first.W_V[1, words, answers] = 1.0
        first.W_O[1, answers, output[answers]] = KNOWN
        second.W_V[0, flag, 0] = 1.0
        second.W_O[0, 0, output[WORDS.index("refuse")]] = -REFUSAL * LENGTH / SHOTS
    return built


@pytest.fixture(scope="module")
def found(model: HookedTransformer) -> FunctionVectorHeads:
    prompts = few_shot_prompts(model, PAIRS, n_shots=SHOTS, n_prompts=40)
    return function_vector_heads(model, prompts, n_ablated=1, length=12)


def probability(refusal: float) -> float:
    """Of the answer, whose logit is KNOWN; all but the refusal's are 0."""
    return float(np.exp(KNOWN) / (np.exp(KNOWN) + np.exp(refusal) + len(WORDS) - 2))


def test_the_head_that_carries_the_task_is_found(found: FunctionVectorHeads) -> None:
    assert found["accuracy"].tolist() == [1.0, 0.0] and found.settings["untested"] == ""
    for condition, refusal in enumerate((0.0, REFUSAL)):
        np.testing.assert_allclose(np.exp(found["answer_log_probability"][condition]), probability(refusal), atol=1e-6)
    effect = found["indirect_effect"]
    assert effect[1, 0] == pytest.approx(probability(0.0) - probability(REFUSAL), abs=1e-6)
    # L0H0 looks at <s> from the last position. A mean of L0H1 asks for all answers a little, for the right one less.
    assert effect[0, 0] == pytest.approx(0.0, abs=1e-6) and effect[0, 1] < 0
    assert found.top(1) == [(1, 0)] == found.heads("function vector")
    assert (found["verdict"] == "neither").sum() == 7
    assert "Function-vector heads: L1H0." in found.summary()


def test_ablating_it_costs_what_the_weights_say(found: FunctionVectorHeads) -> None:
    flags = [sum(4 * shot <= i for shot in range(1, SHOTS + 1)) / (i + 1) for i in range(LENGTH)]
    refusal = REFUSAL - REFUSAL * LENGTH / SHOTS * np.mean(flags)
    losses = -np.log([probability(0.0), probability(refusal)])
    np.testing.assert_allclose(found["set_loss"][:2], losses, atol=1e-5)
    assert found.settings["sets"]["largest effects"] == "L1H0"
    assert found["set_accuracy"][0] == 1.0


def test_figures_are_drawn_of_a_saved_result(found: FunctionVectorHeads, tmp_path: Path) -> None:
    again = load_result(found.save(tmp_path / "found"))
    for kind in again.figure_kinds:
        assert again.figure(kind, captioned=True, theme="dark").data
    assert [len(table) for table in again.tables().values()] == [8, 2, 4]


@torch.no_grad()
def test_every_number_is_that_of_whole_runs(random_model: HookedTransformer) -> None:
    model, generator = copy.deepcopy(random_model).double(), torch.Generator().manual_seed(0)
    real = torch.arange(9) < torch.tensor([9, 7, 9, 8, 6])[:, None]
    tokens, corrupted = torch.randint(0, 50, (2, 5, 9), generator=generator) * real
    prompts = PromptSet(tokens, real, torch.arange(5), None, corrupted, "random", "random tokens")
    found = function_vector_heads(model, prompts, n_ablated=2, n_random=1, length=10, n_permutations=9)
    source, tested = prompts.halves(0)

    def answer(part: PromptSet, which: str, row: int, hooks: list = []) -> Tensor:  # noqa: B006
        length = int(part.real[row].sum())
        logits = model.run_with_hooks(getattr(part, which)[row : row + 1, :length], fwd_hooks=hooks)
        return logits[0, -1].log_softmax(-1)[part.target[row]]

    def outputs(part: PromptSet) -> list[Tensor]:
        found = []
        for row in range(len(part)):
            _, cache = model.run_with_cache(part.tokens[row : row + 1, : int(part.real[row].sum())])
            found.append(torch.stack([cache[f"blocks.{layer}.attn.hook_z"][0] for layer in range(3)], dim=1))
        return found

    last, everywhere = torch.stack([z[-1] for z in outputs(source)]).mean(dim=0), torch.cat(outputs(tested)).mean(dim=0)
    for layer in range(3):
        for head in range(4):

            def put(z: Tensor, hook: Any, head: int = head, layer: int = layer) -> Tensor:
                z = z.clone()
                z[:, -1, head] = last[layer, head]
                return z

            patch = [(f"blocks.{layer}.attn.hook_z", put)]
            effects = [
                float(answer(tested, "corrupted", row, patch).exp() - answer(tested, "corrupted", row).exp())
                for row in range(len(tested))
            ]
            assert found["indirect_effect"][layer, head] == pytest.approx(np.mean(effects), abs=1e-10)
            error = np.std(effects, ddof=1) / len(effects) ** 0.5
            assert found["indirect_effect_sem"][layer, head] == pytest.approx(error, abs=1e-10)
    for place, heads in ((0, []), (1, found.top(2))):

        def ablate(z: Tensor, hook: Any, heads: Any = heads) -> Tensor:
            z = z.clone()
            for layer, head in heads:
                if hook.name == f"blocks.{layer}.attn.hook_z":
                    z[:, :, head] = everywhere[layer, head]
            return z

        hooks = [(lambda name: name.endswith("hook_z"), ablate)]
        losses = [-float(answer(source, "tokens", row, hooks)) for row in range(len(source))]
        assert found["set_loss"][place] == pytest.approx(np.mean(losses), abs=1e-10)
    for condition, which in enumerate(("tokens", "corrupted")):
        expected = [float(answer(prompts, which, row)) for row in range(5)]
        np.testing.assert_allclose(found["answer_log_probability"][condition], expected, atol=1e-10)
    assert (found["verdict"] == "untested").all()
    assert "not sure that the model does the task" in found.settings["untested"]


def test_of_a_model_that_cannot_do_the_task_nothing_is_said() -> None:
    model = HookedTransformer.from_pretrained("demo")
    prompts = few_shot_prompts(model, "singular-plural", n_shots=4, n_prompts=40)
    found = function_vector_heads(model, prompts, length=16, n_random=2, n_permutations=19)
    assert (found["verdict"] == "untested").all() and found.heads("function vector") == []
    assert "No head is called anything: it is not sure that the model does the task" in found.summary()


def test_few_prompts_and_examples_that_do_not_matter_claim_nothing(model: HookedTransformer) -> None:
    few = few_shot_prompts(model, PAIRS, n_shots=SHOTS, n_prompts=12)
    found = function_vector_heads(model, few, n_ablated=1, n_random=1, length=12, n_permutations=9)
    assert found.settings["untested"].startswith("6 prompts are tested")
    deaf = copy.deepcopy(model)
    with torch.no_grad():
        deaf.unembed.W_U[WORDS.index("A:")] = 0.0  # no refusal to take back
        deaf.blocks[1].attn.W_O.zero_()
    found = function_vector_heads(deaf, few, n_ablated=1, n_random=1, length=12, n_permutations=9)
    assert found["accuracy"].tolist() == [1.0, 1.0] and "shuffled answers do no harm" in found.settings["untested"]


def test_shuffled_answers_are_all_wrong_and_answers_are_single_tokens() -> None:
    model = HookedTransformer.from_pretrained("demo")
    pairs = WordPairs("towns", (*((c, t) for c, t in zip("abcdefg", TOWNS, strict=True)), ("h", "antidisestablish")))
    prompts = few_shot_prompts(model, pairs, n_shots=5, n_prompts=6)
    assert "without 1 of 8 that are not single tokens" in prompts.description
    assert prompts.corrupted is not None and prompts.foil is not None
    for row in range(6):
        clean, shuffled = (
            model.tokenizer.decode(x[row][prompts.real[row]][1:]).split("\n\n")
            for x in (prompts.tokens, prompts.corrupted)
        )
        assert clean[-1] == shuffled[-1] and len(clean) == 6
        answers = dict(pairs.pairs)
        for right, wrong in zip(clean[:-1], shuffled[:-1], strict=True):
            word, answer = right.removeprefix("Q: ").split("\nA: ")
            assert answers[word] == answer and wrong.startswith(f"Q: {word}\nA: ") and not wrong.endswith(answer)
        word = clean[-1].removeprefix("Q: ").removesuffix("\nA:")
        assert model.tokenizer.decode(prompts.target[row]) == f" {answers[word]}"


TOWNS = ("Talvik", "Besko", "Cardun", "Delfor", "Emring", "Fosby", "Grenholt")


def test_what_cannot_be_asked_is_refused(model: HookedTransformer) -> None:
    demo = HookedTransformer.from_pretrained("demo")
    for task, options, message in (
        ("rhymes", {}, "task must be one of 'country-capital'"),
        ("antonym", {"domain": "demo"}, "has no antonym pairs"),
        ("country-capital", {"n_shots": 1}, "n_shots must be at least 2"),
        (WordPairs("two", (("a", "Talvik"), ("b", "Besko"))), {}, "two has 2 pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            few_shot_prompts(demo, task, **options)  # type: ignore[arg-type]
    prompts = few_shot_prompts(model, PAIRS, n_shots=SHOTS, n_prompts=4)
    for options, message in (
        ({"n_ablated": 3}, "n_ablated must be between 1 and 2"),
        ({"n_random": 0}, "n_random"),
        ({"pattern_threshold": 2.0}, "pattern_threshold"),
    ):
        with pytest.raises(ValueError, match=message):
            function_vector_heads(model, prompts, **options)  # type: ignore[arg-type]
    plain = PromptSet(prompts.tokens, prompts.real, prompts.target, None, None, "plain", "no corrupted ones")
    with pytest.raises(ValueError, match="few_shot_prompts makes prompts that have"):
        function_vector_heads(model, plain)
    with pytest.raises(ValueError, match="take 4 or more"):
        function_vector_heads(model, prompts.subset([0, 1]))
