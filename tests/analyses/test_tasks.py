from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, analyses
from workbench.analyses import (
    PromptFileError,
    PromptSet,
    YearPrompts,
    factual_recall,
    greater_than,
    indirect_objects,
    parse_prompts,
    read_prompts,
    subject_verb_agreement,
)
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.demo import words
from workbench.errors import WorkbenchError
from workbench.loading.sources import KNOWN_MODELS

BUILDERS = (indirect_objects, greater_than, factual_recall, subject_verb_agreement)
SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def smollm2() -> HookedTransformer:
    if not KNOWN_MODELS[SMOLLM2].fetched:
        pytest.skip(f"{SMOLLM2} is not in the cache: run `workbench fetch {SMOLLM2}`")
    return HookedTransformer.from_pretrained(SMOLLM2)


class Tokenizer:
    """Every piece that a pattern finds is a token; ids in the order in which pieces are met."""

    def __init__(self, pattern: str, bos: bool = True) -> None:
        self.pattern, self.ids = re.compile(pattern), dict[str, int]({"<bos>": 0})
        self.bos_token_id = 0 if bos else None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        pieces = self.pattern.findall(text)
        assert "".join(pieces) == text
        return {"input_ids": [self.ids.setdefault(piece, len(self.ids)) for piece in pieces]}

    def decode(self, ids: list[int]) -> str:
        texts = list(self.ids)
        return "".join(texts[i] for i in ids)


WORDS = r" ?[^\W\d]+| ?\d{1,2}|\s+|."  # a word with the space before it, two digits


def reader(pattern: str = WORDS, *, n_ctx: int = 64, bos: bool = True) -> Any:
    """A model that can only read."""
    return SimpleNamespace(tokenizer=Tokenizer(pattern, bos), cfg=SimpleNamespace(n_ctx=n_ctx, d_vocab=10_000))


def texts(model: Any, prompts: PromptSet, corrupted: bool = False) -> list[str]:
    """Without BOS."""
    rows = prompts.corrupted if corrupted else prompts.tokens
    assert rows is not None
    return [model.tokenizer.decode(row[real].tolist()[1:]) for row, real in zip(rows, prompts.real, strict=True)]


def answers(model: Any, ids: Tensor | None) -> list[str]:
    assert ids is not None
    return [model.tokenizer.decode([token]) for token in ids.tolist()]


def score(model: HookedTransformer, prompts: PromptSet, metric: Metric) -> Tensor:
    """[prompt], of the model as it is."""
    return measure(model, prompts.sequences, [Intervention()], metric)[0]


def accuracy(model: HookedTransformer, prompts: PromptSet) -> float:
    """Share of prompts whose target is likelier than the foil."""
    return float((score(model, prompts, prompts.logit_difference()) > 0).double().mean())


# ---- the type ------------------------------------------------------------------------------------------------------


def prompt_set(**changed: Any) -> PromptSet:
    tokens = torch.tensor([[5, 6, 7], [5, 8, 0], [9, 0, 0]])
    fields = {
        "tokens": tokens,
        "real": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool(),
        "target": torch.tensor([0, 1, 2]),
        "foil": torch.tensor([1, 2, 3]),
        "corrupted": tokens + torch.tensor([[0, 1, 0], [0, 1, 0], [1, 0, 0]]),
        "name": "small",
        "description": "three prompts",
    }
    return PromptSet(**{**fields, **changed})


