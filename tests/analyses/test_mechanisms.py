"""Analyses of models whose layers differ: windows, both directions, biases on the scores, learned sinks, experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedEncoderDecoder, HookedTransformer, MixtureOfExperts, RopeScaling, TransformerConfig
from workbench.analyses import attention_sinks, head_pattern, head_statistics, induction_heads
from workbench.analyses.attention.scores import SCORES
from workbench.analyses.interventions.edits import mean_outputs, replace_head, together
from workbench.analyses.interventions.metrics import losses_of
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Sequences

N, WINDOW = 23, 7
SIZES: dict[str, Any] = dict(n_layers=2, d_model=24, n_heads=4, d_head=6, d_mlp=16, d_vocab=30, n_ctx=64)
LOCAL: dict[str, Any] = dict(attn_types=("local", "global"), window_size=WINDOW)
ROTARY: dict[str, Any] = dict(positional_embedding_type="rotary")
ENCODER: dict[str, Any] = dict(attention_dir="bidirectional")

MECHANISMS: dict[str, dict[str, Any]] = {
    "window": LOCAL,
    "window and global tokens": LOCAL | {"n_global_tokens": 3},
    "rotary base of local layers": LOCAL | ROTARY | {"rotary_base_local": 100.0},
    "rotary, scaled, adjacent pairs": ROTARY
    | {"rotary_dim": 4, "rotary_adjacent_pairs": True, "rope_scaling": RopeScaling(type="linear", factor=2.0)},
    "encoder": ENCODER,
    "encoder with windows": ENCODER | LOCAL | {"n_global_tokens": 2, "positional_embedding_type": "sinusoidal"},
    "ALiBi": {"positional_embedding_type": "alibi"},
    "ALiBi in an encoder": ENCODER | {"positional_embedding_type": "alibi", "alibi_slopes": (0.5, 0.1, 0.02, 0.3)},
    "relative bias": {"positional_embedding_type": "relative", "n_relative_buckets": 8, "relative_max_distance": 12},
    "relative bias in an encoder": ENCODER | {"positional_embedding_type": "relative", "n_relative_buckets": 8},
    "soft cap and temperature": {"attn_scores_soft_cap": 1.5, "attn_temperature": 0.4},
    "QK-norm per head": ROTARY | {"qk_norm": "per_head", "n_key_value_heads": 2},
    "QK-norm across heads, after rotation": ROTARY | {"qk_norm": "across_heads", "qk_norm_after_rotary": True},
    "learned sinks": {"use_sink_logits": True},
    "no positions, parallel": {"positional_embedding_type": "none", "parallel_attn_mlp": True},
    "much at once": LOCAL
    | {"n_global_tokens": 1, "positional_embedding_type": "relative", "n_relative_buckets": 6, "use_sink_logits": True,
       "attn_scores_soft_cap": 3.0, "n_key_value_heads": 2, "norm_placement": "sandwich", "normalization_type": "RMS"},
}  # fmt: skip


def build(**options: Any) -> HookedTransformer:
    """A float64 model with attention sharp enough for a wrong score to show."""
    model = HookedTransformer(TransformerConfig(**(SIZES | options))).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink_logits" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.6)
    return model


def naive_mask(n: int, *, causal: bool, window: int | None = None, n_global: int = 0) -> np.ndarray:
    """bool [query, key], by the definition."""
    return np.array(
        [
            [(j <= i or not causal) and (window is None or abs(i - j) < window or j < n_global) for j in range(n)]
            for i in range(n)
        ]
    )


def masks_of(cfg: TransformerConfig, n: int) -> list[np.ndarray]:
    causal = cfg.attention_dir == "causal"
    return [
        naive_mask(n, causal=causal, window=cfg.window_size if kind == "local" else None, n_global=cfg.n_global_tokens)
        for kind in cfg.layer_types
    ]


def random_tokens(*lengths: int, d_vocab: int = 30, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, d_vocab, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_pattern_of_one_head_is_the_models_own(name: str) -> None:
    model, (tokens,) = build(**MECHANISMS[name]), random_tokens(N)
    _, cache = model.run_with_cache(tokens)
    for layer, visible in enumerate(masks_of(model.cfg, N)):
        patterns = cache[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
        head = 3 - layer
        whole, exact = patterns[head], head_pattern(model, tokens, layer, head)
        np.testing.assert_allclose(exact["weight"], np.where(visible, whole, np.nan), atol=1e-12)
        assert ("virtual_mass" in exact) == model.cfg.use_sink_logits
        virtual = 1 - whole.sum(axis=1)
        weights = np.concatenate((whole, virtual[:, None].clip(min=0)), axis=1)
        entropy = -(weights * np.log(np.where(weights > 1e-12, weights, 1))).sum(axis=1)
        np.testing.assert_allclose(exact["entropy"], entropy, atol=1e-8)
        if model.cfg.use_sink_logits:
            np.testing.assert_allclose(exact["virtual_mass"], virtual, atol=1e-10)
            assert "virtual sink" in exact.summary()
        queries, keys = (9, 20), (4, 21)
        part = head_pattern(model, tokens, layer, head, queries=queries, keys=keys)
        rows = slice(*queries), slice(*keys)
        np.testing.assert_allclose(part["weight"], np.where(visible, whole, np.nan)[rows], atol=1e-12)
        np.testing.assert_allclose(part["received"], whole[rows].sum(axis=0), atol=1e-10)
        seen = visible[slice(*queries)].any(axis=0).nonzero()[0]
        assert part.settings["seen_keys"] == [seen[0], seen[-1] + 1]
        for pooling in ("max", "mean"):
            pooled = head_pattern(model, tokens, layer, head, queries=queries, max_cells=5, pooling=pooling)
            height, width = pooled.settings["block"]
            expected = np.full(pooled["weight"].shape, np.nan)
            for r in range(expected.shape[0]):
                for c in range(expected.shape[1]):
                    first = queries[0] + r * height
                    block = (
                        slice(first, min(first + height, queries[1])),
                        slice(c * width, min((c + 1) * width, N)),
                    )
                    if (inside := whole[block][visible[block]]).size:
                        expected[r, c] = inside.max() if pooling == "max" else inside.mean()
            np.testing.assert_allclose(pooled["weight"], expected, atol=1e-10)


def test_where_a_window_hides_what_is_shown_the_summary_says_so() -> None:
    model, (tokens,) = build(**LOCAL), random_tokens(N)
    hidden = head_pattern(model, tokens, 0, 0, queries=(15, 20), keys=(0, 5))
    assert "the keys shown, which the mask hides from them" in hidden.summary()
    assert "Most attended: " in head_pattern(model, tokens, 0, 0, queries=(15, 20), keys=(9, 20)).summary()
    assert (
        "Most attended of the keys shown"
        in head_pattern(model, tokens, 0, 0, queries=(15, 20), keys=(10, 20)).summary()
    )
    encoder = build(**ENCODER)
    assert "of the keys shown" in head_pattern(encoder, tokens, 0, 0, queries=(3, 9), keys=(0, 9)).summary()
    assert "Most attended: " in head_pattern(encoder, tokens, 0, 0, queries=(3, 9)).summary()


# Against transformers


def gemma2() -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=30, max_position_embeddings=64, sliding_window=20, attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0, query_pre_attn_scalar=8, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config), {"causal": True, "windows": [20, None, 20]}


def gpt_oss() -> tuple[Any, dict[str, Any]]:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=30, max_position_embeddings=64, sliding_window=WINDOW, num_local_experts=3,
        num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"], initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=0,
    )  # fmt: skip
    return GptOssForCausalLM(config), {"causal": True, "windows": [WINDOW, None], "sinks": True}


def bloom() -> tuple[Any, dict[str, Any]]:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=30, initializer_range=0.3, pad_token_id=0)
    return BloomForCausalLM(config), {"causal": True, "windows": [None, None]}


def bert() -> tuple[Any, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=30,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return BertForMaskedLM(config), {"causal": False, "windows": [None, None]}


ARCHITECTURES: Mapping[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "gemma2": gemma2, "gpt_oss": gpt_oss, "bloom": bloom, "bert": bert,
}  # fmt: skip


class Reference:
    """A tiny transformers model, ours with its weights, and transformers' own attentions.

    In float64 as far as transformers goes: some of its softmaxes and angles are float32 all the same, all its experts.
    """

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        model, about = ARCHITECTURES[name]()
        self.causal, self.windows = about["causal"], about["windows"]
        self.has_sinks = about.get("sinks", False)
        dtype, self.tolerance = (torch.float32, 2e-6) if self.has_sinks else (torch.float64, 2e-7)
        self.model = model.eval().to(dtype)
        self.model.set_attn_implementation("eager")
        with torch.no_grad():
            for parameter_name, parameter in self.model.named_parameters():
                if "sinks" in parameter_name:
                    parameter.copy_(torch.linspace(-1, 2, len(parameter)))
        self.ours = HookedTransformer.from_pretrained(self.model, dtype=dtype)

    @torch.no_grad()
    def patterns(self, tokens: Tensor) -> np.ndarray:
        """[layer, head, n, n] of one sequence."""
        return torch.stack(self.model(tokens[None], output_attentions=True).attentions)[:, 0].double().numpy()

    def masks(self, n: int) -> list[np.ndarray]:
        return [naive_mask(n, causal=self.causal, window=window) for window in self.windows]


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.param)


def padded(rows: Sequence[Tensor], side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    tokens, mask = torch.full((len(rows), width), 3), torch.zeros(len(rows), width)
    for place, row in enumerate(rows):
        span = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[place, span], mask[place, span] = row, 1
    return tokens, mask


def rows_of(
    pattern: np.ndarray, visible: np.ndarray, tokens: list[int], sink_keys: int, has_sink: bool
) -> dict[str, list[float]]:
    """Score → its value in every row that counts, of one head [n, n], by the definitions."""
    found: dict[str, list[float]] = {name: [] for name in SCORES}
    for i, p in enumerate(pattern):
        virtual = [1 - p.sum()] if has_sink else []
        entropy = -sum(weight * np.log(weight) for weight in [*p, *virtual] if weight > 0)
        n_columns = int(visible[i].sum()) + len(virtual)
        found["entropy"].append(entropy)
        if n_columns > 1:
            found["relative_entropy"].append(entropy / np.log(n_columns))
        found["max_weight"].append(p.max())
        found["mean_distance"].append(sum(weight * abs(i - j) for j, weight in enumerate(p)))
        if visible[i, :sink_keys].any():
            found["sink_mass"].append(p[:sink_keys].sum())
        found["virtual_sink_mass"] += virtual
        found["self_weight"].append(p[i])
        if i > 0:
            found["previous_token"].append(p[i - 1])
        targets = [j for j in range(1, i) if tokens[j - 1] == tokens[i]]
        if targets:
            found["prefix_matching"].append(p[targets].sum())
            found["prefix_matching_latest"].append(p[targets[-1]])
        found["prefix_matching_per_entry"] += [p[j] for j in targets]
        earlier = [j for j in range(i) if tokens[j] == tokens[i]]
        if earlier:
            found["duplicate_token"].append(p[earlier].sum())
    received = pattern.sum(axis=0)
    found["key_concentration"].append(((received / received.sum()) ** 2).sum())
    return found


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_score_is_what_its_definition_gives(reference: Reference, side: str) -> None:
    rows, sink_keys, tolerance = random_tokens(31, 12, 1, 20, d_vocab=9), 2, reference.tolerance
    tokens, mask = padded(rows, side)
    found = head_statistics(reference.ours, tokens, attention_mask=mask, sink_keys=sink_keys)
    assert ("virtual_sink_mass" in found) == reference.has_sinks
    patterns = [reference.patterns(row) for row in rows]
    n_rows = sum(map(len, rows)) * len(reference.windows)
    counted = dict.fromkeys(SCORES, 0)
    for layer in range(len(reference.windows)):
        for head in range(patterns[0].shape[1]):
            parts = [
                rows_of(p[layer, head], reference.masks(len(row))[layer], row.tolist(), sink_keys, reference.has_sinks)
                for p, row in zip(patterns, rows, strict=True)
            ]
            for name in (name for name in SCORES if name in found):
                values = [value for part in parts for value in part[name]]
                assert found[name][layer, head] == pytest.approx(
                    np.mean(values), rel=10 * reference.tolerance, abs=reference.tolerance
                ), name
                counted[name] += len(values) if head == 0 else 0
    for name in {"relative_entropy", "sink_mass", "previous_token", "prefix_matching", "duplicate_token"}:
        assert found.coverage[name] == pytest.approx(counted[name] / n_rows), name
    longest = reference.masks(31)
    np.testing.assert_array_equal(found["n_other_queries"], [visible.sum(axis=0) - 1 for visible in longest])
    for key in range(31):
        means = [
            [
                pattern[layer, :, visible[:, key], key].mean(axis=0)
                for layer, visible in enumerate(reference.masks(len(row)))
            ]
            for pattern, row in zip(patterns, rows, strict=True)
            if key < len(row)
        ]
        np.testing.assert_allclose(found["received"][..., key], np.mean(means, axis=0), atol=tolerance)
    assert "–" not in found.summary() and found.figure("map", score="relative_entropy")


def test_sinks_are_what_their_definitions_give(reference: Reference) -> None:
    n_tokens, sink_keys, epsilon, tolerance = 40, 3, 0.05, reference.tolerance
    rows = random_tokens(45, 21, 33, seed=1)
    tokens, mask = padded(rows, "right")
    found = attention_sinks(
        reference.ours, tokens, attention_mask=mask, epsilon=epsilon, n_tokens=n_tokens, sink_keys=sink_keys
    )
    n_heads = reference.ours.cfg.n_heads
    alphas = np.full((len(rows), len(reference.windows), n_heads, n_tokens), np.nan)
    masses: list[list[list[float]]] = [[[] for _ in range(n_heads)] for _ in reference.windows]
    virtual = np.zeros((len(reference.windows), n_heads))
    for place, row in enumerate(rows):
        row = row[:n_tokens]
        patterns, masks = reference.patterns(row), reference.masks(len(row))
        for layer, visible in enumerate(masks):
            for head in range(n_heads):
                pattern = patterns[layer, head]
                for key in range(len(row)):
                    if sum(visible[i, key] for i in range(len(row)) if i != key) >= 16:
                        alphas[place, layer, head, key] = pattern[visible[:, key], key].mean()
                masses[layer][head] += [
                    pattern[i, :sink_keys].sum() for i in range(len(row)) if visible[i, :sink_keys].any()
                ]
                virtual[layer, head] += (1 - pattern.sum(axis=1)).sum()
    above = np.where(np.isnan(alphas), np.nan, alphas > epsilon)
    known = np.isfinite(above).any(axis=(0, 1, 2))
    assert np.isnan(found["sink_rate"][~known]).all()
    np.testing.assert_allclose(found["sink_rate"][known], np.nanmean(above[..., known], axis=(0, 1, 2)), atol=1e-12)
    n_keys = sum(min(len(row), n_tokens) for row in rows) * len(reference.windows)
    assert found.coverage["sink_rate"] == pytest.approx(np.isfinite(alphas[:, :, 0]).sum() / n_keys)
    evaluated = np.isfinite(alphas).any(axis=0)
    np.testing.assert_array_equal(np.isfinite(found["alpha"]), evaluated)
    np.testing.assert_allclose(found["alpha"][evaluated], np.nanmean(alphas[:, evaluated], axis=0), atol=tolerance)
    for layer, heads in enumerate(masses):
        np.testing.assert_allclose(found["sink_mass"][layer], [np.mean(mass) for mass in heads], atol=tolerance)
    assert ("virtual_sink_mass" in found) == reference.has_sinks
    if reference.has_sinks:
        n = sum(min(len(row), n_tokens) for row in rows)
        np.testing.assert_allclose(found["virtual_sink_mass"], virtual / n, atol=tolerance)
        assert "on the learned sink" in found.summary()
    assert ("; none in layer 0." in found.summary()) == (WINDOW in reference.windows)  # too short for 16 others
    for kind in found.figure_kinds:
        found.figure(kind, captioned=True)


def test_global_tokens_are_evaluated_where_a_short_window_leaves_no_other_key() -> None:
    model, (tokens,) = build(window_size=WINDOW, n_global_tokens=2), random_tokens(30)
    found = attention_sinks(model, tokens)
    assert np.isfinite(found["sink_rate"]).nonzero()[0].tolist() == [0, 1]
    assert "head_statistics" in refusal(lambda: attention_sinks(build(window_size=WINDOW), tokens))


def test_rotations_that_depend_on_the_length_are_those_of_each_sequence_alone() -> None:
    model = build(**ROTARY, rope_scaling=RopeScaling(type="dynamic", factor=4.0, original_context=8))
    rows = random_tokens(20, 40, 24)
    tokens, mask = padded(rows, "right")
    together, alone = (
        head_statistics(model, tokens, attention_mask=mask), [head_statistics(model, row) for row in rows]
    )  # fmt: skip
    entropy = sum(found["entropy"] * len(row) for found, row in zip(alone, rows, strict=True)) / 84
    np.testing.assert_allclose(together["entropy"], entropy, atol=1e-10)
    sinks = attention_sinks(model, tokens, attention_mask=mask)["alpha"]
    alphas = [attention_sinks(model, row)["alpha"][..., 0] for row in rows]
    np.testing.assert_allclose(sinks[..., 0], np.mean(alphas, axis=0), atol=1e-10)


def test_a_layer_that_no_query_counts_in_has_no_score_and_spoils_none() -> None:
    model, rows = build(attn_types=("local", "global"), window_size=1), torch.stack(random_tokens(*[12] * 20))
    found = head_statistics(model, rows)
    assert np.isnan(found["relative_entropy"][0]).all() and np.isfinite(found["relative_entropy"][1]).all()
    assert found.coverage["relative_entropy"] == pytest.approx(11 / 24)
    assert (found["relative_entropy_low"][1] < found["relative_entropy"][1]).all()
    assert "nan" not in found.summary()


# Refusals


def refusal(run: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        run()
    return str(caught.value)


def test_what_has_no_numbers_is_refused_with_a_way_out() -> None:
    tokens = random_tokens(30)[0]
    linear = build(attn_types=("global", "linear"))
    for run in (head_statistics, attention_sinks):
        assert "layer 1 of custom has linear attention" in refusal(lambda run=run: run(linear, tokens))
    assert "layers 0" in refusal(lambda: head_pattern(linear, tokens, 1, 0))
    assert "linear attention" in refusal(lambda: induction_heads(linear, length=8))
    assert np.isfinite(head_pattern(linear, tokens, 0, 0)["entropy"]).all()
    cfg = TransformerConfig(**SIZES, n_encoder_layers=1, positional_embedding_type="sinusoidal")
    both = HookedEncoderDecoder(cfg).eval()
    for run in (
        lambda: head_statistics(both, tokens), lambda: attention_sinks(both, tokens),
        lambda: head_pattern(both, tokens, 0, 0), lambda: induction_heads(both, length=8),
    ):  # fmt: skip
        assert "encoder–decoder" in (message := refusal(run)) and "collect_from" in message
    assert "bidirectional" in refusal(lambda: induction_heads(build(**ENCODER), length=8))
    assert "no language-model head" in refusal(lambda: induction_heads(build(use_unembed=False), length=8))
    assert np.isfinite(head_statistics(build(use_unembed=False), tokens)["entropy"]).all()
    training = build(dropout=0.1).train()
    assert "model.eval()" in refusal(lambda: head_statistics(training, tokens))


def test_a_bridge_whose_attention_is_not_plainly_causal_is_refused() -> None:
    class Bridge:
        """What analyses see of a model that gives only its patterns and does not say what its mask is."""

        def __init__(self, model: HookedTransformer) -> None:
            self.cfg, self.run_with_cache = TransformerConfig(**SIZES), model.run_with_cache

    (tokens,) = random_tokens(N)
    for options, message in (
        (LOCAL, "layer 0 has queries that do not see the first token"),
        (ENCODER, "queries that attend to later tokens"),
        ({"use_sink_logits": True}, "weights that do not sum to 1"),
    ):
        bridge = Bridge(build(**options))
        assert message in refusal(lambda bridge=bridge: head_statistics(bridge, tokens))
        assert message in refusal(lambda bridge=bridge: head_pattern(bridge, tokens, 0, 0))


# Ablations


@pytest.mark.parametrize(
    "options",
    [
        LOCAL
        | {"norm_placement": "sandwich", "normalization_type": "RMS", "norm_gain_plus_one": True, "gated_mlp": True,
           "attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 1.5, "tie_word_embeddings": True, "embed_scale": 4.9},
        {"positional_embedding_type": "alibi", "use_embed_norm": True, "logit_scale": 0.3},
        ROTARY | {"moe": MixtureOfExperts(n_experts=4, n_experts_per_token=2, d_expert=8), "use_sink_logits": True},
        {"parallel_attn_mlp": True, "use_mlm_head": True},
    ],
    ids=["like Gemma 2", "ALiBi", "experts", "parallel, dense head"],
)  # fmt: skip
def test_losses_under_ablation_are_those_of_a_hook(options: dict[str, Any]) -> None:
    model, tokens = build(**options), torch.stack(random_tokens(N, N, N))
    rows = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    rows[:, 0] = False
    others, name = Sequences.read(model, torch.stack(random_tokens(N, N, seed=5))), "blocks.0.attn.hook_z"
    mean = mean_outputs(model, others, [name], by="position")[name][:, 1]
    ablations = [
        Intervention(), replace_head(1, 2), replace_head(0, 1, mean),
        together([replace_head(0, 0), replace_head(1, 3)], "two"),
    ]  # fmt: skip
    metric, counted = losses_of(tokens, rows)
    found = measure(model, Sequences.read(model, tokens), ablations, metric)
    for ablation, losses in zip(ablations, found, strict=True):
        expected = model.run_with_hooks(
            tokens, return_type="loss", loss_per_token=True, fwd_hooks=list(ablation.edits.items())
        )
        np.testing.assert_allclose(losses[counted], expected[rows[:, 1:]].detach(), atol=1e-9)
    assert found[:, counted].unique().numel() > 3 * int(rows.sum())
