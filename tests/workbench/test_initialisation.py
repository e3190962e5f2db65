"""How a model begins: the spread of every matrix by theory, what follows for its logits, and dropout in training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import HookedEncoderDecoder, HookedTransformer, MixtureOfExperts, TransformerConfig

SIZES: dict[str, Any] = {
    "n_layers": 3, "d_model": 48, "n_heads": 4, "d_head": 20, "d_mlp": 60, "d_vocab": 100, "n_ctx": 32,
    "n_key_value_heads": 2,
}  # fmt: skip


def build(**changes: Any) -> HookedTransformer:
    torch.manual_seed(0)
    cfg = TransformerConfig(**SIZES | changes)
    return (HookedTransformer if cfg.n_encoder_layers is None else HookedEncoderDecoder)(cfg)


def assert_spread(weight: Tensor, std: float, name: str) -> None:
    """Mean 0 and this standard deviation, within five standard errors of a sample of n independent normal numbers.

    The mean's is std / sqrt(n), that of the standard deviation std / sqrt(2 n), for n large. Uniform numbers, whose
    fourth moment is smaller, stay closer.
    """
    n = weight.numel()
    assert abs(weight.mean()) < 5 * std / n**0.5, name
    assert abs(weight.std() - std) < 5 * std / (2 * n) ** 0.5, name


def matrices(model: HookedTransformer) -> dict[str, Tensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1 and not name.rpartition(".")[2].startswith("b_")
    }


@pytest.mark.parametrize("mode", ["gpt2", "normal", "xavier", "t5"])
def test_biases_and_gains_are_constants(mode):
    """Biases and sink logits begin at 0, gains at 1, whatever the shape of a bias."""
    biases = dict.fromkeys(("use_qkv_bias", "use_attn_out_bias", "use_mlp_bias", "use_unembed_bias"), True)
    moe = MixtureOfExperts(n_experts=2, n_experts_per_token=1, use_router_bias=True, dense_layers=(0,))
    model = build(init_mode=mode, moe=moe, use_sink_logits=True, qk_norm="per_head", use_mlm_head=True, **biases)
    for name, parameter in model.named_parameters():
        if name not in matrices(model):
            assert torch.equal(parameter, torch.full_like(parameter, 1.0 if name.endswith(".w") else 0.0)), name


def test_gpt2_divides_what_writes_to_the_stream():
    """All 0.03, but W_O and W_out divided by sqrt(6): three layers write twice each."""
    for name, weight in matrices(build(init_mode="gpt2", initializer_range=0.03)).items():
        assert_spread(weight, 0.03 / (6**0.5 if name.endswith(("W_O", "W_out")) else 1), name)


def test_gpt2_counts_the_writers_of_each_stack():
    """Three decoder layers write three times each, two encoder layers twice."""
    for name, weight in matrices(build(init_mode="gpt2", n_encoder_layers=2)).items():
        writers = 4 if name.startswith("encoder") else 9
        assert_spread(weight, 0.02 / (writers**0.5 if name.endswith(("W_O", "W_out")) else 1), name)


def test_normal_is_one_spread_for_all():
    model = build(init_mode="normal", use_mlm_head=True, n_segments=40, attention_dir="bidirectional")
    for name, weight in matrices(model).items():
        assert_spread(weight, 0.02, name)


def test_xavier_is_uniform_by_inputs_and_outputs():
    """Variance 2 / (inputs + outputs) of the whole matrix: all heads are one, each expert is one."""
    model = build(
        init_mode="xavier", gated_mlp=True, use_mlm_head=True, positional_embedding_type="relative",
        moe=MixtureOfExperts(n_experts=3, n_experts_per_token=1, d_expert=24, dense_layers=(0,)),
    )  # fmt: skip
    fans = {  # of 48 dimensions, 4 × 20 and 2 × 20 in heads, 60 or 24 in the MLP, 3 experts
        "attn.W_Q": 48 + 80, "attn.W_K": 48 + 40, "attn.W_V": 48 + 40, "attn.W_O": 80 + 48,
        "blocks.0.mlp.W_in": 48 + 60, "blocks.0.mlp.W_gate": 48 + 60, "blocks.0.mlp.W_out": 60 + 48,
        "mlp.W_in": 48 + 24, "mlp.W_gate": 48 + 24, "mlp.W_out": 24 + 48, "mlp.W_router": 48 + 3, "mlm_head.W": 48 + 48,
    }  # fmt: skip
    for name, weight in matrices(model).items():
        fan = next((fan for ending, fan in fans.items() if name.endswith(ending)), None)
        if fan is None:  # tables
            assert_spread(weight, 48**-0.5, name)
            continue
        assert_spread(weight, (2 / fan) ** 0.5, name)
        bound = (6 / fan) ** 0.5
        assert 0.98 * bound < weight.abs().max() < bound, name


def test_t5_scales_by_inputs_and_queries_for_unscaled_scores():
    model = build(init_mode="t5", initializer_range=1.0, n_encoder_layers=1, positional_embedding_type="relative")
    stds = {
        "W_E": 1.0, "W_U": 1.0, "W_rel": 48**-0.5, "W_Q": (48 * 20) ** -0.5, "W_K": 48**-0.5, "W_V": 48**-0.5,
        "W_O": 80**-0.5, "W_in": 48**-0.5, "W_out": 60**-0.5,
    }  # fmt: skip
    for name, weight in matrices(model).items():
        assert_spread(weight, stds[name.rpartition(".")[2]], name)
    halved = build(init_mode="t5", initializer_range=0.5, n_encoder_layers=1, positional_embedding_type="relative")
    torch.testing.assert_close(halved.W_E, model.W_E / 2)


@torch.no_grad()
def test_t5_begins_as_transformers_does():
    """The spread of each of its matrices, in a model drawn by transformers itself."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(1)
    cfg = T5Config(vocab_size=100, d_model=48, d_kv=20, d_ff=60, num_layers=1, num_decoder_layers=3, num_heads=4)
    theirs = HookedTransformer.from_pretrained(T5ForConditionalGeneration(cfg))
    ours = HookedEncoderDecoder(theirs.cfg)
    assert ours.cfg.init_mode == "t5"
    for name, weight in matrices(ours).items():
        n, ratio = weight.numel(), weight.std() / dict(theirs.named_parameters())[name].std()
        assert abs(ratio.log()) < 5 / n**0.5, name  # each of the two deviates by 1 / sqrt(2 n) of itself


