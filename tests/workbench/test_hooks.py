"""The contract of the hook points, and the ways to add and remove hooks."""

from __future__ import annotations

import psutil
import pytest
import torch

from workbench.hooks import hook_shape
from workbench.testing import check_hook_contract

ENTROPY = "blocks.1.attn.hook_entropy"
PATTERN = "blocks.1.attn.hook_pattern"


def test_contract(model, tokens):
    check_hook_contract(model, tokens[:, :20])


def test_contract_with_optional_points(model, tokens):
    model.set_use_attn_result(True)
    check_hook_contract(model, tokens[:, :20])
    assert "blocks.0.attn.hook_result" in model.run_with_cache(tokens[:, :20])[1]


def test_contract_in_float64_with_the_pattern_always_built(model, tokens):
    model.double()
    model.set_attention_backend("materialised")
    check_hook_contract(model, tokens[:, :20])


@torch.no_grad()
def test_split_inputs_leave_the_function_alone_and_reach_one_head(model, tokens):
    clean = model(tokens)
    model.set_use_split_qkv_input(True)
    torch.testing.assert_close(model(tokens), clean, atol=1e-4, rtol=1e-4)
    kv_heads = model.cfg.n_key_value_heads
    for name, heads in (("hook_q_input", model.cfg.n_heads), ("hook_k_input", kv_heads), ("hook_v_input", kv_heads)):
        full_name = f"blocks.1.attn.{name}"
        _, cache = model.run_with_cache(tokens, names_filter=full_name)
        assert (
            cache[full_name].shape
            == hook_shape(model.cfg, full_name, *tokens.shape)
            == (3, 150, heads, model.cfg.d_model)
        )

    def remove_input_of_head_2(x, hook):
        x[:, :, 2] = 0
        return x

    _, before = model.run_with_cache(tokens, names_filter=PATTERN)
    with model.hooks([("blocks.1.attn.hook_q_input", remove_input_of_head_2)]):
        _, after = model.run_with_cache(tokens, names_filter=PATTERN)
    changed = (before[PATTERN] != after[PATTERN]).flatten(2).any(-1).any(0)
    assert changed.tolist() == [head == 2 for head in range(model.cfg.n_heads)]


@pytest.mark.parametrize(
    "names", ["blocks.1.attn.hook_patern", ["blocks.9.hook_resid_pre"], lambda name: "attention" in name, []]
)
def test_names_that_select_nothing_are_errors(pair, tokens, names):
    for use in (
        lambda: pair.model.run_with_cache(tokens, names_filter=names),
        lambda: pair.model.run_with_hooks(tokens, fwd_hooks=[(names, lambda x, hook: None)]),
        lambda: pair.model.add_hook(names, lambda x, hook: None),
    ):
        with pytest.raises(ValueError, match="hook"):
            use()


def test_a_near_name_is_offered(pair, tokens):
    with pytest.raises(ValueError, match="did you mean blocks.1.attn.hook_pattern"):
        pair.model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_patern")


def test_a_point_that_is_switched_off_says_how_to_switch_it_on(pair, tokens):
    with pytest.raises(ValueError, match=r"set_use_attn_result\(True\)"):
        pair.model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_result")


def test_a_typo_in_the_second_hook_installs_neither(pair, tokens):
    hooks = [(PATTERN, lambda x, hook: x), ("blocks.1.attn.hook_patern", lambda x, hook: x)]
    with pytest.raises(ValueError, match="patern"):
        pair.model.run_with_hooks(tokens, fwd_hooks=hooks)
    assert not pair.model.list_hooks()


def test_an_exception_inside_a_hook_leaves_no_hook(pair, tokens):
    def fail(x, hook):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        pair.model.run_with_hooks(tokens, fwd_hooks=[(PATTERN, fail)])
    assert not pair.model.list_hooks()


def test_temporary_hooks_leave_the_users_own(model, tokens):
    fired = []
    model.add_hook(ENTROPY, lambda x, hook: fired.append(hook.name))
    model.run_with_cache(tokens)
    with model.hooks([(PATTERN, lambda x, hook: None)]):
        model.run_with_cache(tokens, names_filter=PATTERN)
    model(tokens)
    assert fired == [ENTROPY] * 3


@pytest.mark.parametrize("in_place", [False, True])
def test_an_edit_of_a_statistic_raises(pair, tokens, in_place):
    with pytest.raises(ValueError, match=r"hook_entropy is read-only"):
        pair.model.run_with_hooks(tokens, fwd_hooks=[(ENTROPY, lambda x, hook: x.zero_() if in_place else x + 1)])


