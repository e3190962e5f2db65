"""Interventions on sinks, on heads whose sink does nothing, adds a constant, or says something."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import SinkInterventions, attention_sinks, load_result, massive_activations, sink_interventions
from workbench.analyses.interventions.edits import cut_edges, replace_contribution
from workbench.analyses.running import Sequences
from workbench.analyses.sinks.purpose import CONDITIONS, EDITS, _verdict
from workbench.analyses.sinks.scopes import read_key
from workbench.config import RopeScaling

VOCABULARY, N = 32, 44
CONSTANT, TELLING = 3.0, 2.0  # logits that the second and the third head add
CUT, DROPPED, AS_CONSTANT, CUT_FOR_ALL = range(len(EDITS))


@pytest.fixture(scope="module")
def sink_heads() -> HookedTransformer:
    """One layer whose first three heads give all weight to position 0, or to position 1 where they may not.

    The value there is zero for L0H0. For L0H1 it is a constant that makes tokens 2 to 21 likelier, which are all that
    comes. For L0H2 it is the first token, 0 or 1, which says whether tokens 2 to 11 or 12 to 21 come. L0H3 attends
    evenly and adds nothing. A huge constant in the stream makes the norms pass everything else through as it is.
    """
    token, output = torch.arange(VOCABULARY), torch.arange(VOCABULARY) + VOCABULARY + 3
    anchor, first, second = VOCABULARY, VOCABULARY + 1, VOCABULARY + 2
    d_model, huge = 2 * VOCABULARY + 3, 1e5
    cfg = TransformerConfig(
        n_layers=1, d_model=d_model, n_heads=4, d_head=4, d_mlp=1, d_vocab=VOCABULARY, n_ctx=N,
        normalization_type="RMS", attn_scale=1.0, model_name="hand-built sinks",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(huge / d_model**0.5 if "ln" in name else 0.0)
        model.embed.W_E[token, token] = 1.0
        model.embed.W_E[:, anchor] = huge
        model.pos_embed.W_pos[0, first] = model.pos_embed.W_pos[1, second] = 1.0
        model.unembed.W_U[output, token] = 1.0
        attention = model.blocks[0].attn
        attention.W_Q[:3, anchor, 0] = 1 / huge
        attention.W_K[:3, first, 0], attention.W_K[:3, second, 0] = 80.0, 40.0
        attention.W_V[1, first, 0] = 1.0
        attention.W_O[1, 0, output[2:22]] = CONSTANT
        attention.W_V[2, 0, 0] = attention.W_V[2, 1, 1] = 1.0
        attention.W_O[2, 0, output[2:12]] = attention.W_O[2, 1, output[12:22]] = TELLING
    return model


def texts(n: int) -> Tensor:
    """0 and tokens 2 to 11, or 1 and tokens 12 to 21, by turns."""
    drawn = torch.randint(2, 12, (n, N), generator=torch.Generator().manual_seed(0))
    which = torch.arange(n) % 2
    drawn += 10 * which[:, None]
    drawn[:, 0] = which
    return drawn


def loss(own: float, other: float) -> float:
    """Of a token that has the logit ``own``, with 9 others, where 10 have ``other`` and 12 have 0."""
    return log(10 * exp(own) + 10 * exp(other) + 12) - own


@pytest.fixture(scope="module")
def found(sink_heads: HookedTransformer) -> SinkInterventions:
    return sink_interventions(sink_heads, texts(24), n_heads=4)


def at(found: SinkInterventions, scope: str, key: int, edit: int, name: str = "loss_change") -> Any:
    return found[name][found.coordinates["scope"].index(scope), key, edit]


def test_verdicts_are_those_of_the_hand_built_heads(found: SinkInterventions) -> None:
    assert found.coordinates["scope"] == ["all layers", "L0H0", "L0H1", "L0H2", "L0H3"]
    verdicts = ["carries information", "no-op", "implicit bias", "carries information", "no sink"]
    assert found["verdict"].tolist() == verdicts
    assert found.verdict("L0H1") == "implicit bias"
    assert "L0H1: implicit bias. Mean weight on the sink 1.00;" in found.summary()


def test_changes_of_the_loss_are_those_derived_by_hand(found: SinkInterventions) -> None:
    both = loss(CONSTANT + TELLING, CONSTANT)
    np.testing.assert_allclose(found["baseline_loss"], both, atol=1e-6)
    # Of the 23 other sequences, 11 begin as this one does and 12 the other way.
    own, other = TELLING * 11 / 23, TELLING * 12 / 23
    expected = {
        ("L0H0", CUT): 0.0,
        ("L0H0", DROPPED): 0.0,
        ("L0H0", AS_CONSTANT): 0.0,
        ("L0H1", CUT): loss(TELLING, 0) - both,
        ("L0H1", DROPPED): loss(TELLING, 0) - both,
        ("L0H1", AS_CONSTANT): 0.0,
        ("L0H2", DROPPED): loss(CONSTANT, CONSTANT) - both,
        ("L0H2", AS_CONSTANT): loss(CONSTANT + own, CONSTANT + other) - both,
        ("all layers", CUT_FOR_ALL): log(VOCABULARY) - both,
        ("all layers", DROPPED): log(VOCABULARY) - both,
        ("all layers", AS_CONSTANT): loss(CONSTANT + own, CONSTANT + other) - both,
    }
    for (scope, edit), value in expected.items():
        np.testing.assert_allclose(at(found, scope, 0, edit), value, atol=1e-6, err_msg=f"{scope}, {EDITS[edit]}")
    np.testing.assert_allclose(np.nan_to_num(found["loss_change"][:, 1]), 0.0, atol=1e-6)  # nobody reads the control
    assert np.isnan(at(found, "L0H2", 0, CUT_FOR_ALL)).all()
    mean, low, high = (at(found, "L0H1", 0, DROPPED, f"loss_change_{name}") for name in ("mean", "low", "high"))
    assert low <= mean + 1e-9 and high >= mean - 1e-9 and high - low < 1e-6


def test_a_sink_that_is_cut_moves(found: SinkInterventions) -> None:
    first, control = found.settings["first_query"], found.settings["control_position"]
    assert first == 24 and 1 <= control <= 8  # 16 after the last of the 8 keys beside the sink
    even = np.mean([1 / (i + 1) for i in range(first, N)])
    without = np.mean([1 / i for i in range(first, N)])
    weights = found["weight_by_position"]
    np.testing.assert_allclose(weights[0, :2], [(3 + even) / 4, even / 4], atol=1e-6)
    for condition in (1, 2):
        np.testing.assert_allclose(weights[condition, :3], [0, (3 + without) / 4, without / 4], atol=1e-6)
        assert found["share_of_heads_by_position"][condition, :2].tolist() == [0.0, 0.75]
        assert f"{CONDITIONS[condition].capitalize()}, position 1 gets most of the others" in found.summary()


def test_few_sequences_leave_it_untested(sink_heads: HookedTransformer) -> None:
    few = sink_interventions(sink_heads, texts(6), n_heads=4)
    assert few["verdict"].tolist() == ["untested"] * 4 + ["no sink"]
    assert np.isnan(few["loss_change_low"]).all() and np.isfinite(few["loss_change_error"][:, :, DROPPED]).all()


def test_a_verdict_needs_an_interval_on_one_side_of_the_bound() -> None:
    def verdict(dropped: tuple[float, float], constant: tuple[float, float], control: float = 0.0) -> str:
        low, high = np.full((2, 4), np.nan)
        (low[DROPPED], high[DROPPED]), (low[AS_CONSTANT], high[AS_CONSTANT]) = dropped, constant
        means = np.stack([(low + high) / 2, np.full(4, control)])
        return _verdict(True, low, high, means, 20)

    assert verdict((-0.009, 0.009), (1, 2)) == "no-op"
    assert verdict((0.02, 0.05), (-0.009, 0.009)) == "implicit bias"
    assert verdict((0.9, 1.1), (0.02, 0.09)) == "implicit bias"  # less than a tenth of it is left
    assert verdict((0.9, 1.1), (0.11, 0.2)) == "carries information"
    assert verdict((-0.05, -0.02), (0.02, 0.03)) == "carries information"
    assert verdict((0.005, 0.05), (0, 0)) == "undecided"
    assert verdict((0.02, 0.05), (0.005, 0.02)) == "undecided"
    assert verdict((0.02, 0.05), (1, 2), control=-0.06) == "no-op"  # no more than the control's


def test_random_weights_have_no_sink(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (20, 40), generator=torch.Generator().manual_seed(0))
    found = sink_interventions(random_model, tokens, n_heads=3)
    assert set(found["verdict"].tolist()) == {"no sink"}
    assert found.coordinates["scope"][:4] == ["all layers", "layer 0", "layer 1", "layer 2"]


def naive(model: HookedTransformer, row: Tensor, key: int, first: int, layers: list[int], heads: list[int], edit: int,
          constants: dict[int, Tensor]) -> float:  # fmt: skip
    """Mean loss of the later queries of one sequence, edited at z of the same run, in float64."""
    held: dict[str, Tensor] = {}

    def subtract(z: Tensor, hook: Any) -> Tensor:
        p, v = held[f"{hook.layer()} pattern"], held[f"{hook.layer()} v"]
        z = z.clone()
        for head in heads:
            for query in range(first, len(row)):
                read = p[0, head, query, key] * v[0, key, head // (p.shape[1] // v.shape[2])]
                z[0, query, head] -= read
                if edit == AS_CONSTANT:
                    z[0, query, head] += constants[hook.layer()][head]
        return z

    def hide(scores: Tensor, hook: Any) -> Tensor:
        scores = scores.clone()
        for head in heads:
            scores[0, head, 0 if edit == CUT_FOR_ALL else first :, key] = -torch.inf
        scores[0, :, key, key] = 0.0 if key == 0 else scores[0, :, key, key]  # it has no other key
        return scores

    def keep(name: str) -> Callable:
        return lambda x, hook: held.__setitem__(f"{hook.layer()} {name}", x)

    hooks: list[tuple[str, Callable]] = []
    for layer in layers:
        at = f"blocks.{layer}.attn.hook_"
        if edit in (CUT, CUT_FOR_ALL):
            hooks.append((f"{at}attn_scores", hide))
        else:
            hooks += [(f"{at}v", keep("v")), (f"{at}pattern", keep("pattern")), (f"{at}z", subtract)]
    with torch.no_grad():
        losses = model.run_with_hooks(row[None], return_type="loss", loss_per_token=True, fwd_hooks=hooks)
    return float(losses[0, first:].mean())


def test_every_change_is_that_of_a_naive_loop(random_model: HookedTransformer) -> None:
    model = HookedTransformer(random_model.cfg).eval()
    model.load_state_dict(random_model.state_dict())
    model = model.double()
    lengths, sink, control, first = (31, 26, 40), 2, 5, 21
    rows = [torch.randint(0, 50, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    tokens, mask = torch.zeros(3, 40, dtype=torch.int64), torch.zeros(3, 40)
    for place, row in enumerate(rows):
        tokens[place, 40 - len(row) :], mask[place, 40 - len(row) :] = row, 1
    found = sink_interventions(
        model, tokens, attention_mask=mask, sink_position=sink, control_position=control, layers=[(1, 2)], n_heads=2
    )
    assert found.settings["first_query"] == first
    caches = [model.run_with_cache(row)[1] for row in rows]
    weight = np.array([
        [np.concatenate([c[f"blocks.{layer}.attn.hook_pattern"][0, head, first:, sink] for c in caches]).mean()
         for head in range(4)] for layer in range(3)
    ])  # fmt: skip
    best = [divmod(int(i), 4) for i in np.argsort(-weight.ravel())[:2]]
    scopes = [([0, 1, 2], list(range(4))), ([1, 2], list(range(4))), *(([layer], [head]) for layer, head in best)]
    assert found.coordinates["scope"] == ["all layers", "layers 1–2", *(f"L{layer}H{head}" for layer, head in best)]
    np.testing.assert_allclose(
        found["mean_weight"][:, 0], [weight.mean(), weight[1:].mean(), *(weight[b] for b in best)]
    )
    for place, row in enumerate(rows):
        plain = naive(model, row, sink, first, [], [], CUT, {})
        for which, key in enumerate((sink, control)):
            constants = {}
            for layer in range(3):
                reads = []
                for other, cache in enumerate(caches):
                    p, v = cache[f"blocks.{layer}.attn.hook_pattern"][0], cache[f"blocks.{layer}.attn.hook_v"][0]
                    if other != place:
                        reads += [
                            torch.stack([p[head, query, key] * v[key, head // 2] for head in range(4)])
                            for query in range(first, len(rows[other]))
                        ]
                constants[layer] = torch.stack(reads).mean(dim=0)
            for scope, (layers, heads) in enumerate(scopes):
                for edit in range(4 if len(heads) == 4 else 3):
                    expected = naive(model, row, key, first, layers, heads, edit, constants) - plain
                    assert found["loss_change"][scope, which, edit, place] == pytest.approx(expected, abs=1e-9)


def test_constants_are_of_the_whole_text_where_its_length_changes_rotations() -> None:
    torch.manual_seed(0)
    scaling = RopeScaling(type="dynamic", factor=4.0, original_context=16)
    cfg = TransformerConfig(
        n_layers=3, d_model=24, n_heads=4, d_head=6, d_mlp=8, d_vocab=30, n_ctx=64, initializer_range=0.4,
        init_mode="normal", positional_embedding_type="rotary", rope_scaling=scaling,
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    tokens, position, first = torch.randint(0, 30, (3, 40), generator=torch.Generator().manual_seed(0)), 5, 24
    cache = model.run_with_cache(tokens)[1]
    later = (torch.arange(40) >= first).expand(3, -1)
    patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(3)])
    received = patterns[:, :, :, first:].sum(dim=3)  # [layer, sequence, head, key]
    found = read_key(model, Sequences(tokens, torch.ones(3, 40, dtype=torch.bool)), received, later, position)
    for layer in range(3):
        v = cache[f"blocks.{layer}.attn.hook_v"][:, position]  # [sequence, head, d_head]
        read = patterns[layer, :, :, first:, position].mean(dim=2)[..., None] * v
        for place in range(3):
            others = torch.arange(3) != place
            torch.testing.assert_close(found.constant[layer][place], read[others].mean(dim=0))


def test_a_window_that_has_passed_the_sink_leaves_nothing_to_edit() -> None:
    cfg = TransformerConfig(
        n_layers=2, d_model=24, n_heads=2, d_head=6, d_mlp=8, d_vocab=30, n_ctx=64, attn_types=("local", "global"),
        window_size=7,
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    tokens = torch.randint(0, 30, (3, 40), generator=torch.Generator().manual_seed(0))
    found = sink_interventions(model, tokens, n_heads=0)
    assert found.coordinates["scope"] == ["all layers", "layer 0", "layer 1"]
    np.testing.assert_array_equal(found["loss_change"][1, :, :CUT_FOR_ALL], 0.0)
    assert (np.abs(found["loss_change"][1, 0, CUT_FOR_ALL]) > 0).all()  # earlier queries do read it
    assert found["mean_weight"][1].tolist() == [0.0, 0.0] and (found["mean_weight"][2] > 0).all()
    assert found.figure_kinds == ("ranges", "moved")


def test_a_contribution_is_replaced_where_it_is_said(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(5))
    sources, destinations = torch.zeros(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool)
    sources[[0, 2]], destinations[5:8] = True, True
    value = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))
    name = "blocks.1.attn.hook_z"

    def z_under(edits: Any) -> Tensor:
        with random_model.hooks(fwd_hooks=list(edits.items())):
            return random_model.run_with_cache(tokens, names_filter=name)[1][name]

    _, cache = random_model.run_with_cache(tokens)
    read = torch.einsum(
        "bhqk,bkhd->bqhd", cache["blocks.1.attn.hook_pattern"][..., [0, 2]],
        cache["blocks.1.attn.hook_v"][:, [0, 2]].repeat_interleave(2, dim=2),
    )  # fmt: skip
    expected = cache[name].clone()
    expected[:, 5:8, 3] += value[3] - read[:, 5:8, 3]
    edited = replace_contribution(1, value, sources=sources, destinations=destinations, head=3)
    torch.testing.assert_close(z_under(edited.edits), expected)
    nothing = replace_contribution(1, torch.zeros(2, 4, 8), sources=sources, destinations=destinations)
    dropped = cut_edges(1, sources=sources, destinations=destinations, renormalise=False)
    torch.testing.assert_close(z_under(nothing.edits), z_under(dropped.edits))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": torch.arange(40)}, "at least 2"),
        ({"tokens": torch.zeros(2, 25, dtype=torch.int64)}, "sequences of at least 26 tokens"),
        ({"control_position": 0}, "control_position"),
        ({"sink_position": -1}, "sink_position"),
        ({"epsilon": 1.0}, "epsilon"),
        ({"layers": [(1, 3)]}, "layers 0 to 2"),
        ({"n_heads": -1}, "n_heads"),
    ],
)
def test_bad_options_are_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    arguments = {"tokens": torch.zeros(2, 40, dtype=torch.int64)} | options
    with pytest.raises(ValueError, match=message):
        sink_interventions(random_model, **arguments)


def test_it_is_saved_and_drawn(found: SinkInterventions, tmp_path: Path) -> None:
    again = load_result(found.save(tmp_path / "sinks"))
    assert again.summary() == found.summary()
    assert list(again.tables()) == ["", "verdicts", "positions"]
    for theme in ("light", "dark"):
        figures = {kind: again.figure(kind, captioned=True, theme=theme) for kind in again.figure_kinds}
        assert list(figures["heads"].data[0].y) == ["L0H0: no-op", "L0H1: implicit bias", "L0H2: carries information",
                                                    "L0H3: no sink"]  # fmt: skip
        assert [trace.name for trace in figures["moved"].data] == list(CONDITIONS)


def test_heads_are_sorted_by_what_their_sink_is_for(found: SinkInterventions, sink_heads: HookedTransformer) -> None:
    assert found.heads_by_verdict() == {
        "no-op": ["L0H0"], "implicit bias": ["L0H1"], "carries information": ["L0H2"],
        "no sink": ["L0H3"],
    }  # fmt: skip
    assert "Heads by what the sink is for: no-op L0H0; implicit bias L0H1; carries information L0H2" in found.summary()
    every = sink_interventions(sink_heads, texts(20), n_heads=None)  # all that have a sink
    assert every.coordinates["scope"] == ["all layers", "L0H0", "L0H1", "L0H2"]


def test_a_perfect_sink_head_has_the_numbers_derived_by_hand(sink_heads: HookedTransformer) -> None:
    sinks = attention_sinks(sink_heads, texts(24), n_tokens=N)
    assert sinks.sink_position == 0
    # Three heads of four give everything to position 0; the even one's mean of 1 / (i + 1) is below ε.
    np.testing.assert_allclose(sinks["sink_rate"][0], 0.75)
    np.testing.assert_array_equal(sinks["head_sink_rate"][0], [1, 1, 1, 0])
    np.testing.assert_allclose(sinks["sink_weight"][0, :3], 1.0, atol=1e-6)
    np.testing.assert_allclose(sinks["sink_weight"][0, 3], np.mean([1 / (i + 1) for i in range(N)]), atol=1e-9)
    np.testing.assert_array_equal(sinks["sink_rate_low"][0], sinks["sink_rate"][0])  # no sequence differs
    np.testing.assert_array_equal(sinks["sink_rate"][1 : N - 16], 0.0)
    # Of all keys only the first has a value: 1 in the second head, and in the third, where it is a token's own. So the
    # median key's norm is 0 and there is no ratio; in the first and last head nothing has a value.
    np.testing.assert_allclose(sinks["value_norm_at_sink"][0], [0, 1, 1, 0], atol=1e-9)
    np.testing.assert_allclose(
        sinks["output_norm_at_sink"][0], [0, CONSTANT * 20**0.5, TELLING * 10**0.5, 0], atol=1e-6
    )
    np.testing.assert_array_equal(sinks["value_norm_median"][0], 0.0)
    assert np.isnan(sinks["value_norm_ratio"]).all()
    massive = massive_activations(sink_heads, texts(24))
    np.testing.assert_allclose(massive["output_share"][0, 1:3], 1.0)
    np.testing.assert_allclose(massive["entropy"][0, :3], 0.0, atol=1e-5)
    even = [np.log(i + 1) for i in range(16, N)], [np.log(i) for i in range(16, N)]
    np.testing.assert_allclose(massive["entropy"][0, 3], np.mean(even[0]), atol=1e-9)
    np.testing.assert_allclose(massive["entropy_without_sink"][0, 3], np.mean(even[1]), atol=1e-9)


def test_a_value_that_is_a_tenth_of_the_others(sink_heads: HookedTransformer) -> None:
    model = copy.deepcopy(sink_heads)
    with torch.no_grad():  # every token but the first two has a value of 10, the first two of 1, position 0 none added
        model.blocks[0].attn.W_V[0, 2:VOCABULARY, 0] = 10.0
        model.blocks[0].attn.W_V[0, :2, 0] = 1.0
        model.blocks[0].attn.W_O[0, 0, 2 * VOCABULARY] = 7.0
    found = attention_sinks(model, texts(4), n_tokens=N)
    np.testing.assert_allclose(found["value_norm_ratio"][0, 0], 0.1)
    np.testing.assert_allclose(found["output_norm_ratio"][0, 0], 0.1)
    np.testing.assert_allclose(massive_activations(model, texts(4))["value_norm_ratio"][0, 0], 0.1)
