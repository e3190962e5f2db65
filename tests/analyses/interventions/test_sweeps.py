"""The engine of interventions against a loop over whole runs, its edits and metrics against their definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, RopeScaling, TransformerConfig
from workbench.analyses import PromptSet, alternative_attention, direct_logit_attribution, integrated_gradients
from workbench.analyses.interventions import metrics as metrics_module
from workbench.analyses.interventions.edits import cut_edges, mean_outputs, replace_activation, replace_head, together
from workbench.analyses.interventions.metrics import (
    Metric,
    kl_divergence,
    last_rows,
    log_probability,
    logit_difference,
    losses_of,
    token_losses,
)
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Sequences

N, LENGTHS = 10, torch.tensor([10, 7, 4])


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    torch.manual_seed(0)
    cfg = TransformerConfig(
        n_layers=3, d_model=24, n_heads=4, n_key_value_heads=2, d_head=6, d_mlp=20, d_vocab=31, n_ctx=16,
        positional_embedding_type="rotary", normalization_type="RMS", init_mode="normal", initializer_range=0.4,
    )  # fmt: skip
    return HookedTransformer(cfg).double().eval()


@pytest.fixture(scope="module")
def prompts() -> Sequences:
    real = torch.arange(N) < LENGTHS[:, None]
    tokens = torch.randint(0, 31, (3, N), generator=torch.Generator().manual_seed(1))
    return Sequences(tokens.masked_fill(~real, 0), real)


def interventions(prompts: Sequences) -> list[Intervention]:
    first, other = torch.arange(N) == 0, torch.randn(3, N, 6, dtype=torch.float64)
    return [
        Intervention(),
        replace_head(0, 1),
        replace_head(2, 3, other),
        replace_head(1, 0, torch.ones(6, dtype=torch.float64), positions=first),
        replace_activation("blocks.1.hook_mlp_out"),
        replace_activation("blocks.0.hook_resid_pre", 0.5, positions=prompts.tokens == 3),
        cut_edges(1, sources=first),
        cut_edges(2, sources=first, head=2, renormalise=False, destinations=torch.arange(N) > 2),
        together([replace_head(0, 1), replace_head(2, 1), cut_edges(0, sources=first)], "three"),
    ]


def metrics(model: HookedTransformer, prompts: Sequences) -> dict[str, Metric]:
    target, foil, rows = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), last_rows(prompts.real)
    with torch.no_grad():
        clean = model(prompts.tokens, attention_mask=prompts.real)
    return {
        "difference": logit_difference(target, foil, rows),
        "probability": log_probability(target, rows),
        "losses": token_losses(prompts.tokens, torch.tensor([[8, 2], [1, 5], [2, 0]])),
        "divergence": kl_divergence(clean[torch.arange(3)[:, None], rows], rows),
    }


def naive(model: HookedTransformer, prompts: Sequences, intervention: Intervention, name: str) -> Tensor:
    """One whole run a intervention, and the metric from its definition, prompt by prompt."""
    with torch.no_grad():
        clean = model(prompts.tokens, attention_mask=prompts.real).log_softmax(-1)
        with model.hooks(fwd_hooks=list(intervention.edits.items())):
            logits = model(prompts.tokens, attention_mask=prompts.real)
    log_p, last = logits.log_softmax(-1), LENGTHS - 1
    if name == "difference":
        return torch.stack([logits[i, last[i], i + 1] - logits[i, last[i], i + 4] for i in range(3)])
    if name == "probability":
        return torch.stack([log_p[i, last[i], i + 1] for i in range(3)])
    if name == "losses":
        rows = [[8, 2], [1, 5], [2, 0]]
        return torch.tensor([[-log_p[i, r, prompts.tokens[i, r + 1]] for r in rows[i]] for i in range(3)])
    pairs = [(clean[i, last[i]], log_p[i, last[i]]) for i in range(3)]
    return torch.stack([(p.exp() * (p - q)).sum() for p, q in pairs])


@pytest.mark.parametrize("name", ["difference", "probability", "losses", "divergence"])
def test_a_sweep_equals_a_loop_over_whole_runs(model: HookedTransformer, prompts: Sequences, name: str) -> None:
    torch.manual_seed(2)
    chosen = interventions(prompts)
    found = measure(model, prompts, chosen, metrics(model, prompts)[name])
    expected = torch.stack([naive(model, prompts, each, name) for each in chosen])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert all((expected[0] - other).abs().max() > 1e-6 for other in expected[1:])  # every edit does something


@pytest.mark.parametrize("name", ["difference", "losses", "divergence"])
def test_the_logits_of_few_rows_at_a_time_give_the_same(
    model: HookedTransformer, prompts: Sequences, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    metric, chosen, held = metrics(model, prompts)[name], interventions(prompts), []
    expected = measure(model, prompts, chosen, metric)
    monkeypatch.setattr(metrics_module, "ROWS_PER_UNEMBEDDING", 4)  # which divides no prompt's rows
    to_logits = model.to_logits

    def watched(x: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        logits = to_logits(x, tokens)
        held.append(len(x))
        assert (
            logits.shape[-1] == model.cfg.d_vocab or name == "difference" and logits.shape[-1] <= 2 * len(metric.rows)
        )
        return logits

    monkeypatch.setattr(model, "to_logits", watched)
    torch.testing.assert_close(measure(model, prompts, chosen, metric), expected, rtol=1e-12, atol=1e-12)
    assert max(held) <= 4 and sum(held) == metric.rows.numel() * len(chosen)


def test_losses_of_wanted_tokens_are_told_from_the_rows_that_fill_up(
    model: HookedTransformer, prompts: Sequences
) -> None:
    wanted = torch.zeros(3, N, dtype=torch.bool)
    for prompt, places in enumerate(([1, 4, 9], [6], [])):
        wanted[prompt, places] = True
    metric, counted = losses_of(prompts.tokens, wanted)
    assert counted.tolist() == [[True] * 3, [True, False, False], [False] * 3]
    found = measure(model, prompts, [replace_head(1, 1)], metric)[0]
    with torch.no_grad(), model.hooks(fwd_hooks=list(replace_head(1, 1).edits.items())):
        log_p = model(prompts.tokens, attention_mask=prompts.real).log_softmax(-1)
    expected = [-log_p[i, j - 1, prompts.tokens[i, j]] for i, j in wanted.nonzero().tolist()]
    torch.testing.assert_close(found[counted], torch.stack(expected))


def test_edits_outside_the_layers_are_refused(model: HookedTransformer, prompts: Sequences) -> None:
    """A run that restarts at a layer would never come by them."""
    metric = metrics(model, prompts)["difference"]
    for name in ("hook_embed", "ln_final.hook_normalized"):
        with pytest.raises(ValueError, match=f"{name} lies outside the layers"):
            measure(model, prompts, [replace_activation(name)], metric)


def test_lengths_that_rotate_differently_are_not_mixed(model: HookedTransformer, prompts: Sequences) -> None:
    scaling = RopeScaling(type="dynamic", factor=2.0, original_context=5)
    scaled = HookedTransformer(dataclasses.replace(model.cfg, rope_scaling=scaling)).eval()
    with pytest.raises(ValueError, match="prompts of one length at a time"):
        measure(scaled, prompts, [Intervention()], metrics(model, prompts)["difference"])
    target = torch.arange(len(prompts))
    task = PromptSet(prompts.tokens, prompts.real, target, target + 1, None, "any", "any")
    for analysis in (direct_logit_attribution, integrated_gradients, alternative_attention):
        with pytest.raises(ValueError, match="prompts of one length at a time"):
            analysis(scaled, task)


def test_what_was_measured_before_a_cancellation_is_kept(model: HookedTransformer, prompts: Sequences) -> None:
    metric, calls = metrics(model, prompts)["difference"], []
    chosen = [replace_head(layer, 0) for layer in range(3)]
    cancelled: Callable[[], bool] = lambda: len(calls) >= 2  # noqa: E731
    found = measure(model, prompts, chosen, metric, progress=lambda *done: calls.append(done), cancelled=cancelled)
    assert found[:2].isfinite().all() and found[2].isnan().all()
    assert torch.equal(found[:2], measure(model, prompts, chosen, metric)[:2])


def test_means_leave_pads_out(model: HookedTransformer, prompts: Sequences) -> None:
    name = "blocks.1.attn.hook_z"
    _, cache = model.run_with_cache(prompts.tokens, attention_mask=prompts.real, names_filter=name)
    values = cache[name].detach()
    by_all = mean_outputs(model, prompts, [name])[name]
    torch.testing.assert_close(by_all[0], torch.cat([values[i, :n] for i, n in enumerate(LENGTHS)]).mean(0))
    by_position = mean_outputs(model, prompts, [name], by="position")[name]
    torch.testing.assert_close(by_position[5], values[:2, 5].mean(0))  # the third prompt has 4 tokens
    torch.testing.assert_close(by_position[9], values[0, 9])


def test_a_metric_that_is_no_number_is_refused(model: HookedTransformer, prompts: Sequences) -> None:
    beyond = replace_activation("blocks.1.hook_mlp_out", float("inf"))
    metric = log_probability(torch.tensor([1, 2, 3]), last_rows(prompts.real))
    with pytest.raises(ValueError, match="log-probability is not a number"):
        measure(model, prompts, [Intervention(), beyond], metric)
