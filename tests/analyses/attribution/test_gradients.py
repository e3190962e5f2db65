"""Attribution patching and integrated gradients where their answers are known, and against naive float64 loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import (
    AttributionPatching,
    IntegratedGradients,
    attribution_patching,
    integrated_gradients,
    load_result,
)
from workbench.analyses.tasks import PromptSet, factual_recall
from workbench.loading.sources import KNOWN_MODELS

SIZES = {"n_layers": 2, "d_model": 16, "n_heads": 3, "d_head": 4, "d_mlp": 12, "d_vocab": 23, "n_ctx": 12}
SHAPES = {
    "gpt2": {"use_qkv_bias": True, "use_attn_out_bias": True, "use_mlp_bias": True, "use_unembed_bias": True},
    "llama": {"normalization_type": "RMS", "positional_embedding_type": "rotary"},
}


def build(**options: object) -> HookedTransformer:
    torch.manual_seed(0)
    model = HookedTransformer(TransformerConfig(**SIZES | {"initializer_range": 0.4, "init_mode": "normal"} | options))
    return model.double().eval()


def without_norms() -> HookedTransformer:
    """Every norm's scale held at 1."""
    model = build(normalization_type="RMS")
    model.add_hook(lambda name: name.endswith("hook_scale"), lambda scale, hook: torch.ones_like(scale))
    return model


def prompts_of(n: int = 4, corrupted_from: int = 2) -> PromptSet:
    """Prompts of several lengths; corrupted ones differ at position ``corrupted_from`` alone."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 23, (n, 7), generator=generator)
    real = torch.arange(7) < torch.tensor([7, 5, 7, 6])[:n, None]
    tokens = tokens.masked_fill(~real, 0)
    corrupted = tokens.clone()
    corrupted[:, corrupted_from] = (tokens[:, corrupted_from] + 5) % 23
    target, foil = torch.tensor([[1, 2, 3, 4], [7, 8, 9, 10]])[:, :n]
    return PromptSet(tokens, real, target, foil, corrupted, "random", "random tokens")


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    return build(**SHAPES[request.param])


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    return prompts_of()


def metric_of(logits: Tensor, prompts: PromptSet, prompt: int) -> Tensor:
    """Logit difference of one prompt; logits [1, pos, d_vocab]."""
    at = logits[0, int(prompts.rows[prompt])]
    return at[prompts.target[prompt]] - at[prompts.foil[prompt]]


def naive_run(model: HookedTransformer, prompts: PromptSet, tokens: Tensor, prompt: int, name: str) -> tuple:
    """Activation, its gradient and the metric of one prompt without its pads."""
    kept = {}

    def keep(x: Tensor, hook: object) -> Tensor:
        kept["x"] = x
        x.retain_grad()
        return x

    with model.hooks(fwd_hooks=[(name, keep)]):
        value = metric_of(model(tokens[prompt : prompt + 1, : int(prompts.real[prompt].sum())]), prompts, prompt)
    value.backward()
    model.zero_grad()
    return kept["x"].detach(), kept["x"].grad, value.detach()


@pytest.mark.parametrize(
    ("components", "hook", "direction"),
    [("heads", "attn.hook_z", "noising"), ("mlps", "hook_mlp_out", "noising"),
     ("residual", "hook_resid_pre", "denoising")],
)  # fmt: skip
def test_estimates_and_effects_are_those_of_a_naive_loop(model, components, hook, direction):
    prompts = prompts_of().subset([0, 1])
    result = attribution_patching(model, prompts, components=components, direction=direction, compare=True)
    base, donor = (prompts.tokens, prompts.corrupted) if direction == "noising" else (prompts.corrupted, prompts.tokens)
    for prompt in range(len(prompts)):
        n = int(prompts.real[prompt].sum())
        for layer in range(2):
            name = f"blocks.{layer}.{hook}"
            old, gradient, value = naive_run(model, prompts, base, prompt, name)
            new, _, of_donor = naive_run(model, prompts, donor, prompt, name)
            products = ((new - old) * gradient)[0]
            places = range(3) if components == "heads" else range(n)
            expected = products.sum(dim=(0, 2)) if components == "heads" else products.sum(dim=1)
            np.testing.assert_allclose(
                result["prompt_estimate"][prompt, layer, : len(places)], expected.numpy(), atol=1e-12
            )
            for place in places:

                def patch(x: Tensor, hook: object, new: Tensor = new, place: int = place) -> Tensor:
                    x = x.clone()
                    index = (0, slice(None), place) if components == "heads" else (0, place)
                    x[index] = new[index]
                    return x

                with torch.no_grad(), model.hooks(fwd_hooks=[(name, patch)]):
                    patched = metric_of(model(base[prompt : prompt + 1, :n]), prompts, prompt)
                effect = result["prompt_effect"][prompt, layer, place]
                assert effect == pytest.approx(float(patched - value), abs=1e-11)
            if components != "heads":
                assert np.isnan(result["prompt_effect"][prompt, layer, n:]).all()
        clean, corrupted = (value, of_donor) if direction == "noising" else (of_donor, value)
        assert result["clean_metric"][prompt] == pytest.approx(float(clean), abs=1e-12)
        assert result["corrupted_metric"][prompt] == pytest.approx(float(corrupted), abs=1e-12)
    error = np.nanmean(result["prompt_estimate"], axis=0) - np.nanmean(result["prompt_effect"], axis=0)
    np.testing.assert_allclose(result["error"], error, atol=1e-14)
    assert result["mean_absolute_error"] == pytest.approx(np.abs(error).mean())


def test_it_is_exact_where_the_metric_is_linear_in_the_activation(prompts):
    """Nothing behind the last layer's heads but the unembedding: no MLP, no norm."""
    model = without_norms()
    torch.nn.init.zeros_(model.blocks[1].mlp.W_out)
    result = attribution_patching(model, prompts)
    np.testing.assert_allclose(result["prompt_estimate"][:, 1], result["prompt_effect"][:, 1], atol=1e-12)
    assert np.abs(result["prompt_effect"][:, 1]).max() > 1e-3
    assert np.abs(result["error"][0]).max() > 1e-6  # layer 1's attention reads layer 0 and is not linear
    z = [
        naive_run(model, prompts, tokens, 0, "blocks.1.attn.hook_z")[0]
        for tokens in (prompts.tokens, prompts.corrupted)
    ]
    direction = model.unembed.W_U[:, prompts.target[0]] - model.unembed.W_U[:, prompts.foil[0]]
    by_hand = torch.einsum("he,hed,d->h", (z[1] - z[0])[0, -1], model.blocks[1].attn.W_O, direction)
    np.testing.assert_allclose(result["prompt_estimate"][0, 1], by_hand.detach().numpy(), atol=1e-12)


