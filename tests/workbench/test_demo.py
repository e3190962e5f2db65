"""The bundled demo model shows what its card says. Its files are measured here through transformers, naively."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

import workbench.demo
from workbench import HookedTransformer
from workbench.demo import card, corpus, measure, words
from workbench.demo.muon import Muon, orthogonalised
from workbench.demo.rows import repeated_tokens, training_batch
from workbench.demo.train import Recipe, Stage, main, train

FOLDER = Path(workbench.demo.__file__).parent
SEGMENT = 64


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def repeats(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """BOS and 64 random tokens twice, [8, 129]."""
    rng = random.Random(17)
    segments = [rng.sample(range(len(tokenizer)), SEGMENT + 2) for _ in range(8)]
    segments = [
        [token for token in segment if token not in tokenizer.all_special_ids][:SEGMENT] for segment in segments
    ]
    return torch.tensor([[tokenizer.bos_token_id, *segment, *segment] for segment in segments])


@torch.no_grad()
def attentions(llama: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """[layer, batch, head, query, key]"""
    return torch.stack(llama(tokens, output_attentions=True).attentions)


def prefix_matching(patterns: Tensor, tokens: Tensor) -> Tensor:
    """[layer, head], by the definition: mass on keys that follow an earlier copy of the query's token."""
    total, rows = torch.zeros(patterns.shape[0], patterns.shape[2]), 0
    for sequence, ids in enumerate(tokens.tolist()):
        for query in range(len(ids)):
            keys = [key for key in range(1, query) if ids[key - 1] == ids[query]]
            if keys:
                total += patterns[:, sequence, :, query, keys].sum(-1)
                rows += 1
    return total / rows


def previous_token(patterns: Tensor) -> Tensor:
    """[layer, head]"""
    return patterns.diagonal(offset=-1, dim1=-2, dim2=-1).mean(dim=(1, 3))


@torch.no_grad()
def second_copy_loss(llama: LlamaForCausalLM, tokens: Tensor) -> float:
    log_probabilities = llama(tokens).logits[:, :-1].log_softmax(-1)
    losses = -log_probabilities.gather(-1, tokens[:, 1:, None])[..., 0]  # [batch, pos − 1]
    return float(losses[:, SEGMENT + 1 :].mean())


