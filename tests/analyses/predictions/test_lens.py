"""The logit lens and direct logit attribution against their definitions, on models of several shapes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import DirectLogitAttribution, LogitLens, direct_logit_attribution, load_result, logit_lens
from workbench.analyses.tasks import PromptSet

SIZES = {"n_layers": 3, "d_model": 24, "n_heads": 4, "d_head": 6, "d_mlp": 20, "d_vocab": 31, "n_ctx": 40}
SHAPES = {
    "gpt2": {"use_qkv_bias": True, "use_attn_out_bias": True, "use_mlp_bias": True, "use_unembed_bias": True},
    "llama": {"normalization_type": "RMS", "positional_embedding_type": "rotary", "n_key_value_heads": 2},
    "gemma2": {
        "normalization_type": "RMS", "norm_gain_plus_one": True, "norm_placement": "sandwich",
        "positional_embedding_type": "rotary", "output_logits_soft_cap": 3.0, "logit_scale": 0.5,
    },
    "olmo2": {"normalization_type": "RMS", "norm_placement": "output", "positional_embedding_type": "rotary"},
    "gptj": {"parallel_attn_mlp": True, "shared_parallel_norm": True, "use_mlp_bias": True},
    "sandwich of LayerNorms": {"norm_placement": "sandwich", "use_attn_out_bias": True},
}  # fmt: skip


def build(**options: object) -> HookedTransformer:
    torch.manual_seed(0)
    model = HookedTransformer(TransformerConfig(**SIZES, initializer_range=0.4, init_mode="normal", **options))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.3, 1.2)
    return model.double().eval()


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest) -> HookedTransformer:
    return build(**SHAPES[request.param])


@pytest.fixture(scope="module")
def prompts() -> PromptSet:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 31, (5, 12), generator=generator)
    real = torch.arange(12) < torch.tensor([12, 9, 12, 4, 7])[:, None]
    target, foil = torch.tensor([[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]])
    return PromptSet(tokens.masked_fill(~real, 0), real, target, foil, None, "random", "random tokens")


def before_soft_cap(model: HookedTransformer, logits: torch.Tensor) -> torch.Tensor:
    cap = model.cfg.output_logits_soft_cap
    return logits if cap is None else cap * torch.atanh(logits / cap)


def test_parts_sum_to_the_logit_difference(model, prompts):
    result = direct_logit_attribution(model, prompts)
    logits = before_soft_cap(model, model(prompts.tokens, attention_mask=prompts.real))
    at = logits[torch.arange(5), prompts.rows[:, 0]]
    expected = (at[torch.arange(5), prompts.target] - at[torch.arange(5), prompts.foil]).detach().numpy()
    np.testing.assert_allclose(result["logit_difference"], expected, atol=1e-10)
    names = ("head", "attention_bias", "mlp", "embedding", "constant")
    parts = sum(result[f"prompt_{name}_contribution"].reshape(5, -1).sum(axis=1) for name in names)
    np.testing.assert_allclose(parts, expected, atol=1e-9)
    assert np.abs(result["gap"]).max() < 1e-9


def test_a_head_of_the_last_layer_contributes_what_its_removal_takes_away(model, prompts):
    """With the norms' scales held at their values, nothing reads the last layer's heads but the unembedding."""
    result = direct_logit_attribution(model, prompts)
    if model.cfg.norm_placement == "pre":
        held = {"ln_final.hook_scale": None}
    else:
        held = {"ln_final.hook_scale": None, "blocks.2.ln1_post.hook_scale": None}
    mlp = "blocks.2.hook_mlp_out"
    _, cache = model.run_with_cache(prompts.tokens, attention_mask=prompts.real, names_filter=[*held, mlp])
    hooks = [(name, lambda x, hook: cache[hook.name]) for name in (*held, mlp)]

    def remove(z: torch.Tensor, hook: object) -> torch.Tensor:
        z = z.clone()
        z[:, :, 1] = 0
        return z

    with torch.no_grad(), model.hooks(fwd_hooks=[*hooks, ("blocks.2.attn.hook_z", remove)]):
        logits = before_soft_cap(model, model(prompts.tokens, attention_mask=prompts.real))
    at = logits[torch.arange(5), prompts.rows[:, 0]]
    without = at[torch.arange(5), prompts.target] - at[torch.arange(5), prompts.foil]
    lost = result["prompt_head_contribution"][:, 2, 1]
    if model.cfg.norm_placement == "sandwich" and model.cfg.normalization_type == "LN":
        assert np.isfinite(lost).all()  # the norm's bias stays with the attention bias
    np.testing.assert_allclose(result["logit_difference"] - without.numpy(), lost, atol=1e-9)


def test_prompts_without_foils_and_streams_that_are_no_sum_are_refused(prompts):
    with pytest.raises(ValueError, match="foil"):
        direct_logit_attribution(build(), dataclasses.replace(prompts, foil=None))
    with pytest.raises(ValueError, match="no sum of parts"):
        direct_logit_attribution(build(norm_placement="post"), prompts)


def test_the_lens_reads_every_depth_as_the_last(model, prompts):
    tokens = prompts.tokens[:1]
    result = logit_lens(model, tokens)
    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(3)), "blocks.2.hook_resid_post"]
    logits, cache = model.run_with_cache(tokens, names_filter=names)
    final = logits[0].detach().log_softmax(dim=-1)
    for depth, name in enumerate(names):
        lens = model.to_logits(cache[name])[0].detach().log_softmax(dim=-1)
        own = lens[torch.arange(11), tokens[0, 1:]]
        np.testing.assert_allclose(result["log_probability"][depth, :-1], own.numpy(), atol=1e-10)
        rank = (lens[:-1] >= own[:, None]).sum(dim=1).numpy()  # no ties among random floats
        np.testing.assert_array_equal(result["rank"][depth, :-1], rank)
        np.testing.assert_allclose(result["entropy"][depth], -(lens.exp() * lens).sum(-1).numpy(), atol=1e-10)
        kl = (final.exp() * (final - lens)).sum(-1)
        np.testing.assert_allclose(result["kl_to_final"][depth], kl.numpy(), atol=1e-10)
        np.testing.assert_array_equal(result["top_token_id"][depth], lens.argmax(-1).numpy())
        np.testing.assert_allclose(result["top_probability"][depth], lens.exp().amax(-1).numpy(), atol=1e-10)
    assert np.isnan(result["rank"][:, -1]).all()


def test_pads_before_the_text_change_nothing(model, prompts):
    tokens = prompts.tokens[:1]
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), tokens), dim=1)
    mask = torch.arange(15)[None] >= 3
    left, right = logit_lens(model, tokens), logit_lens(model, padded, attention_mask=mask)
    np.testing.assert_allclose(left["kl_to_final"], right["kl_to_final"], atol=1e-10)


def test_where_the_prediction_settles():
    result = logit_lens(build(), torch.arange(6)[None])
    ids = np.array([[3, 1, 9], [5, 1, 7], [4, 1, 9], [4, 1, 9]])
    quantities = {
        name: dataclasses.replace(quantity, values=ids if name == "top_token_id" else quantity.values[:, :3])
        for name, quantity in result.quantities.items()
    }
    settled = dataclasses.replace(result, quantities=quantities, coordinates={})
    assert settled.first_right.tolist() == [2, 0, 2]


def test_several_texts_and_bidirectional_models_are_refused():
    with pytest.raises(ValueError, match="one text, got 2"):
        logit_lens(build(), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="bidirectional"):
        logit_lens(build(attention_dir="bidirectional"), torch.zeros(1, 4, dtype=torch.int64))


def test_results_tabulate_draw_and_come_back(prompts, tmp_path):
    model = build(**SHAPES["llama"])
    for result, kind in ((logit_lens(model, prompts.tokens[:1]), LogitLens),
                         (direct_logit_attribution(model, prompts), DirectLogitAttribution)):  # fmt: skip
        result.save(tmp_path / result.kind)
        again = load_result(tmp_path / result.kind)
        assert isinstance(again, kind) and again.summary() == result.summary()
        for figure in result.figure_kinds:
            for theme in ("light", "dark"):
                assert result.figure(figure, captioned=True, theme=theme).data
        assert all(len(table) for table in result.tables().values())