def test_statistics_keep_the_flash_path(model, tokens, monkeypatch):
    """A hook on a statistic builds no pattern; a hook on the pattern builds that layer's only."""
    import workbench.components.attention as attention_module

    built = []
    real = attention_module.attention_scores
    monkeypatch.setattr(attention_module, "attention_scores", lambda *a, **k: built.append(1) or real(*a, **k))
    model.run_with_cache(tokens, names_filter=lambda name: name.endswith(("hook_entropy", "hook_received")))
    assert not built
    model.run_with_cache(tokens, names_filter=PATTERN)
    assert len(built) == 1


def test_flash_refuses_a_hook_on_the_pattern(model, tokens):
    model.set_attention_backend("flash")
    with pytest.raises(ValueError, match="attention_backend='auto'"):
        model.run_with_cache(tokens, names_filter=PATTERN)


@torch.no_grad()
def test_statistics_describe_the_edited_pattern(pair, tokens):
    """On a materialised layer the statistics are those of the pattern that multiplies v, lse that of the scores."""

    def look_at_first_key_only(pattern, hook):
        edited = torch.zeros_like(pattern)
        edited[..., 0] = 1
        return edited

    _, clean = pair.model.run_with_statistics(tokens)
    with pair.model.hooks([(PATTERN, look_at_first_key_only)]):
        _, edited = pair.model.run_with_statistics(tokens)
    assert torch.equal(edited["sink_mass"][1], torch.ones_like(edited["sink_mass"][1]))
    assert torch.equal(edited["entropy"][1], torch.zeros_like(edited["entropy"][1]))
    assert torch.equal(edited["received"][1, ..., 0], torch.full_like(edited["received"][1, ..., 0], 150))
    torch.testing.assert_close(edited["lse"][1], clean["lse"][1], atol=1e-4, rtol=1e-4)
    assert not torch.equal(edited["entropy"][2], clean["entropy"][2])


def test_an_unfiltered_cache_that_does_not_fit_is_refused_with_the_way_out(pair, tokens, monkeypatch):
    memory = psutil.virtual_memory()._replace(available=1_000_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    with pytest.raises(MemoryError, match="names_filter"):
        pair.model.run_with_cache(tokens)
    pair.model.run_with_cache(tokens, names_filter=ENTROPY)


def test_an_unfiltered_cache_holds_no_statistics(pair, tokens):
    _, cache = pair.model.run_with_cache(tokens)
    assert PATTERN in cache
    assert ENTROPY not in cache
    with pytest.raises(KeyError, match=f"{ENTROPY} is not in this cache.*names_filter"):
        cache[ENTROPY]
    with pytest.raises(KeyError, match=f"did you mean {PATTERN}"):
        cache[PATTERN[:-1]]


def test_position_slices_of_statistics_slice_queries(pair, tokens):
    _, whole = pair.model.run_with_cache(tokens, names_filter=ENTROPY)
    _, part = pair.model.run_with_cache(tokens, names_filter=ENTROPY, pos_slice=(10, 20))
    assert torch.equal(part[ENTROPY], whole[ENTROPY][:, :, 10:20])


def test_gradients_reach_backward_hooks(pair, tokens):
    gradients = {}

    def keep(gradient, hook):
        gradients[hook.name] = gradient

    names = ["blocks.0.hook_resid_pre", PATTERN]
    with pair.model.hooks(bwd_hooks=[(name, keep) for name in names]):
        pair.model(tokens, return_type="loss").backward()
    assert all(gradients[name].abs().sum() > 0 for name in names)
    pair.model.zero_grad()


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("ln_final.hook_normalized", lambda x: 5),
        ("ln_final.hook_normalized", lambda x: x.mean()),
        ("blocks.1.hook_resid_post", lambda x: x[:1]),
        ("blocks.1.attn.hook_z", lambda x: x[..., :-1]),
        ("blocks.0.attn.hook_pattern", lambda x: x[None]),
        ("hook_embed", lambda x: (x,)),
        ("hook_embed", lambda x: False),
        ("hook_embed", lambda x: x.double()),
        ("blocks.0.attn.hook_pattern", lambda x: x.bfloat16()),
        ("blocks.1.hook_mlp_out", lambda x: x.to("meta")),
    ],
)
def test_a_hook_that_returns_no_such_value_is_named(pair, tokens, name, edit):
    with pytest.raises(ValueError, match=f"a hook on {name} must return a tensor of the shape"):
        pair.model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: edit(x))])


def test_an_edit_of_a_statistic_raises_in_inference_mode(pair, tokens):
    def edit(x, hook):
        x.mul_(0.5)

    with torch.inference_mode(), pytest.raises(ValueError, match="read-only"):
        pair.model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_max_weight", edit)])
