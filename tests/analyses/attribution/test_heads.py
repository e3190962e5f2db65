"""Heads that attend and do nothing, heads that decide and hardly attend: found, and measured as derived by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import load_result
from workbench.analyses.attribution.head_evidence import Ablated, replacement_outputs
from workbench.analyses.attribution.head_verdicts import head_verdicts
from workbench.analyses.attribution.heads import AttributionAgreement, attribution_agreement
from workbench.analyses.running import Sequences
from workbench.analyses.tasks import PromptSet

VOCABULARY, LENGTH, CONTEXT = 12, 6, 8
ASKED = 2  # the position whose token is to be repeated
HEADS = ("L0H0", "L0H1", "L0H2", "L0H3")


def two_faced() -> HookedTransformer:
    """One layer without MLP. The stream has slots for token, position and output, and a constant so large that the
    norms divide everything by the same.

    H0 attends to the first of the other tokens alone and has W_O = 0. H1 spreads its weight evenly and reads a token
    40 times over: it decides. H2 attends to the first token; H3 spreads its weight, and each writes next to nothing.
    """
    d_model, constant = 2 * VOCABULARY + CONTEXT + 1, 1e6
    token, position = torch.arange(VOCABULARY), torch.arange(CONTEXT) + VOCABULARY
    output = token + VOCABULARY + CONTEXT
    cfg = TransformerConfig(
        n_layers=1, d_model=d_model, n_heads=4, d_head=VOCABULARY, d_mlp=1, d_vocab=VOCABULARY, n_ctx=CONTEXT,
        normalization_type="RMS", attn_scale=1.0, model_name="two-faced",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.W_E[token, token] = 1.0
        model.embed.W_E[:, -1] = constant
        model.pos_embed.W_pos[torch.arange(CONTEXT), position] = 1.0
        for norm in (model.blocks[0].ln1, model.ln_final):
            norm.w.fill_(((constant**2 + 2) / d_model) ** 0.5)
        model.unembed.W_U[output, token] = 1.0
        attention = model.blocks[0].attn
        for head, key in ((0, 1), (2, 0)):
            attention.W_Q[head, position, 0] = 100.0
            attention.W_K[head, position[key], 0] = 1.0
        attention.W_V[:, token, token] = 1.0
        attention.W_O[1, token, output] = 40.0
        attention.W_O[2:, token, output] = 0.001
    return model


def repeat_prompts(n: int = 24, seed: int = 0) -> PromptSet:
    """Six different tokens; the target is the one at ASKED, the foil is not in the prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(n)])
    corrupted = rows[:, :LENGTH].clone()
    corrupted[:, ASKED] = rows[:, LENGTH + 1]
    tokens = rows[:, :LENGTH]
    return PromptSet(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        rows[:, ASKED],
        rows[:, LENGTH],
        corrupted,
        "repeat",
        "tokens",
    )


@pytest.fixture(scope="module")
def found() -> AttributionAgreement:
    return attribution_agreement(two_faced(), repeat_prompts(), n_permutations=99)


def test_every_measure_is_what_the_weights_say(found: AttributionAgreement) -> None:
    even = 1 / LENGTH
    np.testing.assert_allclose(found["max_weight"][0], [1, even, 0, even], atol=1e-9)
    np.testing.assert_allclose(found["off_sink_mass"][0], [1, 5 * even, 0, 5 * even], atol=1e-9)
    np.testing.assert_allclose(found["entropy"][0], [0, np.log(LENGTH), 0, np.log(LENGTH)], atol=1e-9)
    # Six different tokens at 1/6 each: a vector of norm √6 / 6, times W_O.
    norm = 6**0.5 / 6
    np.testing.assert_allclose(found["value_weighted"][0], [0, 40 * norm, 0.001, 0.001 * norm], atol=1e-9)
    # Linear to the logits: z · ∂m/∂z is the head's part of the logit difference, 40 / 6 of H1.
    np.testing.assert_allclose(found["gradient_output"][0], [0, 40 / 6, 0, 0.001 / 6], atol=1e-9)
    np.testing.assert_allclose(found["gradient_attention"][0, 1], 40 / 6, atol=1e-9)


def test_every_effect_is_what_the_weights_say(found: AttributionAgreement) -> None:
    np.testing.assert_allclose(found["baseline"], 40 / 6 + 0.001 / 6, atol=1e-9)
    np.testing.assert_allclose(found["zero_effect"][0], [0, -40 / 6, 0, -0.001 / 6], atol=1e-9)
    # In the corrupted prompt the target is replaced by a token that is neither target nor foil.
    np.testing.assert_allclose(found["resample_effect"][0, [0, 1, 3]], [0, -40 / 6, -0.001 / 6], atol=1e-9)
    for name in ("zero", "mean", "resample"):  # one layer without a norm: all of the effect is direct
        np.testing.assert_allclose(found[f"{name}_direct"], found[f"{name}_effect"], atol=1e-4)
        np.testing.assert_allclose(found[f"{name}_self_repair"], 0, atol=1e-4)


