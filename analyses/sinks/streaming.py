"""How well a model predicts text beyond a window of remembered tokens, by which tokens it remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from workbench.analyses.attribution.agreement import mean_interval
from workbench.analyses.interventions.metrics import ROWS_PER_UNEMBEDDING
from workbench.analyses.options import check_whole, is_whole
from workbench.analyses.prompts import DescribedTokens, text_frame
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import TOKENS_PER_RUN, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model, emits_statistics
from workbench.kv_cache import KVCache

POLICIES = ("full attention", "window", "sink tokens + recent", "middle tokens + recent", "window, recomputed")
FULL, WINDOW, SINKS, MIDDLE, RECOMPUTED = range(len(POLICIES))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Streaming(Result):
    """Losses [policy, text, query] of the token after each query, and their means beyond the window [policy].

    ``excess`` [policy] is against the sink tokens, over the queries that both policies have.
    """

    kind: ClassVar[str] = "streaming"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("curves", "excess")
    frame_axes: ClassVar[tuple[str, ...]] = ("policy",)
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"losses": ("policy", "query")}

    def summary(self) -> str:
        settings, n_texts = self.settings, self.provenance.n_sequences
        lines = [
            self.provenance.sentence(),
            f"Loss of the predictions of queries {settings['window']} to {len(self['loss'][0, 0]) - 1}, when "
            f"{settings['window']} tokens are remembered, n = {n_texts} text{'s' * (n_texts > 1)}:",
        ]
        most = int(self["n_queries"].max())
        for place, policy in enumerate(POLICIES):
            n = int(self["n_queries"][place])
            if not n:
                lines.append(f"{policy}: none, as the model's context ends at {settings['n_ctx']} tokens.")
                continue
            low, high = self["excess_low"][place], self["excess_high"][place]
            interval = f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else ""
            excess = f"{self['excess'][place]:+.3f}{interval}"
            if n < most:  # a mean over other queries than the others' would be held against theirs
                lines.append(f"{policy}: {excess} nats against {POLICIES[SINKS]}, at {n} queries a text.")
                continue
            against = "" if place == SINKS else f", {excess} against {POLICIES[SINKS]}"
            lines.append(
                f"{policy}: {self['mean_loss'][place]:.3f} nats, perplexity {self['perplexity'][place]:.1f} "
                f"({n} queries a text){against}."
            )
        return "\n".join(lines)

    @property
    def _ends(self) -> str:
        n_ctx, n = self.settings["n_ctx"], self["loss"].shape[2]
        return f" Full attention ends with the model's context of {n_ctx} tokens." if n_ctx < n else ""

    def _draw_curves(self, *, bin_width: int | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        width = max(1, self["loss"].shape[2] // 24) if bin_width is None else bin_width
        figure = figures.binned_curves(
            dict(zip(POLICIES, self["mean_loss_by_query"], strict=True)),
            width=width,
            marked={self.settings["window"]: "window full"},
            x_label="position of the query",
            y_label="loss of the next token (nats)",
            theme=theme,
        )
        note = f"Means of {width} queries and {self.provenance.n_sequences} texts.{self._ends} {self._in_words()}"
        return Drawing(figure, f"Loss along a text when {self.settings['window']} tokens are remembered", note)

    def _draw_excess(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        others = [place for place in range(len(POLICIES)) if place != SINKS]
        excess, low, high = (self[name][others] for name in ("excess", "excess_low", "excess_high"))
        figure = figures.dots(
            {"excess": (excess, low, high)},
            [POLICIES[place] for place in others],
            x_label="loss beyond the window, less that with sink tokens (nats)",
            theme=theme,
        )
        figure.add_vline(x=0, line={"color": figures.THEMES[theme].text, "width": 1})
        title = f"Loss against that with sink tokens when {self.settings['window']} tokens are remembered"
        bars = "" if np.isnan(self["excess_low"]).all() else " Bars are 95 % bootstrap intervals over texts."
        return Drawing(figure, title, f"{self.define('excess')}{bars}{self._ends} {self._in_words()}")

    def _in_words(self) -> str:
        n, window, start = (self.settings[name] for name in ("n_sink_tokens", "window", "middle_start"))
        return (
            f"Sink tokens: the first {n} and the last {window - n} (StreamingLLM); middle tokens: those from position "
            f"{start} on in their place, a control; recomputed: the last {window} tokens read anew for each query, "
            f"every {self.settings['recompute_every']} queries."
        )


@torch.no_grad()
def streaming_perplexity(
    model: Any,
    tokens: str | Sequence[str] | Tensor | DescribedTokens,
    *,
    window: int,
    n_sink_tokens: int = 4,
    middle_start: int | None = None,
    recompute_every: int = 8,
    progress: Progress = silent,
) -> Streaming:
    """Next-token losses with ``window`` remembered tokens, by policy (Xiao et al. 2023, sections 3.1 and 4.1).

    Full attention; the last ``window`` tokens; the first ``n_sink_tokens`` and the last ``window − n_sink_tokens``
    (StreamingLLM, positions counted within the cache); as many tokens from ``middle_start`` on in place of the first,
    kept just as long: a control; and the last ``window`` tokens read anew for every query, which has no cache to save
    anything by. The query's own token counts in the window. Query i predicts token i + 1; the policies differ from
    query ``window`` on.

    Args:
        tokens: long texts, or token ids [text, pos], all real. Texts get BOS where the model has one and are cut to the
            length of the shortest. They may exceed the model's context, at whose end full attention stops (NaN).
        middle_start: None is the middle of the first window.
        recompute_every: the recomputed window is evaluated at every so many queries, the others are NaN.

    Raises:
        ValueError: a model that cannot evict, or is no HookedTransformer; a text that no query is beyond the window in;
            an option out of its range.
    """
    check_model(model, predicts=True)
    if not emits_statistics(model):
        raise ValueError("streaming_perplexity needs a HookedTransformer; load it with from_pretrained")
    check_whole(recompute_every=recompute_every, window=window)
    if not is_whole(n_sink_tokens) or n_sink_tokens < 1:
        raise ValueError(
            f"n_sink_tokens must be at least 1, got {n_sink_tokens!r}; the window alone is among the policies"
        )
    if window > model.cfg.n_ctx:
        raise ValueError(f"window must be at most the model's context of {model.cfg.n_ctx} tokens, got {window}")
    KVCache(window, n_sink_tokens)  # refuses what does not fit together
    start = (window - n_sink_tokens) // 2 if middle_start is None else middle_start
    check_whole(middle_start=start, least=0)
    if start < n_sink_tokens:
        raise ValueError(f"the middle tokens must start behind the {n_sink_tokens} sink tokens, got {start}")
    sequences = Sequences.read(model, _tokenised(model, tokens))
    n_positions = sequences.tokens.shape[1]
    if n_positions < window + 2:
        raise ValueError(
            f"the texts have {n_positions} tokens, but a query beyond a window of {window} with a token after it needs "
            f"{window + 2}; choose a smaller window or longer texts"
        )
    ids = sequences.tokens.to(model.cfg.device)
    losses = torch.full((len(POLICIES), len(ids), n_positions - 1), torch.nan, dtype=torch.float64)
    n_full = min(n_positions - 1, model.cfg.n_ctx)  # queries within the context
    losses[FULL, :, :n_full] = _full(model, ids[:, : n_full + 1])
    caches = {
        WINDOW: KVCache(window),
        SINKS: KVCache(window, n_sink_tokens),
        MIDDLE: KVCache(window, n_sink_tokens, start),
    }
    for place, cache in caches.items():
        progress(place / len(POLICIES), POLICIES[place])
        losses[place] = _cached(model, ids, cache)
    progress(RECOMPUTED / len(POLICIES), POLICIES[RECOMPUTED])
    losses[RECOMPUTED, :, :window] = losses[WINDOW, :, :window]  # nothing has left the window yet
    queries = torch.arange(window, n_positions - 1, recompute_every, device=ids.device)
    losses[RECOMPUTED][:, queries.cpu()] = _recomputed(model, ids, window, queries)
    progress(1.0, "done")
    return Streaming(
        quantities=_quantities(losses.numpy(), window),
        provenance=provenance(model, sequences),
        settings={
            "window": window,
            "n_sink_tokens": n_sink_tokens,
            "middle_start": start,
            "recompute_every": recompute_every,
            "n_ctx": model.cfg.n_ctx,
        },
        coverage={"mean_loss": (n_positions - 1 - window) / n_positions},
        coordinates={"policy": list(POLICIES)},
    )


def _tokenised(model: Any, tokens: str | Sequence[str] | Tensor | DescribedTokens) -> Tensor | DescribedTokens:
    """Texts of any length as token ids [text, pos]."""
    if isinstance(tokens, (Tensor, DescribedTokens)):
        return tokens
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: pass token ids, or load it with tokenizer=…")
    texts = [tokens] if isinstance(tokens, str) else list(tokens)
    rows = [model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    shortest = min((len(row) for row in rows), default=0)
    if shortest == 0:
        raise ValueError("tokens must be at least one text, none of them empty")
    return text_frame(model).around(torch.tensor([row[:shortest] for row in rows]))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 [text, query] of logits [text, query, d_vocab]."""
    flat = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return flat.view(targets.shape).double().cpu()