def test_metrics_read_the_token_after_the_prompt() -> None:
    prompts = prompt_set()
    assert prompts.rows.tolist() == [[2], [1], [0]] and len(prompts) == 3
    logits = torch.tensor([[2.0, 0.5, 0.0, 0.0], [0.0, 1.0, 4.0, 0.0], [0.0, 0.0, 0.25, 0.25]])[:, None]
    assert prompts.logit_difference()(logits).tolist() == [1.5, -3.0, 0.0]
    expected = [logits[i, 0].double().softmax(0)[i].log() for i in range(3)]
    torch.testing.assert_close(prompts.log_probability()(logits), torch.stack(expected), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="small has no foils"):
        prompt_set(foil=None).logit_difference()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens must be"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, "target must have the shape"),
        ({"corrupted": torch.zeros(3, 2, dtype=torch.int64)}, "corrupted must have the shape"),
        ({"real": torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 0]]).bool()}, "real must mark the first"),
        ({"real": torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 0]]).bool()}, "real must mark the first"),
        ({"foil": torch.tensor([1, 1, 3])}, "prompt 1: the foil is the target"),
        ({"corrupted": torch.tensor([[5, 0, 7], [5, 7, 0], [9, 9, 9]])}, "prompt 2: the corrupted prompt is the"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prompt_set(**changed)


def test_subsets_and_halves_keep_prompts_and_answers_together(demo: HookedTransformer) -> None:
    prompts = greater_than(demo, n_prompts=9)
    some = prompts.subset([4, 1])
    for field in ("tokens", "real", "target", "foil", "corrupted", "start"):
        assert torch.equal(getattr(some, field), getattr(prompts, field)[[4, 1]])
    assert torch.equal(some.years, prompts.years) and isinstance(some, YearPrompts)
    assert some.description == f"{prompts.description}; 2 of them"
    assert prompts.subset(range(9)).description == prompts.description
    first, second = prompts.halves(seed=3)
    assert (len(first), len(second)) == (5, 4)
    rows = [tuple(row) for half in (first, second) for row in half.tokens.tolist()]
    assert sorted(rows) == sorted(tuple(row) for row in prompts.tokens.tolist()) and len(set(rows)) == 9
    assert torch.equal(first.tokens, prompts.halves(seed=3)[0].tokens)
    assert not torch.equal(first.tokens, prompts.halves(seed=4)[0].tokens)
    for indices in ([], [9], [-1]):
        with pytest.raises(ValueError, match="indices must be some of 0 to 8"):
            prompts.subset(indices)
    with pytest.raises(ValueError, match="has one prompt"):
        prompts.subset([0]).halves()


# ---- the built-in tasks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDERS)
def test_prompts_are_different_repeatable_and_as_many_as_asked_for(
    build: Callable[..., PromptSet], demo: HookedTransformer
) -> None:
    prompts = build(demo, n_prompts=30, seed=1)
    assert len({tuple(row) for row in prompts.tokens.tolist()}) == len(prompts) == 30
    assert torch.equal(prompts.tokens, build(demo, n_prompts=30, seed=1).tokens)
    assert not torch.equal(prompts.tokens, build(demo, n_prompts=30, seed=2).tokens)
    assert (prompts.tokens[:, 0] == demo.tokenizer.bos_token_id).all()
    assert "words of the demo model's world" in prompts.description and "seed 1" in prompts.description
    for text, target in zip(texts(demo, prompts), answers(demo, prompts.target), strict=True):
        whole = demo.to_tokens(text + target)[0].tolist()
        assert whole == [*demo.to_tokens(text)[0].tolist(), demo.to_single_token(target)]  # as the model would read it


@pytest.mark.parametrize("build", BUILDERS)
def test_options_out_of_range_are_refused(build: Callable[..., PromptSet], demo: HookedTransformer) -> None:
    for options, said in (
        ({"n_prompts": 0}, "n_prompts must be at least 1"),
        ({"n_prompts": 2.5}, "n_prompts must be at least 1"),
        ({"seed": -1}, "seed must be"),
        ({"domain": "german"}, "domain must be one of 'auto', 'english', 'demo'"),
    ):
        with pytest.raises(ValueError, match=said):
            build(demo, **options)
    with pytest.raises(ValueError, match="has no tokenizer"):
        build(SimpleNamespace(tokenizer=None, cfg=demo.cfg))


def test_receivers_are_named_once_and_givers_twice(demo: HookedTransformer) -> None:
    clean = indirect_objects(demo, n_prompts=20)
    targets, foils = answers(demo, clean.target), answers(demo, clean.foil)
    for index, (text, target, foil) in enumerate(zip(texts(demo, clean), targets, foils, strict=True)):
        first, second, again = (f" {word}" for word in re.findall(r"\w+", text) if word in words.NAMES)
        assert again == foil and {first, second} == {target, foil}
        assert first == (target if index % 2 == 0 else foil)  # ABBA, BABA
    for corruption, n_changed in (("third name", 1), ("swapped", 1), ("other names", 3)):
        prompts = indirect_objects(demo, n_prompts=20, corruption=corruption)
        assert torch.equal(prompts.tokens, clean.tokens)
        assert ((prompts.corrupted != prompts.tokens).sum(dim=1) == n_changed).all()
        for text, target, foil in zip(texts(demo, prompts, corrupted=True), targets, foils, strict=True):
            *both, again = (f" {word}" for word in re.findall(r"\w+", text) if word in words.NAMES)
            if corruption == "other names":
                assert len({*both, again, target, foil}) == 5
            else:
                assert set(both) == {target, foil}
                assert again == target if corruption == "swapped" else again not in both
    with pytest.raises(ValueError, match="corruption must be one of 'third name', 'other names', 'swapped'"):
        indirect_objects(demo, corruption="none")


def test_later_years_are_the_targets(demo: HookedTransformer) -> None:
    prompts = greater_than(demo, n_prompts=50)
    years = answers(demo, prompts.years)
    assert years == [f"{year:02d}" for year in range(100)]
    told = zip(texts(demo, prompts), texts(demo, prompts, corrupted=True), strict=True)
    for place, (text, corrupted) in enumerate(told):
        century, start, again = re.fullmatch(
            r"The \w+ lasted from the year (\d\d)(\d\d) to the year (\d\d)", text
        ).groups()
        assert century == again and int(start) == prompts.start[place] and 1 < int(start) < 99
        assert corrupted == text.replace(century + start, f"{century}01")
        assert int(years.index(answers(demo, prompts.target)[place])) > int(start)
        assert int(years.index(answers(demo, prompts.foil)[place])) <= int(start)


def test_probability_difference_by_hand(demo: HookedTransformer) -> None:
    prompts = greater_than(demo, n_prompts=3)
    probabilities = torch.zeros(3, 1, demo.cfg.d_vocab, dtype=torch.float64)
    later, same = prompts.years[prompts.start + 1], prompts.years[prompts.start]
    for place, (p_later, p_same) in enumerate(((0.6, 0.1), (0.2, 0.5), (0.0, 0.0))):
        probabilities[place, 0, later[place]], probabilities[place, 0, same[place]] = p_later, p_same
        probabilities[place, 0, demo.tokenizer.bos_token_id] = 1 - p_later - p_same  # no year
    found = prompts.probability_difference()(probabilities.log())
    torch.testing.assert_close(found, torch.tensor([0.5, -0.3, 0.0]).double())


@pytest.mark.parametrize(
    ("pattern", "n_digits"),
    [
        (WORDS, 2),
        (r" ?[^\W\d]+| ?\d{1,3}|.", 1),  # 173|2
        (r" ?[^\W\d]+|\d|.", 1),  # 1|7|3|2
        (r" ?[^\W\d]+| ?\d\d00| ?\d{1,2}|.", 2),  # whole centuries in one token
        (r" ?[^\W\d]+| ?\d+|.", None),  # every year in one token
    ],
)
def test_years_end_as_the_tokenizer_splits_them(pattern: str, n_digits: int | None) -> None:
    model = reader(pattern)
    if n_digits is None:
        with pytest.raises(ValueError, match="neither in a token of two digits nor of one"):
            greater_than(model)
        return
    prompts = greater_than(model, domain="english")
    assert len(prompts.years) == 10**n_digits
    for place, (text, target) in enumerate(zip(texts(model, prompts), answers(model, prompts.target), strict=True)):
        first, again = re.findall(r"\d+", text)
        assert len(first) == 4 and len(again) == 4 - n_digits and first.startswith(again)
        assert int(again + target) > int(first) == int(again + f"{int(prompts.start[place]):0{n_digits}d}")


def test_facts_are_those_of_the_table(demo: HookedTransformer) -> None:
    facts = {
        statement: answer
        for country in words.COUNTRIES
        for statement, answer in (
            (f"The capital of {country.name} is", country.capital),
            (f"The river of {country.name} is the", country.river),
            (f"The people of {country.name} sell", country.good),
        )
    }
    prompts = factual_recall(demo, n_prompts=len(facts))
    assert dict(zip(texts(demo, prompts), answers(demo, prompts.target), strict=True)) == {
        statement: f" {answer}" for statement, answer in facts.items()
    }
    for text, foil in zip(texts(demo, prompts, corrupted=True), answers(demo, prompts.foil), strict=True):
        assert foil == f" {facts[text]}"
    assert ((prompts.tokens != prompts.corrupted).sum(dim=1) == 1).all()  # the same relation
    with pytest.raises(ValueError, match="72 facts can be scored .* not n_prompts=73"):
        factual_recall(demo, n_prompts=73)


def test_verbs_agree_with_the_subject_and_not_with_the_noun_before_them(demo: HookedTransformer) -> None:
    prompts = subject_verb_agreement(demo, n_prompts=20)
    plurals = {words.plural(noun) for noun in (*words.THINGS, *words.WORKERS)}
    rows = zip(texts(demo, prompts), texts(demo, prompts, corrupted=True), strict=True)
    for index, (text, corrupted) in enumerate(rows):
        _, subject, _, _, attractor = text.split()
        assert (subject in plurals) == (index % 2 == 0) != (attractor in plurals)
        assert (corrupted.split()[1] in plurals) == (index % 2 == 1) and corrupted.split()[2:] == text.split()[2:]
        assert answers(demo, prompts.target)[index] == (" are" if index % 2 == 0 else " is")
        assert answers(demo, prompts.foil)[index] == (" is" if index % 2 == 0 else " are")


def test_words_are_those_that_the_tokenizer_has(demo: HookedTransformer) -> None:
    prompts = subject_verb_agreement(demo, domain="english", n_prompts=3)  # some English words are in the demo's world
    n_left_out, n_all = map(int, re.search(r"English words without (\d+) of (\d+) that", prompts.description).groups())
    assert 0 < n_left_out < n_all
    with pytest.raises(ValueError, match="needs 5 names that are single tokens, and this model's tokenizer has 2 of"):
        indirect_objects(demo, domain="english")
    with pytest.raises(ValueError, match=r"^\d facts can be scored"):
        factual_recall(demo, domain="english")
    with pytest.raises(ValueError, match="only 0 different prompts .* context holds 5"):
        subject_verb_agreement(reader(n_ctx=5))
    assert "English words;" in subject_verb_agreement(reader()).description  # has both domains


def test_a_tokenizer_without_bos_gets_none() -> None:
    model = reader(bos=False)
    prompts = subject_verb_agreement(model, domain="english")
    assert model.tokenizer.decode(prompts.tokens[0, :1].tolist()) == "The"


def test_the_demo_model_knows_its_world_but_not_who_gives(demo: HookedTransformer) -> None:
    for build, least in ((factual_recall, 0.95), (subject_verb_agreement, 0.95), (greater_than, 0.9)):
        assert accuracy(demo, build(demo)) >= least, build.__name__
    years = greater_than(demo)
    metric, corrupted = years.probability_difference(), replace(years, tokens=years.corrupted, corrupted=None)
    assert score(demo, years, metric).mean() > score(demo, corrupted, metric).mean() + 0.2
    assert 0.3 < accuracy(demo, indirect_objects(demo, n_prompts=100)) < 0.7  # chance, as its card says


def test_random_weights_are_at_chance(demo: HookedTransformer) -> None:
    model = HookedTransformer(demo.cfg).eval()
    model.tokenizer = demo.tokenizer
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    for build in (indirect_objects, factual_recall, subject_verb_agreement):
        assert 0.25 < accuracy(model, build(model, n_prompts=60)) < 0.75, build.__name__


def test_smollm2_knows_english(smollm2: HookedTransformer) -> None:
    for build, least in (
        (indirect_objects, 0.9),
        (greater_than, 0.8),
        (factual_recall, 0.95),
        (subject_verb_agreement, 0.65),
    ):
        prompts = build(smollm2, n_prompts=12)
        assert "English words" in prompts.description
        assert accuracy(smollm2, prompts) >= least, build.__name__


# ---- files ---------------------------------------------------------------------------------------------------------

FRANCE = {"prompt": "The capital of France is", "target": " Paris"}
FOIL, CORRUPTED = {"foil": " Rome"}, {"corrupted": "The capital of Italy is"}


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "capitals.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_file_of_prompts(tmp_path: Path) -> None:
    model = reader()
    spain = {"prompt": "Capital of Spain:", "target": "Madrid", "foil": " Rome", "corrupted": "Capital of Chile:"}
    prompts = read_prompts(model, written(tmp_path, {**FRANCE, **FOIL, **CORRUPTED}, "", spain))
    assert texts(model, prompts) == ["The capital of France is", "Capital of Spain:"]
    assert texts(model, prompts, corrupted=True) == ["The capital of Italy is", "Capital of Chile:"]
    assert answers(model, prompts.target) == [" Paris", " Madrid"] and answers(model, prompts.foil) == [" Rome"] * 2
    assert prompts.real.sum(dim=1).tolist() == [6, 5] and prompts.tokens[1, 5] == 0
    assert prompts.name == "capitals" and "a space put before the answers of 1" in prompts.description
    parsed = parse_prompts(model, (tmp_path / "capitals.jsonl").read_text(encoding="utf-8"))
    assert texts(model, parsed) == texts(model, prompts) and answers(model, parsed.foil) == [" Rome"] * 2
    assert parsed.name == "own prompts" and "from your prompts; a space put" in parsed.description


def test_answers_that_are_no_new_word_stay_as_they_are(tmp_path: Path) -> None:
    model = reader(r" ?[a-zA-Z]+| ?\d{2}|.")
    lines = [{"prompt": f"{quote}year 17", "target": "32"} for quote in ("The ", "In the ")]
    lines += [{"prompt": 'He said "', "target": "Yes"}, {"prompt": "首都是", "target": "北"}]
    prompts = read_prompts(model, written(tmp_path, *lines))
    assert answers(model, prompts.target) == ["32", "32", "Yes", "北"]
    assert prompts.foil is None and prompts.corrupted is None and "a space" not in prompts.description


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "there are no prompts in"),
        (["The capital of France is"], "line 1: .* is not JSON"),
        (["[" * 100_000], "line 1: .* is not JSON"),
        ([FRANCE, "[1]"], "line 2: .* is no JSON object"),
        ([{**FRANCE, "corrupt": ""}], "line 1: there is no field 'corrupt'"),
        ([{"prompt": "a"}], "line 1: the field 'target' is missing"),
        ([{**FRANCE, "target": 5}], "line 1: target must be text in quotation marks, got 5"),
        ([{**FRANCE, "foil": None}], "line 1: foil must be text in quotation marks, got null"),
        ([FRANCE, "", {**FRANCE, **FOIL}], "line 1 has no field 'foil', but .*line 3 has one"),
        ([{**FRANCE, **CORRUPTED}, FRANCE], "line 2 has no field 'corrupted', but line 1 has one"),
        ([{**FRANCE, "target": " New York"}], r"line 1: target ' New York' is 2 tokens .*' New', ' York'"),
        ([{**FRANCE, "target": ""}], "line 1: target is empty"),
        ([{**FRANCE, "prompt": ""}], "line 1: prompt is empty"),
        ([{**FRANCE, "prompt": FRANCE["prompt"] + " ", "target": "Paris"}], "line 1: target 'Paris' runs together"),
        ([{**FRANCE, "foil": "Paris"}], "line 1: foil .* is the same token as the target"),
        ([{**FRANCE, "corrupted": FRANCE["prompt"]}], "line 1: corrupted is the prompt itself"),
        ([{**FRANCE, "corrupted": "The capital of New Zealand is"}], "corrupted .* has 7 tokens and the prompt 6"),
        ([{**FRANCE, "prompt": "far " * 70 + "is"}], "line 1: prompt has 7[0-9] tokens, .* context holds 64"),
        (['{"prompt": "\\ud800", "target": " a"}'], "line 1: prompt cannot be read: .*not valid Unicode"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named(lines: list[dict[str, Any] | str], said: str, tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=said):
        read_prompts(reader(r" ?\w+|\s+|."), written(tmp_path, *lines))


def test_files_that_cannot_be_read_and_models_that_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="cannot read"):
        read_prompts(reader(), tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="has no tokenizer"):
        read_prompts(SimpleNamespace(tokenizer=None), written(tmp_path, FRANCE))


