"""Each mechanism does what it is for: the property that defines it, measured on a whole model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import HookedEncoderDecoder, HookedTransformer, MixtureOfExperts, RopeScaling, TransformerConfig
from workbench.components.linear_attention import feature_map
from workbench.components.mlp import ACTIVATIONS
from workbench.testing import check_hook_contract

SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 8, "d_mlp": 24, "d_vocab": 20, "n_ctx": 64,
    "init_mode": "xavier", "dtype": torch.float64,
}  # fmt: skip


def build(**changes: Any) -> HookedTransformer:
    torch.manual_seed(0)
    cfg = TransformerConfig(**SIZES | changes)
    return (HookedTransformer if cfg.n_encoder_layers is None else HookedEncoderDecoder)(cfg).eval()


def tokens_of(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, SIZES["d_vocab"], (rows, length), generator=torch.Generator().manual_seed(seed))


def changed_at(tokens: Tensor, position: int) -> Tensor:
    changed = tokens.clone()
    changed[:, position] = (tokens[:, position] + 1) % SIZES["d_vocab"]
    return changed


# All of them


def test_hooks_keep_their_contract(mechanism):
    arguments = dict(mechanism.arguments)
    check_hook_contract(mechanism.model, arguments.pop("input"), **arguments)


# Positions


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary_dim": 4, "rotary_adjacent_pairs": True},
        {"rope_scaling": RopeScaling(type="linear", factor=4.0)},
        {"rope_scaling": RopeScaling(type="yarn", factor=4.0, original_context=8)},
        {"qk_norm": "per_head"},
        {"window_size": 4, "rotary_base_local": 50.0, "attn_types": ("local", "global")},
    ],
)
def test_rotary_scores_depend_on_the_offset_alone(options):
    """All positions shifted by 30 leave the logits; angles are float32, so to its rounding at 50 rad."""
    model, tokens = build(positional_embedding_type="rotary", **options), tokens_of(2, 20)
    positions = torch.arange(20)
    expected = model(tokens)
    torch.testing.assert_close(model(tokens, position_ids=positions + 30), expected, rtol=0, atol=1e-4)
    stretched = model(tokens, position_ids=positions * 2)
    assert (stretched - expected).abs().max() > 0.01  # offsets do matter


@torch.no_grad()
@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_absolute_positions_are_not_of_offsets(positions):
    model, tokens = build(positional_embedding_type=positions), tokens_of(2, 20)
    shifted = model(tokens, position_ids=torch.arange(20) + 30)
    assert (shifted - model(tokens)).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_placement": "post", "n_key_value_heads": 2},
        {"attn_types": ("linear", "global"), "qk_norm": "per_head"},
        {"moe": MixtureOfExperts(n_experts=3, n_experts_per_token=2), "use_sink_logits": True},
    ],
)
def test_without_positions_a_permuted_text_gives_permuted_outputs(options):
    """Bidirectional attention is of sets; with rotary positions the order counts."""
    tokens, order = tokens_of(2, 20), torch.randperm(20, generator=torch.Generator().manual_seed(0))
    model = build(positional_embedding_type="none", attention_dir="bidirectional", **options)
    torch.testing.assert_close(model(tokens[:, order]), model(tokens)[:, order])
    ordered = build(positional_embedding_type="rotary", attention_dir="bidirectional", **options)
    assert (ordered(tokens[:, order]) - ordered(tokens)[:, order]).abs().max() > 0.01


def pattern_by_definition(model: HookedTransformer, cache: Any, layer: int, bias: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(d_head) + bias) over keys up to the query."""
    q, k = cache["q", layer], cache["k", layer].repeat_interleave(4 // model.cfg.n_key_value_heads, dim=2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / model.cfg.d_head**0.5 + bias
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


@torch.no_grad()
def test_alibi_goes_on_beyond_the_training_length():
    """The penalty is slope · distance at any length, and the same weights run at five times the context.

    What they give within it is what they gave before, and the slope alone tells heads that look far from those that
    do not: the mean distance falls as the slope rises, q and k being 0.
    """
    model = build(positional_embedding_type="alibi", n_ctx=16)
    long = HookedTransformer(dataclasses.replace(model.cfg, n_ctx=80)).eval()
    long.load_state_dict(model.state_dict())
    tokens = tokens_of(2, 80)
    logits, cache = long.run_with_cache(tokens)
    torch.testing.assert_close(logits[:, :16], model(tokens[:, :16]))
    distance = torch.arange(80)[:, None] - torch.arange(80)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256], dtype=torch.float64)  # of four heads: Press et al. 2022
    penalty = -slopes[:, None, None] * distance
    for layer in range(2):
        torch.testing.assert_close(cache["pattern", layer], pattern_by_definition(long, cache, layer, penalty))
    for block in long.blocks:
        block.attn.W_Q.zero_()
    pattern = long.run_with_cache(tokens)[1]["pattern", 0][0, :, -1]  # [head, key] of the last query
    mean_distance = (pattern * distance[-1]).sum(-1)
    assert (mean_distance.diff() > 0).all()  # slopes fall from head to head


