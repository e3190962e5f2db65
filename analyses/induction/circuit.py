"""The circuit behind induction: which earlier head tells which induction head where to look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from workbench.analyses.attention.scores import SCORES, earlier_occurrences, measure_heads, reaches
from workbench.analyses.induction.ablation import control_heads, highest, loss_effects, mean_and_error, mean_z
from workbench.analyses.interventions.edits import replace_head
from workbench.analyses.interventions.paths import CleanRun, Receiver, check_paths
from workbench.analyses.interventions.sweeps import Head, Intervention
from workbench.analyses.options import check_seed, check_share, is_whole
from workbench.analyses.prompts import RepeatedTokens, Spacing, repeated_random_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model
from workbench.kernels import StatisticsRequest, match_labels

LEAST_CHANGE = 0.01  # of prefix matching; a smaller change is none, whatever the controls do
FEEDS_KEYS, FEEDS_OTHERWISE = "feeds its keys", "feeds otherwise"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class InductionCircuit(Result):
    """Effects [receiver, feeder] of earlier heads (feeders) on induction heads (receivers); NaN where a feeder is no
    earlier.

    ``ablation_effect``: change of the receiver's prefix matching without the feeder's output anywhere. ``key_effect``:
    the same when it is missing in the receiver's keys alone; ``key_loss_effect``: what that does to the loss.
    ``all_keys_loss_effect`` [feeder]: the loss when it is missing in the keys of all receivers with the pattern.

    - *feeds its keys*: prefix matching falls, two standard errors beyond any control, by the receiver's keys alone.
    - *feeds otherwise*: it falls so only when the feeder is ablated for all that read it.
    - *does not feed*: neither.
    - *no pattern*: the receiver's prefix matching is below the threshold; nothing is claimed.
    - *not earlier*, *control*; *untested*: no control before the receiver, or one sequence only.
    """

    kind: ClassVar[str] = "induction_circuit"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("circuit",)
    frame_axes: ClassVar[tuple[str, ...]] = ("receiver", "feeder")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"feeders": ("feeder",), "receivers": ("receiver",)}

    def feeders(self, receiver: Head) -> list[Head]:
        """(layer, head) of the heads that feed a receiver's keys, the strongest first.

        Raises:
            ValueError: a head that is no receiver here.
        """
        known = [tuple(head) for head in self["receiver_head"].tolist()]
        if receiver not in known:
            names = ", ".join(map(str, self.coordinates["receiver"]))
            raise ValueError(f"receiver must be one of {names} as (layer, head), got {receiver!r}")
        row = known.index(receiver)
        (found,) = np.nonzero(self["verdict"][row] == FEEDS_KEYS)
        found = found[np.argsort(self["key_effect"][row, found], kind="stable")]
        return [(int(layer), int(head)) for layer, head in self["feeder_head"][found]]

    def summary(self) -> str:
        lines = [self.provenance.sentence()]
        for row, receiver in enumerate(self.coordinates["receiver"]):
            verdicts, score = self["verdict"][row], self["prefix_matching"][row]
            lines.append(f"{receiver} (prefix matching {score:.3f}): {self._fed_by(row, verdicts)}.")
        for place, feeder in enumerate(self.coordinates["feeder"]):
            if FEEDS_KEYS in self["verdict"][:, place]:
                effect, error = self["all_keys_loss_effect"][place], self["all_keys_loss_effect_sem"][place]
                lines.append(
                    f"Without {feeder} (previous token {self['previous_token'][place]:.3f}) in the keys of all heads "
                    f"with the pattern, the loss of repeated tokens changes by {effect:+.3f} ± {error:.3f} nats."
                )
        lines.append(
            "Changes of prefix matching when the feeder's output in the receiver's keys is its mean (in brackets: when "
            f"it is so everywhere), ± standard error over {self.provenance.n_sequences} sequences. A change counts two "
            f"standard errors beyond the largest of {int(self['is_control'].sum())} control heads, at least "
            f"{LEAST_CHANGE}."
        )
        return "\n".join(lines)

    def _fed_by(self, row: int, verdicts: np.ndarray) -> str:
        parts = [
            f"{self.coordinates['feeder'][place]} {self['key_effect'][row, place]:+.3f} "
            f"± {self['key_effect_sem'][row, place]:.3f} ({self['ablation_effect'][row, place]:+.3f}, {verdict})"
            for place, verdict in enumerate(verdicts)
            if verdict in (FEEDS_KEYS, FEEDS_OTHERWISE)
        ]
        if parts:
            return "fed by " + ", ".join(parts)
        others = sorted({str(verdict) for verdict in verdicts} - {"control", "not earlier"})
        return "no feeder found" if others == ["does not feed"] else ", ".join(others) or "no earlier head"

    def _draw_circuit(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.circuit_view(
            {
                str(name): f"previous token {score:.2f}"
                for name, score in zip(self.coordinates["feeder"], self["previous_token"], strict=True)
            },
            {
                str(name): f"prefix matching {score:.2f}"
                for name, score in zip(self.coordinates["receiver"], self["prefix_matching"], strict=True)
            },
            self["key_effect"],
            named={verdict: self["verdict"] == verdict for verdict in (FEEDS_KEYS, FEEDS_OTHERWISE)},
            rest="does not feed, control, or no claim",
            hover="change of prefix matching",
            theme=theme,
        )
        note = (
            f"{self.define('key_effect')} The wider a line, the larger the change, which stands on lines of heads that "
            "feed. Controls: random heads of the same layers that do not attend to the previous token."
        )
        return Drawing(figure, "Which earlier heads tell induction heads where to look", note)


def induction_circuit(
    model: Any,
    *,
    length: int = 64,
    n_sequences: int = 8,
    spacing: Spacing = "fixed",
    seed: int = 0,
    prepend_bos: bool | None = None,
    n_receivers: int = 3,
    n_feeders: int = 4,
    pattern_threshold: float = 0.3,
    progress: Progress = silent,
) -> InductionCircuit:
    """Which earlier heads feed the keys of induction heads (Elhage et al. 2021; Olsson et al. 2022), head by head.

    An induction head finds a token whose predecessor was the present one, which an earlier head must have written
    there. So each of the ``n_feeders`` heads with the highest previous-token score is taken away from the keys of each
    of the ``n_receivers`` heads with the highest prefix matching, by path patching (Goldowsky-Dill et al. 2023): the
    feeder's output becomes its mean per position on other sequences of repeated random tokens (``seed + 1``). Controls
    are random heads of the feeders' layers without the previous-token pattern.

    Args:
        model: a HookedTransformer.
        length, n_sequences, spacing, seed, prepend_bos: of repeated_random_tokens.
        pattern_threshold: prefix matching of an induction head, and previous-token score of a head that is no control.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model whose paths cannot be told apart, or that this is not for (docs/definitions.md), what
            repeated_random_tokens refuses, or an option out of its range.
    """
    check_model(model, predicts=True)
    check_paths(model)
    if model.cfg.n_layers < 2:
        raise ValueError(f"{model.cfg.model_name} has one layer, where no head comes before another")
    n_heads = model.cfg.n_layers * model.cfg.n_heads
    for name, value in (("n_receivers", n_receivers), ("n_feeders", n_feeders)):
        if not is_whole(value) or not 1 <= value <= n_heads:
            raise ValueError(f"{name} must be between 1 and {n_heads}, the number of heads, got {value!r}")
    check_share(pattern_threshold=pattern_threshold, with_one=True)
    check_seed(seed)
    kind: dict[str, Any] = dict(length=length, n_sequences=n_sequences, spacing=spacing, prepend_bos=prepend_bos)
    prompts, others = (repeated_random_tokens(model, **kind, seed=one) for one in (seed, seed + 1))
    sequences = Sequences.read(model, prompts)
    scores = measure_heads(model, sequences, 1, lambda done, what: progress(0.2 * done, what)).scores
    prefix, previous = scores["prefix_matching"].mean, scores["previous_token"].mean
    receivers = highest(prefix[1:], n_receivers)  # the first layer has nothing before it
    receivers = [(layer + 1, head) for layer, head in receivers]
    before = max(layer for layer, _ in receivers)
    candidates = highest(previous[:before], n_feeders)
    allowed = ~reaches(previous, pattern_threshold)
    allowed[tuple(np.array(candidates).T)] = False
    feeders = candidates + control_heads(candidates, allowed, seed)
    is_control = np.arange(len(feeders)) >= len(candidates)
    tried = _Pairs(model, prompts, receivers, feeders, mean_z(model, others, sorted({layer for layer, _ in feeders})))
    has_pattern = reaches(np.array([prefix[head] for head in receivers]), pattern_threshold)
    effects = tried.effects(has_pattern, lambda done, what: progress(0.2 + 0.8 * done, what))
    verdicts = _verdicts(receivers, feeders, has_pattern, is_control, effects)
    return InductionCircuit(
        quantities=_quantities(receivers, feeders, is_control, prefix, previous, effects, verdicts),
        provenance=provenance(model, sequences),
        settings=kind
        | {
            "seed": seed, "replacement_seed": seed + 1, "n_receivers": n_receivers, "n_feeders": n_feeders,
            "pattern_threshold": pattern_threshold,
        },
        coordinates={
            "receiver": [f"L{layer}H{head}" for layer, head in receivers],
            "feeder": [
                f"L{layer}H{head}{' (control)' if c else ''}"
                for (layer, head), c in zip(feeders, is_control, strict=True)
            ],
        },
    )  # fmt: skip


class _Pairs:
    """What each feeder does to each receiver."""

    def __init__(
        self, model: Any, prompts: RepeatedTokens, receivers: Sequence[Head], feeders: Sequence[Head], means: Mapping
    ) -> None:
        self.model, self.prompts, self.receivers, self.feeders = model, prompts, receivers, feeders
        self.values = [means[layer][:, head] for layer, head in feeders]
        self.batch = Sequences.read(model, prompts).to(model.cfg.device)
        self.run = CleanRun.of(model, self.batch)
        label = match_labels(self.batch.tokens, "induction", key_padding=self.batch.real)
        self.request = StatisticsRequest(match={"targets": label})  # by a name that a run from a residual takes
        self.counts = earlier_occurrences(self.batch).n_targets > 0  # [sequence, pos]
        self.streams: dict[int, torch.Tensor] = {}  # layer → [sequence, pos, d_model]

    def effects(self, has_pattern: np.ndarray, progress: Progress) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name → mean and standard error over sequences, [receiver, feeder] each, or [feeder]."""
        pairs = [
            (row, place)
            for row, (layer, _) in enumerate(self.receivers)
            for place, feeder in enumerate(self.feeders)
            if feeder[0] < layer
        ]
        keys = [Receiver(*head, "k") for head in self.receivers]
        paths = [self.run.along_path(self.feeders[f], self.values[f], [keys[row]]) for row, f in pairs]
        with_pattern = [key for key, has_it in zip(keys, has_pattern, strict=True) if has_it]
        together = [
            self.run.along_path(head, value, [key for key in with_pattern if key.layer > head[0]])
            for head, value in zip(self.feeders, self.values, strict=True)
        ]
        clean = self._prefix_matching(Intervention(), self.receivers)
        shape = (len(self.prompts.tokens), len(self.receivers), len(self.feeders))
        ablation, key, loss = (np.full(shape, np.nan) for _ in range(3))
        for place, (head, value) in enumerate(zip(self.feeders, self.values, strict=True)):
            ablation[:, :, place] = self._prefix_matching(replace_head(*head, value), self.receivers) - clean
            progress(0.4 * (place + 1) / len(self.feeders), f"{place + 1} of {len(self.feeders)} heads ablated")
        for (row, place), path in zip(pairs, paths, strict=True):
            key[:, row, place] = self._prefix_matching(path, [self.receivers[row]])[:, 0] - clean[:, row]
        changes = loss_effects(
            self.model, self.prompts, [*paths, *together], lambda done, what: progress(0.4 + 0.6 * done, what)
        )
        for (row, place), change in zip(pairs, changes[: len(pairs)], strict=True):
            loss[:, row, place] = change
        all_keys = np.where([bool(edits.edits) for edits in together], changes[len(pairs) :].T, np.nan)
        earlier = np.zeros(shape[1:], dtype=bool)
        earlier[tuple(np.array(pairs).T)] = True
        ablation[:, ~earlier] = np.nan  # what comes later changes nothing, which is no finding
        return {
            "ablation_effect": mean_and_error(ablation),
            "key_effect": mean_and_error(key),
            "key_loss_effect": mean_and_error(loss),
            "all_keys_loss_effect": mean_and_error(all_keys),
        }

    def _entering(self, layer: int) -> torch.Tensor:
        """The residual stream before the hooks on it that a run from this layer passes."""
        if layer not in self.streams:
            self.streams[layer] = self.model(self.batch.tokens, stop_at_layer=layer)
        return self.streams[layer]

    @torch.no_grad()
    def _prefix_matching(self, edits: Intervention, heads: Sequence[Head]) -> np.ndarray:
        """Of these heads in each sequence, [sequence, head]; restarted at the first layer that matters."""
        first = min(edits.first_layer(self.model.cfg.n_layers), *(layer for layer, _ in heads))
        stream = self._entering(first).clone()  # which a hook may change in place
        with self.model.hooks(fwd_hooks=list(edits.edits.items())):
            _, found = self.model.run_with_statistics(
                stream, self.request, return_type=None,
                start_at_layer=first, stop_at_layer=max(layer for layer, _ in heads) + 1,
            )  # fmt: skip
        mass = found["match_mass"]["targets"]  # [layer, sequence, head, query]
        of_heads = torch.stack([mass[layer - first, :, head] for layer, head in heads], dim=1).double()
        counts = self.counts[:, None]
        return (torch.where(counts, of_heads, 0.0).sum(dim=2) / counts.sum(dim=2)).cpu().numpy()