def test_patching_what_is_the_same_in_both_runs_changes_nothing():
    """Tokens before the one that differs have the same activations, bit for bit."""
    prompts = prompts_of(corrupted_from=4)
    for components in ("mlps", "residual"):
        result = attribution_patching(build(**SHAPES["llama"]), prompts, components=components)
        assert (result["prompt_estimate"][:, :, :4] == 0).all()
        assert np.abs(result["prompt_effect"][:, :, :4]).max() < 1e-14
        assert np.nanmax(np.abs(result["prompt_effect"][:, :, 4:])) > 1e-3


def test_replacing_the_whole_stream_of_a_prompt_makes_it_the_other_one(model):
    """All that follows the token that differs, if nothing follows it: then a position is the whole difference."""
    prompts = prompts_of(3, corrupted_from=4).subset([1])  # of 5 tokens
    result = attribution_patching(model, prompts, components="residual")
    change = result["corrupted_metric"] - result["clean_metric"]
    np.testing.assert_allclose(result["prompt_effect"][0, :, 4], change[0], atol=1e-12)


def test_grad_drop_is_the_mean_over_layers_cut_off(prompts):
    """By hand: the gradient with what a layer adds to the stream taken as given."""
    model = build(**SHAPES["llama"])
    result = attribution_patching(model, prompts, grad_drop=True)
    sizes = np.zeros((2, 3))
    for prompt in range(len(prompts)):
        n = int(prompts.real[prompt].sum())
        for layer, other in ((0, 1), (1, 0)):
            name = f"blocks.{layer}.attn.hook_z"
            hooks = [(f"blocks.{other}.hook_{part}_out", lambda x, hook: x.detach()) for part in ("attn", "mlp")]
            with model.hooks(fwd_hooks=hooks):
                old, gradient, _ = naive_run(model, prompts, prompts.tokens, prompt, name)
            new = model.run_with_cache(prompts.corrupted[prompt : prompt + 1, :n], names_filter=name)[1][name]
            sizes[layer] += ((new - old) * gradient).sum(dim=(0, 1, 3)).abs().detach().numpy() / len(prompts)
    np.testing.assert_allclose(result["dropped_size"], sizes, atol=1e-12)
    assert "GradDrop" in result.summary() and -1 <= result["dropped_size_correlation"] <= 1
    with pytest.raises(ValueError, match="has one"):
        attribution_patching(build(n_layers=1), prompts, grad_drop=True)