@torch.no_grad()
def test_interpolated_positions_stay_within_the_trained_range():
    """Position interpolation by 4: position 4 m is what m was, so 64 tokens stand on 0 to 15.75 (Chen et al. 2023)."""
    model = build(positional_embedding_type="rotary", n_ctx=16)
    cfg = dataclasses.replace(model.cfg, n_ctx=64, rope_scaling=RopeScaling(type="linear", factor=4.0))
    long = HookedTransformer(cfg).eval()
    long.load_state_dict(model.state_dict())
    tokens = tokens_of(2, 16)
    torch.testing.assert_close(long(tokens, position_ids=torch.arange(16) * 4), model(tokens))
    assert long(tokens_of(2, 64)).isfinite().all()
    with pytest.raises(ValueError, match="context has 16"):
        model(tokens_of(2, 64))


@torch.no_grad()
def test_the_embedding_scale_keeps_positions_from_drowning_the_tokens():
    """Every sinusoidal position is sqrt(d_model / 2) long, since sin² + cos² = 1; a token drawn with variance
    1 / d_model is about 1 long, and with the scale of sqrt(d_model) it is longer than its position."""
    width = 256
    tokens = tokens_of(4, 50)
    lengths = {}
    for scale in (1.0, width**0.5):
        model = build(d_model=width, embed_scale=scale, positional_embedding_type="sinusoidal")
        _, cache = model.run_with_cache(tokens, names_filter=["hook_embed", "hook_pos_embed"])
        lengths[scale] = cache["hook_embed"].norm(dim=-1)
        torch.testing.assert_close(
            cache["hook_pos_embed"].norm(dim=-1), torch.full((4, 50), (width / 2) ** 0.5, dtype=torch.float64)
        )
    # A χ² of 256 degrees of freedom deviates by sqrt(2 / 256) = 9 %, its root by half of that; of 20 words.
    assert ((lengths[1.0] - 1).abs() < 5 * 0.044).all()
    torch.testing.assert_close(lengths[16.0], 16 * lengths[1.0])
    assert (lengths[1.0] < (width / 2) ** 0.5 / 5).all() and (lengths[16.0] > (width / 2) ** 0.5).all()
    learned = build(d_model=width, embed_scale=width**0.5)
    assert abs(learned.W_pos.norm(dim=-1).mean() - 1) < 0.05


# What a token sees


@torch.no_grad()
def test_a_later_token_changes_no_earlier_output(mechanism):
    """… of a causal model, whatever the mechanism; a bidirectional one is changed everywhere."""
    model, arguments = mechanism.model, dict(mechanism.arguments)
    name = "input" if model.cfg.n_encoder_layers is None else "decoder_input"
    before = mechanism.output()
    arguments[name] = changed_at(arguments[name], 6)
    difference = (mechanism.output(**arguments) - before).abs().amax(-1)  # [batch, pos]
    assert (difference[:, 6:] > 1e-8).all()
    if model.cfg.attention_dir == "causal":
        assert (difference[:, :6] < 1e-12).all()
    else:
        assert (difference[:, :6] > 1e-8).all()


