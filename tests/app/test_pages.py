"""What pages make of results and events, without a browser."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from dash.exceptions import PreventUpdate

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import (
    InductionHeads,
    PromptSet,
    attention_sinks,
    attribution_agreement,
    figures,
    head_pattern,
    head_statistics,
    induction_heads,
    parse_prompts,
)
from workbench.analyses.labels import ABLATIONS, ATTENTION_MEASURES, HEAD_SCORES, INDUCTION_SCORES, SINK_SCORES
from workbench.app import registry
from workbench.app.components import on_card
from workbench.app.models import ModelStore
from workbench.app.pages import attribution, heads, induction, lens, pattern, sinks, what_if
from workbench.app.recipes import HEAD_STATISTICS, Shown
from workbench.app.selection import first_head, rows_used, score_map
from workbench.app.services import Services
from workbench.app.shell import error_message
from workbench.app.state import OWN_PROMPTS, View
from workbench.errors import WorkbenchError

TEXT = "a b c a b c d e <script>alert(1)</script> a b %{x} d e f a b c"


@pytest.fixture
def services(tiny: HookedTransformer) -> Services:
    return Services(
        ModelStore(load=lambda source, job, make_room: tiny),
        View(model="tiny", text=TEXT),
        {"demo": "the bundled model"},
    )


def finish(services: Services, view: View) -> list[Any]:
    """The results of everything that a view needs."""
    results = []
    for task in registry.BY_NAME[view.page].tasks(services, view):
        job = services.jobs.request("test", task)
        assert job.wait(60) and job.error is None
        results.append(job.result)
    return results


def shown_text(component: Any) -> str:
    return json.dumps(component, default=lambda part: part.to_plotly_json(), ensure_ascii=False)


@pytest.mark.parametrize("page", [page for page in registry.BY_NAME if page not in ("attribution", "result")])
def test_every_page_draws_its_results_in_both_themes(page: str, services: Services) -> None:
    view = dataclasses.replace(
        services.default, page=page, layer=1, head=2, text=TEXT * 3, length=4, sequences=2, score="entropy", x="entropy"
    )
    result = finish(services, view)[0]
    for theme in ("light", "dark"):
        if page == "heads":
            drawn = [heads.overview_map(result, view, theme)[0], heads.score_scatter(result, view, theme)]
        else:
            drawn = [on_card(result.figure(kind, theme=theme), 300) for kind in result.figure_kinds]
        assert all(isinstance(figure, go.Figure) and figure.data for figure in drawn)


def test_attribution_names_the_heads_that_ablation_finds() -> None:
    model = HookedTransformer.from_pretrained("demo")
    services = Services(ModelStore(load=lambda source, job, make_room: model), View(), {})
    result, tokens = finish(services, dataclasses.replace(services.default, page="attribution"))
    heads_of = attribution.named_heads(result)
    for layer, head in result.heads("attended, decisive")[:6]:
        assert f'"L{layer}H{head}"' in shown_text(heads_of)
    assert set(result.measures) == set(ATTENTION_MEASURES) and set(result.ablations) == set(ABLATIONS)
    assert f"{result['baseline'].mean():+.2f}" in shown_text(attribution.numbers_that_matter(result))
    for drawn in (result, tokens):
        for theme in ("light", "dark"):
            assert all(drawn.figure(kind, theme=theme).data for kind in drawn.figure_kinds)


def test_own_prompts_without_foils_are_scored_by_their_log_probability() -> None:
    model = HookedTransformer.from_pretrained("demo")
    services = Services(ModelStore(load=lambda source, job, make_room: model), View(), {})
    example = parse_prompts(model, attribution.EXAMPLE)
    assert example.foil is not None and example.corrupted is not None  # what the empty field shows can be used
    written = services.texts.put('{"prompt": "The capital of Veld is", "target": " Talvik"}')
    result, _ = finish(
        services, dataclasses.replace(services.default, page="attribution", task=OWN_PROMPTS, own_prompts=written)
    )
    expected = model("The capital of Veld is")[0, -1].detach().double().log_softmax(0)[model.to_single_token(" Talvik")]
    assert result["baseline"].tolist() == pytest.approx([float(expected)], abs=1e-4)
    assert result.ablations == ["zero"] and attribution.shown_ablation(result, View(ablation="mean")) == "zero"
    shown = shown_text(attribution.numbers_that_matter(result))
    assert "nats of log-probability, 1 prompt" in shown and f"{float(expected):+.2f}" in shown


def test_a_model_without_the_words_of_a_task_says_so(services: Services) -> None:
    (task, _) = attribution.tasks(services, dataclasses.replace(services.default, page="attribution"))
    job = services.jobs.request("test", task)
    assert job.wait(60) and isinstance(job.error, (WorkbenchError, ValueError))
    assert "This cannot be analysed" in shown_text(error_message(job.error))


@pytest.mark.parametrize(
    ("button", "name"), [("off-head", "L1H2"), ("off-layer", "L1"), ("off-mlp", "M1"), ("off-sink", "L1H2:>0")]
)
def test_buttons_switch_parts_of_the_chosen_head_off_once(button: str, name: str) -> None:
    view = View(layer=1, head=2)
    assert what_if.with_chosen(["M0"], button, view) == ["M0", name]
    with pytest.raises(PreventUpdate):
        what_if.with_chosen([name], button, view)
    with pytest.raises(PreventUpdate):
        what_if.with_chosen([], button, View())


def test_the_code_of_what_if_gives_the_numbers_of_the_page(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    view = dataclasses.replace(
        services.default, page="what-if", model="tiny", off=("L1H2", "L0:>0"), max_tokens=9, position=3
    )
    shown = finish(services, view)[0]
    model = services.models.loaded("tiny")
    monkeypatch.setattr(HookedTransformer, "from_pretrained", lambda source: model)
    monkeypatch.setattr(go.Figure, "show", lambda figure: None)
    ran: dict[str, Any] = {}
    exec(what_if.figures(view)["following"].code(view, TEXT, shown), ran)  # what the page says of itself, to be copied
    for name in ("loss_before", "loss_after", "kl", "probability_after"):
        np.testing.assert_array_equal(ran["result"][name], shown[name])


def test_the_lens_says_how_ranks_move_and_shows_a_part_of_a_long_text(services: Services) -> None:
    view = dataclasses.replace(services.default, page="lens", text="a b c d e f " * 10)
    result, _ = finish(services, view)
    last = len(result.coordinates["query"]) - 1
    assert lens.chosen_position(result, view) == last - 1
    assert lens.chosen_position(result, dataclasses.replace(view, lens_position=10**6)) == last
    first = lens.first_shown(result, 30)
    assert first <= 30 < first + lens.SHOWN and lens.first_shown(result, 0) == 0
    assert lens.first_shown(result, last) + lens.SHOWN == last + 1
    table = shown_text(lens.rank_table(result, 30))
    before, after = result["rank"][0, 30], result["rank"][1, 30]
    if before != after:
        assert f"{'↑' if after < before else '↓'}{abs(before - after):,.0f}" in table
    assert f"{result['rank'][2, 30]:,.0f} " in table and "the token that follows" in table
    assert "Nothing follows" in shown_text(lens.rank_table(result, last))


def test_the_scores_offered_are_the_scores_there_are(services: Services) -> None:
    view = dataclasses.replace(services.default, layer=0, head=0, text=TEXT * 3, length=4, sequences=2)
    statistics, _ = finish(services, view)
    learned = {"virtual_sink_mass"}  # of models with learned sinks; see test_model_kinds.py
    assert set(HEAD_SCORES) - learned == set(statistics.score_names)
    (found,) = finish(services, dataclasses.replace(view, page="induction"))
    assert set(INDUCTION_SCORES) <= set(found.names("layer", "head"))
    (rates,) = finish(services, dataclasses.replace(view, page="sinks"))
    assert set(SINK_SCORES) - learned <= set(rates.names("layer", "head"))
    for name in set(SINK_SCORES) - learned:
        assert rates.figure("map", score=name).data


def test_scores_without_a_value_say_so_and_cannot_be_chosen(tiny: HookedTransformer) -> None:
    result = head_statistics(tiny, "a b c d e")
    empty, _, note = heads.overview_map(result, View(), "light")
    assert "No token of this text comes again" in empty.layout.annotations[0].text and note == ""
    disabled = {option["value"] for option in heads.score_options(result) if option["disabled"]}
    assert "prefix_matching" in disabled and "entropy" not in disabled
    columns, rows = heads.score_table(result)
    assert "prefix_matching" not in {column["field"] for column in columns}
    assert len(rows) == 6 and rows[5]["name"] == "L1H2"
    assert rows[5]["entropy"] == pytest.approx(float(result["entropy"][1, 2]))
    assert first_head(result) == result.top("previous_token", 1)[0]


@pytest.mark.parametrize(
    ("ids", "reasons"),
    [
        ([0, 2, 3], {"duplicate_token": "No token of this text occurs twice", "prefix_matching": "in between"}),
        ([0, 5, 5], {"prefix_matching": "No token of this text comes again with others in between"}),
        ([0, 5, 5], {"prefix_matching_latest": "in between", "prefix_matching_per_entry": "in between"}),
        ([0, 5, 5], {"virtual_sink_mass": "no learned sinks"}),
        ([0], {"previous_token": "This text is a single token", "relative_entropy": "This text is a single token"}),
        ([5, 5, 5], {}),
    ],
)
def test_the_reason_for_a_missing_value_is_the_true_one(
    tiny: HookedTransformer, ids: list[int], reasons: dict[str, str]
) -> None:
    result = head_statistics(tiny, torch.tensor(ids))
    for score, reason in reasons.items():
        assert score not in result.score_names
        assert reason in heads.overview_map(result, View(score=score), "light")[0].layout.annotations[0].text
    if not reasons:
        assert set(result.score_names) == set(HEAD_SCORES) - {"virtual_sink_mass"}


def drag(x: tuple[float, float], y: tuple[float, float]) -> dict[str, float]:
    return {"xaxis3.range[0]": x[0], "xaxis3.range[1]": x[1], "yaxis3.range[0]": y[0], "yaxis3.range[1]": y[1]}


def test_the_small_pattern_has_no_bars_without_a_scale(tiny: HookedTransformer) -> None:
    small = on_card(head_pattern(tiny, torch.arange(20) % 8, 0, 0).figure(bars=False, captioned=True), 300)
    (heatmap,) = small.data
    assert (heatmap.xaxis, heatmap.yaxis) == ("x3", "y3")
    assert small.layout.xaxis3.domain == small.layout.yaxis3.domain == (0, 1)
    assert not (small.layout.xaxis4.visible or small.layout.yaxis.visible)


def test_a_drag_over_exact_cells_shows_the_cells_it_touches(tiny: HookedTransformer) -> None:
    result = head_pattern(tiny, torch.arange(20) % 8, 0, 0)
    assert pattern.zoomed(drag((2.6, 5.4), (9.4, 3.2)), result) == ((3, 10), (3, 6))
    assert pattern.zoomed({"xaxis3.range[0]": 2.6, "xaxis3.range[1]": 5.4}, result) == ((0, 20), (3, 6))
    assert pattern.zoomed({"xaxis3.autorange": True, "yaxis3.autorange": True}, result) == (None, None)
    for other in ({}, {"autosize": True}, drag((-0.5, 19.5), (19.5, -0.5))):
        with pytest.raises(PreventUpdate):
            pattern.zoomed(other, result)


def test_a_drag_over_blocks_goes_down_to_single_tokens(tiny: HookedTransformer) -> None:
    whole = head_pattern(tiny, torch.arange(200) % 8, 0, 0, max_cells=50)
    assert tuple(whole.settings["block"]) == (4, 4)
    queries, keys = pattern.zoomed(drag((1.9, 4.1), (30.2, 39.0)), whole)
    assert queries == (120, 160) and keys == (8, 20)
    near = head_pattern(tiny, torch.arange(200) % 8, 0, 0, queries=queries, keys=keys, max_cells=50)
    assert near.is_exact
    assert pattern.zoomed(drag((-0.5, 2.5), (3.5, -0.5)), near) == ((120, 124), (8, 11))


def test_a_typed_range_of_tokens_is_shown_or_refused_in_words(tiny: HookedTransformer) -> None:
    assert pattern.chosen_span("queries", [3, 9], 20) == (3, 10)
    assert pattern.chosen_span("keys", [0, 19], 20) == (0, 20)
    for ends in ([9, 3], [0, 20], ["", 3], [None, None], [], [1, 2, 3]):
        with pytest.raises(WorkbenchError, match="the keys to show must be a range from 0 to 19"):
            pattern.chosen_span("keys", ends, 20)


def test_it_is_said_which_queries_and_keys_are_shown_and_what_a_cell_is(tiny: HookedTransformer) -> None:
    part = head_pattern(tiny, torch.arange(20) % 8, 0, 0, queries=(10, 13), keys=(2, 5))
    assert pattern.shown_ends(part) == (10, 12, 2, 4)
    said = pattern.shown_part(part)  # ids 2 and 4 are words; 10 and 12 are the same words again
    assert "Queries 10 “<script>alert(1)</script>” to 12 “b”, keys 2 “<script>alert(1)</script>” to 4 “b”" in said
    assert "of 20 tokens. Each cell is one query and one key." in said
    pooled = head_pattern(tiny, torch.arange(200) % 8, 0, 0, queries=(0, 100), max_cells=50, pooling="mean")
    assert tuple(pooled.settings["block"]) == (2, 4)
    assert pattern.shown_part(pooled).endswith("of 200 tokens. Each cell is 2 queries × 4 keys, mean.")


def test_tokens_are_text_wherever_they_are_shown(services: Services) -> None:
    view = dataclasses.replace(services.default, page="pattern", layer=0, head=0)
    (result,) = finish(services, view)
    texts = [piece["text"] for piece in pattern.token_pieces(result)]
    assert "<script>alert(1)</script>" in texts  # which the browser is given as text
    assert len(texts) == len(TEXT.split()) + 1
    figure = result.figure().to_json()
    assert "<script>" not in figure and "&lt;script" in figure.replace("\\u003c", "<").replace("\\u0026", "&")


def test_every_character_of_a_token_can_be_seen() -> None:
    shown = [pattern.visible(text) for text in ("a\nb", "\t", "\x00\x1b\x7f", "  ", "", " a", "<b>")]
    assert shown == ["a↵b", "⇥", "␀␛␡", "␣␣", "␣", " a", "<b>"]


def test_tokens_know_their_row_and_column_and_gaps_are_shown(tiny: HookedTransformer) -> None:
    result = head_pattern(tiny, torch.arange(20) % 8, 0, 0, queries=(10, 13), keys=(2, 5))
    pieces = pattern.token_pieces(result)
    assert [piece and piece["position"] for piece in pieces] == [2, 3, 4, None, 10, 11, 12]
    assert (pieces[0]["q"], pieces[0]["k"]) == (None, 0)
    assert (pieces[-1]["q"], pieces[-1]["k"]) == (2, None)
    pooled = head_pattern(tiny, torch.arange(200) % 8, 0, 0, max_cells=50)
    assert pattern.token_pieces(pooled) == []


def test_the_verdicts_are_told_as_they_were_found(tiny: HookedTransformer) -> None:
    result = induction_heads(tiny, length=6, n_sequences=3, n_ablated=2)
    cells = shown_text(induction.verdict_table(result))
    for place, name in enumerate(result.coordinates["ablated"]):
        assert name in cells and str(result["verdict"][place]) in cells
        assert f"{result['mean_effect'][place]:+.3f}" in cells
    assert f"{result['copy_loss'][1]:.2f}" in shown_text(induction.numbers_that_matter(result))


def found_heads(model: HookedTransformer, verdicts: list[str], controls: list[float], **options: Any) -> InductionHeads:
    """A result with these verdicts and effects of controls, and all else as found."""
    found = induction_heads(model, length=6, n_sequences=3, seed=4, n_ablated=2, **options)
    n = len(verdicts) - len(controls)
    replaced = {
        "ablated_head": np.zeros((len(verdicts), 2), dtype=int),
        "verdict": np.array(verdicts),
        "is_control": np.arange(len(verdicts)) >= n,
        "mean_effect": np.array([0.0] * n + controls),
    }
    kept = {name: about for name, about in found.quantities.items() if "ablated" not in about.axes or name in replaced}
    changed = {name: dataclasses.replace(kept[name], values=values) for name, values in replaced.items()}
    names = [str(place) for place in range(len(verdicts))]
    return dataclasses.replace(
        found, quantities=kept | changed, coordinates=dict(found.coordinates) | {"ablated": names}
    )


@pytest.mark.parametrize(
    ("verdicts", "controls", "said"),
    [
        (["induction", "control"], [-0.125], "Grey: ± 0.125 nats, the largest effect of a control"),
        (["induction", "control"], [0.004], "Grey: ± 0.010 nats, the least that counts"),
        (["no pattern", "no pattern"], [], "None of these heads has the pattern"),
        (["untested: no control head", "no pattern"], [], "No other head of these layers is free of the pattern"),
    ],
)
def test_the_caption_of_the_ablations_says_where_the_grey_band_comes_from_or_why_there_is_none(
    tiny: HookedTransformer, verdicts: list[str], controls: list[float], said: str
) -> None:
    told = induction.about_ablation(found_heads(tiny, verdicts, controls))
    assert told.startswith(said) and ("Grey" in told) == ("Grey" in said)
    assert told.endswith("Means are those of 3 other sequences of the same kind (seed 5).")


@pytest.mark.parametrize(
    ("verdicts", "passed", "which"),
    [
        (["induction", "redundant", "pattern only", "no pattern"], "2 of 3", "1 induction, 1 redundant"),
        (["redundant", "redundant", "anti-induction"], "2 of 3", "2 redundant"),
        (["no pattern", "no pattern"], "–", "heads with the pattern"),
        (["untested: one sequence", "no pattern"], "–", "heads with the pattern"),
        (["untested: no control head", "no pattern"], "–", "heads with the pattern"),
    ],
)
def test_heads_that_were_not_tested_do_not_fail_the_test(
    tiny: HookedTransformer, verdicts: list[str], passed: str, which: str
) -> None:
    found = found_heads(tiny, [*verdicts, "control"], [0.0])
    tile = induction.numbers_that_matter(found).children[-1]
    assert [part.children for part in tile.children] == ["Tested heads that pass", passed, which]


def test_a_map_is_as_high_as_its_layers_need() -> None:
    class Scores(dict):
        quantities = {"entropy": SimpleNamespace(definition="of a query", unit="nats")}
        coverage: dict[str, float] = {}

        def figure(self, kind: str, *, score: str, chosen: tuple, captioned: bool, theme: str) -> go.Figure:
            return figures.head_map(self[score], label=score, chosen=chosen, theme=theme)

    def heights(n_layers: int) -> tuple[int, str]:
        scores = Scores(entropy=np.random.default_rng(0).random((n_layers, 3)))
        shown = Shown(HEAD_STATISTICS, "map", {"score": "entropy", "chosen": (0, 0)})
        figure, style, _ = score_map(scores, shown, {"entropy": "Entropy"}, "light", 400)
        assert figure.layout.xaxis.range == (-0.5, 2.5) and figure.layout.yaxis.range == (n_layers - 0.5, -0.5)
        return figure.layout.height, style["height"]

    assert heights(4) == (400, "400px")
    assert heights(30) == (570, "570px") and heights(80) == (1370, "1370px")


def test_a_map_says_over_how_many_queries_its_score_is_a_mean(tiny: HookedTransformer) -> None:
    result = head_statistics(tiny, "a b a c a d")  # and BOS; what follows an earlier "a" is there for two of them
    assert rows_used(result, "prefix_matching") == " Over 2 of 7 queries."
    assert rows_used(result, "previous_token") == " Over 6 of 7 queries."
    note = score_map(result, Shown(HEAD_STATISTICS, "map", {"score": "entropy"}), HEAD_SCORES, "light", 400)[2]
    assert note[-1] == " Over 7 of 7 queries."
    sequences = torch.arange(40).repeat(2, 1) % 8
    assert rows_used(attention_sinks(tiny, sequences), "sink_weight") == ""  # its coverage is one of keys


def test_sinks_tell_their_rate_and_the_kinds_of_tokens(services: Services) -> None:
    (result,) = finish(services, dataclasses.replace(services.default, page="sinks", text=TEXT * 3))
    assert f"{result['sink_rate'][result.sink_position]:.0%}" in shown_text(sinks.numbers_that_matter(result))
    assert "of sequences × heads, at position" in shown_text(sinks.numbers_that_matter(result))
    nothing = dataclasses.replace(
        result.quantities["output_norm_ratio"], values=np.full_like(result["output_norm_ratio"], np.nan)
    )
    without = dataclasses.replace(result, quantities=dict(result.quantities) | {"output_norm_ratio": nothing})
    assert "nan" not in shown_text(sinks.numbers_that_matter(without))  # of a model that writes only zeros
    assert "First token" in shown_text(sinks.kind_table(result))


def test_the_text_is_cut_into_sequences_for_sinks_only_when_it_is_long(services: Services) -> None:
    short, long = "a b c d " * 8, "a b c d " * 40
    (one,) = finish(services, dataclasses.replace(services.default, page="sinks", text=short))
    assert one.provenance.n_sequences == 1 and one.provenance.n_tokens == 33
    (many,) = finish(services, dataclasses.replace(services.default, page="sinks", text=long))
    assert many.provenance.n_sequences == 160 // 63 and many.provenance.n_tokens == 2 * 64
    (cut,) = finish(services, dataclasses.replace(services.default, page="sinks", text=long, max_tokens=40))
    assert cut.provenance.n_sequences == 1 and cut.provenance.n_tokens == 40


def test_a_text_beyond_the_context_names_the_field_that_shortens_it(services: Services) -> None:
    view = dataclasses.replace(services.default, text="a " * 2000)
    job = services.jobs.request("test", services.task(view, HEAD_STATISTICS))
    assert job.wait(60) and isinstance(job.error, WorkbenchError)
    assert "2,001 tokens" in str(job.error) and "1,024" in str(job.error) and "Shorten to" in str(job.error)
    (result, _) = finish(services, dataclasses.replace(view, max_tokens=100, layer=0, head=0))
    assert result.provenance.n_tokens == 100


@pytest.mark.parametrize("page", ["lens", "what-if"])
def test_one_token_has_no_loss_and_no_rank(services: Services, page: str) -> None:
    view = dataclasses.replace(services.default, page=page, text="a", max_tokens=1, layer=0, head=0)
    result = finish(services, view)[0]
    assert len(result.coordinates["query"]) == 1
    shown = shown_text(registry.BY_NAME[page].numbers_that_matter(result))
    assert "nan" not in shown and "–" in shown


def test_where_no_head_differs_no_measure_is_the_best() -> None:
    cfg = TransformerConfig(n_layers=1, d_model=8, n_heads=1, d_head=4, d_mlp=8, d_vocab=20, n_ctx=16)
    tokens = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    target = torch.arange(3)
    prompts = PromptSet(tokens, torch.ones_like(tokens).bool(), target, target + 1, (tokens + 1) % 20, "one", "tokens")
    result = attribution_agreement(HookedTransformer(cfg).eval(), prompts, ablations=("zero",), n_permutations=9)
    shown = shown_text(attribution.numbers_that_matter(result))
    assert "nan" not in shown and "no measure differs" in shown