def test_a_bridge_gives_the_same(prompts):
    """A model that only has hooks and a cache: every run is a whole one."""
    model = build()

    class Bridge:
        cfg, hook_dict, parameters = model.cfg, model.hook_dict, model.parameters
        run_with_hooks, run_with_cache = model.run_with_hooks, model.run_with_cache

    result, expected = (attribution_patching(one, prompts) for one in (Bridge(), model))
    for name in ("prompt_estimate", "prompt_effect"):
        np.testing.assert_allclose(result[name], expected[name], atol=1e-12)
    result, expected = (integrated_gradients(one, prompts) for one in (Bridge(), model))
    np.testing.assert_allclose(result["attribution"], expected["attribution"], atol=1e-12)


def test_the_worst_are_named(prompts):
    result = attribution_patching(build(), prompts)
    layer, head = result.worst(1)[0]
    assert np.abs(result["error"]).max() == np.abs(result["error"][layer, head])
    layer, head = result.top(1)[0]
    assert np.abs(result["estimate"]).max() == np.abs(result["estimate"][layer, head])
    assert f"L{layer}H{head}" in result.summary()
    alone = attribution_patching(build(), prompts, compare=False)
    np.testing.assert_array_equal(alone["estimate"], result["estimate"])
    assert alone.figure_kinds == ("map",) and "Not compared" in alone.summary()
    with pytest.raises(ValueError, match="compare=True"):
        alone.worst()


@pytest.mark.parametrize("baseline", ["counterfactual", "mean embedding"])
def test_attributions_sum_to_the_change_of_the_metric(model, prompts, baseline):
    result = integrated_gradients(model, prompts, baseline=baseline)
    change = result["metric"] - result["baseline_metric"]
    np.testing.assert_allclose(np.nansum(result["attribution"], axis=1) + result["gap"], change, atol=1e-12)
    assert result["relative_gap"].max() < 0.01
    assert (np.isfinite(result["attribution"]) == prompts.real.numpy()).all()
    if baseline == "counterfactual":
        others = result["attribution"][:, [0, 1, 3, 4]]
        assert (others == 0).all()
        with torch.no_grad():
            value = [float(metric_of(model(x), prompts, 0)) for x in (prompts.tokens[:1], prompts.corrupted[:1])]
        assert change[0] == pytest.approx(value[0] - value[1], abs=1e-12)
    else:
        assert (np.abs(result["attribution"][0]) > 0).all()


def test_of_a_linear_function_they_are_gradient_times_difference(prompts):
    """Without norms, MLPs and differing weights, heads average over the tokens, so the logits are linear in them."""
    model = without_norms()
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.attn.W_Q, block.attn.W_K, block.mlp.W_out):
                weight.zero_()
    for baseline in ("counterfactual", "mean embedding"):
        result = integrated_gradients(model, prompts, baseline=baseline, n_steps=8)
        assert (result["n_gradients"] == 8).all() and result["relative_gap"].max() < 1e-9
        embedding, gradient, _ = naive_run(model, prompts, prompts.tokens, 0, "blocks.0.hook_resid_pre")
        if baseline == "counterfactual":
            other = naive_run(model, prompts, prompts.corrupted, 0, "blocks.0.hook_resid_pre")[0]
        else:
            other = embedding - model.embed.W_E[prompts.tokens[:1]] + model.embed.W_E.mean(dim=0)
        expected = ((embedding - other) * gradient).sum(dim=-1)[0]
        np.testing.assert_allclose(result["attribution"][0], expected.detach().numpy(), atol=1e-12)


def test_they_are_a_naive_integral(model):
    """A Riemann sum at 4,000 midpoints of the definition, one gradient at a time in big batches."""
    prompts = prompts_of(1)
    start, end = (model(tokens, stop_at_layer=0).detach() for tokens in (prompts.corrupted, prompts.tokens))
    shares = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    points = (start + shares[:, None, None] * (end - start)).requires_grad_()
    logits = model(points, start_at_layer=0)[:, -1]
    (gradient,) = torch.autograd.grad((logits[:, 1] - logits[:, 7]).sum(), points)
    expected = ((end - start) * gradient.mean(dim=0)).sum(dim=-1)[0]
    result = integrated_gradients(model, prompts)
    np.testing.assert_allclose(result["attribution"][0], expected.numpy(), atol=2e-3 * float(expected.abs().max()))


