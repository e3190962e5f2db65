from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig, fold_layer_norm
from workbench.analyses import head_composition, load_result


def random_weights(**options: Any) -> HookedTransformer:
    """Grouped queries, and gains of norms that are not 1, in float64."""
    sizes: dict[str, Any] = dict(
        n_layers=3, d_model=24, n_heads=4, n_key_value_heads=2, d_head=6, d_mlp=32, d_vocab=40, n_ctx=64
    )
    model = HookedTransformer(TransformerConfig(**(sizes | options))).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if name.endswith(".w") else 0.3 * noise)
    return model


def test_the_induction_circuit_is_k_composition(hand_built_model: Callable[..., HookedTransformer]) -> None:
    found = head_composition(hand_built_model(20))
    chance = float(found["chance"])
    # L0H0 moves each of 60 tokens from one slot to another, L1H0 matches each in that slot with the query's: both are
    # multiples of a partial identity of rank 60, and so is their product. ‖I‖ / (‖I‖ ‖I‖) = 1 / √60.
    assert found["k_composition"][0, 0, 1, 0] + chance == pytest.approx(60**-0.5)
    assert found.top("k", 1) == [((0, 0), (1, 0))]
    # Nothing else reads that slot, nor what the queries or the values of L1H0 read.
    others = np.delete(found["k_composition"][0, 0, 1], 0)
    np.testing.assert_allclose(others[np.isfinite(others)] + chance, 0, atol=1e-12)
    assert found["q_composition"][0, 0, 1, 0] + chance == pytest.approx(0, abs=1e-12)
    assert found["v_composition"][0, 0, 1, 0] + chance == pytest.approx(0, abs=1e-12)
    # L0H1 writes nothing, and no head reads its own layer or a later one.
    assert np.isnan(found["k_composition"][0, 1]).all()
    assert np.isnan(found["k_composition"][0, :, 0]).all() and np.isnan(found["k_composition"][1]).all()
    assert "L0H0 → L1H0 +0." in found.summary() and "0 sequences" not in found.summary()


