"""The contract of the hook points as checks that run on any HookedTransformer, a user's own included.

A hook point fires once per forward pass, its value is what its name says, and an edit changes the logits; or it is
read-only and an edit raises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.hooks import HookPoint, ReadOnlyHookPoint, hook_shape
from workbench.transformer import HookedTransformer


@torch.no_grad()
def check_hook_contract(model: HookedTransformer, tokens: Tensor) -> None:
    """Runs every check below.

    Args:
        model: in eval mode.
        tokens: [batch, pos] without padding; a few varied tokens suffice.

    Raises:
        AssertionError: naming the first hook point, or the identity, that does not hold.
    """
    check_hooks_fire(model, tokens)
    check_edits_change_logits(model, tokens)
    check_identities(model, tokens)
    check_statistics(model, tokens)


@torch.no_grad()
def check_hooks_fire(model: HookedTransformer, tokens: Tensor) -> None:
    """Every active hook point fires exactly once, with the shape that its name promises."""
    batch, pos = tokens.shape
    for name in _active(model):
        shapes: list[tuple[int, ...]] = []
        model.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook, seen=shapes: seen.append(tuple(x.shape)))])
        assert len(shapes) == 1, f"{name} fired {len(shapes)} times in one forward pass"
        if isinstance(model.hook_dict[name], ReadOnlyHookPoint):
            assert shapes[0][:3] == (batch, model.cfg.n_heads, pos), f"{name} has shape {shapes[0]}"
        else:
            expected = hook_shape(model.cfg, name, batch, pos)
            assert shapes[0] == expected, f"{name} has shape {shapes[0]}, expected {expected}"


@torch.no_grad()
def check_edits_change_logits(model: HookedTransformer, tokens: Tensor) -> None:
    """An edit at any hook point changes the logits, or raises because the point is read-only."""
    clean = model(tokens)
    generator = torch.Generator().manual_seed(0)

    def perturb(x: Tensor, hook: HookPoint) -> Tensor:
        return x * (1 + 0.5 * torch.rand(x.shape, generator=generator).to(x))

    for name in _active(model):
        if isinstance(model.hook_dict[name], ReadOnlyHookPoint):
            try:
                model.run_with_hooks(tokens, fwd_hooks=[(name, perturb)])
            except ValueError:
                continue
            raise AssertionError(f"{name} is read-only, yet an edit did not raise")
        edited = model.run_with_hooks(tokens, fwd_hooks=[(name, perturb)])
        assert not torch.equal(edited, clean), f"an edit of {name} does not change the logits"


@torch.no_grad()
def check_identities(model: HookedTransformer, tokens: Tensor, tolerance: float = 1e-4) -> None:
    """What the names imply: residuals add up, softmax(scores) = pattern, pattern @ v = z, x̂ · scale = x, …"""
    logits, cache = model.run_with_cache(tokens)
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        pattern, v = cache[f"{block}.attn.hook_pattern"], cache[f"{block}.attn.hook_v"]
        v_of_head = v.repeat_interleave(model.cfg.n_heads // v.shape[2], dim=2)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v_of_head)
        sums = {
            "resid_mid = resid_pre + attn_out": (
                cache[f"{block}.hook_resid_pre"] + cache[f"{block}.hook_attn_out"],
                cache[f"{block}.hook_resid_mid"],
            ),
            "resid_post = resid_mid + mlp_out": (
                cache[f"{block}.hook_resid_mid"] + cache[f"{block}.hook_mlp_out"],
                cache[f"{block}.hook_resid_post"],
            ),
            "pattern = softmax(scores)": (cache[f"{block}.attn.hook_attn_scores"].softmax(dim=-1), pattern),
            "z = pattern @ v": (z, cache[f"{block}.attn.hook_z"]),
        }
        for identity, (left, right) in sums.items():
            _assert_close(left, right, tolerance, f"{identity} in layer {layer}")
    normalized = cache["ln_final.hook_normalized"] * model.ln_final.w
    if model.ln_final.b is not None:
        normalized = normalized + model.ln_final.b
    _assert_close(normalized @ model.W_U + model.b_U, logits, tolerance, "logits = unembed(ln_final)")


@torch.no_grad()
def check_statistics(model: HookedTransformer, tokens: Tensor, tolerance: float = 1e-4) -> None:
    """What the kernel emits equals the same numbers taken from the materialised pattern in float64."""
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith(("pattern", "attn_scores")))
    _, statistics = model.run_with_statistics(tokens)
    for layer in range(model.cfg.n_layers):
        p = cache[f"blocks.{layer}.attn.hook_pattern"].double()  # [batch, head, query, key]
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"].double()
        expected = {
            "lse": scores.logsumexp(dim=-1),
            "entropy": torch.special.entr(p).sum(dim=-1),
            "max_weight": p.amax(dim=-1),
            "received": p.sum(dim=-2),
        }
        for name, value in expected.items():
            if name in statistics:
                _assert_close(statistics[name][layer].double(), value, tolerance, f"{name} in layer {layer}")


def _active(model: HookedTransformer) -> list[str]:
    """The hook points that fire, without statistics whose parameters the model's request does not give."""
    names = model.active_hook_names(None)
    return names if model.statistics_request.classes is not None else [n for n in names if "class_mass" not in n]


def _assert_close(left: Tensor, right: Tensor, tolerance: float, what: str) -> None:
    largest = right.abs().nan_to_num(posinf=0.0).max().clamp_min(1.0)
    difference = (left - right).abs().max() / largest
    assert difference <= tolerance, f"{what} does not hold: off by {float(difference):.1e} of the largest value"
