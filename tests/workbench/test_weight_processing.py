"""Processed models compute what they did, from weights of the promised form; what cannot be processed is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench import (
    HookedTransformer,
    MixtureOfExperts,
    TransformerConfig,
    center_unembed,
    fold_layer_norm,
)


def tiny(**changes) -> HookedTransformer:
    """One layer in float64, whose gains and biases are random, too."""
    torch.manual_seed(0)
    fields = {
        "n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "d_mlp": 6, "d_vocab": 7, "n_ctx": 16,
        "init_mode": "xavier", "dtype": torch.float64,
    }  # fmt: skip
    model = HookedTransformer(TransformerConfig(**fields | changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 or parameter.std() == 0:
            parameter.data += 0.5 * torch.randn_like(parameter)
    return model


def assert_equal_up_to_rounding(value: torch.Tensor, expected: torch.Tensor) -> None:
    assert (value - expected).abs().max() <= 1e-10 * expected.abs().max()


@torch.no_grad()
def test_folding_changes_no_logit_and_no_pattern(mechanism):
    """… of any mechanism, nor the model that is folded; norms that only weights read have gain 1 and bias 0."""
    cfg = mechanism.model.cfg
    before = {name: tensor.clone() for name, tensor in mechanism.model.state_dict().items()}
    if cfg.norm_placement in ("post", "output"):
        with pytest.raises(ValueError, match=f"norm_placement='{cfg.norm_placement}'"):
            fold_layer_norm(mechanism.model)
        return
    folded = fold_layer_norm(mechanism.model)
    assert_equal_up_to_rounding(mechanism.output(folded), mechanism.output())
    for name, tensor in mechanism.model.state_dict().items():
        assert torch.equal(tensor, before[name])

    arguments = {**mechanism.arguments, "return_type": "logits" if cfg.use_unembed else None}
    (_, original), (_, processed) = (model.run_with_cache(**arguments) for model in (mechanism.model, folded))
    for name in original:
        if name.endswith(("hook_pattern", "hook_attn_scores", "hook_resid_post", "hook_k", "hook_v", "router_logits")):
            finite = original[name].isfinite()
            assert torch.equal(processed[name].isfinite(), finite)
            assert_equal_up_to_rounding(processed[name][finite], original[name][finite])

    kept = ("ln_embed", "ln1_post", "ln2_post", "q_norm", "k_norm") + (() if cfg.use_unembed else ("ln_final",))
    folded_norms = [name for name, _ in folded.named_modules() if "ln" in name.rpartition(".")[2]]
    assert any("ln1" in name for name in folded_norms)
    for name in folded_norms:
        norm = folded.get_submodule(name)
        if not name.endswith(kept):
            assert torch.equal(norm.gain, torch.ones_like(norm.gain))
            assert norm.b is None or not norm.b.any()


@torch.no_grad()
def test_folding_by_hand():
    """One norm, whose gain is 2 in the first dimension, and whose bias is 3 there: by the definition, on paper.

    W_in has the columns e₀ and e₁. Folded they are 2e₀ and e₁, less their means ½ and ¼ in each of four dimensions;
    what the bias added to the pre-activations is 3 and 0.
    """
    model = tiny(d_model=4, d_mlp=2, n_heads=1, use_norm_bias=True)
    block = model.blocks[0]
    block.ln2.w.copy_(torch.tensor([2.0, 1, 1, 1]))
    block.ln2.b.copy_(torch.tensor([3.0, 0, 0, 0]))
    block.mlp.W_in.copy_(torch.eye(4)[:, :2])
    assert block.mlp.b_in is None
    mlp = fold_layer_norm(model).blocks[0].mlp
    expected = [[1.5, -0.25], [-0.5, 0.75], [-0.5, -0.25], [-0.5, -0.25]]
    torch.testing.assert_close(mlp.W_in, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(mlp.b_in, torch.tensor([3.0, 0], dtype=torch.float64))
    assert not mlp.b_out.any()


@torch.no_grad()
@pytest.mark.parametrize("normalization_type", ["LN", "RMS"])
def test_what_reads_a_layer_norm_is_centred(normalization_type):
    """A LayerNorm's output sums to zero, so a constant over d_model in what reads it is never seen; an RMSNorm's is."""
    model = tiny(normalization_type=normalization_type, gated_mlp=True, act_fn="silu")
    folded = fold_layer_norm(model)
    block = folded.blocks[0]
    readers = [block.attn.W_Q, block.attn.W_K, block.attn.W_V, block.mlp.W_in, block.mlp.W_gate, folded.W_U]
    for weight in readers:
        assert (weight.mean(-2).abs().max() < 1e-12) == (normalization_type == "LN")


@torch.no_grad()
@pytest.mark.parametrize("normalization_type", ["LN", "RMS"])
def test_equals_transformer_lens_processing(normalization_type):
    """Weight by weight, what transformer_lens makes of the same weights (it does not centre W_gate: hence the gate)."""
    from transformer_lens.weight_processing import ProcessWeights

    is_ln = normalization_type == "LN"
    biases = dict.fromkeys(("use_qkv_bias", "use_attn_out_bias", "use_mlp_bias", "use_unembed_bias"), True)
    model = tiny(n_layers=2, normalization_type=normalization_type, gated_mlp=not is_ln, **biases)
    theirs = ProcessWeights.fold_layer_norm(model.state_dict(), model.cfg, fold_biases=is_ln, center_weights=is_ln)
    theirs = ProcessWeights.center_unembed(theirs, model.cfg)
    ours = center_unembed(fold_layer_norm(model)).state_dict()
    assert set(theirs) == set(ours)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
def test_biases_appear_only_where_a_norm_has_one():
    """… of its own: those that come along with the switch are zero, and no switch is thrown for nothing."""
    unbiased = fold_layer_norm(tiny(normalization_type="RMS", moe=MixtureOfExperts(n_experts=2, n_experts_per_token=1)))
    assert not [name for name in unbiased.state_dict() if ".b_" in name]
    biased = fold_layer_norm(tiny(moe=MixtureOfExperts(n_experts=2, n_experts_per_token=1)))
    assert biased.cfg.use_qkv_bias and biased.cfg.use_mlp_bias and biased.cfg.use_unembed_bias
    assert biased.cfg.moe.use_router_bias and not biased.cfg.use_attn_out_bias
    assert biased.blocks[0].mlp.b_router.any() and biased.blocks[0].mlp.b_in.any()
    assert not biased.blocks[0].mlp.b_out.any()


@torch.no_grad()
def test_centring_changes_no_log_probability(mechanism):
    cfg = mechanism.model.cfg
    if cfg.output_logits_soft_cap is not None or not cfg.use_unembed:
        with pytest.raises(ValueError, match="output_logits_soft_cap" if cfg.use_unembed else "use_unembed=False"):
            center_unembed(mechanism.model)
        return
    before = {name: tensor.clone() for name, tensor in mechanism.model.state_dict().items()}
    centred = center_unembed(mechanism.model)
    logits, expected = mechanism.output(centred), mechanism.output()
    assert_equal_up_to_rounding(logits.log_softmax(-1), expected.log_softmax(-1))
    assert logits.mean(-1).abs().max() < 1e-12 and expected.mean(-1).abs().max() > 1e-3
    assert centred.W_U.mean(-1).abs().max() < 1e-12 and centred.b_U.mean().abs() < 1e-12
    for name, tensor in mechanism.model.state_dict().items():
        assert torch.equal(tensor, before[name])


@torch.no_grad()
@pytest.mark.parametrize("process", [fold_layer_norm, center_unembed])
def test_a_tied_model_comes_back_untied(process):
    """Its embedding stays, its unembedding is processed."""
    model = tiny(tie_word_embeddings=True)
    processed = process(model)
    assert model.cfg.tie_word_embeddings and not processed.cfg.tie_word_embeddings
    assert torch.equal(processed.W_E, model.W_E)
    assert not torch.equal(processed.W_U, model.W_E.T)


@torch.no_grad()
def test_a_processed_model_is_one_like_any_other(tokenizer):
    """It says what was done, keeps mode, tokenizer, switches and settings, saves and loads, and can be processed on."""
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=1, d_model=8, n_heads=2, d_head=4, d_mlp=6, d_vocab=23, n_ctx=16, use_attn_result=True,
        dtype=torch.bfloat16, weights_description="bfloat16",
    )  # fmt: skip
    model = HookedTransformer(cfg, tokenizer).train()
    model.statistics_request = dataclasses.replace(model.statistics_request, offsets=(1, 2))
    folded = fold_layer_norm(model)
    assert folded.training and not fold_layer_norm(model.eval()).training
    assert folded.tokenizer is tokenizer and folded.statistics_request == model.statistics_request
    assert folded.cfg.use_attn_result and folded.cfg.dtype == folded.W_U.dtype == torch.bfloat16
    assert folded.cfg.device == model.cfg.device == folded.W_E.device
    both = center_unembed(folded)
    assert both.cfg.weights_description == "unembedding centred, norms folded, bfloat16"
    assert all(parameter.requires_grad for parameter in both.parameters())
    again = fold_layer_norm(folded.double())
    torch.testing.assert_close(again.W_Q, folded.W_Q, atol=1e-3, rtol=0)  # bfloat16 had rounded its means


def test_something_else_than_a_model_is_refused():
    for process in (fold_layer_norm, center_unembed):
        with pytest.raises(ValueError, match="HookedTransformer, got Linear"):
            process(torch.nn.Linear(2, 2))
