"""QK and OV circuits against the model's own scores, and against whole matrices in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import HeadCircuits, head_circuits, load_result
from workbench.analyses.attention import circuits

SIZES = {"n_layers": 2, "d_model": 24, "n_heads": 4, "d_head": 6, "d_mlp": 20, "d_vocab": 31, "n_ctx": 40}
SHAPES = {
    "LayerNorm, biases": {"use_qkv_bias": True, "use_attn_out_bias": True, "use_unembed_bias": True},
    "rotary, grouped queries": {
        "normalization_type": "RMS", "positional_embedding_type": "rotary", "n_key_value_heads": 2,
    },
    "sandwich, soft cap": {
        "normalization_type": "RMS", "norm_gain_plus_one": True, "norm_placement": "sandwich", "embed_scale": 3.0,
        "positional_embedding_type": "rotary", "output_logits_soft_cap": 3.0, "logit_scale": 0.5,
    },
    "norms on outputs": {
        "normalization_type": "RMS", "norm_placement": "output", "positional_embedding_type": "rotary",
    },
    "ALiBi, norm of embeddings": {"positional_embedding_type": "alibi", "use_embed_norm": True},
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


EVERY = torch.arange(31)


def test_scores_of_the_first_layer_are_the_models_own(model: HookedTransformer) -> None:
    offset = 3
    found = head_circuits(model, 0, 3, EVERY, offset=offset)
    own = np.zeros((31, 31))
    hooks = []
    if model.cfg.positional_embedding_type == "learned":  # the circuit is of tokens alone
        hooks = [("hook_pos_embed", lambda x, hook: torch.zeros_like(x))]
    for key in range(31):
        row = torch.full((31, offset + 1), 7)
        row[:, 0], row[:, -1] = key, EVERY
        with model.hooks(fwd_hooks=hooks), torch.no_grad():
            scores = model.run_with_cache(row, names_filter=["blocks.0.attn.hook_attn_scores"])[1]
        own[:, key] = scores["blocks.0.attn.hook_attn_scores"][:, 3, -1, 0].numpy()
    np.testing.assert_allclose(found["qk"], own - own.mean(axis=1, keepdims=True), atol=1e-9)
    order = np.argsort(-found["qk"], axis=None)[:20]
    np.testing.assert_allclose(found["qk_score"], found["qk"].flat[order], atol=1e-9)
    assert found["qk_query"].tolist() == [f"#{place // 31}" for place in order]
    assert found["qk_key"].tolist() == [f"#{place % 31}" for place in order]
    assert float(found["qk_own_share"]) == pytest.approx((own.argmax(axis=1) == np.arange(31)).mean())
    assert found.settings["offset"] == (offset if model.cfg.positional_embedding_type == "rotary" else None)


def naive_ov(model: HookedTransformer, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normalised embeddings [token, d_model], W_OV with the gains [d_model, d_model], and W_U [d_model, token]."""
    cfg, block = model.cfg, model.blocks[1]
    x = model.embed(EVERY[None])[0].detach()
    if cfg.use_embed_norm:
        x = model.ln_embed(x).detach()
    gains = [torch.ones(24, dtype=torch.float64)]
    if cfg.norm_placement != "output":
        if cfg.normalization_type == "LN":
            x = x - x.mean(dim=1, keepdim=True)
        x = x / (x.square().mean(dim=1, keepdim=True) + cfg.eps).sqrt()
        gains = [block.ln1.gain]
    W = torch.diag(gains[0]) @ block.attn.W_V[head * cfg.n_key_value_heads // cfg.n_heads] @ block.attn.W_O[head]
    centre = torch.eye(24, dtype=torch.float64) - (1 / 24 if cfg.normalization_type == "LN" else 0)
    if cfg.norm_placement in ("sandwich", "output"):
        W = W @ centre @ torch.diag(block.ln1_post.gain)
    W = W @ centre @ torch.diag(model.ln_final.gain)
    return x.numpy(), W.detach().numpy(), (model.W_U * cfg.logit_scale).detach().numpy()


def test_the_ov_circuit_is_that_of_whole_matrices(model: HookedTransformer) -> None:
    found = head_circuits(model, 1, 2, torch.tensor([4, 9, 4, 30]), n_ends=3)
    x, W, W_U = naive_ov(model, 2)
    logits = x @ W @ W_U
    logits -= logits.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(found["ov"], logits[np.ix_([4, 9, 30], [4, 9, 30])], atol=1e-9)
    order = np.argsort(-logits, axis=None)[:20]
    np.testing.assert_allclose(found["ov_logit"], logits.flat[order], atol=1e-9)
    assert found["ov_read"].tolist() == [f"#{place // 31}" for place in order]
    assert found["ov_written"].tolist() == [f"#{place % 31}" for place in order]
    assert float(found["ov_own_share"]) == pytest.approx((logits.argmax(axis=1) == np.arange(31)).mean())
    left, values, right = np.linalg.svd(W)
    np.testing.assert_allclose(found["singular_value"], values[:6], atol=1e-9)
    for direction in range(6):
        read, written = x @ left[:, direction], right[direction] @ (W_U - W_U.mean(axis=1, keepdims=True))
        sign = np.sign(read[np.abs(read).argmax()])
        for name, along in (("read", sign * read), ("written", sign * written)):
            best = np.argsort(-along)[:3]
            assert found[f"{name}_token"][direction].tolist() == [f"#{i}" for i in best]
            np.testing.assert_allclose(found[f"{name}_projection"][direction], along[best], atol=1e-8)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(**SHAPES["rotary, grouped queries"])
    whole = head_circuits(model, 1, 0, EVERY)
    monkeypatch.setattr(circuits, "PAIRS_AT_A_TIME", 5 * 31)
    heard: list[float] = []
    blocks = head_circuits(model, 1, 0, EVERY, progress=lambda done, what: heard.append(done))
    assert whole.summary() == blocks.summary()
    for name in whole.quantities:
        if whole[name].dtype.kind == "f":
            np.testing.assert_allclose(blocks[name], whole[name], atol=1e-12)
    assert len(heard) == 14 and heard[6] == heard[-1] == 1.0


def test_a_hand_built_induction_head_copies(hand_built_model: Callable[..., HookedTransformer]) -> None:
    model = hand_built_model(20, strength=20.0)
    copying = head_circuits(model, 1, 0, torch.arange(60))
    assert float(copying["ov_own_share"]) == 1.0
    # RMS norm of one 1 among d_model numbers: the embedding's 1 becomes √d_model (as far as eps leaves it).
    size = np.sqrt(model.cfg.d_model) * 20.0
    np.testing.assert_allclose(copying["ov"], size * (np.eye(60) - 1 / 60), rtol=1e-2, atol=1e-6)
    assert set(zip(copying["ov_read"], copying["ov_written"], strict=True)) <= {(f"#{i}", f"#{i}") for i in range(60)}
    np.testing.assert_allclose(copying["singular_value"][:60], 20.0)
    np.testing.assert_allclose(copying["singular_value"][60:], 0.0, atol=1e-9)
    # What it looks for lies in the slot that an earlier head fills: by embeddings alone it looks for nothing.
    np.testing.assert_allclose(copying["qk"], 0.0, atol=1e-9)
    shifting = head_circuits(model, 0, 0, torch.arange(60))
    np.testing.assert_allclose(shifting["ov"], 0.0, atol=1e-9)  # it writes another slot than W_U reads
    noise = head_circuits(model, 0, 2)
    assert float(noise["ov_own_share"]) < 0.15


def test_norms_of_queries_and_keys_leave_no_qk_circuit() -> None:
    found = head_circuits(build(qk_norm="per_head", normalization_type="RMS"), 0, 0, EVERY)
    assert "qk_score" not in found and "qk" not in found and "ov" in found
    assert "No QK circuit: this model normalises q and k" in found.summary()
    assert found.figure_kinds == ("singular", "ov") and "qk_pairs" not in found.tables()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 2}, "layer must be between 0 and 1"),
        ({"head": 4}, "head must be between 0 and 3"),
        ({"offset": 40}, "offset must be between 0 and 39"),
        ({"n_pairs": 0}, "n_pairs must be at least 1 and whole, got 0"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, "one text, got 2"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_circuits(build(), **({"layer": 0, "head": 0} | options))


def test_models_whose_logits_are_no_sum_are_refused() -> None:
    with pytest.raises(ValueError, match="no sum of parts"):
        head_circuits(build(norm_placement="post"), 0, 0)


def test_it_is_saved_tabulated_and_drawn(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo")
    found = head_circuits(model, 2, 2, "Mara met Tomas at the harbour.")
    again = load_result(found.save(tmp_path / "circuits"))
    assert isinstance(again, HeadCircuits) and again.summary() == found.summary()
    assert list(again.tables()) == ["", "qk_pairs", "singular_values", "ends", "ov", "qk"]
    assert len(again.tables()[""]) == 20
    # An induction head's OV circuit copies, far beyond the one token in some 1,800 of a head that does not know it.
    assert float(found["ov_own_share"]) > 0.5
    for kind in again.figure_kinds:
        for theme in ("light", "dark"):
            again.figure(kind, captioned=True, theme=theme)
