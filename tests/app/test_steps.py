"""What pages make of a generation, of one prediction's parts, and of cards that are asked for; without a browser."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from workbench import HookedTransformer
from workbench.app import registry
from workbench.app.models import ModelStore
from workbench.app.pages import generation, induction, lens, sinks
from workbench.app.services import Services
from workbench.app.shell import progress_of
from workbench.app.state import ON_DEMAND, View

TEXT = "a b c a b c d e <script>alert(1)</script> a b %{x} d e f a b c"


@pytest.fixture
def services(tiny: HookedTransformer) -> Services:
    return Services(
        ModelStore(load=lambda source, job, make_room: tiny), View(model="tiny", text=TEXT, layer=1, head=2), {}
    )


def finish(services: Services, view: View) -> list[Any]:
    """The results of everything that a view needs; None for what failed and need not be."""
    results = []
    for task in registry.BY_NAME[view.page].tasks(services, view):
        job = services.jobs.request("test", task)
        assert job.wait(60) and (job.error is None or task.optional)
        results.append(job.result)
    return results


def shown_text(component: Any) -> str:
    return json.dumps(component, default=lambda part: part.to_plotly_json(), ensure_ascii=False)


def test_the_text_of_a_step_shades_its_keys_and_marks_its_token(services: Services) -> None:
    view = dataclasses.replace(services.default, page="generation", new_tokens=5, step=3)
    (result,) = finish(services, view)
    weights, others = result.row(3, 1, 2)
    spans = generation.token_strip(result, 3, weights)
    tokens = [span for span in spans if "step-token" in span.className]
    assert tokens[9].children == "<script>alert(1)</script>" == result.coordinates["position"][9]
    assert len(tokens) == len(result.coordinates["position"]) == result.settings["n_prompt"] + 5
    shades = [float(span.style["--w"]) for span in tokens]
    np.testing.assert_allclose(np.square(shades), weights, atol=2e-3)
    steps = {getattr(span, "data-step"): span.className for span in tokens if hasattr(span, "data-step")}
    assert [*steps] == ["0", "1", "2", "3", "4"]
    assert [name for name in steps if "chosen" in steps[name]] == ["3"]
    assert [name for name in steps if "later" in steps[name]] == ["4"]
    said = shown_text(generation.strongest_keys(result, "L1H2", weights, others))
    assert f"({weights.argmax()}) {weights.max():.3f}" in said
    numbers = [float(part.split()[-1]) for part in said.split(" looks at ")[1].strip('"]').split(" · ")]
    assert sum(numbers) == pytest.approx(1, abs=0.01)  # what is named and the rest are all there is


def test_a_long_prompt_is_shown_from_near_its_end_and_the_rest_is_counted(services: Services) -> None:
    view = dataclasses.replace(services.default, page="generation", text=TEXT * 30, new_tokens=2)
    (result,) = finish(services, view)
    weights, _ = result.row(0, 0, 0)
    spans = generation.token_strip(result, 0, weights)
    n_hidden = result.settings["n_prompt"] - generation.MOST_SHOWN
    assert n_hidden > 0 and f"{n_hidden:,} tokens before, {weights[:n_hidden].sum():.3f}" in spans[0].children
    assert len([span for span in spans if "step-token" in span.className]) == generation.MOST_SHOWN + 2


def test_a_step_beyond_the_last_is_the_last_and_a_share_that_is_not_there_another(services: Services) -> None:
    view = dataclasses.replace(
        services.default, page="generation", new_tokens=3, step=99, step_score="virtual_sink_mass"
    )
    (result,) = finish(services, view)
    assert generation.shown_step(result, view) == 2 and generation.shown_score(result, view) == "generated_mass"
    assert {option["value"] for option in generation.score_options(result) if option["disabled"]} == {
        "virtual_sink_mass"
    }
    for shown in generation.figures(view).values():
        assert shown.draw(result, "dark").data


def test_temperature_and_seed_are_part_of_the_recipe_only_where_they_count() -> None:
    def key(**fields: Any) -> str:
        view = View(page="generation", **fields)
        return generation.generation(view).key(view)

    assert key(draw=1) == key(draw=2) == key()
    assert len({key(), key(temperature=0.5), key(temperature=0.5, draw=1), key(new_tokens=9)}) == 4


def test_the_parts_of_a_prediction_and_their_sum(services: Services) -> None:
    view = dataclasses.replace(services.default, page="lens", lens_position=5, foil="f")
    _, result = finish(services, view)
    assert result.settings["foil"] == "f" and result.settings["position"] == 5
    assert f"{result['logit_difference'][0]:+.4f}" in lens.about_parts(result)
    table = shown_text(lens.part_table(result))
    best, *_, worst = result.parts()
    assert f'"{best}"' in table and f'"{worst}"' in table


def test_an_answer_that_is_no_token_leaves_the_rest_of_the_page(services: Services) -> None:
    view = dataclasses.replace(services.default, page="lens", foil="nowhere")
    lens_result, parts = finish(services, view)
    assert lens_result is not None and parts is None
    error = services.jobs.error(lens.parts_of(view).key(view))
    assert "foil 'nowhere' is no single token of this model" in str(error)
    told, _, alert, hidden, *_, state = progress_of(services, view, "test", "", again=False)
    assert (alert, hidden, state) == ([], True, "main") and len(told.splitlines()) == 3  # view, lens and card


def test_nothing_is_computed_before_it_is_asked_for(services: Services) -> None:
    for page, names in (("induction", {"circuit", "copying"}), ("sinks", {"massive", "streaming", "purpose"})):
        view = dataclasses.replace(services.default, page=page)
        assert len(registry.BY_NAME[page].tasks(services, view)) == 1
        for name in names:
            asked = registry.BY_NAME[page].tasks(services, dataclasses.replace(view, asked=(name,)))
            assert len(asked) == 2 and asked[1].optional
        assert names <= set(ON_DEMAND)


def test_a_card_on_demand_is_a_button_then_a_result_or_what_went_wrong(services: Services) -> None:
    view = dataclasses.replace(services.default, page="sinks", asked=("massive",))
    assert sinks.MASSIVE.state(services, services.default, sinks.ACTIVATIONS) == ((False, True, []), None)
    _, result = finish(services, view)
    assert sinks.MASSIVE.state(services, view, sinks.ACTIVATIONS) == ((True, False, []), result)
    refused = dataclasses.replace(view, asked=("streaming",))  # this model's positions are learned
    finish(services, refused)
    (hidden, not_shown, said), nothing = sinks.STREAMING.state(services, refused, sinks.FORGETTING)
    assert hidden and not_shown and nothing is None and "positions" in shown_text(said)


def test_what_the_cards_on_demand_say(services: Services) -> None:
    view = dataclasses.replace(services.default, page="sinks", length=6, sequences=3, asked=("massive", "purpose"))
    _, massive, purpose = finish(services, view)
    assert "No massive activation" in shown_text(sinks.in_words(massive))
    said = shown_text(sinks.purposes(purpose))
    assert f"All layers: {purpose.verdict('all layers')}." in said and purpose.provenance.n_sequences == 20
    assert "its 18 tokens over and over in 20 sequences of BOS and 63 tokens" in said
    traced, copied = finish(services, dataclasses.replace(view, page="induction", asked=("circuit", "copying")))[1:]
    assert traced.coordinates["receiver"][0] in induction.about_circuit(traced)
    for shown, result in (("induction-circuit", traced), ("induction-copying", copied)):
        assert induction.figures(view)[shown].draw(result, "light").data