@torch.no_grad()
def test_gpt2_begins_as_transformers_does():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    cfg = GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=3, n_head=4, n_inner=60)
    theirs = HookedTransformer.from_pretrained(GPT2LMHeadModel(cfg))
    ours = HookedTransformer(theirs.cfg)
    assert ours.cfg.init_mode == "gpt2"
    for name, weight in matrices(ours).items():
        n, ratio = weight.numel(), weight.std() / dict(theirs.named_parameters())[name].std()
        assert abs(ratio.log()) < 5 / n**0.5, name


def test_the_seed_decides():
    first, second = build().state_dict(), build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "std"),
    [
        ({"init_mode": "gpt2"}, 0.02 * 128**0.5),
        ({"init_mode": "normal", "initializer_range": 0.05}, 0.05 * 128**0.5),
        ({"init_mode": "xavier"}, 1.0),
        ({"init_mode": "t5", "initializer_range": 1.0, "logit_scale": 128**-0.5, "normalization_type": "RMS",
          "positional_embedding_type": "none", "attn_scale": 1.0}, 1.0),
    ],
)  # fmt: skip
def test_logits_begin_with_the_spread_of_the_unembedding(options, std):
    """The final norm makes every stream sqrt(d_model) long, so logits spread by sqrt(d_model) · std(W_U) · logit_scale.

    Normal logits of variance σ² that know nothing of the target give a mean loss of ln(d_vocab) + σ² / 2, by the mean
    of a lognormal variable. Sampled over 2,000 words, so to a few per cent.
    """
    model = build(d_model=128, d_vocab=2000, **options).eval()
    tokens = torch.randint(0, 2000, (8, 32))
    logits, loss = model(tokens, return_type="both")
    assert abs(logits.std() / std - 1) < 0.05
    assert abs(loss - (math.log(2000) + std**2 / 2)) < 0.3 * max(std, 0.1)


# Dropout

RATE = 0.3
PLACES = {
    "pre": {},
    "post": {"norm_placement": "post"},
    "sandwich": {"norm_placement": "sandwich"},
    "output": {"norm_placement": "output"},
    "parallel": {"parallel_attn_mlp": True},
    "encoder–decoder": {"n_encoder_layers": 2},
}
every_place = pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)


def assert_dropped(value: Tensor, complete: Tensor, name: str) -> None:
    """Each entry is 0, at the rate within five standard errors, or 1 / (1 − rate) times the complete one."""
    dropped = value == 0
    torch.testing.assert_close(value[~dropped], complete[~dropped] / (1 - RATE), msg=lambda text: f"{name}: {text}")
    n = value.numel()
    assert abs(dropped.double().mean() - RATE) < 5 * (RATE * (1 - RATE) / n) ** 0.5, name


