"""Induction heads: the attention that suggests them, and the ablation that tests them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from workbench.analyses.interventions import Head, ablated_losses, mean_head_outputs
from workbench.analyses.prompts import RepeatedTokens, Spacing, repeated_random_tokens
from workbench.analyses.result import Quantity, Result
from workbench.analyses.running import Progress, Sequences, provenance, silent
from workbench.analyses.scores import SCORES, earlier_occurrences, measure_heads

if TYPE_CHECKING:
    import plotly.graph_objects as go

_SCORES = (
    "prefix_matching",
    "prefix_matching_latest",
    "prefix_matching_per_entry",
    "previous_token",
    "duplicate_token",
)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class InductionHeads(Result):
    """Scores [layer, head]; losses [copy, index]; effects [ablated] of the heads that score highest and of controls.

    ``coordinates["ablated"]`` names the ablated heads. The verdicts compare mean ablation with the controls' largest
    |effect| c (ablating zeroes is shown beside it; it also takes away what a head always writes):

    - *induction*: the loss of repeated tokens rises by more than c when the head is ablated alone.
    - *anti-induction*: it falls by more than c.
    - *redundant*: neither, but with all other heads of the pattern ablated, ablating it too raises it by more than c.
    - *pattern only*: the pattern without any such effect.
    - *no pattern*: prefix matching below ``settings["pattern_threshold"]``; nothing is claimed.
    """

    kind: ClassVar[str] = "induction_heads"
    figure_kinds: ClassVar[tuple[str, ...]] = ("map", "loss", "ablation")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")

    def top(self, n: int = 5) -> list[Head]:
        """(layer, head) of the ``n`` heads with the highest prefix-matching score, in order."""
        return highest(self["prefix_matching"], n)

    @property
    def control_effect(self) -> float:
        """The largest |effect| of a control head under mean ablation, in nats per token; NaN without controls."""
        effects = self["mean_effect"][self["is_control"]]
        return float(np.abs(effects).max()) if effects.size else float("nan")

    def summary(self) -> str:
        scores, losses = self["prefix_matching"], self["copy_loss"]
        top = ", ".join(f"L{layer}H{head} {scores[layer, head]:.3f}" for layer, head in self.top())
        lines = [
            self.provenance.sentence(),
            f"{self.settings['length']} random tokens, {self.settings['n_copies']} times, "
            f"spacing: {self.settings['spacing']}.",
            f"Prefix matching: {top} (uniform attention: {float(self['uniform_prefix_matching']):.3f}).",
            f"Loss of a token that repeats: {losses[0]:.3f} nats at its first occurrence, "
            + ", ".join(f"{loss:.3f} in copy {copy}" for copy, loss in enumerate(losses[1:], start=2)) + ".",
        ]  # fmt: skip
        if "verdict" in self:
            lines.append(f"{'ablated alone':<16}{'prefix':>7}{'mean':>9}{'zero':>9}{'with peers':>12}  verdict")
            for place, name in enumerate(self.coordinates["ablated"]):
                layer, head = self["ablated_head"][place]
                peers = _signed(self["peer_effect"][place])
                lines.append(
                    f"{name:<16}{scores[layer, head]:>7.3f}{self['mean_effect'][place]:>+9.3f}"
                    f"{self['zero_effect'][place]:>+9.3f}{peers:>12}  {self['verdict'][place]}"
                )
            lines.append("Effects: change of the repeated tokens' loss, nats per token.")
        return "\n".join(lines)

    def _figure_map(self, *, score: str = "prefix_matching", theme: str = "light") -> go.Figure:
        from workbench.analyses import figures

        if score not in _SCORES:
            raise ValueError(f"score must be one of {', '.join(_SCORES)}, got {score!r}")
        return figures.head_map(self[score], label=figures.axis_label(score), upper=1.0, theme=theme)

    def _figure_loss(self, *, theme: str = "light") -> go.Figure:
        from workbench.analyses import figures

        names = [f"copy {copy}" for copy in self.coordinates["copy"]]
        return figures.curves(
            dict(zip(names, self["loss"], strict=True)),
            errors=dict(zip(names, self["loss_sem"], strict=True)),
            x_label="place within the copy (tokens)",
            y_label="next-token loss (nats)",
            theme=theme,
        )

    def _figure_ablation(self, *, theme: str = "light") -> go.Figure:
        from workbench.analyses import figures

        if "verdict" not in self:
            raise ValueError("no head was ablated (n_ablated=0)")
        return figures.effects(
            [str(name) for name in self.coordinates["ablated"]],
            {
                "mean ablation": (self["mean_effect"], self["mean_effect_sem"]),
                "zero ablation": (self["zero_effect"], self["zero_effect_sem"]),
            },
            control=self.control_effect,
            x_label="change of the repeated tokens' loss (nats per token)",
            theme=theme,
        )


def induction_heads(
    model: Any,
    *,
    length: int = 64,
    n_sequences: int = 8,
    n_copies: int = 2,
    spacing: Spacing = "fixed",
    seed: int = 0,
    prepend_bos: bool | None = None,
    n_ablated: int = 5,
    pattern_threshold: float = 0.3,
    progress: Progress = silent,
) -> InductionHeads:
    """Which heads attend to what followed the present token before, and which of them the model needs to copy it.

    1. Random tokens are repeated (see repeated_random_tokens), and every head's attention is scored on them (Olsson et
       al. 2022; previous and duplicate tokens after Wang et al. 2022).
    2. The loss of each copy is taken at the same tokens: those whose predecessor repeats as well.
    3. The ``n_ablated`` heads with the highest prefix matching are ablated one by one, with zeros and with their mean
       output per position on other sequences of the same kind; so is as many random heads of the same layers as
       controls; and, with means, all heads above ``pattern_threshold`` together and all of them but one.

    Args:
        model: a HookedTransformer, or a TransformerBridge.
        n_ablated: 0 leaves the ablations out.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: what repeated_random_tokens refuses, or an option out of its range.
    """
    if not 0 <= n_ablated <= model.cfg.n_layers * model.cfg.n_heads:
        raise ValueError(f"n_ablated must be between 0 and the number of heads, got {n_ablated}")
    kind: dict[str, Any] = dict(
        length=length, n_sequences=n_sequences, n_copies=n_copies, spacing=spacing, prepend_bos=prepend_bos
    )
    prompts = repeated_random_tokens(model, **kind, seed=seed)
    sequences = Sequences.read(model, prompts.tokens)
    share = 0.3 if n_ablated else 0.8
    measured = measure_heads(model, sequences, 1, lambda done, message: progress(share * done, message))
    scores = {name: measured.scores[name] for name in _SCORES}
    quantities = {
        name: Quantity(score.mean, ("layer", "head"), SCORES[name].unit, SCORES[name].definition)
        for name, score in scores.items()
    }
    quantities["uniform_prefix_matching"] = _uniform_score(sequences)
    everything = torch.ones_like(prompts.tokens, dtype=torch.bool)
    everything[:, 0] = False
    losses = ablated_losses(model, prompts.tokens, everything, [()])[0]  # [sequence, pos]
    progress(share + 0.1, "loss of every token")
    quantities |= _loss_quantities(prompts, losses)
    coordinates: dict[str, Sequence[str | int]] = {"copy": list(range(1, n_copies + 1))}
    if n_ablated:
        others = repeated_random_tokens(model, **kind, seed=seed + 1)
        ablation = _Ablation(model, prompts, others, losses, lambda done, text: progress(0.4 + 0.6 * done, text))
        names, found = ablation.of_heads(scores["prefix_matching"].mean, n_ablated, pattern_threshold, seed)
        quantities |= found
        coordinates["ablated"] = names
    return InductionHeads(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings=kind | {"seed": seed, "n_ablated": n_ablated, "pattern_threshold": pattern_threshold},
        coverage={name: score.coverage for name, score in scores.items()},
        coordinates=coordinates,
    )


def highest(scores: np.ndarray, n: int) -> list[Head]:
    """(layer, head) of the ``n`` largest scores [layer, head], in order, ties to the lower head."""
    order = np.argsort(-scores, axis=None, kind="stable")[:n]
    return [(int(place) // scores.shape[1], int(place) % scores.shape[1]) for place in order]


def _signed(number: float) -> str:
    return "–" if np.isnan(number) else f"{number:+.3f}"


def _uniform_score(sequences: Sequences) -> Quantity:
    n_targets = earlier_occurrences(sequences).n_targets.double()  # [sequence, pos]
    share = n_targets / torch.arange(1, n_targets.shape[1] + 1)
    definition = "prefix matching of a head that spreads its weight evenly over the keys it sees"
    return Quantity(np.array(float(share[n_targets > 0].mean())), (), "share of 1", definition)


def _loss_quantities(prompts: RepeatedTokens, losses: torch.Tensor) -> dict[str, Quantity]:
    """Losses [sequence, pos] sorted by copy and place; means over sequences, and over the tokens that can be copied."""
    n_copies, length = int(prompts.copy.max()) + 1, int(prompts.index.max()) + 1
    sorted_losses = np.full((len(losses), n_copies, length), np.nan)
    predictable = np.zeros(sorted_losses.shape, dtype=bool)
    rows, positions = (prompts.index >= 0).nonzero(as_tuple=True)
    place = (rows, prompts.copy[rows, positions], prompts.index[rows, positions])
    sorted_losses[place] = losses[rows, positions].numpy()
    predictable[place] = prompts.predictable[rows, positions].numpy()
    counted = predictable[:, 1:].any(axis=1, keepdims=True)  # [sequence, 1, index]: in the first copy, what comes again
    counted = np.concatenate((counted, predictable[:, 1:]), axis=1)
    shown = np.where(counted, sorted_losses, np.nan)
    n = np.isfinite(shown).sum(axis=0)  # [copy, index]
    mean, sem = _mean_and_error(shown)
    copy_loss = np.array([np.nanmean(shown[:, copy]) for copy in range(n_copies)])
    over = "tokens whose predecessor repeats as well"
    return {
        "loss": Quantity(
            mean, ("copy", "index"), "nats", f"next-token loss at each place of a copy, mean over the {over}"
        ),
        "loss_sem": Quantity(sem, ("copy", "index"), "nats", "standard error of loss over sequences"),
        "n_losses": Quantity(n, ("copy", "index"), "sequences", "how many sequences each loss is a mean of"),
        "copy_loss": Quantity(copy_loss, ("copy",), "nats", f"next-token loss, mean over the {over}"),
    }


def _mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over axis 0 without NaN, and its standard error; NaN for what too few values make undefined."""
    known = np.isfinite(values)
    n = known.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(known, values, 0.0).sum(axis=0) / np.where(n > 0, n, np.nan)
        squares = np.where(known, values - mean, 0.0) ** 2
        return mean, np.sqrt(squares.sum(axis=0) / np.where(n > 1, (n - 1) * n, np.nan))


