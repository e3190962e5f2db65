"""Integrated gradients: which tokens of a prompt a prediction is due to, against another prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attribution.head_evidence import MetricName, chosen_metric, metric_of
from workbench.analyses.attribution.patching import corrupted_sequences, rows_of
from workbench.analyses.options import check_choice, check_whole
from workbench.analyses.prompts import text_frame
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, cached, provenance, silent
from workbench.analyses.support import check_model, check_one_length, emits_statistics
from workbench.analyses.tasks import PromptSet
from workbench.analyses.tasks.prompt_set import check_prompts
from workbench.analyses.token_texts import token_texts

Baseline = Literal["counterfactual", "mean embedding"]

# Shares of the change of the metric that attributions may miss:
GOAL = 0.01  # above it a line is cut finer, as far as MOST_STEPS allows
TOLERANCE = 0.05  # above it they are refused
ROUNDING = 1e-5  # of the metric: a smaller change of it is none
POINTS = 8  # of a panel, a piece of the line
PANELS = 16  # share the goal: a panel that misses more than GOAL / PANELS is cut in two
MOST_STEPS = 1024  # gradients of one prompt
ENTRANCE = "blocks.0.hook_resid_pre"  # where embeddings enter a model that cannot start at a layer
TOKENS_PER_RUN = 1024  # tokens of all points that run together, with their gradients


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class IntegratedGradients(Result):
    """What each token of each prompt adds to the metric, against a baseline.

    ``attribution`` [prompt, position] is NaN at pads, ``token`` its text, ``baseline_token`` that of the baseline. A
    prompt's attributions sum to ``metric`` − ``baseline_metric`` up to ``gap`` [prompt]; ``relative_gap`` [prompt] is
    |gap| over the size of that change, or over its mean over prompts where that is more. ``n_gradients`` [prompt] is
    what it took.
    """

    kind: ClassVar[str] = "integrated_gradients"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("tokens", "map")
    frame_axes: ClassVar[tuple[str, ...]] = ("prompt", "position")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"prompts": ("prompt",)}

    def top(self, prompt: int, n: int = 3) -> list[int]:
        """Positions of the ``n`` largest attributions of a prompt, whatever their sign, in order; 0 is not among them.

        Raises:
            ValueError: no such prompt.
        """
        values = np.abs(np.nan_to_num(self._of(prompt, "attribution")))
        return [int(place) for place in np.argsort(-values, kind="stable")[:n] if values[place] > 0]

    def _of(self, prompt: int, name: str) -> np.ndarray:
        """A quantity of the real tokens of one prompt."""
        n = len(self["attribution"])
        if not 0 <= prompt < n:
            raise ValueError(f"prompt must lie between 0 and {n - 1}, got {prompt}")
        return self[name][prompt, np.isfinite(self["attribution"][prompt])]

    def summary(self) -> str:
        metric, baseline = self["metric"].mean(), self["baseline_metric"].mean()
        unit = self.settings["unit"]
        lines = [
            self.provenance.sentence(),
            f"{self.settings['metric'].replace('_', ' ').capitalize()}, mean over {len(self['metric'])} prompts: "
            f"{metric:+z.3f}, of the baseline ({self.settings['baseline']}) {baseline:+z.3f} {unit}.",
            f"The attributions miss the change by {self['relative_gap'].max():.2%} of it at most, with "
            f"{self['n_gradients'].min()} to {self['n_gradients'].max()} gradients a prompt.",
        ]
        for prompt in range(min(3, len(self["metric"]))):
            tokens = self["token"][prompt]
            found = ", ".join(
                f"{str(tokens[place])!r} at {place} {self['attribution'][prompt, place]:+z.3f}"
                for place in self.top(prompt)
            )
            lines.append(f"Prompt {prompt}: {found or 'no token differs from the baseline'}.")
        return "\n".join(lines)

    def _draw_tokens(self, *, prompt: int = 0, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        values, tokens = self._of(prompt, "attribution"), self._of(prompt, "token")
        figure = figures.token_bars(
            values, [str(token) for token in tokens], y_label=f"attribution ({self.settings['unit']})", theme=theme
        )
        return Drawing(figure, f"Integrated gradients of prompt {prompt}", self.define("attribution"))

    def _draw_map(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.token_map(
            self["attribution"], self["token"], label=f"attribution ({self.settings['unit']})", theme=theme
        )
        return Drawing(figure, "Integrated gradients of every prompt", self.define("attribution"))


def integrated_gradients(
    model: Any,
    prompts: PromptSet,
    *,
    baseline: Baseline = "counterfactual",
    n_steps: int = 32,
    metric: MetricName | None = None,
    progress: Progress = silent,
) -> IntegratedGradients:
    """Attributes the metric to tokens: Σ over d_model of (x − x') ∫ ∂metric/∂x (Sundararajan et al. 2017, eq. 1).

    x are the embeddings of a prompt as they enter the first layer, with positions where these are added; x' those of
    the baseline. The integral along the straight line between them is taken at Gauss–Legendre points, 8 to a panel. On
    each panel the attributions must sum to the change of the metric; one that misses it by too much is cut in two.

    Args:
        baseline: "counterfactual", the corrupted prompt: attributions then explain why the metric differs between the
            two, and tokens that they share get exactly 0. "mean embedding", the mean over the vocabulary in place of
            every token but a BOS, at the same positions: every token gets a share, of a change from a prompt that no
            one would write. There is no baseline of zeros: a norm scales the stream to unit size whatever its length,
            so the line from 0 goes through the same prompt shrunk, and the metric jumps at its end.
        metric: None takes the logit difference where prompts have foils, else the log-probability.
        n_steps: gradients of each prompt to begin with, in whole panels; up to 1,024 where it takes more.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: attributions that miss the change of the metric by more than 5 %; prompts without what the options
            need, an unknown option, or a model that this cannot be asked of.
    """
    check_model(model, predicts=True)
    check_prompts(prompts)
    check_choice("baseline", baseline, get_args(Baseline))
    metric = chosen_metric(prompts, metric)
    check_whole(n_steps=n_steps, most=MOST_STEPS)
    check_one_length(model, prompts.real)
    line = _Line(model, prompts, baseline, metric)
    value, of_baseline = line.ends()
    change = value - of_baseline
    size = change.abs().clamp(min=float(change.abs().mean()))
    if float(size.max()) <= ROUNDING * float(value.abs().max()):
        raise ValueError(
            "the metric is the same for the prompts and their baseline, so there is nothing to attribute; the model "
            "does not tell them apart, or its logits are at their soft cap"
        )
    attribution, n_gradients = _integrate(line, size, n_steps, progress)
    gap = change - attribution.sum(dim=1)
    relative_gap = gap.abs() / size
    if float(relative_gap.max()) > TOLERANCE:
        raise ValueError(
            f"the attributions of prompt {int(relative_gap.argmax())} miss the change of the metric by "
            f"{float(relative_gap.max()):.0%} of it after {int(n_gradients.max())} gradients, so they mean nothing; "
            "begin with more steps (n_steps), load the model in float64, or choose a baseline nearer to the prompts"
        )
    unit = metric_of(prompts, metric).unit
    whole = {
        "metric": (value, unit, "metric of the prompt"),
        "baseline_metric": (of_baseline, unit, "metric of the baseline"),
        "gap": (gap, unit, "metric − baseline_metric − Σ attribution"),
        "relative_gap": (
            relative_gap, "share of 1",
            "|gap| / |metric − baseline_metric|, the mean of the latter over prompts where that is more",
        ),
        "n_gradients": (n_gradients, "", "how many gradients were taken along the line"),
    }  # fmt: skip
    of_prompts = {name: Quantity(found.numpy(), ("prompt",), *about) for name, (found, *about) in whole.items()}
    of_tokens = _of_tokens(model, prompts, attribution.masked_fill(~prompts.real, torch.nan).numpy(), baseline, unit)
    return IntegratedGradients(
        quantities=of_tokens | of_prompts,
        provenance=provenance(model, prompts.sequences),
        settings={
            "prompts": prompts.name, "baseline": baseline, "n_steps": n_steps, "metric": metric, "unit": unit,
        },
    )  # fmt: skip


class _Line:
    """The straight line from each prompt's baseline (share 0) to the prompt (share 1), as embeddings."""

    def __init__(self, model: Any, prompts: PromptSet, baseline: Baseline, metric: MetricName) -> None:
        self.model, self.prompts, self.metric = model, prompts, metric
        self.end = self._embedded(prompts.tokens)  # [prompt, pos, d_model]
        if baseline == "counterfactual":
            self.start = self._embedded(corrupted_sequences(prompts).tokens)
        else:
            with torch.no_grad():
                every = torch.arange(model.cfg.d_vocab, device=model.cfg.device)[None]
                self.mean = model.embed(every)[0].mean(dim=0)  # before the hook, which a bridge has within embed
            with model.hooks(fwd_hooks=[("hook_embed", self._flattened)]):
                self.start = self._embedded(prompts.tokens)
        self.size = max(1, TOKENS_PER_RUN // prompts.tokens.shape[1])  # points at a time

    @torch.no_grad()
    def _embedded(self, tokens: Tensor) -> Tensor:
        if not emits_statistics(self.model):
            every = Sequences(tokens.to(self.model.cfg.device), self.prompts.real)
            return cached(self.model, every, [ENTRANCE])[ENTRANCE]
        return self.model(tokens, attention_mask=self.prompts.real, stop_at_layer=0)

    def _flattened(self, x: Tensor, hook: Any) -> Tensor:
        """Every embedding but that of a BOS replaced by the mean over the vocabulary."""
        first = torch.tensor(text_frame(self.model).before, dtype=torch.int64)
        kept = torch.isin(self.prompts.tokens, first).to(x.device)[..., None]
        return torch.where(kept, x, self.mean)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The metric of the prompts and of their baselines, float64 [prompt] each."""
        every = torch.arange(len(self.prompts))
        return self.metrics(every, torch.ones(len(every))), self.metrics(every, torch.zeros(len(every)))

    @torch.no_grad()
    def metrics(self, prompts: Tensor, shares: Tensor) -> Tensor:
        """The metric at points (prompt, share), float64 [point]."""
        parts = zip(prompts.split(self.size), shares.split(self.size), strict=True)
        return torch.cat([self._run(some, self._points(some, at)).cpu() for some, at in parts])

    @torch.enable_grad()
    def products(self, prompts: Tensor, shares: Tensor) -> Tensor:
        """Σ over d_model of (x − x') ∂metric/∂x at points (prompt, share), float64 [point, pos]."""
        found = []
        for some, at in zip(prompts.split(self.size), shares.split(self.size), strict=True):
            points = self._points(some, at).requires_grad_()
            (gradient,) = torch.autograd.grad(self._run(some, points).sum(), points)
            found.append((gradient.double() * (self.end - self.start)[some].double()).sum(dim=-1).cpu())
        return torch.cat(found)

    def _points(self, prompts: Tensor, shares: Tensor) -> Tensor:
        start, end = self.start[prompts], self.end[prompts]
        return torch.lerp(start, end, shares.to(end)[:, None, None])

    def _run(self, prompts: Tensor, points: Tensor) -> Tensor:
        some = self.prompts.subset(prompts)
        metric = metric_of(some, self.metric)
        if not emits_statistics(self.model):
            tokens = some.tokens.to(points.device)
            hooks = [(ENTRANCE, lambda x, hook: points)]
            return metric(rows_of(self.model.run_with_hooks(tokens, return_type="logits", fwd_hooks=hooks), metric))
        stream = self.model(points, attention_mask=some.real, start_at_layer=0, stop_at_layer=self.model.cfg.n_layers)
        return metric(self.model.to_logits(rows_of(stream, metric)))


def _integrate(line: _Line, size: Tensor, n_steps: int, progress: Progress) -> tuple[Tensor, Tensor]:
    """Attributions float64 [prompt, pos], and how many gradients each prompt took; ``size`` [prompt] is its change."""
    nodes, weights = (torch.tensor(found) for found in np.polynomial.legendre.leggauss(POINTS))  # on [−1, 1]
    n = len(size)
    total = torch.zeros(line.prompts.tokens.shape, dtype=torch.float64)
    n_gradients = torch.zeros(n, dtype=torch.int64)
    n_panels = -(-n_steps // POINTS)
    edges = torch.linspace(0, 1, n_panels + 1, dtype=torch.float64)
    prompts = torch.arange(n).repeat_interleave(n_panels)
    low, high = edges[:-1].repeat(n), edges[1:].repeat(n)
    finished = 0.0
    while len(prompts):
        shares = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * nodes  # [panel, node]
        products = line.products(prompts.repeat_interleave(POINTS), shares.flatten()).unflatten(0, (-1, POINTS))
        parts = torch.einsum("kns,n->ks", products, weights) * ((high - low) / 2)[:, None]  # [panel, pos]
        missed = line.metrics(prompts, high) - line.metrics(prompts, low) - parts.sum(dim=1)
        n_gradients += POINTS * prompts.bincount(minlength=n)
        split = (missed.abs() > GOAL / PANELS * size[prompts]) & (n_gradients[prompts] < MOST_STEPS)
        total.index_add_(0, prompts[~split], parts[~split])
        finished += float((high - low)[~split].sum())
        progress(finished / n, f"{finished / n:.0%} of the lines")
        prompts, low, high = (x[split] for x in (prompts, low, high))
        middle = (low + high) / 2
        prompts, low, high = prompts.repeat(2), torch.cat((low, middle)), torch.cat((middle, high))
    return total, n_gradients


def _of_tokens(
    model: Any, prompts: PromptSet, attribution: np.ndarray, baseline: Baseline, unit: str
) -> dict[str, Quantity]:
    tokenizer = getattr(model, "tokenizer", None)
    axes = ("prompt", "position")

    def texts(tokens: Tensor) -> np.ndarray:
        flat = token_texts(tokenizer, tokens.flatten().tolist())
        return np.where(prompts.real.numpy(), np.array(flat, dtype=np.str_).reshape(tokens.shape), "")

    found = {
        "attribution": Quantity(
            attribution, axes, unit,
            "Σ over d_model of (x − x') · the mean of ∂metric/∂x on the line from x' to x, x the token's embedding, "
            f"x' the {'corrupted prompt' if baseline == 'counterfactual' else 'mean embedding'}'s",
        ),
        "token": Quantity(texts(prompts.tokens), axes, "", "text of the token"),
    }  # fmt: skip
    if baseline == "counterfactual":
        of_baseline = texts(corrupted_sequences(prompts).tokens)
        found["baseline_token"] = Quantity(of_baseline, axes, "", "text of the baseline's token")
    return found
