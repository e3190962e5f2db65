"""TransformerLens' own tools run unchanged on our model, and their numbers are right.

Not every sweep can run on grouped queries: ``get_act_patch_attn_head_all_pos_every`` and
``get_act_patch_attn_head_by_pos_every`` give keys and values fewer rows than queries, which TransformerLens pads with
zeros, and direct path patching into keys or values is refused by TransformerLens itself.
"""

from __future__ import annotations

import pytest
import torch
from transformer_lens import head_detector, patching
from transformer_lens.ActivationCache import ActivationCache

CLEAN, CORRUPTED = "a b c d a b", "e b c d e b"


def metric(logits):
    """The logit of token 5 minus that of token 6, at the last position."""
    return (logits[:, -1, 5] - logits[:, -1, 6]).mean()


@pytest.fixture(scope="module")
def runs(pair):
    """Clean and corrupted tokens and the clean cache."""
    clean, corrupted = pair.model.to_tokens(CLEAN), pair.model.to_tokens(CORRUPTED)
    with torch.no_grad():
        _, cache = pair.model.run_with_cache(clean)
    return corrupted, cache


# sweep: hook, and where in the hooked tensor an index of the result points
RESIDUAL = {
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}
HEADS = {"out": "hook_z", "q": "hook_q", "k": "hook_k", "v": "hook_v", "pattern": "hook_pattern"}


def patched(model, corrupted, cache, hook_name, index):
    """The metric with one part of one activation taken from the clean run."""

    def patch(x, hook):
        x = x.clone()
        x[index] = cache[hook_name][index]
        return x

    return metric(model.run_with_hooks(corrupted, fwd_hooks=[(hook_name, patch)]))


