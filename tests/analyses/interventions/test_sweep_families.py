"""The engine of interventions against whole runs, at every hook point of every kind of layer, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, MixtureOfExperts, TransformerConfig
from workbench.analyses.interventions import sweeps
from workbench.analyses.interventions.edits import replace_head
from workbench.analyses.interventions.metrics import Metric, last_rows, logit_difference, token_losses
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Sequences
from workbench.hooks import ReadOnlyHookPoint

N, LAYERS, LENGTHS = 9, 3, torch.tensor([9, 5, 2, 7])
ROTARY: dict[str, Any] = {"positional_embedding_type": "rotary"}
FAMILIES: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "grouped, gated, RMS": ROTARY | {"n_key_value_heads": 2, "gated_mlp": True, "normalization_type": "RMS"},
    "parallel": ROTARY | {"parallel_attn_mlp": True},
    "parallel, one norm": ROTARY | {"parallel_attn_mlp": True, "shared_parallel_norm": True},
    "post": {"norm_placement": "post", "positional_embedding_type": "sinusoidal"},
    "sandwich, window": ROTARY | {"norm_placement": "sandwich", "attn_types": ("local", "global", "local"),
                                  "window_size": 3, "n_global_tokens": 1, "attn_scores_soft_cap": 2.0},
    "output": ROTARY | {"norm_placement": "output", "qk_norm": "across_heads"},
    "alibi": {"positional_embedding_type": "alibi", "use_embed_norm": True},
    "relative": {"positional_embedding_type": "relative", "n_relative_buckets": 8, "relative_max_distance": 16},
    "sink logits, experts": ROTARY | {"use_sink_logits": True, "gated_mlp": True, "glu_limit": 1.0,
                                      "moe": MixtureOfExperts(n_experts=4, n_experts_per_token=2)},
    "linear": {"attn_types": ("global", "global", "linear")},
    "bidirectional": {"attention_dir": "bidirectional", "use_mlm_head": True},
}  # fmt: skip


def model_of(family: str) -> HookedTransformer:
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=LAYERS, d_model=16, n_heads=4, d_head=4, d_mlp=12, d_vocab=17, n_ctx=N,
        init_mode="normal", initializer_range=0.4, **FAMILIES[family],
    )  # fmt: skip
    model = HookedTransformer(cfg).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sink_logits", ".b_O", ".b_out")):  # which start at zero
                parameter.normal_()
    return model


@pytest.fixture(scope="module")
def prompts() -> Sequences:
    real = torch.arange(N) < LENGTHS[:, None]
    tokens = torch.randint(0, 17, (4, N), generator=torch.Generator().manual_seed(1))
    return Sequences(tokens.masked_fill(~real, 0), real)


def metrics(prompts: Sequences) -> dict[str, tuple[Metric, Callable[[Tensor], Tensor]]]:
    """Metrics, and what they are of logits [prompt, pos, d_vocab] by definition."""
    some, every = torch.tensor([[7, 0], [3, 2], [0, 0], [1, 5]]), torch.arange(N - 1).expand(4, -1)
    target, foil = torch.arange(4), torch.arange(4) + 5

    def losses(rows: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda logits: torch.stack([
            -logits[i].log_softmax(-1)[rows[i], prompts.tokens[i, rows[i] + 1]] for i in range(4)
        ])  # fmt: skip

    def difference(logits: Tensor) -> Tensor:
        return torch.stack([logits[i, n - 1, i] - logits[i, n - 1, i + 5] for i, n in enumerate(LENGTHS.tolist())])

    return {
        "one row": (logit_difference(target, foil, last_rows(prompts.real)), difference),
        "some rows": (token_losses(prompts.tokens, some), losses(some)),
        "all rows": (token_losses(prompts.tokens, every), losses(every)),
    }


def interventions(model: HookedTransformer) -> list[Intervention]:
    """At every hook point of the last layer and at some of the others, alone and with an earlier edit."""

    def edit(x: Tensor, hook: Any) -> Tensor:  # another one for each prompt and position
        if not x.is_floating_point():  # which experts
            return x.flip(-1)
        return x * torch.linspace(0.3, 0.6, x.numel(), dtype=x.dtype).view(x.shape) + 0.1

    editable = {name for name, point in model.hook_dict.items() if not isinstance(point, ReadOnlyHookPoint)}
    points = [name for name in model.active_hook_names(None) if name in editable]
    last = [Intervention({name: edit}, name) for name in points if name.startswith(f"blocks.{LAYERS - 1}.")]
    earlier = replace_head(1, 2)
    return [Intervention(), replace_head(0, 1), earlier, *last, earlier | last[-1], replace_head(0, 3) | last[0]]


@torch.no_grad()
def whole_run(model: HookedTransformer, prompts: Sequences, intervention: Intervention) -> Tensor:
    hooks = list(intervention.edits.items())
    return model.run_with_hooks(prompts.tokens, attention_mask=prompts.real, fwd_hooks=hooks)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sweep_equals_whole_runs(family: str, prompts: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    chosen = interventions(model)
    logits = [whole_run(model, prompts, each) for each in chosen]
    assert sum(torch.equal(logits[0], other) for other in logits[1:]) <= family.count("experts")  # edits matter
    several = 10 * prompts.tokens.numel()  # interventions in a batch
    for name, tokens_in_cache in (("one row", 1), ("one row", several), ("some rows", 2 * N), ("all rows", several)):
        monkeypatch.setattr(sweeps, "TOKENS_IN_CACHE", tokens_in_cache)
        metric, definition = metrics(prompts)[name]
        expected = torch.stack([definition(each) for each in logits])
        counted = prompts.real[:, 1:] if name == "all rows" else torch.ones(metric.shape, dtype=torch.bool)
        found = measure(model, prompts, chosen, metric)
        torch.testing.assert_close(found[:, counted], expected[:, counted], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("in_place", [False, True])
def test_hooks_that_are_there_already_act_once(prompts: Sequences, in_place: bool) -> None:
    model = model_of("grouped, gated, RMS")
    names = [f"blocks.{layer}.{name}" for layer in range(LAYERS) for name in ("hook_resid_pre", "attn.hook_z")]

    def bend(x: Tensor, hook: Any) -> Tensor:
        factor = torch.linspace(0.5, 1.5, x.shape[-1], dtype=x.dtype)
        return x.mul_(factor) if in_place else x * factor

    chosen = interventions(model)
    metric, definition = metrics(prompts)["one row"]
    plain = measure(model, prompts, chosen, metric)
    with model.hooks(fwd_hooks=[(name, bend) for name in names]):
        expected = torch.stack([definition(whole_run(model, prompts, each)) for each in chosen])
        found = measure(model, prompts, chosen, metric)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (found - plain).abs().max() > 1e-3
    assert not any(point._forward_hooks for point in model.hook_dict.values())  # nothing stays behind


def test_a_sweep_of_heads_runs_the_attention_of_later_layers_alone(prompts: Sequences) -> None:
    model, seen = model_of("alibi"), []
    attend = model.blocks[1].attn.forward
    model.blocks[1].attn.forward = lambda *inputs, **options: seen.append(1) or attend(*inputs, **options)  # type: ignore[method-assign]
    metric = metrics(prompts)["one row"][0]
    for edited, n_runs in (("attn.hook_z", 0), ("hook_mlp_out", 0), ("attn.hook_v", 1), ("hook_resid_pre", 1)):
        halve = Intervention({f"blocks.1.{edited}": lambda x, hook: x * 0.5})
        seen.clear()
        measure(model, prompts, [halve], metric)
        assert len(seen) == 1 + n_runs, edited  # one is the clean run
    seen.clear()
    measure(model, prompts, [replace_head(0, 1), replace_head(0, 2) | replace_head(1, 1)], metric)
    assert len(seen) == 1  # of both in one batch; the clean run ends before


def test_a_sweep_computes_no_row_behind_the_last_attention_that_it_does_not_read(prompts: Sequences) -> None:
    """Nor does it call an edit with fewer prompts or positions than there are."""
    model, seen, shapes = model_of("parallel"), [], []
    forward = model.blocks[-1].mlp.forward
    model.blocks[-1].mlp.forward = lambda x: seen.append(x.shape[0] * x.shape[1]) or forward(x)  # type: ignore[method-assign]
    keep = Intervention({f"blocks.{LAYERS - 1}.attn.hook_z": lambda z, hook: shapes.append(z.shape) or z})
    behind = Intervention({f"blocks.{LAYERS - 1}.hook_mlp_out": lambda x, hook: shapes.append(x.shape) or x})
    metric = metrics(prompts)["one row"][0]
    clean = 4 * N  # the run whose streams are kept
    for intervention, n_rows in ((Intervention(), 4), (replace_head(0, 1), 4), (keep, 4), (behind, 4 * N)):
        seen.clear()
        measure(model, prompts, [intervention], metric)
        assert sum(seen) - clean * (intervention.first_layer(LAYERS) == LAYERS - 1) == n_rows
    assert shapes == [(4, N, 4, 4), (4, N, 16)]