def _full(model: Any, ids: Tensor) -> Tensor:
    """Losses of whole texts [text, pos], of which the model reads all but the last token: float64 [text, pos − 1]."""
    losses = []
    for row in ids:
        stream = model(row[None, :-1], stop_at_layer=model.cfg.n_layers)
        pieces = zip(stream.split(ROWS_PER_UNEMBEDDING, 1), row[None, 1:].split(ROWS_PER_UNEMBEDDING, 1), strict=True)
        losses.append(torch.cat([_loss(model.to_logits(part), targets) for part, targets in pieces], dim=1))
    return torch.cat(losses)


def _cached(model: Any, ids: Tensor, cache: KVCache) -> Tensor:
    """Losses [text, pos − 1] of texts that are read on a cache, all of them together."""
    size = max(1, ROWS_PER_UNEMBEDDING // len(ids))
    pieces = zip(ids[:, :-1].split(size, dim=1), ids[:, 1:].split(size, dim=1), strict=True)
    return torch.cat([_loss(model(piece, kv_cache=cache), targets) for piece, targets in pieces], dim=1)


def _recomputed(model: Any, ids: Tensor, window: int, queries: Tensor) -> Tensor:
    """Losses [text, query] at some queries, each of which is the last of a text of ``window`` tokens."""
    runs = ids.unfold(1, window, 1)[:, queries - window + 1].flatten(0, 1)  # [text · query, window]
    last = [
        model(part, stop_at_layer=model.cfg.n_layers)[:, -1:] for part in runs.split(max(1, TOKENS_PER_RUN // window))
    ]
    targets = ids[:, queries + 1].reshape(-1, 1)
    parts = zip(torch.cat(last).split(ROWS_PER_UNEMBEDDING), targets.split(ROWS_PER_UNEMBEDDING), strict=True)
    return torch.cat([_loss(model.to_logits(part), target) for part, target in parts]).view(len(ids), -1)


def _quantities(losses: np.ndarray, window: int) -> dict[str, Quantity]:
    beyond = losses[..., window:]
    of_text = _mean(beyond, 2)  # [policy, text]
    excess = _mean(beyond - beyond[SINKS], 2)
    n_queries = np.isfinite(beyond[:, 0]).sum(axis=1)
    axes, nats, interval = ("policy",), "nats per token", "of its 95 % bootstrap interval over texts, of 20 or more"
    found = {}
    what = f"loss of the next token over queries from position {window} on"
    for name, values, definition in (
        ("mean_loss", of_text, f"mean {what}, and over texts"),
        ("excess", excess, f"{what}, less that with sink tokens at the same queries, mean over texts"),
    ):
        low, high = np.array([mean_interval(row) for row in values]).T
        found[name] = Quantity(_mean(values, 1), axes, nats, definition)
        found[f"{name}_low"] = Quantity(low, axes, nats, f"lower end {interval}")
        found[f"{name}_high"] = Quantity(high, axes, nats, f"upper end {interval}")
    return found | {
        "perplexity": Quantity(np.exp(_mean(of_text, 1)), axes, "", "exp of the mean loss"),
        "n_queries": Quantity(n_queries, axes, "queries", "queries of a text beyond the window that are evaluated"),
        "loss": Quantity(losses, ("policy", "text", "query"), "nats", "loss of the token after the query"),
        "mean_loss_by_query": Quantity(_mean(losses, 1), ("policy", "query"), "nats", "the same, mean over texts"),
    }


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the known values, NaN where there is none."""
    known = np.isfinite(values)
    n = known.sum(axis=axis)
    return np.where(known, values, 0.0).sum(axis=axis) / np.where(n > 0, n, np.nan)