def test_a_file_gives_the_numbers_of_each_prompt_alone(demo: HookedTransformer, tmp_path: Path) -> None:
    lines = [
        {"prompt": "The capital of Veld is", "target": " Talvik", "foil": " Besko"},
        {"prompt": "Once there was a baker. The river of Veld is the", "target": " Sarn", "foil": " Ivel"},
    ]
    prompts = read_prompts(demo, written(tmp_path, *lines))
    found = score(demo, prompts, prompts.logit_difference())
    for value, line in zip(found.tolist(), lines, strict=True):
        logits = demo(line["prompt"])[0, -1].detach()
        expected = logits[demo.to_single_token(line["target"])] - logits[demo.to_single_token(line["foil"])]
        assert value == pytest.approx(float(expected), abs=1e-3) and value > 0


@pytest.mark.parametrize(
    "name",
    [
        "alternative_attention", "attribution_agreement", "attribution_patching", "function_vector_heads",
        "integrated_gradients", "source_attribution",
    ],
)  # fmt: skip
def test_what_wants_answers_refuses_a_text(random_model: HookedTransformer, name: str) -> None:
    with pytest.raises(ValueError, match="prompts must be a PromptSet, got str; make one with read_prompts"):
        getattr(analyses, name)(random_model, "Mara met Tobin.")
