"""What an analysis is going to take, before it runs: the runs of the model that it consists of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from workbench.analyses.interventions.metrics import ROWS_PER_UNEMBEDDING
from workbench.analyses.running import TOKENS_PER_RUN
from workbench.estimates import Estimate, estimate_run

LENS_COPIES, WHAT_IF_COPIES, STEP_COPIES = 15, 6, 6  # of a distribution in float64, at a time
ABLATIONS_PER_HEAD = 9  # interventions that induction_heads makes on a candidate and its control
SWEEP = 0.5  # of a run: an intervention on a layer repeats only the layers from there on
GRADIENT = 3.0  # runs: forward, and back through activations and weights


def estimate_analysis(
    analysis: str, model: Any, inputs: Any = None, arguments: tuple = (), options: Mapping[str, Any] | None = None
) -> Estimate | None:
    """What an analysis takes beside the model: memory within a factor of 2, and its work, from which time follows.

    Args:
        analysis: its name in ``workbench.analyses``.
        inputs: what it gets after the model, where that has ``tokens``: described tokens or a PromptSet.
        arguments, options: what else it gets.

    Returns:
        None for an analysis of which nothing is known here, or a model that is no HookedTransformer.
    """
    estimate = _ESTIMATES.get(analysis)
    cfg = model.cfg
    if estimate is None or not hasattr(cfg, "layer_types") or getattr(cfg, "n_encoder_layers", None) is not None:
        return None
    size = (1, 1) if inputs is None else (int(inputs.tokens.shape[-2]), int(inputs.tokens.shape[-1]))
    return estimate(cfg, size, arguments, options or {})


Size = tuple[int, int]  # sequences, tokens of each


def _head_statistics(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    n_sequences, n_tokens = size
    together = min(n_sequences, max(1, TOKENS_PER_RUN // n_tokens))
    return _batches(cfg, size, together, statistics=True)


def _batches(cfg: Any, size: Size, together: int, **what: bool) -> Estimate:
    """A run over so many sequences at a time."""
    return estimate_run(cfg, size[1], n_sequences=together, **what) * (size[0] / together)


def _head_pattern(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    run = estimate_run(cfg, size[1], n_layers=arguments[0] + 1)
    measured = run.pairs / (arguments[0] + 1) / cfg.n_heads  # of one head
    cells = 8 * 3 * min(size[1], options.get("max_cells", 512)) * size[1]
    return replace(run, measured_pairs=measured).keeping(cells)


def _attention_sinks(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    length = min(size[1], options.get("n_tokens", 64))
    together = min(size[0], max(1, TOKENS_PER_RUN // length))
    n, n_all = together * length, size[0] * length
    values = n * cfg.dtype.itemsize * cfg.n_layers * cfg.n_key_value_heads * cfg.d_head
    outputs = 2 * n * cfg.dtype.itemsize * cfg.n_heads * cfg.d_model  # of one layer, before their norms are taken
    tables = 16 * 8 * n_all * cfg.n_layers * cfg.n_heads
    measured = _batches(cfg, (size[0], length), together, statistics=True)
    norms = Estimate(products=n_all * cfg.n_layers * cfg.n_heads * cfg.d_head * cfg.d_model)
    again = _batches(cfg, (size[0], length), together)
    return (measured + again + norms).keeping(values + outputs + tables)


def _unembedded(cfg: Any, n_tokens: int, times: float, copies: int) -> Estimate:
    """Distributions at every position, so many times, a few rows at a time."""
    rows = min(n_tokens, ROWS_PER_UNEMBEDDING)
    entries = n_tokens * cfg.d_vocab
    work = Estimate(products=entries * cfg.d_model, entries=entries) * times
    return work.keeping(copies * 8 * rows * cfg.d_vocab)


def _logit_lens(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    run = estimate_run(cfg, size[1], streams=True)
    return run + _unembedded(cfg, size[1], 2 * (cfg.n_layers + 1), LENS_COPIES)


def _what_if(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    return estimate_run(cfg, size[1]) * 2 + _unembedded(cfg, size[1], 2, WHAT_IF_COPIES)


def _induction_heads(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate | None:
    n_sequences, length = options.get("n_sequences", 8), options.get("length", 64)
    n_tokens = options.get("n_copies", 2) * length + 1
    if n_tokens > cfg.n_ctx + 1:  # the analysis refuses it at once
        return None
    n_ablated = options.get("n_ablated", min(5, cfg.n_layers * cfg.n_heads))
    run = estimate_run(cfg, n_tokens, n_sequences=n_sequences, logits=True)
    statistics = _head_statistics(cfg, (n_sequences, n_tokens), (), {})
    patterns = cfg.dtype.itemsize * cfg.n_layers * n_sequences * cfg.n_heads * n_tokens**2 * (n_ablated > 0)
    sweep = run * (2 + SWEEP * ABLATIONS_PER_HEAD * n_ablated)
    return statistics + sweep.keeping(patterns)


def _induction_circuit(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    n_sequences, n_tokens = options.get("n_sequences", 8), 2 * options.get("length", 64) + 1
    n_receivers, n_feeders = options.get("n_receivers", 3), 2 * options.get("n_feeders", 4)  # and as many controls
    run = estimate_run(cfg, n_tokens, n_sequences=n_sequences, logits=True)
    measured = estimate_run(cfg, n_tokens, n_sequences=n_sequences, statistics=True)
    n_losses = n_receivers * n_feeders + n_feeders  # each receiver's keys, and those of all
    width = cfg.d_model + (2 * cfg.n_heads + cfg.n_key_value_heads) * cfg.d_head  # of the clean run in each layer
    clean = cfg.dtype.itemsize * cfg.n_layers * n_sequences * n_tokens * width
    return (measured * (1 + SWEEP * n_feeders) + run * (3 + SWEEP * n_losses)).keeping(clean)


def _copying_scores(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    n_sequences, length = options.get("n_sequences", 20), options.get("length", 64)
    n_tokens = options.get("n_copies", 2) * length + 1
    n_heads, rows = cfg.n_layers * cfg.n_heads, n_sequences * (n_tokens - 1 - length)  # those of repetitions
    of_a_head = cfg.d_vocab * cfg.d_head * (4 * cfg.d_model + 2 * cfg.d_head + rows)  # folded and plain
    work = Estimate(products=n_heads * of_a_head, entries=n_heads * rows * cfg.d_vocab)
    wide = 4 * cfg.d_vocab * (2 * cfg.d_model + cfg.n_heads * cfg.d_head)  # unembedding, embedding, a layer's heads
    patterns = 2 * cfg.dtype.itemsize * n_sequences * cfg.n_heads * n_tokens**2  # of a layer
    return (estimate_run(cfg, n_tokens, n_sequences=n_sequences) * 2 + work).keeping(wide + patterns)


def _generation_statistics(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    n_new = options.get("n_tokens", 24)
    steps = estimate_run(cfg, 1, logits=True) * n_new
    again = _head_statistics(cfg, (1, size[1] + n_new), (), {})
    return (estimate_run(cfg, size[1]) + steps + again).keeping(STEP_COPIES * 8 * n_new * cfg.d_vocab)


def _sink_interventions(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    n_heads = options.get("n_heads", 8)
    n_single = cfg.n_layers * cfg.n_heads if n_heads is None else n_heads
    n_runs = 8 * (1 + SWEEP * min(3, cfg.n_layers)) + 6 * SWEEP * n_single  # edits of two keys, by range and by head
    run = estimate_run(cfg, size[1], n_sequences=size[0], logits=True)
    patterns = 3 * cfg.dtype.itemsize * size[0] * cfg.n_heads * size[1] ** 2
    return (run * (n_runs + 4)).keeping(patterns)


def _streaming_perplexity(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    (n_texts, n_tokens), window = size, options.get("window", 64)
    n_later = max(0, n_tokens - window)  # a full window takes tokens one by one
    n_recomputed = math.ceil(n_texts * n_later / options.get("recompute_every", 8))
    whole = estimate_run(cfg, n_tokens, logits=True) * n_texts
    windows = estimate_run(cfg, window, n_sequences=n_texts, logits=True) * 3
    one_by_one = estimate_run(cfg, 1, n_sequences=n_texts, logits=True) * (3 * n_later)
    together = max(1, min(n_recomputed, TOKENS_PER_RUN // window))
    return whole + windows + one_by_one + _batches(cfg, (n_recomputed, window), together)


def _attribution_agreement(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    run = estimate_run(cfg, size[1], n_sequences=size[0])
    ablations = len(options.get("ablations", ("zero", "mean", "resample")))
    patterns = 3 * cfg.dtype.itemsize * cfg.n_layers * size[0] * cfg.n_heads * size[1] ** 2
    return (run * (GRADIENT + ablations * (1 + SWEEP * cfg.n_layers * cfg.n_heads))).keeping(patterns)


def _source_attribution(cfg: Any, size: Size, arguments: tuple, options: Mapping[str, Any]) -> Estimate:
    run = estimate_run(cfg, size[1], n_sequences=size[0])
    patterns = 3 * cfg.dtype.itemsize * cfg.n_layers * size[0] * cfg.n_heads * size[1] ** 2
    n_rankings, n_shares = 10, 5
    return (run * (GRADIENT + size[1] + 2 * n_rankings * n_shares)).keeping(patterns)


_ESTIMATES: Mapping[str, Callable[[Any, Size, tuple, Mapping[str, Any]], Estimate | None]] = {
    "attention_sinks": _attention_sinks,
    "attribution_agreement": _attribution_agreement,
    "copying_scores": _copying_scores,
    "generation_statistics": _generation_statistics,
    "head_pattern": _head_pattern,
    "head_statistics": _head_statistics,
    "induction_circuit": _induction_circuit,
    "induction_heads": _induction_heads,
    "logit_lens": _logit_lens,
    "sink_interventions": _sink_interventions,
    "source_attribution": _source_attribution,
    "streaming_perplexity": _streaming_perplexity,
    "what_if": _what_if,
}
