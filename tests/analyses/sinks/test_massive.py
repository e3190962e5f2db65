"""Massive activations, and what singles out a sink's key and value, by head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import load_result, massive_activations


def test_massive_elements_are_found_where_they_were_put(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))

    def write(x: torch.Tensor, hook: Any) -> torch.Tensor:
        x = x.clone()
        x[0, 0, 5], x[0, 0, 7] = 3000.0, -2000.0
        if bool((tokens_seen[0] == tokens[1]).all()):
            x[0, 3, 5] = 5000.0
        return x

    def erase(x: torch.Tensor, hook: Any) -> torch.Tensor:
        return x.clamp(-99, 99)

    tokens_seen: list[torch.Tensor] = []

    def see(x: torch.Tensor, hook: Any) -> None:
        (place,) = [place for place, row in enumerate(tokens) if torch.equal(random_model.W_E[row], x[0])]
        tokens_seen[:] = [tokens[place]]

    hooks = [("hook_embed", see), ("blocks.1.hook_resid_pre", write), ("blocks.1.hook_resid_post", erase)]
    with random_model.hooks(fwd_hooks=hooks):
        found = massive_activations(random_model, tokens, ratio=100)
    assert list(zip(found["place_position"], found["place_dimension"], strict=True)) == [(0, 5), (0, 7), (3, 5)]
    assert found["place_value"].tolist() == [3000.0, -2000.0, 5000.0]
    assert found["place_share"].tolist() == [1.0, 1.0, 0.5]
    assert found["place_first_depth"].tolist() == found["place_last_depth"].tolist() == [1, 1, 1]
    assert found["n_massive"].tolist() == [0, 2.5, 0, 0] and found["n_massive_at_sink"].tolist() == [0, 2, 0, 0]
    assert found["largest"][1] == 5000 and found["largest_position"][1] == 3
    stream = random_model.run_with_cache(tokens[0])[1]["blocks.1.hook_resid_pre"][0, 1:]
    assert found["largest_at_sink"][1] == 3000.0
    assert found["largest_elsewhere"][1] == pytest.approx((5000 + float(stream.abs().max())) / 2)


def test_random_weights_have_none(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    found = massive_activations(random_model, tokens)
    assert found["n_massive"].sum() == 0 and len(found["place_position"]) == 0
    assert "No massive activation (|x| > 100 and > 1000 × the depth's median |x|)" in found.summary()


OPTIONS: dict[str, dict[str, Any]] = {
    "rotary, grouped": {"positional_embedding_type": "rotary", "n_key_value_heads": 2, "normalization_type": "RMS"},
    "learned positions, biases": {},
    "learned sinks": {"use_sink_logits": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@torch.no_grad()
def test_every_number_is_what_its_definition_gives(options: dict[str, Any]) -> None:
    cfg = TransformerConfig(n_layers=2, d_model=24, n_heads=4, d_head=6, d_mlp=16, d_vocab=30, n_ctx=64, **options)
    model = HookedTransformer(cfg).eval().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    sink, lengths = 2, (30, 22)
    tokens, mask = torch.randint(0, 30, (2, 30), generator=generator), torch.ones(2, 30)
    mask[1, :8] = 0
    found = massive_activations(model, tokens, attention_mask=mask, sink_position=sink)
    rotated = "rot_" if cfg.positional_embedding_type == "rotary" else ""
    expected: dict[str, list[np.ndarray]] = {}
    medians, at_sink = [], []
    for row, n in zip(tokens, lengths, strict=True):
        _, cache = model.run_with_cache(row[30 - n :])
        streams = [cache["blocks.0.hook_resid_pre"][0], *(cache[f"blocks.{at}.hook_resid_post"][0] for at in (0, 1))]
        medians.append([np.sort(x.abs().numpy().ravel())[(x.numel() - 1) // 2] for x in streams])
        at_sink.append([x[sink].abs().max().item() for x in streams])
        numbers: dict[str, np.ndarray] = {}
        for layer in range(2):
            at = f"blocks.{layer}.attn.hook_"
            pattern, v = cache[f"{at}pattern"][0].numpy(), cache[f"{at}v"][0].numpy()
            q, k = cache[f"{at}{rotated}q"][0].numpy(), cache[f"{at}{rotated}k"][0].numpy()
            for head in range(4):
                kv = head // (4 // cfg.n_key_value_heads)
                outputs = np.linalg.norm(v[:, kv] @ model.blocks[layer].attn.W_O[head].numpy(), axis=1)
                values: dict[str, list[float]] = {name: [] for name in ("sink_weight", "output_share")}
                values |= {name: [] for name in ("entropy", "entropy_without_sink")}
                for query in range(sink + 16, n):
                    p = pattern[head, query, : query + 1]
                    values["sink_weight"].append(p[sink])
                    values["output_share"].append(p[sink] * outputs[sink] / (p * outputs[: query + 1]).sum())
                    for name, kept in (("entropy", p), ("entropy_without_sink", np.delete(p, sink))):
                        share = kept / kept.sum()
                        values[name].append(-(share * np.log(share)).sum())
                mean_query = q[sink + 16 :, head].mean(axis=0)
                norms = np.linalg.norm(k[:, kv], axis=1)
                cosine = k[:, kv] @ mean_query / norms / np.linalg.norm(mean_query)
                single = {name: float(np.mean(many)) for name, many in values.items()}
                single["key_cosine_at_sink"] = cosine[sink]
                single["key_cosine_median"] = np.median(np.delete(cosine, sink))
                for name, of in (("key", k), ("value", v)):
                    norms = np.linalg.norm(of[:, kv], axis=1)
                    single[f"{name}_norm_ratio"] = norms[sink] / np.median(np.delete(norms, sink))
                for name, value in single.items():
                    numbers.setdefault(name, np.zeros((2, 4)))[layer, head] = value
        for name, values_of_heads in numbers.items():
            expected.setdefault(name, []).append(values_of_heads)
    assert set(expected) == set(found.names("layer", "head"))
    for name, of_sequences in expected.items():
        np.testing.assert_allclose(found[name], np.mean(of_sequences, axis=0), rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(found["median"], np.mean(medians, axis=0))
    np.testing.assert_allclose(found["largest_at_sink"], np.mean(at_sink, axis=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_position": 24}, "16 later tokens"),
        ({"sink_position": -1}, "sink_position must be at least 0"),
        ({"threshold": 0.0}, "positive"),
        ({"ratio": -1.0}, "positive"),
    ],
)
def test_bad_options_are_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        massive_activations(random_model, torch.arange(40), **options)


def test_it_is_saved_and_drawn(random_model: HookedTransformer, tmp_path: Path) -> None:
    for place, ratio in enumerate((1000.0, 0.001)):
        found = massive_activations(random_model, torch.arange(40), ratio=ratio, threshold=ratio)
        again = load_result(found.save(tmp_path / f"massive {place}"))
        assert again.summary() == found.summary() and list(again.tables()) == ["", "depths", "places"]
    assert "at depths 0 to 3 of 3" in again.summary()
    for theme in ("light", "dark"):
        for kind in again.figure_kinds:
            again.figure(kind, captioned=True, theme=theme)
    for score in again.names("layer", "head"):
        assert again.figure("map", score=score).data[0].z.shape == (3, 4)
    with pytest.raises(ValueError, match="score must be one of"):
        again.figure("map", score="median")