@torch.no_grad()
@pytest.mark.parametrize("sweep", RESIDUAL)
def test_residual_sweeps(pair, runs, sweep):
    corrupted, cache = runs
    result = getattr(patching, f"get_act_patch_{sweep}")(pair.model, corrupted, cache, metric)
    assert result.shape == (3, corrupted.shape[1])
    for layer, pos in ((0, 1), (1, 6), (2, 5)):
        hook_name = f"blocks.{layer}.{RESIDUAL[sweep]}"
        expected = patched(pair.model, corrupted, cache, hook_name, (slice(None), pos))
        torch.testing.assert_close(result[layer, pos], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("what", HEADS)
def test_head_sweeps(pair, runs, what):
    corrupted, cache = runs
    heads = pair.model.cfg.n_key_value_heads if what in "kv" else pair.model.cfg.n_heads
    everywhere = getattr(patching, f"get_act_patch_attn_head_{what}_all_pos")(pair.model, corrupted, cache, metric)
    by_pos = getattr(patching, f"get_act_patch_attn_head_{what}_by_pos")(pair.model, corrupted, cache, metric)
    assert everywhere.shape == (3, heads)
    for layer, head, pos in ((0, 0, 5), (1, 1, 6), (2, 1, 1)):
        hook_name = f"blocks.{layer}.attn.{HEADS[what]}"
        whole = (slice(None), head) if what == "pattern" else (slice(None), slice(None), head)
        at_pos = (slice(None), head, pos) if what == "pattern" else (slice(None), pos, head)
        expected = patched(pair.model, corrupted, cache, hook_name, whole)
        torch.testing.assert_close(everywhere[layer, head], expected, atol=1e-5, rtol=1e-5)
        expected = patched(pair.model, corrupted, cache, hook_name, at_pos)
        index = (layer, head, pos) if what == "pattern" else (layer, pos, head)
        torch.testing.assert_close(by_pos[index], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_pattern_cells_sweep(pair, runs):
    corrupted, cache = runs
    result = patching.get_act_patch_attn_head_pattern_dest_src_pos(pair.model, corrupted, cache, metric)
    expected = patched(pair.model, corrupted, cache, "blocks.1.attn.hook_pattern", (slice(None), 2, 6, 1))
    torch.testing.assert_close(result[1, 2, 6, 1], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_block_sweep(pair, runs):
    corrupted, cache = runs
    result = patching.get_act_patch_block_every(pair.model, corrupted, cache, metric)
    assert result.shape == (3, 3, corrupted.shape[1])
    # Restoring the whole stream at the last position of the last layer leaves only its own later inputs corrupted.
    expected = patched(pair.model, corrupted, cache, "blocks.2.hook_mlp_out", (slice(None), 6))
    torch.testing.assert_close(result[2, 2, 6], expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_every_head_sweeps_need_equal_head_counts(pair, runs):
    corrupted, cache = runs
    result = patching.get_act_patch_attn_head_all_pos_every(pair.model, corrupted, cache, metric)
    assert result.shape == (5, 3, pair.model.cfg.n_heads)
    kv_heads = pair.model.cfg.n_key_value_heads
    expected = patched(pair.model, corrupted, cache, "blocks.1.attn.hook_v", (slice(None), slice(None), 1))
    torch.testing.assert_close(result[3, 1, 1], expected, atol=1e-5, rtol=1e-5)
    assert not result[2:4, :, kv_heads:].nan_to_num().any()  # what TransformerLens fills in, no measurement


@torch.no_grad()
def test_direct_path_patching_into_queries(pair, runs):
    """Wang et al. 2022: the source head's change reaches one head's query input and nothing else."""
    model = pair.model
    corrupted, cache = runs
    _, corrupted_cache = model.run_with_cache(corrupted)
    result = patching.get_act_patch_direct_path(model, corrupted, cache, corrupted_cache, metric, 0, 1, verbose=False)
    write = (cache["z", 0] - corrupted_cache["z", 0])[:, :, 1] @ model.blocks[0].attn.W_O[1]
    attention, ln1 = model.blocks[2].attn, model.blocks[2].ln1
    bias = 0 if attention.b_Q is None else attention.b_Q[2]
    query = ln1(corrupted_cache["resid_pre", 2] + write) @ attention.W_Q[2] + bias

    def replace_query(x, hook):
        x[:, :, 2] = query
        return x

    expected = metric(model.run_with_hooks(corrupted, fwd_hooks=[("blocks.2.attn.hook_q", replace_query)]))
    torch.testing.assert_close(result[2, 2], expected, atol=1e-4, rtol=1e-4)
    assert not model.cfg.use_split_qkv_input


@torch.no_grad()
@pytest.mark.parametrize("name", head_detector.HEAD_NAMES)
@pytest.mark.parametrize("exclude_bos", [False, True])
def test_detect_head(pair, name, exclude_bos):
    """The share of attention on the detection pattern's cells, counted here by hand."""
    text = "a b c a b c d a"
    scores = head_detector.detect_head(pair.model, text, name, exclude_bos=exclude_bos)
    tokens = pair.model.to_tokens(text)[0].tolist()
    _, cache = pair.model.run_with_cache(pair.model.to_tokens(text))
    n = len(tokens)
    cells = {
        "previous_token_head": [(i, i - 1) for i in range(1, n)],
        "duplicate_token_head": [(i, j) for i in range(n) for j in range(i) if tokens[i] == tokens[j]],
        "induction_head": [
            (i, j) for i in range(n) for j in range(1, i + 1) if tokens[j - 1] == tokens[i] and j - 1 < i
        ],
    }[name]
    for layer in range(3):
        pattern = cache["pattern", layer][0].clone()
        if exclude_bos:
            pattern[:, :, 0] = 0
        hits = torch.stack([pattern[:, i, j] for i, j in cells if not (exclude_bos and j == 0)]).sum(0)
        torch.testing.assert_close(scores[layer], hits / pattern.sum((1, 2)), atol=2e-3, rtol=0)


@torch.no_grad()
def test_cache_helpers_decompose_the_stream(pair):
    tokens = pair.model.to_tokens(CLEAN)
    logits, cache = pair.model.run_with_cache(tokens)
    assert isinstance(cache, ActivationCache)
    final = cache["resid_post", -1]
    accumulated = cache.accumulated_resid()
    assert torch.equal(accumulated[-1], final)
    decomposed, labels = cache.decompose_resid(return_labels=True)
    torch.testing.assert_close(decomposed.sum(0), final, atol=1e-4, rtol=1e-4)
    assert len(labels) == len(decomposed)

    heads = cache.stack_head_results()
    expected = torch.einsum("bphe,hed->hbpd", cache["z", 1], pair.model.blocks[1].attn.W_O)
    torch.testing.assert_close(
        heads[pair.model.cfg.n_heads : 2 * pair.model.cfg.n_heads], expected, atol=1e-5, rtol=1e-5
    )


@torch.no_grad()
def test_logit_lens_ends_in_the_logits(pair):
    logits, cache = pair.model.run_with_cache(pair.model.to_tokens(CLEAN))
    lens = cache.logit_lens(return_type="logits", positions=None)
    torch.testing.assert_close(lens.values[-1], logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_logit_attributions_and_the_bias_add_up_to_the_logit(pair):
    logits, cache = pair.model.run_with_cache(pair.model.to_tokens(CLEAN))
    parts = cache.decompose_resid(layer=-1, mode="full")
    attributions = cache.logit_attrs(parts, tokens=torch.tensor([[5] * 7]))
    total = attributions.sum(0) + pair.model.logit_bias(5)
    torch.testing.assert_close(total, logits[..., 5], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_full_decomposition_with_heads_and_biases(pair):
    """Heads, neurons, embeddings and accumulated biases are the whole stream."""
    _, cache = pair.model.run_with_cache(pair.model.to_tokens(CLEAN))
    parts = cache.get_full_resid_decomposition(expand_neurons=False)
    torch.testing.assert_close(parts.sum(0), cache["resid_post", -1], atol=1e-4, rtol=1e-4)