def sees(model: HookedTransformer, length: int, query: int) -> Tensor:
    """bool [length]: whether the gradient of one position's last stream reaches each token's embedding."""
    residual = torch.randn(1, length, model.cfg.d_model, dtype=torch.float64, requires_grad=True)
    last = model(residual, start_at_layer=0, stop_at_layer=model.cfg.n_layers)
    (last[0, query] * torch.randn(model.cfg.d_model, dtype=torch.float64)).sum().backward()
    return (residual.grad[0] != 0).any(-1)


@pytest.mark.parametrize("n_layers", [1, 2, 3])
@pytest.mark.parametrize("window", [1, 4])
def test_windows_stack(n_layers, window):
    """L layers of windows of w keys, the query's own among them, see L · (w − 1) tokens back, and not one more."""
    model = build(n_layers=n_layers, window_size=window, positional_embedding_type="none")
    position = torch.arange(20)
    assert torch.equal(sees(model, 20, query=19), position >= 19 - n_layers * (window - 1))
    both = build(n_layers=n_layers, window_size=window, positional_embedding_type="none", attention_dir="bidirectional")
    assert torch.equal(sees(both, 20, query=10), (position - 10).abs() <= n_layers * (window - 1))


def test_global_tokens_and_global_layers_reach_any_distance():
    """Two global tokens are seen from everywhere; what lies between them and the window is not. One layer that is not
    local sees all that came before."""
    position = torch.arange(20)
    model = build(window_size=3, n_global_tokens=2, positional_embedding_type="none")
    assert torch.equal(sees(model, 20, query=19), (position < 2) | (position >= 19 - 2 * 2))
    mixed = build(window_size=3, attn_types=("local", "global"), positional_embedding_type="none")
    assert sees(mixed, 20, query=19).all()


@torch.no_grad()
def test_a_window_as_long_as_the_text_is_no_window():
    tokens = tokens_of(2, 12)
    torch.testing.assert_close(build(window_size=12)(tokens), build()(tokens))
    assert (build(window_size=11)(tokens) - build()(tokens))[:, -1].abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("positions", ["none", "sinusoidal", "relative"])
def test_cross_attention_reads_the_encoder_and_its_real_tokens_alone(positions):
    """Pads of the encoder's text, on either side and of any content, count for nothing, its words do; the decoder's own
    later words do not."""
    model = build(n_encoder_layers=2, positional_embedding_type=positions)
    source, target = tokens_of(2, 9), tokens_of(2, 7, seed=2)
    expected = model(source, decoder_input=target)
    for side in (0, 1):
        for pad in (0, 5):
            pads = torch.full((2, 4), pad)
            padded = torch.cat((source, pads) if side else (pads, source), dim=1)
            mask = torch.cat(
                (torch.ones(2, 9), torch.zeros(2, 4)) if side else (torch.zeros(2, 4), torch.ones(2, 9)), 1
            )
            torch.testing.assert_close(model(padded, decoder_input=target, attention_mask=mask), expected)
    for position in (0, 8):
        difference = model(changed_at(source, position), decoder_input=target) - expected
        assert (difference.abs().amax(-1) > 1e-6).all()  # every decoder token reads every source token
    difference = (model(source, decoder_input=changed_at(target, 4)) - expected).abs().amax(-1)
    assert (difference[:, :4] < 1e-12).all() and (difference[:, 4:] > 1e-6).all()


