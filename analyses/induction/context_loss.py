"""In-context learning as a loss: how much better a token late in a text is predicted than one early in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from workbench.analyses.attribution.agreement import MIN_FOR_INTERVAL, mean_interval
from workbench.analyses.induction.ablation import mean_and_error
from workbench.analyses.interventions.metrics import losses_of
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.options import is_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model, depends_on_length

GOOD_ERROR = 0.1  # nats; a standard error at which scores of models can be told apart
SMOOTH = 17  # positions that the curve is a mean of


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class InContextLearning(Result):
    """``score`` with its standard error and interval, ``early_loss`` and ``late_loss``, ``sequence_score`` [sequence],
    and ``loss`` and ``smooth_loss`` [pos] with theirs."""

    kind: ClassVar[str] = "in_context_learning"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("loss",)
    frame_axes: ClassVar[tuple[str, ...]] = ("pos",)
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"sequences": ("sequence",)}

    @property
    def n_for_good_error(self) -> int:
        """How many such sequences would bring the standard error to 0.1 nats."""
        return int(np.ceil(self.provenance.n_sequences * (float(self["score_sem"]) / GOOD_ERROR) ** 2))

    def summary(self) -> str:
        score, sem = float(self["score"]), float(self["score_sem"])
        n, settings = self.provenance.n_sequences, self.settings
        lines = [
            self.provenance.sentence(),
            f"Loss at position {settings['late']} less loss at position {settings['early']}: {score:+.3f} ± {sem:.3f} "
            f"nats [{float(self['score_low']):+.3f}, {float(self['score_high']):+.3f}] (n = {n}; "
            f"{float(self['late_loss']):.3f} and {float(self['early_loss']):.3f}"
            + (f"; each the mean of {settings['width']} positions around it)." if settings["width"] > 1 else ")."),
        ]
        if abs(score) < 2 * sem:
            lines.append("That is less than two standard errors from 0: no difference is shown.")
        if sem > GOOD_ERROR:
            lines.append(
                f"About {self.n_for_good_error:,} such sequences would bring the standard error to {GOOD_ERROR} nats."
            )
        return "\n".join(lines)

    def _draw_loss(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        smooth = f"mean of {SMOOTH} positions"
        figure = figures.curves(
            {"each position": self["loss"], smooth: self["smooth_loss"]}, errors={smooth: self["smooth_loss_sem"]},
            x_label="position (tokens)", y_label="next-token loss (nats)", theme=theme,
        )  # fmt: skip
        figure.update_traces(line={"width": 0.7, "dash": "solid"}, selector={"name": "each position"})
        figure.update_traces(line={"width": 3, "dash": "solid"}, selector={"name": smooth})
        style = figures.THEMES[theme]
        for name in ("early", "late"):
            figure.add_vline(
                x=self.settings[name], line={"color": style.text, "width": 1, "dash": "dot"}, annotation_text=name,
                annotation_position="bottom left" if name == "late" else "bottom right",
            )  # fmt: skip
        return Drawing(
            figure, "Loss along the text", f"{self.define('smooth_loss')} Band: ± 1 standard error over sequences."
        )


def in_context_learning(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    early: int = 50,
    late: int = 500,
    width: int = 1,
    progress: Progress = silent,
) -> InContextLearning:
    """Loss of the token at position ``late`` less that at ``early``, mean over sequences (Olsson et al. 2022).

    Negative where the model makes use of what it has read. Positions count from 0, so that behind BOS token 50 of the
    text stands at 50. Losses of single tokens spread by some 3 nats, hence the 20 sequences at least, and the error.

    Args:
        tokens: 20 sequences or more that reach beyond ``late``; what is beyond the shortest of them is left out.
        width: each loss is the mean of so many positions, an odd number, around the one that is named. 1 is the
            paper's; more have a smaller error, and early positions more of the fall in them.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: fewer than 20 sequences, sequences that end before ``late``, or an option out of its range.
    """
    check_model(model, predicts=True)
    half = _checked(model, early, late, width)
    sequences = Sequences.read(model, tokens, attention_mask)
    if (n := len(sequences)) < MIN_FOR_INTERVAL:
        raise ValueError(
            f"{n} sequence{'s make' if n > 1 else ' makes'} no in-context-learning score: losses of single tokens "
            f"spread by some 3 nats, so that even {MIN_FOR_INTERVAL} sequences leave a standard error near 1; cut a "
            f"longer text with chunked_text(model, text, length={late + half + 1})"
        )
    short = int((sequences.lengths <= late + half).sum())
    if short:
        raise ValueError(
            f"{short} of {n} sequences have fewer than the {late + half + 1} tokens that reach position {late + half}; "
            "leave them out, or choose a smaller late"
        )
    sequences = sequences.first(int(sequences.lengths.min()))
    losses = _losses(model, sequences, progress)  # [sequence, pos]
    at = {name: losses[:, place - half : place + half + 1].mean(axis=1) for name, place in
          (("early", early), ("late", late))}  # fmt: skip
    return InContextLearning(
        quantities=_quantities(losses, at["early"], at["late"]),
        provenance=provenance(model, sequences),
        settings={"early": early, "late": late, "width": width},
    )


def _checked(model: Any, early: int, late: int, width: int) -> int:
    """How many positions on each side of early and late count."""
    if not is_whole(width) or width < 1 or width % 2 == 0:
        raise ValueError(f"width must be an odd number of positions, got {width!r}")
    half = width // 2
    if not all(is_whole(place) for place in (early, late)) or not half < early < late - 2 * half:
        raise ValueError(
            f"early and late must be positions from {half + 1} on, further apart than width = {width}, got {early!r} "
            f"and {late!r}"
        )
    if late + half >= model.cfg.n_ctx:
        raise ValueError(
            f"late must be at most {model.cfg.n_ctx - 1 - half}, as the model's context holds {model.cfg.n_ctx} "
            f"tokens, got {late}"
        )
    return half


def _losses(model: Any, sequences: Sequences, progress: Progress) -> np.ndarray:
    """Next-token losses in nats [sequence, pos]; NaN at position 0, which nothing predicts."""
    parts: list[Tensor] = []
    for batch in sequences.batches(one_length=depends_on_length(model)):
        rows = torch.ones_like(batch.real)
        rows[:, 0] = False
        parts.append(measure(model, batch, [Intervention()], losses_of(batch.tokens, rows)[0])[0])
        done = sum(map(len, parts))
        progress(done / len(sequences), f"losses of {done} of {len(sequences)} sequences")
    return pad(torch.cat(parts), (1, 0), value=torch.nan).numpy()


def _quantities(losses: np.ndarray, early: np.ndarray, late: np.ndarray) -> dict[str, Quantity]:
    unit, difference = "nats", late - early
    mean, sem = mean_and_error(losses)
    smooth, smooth_sem = mean_and_error(_smooth(losses))
    score, score_sem = mean_and_error(difference)
    low, high = mean_interval(difference)
    single = {
        "score": (score, "late_loss less early_loss, mean over sequences"),
        "score_sem": (score_sem, "standard error of score over sequences"),
        "score_low": (low, "lower end of the 95 % bootstrap interval over sequences of score"),
        "score_high": (high, "upper end of the 95 % bootstrap interval over sequences of score"),
        "early_loss": (early.mean(), "next-token loss at the early position, mean over sequences"),
        "late_loss": (late.mean(), "next-token loss at the late position, mean over sequences"),
    }
    return {name: Quantity(np.array(float(value)), (), unit, what) for name, (value, what) in single.items()} | {
        "sequence_score": Quantity(difference, ("sequence",), unit, "late loss less early loss of each sequence"),
        "loss": Quantity(mean, ("pos",), unit, "loss of the token at a position, mean over sequences"),
        "loss_sem": Quantity(sem, ("pos",), unit, "standard error of loss over sequences"),
        "smooth_loss": Quantity(
            smooth, ("pos",), unit, f"mean loss of the {SMOOTH} positions around each, fewer at the ends"
        ),
        "smooth_loss_sem": Quantity(smooth_sem, ("pos",), unit, "standard error of smooth_loss over sequences"),
    }


def _smooth(losses: np.ndarray) -> np.ndarray:
    """Of each sequence, the mean of the known losses among the SMOOTH positions around each; [sequence, pos]."""
    padded = np.pad(losses, ((0, 0), (SMOOTH // 2, SMOOTH // 2)), constant_values=np.nan)
    return np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, SMOOTH, axis=1), axis=2)