@contextmanager
def without_head(llama: LlamaForCausalLM, layer: int, head: int) -> Iterator[None]:
    """Zeroes a head's output where it enters W_O."""
    width = llama.config.head_dim

    def zero(module: torch.nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        z = arguments[0].clone()
        z[..., head * width : (head + 1) * width] = 0
        return (z,)

    handle = llama.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


def largest(scores: Tensor) -> tuple[int, int]:
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return layer, head


# ---- the shipped files ---------------------------------------------------------------------------------------------


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 6e6


def test_logits_equal_those_of_transformers(
    demo: HookedTransformer, llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "When Mara and Tobin went to the market, Mara gave the lantern to Tobin. The lantern was red and old."
    tokens = demo.to_tokens(text)
    assert tokens[0].tolist() == [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    with torch.no_grad():
        expected = llama(tokens).logits
    torch.testing.assert_close(demo(tokens), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_an_induction_head_and_the_previous_token_head_that_feeds_it(llama: LlamaForCausalLM, repeats: Tensor) -> None:
    patterns = attentions(llama, repeats)
    scores = prefix_matching(patterns, repeats)
    layer, head = largest(scores)
    assert scores[layer, head] >= 0.6
    with_everything = second_copy_loss(llama, repeats)
    with without_head(llama, layer, head):
        assert second_copy_loss(llama, repeats) > 1.5 * with_everything

    # Of the earlier heads that attend to the previous token, some one is needed: the others do not make up for it.
    previous, scores_without = previous_token(patterns), {}
    for feeder in itertools.product(range(layer), range(scores.shape[1])):
        if previous[feeder] >= 0.6:
            with without_head(llama, *feeder):
                scores_without[feeder] = prefix_matching(attentions(llama, repeats), repeats)[layer, head]
    feeder = min(scores_without, key=scores_without.__getitem__)
    assert scores_without[feeder] < 0.5 * scores[layer, head]
    with without_head(llama, *feeder):
        assert second_copy_loss(llama, repeats) > with_everything + 1


def test_induction_works_at_any_gap(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """The head finds tokens by what precedes them: random gaps between the copies leave the score as high."""
    rng = random.Random(3)
    for gap in (1, 9, 40, 90):
        drawn = rng.sample(range(300, len(tokenizer)), 32 + gap)
        segment, between = drawn[:32], drawn[32:]
        tokens = torch.tensor([[tokenizer.bos_token_id, *segment, *between, *segment]])
        assert prefix_matching(attentions(llama, tokens), tokens).max() >= 0.6


def test_a_head_rests_on_bos(llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    total, n_queries = torch.zeros(llama.config.num_hidden_layers, llama.config.num_attention_heads), 0
    for text in measure.held_out_texts(24):
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
        total += attentions(llama, torch.tensor([ids]))[:, 0, :, 1:, 0].sum(-1)
        n_queries += len(ids) - 1
    assert (total / n_queries).max() >= 0.5


def test_facts_and_agreement(demo: HookedTransformer) -> None:
    """Greedy continuations that have one right answer. Indirect objects it has not learnt, as its card says."""
    scores = measure.task_scores(demo, n_prompts=100)
    assert scores["capital"] == 1
    assert scores["river"] == 1
    assert scores["agreement"] >= 0.95
    assert scores["greater than"] >= 0.75


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("The capital of Veld is", " Talvik."),
        ("Roster: Ilse, Pavel, Karin, Hugo. It was raining at the mill. Roster again: Ilse,", " Pavel, Karin, Hugo."),
        ("Tobin found a zorvant near the river. The zorvant was red. Then Lena met Tobin and saw the", " zorvant"),
    ],
)
def test_greedy_continuations(demo: HookedTransformer, prompt: str, continuation: str) -> None:
    assert demo.generate(prompt, max_new_tokens=12).startswith(prompt + continuation)


def test_stories_are_made_of_the_grammars_words(demo: HookedTransformer) -> None:
    known = set(re.findall(r"[A-Za-z]+", " ".join(measure.held_out_texts(3000))))
    for prompt in ("Once there was a", "One morning Mara found", "In the town of Talvik lived", "Jonas was a baker in"):
        text = demo.generate(prompt, max_new_tokens=60).removesuffix(demo.tokenizer.eos_token)
        sentences = text.split(". ")
        assert len(set(sentences)) == len(sentences) >= 4  # it goes on, and not in circles
        assert set(re.findall(r"[A-Za-z]+", text)) <= known


def test_measured_scores_and_the_card_agree_with_the_naive_ones(
    demo: HookedTransformer, llama: LlamaForCausalLM, repeats: Tensor
) -> None:
    patterns = attentions(llama, repeats)
    measured = measure.head_scores(demo, repeats, measure.held_out_texts(2))
    torch.testing.assert_close(measured.prefix_matching, prefix_matching(patterns, repeats), rtol=0, atol=1e-4)
    torch.testing.assert_close(measured.previous_token, previous_token(patterns), rtol=0, atol=1e-4)

    card_repeats = measure.random_repeats(demo.tokenizer, measure.N_REPEATS)
    scores = prefix_matching(attentions(llama, card_repeats), card_repeats)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| L(\d)H(\d) \| (\S+) \|", readme, flags=re.MULTILINE)
    assert len(rows) == scores.numel()
    for layer, head, score in rows:
        assert float(score) == pytest.approx(float(scores[int(layer), int(head)]), abs=0.006)


def test_the_card_is_its_template_with_what_was_measured(demo: HookedTransformer) -> None:
    parts = re.split(r"\$(\w+)", card._CARD.template)
    pattern = "".join("(.*?)" if place % 2 else re.escape(part) for place, part in enumerate(parts))
    filled = re.fullmatch(pattern, (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert filled is not None
    values = dict(zip(parts[1::2], filled.groups(), strict=True))
    assert (values["n_repeats_along"], values["n_texts_along"]) == ("8", "32")
    # The last row of the table along training is this model's, measured on the fewer sequences and texts that it names.
    last = [float(cell) for cell in values["progress"].splitlines()[-1].strip("| ").split(" | ")]
    repeats, texts = measure.random_repeats(demo.tokenizer, 8), measure.held_out_texts(32)
    scores = measure.head_scores(demo, repeats, texts)
    expected = [
        measure.text_loss(demo, texts), *measure.copy_losses(demo, repeats),
        *(float(score.max()) for score in (scores.prefix_matching, scores.previous_token, scores.bos_mass)),
    ]  # fmt: skip
    assert last[1:] == pytest.approx(expected, abs=0.006)


def test_the_loss_of_the_second_copy_leaves_out_what_nothing_predicts(demo: HookedTransformer) -> None:
    repeats = measure.random_repeats(demo.tokenizer, 2)
    with torch.no_grad():
        log_p = demo(repeats).double().log_softmax(dim=-1)
    losses = -log_p[:, :-1].gather(2, repeats[:, 1:, None])[..., 0]  # of token 1, 2, …
    n = measure.SEGMENT
    first, second = measure.copy_losses(demo, repeats)
    assert first == pytest.approx(float(losses[:, :n].mean()), rel=1e-4)
    assert second == pytest.approx(float(losses[:, n + 1 :].mean()), rel=1e-3)
    assert losses[:, n].mean() > 5 > second  # the first token of the second copy comes out of nowhere


# ---- tokenizer -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(text=st.text())
def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_worlds_words_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    countries = [name for c in words.COUNTRIES for name in (c.name, c.capital, c.river)]
    nouns = [*words.THINGS, *words.ANIMALS, *words.WORKERS]
    rest = [*words.PLACES, *words.MATERIALS, *words.COLOURS, *words.QUALITIES, *words.FEELINGS, *words.TIMES]
    spaced = [*words.NAMES, *countries, *nouns, *map(words.plural, nouns), *rest]
    years = [f"{year:02d}" for year in range(100)]
    split = [
        word
        for word in [*(f" {word}" for word in spaced), *words.NAMES, *years]
        if len(tokenizer.encode(word, add_special_tokens=False)) != 1
    ]
    assert split == []


# ---- corpus and rows -----------------------------------------------------------------------------------------------


def test_pages_depend_on_their_seed_alone() -> None:
    def texts(seed: str) -> list[str]:
        return list(itertools.islice(corpus.page(seed), 20))

    assert texts("one") == texts("one") != texts("two")


def test_names_and_invented_words_come_back_at_varying_distances() -> None:
    """No single distance, in words, accounts for much: a fixed offset cannot predict what comes back."""
    distances: Counter[int] = Counter()
    for seed in range(200):
        world = corpus.new_world(random.Random(seed))  # a page draws its world first
        last: dict[str, int] = {}
        for position, word in enumerate(re.findall(r"\w+", " ".join(itertools.islice(corpus.page(seed), 8)))):
            if word in (*world.cast, *world.inventions):
                if word in last:
                    distances[position - last[word]] += 1
                last[word] = position
    assert distances.total() > 2000
    assert max(distances.values()) < 0.15 * distances.total()
    for least, most in ((1, 5), (6, 15), (16, 50), (51, 1000)):
        between = sum(count for distance, count in distances.items() if least <= distance <= most)
        assert between > 0.08 * distances.total()


def test_random_segments_come_back_after_varying_gaps() -> None:
    """Every draw repeats its segment; the lags at which tokens match differ from draw to draw."""
    lags = set()
    for seed in range(100):
        tokens = repeated_tokens(random.Random(seed), list(range(10_000)))
        matches = Counter(
            later - earlier
            for earlier, later in itertools.combinations(range(len(tokens)), 2)
            if tokens[earlier] == tokens[later]
        )
        lag, n_matches = matches.most_common(1)[0]
        assert n_matches >= 4
        lags.add(lag)
    assert len(lags) > 40


def test_rows_are_fixed_by_step_and_seed(tokenizer: PreTrainedTokenizerBase) -> None:
    def batch(step: int, seed: int = 0) -> Tensor:
        return training_batch(tokenizer, step, n_rows=2, length=128, random_share=0.4, seed=seed)

    assert batch(3).shape == (2, 128)
    assert torch.equal(batch(3), batch(3))
    assert not torch.equal(batch(3), batch(4))
    assert not torch.equal(batch(3), batch(3, seed=1))
    assert (batch(3)[:, 0] == tokenizer.bos_token_id).all()
    assert (batch(3)[:, 1:] != tokenizer.bos_token_id).all()


# ---- training ------------------------------------------------------------------------------------------------------


def test_orthogonalised_flattens_the_singular_values_of_each_matrix() -> None:
    matrices = torch.randn(3, 24, 10, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, 10)
    result = orthogonalised(matrices)
    values = torch.linalg.svdvals(result)
    assert values.max() < 1.3
    assert values.median() > 0.6
    torch.testing.assert_close(result[1], orthogonalised(matrices[1]), rtol=0, atol=1e-4)
    torch.testing.assert_close(result.mT, orthogonalised(matrices.mT), rtol=0, atol=1e-4)


def test_muon_steps_along_the_orthogonalised_gradient() -> None:
    """The first step has no history, so it is −lr times the gradient's orthogonalisation, whatever its scale."""
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for scale in (1e-3, 1.0, 1e3):
        weight = torch.nn.Parameter(torch.zeros(6, 4))
        (-scale * target * weight).sum().backward()  # gradient: −scale · target
        Muon([weight], lr=0.05).step()
        torch.testing.assert_close(weight.detach(), 0.05 * orthogonalised(target), rtol=0, atol=1e-4)


def test_muon_descends() -> None:
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    optimiser = Muon([weight], lr=0.05)
    for _ in range(100):
        optimiser.zero_grad()
        (weight - target).pow(2).sum().backward()
        optimiser.step()
    assert (weight - target).pow(2).sum() < 0.1 * target.pow(2).sum()


def test_training_is_seeded(tokenizer: PreTrainedTokenizerBase) -> None:
    stage = Stage(steps=1, n_rows=1, row_length=32, random_share=0.4, rate=1.0)
    recipe = Recipe(stages=(stage, dataclasses.replace(stage, row_length=48)))
    first, history = train(recipe, tokenizer)
    second, _ = train(recipe, tokenizer)
    third, _ = train(dataclasses.replace(recipe, seed=1), tokenizer)
    assert torch.equal(first.W_E, second.W_E)
    assert not torch.equal(first.W_E, third.W_E)
    assert [state.step for state in history] == [0, 2]


def test_each_stage_has_its_own_rate() -> None:
    first = Stage(steps=1000, n_rows=1, row_length=32, random_share=0.4, rate=1.0)
    recipe = Recipe(stages=(first, dataclasses.replace(first, steps=500, rate=0.5)))
    assert [recipe.at(step) for step in (0, 999, 1000, 1499)] == [
        (recipe.stages[0], 0), (recipe.stages[0], 999), (recipe.stages[1], 0), (recipe.stages[1], 499),
    ]  # fmt: skip
    assert first.rate_at(0) == pytest.approx(0.01)
    assert first.rate_at(150) == 1
    assert first.rate_at(1000) == pytest.approx(0.05)
    assert recipe.stages[1].rate_at(100) == 0.5
    assert recipe.shortened(1200).steps == 1200
    assert [stage.steps for stage in recipe.shortened(3).stages] == [3]


def test_training_script_in_three_steps(tmp_path: Path) -> None:
    main(
        ["--steps", "3", "--out", str(tmp_path / "model"), "--checkpoints", str(tmp_path / "states"), "--threads", "1"]
    )
    model = HookedTransformer.from_pretrained(tmp_path / "model")
    start = HookedTransformer.from_pretrained(tmp_path / "states" / "step-00000")
    assert model.generate("Once there was a", max_new_tokens=3).startswith("Once there was a")
    assert model.cfg.d_vocab == 1792
    assert not torch.equal(model.W_E, start.W_E)
    torch.testing.assert_close(start.W_Q, start.W_K)  # how it was initialised
    assert "3 steps" in (tmp_path / "model" / "README.md").read_text(encoding="utf-8")


def test_training_script_refuses_no_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["--steps", "0", "--out", str(tmp_path)])
    assert error.value.code != 0
    assert "--steps must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
