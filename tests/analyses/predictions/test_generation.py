"""Generation: every step against a model that reads the text up to it anew, in float64, and tokens against others'."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import generation_statistics, load_result
from workbench.analyses.labels import GENERATION_SCORES
from workbench.analyses.predictions.generation import Generation
from workbench.config_parts import RopeScaling
from workbench.errors import WorkbenchError

PROMPT = torch.tensor([3, 7, 11, 3, 19, 7, 2, 30, 11])


@pytest.fixture(scope="module")
def model(random_model: HookedTransformer) -> HookedTransformer:
    return copy.deepcopy(random_model).double()


def naive(model: HookedTransformer, tokens: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The last row of every pattern, [layer, head, key], and of the prediction, [d_vocab], without a cache."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens[None])
    rows = [cache[f"blocks.{layer}.attn.hook_pattern"][0, :, -1] for layer in range(model.cfg.n_layers)]
    return torch.stack(rows).numpy(), logits[0, -1].softmax(dim=-1).numpy()


def check_step(found: Generation, step: int, rows: np.ndarray, chances: np.ndarray, tokens: list[int]) -> None:
    """Of a step that has read ``tokens``: every number by its definition."""
    n, n_prompt = len(tokens), int(found.settings["n_prompt"])
    follow = [j for j in range(1, n) if tokens[j - 1] == tokens[-1]]
    expected = {
        "first_token": rows[..., 0],
        "previous_token": rows[..., -2],
        "self_weight": rows[..., -1],
        "prompt_mass": rows[..., :n_prompt].sum(axis=-1),
        "generated_mass": rows[..., n_prompt:].sum(axis=-1),
        "prefix_matching": rows[..., follow].sum(axis=-1) if follow else np.full(rows.shape[:2], np.nan),
        "max_weight": rows.max(axis=-1),
        "entropy": -(rows * np.log(rows)).sum(axis=-1),
        "mean_distance": (rows * np.arange(n - 1, -1, -1)).sum(axis=-1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[name][step], values, atol=1e-9, err_msg=f"{name} of step {step}")
    n_kept = found["largest_keys"].shape[-1]
    order = np.argsort(-rows, axis=-1)[..., :n_kept]
    np.testing.assert_array_equal(found["largest_keys"][step][..., : order.shape[-1]], order)
    weights, others = found.row(step, 1, 2)
    kept = np.zeros(len(weights))
    kept[order[1, 2]] = rows[1, 2][order[1, 2]]
    np.testing.assert_allclose(weights, kept, atol=1e-9)
    np.testing.assert_allclose(others, 1 - kept.sum(), atol=1e-9)
    chosen = int(found["token_id"][n])
    assert found.query(step) == n - 1
    np.testing.assert_allclose(found["surprise"][step], -np.log(chances[chosen]), atol=1e-9)
    np.testing.assert_allclose(found["prediction_entropy"][step], -(chances * np.log(chances)).sum(), atol=1e-9)
    assert found["rank"][step] == 1 + (chances > chances[chosen]).sum()
    np.testing.assert_allclose(found["likely_probability"][step], chances[found["likely_token_id"][step]], atol=1e-9)


def test_every_step_is_what_the_model_does_when_it_reads_the_text_up_to_it(model: HookedTransformer) -> None:
    found = generation_statistics(model, PROMPT, n_tokens=8)
    tokens, n_undefined = PROMPT.tolist(), 0
    for step in range(8):
        rows, chances = naive(model, torch.tensor(tokens))
        check_step(found, step, rows, chances, tokens)
        assert found["likely_token_id"][step, 0] == chances.argmax() == found["token_id"][len(tokens)]
        assert found["drawn_probability"][step] == 1
        n_undefined += int(np.isnan(found["prefix_matching"][step]).all())
        tokens.append(int(chances.argmax()))
    assert found["token_id"].tolist() == tokens
    assert 0 < n_undefined < 8  # both kinds of rows were met
    assert found["generated_mass"][0].max() == 0
    assert found.text == "".join(f"#{token}" for token in tokens[len(PROMPT) :])


def test_drawn_tokens_and_their_probabilities(model: HookedTransformer) -> None:
    found = generation_statistics(model, PROMPT, n_tokens=12, temperature=2.5, seed=4, n_likely=3, n_keys=5)
    again = generation_statistics(model, PROMPT, n_tokens=12, temperature=2.5, seed=4, n_likely=3)
    other = generation_statistics(model, PROMPT, n_tokens=12, temperature=2.5, seed=5, n_likely=3)
    assert found["token_id"].tolist() == again["token_id"].tolist() != other["token_id"].tolist()
    tokens, n_replaced = PROMPT.tolist(), 0
    for step in range(12):
        rows, chances = naive(model, torch.tensor(tokens))
        check_step(found, step, rows, chances, tokens)
        tempered = chances ** (1 / 2.5) / (chances ** (1 / 2.5)).sum()
        chosen, best = int(found["token_id"][len(tokens)]), np.argsort(-chances)[:3]
        np.testing.assert_allclose(found["drawn_probability"][step], tempered[chosen], atol=1e-9)
        shown = found["likely_token_id"][step]
        np.testing.assert_allclose(found["likely_drawn_probability"][step], tempered[shown], atol=1e-9)
        assert shown.tolist() == (best.tolist() if chosen in best else [*best[:2].tolist(), chosen])
        n_replaced += chosen not in best
        tokens.append(chosen)
    assert n_replaced
    assert "drawn at temperature 2.5" in {bar.name for bar in found.figure("prediction").data}


def test_greedy_tokens_are_those_of_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60, max_position_embeddings=64, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    reference = LlamaForCausalLM(config).double().eval()
    found = generation_statistics(HookedTransformer.from_pretrained(copy.deepcopy(reference)), PROMPT, n_tokens=20)
    theirs = reference.generate(
        PROMPT[None], attention_mask=torch.ones_like(PROMPT[None]), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert found["token_id"].tolist() == theirs[0].tolist()


def test_generation_ends_where_the_text_ends() -> None:
    demo_model = HookedTransformer.from_pretrained("demo")
    text = "Mara and Hugo went to the harbour. Mara gave the lantern to Hugo."
    eos = demo_model.tokenizer.eos_token_id
    whole = generation_statistics(demo_model, text, n_tokens=30, stop_at_eos=False)
    new = whole["token_id"][whole.settings["n_prompt"] :].tolist()
    assert whole.n_steps == 30 and eos in new
    ended = generation_statistics(demo_model, text, n_tokens=30)
    assert ended["token_id"].tolist() == whole["token_id"][: whole.settings["n_prompt"] + new.index(eos) + 1].tolist()
    assert ended.settings["ended"] and "then the text ended" in ended.summary()


def test_what_a_window_and_a_learned_sink_leave() -> None:
    cfg = TransformerConfig(
        n_layers=1, d_model=16, n_heads=2, d_head=8, d_mlp=16, d_vocab=40, n_ctx=64, normalization_type="RMS",
        positional_embedding_type="rotary", attn_types=("local",), window_size=3, use_sink_logits=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    found = generation_statistics(model, PROMPT, n_tokens=5)
    assert not found["first_token"].any()
    np.testing.assert_allclose(found["prompt_mass"] + found["generated_mass"] + found["virtual_sink_mass"], 1)
    assert (found["prompt_mass"][:3] > 0).all() and not found["prompt_mass"][3:].any()  # the window has moved past it
    assert found.figure("map", score="virtual_sink_mass", step=-1).data


def test_figures_tables_and_files(model: HookedTransformer, tmp_path: Path) -> None:
    found = generation_statistics(model, PROMPT, n_tokens=4)
    for score in GENERATION_SCORES:
        if score in found:
            np.testing.assert_array_equal(found.figure("map", score=score, step=2).data[0].z, found[score][2])
    shown = found.figure("head", layer=2, head=1, step=3).data[0]
    np.testing.assert_array_equal(shown.z[list(shown.y).index("on the prompt")], found["prompt_mass"][:, 2, 1])
    with pytest.raises(ValueError, match="step must be between 0 and 3"):
        found.figure("prediction", step=4)
    with pytest.raises(ValueError, match="head must be between 0 and 3"):
        found.figure("head", head=9)
    with pytest.raises(ValueError, match="layer must be between 0 and 2"):
        found.row(0, 3, 0)
    with pytest.raises(ValueError, match="has no virtual_sink_mass"):
        found.figure("map", score="virtual_sink_mass")
    tables = found.tables()
    assert len(tables[""]) == 4 * 3 * 4 and list(tables["steps"]["token"]) == found["token"].tolist()
    again = load_result(found.save(tmp_path / "generation"))
    assert isinstance(again, Generation) and again.summary() == found.summary()


def test_what_cannot_be_continued_is_refused(model: HookedTransformer) -> None:
    for options, words in {
        "several": ({"tokens": PROMPT.repeat(2, 1)}, "continues one text, got 2"),
        "room": ({"n_tokens": 120}, "n_tokens must be at most 119, which is what the context of 128 leaves"),
        "full": ({"tokens": PROMPT.repeat(15)[:128]}, "fills the context of 128"),
        "hot": ({"temperature": 1e6}, "temperature must be 0"),
    }.values():
        with pytest.raises(ValueError, match=words):
            generation_statistics(model, **{"tokens": PROMPT, **options})
    sizes = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 16, "d_vocab": 40, "n_ctx": 64}
    encoder = HookedTransformer(TransformerConfig(**sizes, attention_dir="bidirectional")).eval()
    with pytest.raises(ValueError, match="is an encoder: it reads a text from both sides and cannot continue one"):
        generation_statistics(encoder, PROMPT)
    scaled = RopeScaling(type="dynamic", factor=2.0, original_context=10)
    rotated = HookedTransformer(
        TransformerConfig(**sizes, positional_embedding_type="rotary", rope_scaling=scaled)
    ).eval()
    assert generation_statistics(rotated, PROMPT, n_tokens=2).n_steps == 2  # up to ten tokens nothing changes
    with pytest.raises(ValueError, match="which changes between 9 and 11 tokens"):
        generation_statistics(rotated, PROMPT, n_tokens=3)


def test_progress_counts_the_tokens_and_can_stop(model: HookedTransformer) -> None:
    heard: list[float] = []

    def stop(fraction: float, text: str) -> None:
        heard.append(fraction)
        if len(heard) == 3:
            raise WorkbenchError("enough")

    with pytest.raises(WorkbenchError, match="enough"):
        generation_statistics(model, PROMPT, n_tokens=9, progress=stop)
    assert heard == [0, 0.1, 0.2]
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