def _verdicts(
    receivers: Sequence[Head],
    feeders: Sequence[Head],
    has_pattern: np.ndarray,
    is_control: np.ndarray,
    effects: Mapping[str, tuple[np.ndarray, np.ndarray]],
) -> np.ndarray:
    """InductionCircuit says what each one means."""
    found = np.full((len(receivers), len(feeders)), "does not feed", dtype="<U24")
    for row, (layer, _) in enumerate(receivers):
        earlier = np.array([feeder[0] < layer for feeder in feeders])
        for name, kind in ((FEEDS_OTHERWISE, "ablation_effect"), (FEEDS_KEYS, "key_effect")):
            effect, error = (part[row] for part in effects[kind])
            bound = max(np.abs(effect[is_control & earlier]).max(initial=0.0), LEAST_CHANGE)
            found[row, effect < -bound - 2 * error] = name
        if not (is_control & earlier).any():
            found[row] = "untested: no control"
        elif np.isnan(effects["key_effect"][1][row][earlier]).all():
            found[row] = "untested: one sequence"
        if not has_pattern[row]:
            found[row] = "no pattern"
        found[row, is_control] = "control"
        found[row, ~earlier] = "not earlier"
    return found


def _quantities(
    receivers: Sequence[Head],
    feeders: Sequence[Head],
    is_control: np.ndarray,
    prefix: np.ndarray,
    previous: np.ndarray,
    effects: Mapping[str, tuple[np.ndarray, np.ndarray]],
    verdicts: np.ndarray,
) -> dict[str, Quantity]:
    pairs = ("receiver", "feeder")
    about = {
        "ablation_effect": (
            pairs, "share of 1",
            "change of the receiver's prefix matching when the feeder's output is its mean per position on other "
            "sequences",
        ),
        "key_effect": (
            pairs, "share of 1",
            "change of the receiver's prefix matching when the feeder's output in the receiver's keys alone is its "
            "mean per position on other sequences, all else between the two as it was",
        ),
        "key_loss_effect": (pairs, "nats per token", "what that does to the loss of repeated tokens"),
        "all_keys_loss_effect": (
            ("feeder",), "nats per token",
            "change of that loss when the feeder's output in the keys of all receivers with the pattern is its mean; "
            "NaN where none of them comes after it",
        ),
    }  # fmt: skip
    found = {
        "receiver_head": Quantity(np.array(receivers), ("receiver", "layer and head"), "", "layer and head"),
        "feeder_head": Quantity(np.array(feeders), ("feeder", "layer and head"), "", "layer and head"),
        **{
            name: Quantity(
                np.array([values[head] for head in heads]), (axis,), SCORES[name].unit, SCORES[name].definition
            )
            for name, axis, heads, values in (
                ("prefix_matching", "receiver", receivers, prefix),
                ("previous_token", "feeder", feeders, previous),
            )
        },
        "is_control": Quantity(is_control, ("feeder",), "", "whether it is a random head without the pattern"),
    }
    for name, (axes, unit, definition) in about.items():
        values, errors = effects[name]
        found[name] = Quantity(values, axes, unit, definition)
        found[f"{name}_sem"] = Quantity(errors, axes, unit, f"standard error of {name} over sequences")
    return found | {"verdict": Quantity(verdicts, pairs, "", "see InductionCircuit")}
