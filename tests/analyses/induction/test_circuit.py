"""Who feeds the induction heads, where it is known, and every effect against whole runs with hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import InductionCircuit, induction_circuit, load_result, repeated_random_tokens

LENGTH = 20


@pytest.fixture(scope="module")
def found(hand_built_model: Callable[..., HookedTransformer]) -> InductionCircuit:
    return induction_circuit(hand_built_model(LENGTH), length=LENGTH, n_sequences=6, n_receivers=2, n_feeders=1)


def test_the_head_that_feeds_the_keys_is_found(found: InductionCircuit) -> None:
    assert list(found.coordinates["receiver"]) == ["L1H0", "L1H3"] and found.coordinates["feeder"][0] == "L0H0"
    assert found.feeders((1, 0)) == [(0, 0)]
    # L1H0 reads what L0H0 wrote in its keys and nowhere else, but for the length of what its queries read.
    assert found["key_effect"][0, 0] < -0.9
    assert found["key_effect"][0, 0] == pytest.approx(found["ablation_effect"][0, 0], abs=0.01)
    assert found["key_loss_effect"][0, 0] > 4
    assert found["all_keys_loss_effect"][0] == pytest.approx(found["key_loss_effect"][0, 0], abs=1e-6)
    # L1H3 shows the pattern by position, so that nobody feeds it.
    assert found["verdict"][1, 0] == "does not feed" and found.feeders((1, 3)) == []
    assert found["key_effect"][1, 0] == pytest.approx(0.0, abs=1e-6)
    assert found["verdict"][:, 1].tolist() == ["control", "control"]
    summary = found.summary()
    assert (
        "L1H0 (prefix matching 1.000): fed by L0H0 -" in summary and "L1H3 (prefix matching 1.000): no fee" in summary
    )
    with pytest.raises(ValueError, match="one of L1H0, L1H3"):
        found.feeders((0, 0))


def test_the_figure_joins_who_feeds_whom(found: InductionCircuit, tmp_path: Any) -> None:
    figure = load_result(found.save(tmp_path / "circuit")).figure("circuit", captioned=True, theme="dark")
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    fed = [line for line in lines if line.name == "feeds its keys"]
    assert len(lines) == 4 and len(fed) == 1 and "L0H0 → L1H0" in fed[0].hovertemplate
    assert fed[0].line.width > 10 * max(line.line.width for line in lines if line is not fed[0])


@pytest.mark.parametrize(("spacing", "steered"), [("fixed", False), ("random gaps", False), ("fixed", True)])
@torch.no_grad()
def test_every_effect_is_that_of_whole_runs(random_model: HookedTransformer, spacing: Any, steered: bool) -> None:
    model = copy.deepcopy(random_model).double()
    if steered:  # by hooks that are there already, which act once in every run

        def steer(stream: Tensor, hook: Any) -> None:
            stream[:, ::2] += 1.0

        for layer in range(3):
            model.add_hook(f"blocks.{layer}.hook_resid_pre", steer)
    kind: dict[str, Any] = {"length": 10, "n_sequences": 3, "spacing": spacing}
    found = induction_circuit(model, **kind, n_receivers=3, n_feeders=2)
    assert set(found["verdict"].flat) <= {"no pattern", "control", "not earlier"}  # of random weights nothing is said
    for end in ("", "_sem"):  # no receiver has the pattern, so nothing was done, which is no effect of 0
        assert np.isnan(found[f"all_keys_loss_effect{end}"]).all()
    prompts, others = (repeated_random_tokens(model, **kind, seed=seed) for seed in (0, 1))
    tokens, clean = prompts.tokens, model.run_with_cache(prompts.tokens)[1]
    reference = model.run_with_cache(others.tokens)[1]

    def matching(hooks: list, head: tuple[int, int]) -> np.ndarray:
        with model.hooks(fwd_hooks=hooks):
            name = f"blocks.{head[0]}.attn.hook_pattern"
            pattern = model.run_with_cache(tokens, names_filter=[name])[1][name][:, head[1]]
        scores = []
        for row, weights in zip(tokens.tolist(), pattern.numpy(), strict=True):
            targets = [[j for j in range(1, i) if row[j - 1] == row[i]] for i in range(len(row))]
            scores.append(np.mean([weights[i, of_i].sum() for i, of_i in enumerate(targets) if of_i]))
        return np.array(scores)

    def loss(hooks: list) -> np.ndarray:
        losses = model.run_with_hooks(tokens, return_type="loss", loss_per_token=True, fwd_hooks=hooks)
        rows = prompts.predictable[:, 1:]
        return np.array([float(one[some].mean()) for one, some in zip(losses, rows, strict=True)])

    for place, (layer, head) in enumerate(found["feeder_head"].tolist()):
        name = f"blocks.{layer}.attn.hook_z"

        def ablate(z: Tensor, hook: Any, head: int = head) -> Tensor:
            z = z.clone()
            z[:, :, head] = reference[hook.name].mean(dim=0)[:, head]
            return z

        def freeze(x: Tensor, hook: Any, name: str = name, ablate: Callable = ablate) -> Tensor:
            return ablate(clean[hook.name], hook) if hook.name == name else clean[hook.name]

        for row, receiver in enumerate(map(tuple, found["receiver_head"].tolist())):
            if receiver[0] <= layer:
                assert np.isnan(found["key_effect"][row, place]) and found["verdict"][row, place] == "not earlier"
                continue
            key = f"blocks.{receiver[0]}.attn.hook_k"
            held = (lambda hook_name: hook_name.endswith(("hook_z", "hook_mlp_out")), freeze)
            with model.hooks(fwd_hooks=[held]):
                recorded = model.run_with_cache(tokens, names_filter=[key])[1][key]

            def patch(x: Tensor, hook: Any, new: Tensor = recorded, place: int = receiver[1] // 2) -> Tensor:
                x = x.clone()
                x[:, :, place] = new[:, :, place]
                return x

            for effect, change in (
                ("ablation_effect", matching([(name, ablate)], receiver) - matching([], receiver)),
                ("key_effect", matching([(key, patch)], receiver) - matching([], receiver)),
                ("key_loss_effect", loss([(key, patch)]) - loss([])),
            ):
                assert found[effect][row, place] == pytest.approx(change.mean(), abs=1e-9), effect
                error = change.std(ddof=1) / len(change) ** 0.5
                assert found[f"{effect}_sem"][row, place] == pytest.approx(error, abs=1e-9), effect


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_receivers": 0}, "n_receivers must be between 1 and 12"),
        ({"n_feeders": 13}, "n_feeders must be between 1 and 12"),
        ({"pattern_threshold": 0.0}, "pattern_threshold"),
    ],
)
def test_bad_options_are_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        induction_circuit(random_model, **({"length": 10} | options))


def test_what_claims_nothing(hand_built_model: Callable[..., HookedTransformer]) -> None:
    one = induction_circuit(hand_built_model(LENGTH), length=LENGTH, n_sequences=1, n_receivers=1, n_feeders=1)
    assert one["verdict"][0, 0] == "untested: one sequence"
    sizes: dict[str, Any] = dict(n_heads=2, d_model=8, d_head=4, d_mlp=8, d_vocab=40, n_ctx=64)
    for options, message in (
        ({"n_layers": 1}, "no head comes before another"),
        ({"n_layers": 2, "norm_placement": "post"}, "a single path has no meaning"),
    ):
        with pytest.raises(ValueError, match=message):
            induction_circuit(HookedTransformer(TransformerConfig(**sizes, **options)).eval(), length=8)
