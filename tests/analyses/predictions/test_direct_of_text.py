"""Direct logit attribution of one token of a text: which answers it takes, and that its parts are all there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import PromptSet, direct_logit_attribution, figures

TEXT = "Mara and Hugo went to the harbour. Mara gave the lantern to Hugo."


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def test_a_token_of_a_text_is_a_prompt_that_ends_there(model: HookedTransformer) -> None:
    ids = model.to_tokens(TEXT)[0]
    logits = model(ids[None])[0].detach().double()
    for position, read in ((None, len(ids) - 2), (5, 5), (-4, len(ids) - 4)):
        found = direct_logit_attribution(model, TEXT, position=position)
        target = int(ids[read + 1])
        foil = int(logits[read].index_fill(0, torch.tensor(target), -torch.inf).argmax())
        prompt = PromptSet(
            ids[None, : read + 1], torch.ones(1, read + 1, dtype=torch.bool), torch.tensor([target]),
            torch.tensor([foil]), None, "by hand", "by hand",
        )  # fmt: skip
        by_hand = direct_logit_attribution(model, prompt)
        for name in ("head_contribution", "mlp_contribution", "logit_difference"):
            np.testing.assert_allclose(found[name], by_hand[name], atol=1e-9, err_msg=name)
        assert found["logit_difference"] == pytest.approx(float(logits[read, target] - logits[read, foil]), abs=1e-4)
        assert found.settings["position"] == read
        assert found.settings["target"] == model.tokenizer.decode([target])


def test_after_the_last_token_the_likeliest_one_is_the_target(model: HookedTransformer) -> None:
    found = direct_logit_attribution(model, TEXT, position=-1)
    first, second = model(model.to_tokens(TEXT))[0, -1].topk(2).indices.tolist()
    assert [found.settings["target"], found.settings["foil"]] == [model.tokenizer.decode([i]) for i in (first, second)]
    assert found["logit_difference"] > 0


def test_words_may_be_typed_with_and_without_their_space(model: HookedTransformer) -> None:
    for typed in (" Dora", "Dora", "␣Dora", int(model.tokenizer(" Dora", add_special_tokens=False)["input_ids"][0])):
        assert direct_logit_attribution(model, TEXT, position=13, foil=typed).settings["foil"] == " Dora"
    for typed, words in {
        " Dora harbour": "no single token of this model .' Dora', ' harbour'.",
        "": "target must be a word or a token id",
        10**6: "target must be a token id from 0 to",
        2.5: "target must be a word or a token id",
    }.items():
        with pytest.raises(ValueError, match=words):
            direct_logit_attribution(model, TEXT, target=typed)
    with pytest.raises(ValueError, match="same token as the target"):
        direct_logit_attribution(model, TEXT, target=" Dora", foil=" Dora")
    with pytest.raises(ValueError, match="position must lie between"):
        direct_logit_attribution(model, TEXT, position=99)
    with pytest.raises(ValueError, match="one sequence here, got 2"):
        direct_logit_attribution(model, [TEXT, TEXT])


def test_prompts_bring_their_own_answers(model: HookedTransformer) -> None:
    tokens = model.to_tokens(TEXT)
    prompts = PromptSet(
        tokens, torch.ones_like(tokens).bool(), torch.tensor([5]), torch.tensor([6]), None, "any", "any"
    )
    with pytest.raises(ValueError, match="foil is of one text"):
        direct_logit_attribution(model, prompts, foil=" Dora")


def test_parts_have_names_and_add_up(model: HookedTransformer) -> None:
    found = direct_logit_attribution(model, TEXT, position=9)
    parts, total = found.parts(), float(found["logit_difference"][0])
    assert len(parts) == found["head_contribution"].size + 2 * model.cfg.n_layers + 2
    assert sum(parts.values()) == pytest.approx(total, abs=1e-4)
    assert parts["L2H1"] == found["head_contribution"][2, 1] and parts["M3"] == found["mlp_contribution"][3]
    assert [*parts.values()] == sorted(parts.values(), reverse=True)


def test_bars_of_parts_start_where_the_last_one_ended_and_reach_the_sum() -> None:
    drawn = figures.part_bars({"a": 3.0, "b": -0.25, "c": 0.5, "d": -2.0}, 1.25, n_parts=2, label="sum")
    bars = {name: (base, value) for bar in drawn.data for name, base, value in zip(bar.y, bar.base, bar.x, strict=True)}
    assert bars == {"a": (0, 3), "d": (3, -2), "2 others": (1, 0.25), "sum": (0, 1.25)}
    assert list(drawn.layout.yaxis.categoryarray) == ["a", "d", "2 others", "sum"]
    assert {bar.name for bar in drawn.data} == {"towards the target", "towards the foil", "sum"}
