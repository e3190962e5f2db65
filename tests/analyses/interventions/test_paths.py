"""Path patching against three whole runs, kept patterns against kept patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses.interventions.metrics import token_losses
from workbench.analyses.interventions.paths import CleanRun, Receiver, Receivers
from workbench.analyses.interventions.sweeps import Head, Intervention, measure
from workbench.analyses.running import Sequences

N, LAYERS, HEADS = 9, 4, 4
ROTARY: dict[str, Any] = {"positional_embedding_type": "rotary", "n_key_value_heads": 2, "normalization_type": "RMS"}
KINDS: dict[str, dict[str, Any]] = {
    "pre-norm, grouped": ROTARY | {"gated_mlp": True, "act_fn": "silu"},
    "LayerNorm with biases": {"normalization_type": "LN", "use_qkv_bias": True, "use_attn_out_bias": True},
    "sandwich": ROTARY | {"norm_placement": "sandwich"},
    "output, normalised keys": ROTARY | {"norm_placement": "output", "qk_norm": "per_head"},
    "parallel": ROTARY | {"parallel_attn_mlp": True, "use_sink_logits": True},
    "one copy of the stream for each head": ROTARY | {"use_split_qkv_input": True},
}
PATHS: list[tuple[Head, Receivers]] = [
    ((0, 1), "logits"),
    ((3, 2), "logits"),
    ((0, 3), [Receiver(1, 2, "q")]),
    ((0, 3), [Receiver(2, 3, "k")]),
    ((1, 0), [Receiver(2, 1, "v")]),
    ((1, 0), [Receiver(3, 0, "q"), Receiver(3, 3, "k"), Receiver(2, 2, "v")]),
]


def build(options: dict[str, Any]) -> HookedTransformer:
    cfg = TransformerConfig(
        n_layers=LAYERS, d_model=24, n_heads=HEADS, d_head=6, d_mlp=20, d_vocab=31, n_ctx=16, **options
    )  # fmt: skip
    model = HookedTransformer(cfg).double().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def prompts() -> Sequences:
    real = torch.arange(N) < torch.tensor([N, 6])[:, None]
    tokens = torch.randint(0, 31, (2, N), generator=torch.Generator().manual_seed(1))
    return Sequences(tokens.masked_fill(~real, 0), real)


def three_passes(model: HookedTransformer, sender: Head, value: Tensor, receivers: Receivers) -> list[tuple]:
    """Hooks of the third pass: the first keeps what all parts write, the second records what receivers then read."""
    batch = prompts()
    last = f"blocks.{LAYERS - 1}.hook_resid_post"
    read_at = (
        [last] if receivers == "logits" else [f"blocks.{r.layer}.attn.hook_{r.input}" for r in receivers]  # type: ignore
    )
    _, clean = model.run_with_cache(batch.tokens, attention_mask=batch.real)
    recorded: dict[str, Tensor] = {}

    def frozen(x: Tensor, hook: Any) -> Tensor:
        x = clean[hook.name].clone()
        if hook.name == f"blocks.{sender[0]}.attn.hook_z":
            x[:, :, sender[1]] = value
        return x

    def record(x: Tensor, hook: Any) -> None:
        recorded[hook.name] = x.clone()

    held = [(lambda name: name.endswith(("hook_z", "hook_mlp_out")), frozen)]
    model.run_with_hooks(batch.tokens, attention_mask=batch.real, fwd_hooks=[*held, *((n, record) for n in read_at)])
    if receivers == "logits":
        return [(last, lambda x, hook: recorded[last])]
    n_kv = model.cfg.n_key_value_heads
    hooks = []
    for receiver, name in zip(receivers, read_at, strict=True):
        place = receiver.head if receiver.input == "q" else receiver.head // (HEADS // n_kv)  # type: ignore

        def patch(x: Tensor, hook: Any, place: int = place) -> Tensor:
            x = x.clone()
            x[:, :, place] = recorded[hook.name][:, :, place]
            return x

        hooks.append((name, patch))
    return hooks


def rows() -> Tensor:
    return torch.tensor([list(range(8)), [0, 1, 2, 3, 4, 0, 0, 0]])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_path_patching_equals_three_passes(kind: str) -> None:
    model, batch = build(KINDS[kind]), prompts()
    value = torch.randn(2, N, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    run, metric = CleanRun.of(model, batch), token_losses(batch.tokens, rows())
    found = measure(
        model, batch, [Intervention(), *(run.along_path(sender, value, to) for sender, to in PATHS)], metric
    )
    for (sender, receivers), losses in zip(PATHS, found[1:], strict=True):
        hooks = three_passes(model, sender, value, receivers)
        with model.hooks(fwd_hooks=hooks):
            log_p = model(batch.tokens, attention_mask=batch.real).log_softmax(-1)
        expected = -log_p.gather(1, rows()[..., None].expand(-1, -1, 31)).gather(
            2, batch.tokens.gather(1, rows() + 1)[..., None]
        )
        torch.testing.assert_close(losses, expected[..., 0], rtol=1e-10, atol=1e-10)
        assert (losses - found[0]).abs().max() > 1e-5, (sender, receivers)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_kept_queries_and_keys_keep_the_patterns(kind: str) -> None:
    model, batch = build(KINDS[kind]), prompts()
    value = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    metric, heads = token_losses(batch.tokens, rows()), [(0, 1), (2, 3), (3, 0)]
    run = CleanRun.of(model, batch)
    found = measure(model, batch, [run.keeping_patterns(*head, value) for head in heads], metric)
    _, clean = model.run_with_cache(batch.tokens, attention_mask=batch.real)
    for (layer, head), losses in zip(heads, found, strict=True):

        def ablate(z: Tensor, hook: Any, head: int = head) -> Tensor:
            z = z.clone()
            z[:, :, head] = value
            return z

        keep = (lambda name: name.endswith("hook_pattern"), lambda x, hook: clean[hook.name])
        with model.hooks(fwd_hooks=[keep, (f"blocks.{layer}.attn.hook_z", ablate)]):
            log_p = model(batch.tokens, attention_mask=batch.real).log_softmax(-1)
        for prompt, row in ((0, 0), (0, 7), (1, 4)):
            expected = -log_p[prompt, row, batch.tokens[prompt, row + 1]]
            torch.testing.assert_close(losses[prompt, row], expected, rtol=1e-10, atol=1e-10)


def test_paths_without_a_meaning_are_refused() -> None:
    run = CleanRun.of(build(ROTARY), prompts())
    for receiver in (Receiver(1, 0, "k"), Receiver(0, 1, "q")):
        with pytest.raises(ValueError, match=f"L{receiver.layer}H{receiver.head} does not come after L1H2"):
            run.along_path((1, 2), 0.0, [receiver])
    post = CleanRun.of(build({"norm_placement": "post"}), prompts())
    with pytest.raises(ValueError, match="a single path has no meaning"):
        post.along_path((0, 0), 0.0, "logits")
