from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import load_result, what_if
from workbench.analyses.interventions.switches import switched_off
from workbench.analyses.predictions.without import SwitchedOff

TOKENS = torch.tensor([3, 7, 11, 3, 19, 7, 2, 30, 11])


def naive(model: HookedTransformer, hooks: list) -> torch.Tensor:
    """Log-probabilities of every next token, float64 [pos, d_vocab], with the hooks of a run of all positions."""
    with torch.no_grad():
        return model.run_with_hooks(TOKENS[None], fwd_hooks=hooks)[0].double().log_softmax(dim=-1)


def zero_head(z: torch.Tensor, hook: object) -> torch.Tensor:
    z = z.clone()
    z[:, :, 2] = 0
    return z


def cut(queries: slice | int, key: int, head: slice | int = slice(None)) -> Callable:
    def edit(scores: torch.Tensor, hook: object) -> torch.Tensor:
        scores = scores.clone()
        scores[:, head, queries, key] = -torch.inf
        return scores

    return edit


@pytest.mark.parametrize(
    ("off", "hooks"),
    [
        ([], []),
        (["L1H2"], [("blocks.1.attn.hook_z", zero_head)]),
        (["L0"], [("blocks.0.hook_attn_out", lambda x, hook: x * 0)]),
        (["M2"], [("blocks.2.hook_mlp_out", lambda x, hook: x * 0)]),
        (["L2H1:5>1"], [("blocks.2.attn.hook_attn_scores", cut(5, 1, 1))]),
        (["L1:>0"], [("blocks.1.attn.hook_attn_scores", cut(slice(1, None), 0))]),  # token 0 reads nothing else
        (["*:8>3"], [(f"blocks.{layer}.attn.hook_attn_scores", cut(8, 3)) for layer in range(3)]),
        (
            ["L1H2", "M2", "L1H2"],
            [("blocks.1.attn.hook_z", zero_head), ("blocks.2.hook_mlp_out", lambda x, hook: x * 0)],
        ),
    ],
)
def test_every_part_is_what_a_plain_hook_makes_of_it(
    random_model: HookedTransformer, off: list[str], hooks: list
) -> None:
    found = what_if(random_model, TOKENS, off, position=4)
    before, after = naive(random_model, []), naive(random_model, hooks)
    rows = torch.arange(len(TOKENS) - 1)
    for name, log_p in (("loss_before", before), ("loss_after", after)):
        np.testing.assert_allclose(found[name][:-1], -log_p[rows, TOKENS[1:]].numpy(), atol=1e-5)
        assert np.isnan(found[name][-1])
    np.testing.assert_allclose(found["kl"], (before.exp() * (before - after)).sum(dim=1).numpy(), atol=1e-5)
    shown = torch.maximum(before[4], after[4]).topk(10).indices
    np.testing.assert_allclose(found["probability_before"], before[4, shown].exp().numpy(), atol=1e-5)
    np.testing.assert_allclose(found["probability_after"], after[4, shown].exp().numpy(), atol=1e-5)
    if off and not off[0].startswith("L2H1"):
        assert found["kl"].max() > 1e-4


def test_without_the_induction_head_the_repetition_is_no_longer_known(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    model = hand_built_model(4)
    tokens = torch.tensor([5, 9, 21, 33, 5, 9, 21, 33])
    found = what_if(model, tokens, ["L1H0"], position=-2, n_tokens=1)
    assert found["probability_before"] == pytest.approx(1.0, abs=1e-4) and found["probability_after"] < 0.1
    assert found.coordinates["token"] == ["#33"] and "L1H0" in found.summary()
    blind = what_if(model, tokens, ["L0H0:>0"])  # nobody knows any more that the 9 at 1 came after a 5
    assert blind["loss_before"][4] < 0.01 and blind["loss_after"][4] > 3
    assert blind["loss_after"][5] == pytest.approx(blind["loss_before"][5], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("L3", "no layer 3"),
        ("M9", "no layer 9"),
        ("L1H4", "no head 4"),
        ("L1H1:9>0", "no position 9"),
        ("L1:>77", "no position 77"),
        ("*", "names nothing"),
        ("H3", "names nothing"),
        ("L1H1:3>", "names nothing"),
        ("L1111111111111111111111", "no model"),
        ("<script>", "names nothing"),
        ("", "names nothing"),
    ],
)
def test_what_there_is_not_is_refused(random_model: HookedTransformer, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        what_if(random_model, TOKENS, [name])


def test_names_come_in_a_list_of_texts(random_model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match=r"come in a list, such as \['L1H2'\]"):
        what_if(random_model, TOKENS, "L1H2")
    with pytest.raises(ValueError, match=r"\(1, 2\) names nothing .* write a head as L3H7"):
        what_if(random_model, TOKENS, [(1, 2)])


def test_the_name_of_a_model_is_not_a_model() -> None:
    with pytest.raises(ValueError, match="HookedTransformer.from_pretrained\\('demo'\\)"):
        what_if("demo", TOKENS)


def test_options_out_of_their_range_are_refused(random_model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="position"):
        what_if(random_model, TOKENS, position=9)
    with pytest.raises(ValueError, match="n_tokens"):
        what_if(random_model, TOKENS, n_tokens=0)
    with pytest.raises(ValueError, match="one text"):
        what_if(random_model, TOKENS.repeat(2, 1))


def test_it_comes_back_from_its_files_and_draws(random_model: HookedTransformer, tmp_path: Path) -> None:
    found = what_if(random_model, TOKENS, ["L0H1", "*:>0"])
    found.save(tmp_path / "off")
    again = load_result(tmp_path / "off")
    assert isinstance(again, SwitchedOff) and again.settings["off"] == ["L0H1", "*:>0"]
    np.testing.assert_array_equal(again["kl"], found["kl"])
    for kind in found.figure_kinds:
        assert found.figure(kind, captioned=True).data


def test_a_part_named_twice_is_off_once(random_model: HookedTransformer) -> None:
    once, twice = (switched_off(random_model, ["L1H1"] * n, len(TOKENS)) for n in (1, 2))
    z = torch.randn(1, 9, 4, 8)
    (edit,), (again,) = once.edits.values(), twice.edits.values()
    assert torch.equal(edit(z, None), again(z, None))