@pytest.mark.parametrize(
    ("kind", "offset"),
    [
        ({"normalization_type": "LN"}, 0),
        ({"normalization_type": "RMS", "positional_embedding_type": "rotary"}, 0),
        ({"normalization_type": "RMS", "positional_embedding_type": "rotary"}, 3),
        ({"normalization_type": "RMS", "positional_embedding_type": "rotary", "rotary_dim": 4}, 5),
        ({"normalization_type": "LN", "norm_placement": "sandwich"}, 0),
    ],
)
def test_compositions_are_those_of_whole_matrices(kind: dict[str, Any], offset: int) -> None:
    model = random_weights(**kind)
    found = head_composition(model, offset=offset)
    chance, n = float(found["chance"]), np.linalg.norm
    centre = np.eye(24) - 1 / 24 if model.cfg.normalization_type == "LN" else np.eye(24)
    turn = rotation(model.cfg.rotated_dim, offset) if "positional_embedding_type" in kind else np.eye(6)
    # With the stream as columns: W_QK destination × source, W_OV output × input.
    W_QK, W_OV = np.empty((2, 3, 4, 24, 24))
    for layer, head in np.ndindex(3, 4):
        block, attn = model.blocks[layer], model.blocks[layer].attn
        W_Q, W_K, W_V, W_O = (
            weight.detach().numpy()
            for weight in (attn.W_Q[head], attn.W_K[head // 2], attn.W_V[head // 2], attn.W_O[head])
        )
        read = centre @ np.diag(block.ln1.w.detach().numpy())
        write = centre @ np.diag(block.ln1_post.w.detach().numpy()) if hasattr(block, "ln1_post") else np.eye(24)
        W_QK[layer, head] = read @ W_Q @ turn @ W_K.T @ read.T
        W_OV[layer, head] = (read @ W_V @ W_O @ write).T
    for a, b, c, d in np.ndindex(3, 4, 3, 4):
        if a >= c:
            assert np.isnan(found["v_composition"][a, b, c, d])
            continue
        first, second, ov = W_QK[c, d], W_OV[c, d], W_OV[a, b]
        expected = {
            "k": n(first @ ov) / (n(first) * n(ov)),
            "q": n(first.T @ ov) / (n(first) * n(ov)),
            "v": n(second @ ov) / (n(second) * n(ov)),
        }
        for name, value in expected.items():
            assert found[f"{name}_composition"][a, b, c, d] + chance == pytest.approx(value, abs=1e-6)


def rotation(rotated: int, offset: int) -> np.ndarray:
    """R with q R kᵀ the score of a query ``offset`` tokens behind its key; pairs (i, i + rotated / 2)."""
    R = np.eye(6)
    half = rotated // 2
    for i in range(half):
        angle = offset * 10_000 ** (-2 * i / rotated)
        R[i, i] = R[i + half, i + half] = np.cos(angle)
        R[i, i + half], R[i + half, i] = np.sin(angle), -np.sin(angle)
    return R


def test_the_rotation_is_that_of_scores_in_a_run() -> None:
    model = random_weights(normalization_type="RMS", positional_embedding_type="rotary", n_layers=1)
    tokens = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    q, k = (cache[f"blocks.0.attn.hook_{name}"][0, :, 0].numpy() for name in "qk")
    scores = cache["blocks.0.attn.hook_attn_scores"][0, 0].numpy()
    for offset in (0, 4):
        expected = q[11] @ rotation(6, offset) @ k[11 - offset] * 6**-0.5
        assert scores[11, 11 - offset] == pytest.approx(expected, abs=1e-5)


def test_folding_norms_changes_nothing() -> None:
    model = random_weights(normalization_type="LN")
    found, of_folded = head_composition(model), head_composition(fold_layer_norm(model))
    for name in ("k_composition", "q_composition", "v_composition"):
        np.testing.assert_allclose(of_folded[name], found[name], atol=1e-9)


def test_random_weights_are_at_chance(random_model: HookedTransformer) -> None:
    found = head_composition(random_model, n_draws=200)
    scores = np.concatenate([found[f"{kind}_composition"].reshape(-1) for kind in "kqv"])
    scores = scores[np.isfinite(scores)] / float(found["chance_sd"])
    assert len(scores) == 3 * 3 * 16
    assert abs(scores.mean()) < 0.5 and np.abs(scores).max() < 4.5 and 0.6 < scores.std() < 1.4


def test_every_figure_is_drawn_and_the_result_comes_back(random_model: HookedTransformer, tmp_path: Path) -> None:
    found = head_composition(random_model)
    for kind in ("k", "q", "v"):
        assert found.figure("pairs", composition=kind, captioned=True).data[0].z.shape == (12, 12)
    pairs = found.figure("pairs", theme="dark").data[0]
    assert pairs.z[list(pairs.y).index("L2H1")][list(pairs.x).index("L0H3")] == found["k_composition"][0, 3, 2, 1]
    sources = found.figure("sources", composition="v", into=(2, 3)).data[0]
    np.testing.assert_array_equal(sources.z, found["v_composition"][:, :, 2, 3])
    assert len(found.figure("strongest", n=6).data[0].y) == 6
    with pytest.raises(ValueError, match="composition must be one of 'k', 'q', 'v', got 'o'"):
        found.figure(composition="o")
    with pytest.raises(ValueError, match="into must be"):
        found.figure("sources", into=(3, 0))
    back = load_result(found.save(tmp_path / "composition"))
    np.testing.assert_array_equal(back["k_composition"], found["k_composition"])
    assert "weights alone" in back.summary()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ({"qk_norm": "per_head"}, {}, "normalises queries and keys"),
        ({"norm_placement": "post"}, {}, "normalises the stream itself"),
        ({}, {"offset": -1}, "offset must be a whole number of tokens from 0 to 63"),
        ({}, {"n_draws": 1}, "n_draws must be at least 2"),
    ],
)
def test_what_has_no_number_is_refused(kind: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_composition(random_weights(**kind), **options)