@torch.no_grad()
@pytest.mark.parametrize("attn_type", ["global", "linear"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_are_repeated_keys_and_values(attn_type, kv_heads):
    """Multi-query and grouped-query attention equal multi-head attention whose key/value heads are copies."""
    options = {"use_qkv_bias": True, "qk_norm": "per_head", "attn_types": (attn_type,) * 2}
    grouped = build(n_key_value_heads=kv_heads, positional_embedding_type="rotary", **options)
    full = HookedTransformer(dataclasses.replace(grouped.cfg, n_key_value_heads=4)).eval()
    state = {
        name: tensor.repeat_interleave(4 // kv_heads, dim=0) if name.endswith(("W_K", "W_V", "b_K", "b_V")) else tensor
        for name, tensor in grouped.state_dict().items()
    }
    full.load_state_dict(state)
    tokens = tokens_of(2, 20)
    torch.testing.assert_close(grouped(tokens), full(tokens))


# Scores


def scores_of(model: HookedTransformer, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Layer 0's scores [n] of the pairs that are seen, and its pattern's entropy in nats [batch, head, query]."""
    names = ["blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"]
    _, cache = model.run_with_cache(residual, start_at_layer=0, stop_at_layer=1, names_filter=names)
    scores, pattern = (cache[name] for name in names)
    return scores[scores.isfinite()], torch.special.entr(pattern).sum(-1)


@torch.no_grad()
def test_the_scale_keeps_the_variance_of_scores_at_one():
    """q and k of independent entries of variance 1 have q·k of variance d_k; the scale 1 / sqrt(d_k) makes it 1.

    Unscaled, the softmax saturates as d_k grows: entropy falls. Vaswani et al. 2017, section 3.2.1, footnote 4.
    """
    residual = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    entropies: dict[str, list[float]] = {"scaled": [], "unscaled": []}
    for d_head in (16, 64, 256):
        for name, scale, variance in (("scaled", None, 1.0), ("unscaled", 1.0, float(d_head))):
            model = build(
                d_model=64, n_heads=8, d_head=d_head, attn_scale=scale, positional_embedding_type="none",
                attention_dir="bidirectional",
            )  # fmt: skip
            for weight in (model.blocks[0].attn.W_Q, model.blocks[0].attn.W_K):
                torch.nn.init.normal_(weight, std=64**-0.5)  # a normalised stream has entries of variance 1
            scores, entropy = scores_of(model, residual)
            assert abs(scores.var() / variance - 1) < 0.1
            entropies[name].append(float(entropy.mean()))
    assert max(entropies["scaled"]) - min(entropies["scaled"]) < 0.05
    assert entropies["unscaled"][0] > 2 * entropies["unscaled"][1] > 4 * entropies["unscaled"][2]


@torch.no_grad()
def test_temperature_moves_entropy_from_arg_max_to_uniform():
    """Every query's entropy rises with the temperature (strictly, where more than one key is seen)."""
    model = build(positional_embedding_type="none")
    residual = torch.randn(2, 12, 16, dtype=torch.float64)
    entropies = []
    for temperature in (1e-5, 0.1, 0.3, 1.0, 3.0, 10.0, 1e6):
        model.set_attn_temperature(temperature)
        entropies.append(scores_of(model, residual)[1])
    steps = torch.stack(entropies).diff(dim=0)
    assert (steps[..., 1:] > 0).all() and (steps[..., 0] == 0).all()
    assert (entropies[0] < 1e-12).all()  # all on the largest score
    uniform = torch.arange(1, 13, dtype=torch.float64).log()  # over the keys up to the query
    torch.testing.assert_close(entropies[-1], uniform.expand_as(entropies[-1]))


@torch.no_grad()
def test_temperature_divides_scores():
    model = build()
    tokens = tokens_of(2, 12)
    name = "blocks.0.attn.hook_attn_scores"
    before = model.run_with_cache(tokens, names_filter=name)[1][name].tril()
    model.set_attn_temperature(4.0)
    torch.testing.assert_close(model.run_with_cache(tokens, names_filter=name)[1][name].tril() * 4, before)


@torch.no_grad()
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", ["per_head", "across_heads"])
def test_norms_bound_scores_whatever_the_weights(kind, after):
    """RMS-normalised q and k of d dimensions are at most sqrt(d) · max|gain| long, so their product is bounded by
    scale · d · max|gain_q| · max|gain_k| (Cauchy–Schwarz); growing weights change nothing. Without the norms scores
    grow in proportion to W_Q."""
    options: dict[str, Any] = {"positional_embedding_type": "rotary", "normalization_type": "RMS"}
    normed, plain = build(qk_norm=kind, qk_norm_after_rotary=after, **options), build(**options)
    gains = torch.rand(2, 8 if kind == "per_head" else 32, dtype=torch.float64) + 0.5
    normed.blocks[0].attn.q_norm.w.copy_(gains[0])
    normed.blocks[0].attn.k_norm.w.copy_(gains[1])
    bound = 8**-0.5 * gains.shape[1] * float(gains[0].max() * gains[1].max())
    residual = torch.randn(2, 12, 16, dtype=torch.float64)
    largest: dict[str, list[float]] = {"normed": [], "plain": []}
    for _ in range(3):
        for name, model in (("normed", normed), ("plain", plain)):
            largest[name].append(float(scores_of(model, residual)[0].abs().max()))
            model.blocks[0].attn.W_Q.mul_(100)
    assert max(largest["normed"]) <= bound
    assert largest["normed"][1:] == pytest.approx(largest["normed"][:1] * 2, rel=1e-3)
    assert largest["plain"][1:] == pytest.approx([100 * largest["plain"][0], 10_000 * largest["plain"][0]])
    assert largest["plain"][-1] > bound


@torch.no_grad()
def test_a_soft_cap_bounds_scores():
    """cap · tanh(score / cap), however large the weights."""
    residual = torch.randn(2, 12, 16, dtype=torch.float64)
    plain, capped = build(), build(attn_scores_soft_cap=3.0)
    scores, bounded = scores_of(plain, residual)[0], scores_of(capped, residual)[0]
    torch.testing.assert_close(bounded, 3 * torch.tanh(scores / 3))
    capped.blocks[0].attn.W_Q.mul_(1000)
    assert scores_of(capped, residual)[0].abs().max() <= 3.0


@torch.no_grad()
def test_a_sink_logit_takes_its_share():
    """With a score s for nothing, a query's weights sum to Σ exp(scores) / (exp(s) + Σ exp(scores))."""
    model, plain = build(use_sink_logits=True), build()
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "sink" not in name})
    sinks = torch.tensor([-20.0, 0.0, 1.0, 20.0], dtype=torch.float64)
    model.blocks[0].attn.sink_logits.copy_(sinks)
    _, cache = model.run_with_cache(tokens_of(2, 12))
    lse = cache["attn_scores", 0].logsumexp(-1)  # [batch, head, query]
    expected = torch.sigmoid(lse - sinks[None, :, None])
    mass = cache["pattern", 0].sum(-1)
    torch.testing.assert_close(mass, expected)
    assert (mass[:, 0] > 0.999).all() and (mass[:, 3] < 0.001).all()
    shares = cache["pattern", 0] / mass[..., None]
    torch.testing.assert_close(shares, plain.run_with_cache(tokens_of(2, 12))[1]["pattern", 0])


# Other kinds of layers


@torch.no_grad()
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_linear_attention_is_its_quadratic_form(direction):
    """A model that materialises every pattern gives the logits of the one that carries a state, and each pattern is
    φ(q)·φ(k) over its sum (Katharopoulos et al. 2020)."""
    model = build(attn_types=("linear", "linear"), attention_dir=direction, n_key_value_heads=2)
    tokens = tokens_of(2, 50)
    names = [f"blocks.{layer}.attn.{hook}" for layer in range(2) for hook in ("hook_pattern", "hook_q", "hook_k")]
    logits, cache = model.run_with_cache(tokens, names_filter=names)
    torch.testing.assert_close(model(tokens), logits)
    for layer in range(2):
        q, k = feature_map(cache["q", layer]), feature_map(cache["k", layer]).repeat_interleave(2, dim=2)
        products = torch.einsum("bqhe,bkhe->bhqk", q, k)
        products = products.tril() if direction == "causal" else products
        torch.testing.assert_close(cache["pattern", layer], products / products.sum(-1, keepdim=True))


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 2, 4])
def test_experts_are_the_dense_sum_of_exactly_k(k):
    """hook_mlp_out is Σ over all experts of weight · expert(x), where all weights but the k largest logits' are 0."""
    model = build(moe=MixtureOfExperts(n_experts=4, n_experts_per_token=k, d_expert=6), gated_mlp=True, act_fn="silu")
    logits, cache = model.run_with_cache(tokens_of(2, 12))
    for layer, block in enumerate(model.blocks):
        prefix, mlp = f"blocks.{layer}", block.mlp
        x = block.ln2(cache[f"{prefix}.hook_resid_mid"])
        router = x @ mlp.W_router
        chosen = router >= router.topk(k).values[..., -1:]
        assert (chosen.sum(-1) == k).all()
        assert cache[f"{prefix}.mlp.hook_expert_indices"].sort(-1).values.diff().ne(0).all()
        weights = router.masked_fill(~chosen, -torch.inf).softmax(-1)  # [batch, pos, expert]
        hidden = ACTIVATIONS["silu"](torch.einsum("bpd,edf->bpef", x, mlp.W_gate))
        hidden = hidden * torch.einsum("bpd,edf->bpef", x, mlp.W_in)
        dense = torch.einsum("bpe,bpef,efd->bpd", weights, hidden, mlp.W_out)
        torch.testing.assert_close(cache[f"{prefix}.hook_mlp_out"], dense)