def test_the_disagreements_are_named(found: AttributionAgreement) -> None:
    assert found.heads("attended, inert") == [(0, 0)]
    assert found.heads("unattended, decisive") == [(0, 1)]
    assert not found.heads("attended, decisive")
    text = found.summary()
    assert "Attended, inert (max weight; effect of zero ablation): L0H0 (1.00; +0.000)." in text
    assert "Unattended, decisive (max weight; effect of zero ablation): L0H1 (0.17; -6.667)." in text


def test_agreement_by_hand(found: AttributionAgreement) -> None:
    # Sizes of the effect: H1 > H3 > H0 = H2 = 0; weight off the first token: H0 > H1 = H3 > H2. Of the six pairs, those
    # of H1 and H3 with H2 agree, those with H0 do not, H1 H3 and H0 H2 are tied in one: (2 − 2) / √(5 · 5) = 0.
    row, column = found.measures.index("off_sink_mass"), found.ablations.index("zero")
    assert found["tau"][row, column] == pytest.approx(0, abs=1e-9)
    # z · ∂m/∂z orders them as the effects do, but for a tie that the weight of e^−100 of H2 on the target breaks.
    row = found.measures.index("gradient_output")
    assert found["tau"][row, column] == pytest.approx(5 / (5 * 6) ** 0.5)
    assert found["tau_low"][row, column] == pytest.approx(5 / (5 * 6) ** 0.5) and found["n_prompts"][row, column] == 24
    assert found["top_overlap"][row, column] == 1 and found["top_overlap"][0, column] == 0
    assert found["ablation_reliability"][column] == pytest.approx(1)


@torch.no_grad()
def naive_effects(model: HookedTransformer, prompts: PromptSet, values: list[torch.Tensor]) -> np.ndarray:
    """[prompt, layer, head] of whole runs, one head at a time."""

    def metric(hooks: list) -> torch.Tensor:
        logits = model.run_with_hooks(prompts.tokens, attention_mask=prompts.real, fwd_hooks=hooks)
        last = logits[torch.arange(len(prompts)), prompts.real.sum(dim=1) - 1]
        return (last.gather(1, prompts.target[:, None]) - last.gather(1, prompts.foil[:, None]))[:, 0]

    def without(layer: int, head: int) -> torch.Tensor:
        def replace_one(z: torch.Tensor, hook: object) -> torch.Tensor:
            z = z.clone()
            z[:, :, head] = values[layer][:, :, head]
            return z

        return metric([(f"blocks.{layer}.attn.hook_z", replace_one)]) - metric([])

    heads = range(model.cfg.n_heads)
    layers = [torch.stack([without(layer, head) for head in heads], dim=1) for layer in range(model.cfg.n_layers)]
    return torch.stack(layers, dim=1).numpy()


CONTEXT_OF_RANDOM = 9