def test_a_line_is_cut_finer_where_the_metric_jumps():
    """Sharp attention switches within a small part of the line; so many steps alone would miss it."""
    model = build(**SHAPES["llama"])
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q *= 8
            block.attn.W_K *= 8
    prompts = prompts_of()
    result = integrated_gradients(model, prompts, n_steps=8)
    assert result["n_gradients"].max() > 8 and result["relative_gap"].max() < 0.01
    assert result["n_gradients"].max() <= 1024 + 8


@pytest.mark.parametrize("name", ["demo", "smollm2-135m"])
def test_real_prompts_of_real_models_are_complete_at_the_default_steps(name):
    if not KNOWN_MODELS[name].fetched:
        pytest.skip(f"{name} is not in the cache: run `workbench fetch {name}`")
    trained = HookedTransformer.from_pretrained(name)
    result = integrated_gradients(trained, factual_recall(trained, n_prompts=2))
    assert result["relative_gap"].max() < 0.01
    assert (np.abs(result["metric"] - result["baseline_metric"]) > 1).any()
    differs = result["token"] != result["baseline_token"]
    assert (differs == (np.nan_to_num(result["attribution"]) != 0)).all()


def test_what_cannot_be_attributed_is_refused(prompts, monkeypatch):
    model = build()
    bare = dataclasses.replace(prompts, corrupted=None)
    for analysis in (attribution_patching, integrated_gradients):
        with pytest.raises(ValueError, match="no corrupted prompts"):
            analysis(model, bare)
        with pytest.raises(ValueError, match="no foils"):
            analysis(model, dataclasses.replace(prompts, foil=None), metric="logit_difference")
        with pytest.raises(ValueError, match="metric must be one of"):
            analysis(model, prompts, metric="accuracy")
        with pytest.raises(ValueError, match="bidirectional"):
            analysis(build(attention_dir="bidirectional"), prompts)
    with pytest.raises(ValueError, match="components must be one of 'heads'"):
        attribution_patching(model, prompts, components="neurons")
    with pytest.raises(ValueError, match="direction must be one of"):
        attribution_patching(model, prompts, direction="both")
    with pytest.raises(ValueError, match="baseline must be one of"):
        integrated_gradients(model, prompts, baseline="zero")
    with pytest.raises(ValueError, match="n_steps must be"):
        integrated_gradients(model, prompts, n_steps=0)
    assert integrated_gradients(model, bare, baseline="mean embedding")["attribution"].shape == (4, 7)
    with torch.no_grad():
        model.unembed.W_U.zero_()
    with pytest.raises(ValueError, match="nothing to attribute"):
        integrated_gradients(model, prompts)
    monkeypatch.setattr("workbench.analyses.attribution.token_gradients.MOST_STEPS", 8)
    sharp = build(**SHAPES["llama"])
    with torch.no_grad():
        sharp.blocks[0].attn.W_Q *= 400
        sharp.blocks[1].attn.W_Q *= 400
    with pytest.raises(ValueError, match="miss the change of the metric"):
        integrated_gradients(sharp, prompts, n_steps=8)


def test_results_tabulate_draw_and_come_back(prompts, tmp_path):
    model = build(**SHAPES["llama"])
    patching = [attribution_patching(model, prompts, components=one) for one in ("heads", "mlps", "residual")]
    for result in (*patching, integrated_gradients(model, prompts)):
        result.save(tmp_path / result.kind)
        again = load_result(tmp_path / result.kind)
        assert isinstance(again, (AttributionPatching, IntegratedGradients)) and again.summary() == result.summary()
        for figure in result.figure_kinds:
            for theme in ("light", "dark"):
                assert result.figure(figure, captioned=True, theme=theme).data
        assert all(len(table) for table in result.tables().values())
    assert list(patching[0].to_frame()[["layer", "head"]].iloc[4]) == [1, 1]
    assert "position" in patching[1].to_frame()
    with pytest.raises(ValueError, match="quantity must be one of"):
        patching[0].figure("map", quantity="entropy")
    with pytest.raises(ValueError, match="prompt must lie"):
        result.figure("tokens", prompt=9)
    assert result.figure("tokens", prompt=1).data[0].y.shape == (5,)