@torch.no_grad()
def test_one_expert_is_a_plain_mlp():
    single = build(moe=MixtureOfExperts(n_experts=1, n_experts_per_token=1), use_mlp_bias=True)
    plain = HookedTransformer(dataclasses.replace(single.cfg, moe=None)).eval()
    state = {
        name: tensor[0] if ".mlp." in name else tensor
        for name, tensor in single.state_dict().items()
        if "W_router" not in name
    }
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(tokens_of(2, 12)), single(tokens_of(2, 12)))


# Gradients at initialisation


def last_layer(placement: str, n_layers: int, seed: int) -> tuple[float, float]:
    """The norm of the loss's gradient on the last layer's W_out, and the root mean square of the last stream."""
    torch.manual_seed(seed)
    cfg = TransformerConfig(
        n_layers=n_layers, d_model=64, n_heads=4, d_head=16, d_mlp=256, d_vocab=50, n_ctx=32, act_fn="relu",
        init_mode="xavier", norm_placement=placement, embed_scale=8.0, positional_embedding_type="sinusoidal",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    tokens = torch.randint(0, 50, (4, 24))
    model(tokens, return_type="loss").backward()
    stream = model(tokens, stop_at_layer=n_layers).detach()
    return float(model.blocks[-1].mlp.W_out.grad.norm()), float(stream.square().mean().sqrt())


def test_depth_shrinks_the_last_gradients_of_pre_norm_blocks_alone():
    """At initialisation the gradient on the last layer's feed-forward weights is O(d sqrt(ln d)) with post-norm blocks,
    whatever the depth L, and O(d sqrt(ln d / L)) with pre-norm ones: why the former need a warm-up.

    The cause: pre-norm blocks add to a stream whose variance grows with L, and the final norm divides by its length.
    Post-norm blocks keep it at 1. Xiong et al. 2020, theorem 1 and lemma 2. Between 2 and 16 layers the bound falls by
    sqrt(8) = 2.8; the embedding, which is as large as the first few layers' sum, makes that about 2.
    """
    measured = {
        (placement, n_layers): [last_layer(placement, n_layers, seed) for seed in range(3)]
        for placement in ("pre", "post")
        for n_layers in (2, 16)
    }
    mean = {key: torch.tensor(values).mean(0) for key, values in measured.items()}  # gradient norm, stream's size
    (pre_gradient, pre_stream), (post_gradient, post_stream) = (
        mean[placement, 16] / mean[placement, 2] for placement in ("pre", "post")
    )
    assert 8**-0.5 < pre_gradient < 0.6
    assert abs(pre_gradient * pre_stream - 1) < 0.25  # it shrinks as the stream grows
    assert 0.7 < post_gradient < 1.5
    assert abs(post_stream - 1) < 1e-3
    assert mean["post", 16][0] > 3 * mean["pre", 16][0]
