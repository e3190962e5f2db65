from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig, center_unembed, fold_layer_norm
from workbench.analyses import copying_scores, load_result, repeated_random_tokens

LENGTH = 20


def random_weights(**options: Any) -> HookedTransformer:
    """Grouped queries, and gains and biases of norms that are not 1 and 0, in float64."""
    sizes: dict[str, Any] = dict(
        n_layers=2, d_model=24, n_heads=4, n_key_value_heads=2, d_head=6, d_mlp=32, d_vocab=40, n_ctx=64
    )
    model = HookedTransformer(TransformerConfig(**(sizes | options))).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if name.endswith(".w") else 0.3 * noise)
    return model


KINDS = [
    {"normalization_type": "LN"},
    {"normalization_type": "RMS", "positional_embedding_type": "rotary", "tie_word_embeddings": True},
    {"normalization_type": "RMS", "norm_placement": "sandwich", "embed_scale": 5.0, "logit_scale": 0.5},
    {"normalization_type": "LN", "use_embed_norm": True, "positional_embedding_type": "alibi"},
]


def test_a_perfect_induction_head_copies(hand_built_model: Callable[..., HookedTransformer]) -> None:
    model = hand_built_model(LENGTH)
    found = copying_scores(model, length=LENGTH, n_sequences=20)
    # L1H0 maps each token to 20 × itself: a multiple of the identity, of which the mean is taken off the logits.
    assert found["eigenvalues"][1, 0] == pytest.approx(1.0) == found["eigenvalues_of_weights"][1, 0]
    tokens = repeated_random_tokens(model, length=LENGTH, n_sequences=20).tokens
    _, cache = model.run_with_cache(tokens)
    read, final = cache["blocks.1.ln1.hook_scale"][..., 0], cache["ln_final.hook_scale"][..., 0]
    rows = torch.arange(LENGTH, 2 * LENGTH)
    by_hand = 20 / (read[:, rows - LENGTH + 1] * final[:, rows]) * (1 - 1 / 60)
    assert found["in_situ"][1, 0] == pytest.approx(float(by_hand.mean()), rel=1e-9)
    assert found["in_situ_low"][1, 0] <= found["in_situ"][1, 0] <= found["in_situ_high"][1, 0]
    assert found["top_share"][1, 0] == pytest.approx(1.0) == found["weight"][1, 0]
    assert found.top(1) == [(1, 0)]
    # L1H3 attends to the same tokens and writes nothing.
    assert found["in_situ"][1, 3] == 0.0 == found["top_share"][1, 3] and np.isnan(found["eigenvalues"][1, 3])