def run(model: HookedTransformer, tokens: Tensor, names: Any = None) -> tuple[Tensor, Any]:
    arguments = {} if model.cfg.n_encoder_layers is None else {"decoder_input": tokens}
    return model.run_with_cache(tokens, names_filter=names, **arguments)


def written(block: Any, cache: Any, prefix: str, sublayer: str) -> Tensor:
    """What a sublayer would add to the stream without dropout, from the activations before it."""
    if sublayer == "mlp":
        out, norm = cache[f"{prefix}.mlp.hook_post"] @ block.mlp.W_out, "ln2_post"
    else:
        attention = getattr(block, sublayer)
        out = torch.einsum("bphe,hed->bpd", cache[f"{prefix}.{sublayer}.hook_z"], attention.W_O)
        norm = "ln1_post"
    if not hasattr(block, norm):
        return out
    return cache[f"{prefix}.{norm}.hook_normalized"] * getattr(block, norm).gain


@torch.no_grad()
@every_place
def test_dropout_sits_on_the_embedding_and_on_each_sublayer(options):
    """… of the original Transformer (Vaswani et al. 2017, section 5.4), and nowhere else."""
    model = build(dropout=RATE, dtype=torch.float64, use_norm_bias=False, **options).train()
    tokens = torch.randint(0, 100, (8, 32))
    _, cache = run(model, tokens)
    stacks = {"blocks": ""} if model.cfg.n_encoder_layers is None else {"blocks": "", "encoder_blocks": "encoder_"}
    for stack, prefix in stacks.items():
        embedded = cache[f"hook_{prefix}embed"] + cache[f"hook_{prefix}pos_embed"]
        assert_dropped(cache[f"{stack}.0.hook_resid_pre"], embedded, f"{prefix}embed")
        for layer, block in enumerate(getattr(model, stack)):
            at = f"{stack}.{layer}"
            for sublayer in ("attn", "mlp", *(["cross_attn"] if block.reads_encoder else [])):
                assert_dropped(
                    cache[f"{at}.hook_{sublayer}_out"], written(block, cache, at, sublayer), f"{at}.{sublayer}"
                )
    last = cache[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    logits = model.unembed(model.ln_final(last))
    arguments = {} if model.cfg.n_encoder_layers is None else {"decoder_input": tokens}
    with model.hooks(fwd_hooks=[("blocks.2.hook_resid_post", lambda x, hook: last)]):
        assert torch.equal(model(tokens, **arguments), logits)  # nothing is dropped behind the last layer
    if model.cfg.n_encoder_layers is not None:
        memory = model.encoder_ln_final(cache["encoder_blocks.1.hook_resid_post"])
        keys = torch.einsum("bpd,hde->bphe", memory, model.blocks[0].cross_attn.W_K)
        torch.testing.assert_close(cache["blocks.0.cross_attn.hook_k"], keys)  # nor behind the encoder's


@torch.no_grad()
@every_place
def test_evaluation_drops_nothing(options):
    """In eval mode the model is the one without dropout; in training mode every pass differs, unless seeded alike."""
    model = build(dropout=RATE, **options)
    plain = build(**options)
    tokens = torch.randint(0, 100, (2, 8))
    expected, _ = run(plain.eval(), tokens)
    assert torch.equal(run(model.eval(), tokens)[0], expected)
    assert torch.equal(run(plain.train(), tokens)[0], expected)
    model.train()
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(run(model, tokens)[0])
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], expected)


@torch.no_grad()
def test_dropout_keeps_the_mean():
    """Averaged over many passes, a layer adds what it adds in eval mode."""
    model = build(dropout=0.5, n_layers=1, dtype=torch.float64)
    residual, name = torch.randn(1, 4, 48, dtype=torch.float64), "blocks.0.hook_attn_out"

    def added(copies: int) -> Tensor:
        arguments = {"start_at_layer": 0, "stop_at_layer": 1, "names_filter": name}
        return model.run_with_cache(residual.expand(copies, -1, -1), **arguments)[1][name]

    model.eval()
    expected = added(1)[0]
    # An entry x is 0 or 2x: its standard deviation is |x|, that of the mean of 4,000 of them |x| / sqrt(4000).
    model.train()
    assert ((added(4000).mean(0) - expected).abs() < 5 * expected.abs() / 4000**0.5).all()


def test_a_rate_of_one_is_refused():
    with pytest.raises(ValueError, match="dropout must be a rate"):
        dataclasses.replace(TransformerConfig(**SIZES), dropout=1.0)
