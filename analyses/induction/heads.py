"""Induction heads: the attention that suggests them, and the ablation that tests them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import pad

from workbench.analyses.attention.scores import SCORES, earlier_occurrences, measure_heads, reaches
from workbench.analyses.induction.ablation import (
    LEAST_EFFECT,
    Repetition,
    ablation_check,
    control_effect,
    highest,
    mean_and_error,
)
from workbench.analyses.interventions.metrics import losses_of
from workbench.analyses.interventions.sweeps import Head, Intervention, measure
from workbench.analyses.labels import INDUCTION_SCORES
from workbench.analyses.options import check_seed, check_share, is_whole
from workbench.analyses.prompts import RepeatedTokens, Spacing, repeated_random_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model

if TYPE_CHECKING:
    import pandas as pd


ABLATIONS = {
    "mean": "mean ablation",
    "zero": "zero ablation",
    "direct": "direct path",
    "patterns_kept": "patterns kept",
    "peer": "after its peers",
}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class InductionHeads(Result):
    """Scores [layer, head]; losses [copy, index]; effects [ablated] of the heads that score highest and of controls.

    ``coordinates["ablated"]`` names the ablated heads. The verdicts are on mean ablation (zeros, shown beside it, also
    take away what a head always writes). An effect counts if it is two standard errors beyond ``control_effect``. Of
    the effect of mean ablation, ``direct_effect`` goes straight to the logits, and ``patterns_kept_effect`` is left
    when no head looks elsewhere for it (Olsson et al. 2022); neither enters the verdict.

    - *induction*: the loss of repeated tokens rises when the head is ablated alone.
    - *anti-induction*: it falls.
    - *redundant*: neither counts, but it rises when the head is ablated after all its peers, the other heads that
      reach ``settings["pattern_threshold"]``.
    - *pattern only*: the pattern without any such effect.
    - *no pattern*: prefix matching below the threshold; nothing is claimed.
    - *untested*: there is no control head, or one sequence only and so no standard error.
    """

    kind: ClassVar[str] = "induction_heads"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "loss", "ablation")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"loss": ("copy", "index")}

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        return self.all_figure_kinds if "verdict" in self else ("map", "loss")

    def top(self, n: int = 5) -> list[Head]:
        """(layer, head) of the ``n`` heads with the highest prefix-matching score, in order."""
        return highest(self["prefix_matching"], n)

    @property
    def control_effect(self) -> float:
        """The largest |effect| of a control under mean ablation, but at least 0.01 nats per token; NaN without."""
        return control_effect(self["mean_effect"][self["is_control"]])

    def control_effect_in_words(self) -> str:
        """``control_effect``, and whether a control or the floor sets it."""
        at_floor = self.control_effect == LEAST_EFFECT
        source = "the least that counts, as no control has more" if at_floor else "the largest effect of a control"
        return f"{self.control_effect:.3f} nats, {source} under mean ablation"

    def to_frame(self, *axes: str) -> pd.DataFrame:
        """As of any result; the table of all heads also has the effects and the verdict of those that were ablated."""
        frame = super().to_frame(*axes)
        if axes or "verdict" not in self:
            return frame
        ablated = super().to_frame("ablated").drop(columns=["ablated", "is_control"])  # whose verdict says that
        ablated[["layer", "head"]] = self["ablated_head"]
        return frame.merge(ablated, how="left", on=["layer", "head"])

    def summary(self) -> str:
        scores, losses = self["prefix_matching"], self["copy_loss"]
        top = ", ".join(f"L{layer}H{head} {scores[layer, head]:.3f}" for layer, head in self.top())
        lines = [
            self.provenance.sentence(),
            f"Prefix matching: {top} (uniform attention: {float(self['uniform_prefix_matching']):.3f}).",
            f"Loss of a token that repeats: {losses[0]:.3f} nats at its first occurrence, "
            + ", ".join(f"{loss:.3f} in copy {copy}" for copy, loss in enumerate(losses[1:], start=2)) + ".",
        ]  # fmt: skip
        if "verdict" in self:
            lines += self._ablation_lines()
        return "\n".join(lines)

    def _ablation_lines(self) -> list[str]:
        threshold = self.settings["pattern_threshold"]
        shown = [kind for kind in ABLATIONS if f"{kind}_effect" in self]
        columns = {kind: ABLATIONS[kind].removesuffix(" ablation").replace("its ", "") for kind in shown}
        widths = {kind: max(9, len(column) + 2) for kind, column in columns.items()}
        heading = "".join(f"{columns[kind]:>{widths[kind]}}" for kind in shown)
        lines = [f"{'ablated alone':<16}{'prefix':>7}{heading}  verdict"]
        for place, name in enumerate(self.coordinates["ablated"]):
            effects = {kind: self[f"{kind}_effect"][place] for kind in shown}
            cells = {kind: "–" if np.isnan(effect) else f"{effect:+.3f}" for kind, effect in effects.items()}
            lines.append(
                f"{name:<16}{self['prefix_matching'][tuple(self['ablated_head'][place])]:>7.3f}"
                + "".join(f"{cells[kind]:>{widths[kind]}}" for kind in shown)
                + f"  {self['verdict'][place]}"
            )
        lines.append(
            "Effects are changes of the repeated tokens' loss in nats per token; means are those of "
            f"{self.replacement_in_words()}."
        )
        if np.isnan(self.control_effect):
            return lines
        lines.append(
            f"Without all {reaches(self['prefix_matching'], threshold).sum()} heads with a prefix matching of "
            f"{threshold} or more: {float(self['group_effect']):+.3f}. "
            + (
                f"An effect counts two standard errors beyond {self.control_effect_in_words()}."
                if self.provenance.n_sequences > 1
                else "One sequence gives no standard error to judge effects by: take two or more."
            )
        )
        return lines

    def _draw_map(
        self, *, score: str = "prefix_matching", chosen: tuple[int, int] | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        if score not in INDUCTION_SCORES:
            raise ValueError(f"score must be one of {', '.join(INDUCTION_SCORES)}, got {score!r}")
        return Drawing(
            figures.head_map(self[score], label=figures.axis_label(score), upper=1.0, chosen=chosen, theme=theme),
            f"{INDUCTION_SCORES[score]} of every head",
            self.define(score) + figures.framed(chosen),
        )

    def _draw_loss(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        names = [f"copy {copy}" for copy in self.coordinates["copy"]]
        figure = figures.curves(
            dict(zip(names, self["loss"], strict=True)),
            errors=dict(zip(names, self["loss_sem"], strict=True)),
            x_label="place within the copy (tokens)",
            y_label="next-token loss (nats)",
            theme=theme,
        )
        return Drawing(
            figure, "Loss of repeated tokens along each copy", f"{self.define('loss')} {self._errors('Bands')}"
        )

    def _draw_ablation(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.effects(
            [
                str(name) if verdict == "control" else f"{name}: {verdict}"
                for name, verdict in zip(self.coordinates["ablated"], self["verdict"], strict=True)
            ],
            {
                label: (self[f"{kind}_effect"], self[f"{kind}_effect_sem"])
                for kind, label in ABLATIONS.items()
                if f"{kind}_effect" in self
            },
            control=self.control_effect,
            x_label="change of the repeated tokens' loss (nats per token)",
            theme=theme,
        )
        note = (
            f"Mean ablation replaces the head's output by its mean per position on {self.replacement_in_words()}, zero "
            "ablation by zeros. Direct path, patterns kept: what mean ablation does past all later heads and MLPs, and "
            "without a change of where any head looks. After its peers: mean ablation, once all other heads with the "
            "pattern are ablated. "
            f"{self._errors('Bars')}"
        )
        if np.isfinite(self.control_effect):
            note += f" Controls: random heads of the same layers. Grey: ± {self.control_effect_in_words()}."
        return Drawing(figure, "What the loss of repeated tokens does without each head", note)

    def replacement_in_words(self) -> str:
        """The sequences whose mean outputs replace those of ablated heads."""
        n, seed = self.settings["n_replacement_sequences"], self.settings["replacement_seed"]
        return f"{n} other sequence{'s' if n > 1 else ''} of the same kind (seed {seed})"

    def _errors(self, what: str) -> str:
        n = self.provenance.n_sequences
        return f"{what}: ± 1 standard error over sequences." if n > 1 else "One sequence gives no standard error."


def induction_heads(
    model: Any,
    *,
    length: int = 64,
    n_sequences: int = 8,
    n_copies: int = 2,
    spacing: Spacing = "fixed",
    seed: int = 0,
    prepend_bos: bool | None = None,
    n_ablated: int | None = None,
    pattern_threshold: float = 0.3,
    progress: Progress = silent,
) -> InductionHeads:
    """Which heads attend to what followed the present token before, and which of them the model needs to copy it.

    1. Random tokens are repeated (see repeated_random_tokens), and every head's attention is scored on them (Olsson et
       al. 2022; previous and duplicate tokens after Wang et al. 2022).
    2. The loss of each copy is taken at the same tokens: those whose predecessor repeats as well.
    3. The ``n_ablated`` heads with the highest prefix matching are ablated one by one, with zeros and with their mean
       output per position on as many other sequences of the same kind (``seed + 1``). Controls are random heads
       without the pattern, one for each with it, from the same layers. With means, all heads that reach
       ``pattern_threshold`` are ablated together as well, and all but each of them. Each mean ablation is also shown
       along the direct path to the logits alone, and with all attention patterns held as they were.

    Args:
        model: a HookedTransformer, or a TransformerBridge.
        n_ablated: None means 5, or all heads where there are fewer; 0 leaves the ablations out.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that it is not for (docs/definitions.md), what repeated_random_tokens refuses, or an option
            out of its range.
    """
    check_model(model, predicts=True)
    n_heads = model.cfg.n_layers * model.cfg.n_heads
    n_ablated = min(5, n_heads) if n_ablated is None else n_ablated
    if not is_whole(n_ablated) or not 0 <= n_ablated <= n_heads:
        raise ValueError(f"n_ablated must be between 0 and {n_heads}, the number of heads, got {n_ablated!r}")
    check_share(pattern_threshold=pattern_threshold, with_one=True)
    check_seed(seed)
    kind: dict[str, Any] = dict(
        length=length, n_sequences=n_sequences, n_copies=n_copies, spacing=spacing, prepend_bos=prepend_bos
    )
    prompts = repeated_random_tokens(model, **kind, seed=seed)
    sequences = Sequences.read(model, prompts)
    share = 0.3 if n_ablated else 0.9
    measured = measure_heads(model, sequences, 1, lambda done, message: progress(share * done, message))
    scores = {name: measured.scores[name] for name in INDUCTION_SCORES}
    quantities = {
        name: Quantity(score.mean, ("layer", "head"), SCORES[name].unit, SCORES[name].definition)
        for name, score in scores.items()
    }
    quantities["uniform_prefix_matching"] = _uniform_score(sequences)
    everything = torch.ones_like(prompts.tokens, dtype=torch.bool)
    everything[:, 0] = False
    losses = measure(model, sequences, [Intervention()], losses_of(prompts.tokens, everything)[0])[0]
    progress(share + 0.1, "loss of every token")
    quantities |= _loss_quantities(prompts, pad(losses, (1, 0), value=torch.nan))
    coordinates: dict[str, Sequence[str | int]] = {"copy": list(range(1, n_copies + 1))}
    chosen = kind | {"seed": seed, "n_ablated": n_ablated, "pattern_threshold": pattern_threshold}
    if n_ablated:
        others = repeated_random_tokens(model, **kind, seed=seed + 1)
        chosen |= {"replacement_seed": seed + 1, "n_replacement_sequences": n_sequences}
        coordinates["ablated"], found = ablation_check(
            model,
            Repetition(prompts, others),
            scores["prefix_matching"].mean,
            n_candidates=n_ablated,
            threshold=pattern_threshold,
            seed=seed,
            progress=lambda done, message: progress(0.4 + 0.6 * done, message),
        )
        quantities |= found
    return InductionHeads(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings=chosen,
        coverage={name: score.coverage for name, score in scores.items()},
        coordinates=coordinates,
    )


def _uniform_score(sequences: Sequences) -> Quantity:
    n_targets = earlier_occurrences(sequences).n_targets.double()  # [sequence, pos]
    share = n_targets / torch.arange(1, n_targets.shape[1] + 1)
    definition = "prefix matching of a head that spreads its weight evenly over the query's token and all before it"
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
    mean, sem = mean_and_error(shown)
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
