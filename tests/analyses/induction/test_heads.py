from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import InductionHeads, induction_heads, repeated_random_tokens
from workbench.analyses.induction.ablation import (
    Repetition,
    ablation_check,
    control_heads,
    loss_effects,
    mean_z,
    verdict,
    without_heads,
)
from workbench.analyses.interventions.edits import replace_head

LENGTH = 20


def verdicts(found: InductionHeads) -> dict[str, str]:
    return dict(zip(found.coordinates["ablated"], found["verdict"].tolist(), strict=True))


def test_a_perfect_induction_head_is_found_and_is_causal(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = induction_heads(hand_built_model(LENGTH), length=LENGTH, n_sequences=4, n_ablated=2)
    assert found["prefix_matching"][1, 0] == pytest.approx(1.0, abs=1e-6)
    assert found["prefix_matching_latest"][1, 0] == pytest.approx(1.0, abs=1e-6)
    assert found["prefix_matching_per_entry"][1, 0] == pytest.approx(1.0, abs=1e-6)
    assert found["previous_token"][0, 0] == pytest.approx(1.0, abs=1e-6)
    # Spread evenly, query i gives each of its i + 1 keys the same.
    uniform = np.mean([1 / (i + 1) for i in range(LENGTH, 2 * LENGTH)])
    assert found["uniform_prefix_matching"] == pytest.approx(uniform)
    assert found["prefix_matching"][0, 2] == pytest.approx(uniform)
    assert found["duplicate_token"][0, 2] == pytest.approx(uniform)
    first, second = found["copy_loss"]
    assert first > 4 and second < 0.01
    # L1H3 looks at the same tokens, by position, and writes nothing.
    assert verdicts(found)["L1H0"] == "induction" and verdicts(found)["L1H3"] == "pattern only"
    assert found["mean_effect"][list(verdicts(found)).index("L1H3")] == pytest.approx(0.0, abs=1e-9)


def test_random_gaps_tell_content_from_position(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = induction_heads(
        hand_built_model(LENGTH),
        length=LENGTH,
        n_sequences=4,
        spacing="random gaps",
        n_ablated=2,
        pattern_threshold=0.5,
    )
    assert found["prefix_matching"][1, 0] == pytest.approx(1.0, abs=1e-6)
    assert found["prefix_matching"][1, 3] < 0.4
    assert found.top(1) == [(1, 0)]
    assert found["copy_loss"][1] < 0.01 < found["copy_loss"][0]
    assert verdicts(found) == {"L1H0": "induction", "L1H3": "no pattern"} | {
        name: "control" for name in verdicts(found) if "control" in name
    }


def test_the_table_of_all_heads_has_the_effects_of_those_ablated(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    found = induction_heads(hand_built_model(LENGTH), length=LENGTH, n_sequences=4, n_ablated=2)
    rows = found.to_frame().set_index(["layer", "head"])
    assert len(rows) == 8 and rows["verdict"].count() == len(found["verdict"]) < 8
    for place, head in enumerate(found["ablated_head"].tolist()):
        row = rows.loc[tuple(head)]
        assert row["verdict"] == found["verdict"][place]
        for name in ("mean_effect", "mean_effect_sem", "zero_effect", "zero_effect_sem", "peer_effect"):
            np.testing.assert_array_equal(row[name], found[name][place])
    assert list(found.tables()) == ["", "loss"]


def test_two_heads_that_replace_each_other_are_redundant(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = induction_heads(hand_built_model(LENGTH, induction_heads=2), length=LENGTH, n_sequences=4, n_ablated=3)
    assert verdicts(found)["L1H0"] == verdicts(found)["L1H1"] == "redundant"
    assert (found["mean_effect"][:3] < 0.01).all() and found["group_effect"] > 4


def test_what_a_head_does_by_itself_is_told_from_what_it_does_through_others(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    model, scores = hand_built_model(LENGTH), np.zeros((2, 4))
    scores[0, 0], scores[1, 0] = 1.0, 0.9
    prompts, others = (repeated_random_tokens(model, length=LENGTH, n_sequences=3, seed=seed) for seed in (0, 1))
    names, found = ablation_check(
        model, Repetition(prompts, others), scores, n_candidates=2, threshold=0.5, seed=0, progress=lambda *_: None
    )
    effects = {kind: found[f"{kind}_effect"].values for kind in ("mean", "direct", "patterns_kept")}
    assert names[:2] == ["L0H0", "L1H0"]
    # The previous-token head tells L1H0 where to look and does nothing else, but for the final norm's scale, which a
    # length of the stream goes into. L1H0 writes the answer, and last.
    assert (effects["mean"][:2] > 2).all()
    assert effects["direct"][0] == pytest.approx(0, abs=1e-5)
    assert effects["patterns_kept"][0] == pytest.approx(0, abs=1e-5)
    assert effects["direct"][1] == pytest.approx(effects["mean"][1], abs=1e-9)
    assert effects["patterns_kept"][1] == pytest.approx(effects["mean"][1], abs=1e-9)


def test_the_figure_shows_the_evidence_for_every_verdict(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = induction_heads(hand_built_model(LENGTH, induction_heads=2), length=LENGTH, n_sequences=4, n_ablated=3)
    figure = found.figure("ablation")
    drawn = {trace.name: trace for trace in figure.data}
    after = drawn["after its peers"]
    assert list(after.y[:2]) == ["L1H0: redundant", "L1H1: redundant"]
    np.testing.assert_array_equal(after.x, found["peer_effect"])
    np.testing.assert_array_equal(after.error_x.array, found["peer_effect_sem"])
    assert after.x[0] > found.control_effect + 2 * after.error_x.array[0]
    controls = [name for name in after.y if "control" in name]
    assert controls and all(":" not in name for name in controls)
    assert "After its peers" in found.figure("ablation", captioned=True).layout.title.subtitle.text


def test_peers_are_all_heads_with_the_pattern(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = induction_heads(
        hand_built_model(LENGTH, induction_heads=2),
        length=LENGTH,
        n_sequences=4,
        spacing="random gaps",
        n_ablated=1,
        pattern_threshold=0.5,
    )
    assert found["verdict"][0] == "redundant"  # its twin stands in for it, and is not ablated alone here
    assert found["mean_effect"][0] < 0.01 and found["peer_effect"][0] > 2
    assert "Without all 2 heads with" in found.summary()


def test_the_feeding_head_costs_as_much_as_the_induction_head(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    model = hand_built_model(LENGTH)
    prompts = repeated_random_tokens(model, length=LENGTH, n_sequences=2)
    heads = [replace_head(0, 0), replace_head(1, 0), replace_head(0, 1)]
    feeding, induction, other = loss_effects(model, prompts, heads, lambda *done: None).mean(axis=1)
    assert feeding > 2 and induction > 2 and abs(other) < 0.01


@pytest.mark.parametrize("spacing", ["fixed", "random gaps"])
def test_effects_are_those_of_whole_runs_with_a_hook(random_model: HookedTransformer, spacing: Any) -> None:
    options: dict[str, Any] = {"length": 12, "n_sequences": 3, "spacing": spacing}
    prompts, others = (repeated_random_tokens(random_model, **options, seed=seed) for seed in (0, 1))
    means = mean_z(random_model, others, [0, 1, 2])
    _, cache = random_model.run_with_cache(others.tokens)
    sets: list[list[tuple[int, int]]] = [[], [(0, 1)], [(2, 3)], [(1, 0), (2, 2), (1, 3)], [(1, 0), (1, 2)]]
    found = loss_effects(
        random_model, prompts, [without_heads(heads, means) for heads in sets], lambda *done: None
    )  # fmt: skip

    def mean_loss(heads: list[tuple[int, int]]) -> np.ndarray:
        def edit(z: torch.Tensor, hook: Any) -> torch.Tensor:
            z = z.clone()
            for layer, head in heads:
                if hook.name == f"blocks.{layer}.attn.hook_z":
                    z[:, :, head] = cache[hook.name].mean(dim=0)[:, head]
            return z

        hooks = [(lambda name: name.endswith("hook_z"), edit)]
        losses = random_model.run_with_hooks(
            prompts.tokens, return_type="loss", loss_per_token=True, fwd_hooks=hooks
        ).detach()  # fmt: skip
        rows = prompts.predictable[:, 1:]
        return np.array([float(of_one[some].double().mean()) for of_one, some in zip(losses, rows, strict=True)])

    for heads, effect in zip(sets, found, strict=True):
        np.testing.assert_allclose(effect, mean_loss(heads) - mean_loss([]), atol=1e-5)


def test_losses_are_sorted_by_copy_and_place(random_model: HookedTransformer) -> None:
    options: dict[str, Any] = {"length": 10, "n_sequences": 3, "n_copies": 3, "spacing": "random gaps", "seed": 5}
    found = induction_heads(random_model, **options, n_ablated=0)
    prompts = repeated_random_tokens(random_model, **options)
    losses = random_model(prompts.tokens, return_type="loss", loss_per_token=True).detach()  # [sequence, pos − 1]
    for copy in range(3):
        for index in range(10):
            expected = []
            for row in range(3):
                places = [int(((prompts.copy[row] == c) & (prompts.index[row] == index)).nonzero()) for c in range(3)]
                repeats = [bool(prompts.predictable[row, place]) for place in places]
                if repeats[copy] if copy else any(repeats):
                    expected.append(float(losses[row, places[copy] - 1]))
            assert found["n_losses"][copy, index] == len(expected)
            value = np.mean(expected) if expected else np.nan
            np.testing.assert_allclose(found["loss"][copy, index], value, atol=1e-5)
            error = np.std(expected, ddof=1) / np.sqrt(len(expected)) if len(expected) > 1 else np.nan
            np.testing.assert_allclose(found["loss_sem"][copy, index], error, atol=1e-5)
    weights = found["n_losses"] / found["n_losses"].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found["copy_loss"], np.nansum(found["loss"] * weights, axis=1), atol=1e-5)


def test_controls_come_from_the_same_layers_without_the_pattern() -> None:
    allowed = np.ones((4, 6), dtype=bool)
    allowed[2, :4] = False
    controls = control_heads([(2, 0), (2, 1), (2, 2), (3, 0)], allowed, seed=0)
    assert sorted(layer for layer, _ in controls) == [2, 2, 3]  # layer 2 has only two heads to spare
    assert all(allowed[head] for head in controls) and len(set(controls)) == 3
    assert control_heads([(0, 0)], np.zeros((1, 6), dtype=bool), seed=0) == []


@pytest.mark.parametrize(
    ("has_pattern", "alone", "peer", "control", "expected"),
    [
        (False, (9.0, 0.0), (9.0, 0.0), 0.1, "no pattern"),
        (True, (0.5, 0.1), (0.5, 0.1), 0.1, "induction"),
        (True, (0.29, 0.1), (0.29, 0.1), 0.1, "pattern only"),
        (True, (-0.5, 0.1), (0.0, 0.0), 0.1, "anti-induction"),
        (True, (0.05, 0.01), (0.5, 0.1), 0.1, "redundant"),
        (True, (0.05, 0.01), (0.25, 0.1), 0.1, "pattern only"),
        (True, (9.0, float("nan")), (9.0, float("nan")), 0.1, "untested: one sequence"),  # which has no error
        (False, (9.0, float("nan")), (9.0, float("nan")), 0.1, "no pattern"),
        (True, (9.0, 0.0), (9.0, 0.0), float("nan"), "untested: no control head"),
    ],
)
def test_verdicts(has_pattern: bool, alone: tuple, peer: tuple, control: float, expected: str) -> None:
    assert verdict(has_pattern, alone, peer, control) == expected


def test_a_score_that_equals_the_threshold_on_paper_has_the_pattern(random_model: HookedTransformer) -> None:
    prompts, others = (repeated_random_tokens(random_model, length=8, n_sequences=2, seed=seed) for seed in (0, 1))
    scores = np.zeros((3, 4))
    scores[1, :3] = np.float32(0.7), 0.7, 0.6999  # float32(0.7) < 0.7
    names, found = ablation_check(
        random_model, Repetition(prompts, others), scores, n_candidates=3, threshold=0.7, seed=0,
        progress=lambda share, message: None,
    )  # fmt: skip
    verdict_of = dict(zip(names, found["verdict"].values.tolist(), strict=True))
    assert verdict_of["L1H2"] == "no pattern"
    assert "no pattern" not in (verdict_of["L1H0"], verdict_of["L1H1"])


def test_it_is_said_what_an_effect_must_exceed_and_what_replaces_an_output(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    options: dict[str, Any] = {"length": LENGTH, "n_sequences": 4, "seed": 5, "n_ablated": 2}
    found = induction_heads(hand_built_model(LENGTH), **options)
    assert (found.settings["replacement_seed"], found.settings["n_replacement_sequences"]) == (6, 4)
    for text in (found.summary(), found._draw_ablation().note):
        assert "4 other sequences of the same kind (seed 6)" in text
    largest = np.abs(found["mean_effect"][found["is_control"]]).max()
    assert largest < 0.01 and "0.010 nats, the least that counts, as no control has more" in found.summary()
    effects = found.quantities["mean_effect"]
    larger = np.where(found["is_control"], 0.25, found["mean_effect"])
    of_large_controls = dataclasses.replace(
        found, quantities=found.quantities | {"mean_effect": dataclasses.replace(effects, values=larger)}
    )
    for text in (of_large_controls.summary(), of_large_controls._draw_ablation().note):
        assert "0.250 nats, the largest effect of a control under mean ablation" in text and "least" not in text


def test_one_sequence_claims_nothing(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = induction_heads(hand_built_model(LENGTH), length=LENGTH, n_sequences=1, n_ablated=1)
    assert verdicts(found)["L1H0"] == "untested: one sequence"
    assert found["mean_effect"][0] > 2 and np.isnan(found["mean_effect_sem"]).all()
    assert "no standard error" in found.summary() and "An effect counts" not in found.summary()


def test_without_ablations_the_scores_are_the_same(random_model: HookedTransformer) -> None:
    options: dict[str, Any] = {"length": 10, "n_sequences": 2}
    without = induction_heads(random_model, **options, n_ablated=0)
    with_them = induction_heads(random_model, **options, n_ablated=3)
    np.testing.assert_array_equal(without["prefix_matching"], with_them["prefix_matching"])
    assert "verdict" not in without and len(with_them.to_frame("ablated")) >= 3
    with pytest.raises(ValueError, match="'map', 'loss', got 'ablation'"):
        without.figure("ablation")


def test_progress_only_grows_and_ends_at_one(random_model: HookedTransformer) -> None:
    done: list[float] = []
    options: dict[str, Any] = {"length": 10, "n_sequences": 2, "progress": lambda share, _: done.append(share)}
    for n_ablated in (0, 3):
        done.clear()
        induction_heads(random_model, **options, n_ablated=n_ablated)
        assert done == sorted(done) and done[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ablated": 13}, "n_ablated must be between 0 and 12"),
        ({"n_ablated": -1}, "n_ablated"),
        ({"pattern_threshold": 1.5}, "pattern_threshold"),
        ({"length": 70}, "context holds 128"),
        ({"length": 51}, "50 ordinary tokens"),
    ],
)
def test_bad_options_are_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        induction_heads(random_model, **({"length": 10} | options))


def test_a_model_of_few_heads_is_checked_whole() -> None:
    sizes = dict(n_layers=1, n_heads=2, d_model=8, d_head=4, d_mlp=8, d_vocab=40, n_ctx=24)
    found = induction_heads(HookedTransformer(TransformerConfig(**sizes)).eval(), length=8, n_sequences=2)
    assert found.settings["n_ablated"] == 2