def test_a_head_that_takes_away_what_it_attends_to_is_negative(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    found = copying_scores(hand_built_model(LENGTH, strength=-20.0), length=LENGTH, n_sequences=2)
    assert found["eigenvalues"][1, 0] == pytest.approx(-1.0) and found["in_situ"][1, 0] < -10
    assert found["top_share"][1, 0] == pytest.approx(0.0, abs=1e-12)
    assert "Lowest gain: L1H0" in found.summary() and "in_situ_low" not in found


@pytest.mark.parametrize("kind", KINDS, ids=["LN", "tied", "sandwich", "embed norm"])
def test_gain_and_share_are_those_of_a_naive_loop(kind: dict[str, Any]) -> None:
    model = random_weights(**kind)
    found = copying_scores(model, length=10, n_sequences=2, n_copies=3, seed=5)
    prompts = repeated_random_tokens(model, length=10, n_sequences=2, n_copies=3, seed=5)
    _, cache = model.run_with_cache(prompts.tokens)
    nothing = model.to_logits(torch.zeros(1, 24, dtype=torch.float64)).detach()
    for layer, head in np.ndindex(2, 4):
        gains, promoted, weight = [], 0.0, 0.0
        for b in range(2):
            for i in range(10, 30):
                z = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
                z[0, 0, head] = cache[f"blocks.{layer}.attn.hook_z"][b, i, head]
                block = model.blocks[layer]
                out = torch.einsum("bphe,hed->bpd", z, block.attn.W_O)[0, 0]
                if hasattr(block, "ln1_post"):
                    out = out / cache[f"blocks.{layer}.ln1_post.hook_scale"][b, i] * block.ln1_post.w
                # The unembedding reads a stream of mean square 1 as it is: scale by hand, and undo the norm's own.
                out = out - out.mean() if model.ln_final.centred else out
                own = (out.square().mean() + model.cfg.eps).sqrt()
                logits = (model.to_logits(out[None]) - nothing)[0] * own / cache["ln_final.hook_scale"][b, i]
                logits = logits - logits.mean()
                pattern = cache[f"blocks.{layer}.attn.hook_pattern"][b, head, i]
                of_tokens = logits[prompts.tokens[b]].detach()
                gains.append(float(pattern @ of_tokens))
                best = set(logits.topk(5).indices.tolist())
                promoted += sum(float(w) for w, t in zip(pattern, prompts.tokens[b].tolist(), strict=True) if t in best)
                weight += float(pattern.sum())
        assert found["in_situ"][layer, head] == pytest.approx(np.mean(gains), abs=1e-9)
        assert found["top_share"][layer, head] == pytest.approx(promoted / weight, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS, ids=["LN", "tied", "sandwich", "embed norm"])
def test_eigenvalues_are_those_of_the_whole_map_between_tokens(kind: dict[str, Any]) -> None:
    model = random_weights(**kind)
    found = copying_scores(model, length=8, n_sequences=1)

    def score(full: np.ndarray) -> float:
        values = np.linalg.eigvals(full)
        return float(values.real.sum() / np.abs(values).sum())

    W_E, W_U = model.W_E.detach().numpy(), model.W_U.detach().numpy()
    centre = np.eye(24) - 1 / 24 if model.cfg.normalization_type == "LN" else np.eye(24)
    gain = lambda norm: np.diag(norm.gain.detach().numpy())  # noqa: E731
    embedded = W_E @ centre @ gain(model.ln_embed) if model.cfg.use_embed_norm else W_E
    for layer, head in np.ndindex(2, 4):
        block = model.blocks[layer]
        W_V, W_O = block.attn.W_V[head // 2].detach().numpy(), block.attn.W_O[head].detach().numpy()
        written = W_V @ W_O @ gain(block.ln1_post) if hasattr(block, "ln1_post") else W_V @ W_O
        full = embedded @ centre @ gain(block.ln1) @ written @ centre @ gain(model.ln_final) @ W_U
        full = full - full.mean(axis=1, keepdims=True)
        assert found["eigenvalues"][layer, head] == pytest.approx(score(full), abs=1e-6)
        assert found["eigenvalues_of_weights"][layer, head] == pytest.approx(score(W_E @ W_V @ W_O @ W_U), abs=1e-6)


def test_folded_and_centred_weights_have_the_scores_of_the_model_as_it_is() -> None:
    model = random_weights(normalization_type="LN")
    found = copying_scores(model, length=8, n_sequences=2)
    processed = copying_scores(center_unembed(fold_layer_norm(model)), length=8, n_sequences=2)
    for name in ("eigenvalues", "in_situ", "top_share"):
        np.testing.assert_allclose(processed[name], found[name], atol=1e-9)
    np.testing.assert_allclose(processed["eigenvalues_of_weights"], found["eigenvalues"], atol=1e-9)
    assert np.abs(found["eigenvalues_of_weights"] - found["eigenvalues"]).max() > 0.05  # neither is without effect


def test_random_weights_promote_what_they_attend_to_no_more_than_chance(random_model: HookedTransformer) -> None:
    found = copying_scores(random_model, length=16, n_sequences=20)
    assert np.abs(found["in_situ"]).max() < 0.2
    assert found["top_share"].max() < 3 * found.settings["top_chance"] == pytest.approx(0.3)


def test_every_figure_is_drawn_and_the_result_comes_back(random_model: HookedTransformer, tmp_path: Path) -> None:
    found = copying_scores(random_model, length=8, n_sequences=2)
    for score in ("in_situ", "eigenvalues", "eigenvalues_of_weights", "top_share"):
        assert found.figure("map", score=score, captioned=True).data
    assert found.figure("scatter", theme="dark").data
    with pytest.raises(ValueError, match="score must be one of"):
        found.figure(score="entropy")
    back = load_result(found.save(tmp_path / "copying"))
    np.testing.assert_array_equal(back["in_situ"], found["in_situ"])


def test_models_without_a_straight_way_to_the_logits_are_refused() -> None:
    with pytest.raises(ValueError, match="normalises the stream itself"):
        copying_scores(random_weights(norm_placement="post"), length=8, n_sequences=1)
    with pytest.raises(ValueError, match="bidirectional"):
        copying_scores(random_weights(attention_dir="bidirectional"), length=8, n_sequences=1)