def random_prompts(n: int, seed: int = 0) -> PromptSet:
    """Random tokens of the random model's vocabulary, of 6 to 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens, corrupted = (torch.randint(0, 50, (n, CONTEXT_OF_RANDOM), generator=generator) for _ in range(2))
    lengths = torch.randint(6, CONTEXT_OF_RANDOM + 1, (n,), generator=generator)
    lengths[0] = CONTEXT_OF_RANDOM
    real = torch.arange(CONTEXT_OF_RANDOM) < lengths[:, None]
    target, foil = torch.randperm(50, generator=generator)[: 2 * n].view(2, n)
    return PromptSet(tokens * real, real, target, foil, corrupted * real, "random", "random tokens")


def test_effects_equal_those_of_a_naive_loop(random_model: HookedTransformer) -> None:
    prompts = random_prompts(4)
    found = attribution_agreement(random_model, prompts, n_permutations=9)
    kinds = ("zero", "mean", "resample")
    values = replacement_outputs(random_model, prompts, kinds, None, mean_by="position", seed=0)
    # The mean of the corrupted prompts that reach the position.
    z = random_model.run_with_cache(prompts.corrupted, attention_mask=prompts.real)[1]["blocks.1.attn.hook_z"]
    np.testing.assert_allclose(values["mean"][1][0, 7], z[prompts.real[:, 7], 7].mean(dim=0), atol=1e-5)
    for column, kind in enumerate(kinds):
        naive = naive_effects(random_model, prompts, values[kind])
        np.testing.assert_allclose(found["prompt_effect"][column], naive, atol=2e-4)
    assert found.settings["untested"].endswith("and there are 4")
    assert (found["verdict"] == "untested").all() and np.isnan(found["tau_low"]).all()


@torch.no_grad()
def test_self_repair_is_what_the_direct_path_does_not_explain(random_model: HookedTransformer) -> None:
    prompts = random_prompts(3)
    found = attribution_agreement(random_model, prompts, ablations=("zero",), n_permutations=9)
    # By hand for each prompt: take z W_O out of the last stream, and keep the scale of the final norm.
    direct = np.zeros((3, random_model.cfg.n_layers, random_model.cfg.n_heads))
    for place in range(3):
        tokens = prompts.tokens[place, : int(prompts.real[place].sum())]
        _, cache = random_model.run_with_cache(tokens)
        scale = cache["ln_final.hook_scale"][0, -1]
        towards = random_model.W_U[:, prompts.target[place]] - random_model.W_U[:, prompts.foil[place]]
        for layer in range(random_model.cfg.n_layers):
            z = cache[f"blocks.{layer}.attn.hook_z"][0, -1]  # [head, d_head]
            for head in range(random_model.cfg.n_heads):
                out = z[head] @ random_model.blocks[layer].attn.W_O[head] / scale * random_model.ln_final.w
                direct[place, layer, head] = -float(out @ towards)
    np.testing.assert_allclose(found["zero_direct"], direct.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(found["zero_self_repair"], found["zero_effect"] - direct.mean(axis=0), atol=1e-4)
    assert np.abs(found["zero_self_repair"]).max() > 0.01


def test_only_the_answer_position(random_model: HookedTransformer) -> None:
    found = attribution_agreement(
        random_model, random_prompts(3), ablations=("zero",), ablate_at="answer", n_permutations=9
    )
    # What the last layer writes elsewhere reaches no logit that is read, so there nothing changes: all is direct but
    # for the norm's scale and the MLP.
    everywhere = attribution_agreement(random_model, random_prompts(3), ablations=("zero",), n_permutations=9)
    np.testing.assert_allclose(found["zero_effect"][-1], everywhere["zero_effect"][-1], atol=1e-4)
    assert np.abs(found["zero_effect"][0] - everywhere["zero_effect"][0]).max() > 0.01


def test_random_weights_are_called_nothing() -> None:
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=4, d_model=32, n_heads=8, d_head=4, d_mlp=64, d_vocab=50, n_ctx=32,
        positional_embedding_type="rotary", normalization_type="RMS",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval()
    found = attribution_agreement(model, random_prompts(24, seed=3), ablations=("zero",), n_permutations=199)
    assert (found["verdict"] == "untested").all()
    assert "does not do the task" in found.settings["untested"] and "No verdicts" in found.summary()
    of_attention = [found.measures.index(name) for name in ("max_weight", "off_sink_mass", "entropy")]
    assert (np.abs(found["tau"][of_attention]) < 0.2).all()
    assert (found["tau_p_adjusted"][of_attention] > 0.05).all()


def simulated(effects: np.ndarray, seed: int = 0) -> np.ndarray:
    """Verdicts of heads with such effects [prompt, layer, head], all attended alike, on a task that the model does."""
    rng = np.random.default_rng(seed)
    ablated = Ablated(5 + rng.standard_normal(len(effects)), {"zero": effects})
    untested, verdicts = head_verdicts(np.ones(effects.shape), ablated, is_share=True, chance=0.0, seed=0)
    assert not untested
    return verdicts


def test_what_one_half_of_the_prompts_selects_must_hold_on_the_other() -> None:
    first, second = np.array_split(np.random.default_rng(0).permutation(40), 2)
    effects = 0.05 * np.random.default_rng(1).standard_normal((40, 1, 5))
    effects[:, 0, 0] -= 1  # a fifth of the baseline, in both
    effects[first, 0, 1] -= 1  # in the half that selects
    effects[second, 0, 2] -= 1  # in the half that tests
    effects[first, 0, 3] -= 1  # in both, with another sign
    effects[second, 0, 3] += 1
    expected = ["attended, decisive", "in between", "in between", "in between", "attended, inert"]
    assert simulated(effects)[0].tolist() == expected


def test_the_largest_of_many_noisy_effects_are_not_called_decisive() -> None:
    """Of 270 heads whose mean effect is 0 a quarter passes the threshold on one half, by chance."""
    alarms, selected = [], []
    for seed in range(30):
        effects = np.random.default_rng(seed).standard_normal((40, 30, 9))
        alarms.append((simulated(effects, seed) == "attended, decisive").any())
        half = np.array_split(np.random.default_rng(0).permutation(40), 2)[0]
        selected.append((np.abs(effects[half].mean(axis=0)) >= 0.05 * 5).mean())
    assert np.mean(selected) > 0.2 and np.mean(alarms) <= 0.1


def test_given_sources(random_model: HookedTransformer) -> None:
    prompts = random_prompts(3)
    sources = torch.zeros_like(prompts.real)
    sources[:, [0, 3]] = True
    found = attribution_agreement(random_model, prompts, ablations=("zero",), sources=sources, n_permutations=9)
    patterns = [
        random_model.run_with_cache(prompts.tokens[i, : int(prompts.real[i].sum())])[1]["blocks.2.attn.hook_pattern"]
        for i in range(3)
    ]
    weights = torch.stack([pattern[0, :, -1, [0, 3]] for pattern in patterns])  # [prompt, head, source]
    np.testing.assert_allclose(found["max_weight"][2], weights.amax(dim=2).mean(dim=0), atol=1e-5)
    np.testing.assert_allclose(found["mean_weight"][2], weights.mean(dim=(0, 2)), atol=1e-5)


def test_prompts_without_foils_and_corrupted_prompts(random_model: HookedTransformer) -> None:
    """Their metric is the log-probability, and heads can be ablated to zero only."""
    prompts = replace(random_prompts(3), foil=None, corrupted=None)
    found = attribution_agreement(random_model, prompts, n_permutations=9)
    assert found.ablations == ["zero"] and found.settings["metric"] == "log_probability"
    logits = random_model(prompts.tokens, attention_mask=prompts.real)
    last = prompts.real.sum(dim=1) - 1
    expected = logits[torch.arange(3), last].log_softmax(dim=-1)[torch.arange(3), prompts.target]
    np.testing.assert_allclose(found["baseline"], expected.detach(), atol=1e-5)
    assert found.quantities["zero_effect"].unit == "nats"


def test_a_reference_of_other_prompts(random_model: HookedTransformer) -> None:
    prompts = replace(random_prompts(3), corrupted=None)
    other = random_prompts(5, seed=9)
    reference = Sequences(torch.cat((other.tokens, prompts.tokens[:1])), torch.cat((other.real, prompts.real[:1])))
    values = replacement_outputs(random_model, prompts, ("mean", "resample"), reference, mean_by="all", seed=0)
    z = random_model.run_with_cache(reference.tokens, attention_mask=reference.real)[1]["blocks.0.attn.hook_z"]
    # Prompt 0 is in the reference, and its own mean is without it.
    np.testing.assert_allclose(values["mean"][0][0, 0], z[:5][reference.real[:5]].mean(dim=0), atol=1e-5)
    np.testing.assert_allclose(values["mean"][0][1, 0], z[reference.real].mean(dim=0), atol=1e-5)
    assert values["resample"][0].shape[:2] == prompts.tokens.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "loss"}, "metric must be"),
        ({"ablations": ()}, "ablations must be"),
        ({"ablations": ("zero", "zero")}, "ablations must be"),
        ({"ablate_at": "end"}, "ablate_at"),
        ({"verdict_measure": "mean_weight"}, "verdict_measure"),
        ({"n_permutations": 0}, "n_permutations"),
        ({"sources": torch.zeros(3, 9, dtype=torch.bool)}, "every prompt"),
        ({"sources": torch.ones(9, dtype=torch.bool)}, "sources must be bool"),
    ],
)
def test_what_makes_no_sense_is_refused(random_model: HookedTransformer, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attribution_agreement(random_model, random_prompts(3), **options)


def test_other_prompts_are_needed(random_model: HookedTransformer) -> None:
    prompts = replace(random_prompts(3), corrupted=None)
    with pytest.raises(ValueError, match="pass them as reference"):
        attribution_agreement(random_model, prompts, ablations=("mean",))
    short = Sequences(torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="mean by position"):
        attribution_agreement(random_model, prompts, ablations=("mean",), reference=short)
    attribution_agreement(random_model, prompts, ablations=("mean",), reference=short, mean_by="all", n_permutations=9)
    with pytest.raises(ValueError, match="as long as prompt 0"):
        attribution_agreement(random_model, prompts, ablations=("resample",), reference=short)


def test_figures_and_files(found: AttributionAgreement, tmp_path: object) -> None:
    assert found.figure_kinds == ("scatter", "agreement", "map", "repair")
    for kind in found.figure_kinds:
        for theme in ("light", "dark"):
            assert found.figure(kind, captioned=True, theme=theme).data
    scatter = found.figure("scatter")
    points = {trace.name: trace for trace in scatter.data if trace.type == "scatter"}
    (of_inert,) = [trace for name, trace in points.items() if name == "attended, inert (1)"]
    assert of_inert.x[0] == pytest.approx(1) and of_inert.text == ("L0H0",)
    assert found.figure("scatter", measure="entropy", ablation="mean").data[0].name.startswith("leaves it")
    for options in ({"measure": "luck"}, {"ablation": "luck"}):
        with pytest.raises(ValueError, match="must be one of"):
            found.figure("scatter", **options)
    again = load_result(found.save(f"{tmp_path}/x"))
    assert again.summary() == found.summary() and set(again.tables()) >= {"", "agreement", "prompts"}