@dataclass(frozen=True, eq=False)
class _Ablation:
    """The test: what the repeated tokens' loss does when heads are ablated."""

    model: Any
    prompts: RepeatedTokens
    others: RepeatedTokens  # whose mean outputs replace the heads'
    losses: torch.Tensor  # [sequence, pos], without ablation
    progress: Progress

    def of_heads(
        self, scores: np.ndarray, n: int, threshold: float, seed: int
    ) -> tuple[list[str], dict[str, Quantity]]:
        """Names of the ablated heads, and the quantities along "ablated"."""
        candidates = highest(scores, n)
        controls = _control_heads(candidates, scores.shape, seed)
        ablated = candidates + controls
        group = [head for head in candidates if scores[head] >= threshold]
        rests = [[peer for peer in group if peer != head] for head in group]
        layers = sorted({layer for layer, _ in ablated})
        means = mean_head_outputs(self.model, self.others.tokens, layers)
        alone = [[head] for head in ablated]
        with_means = self._effects([*alone, group, *rests], means, 0.0)  # [ablation, sequence]
        with_zeros = self._effects(alone, None, 0.6)
        peer_effect = np.full(len(ablated), np.nan)
        joint, without = with_means[len(ablated)], with_means[len(ablated) + 1 :]
        for head, rest in zip(group, without, strict=True):
            peer_effect[candidates.index(head)] = (joint - rest).mean()
        (mean, mean_error), (zero, zero_error) = (
            _mean_and_error(e.T) for e in (with_means[: len(ablated)], with_zeros)
        )
        is_control = np.arange(len(ablated)) >= len(candidates)
        control = np.abs(mean[is_control]).max() if controls else np.nan
        verdicts = [
            "control"
            if is_control[place]
            else _verdict(scores[head], mean[place], peer_effect[place], control, threshold)
            for place, head in enumerate(ablated)
        ]
        effect = "change of the repeated tokens' loss when the head's output is replaced by"
        axes, unit = ("ablated",), "nats per token"
        names = [
            f"L{layer}H{head}" + " (control)" * bool(c) for (layer, head), c in zip(ablated, is_control, strict=True)
        ]
        return names, {
            "ablated_head": Quantity(np.array(ablated), ("ablated", "layer and head"), "", "layer and head"),
            "is_control": Quantity(is_control, axes, "", "whether the head is a random head of a candidate's layer"),
            "mean_effect": Quantity(mean, axes, unit, f"{effect} its mean per position elsewhere"),
            "mean_effect_sem": Quantity(mean_error, axes, unit, "standard error of mean_effect over sequences"),
            "zero_effect": Quantity(zero, axes, unit, f"{effect} zeros"),
            "zero_effect_sem": Quantity(zero_error, axes, unit, "standard error of zero_effect over sequences"),
            "peer_effect": Quantity(
                peer_effect, axes, unit, "loss with all heads of the pattern at their means, less that with all others"
            ),
            "verdict": Quantity(np.array(verdicts), axes, "", "see InductionHeads"),
        }  # fmt: skip

    def _effects(self, ablations: list[list[Head]], replacement: dict | None, done: float) -> np.ndarray:
        """Change of the mean loss over the predictable tokens, float64 [ablation, sequence]."""
        kind, share = ("zero", 0.4) if replacement is None else ("mean", 0.6)
        rows = self.prompts.predictable
        losses = ablated_losses(
            self.model, self.prompts.tokens, rows, ablations, replacement,
            lambda part, text: self.progress(done + share * part, f"{kind} ablation: {text}"),
        )  # fmt: skip
        change = torch.where(rows, (losses - self.losses).double(), 0.0)
        return (change.sum(dim=2) / rows.sum(dim=1)).numpy()


def _control_heads(candidates: list[Head], shape: tuple[int, ...], seed: int) -> list[Head]:
    """For each candidate another random head of its layer that is no candidate, as far as the layer has enough."""
    rng = np.random.default_rng(seed)
    controls: list[Head] = []
    for layer in sorted({layer for layer, _ in candidates}):
        others = [head for head in range(shape[1]) if (layer, head) not in candidates]
        n = min(len(others), sum(candidate[0] == layer for candidate in candidates))
        controls += [(layer, int(head)) for head in sorted(rng.choice(others, n, replace=False))]
    return controls


def _verdict(score: float, alone: float, with_peers: float, control: float, threshold: float) -> str:
    if score < threshold:
        return "no pattern"
    if np.isnan(control):
        return "untested: no control head"
    if alone > control:
        return "induction"
    if alone < -control:
        return "anti-induction"
    return "redundant" if with_peers > control else "pattern only"
