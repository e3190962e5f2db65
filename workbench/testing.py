"""The contract of the hook points as checks that run on any HookedTransformer, a user's own included.

A hook point fires once per forward pass, its value is what its name says, and an edit changes the logits; or it is
read-only and an edit raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.hooks import ActivationCache, HookPoint, ReadOnlyHookPoint, hook_shape
from workbench.kv_cache import KVCache
from workbench.transformer import HookedTransformer


@torch.no_grad()
def check_hook_contract(model: HookedTransformer, tokens: Tensor, **forward_arguments: Any) -> None:
    """Runs every check below.

    Args:
        model: in eval mode.
        tokens: [batch, pos] without padding; a few varied tokens suffice.
        **forward_arguments: what else the model's call needs, such as the ``decoder_input`` of an encoder–decoder.

    Raises:
        AssertionError: naming the first hook point, or the identity, that does not hold.
    """
    check_hooks_fire(model, tokens, **forward_arguments)
    check_edits_change_logits(model, tokens, **forward_arguments)
    check_identities(model, tokens, **forward_arguments)
    check_statistics(model, tokens, **forward_arguments)


@torch.no_grad()
def check_hooks_fire(model: HookedTransformer, tokens: Tensor, **forward_arguments: Any) -> None:
    """Every active hook point fires exactly once, with the shape that its name promises."""
    lengths = {"encoder": tokens.shape[1], "decoder": tokens.shape[1]}
    if "decoder_input" in forward_arguments:
        lengths["decoder"] = forward_arguments["decoder_input"].shape[1]
    seen: dict[str, list[tuple[int, ...]]] = {name: [] for name in _active(model)}
    statistics = [name for name in seen if isinstance(model.hook_dict[name], ReadOnlyHookPoint)]
    for names in (statistics, [name for name in seen if name not in statistics]):  # the kernel's own, then patterns
        with model.hooks(fwd_hooks=[(name, lambda x, hook: seen[hook.name].append(tuple(x.shape))) for name in names]):
            _output(model, tokens, forward_arguments)
    for name, shapes in seen.items():
        assert len(shapes) == 1, f"{name} fired {len(shapes)} times in one forward pass"
        pos = lengths["encoder" if "encoder_" in name else "decoder"]
        key_pos = lengths["encoder"] if "cross_attn" in name else pos
        if isinstance(model.hook_dict[name], ReadOnlyHookPoint) and not name.endswith("hook_state"):
            per = key_pos if name.endswith("hook_received") else pos
            assert shapes[0][:3] == (len(tokens), model.cfg.n_heads, per), f"{name} has shape {shapes[0]}"
        else:
            expected = hook_shape(model.cfg, name, len(tokens), pos, key_pos)
            assert shapes[0] == expected, f"{name} has shape {shapes[0]}, expected {expected}"


@torch.no_grad()
def check_edits_change_logits(model: HookedTransformer, tokens: Tensor, **forward_arguments: Any) -> None:
    """An edit at any hook point changes the logits, or raises because the point is read-only."""
    clean = _output(model, tokens, forward_arguments)
    generator = torch.Generator().manual_seed(0)

    def perturb(x: Tensor, hook: HookPoint) -> Tensor:
        if not x.is_floating_point():  # the choice of experts: every token takes others
            assert model.cfg.moe is not None
            return (x + 1) % model.cfg.moe.n_experts
        return x * (1 + 0.5 * torch.rand(x.shape, generator=generator).to(x))

    for name in _active(model):
        if isinstance(model.hook_dict[name], ReadOnlyHookPoint):
            try:
                with model.hooks(fwd_hooks=[(name, perturb)]):
                    _output(model, tokens, forward_arguments)
            except ValueError:
                continue
            raise AssertionError(f"{name} is read-only, yet an edit did not raise")
        with model.hooks(fwd_hooks=[(name, perturb)]):
            edited = _output(model, tokens, forward_arguments)
        assert not torch.equal(edited, clean), f"an edit of {name} does not change the logits"


@torch.no_grad()
def check_identities(
    model: HookedTransformer, tokens: Tensor, tolerance: float = 1e-4, **forward_arguments: Any
) -> None:
    """What the names imply: residuals add up, softmax(scores) = pattern, pattern @ v = z, x̂ · scale = x, …"""
    output = "logits" if model.cfg.use_unembed else None
    logits, cache = model.run_with_cache(tokens, output, **forward_arguments)
    for layer in range(model.cfg.n_layers):
        for identity, (left, right) in _identities(model, cache, layer).items():
            _assert_close(left, right, tolerance, f"{identity} in layer {layer}")
    if not model.cfg.has_final_norm or model.cfg.use_mlm_head or output is None:
        return
    normalized = cache["ln_final.hook_normalized"] * model.ln_final.gain
    if model.ln_final.b is not None:
        normalized = normalized + model.ln_final.b
    expected = model.cfg.logit_scale * (normalized @ model.W_U) + model.b_U
    if (cap := model.cfg.output_logits_soft_cap) is not None:
        expected = cap * torch.tanh(expected / cap)
    _assert_close(expected, logits, tolerance, "logits = unembed(ln_final)")


def _identities(model: HookedTransformer, cache: ActivationCache, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
    cfg, block = model.cfg, model.blocks[layer]
    at = {name: cache[f"blocks.{layer}.{name}"] for name in _RESIDUALS if f"blocks.{layer}.{name}" in cache}
    pre, attn_out, mlp_out, post = (at[f"hook_{name}"] for name in ("resid_pre", "attn_out", "mlp_out", "resid_post"))
    pattern, v = cache[f"blocks.{layer}.attn.hook_pattern"], cache[f"blocks.{layer}.attn.hook_v"]
    v_of_head = v.repeat_interleave(cfg.n_heads // v.shape[2], dim=2)
    z = torch.einsum("bhqk,bkhd->bqhd", pattern, v_of_head)
    found = {"z = pattern @ v": (z, cache[f"blocks.{layer}.attn.hook_z"])}
    if cfg.layer_types[layer] != "linear" and not cfg.use_sink_logits:
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"]
        found["pattern = softmax(scores)"] = scores.softmax(dim=-1), pattern
    if cfg.parallel_attn_mlp:
        return found | {"resid_post = resid_pre + attn_out + mlp_out": (pre + attn_out + mlp_out, post)}
    mid = at["hook_resid_mid"]
    before_mlp = at.get("hook_resid_cross", mid)
    if cfg.norm_placement == "post":
        return found | {
            "resid_mid = ln1(resid_pre + attn_out)": (block.ln1(pre + attn_out), mid),
            "resid_post = ln2(resid_mid + mlp_out)": (block.ln2(before_mlp + mlp_out), post),
        }
    return found | {
        "resid_mid = resid_pre + attn_out": (pre + attn_out, mid),
        "resid_post = resid_mid + mlp_out": (before_mlp + mlp_out, post),
    }


_RESIDUALS = tuple(f"hook_{x}" for x in ("resid_pre", "attn_out", "resid_mid", "resid_cross", "mlp_out", "resid_post"))


@torch.no_grad()
def check_statistics(
    model: HookedTransformer, tokens: Tensor, tolerance: float = 1e-4, **forward_arguments: Any
) -> None:
    """What the kernel emits equals the same numbers taken from the materialised pattern in float64."""
    output = "logits" if model.cfg.use_unembed else None
    names = lambda name: name.startswith("blocks") and name.endswith((".attn.hook_pattern", ".attn.hook_attn_scores"))  # noqa: E731
    _, cache = model.run_with_cache(tokens, output, names_filter=names, **forward_arguments)
    _, statistics = model.run_with_statistics(tokens, return_type=output, **forward_arguments)
    for index, layer in enumerate(statistics.layer_indices):
        p = cache[f"blocks.{layer}.attn.hook_pattern"].double()  # [batch, head, query, key]
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"].double()
        if (sink_logits := model.blocks[layer].attn.sink_logits) is not None:
            column = sink_logits.double()[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        expected = {
            "lse": scores.logsumexp(dim=-1),
            "entropy": torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1),
            "max_weight": p.amax(dim=-1),
            "received": p.sum(dim=-2),
        }
        for name, value in expected.items():
            if name in statistics:
                _assert_close(statistics[name][index].double(), value, tolerance, f"{name} in layer {layer}")


@torch.no_grad()
def check_cache(
    model: HookedTransformer,
    tokens: Tensor,
    real: Tensor | None = None,
    tolerance: float = 1e-4,
    **forward_arguments: Any,
) -> None:
    """A text that is read on a key/value cache in pieces of 1, of 7, of irregular sizes and at once has the logits of
    one pass without, under whatever hooks are active.

    Args:
        tokens: [batch, pos], of an encoder–decoder those of the decoder.
        real: bool [batch, pos], false at pads, which must be on the left; None: no pads.
        **forward_arguments: what else the call needs, such as the ``encoder_output`` of an encoder–decoder.
    """
    n = tokens.shape[1]
    real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
    whole = _read(model, tokens, real, forward_arguments)[real]
    half = n // 2
    for sizes in ([1] * n, [7] * (n // 7) + [n % 7], [half, 1, n - half - 1], [n]):
        logits = read_in_pieces(model, tokens, sizes, real, **forward_arguments)
        _assert_close(logits[real], whole, tolerance, f"cached = uncached in pieces of {max(sizes)}")


@torch.no_grad()
def read_in_pieces(
    model: HookedTransformer,
    tokens: Tensor,
    sizes: Iterable[int],
    real: Tensor | None = None,
    kv_cache: KVCache | None = None,
    **forward_arguments: Any,
) -> Tensor:
    """The logits [batch, pos, d_vocab] of a text that is read in pieces of these sizes on one cache.

    Arguments as in ``check_cache``; ``kv_cache`` is a new one unless given.
    """
    cache, sizes = KVCache() if kv_cache is None else kv_cache, [size for size in sizes if size]
    real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
    pieces = zip(tokens.split(sizes, dim=1), real.split(sizes, dim=1), strict=True)
    outputs = [_read(model, piece, mask, {**forward_arguments, "kv_cache": cache}) for piece, mask in pieces]
    return torch.cat(outputs, dim=1)


def _read(model: HookedTransformer, tokens: Tensor, real: Tensor, forward_arguments: dict[str, Any]) -> Tensor:
    """The logits of a text, of an encoder–decoder those of the decoder's."""
    if model.cfg.n_encoder_layers is None:
        return model(tokens, attention_mask=real, **forward_arguments)
    return model(decoder_input=tokens, decoder_attention_mask=real, **forward_arguments)


def _output(model: HookedTransformer, tokens: Tensor, forward_arguments: Mapping[str, Any]) -> Tensor:
    """The logits [batch, pos, d_vocab]; without a head what it would read, ln_final's output [batch, pos, d_model]."""
    if model.cfg.use_unembed:
        return model(tokens, **forward_arguments)
    streams: list[Tensor] = []
    handle = model.ln_final.register_forward_hook(lambda module, inputs, output: streams.append(output))
    try:
        model(tokens, None, **forward_arguments)
    finally:
        handle.remove()
    return streams[0]


def _active(model: HookedTransformer) -> list[str]:
    """The hook points that fire, without statistics whose parameters the model's request does not give."""
    names = model.active_hook_names(None)
    return names if model.statistics_request.classes is not None else [n for n in names if "class_mass" not in n]


def _assert_close(left: Tensor, right: Tensor, tolerance: float, what: str) -> None:
    largest = right.abs().nan_to_num(posinf=0.0).max().clamp_min(1.0)
    difference = (left - right).abs().max() / largest
    assert difference <= tolerance, f"{what} does not hold: off by {float(difference):.1e} of the largest value"
