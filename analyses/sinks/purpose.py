"""What a sink is for: later queries go on without its edge, without its value, or with a constant in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attribution.agreement import MIN_FOR_INTERVAL, mean_interval
from workbench.analyses.interventions.metrics import Metric, token_losses
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.options import check_share, check_whole, is_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, attention_statistics, provenance, silent
from workbench.analyses.sinks.scopes import choose_scopes, key_edits, read_key, weight_on
from workbench.analyses.support import check_model
from workbench.kernels import StatisticsRequest

MIN_DISTANCE = 16  # tokens from the sink and its control to the first query that is edited
N_CANDIDATES = 8  # keys after the sink among which the control is sought
LEAST_EFFECT = 0.01  # nats per token; a smaller change of the loss is none, whatever the control does
LEFT_OVER = 0.1  # of what dropping the value changes; a constant that leaves no more of it has replaced the value

EDITS = ("edges cut", "value dropped", "constant instead", "edges of every query cut")
KEYS = ("sink", "control")
VERDICTS = ("no-op", "implicit bias", "carries information", "undecided", "untested", "no sink")
CONDITIONS = ("as it is", "cut for later queries", "cut for every query")


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SinkInterventions(Result):
    """Changes of the loss [scope, key, edit, sequence], their means with intervals, and a ``verdict`` [scope].

    A scope is all layers, a range of them, or one head. ``weight_by_position`` [condition, position] shows where the
    attention of later queries goes when the sink is cut.
    """

    kind: ClassVar[str] = "sink_interventions"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("ranges", "heads", "moved")
    frame_axes: ClassVar[tuple[str, ...]] = ("scope", "key", "edit")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "verdicts": ("scope",),
        "positions": ("condition", "position"),
    }

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        return tuple(kind for kind in self.all_figure_kinds if kind != "heads" or len(self._scopes(True)))

    def verdict(self, scope: str) -> str:
        """Of one scope: "all layers", "layers 0–9", "L3H5"."""
        return str(self["verdict"][list(self.coordinates["scope"]).index(scope)])

    def heads_by_verdict(self) -> dict[str, list[str]]:
        """What the sink is for → the heads that it is that for, those with most weight on it first."""
        names = self.coordinates["scope"]
        found: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS}
        for place in self._scopes(True):
            found[str(self["verdict"][place])].append(str(names[place]))
        return {verdict: heads for verdict, heads in found.items() if heads}

    def summary(self) -> str:
        settings, n = self.settings, self.provenance.n_sequences
        lines = [
            self.provenance.sentence(),
            f"Edited: what queries from position {settings['first_query']} on read of the sink (position "
            f"{settings['sink_position']}) and, as a control, of position {settings['control_position']}; loss of "
            f"their predictions {self['baseline_loss'].mean():.3f} nats, n = {n} sequences.",
        ]
        for place, scope in enumerate(self.coordinates["scope"]):
            changes = ", ".join(
                f"{edit} {self._in_words(place, 0, which)} (control {self['loss_change_mean'][place, 1, which]:+.3f})"
                for which, edit in enumerate(EDITS)
                if np.isfinite(self["loss_change_mean"][place, 0, which])
            )
            weight = self["mean_weight"][place, 0]
            lines.append(f"{scope}: {self['verdict'][place]}. Mean weight on the sink {weight:.2f}; {changes}.")
        sorted_heads = [f"{verdict} {', '.join(heads)}" for verdict, heads in self.heads_by_verdict().items()]
        if sorted_heads:
            lines.append(f"Heads by what the sink is for: {'; '.join(sorted_heads)}.")
        lines.append(f"{self._moved_in_words(1)} {self._moved_in_words(2)}")
        return "\n".join(lines)

    def _in_words(self, scope: int, key: int, edit: int) -> str:
        at = scope, key, edit
        mean, low, high = (self[f"loss_change_{name}"][at] for name in ("mean", "low", "high"))
        return f"{mean:+.3f}" + (f" [{low:+.3f}, {high:+.3f}]" if np.isfinite(low) else "")

    def _moved_in_words(self, condition: int) -> str:
        weights = np.array(self["weight_by_position"][condition])
        weights[self.settings["sink_position"]] = np.nan
        to = int(np.nanargmax(weights))
        before, after = (self["weight_by_position"][which, to] for which in (0, condition))
        share = self["share_of_heads_by_position"][condition, to]
        return (
            f"{CONDITIONS[condition].capitalize()}, position {to} gets most of the others: {after:.3f} (before "
            f"{before:.3f}), above {self.settings['epsilon']} in {share:.1%} of heads."
        )

    def _scopes(self, heads: bool) -> list[int]:
        return [place for place, scope in enumerate(self.coordinates["scope"]) if str(scope).startswith("L") == heads]

    def _draw_effects(self, heads: bool, theme: str) -> Drawing:
        from workbench.analyses import figures

        places = self._scopes(heads)
        if heads:
            places = sorted(places, key=lambda place: VERDICTS.index(str(self["verdict"][place])))
        names = [f"{self.coordinates['scope'][place]}: {self['verdict'][place]}" for place in places]
        mean = self["loss_change_mean"][places]  # [scope, key, edit]
        figure = figures.sink_effects(
            names,
            {
                edit: (mean[:, 0, which], self["loss_change_error"][places][:, 0, which], mean[:, 1, which])
                for which, edit in enumerate(EDITS)
                if np.isfinite(mean[:, 0, which]).any()
            },
            x_label=f"change of the loss from position {self.settings['first_query']} on (nats per token)",
            theme=theme,
        )
        what = "in the heads with most weight on it" if heads else "by layers"
        note = (
            "Bars are standard errors over sequences; hollow marks are the same edits of position "
            f"{self.settings['control_position']}, a control. {self.define('loss_change_mean', 'verdict')}"
        )
        return Drawing(figure, f"What the sink is for, {what}", note)

    def _draw_ranges(self, *, theme: str = "light") -> Drawing:
        return self._draw_effects(False, theme)

    def _draw_heads(self, *, theme: str = "light") -> Drawing:
        return self._draw_effects(True, theme)

    def _draw_moved(self, *, n_positions: int = 24, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.curves(
            dict(zip(CONDITIONS, self["weight_by_position"][:, :n_positions], strict=True)),
            x_label="key position",
            y_label="mean weight of later queries",
            theme=theme,
        )
        title = "Where attention goes when the sink is cut in all layers"
        return Drawing(figure, title, self.define("weight_by_position"))


@torch.no_grad()
def sink_interventions(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    sink_position: int = 0,
    control_position: int | None = None,
    layers: Sequence[tuple[int, int]] | None = None,
    n_heads: int | None = 8,
    epsilon: float = 0.3,
    progress: Progress = silent,
) -> SinkInterventions:
    """Whether what later queries read of a sink matters to what the model predicts there.

    Edited are queries at least 16 tokens after the sink and its control; earlier ones read the sink as before, so it
    stays one. Of the edges to it in all layers, in ranges of them, and in the heads with the largest weight on it:
    they are cut before the softmax (renormalised); the value is dropped, p_ij v_j = 0 at the same other weights; the
    contribution p_ij v_j is replaced by its mean over such queries of the other sequences (Sun et al. 2024, section
    4.2: an implicit bias). Cut for every query, the sink only moves, which ``weight_by_position`` shows.

    The verdict is by bootstrap intervals over sequences. An edit *matters* when its interval lies beyond ± the larger
    of the mean effect of the same edit on the control and 0.01 nats per token, and is *harmless* when it lies within;
    for the constant, a tenth of the effect of dropping the value is within as well. *No-op*: dropping the value is
    harmless. *Implicit bias*: dropping it matters and the constant is harmless. *Carries information*: both matter.
    *No sink*: no head has a mean weight above ``epsilon`` on it. *Undecided*: an interval lies across its bound.
    *Untested*: fewer than 20 sequences.

    Args:
        tokens: text, texts, or token ids [batch, pos] with their ``attention_mask``; 2 or more sequences.
        control_position: None takes, of the 8 keys after the sink, one that receives the median weight.
        layers: ranges (first layer, last layer); None cuts the model into three parts.
        n_heads: how many heads are edited alone, as far as there are so many, those with the largest weight on the
            sink; None takes every head with a mean weight above ``epsilon`` on it.

    Raises:
        ValueError: a model that does not predict the next token, one sequence, sequences that end before a query is
            edited, or an option out of its range.
    """
    check_model(model, predicts=True)
    sequences = Sequences.read(model, tokens, attention_mask)
    first_query = _first_query(model, sequences, sink_position, control_position, epsilon, n_heads)
    described = provenance(model, sequences)
    sequences = sequences.to(model.cfg.device)
    later = _later(sequences, first_query)
    received = _received(model, sequences, later)  # [layer, sequence, head, key]
    by_position = (received.sum(dim=1) / later.sum()).numpy()  # [layer, head, key]
    if control_position is None:
        candidates = by_position.mean(axis=(0, 1))[sink_position + 1 : sink_position + 1 + N_CANDIDATES]
        control_position = sink_position + 1 + int(np.argsort(candidates, kind="stable")[len(candidates) // 2])
    keys = [read_key(model, sequences, received, later, position) for position in (sink_position, control_position)]
    weight = keys[0].weight.numpy()
    scopes = choose_scopes(model, layers, weight, int((weight > epsilon).sum()) if n_heads is None else n_heads)
    plans = [[key_edits(key, scope) for key in keys] for scope in scopes]  # [scope][key] → edit → intervention
    interventions = [edit for of_scope in plans for of_key in of_scope for edit in of_key if edit is not None]
    metric, counted = _loss_metric(sequences, first_query)
    losses = measure(model, sequences, [Intervention(), *interventions], metric, progress=progress)
    means = ((losses * counted).sum(dim=2) / counted.sum(dim=1)).numpy()  # [intervention, sequence]
    change = np.full((len(scopes), len(KEYS), len(EDITS), len(sequences)), np.nan)
    change[np.array([[[e is not None for e in k] for k in s] for s in plans])] = means[1:] - means[0]
    moved = [by_position]
    for which in (0, 3):
        edits = plans[0][0][which]
        assert edits is not None
        moved.append((_received_under(model, sequences, later, edits).sum(dim=1) / later.sum()).numpy())
    weights = [[weight_on(key.weight.numpy(), scope) for key in keys] for scope in scopes]
    largest = [weight_on(weight, scope, np.nanmax) for scope in scopes]
    return SinkInterventions(
        quantities=_quantities(change, np.array(weights), np.array(largest), means[0], np.stack(moved), epsilon),
        provenance=described,
        settings={
            "sink_position": sink_position,
            "control_position": control_position,
            "first_query": first_query,
            "epsilon": epsilon,
            "least_effect": LEAST_EFFECT,
        },
        coverage={"loss_change": int(counted.sum()) / int(sequences.real.sum())},
        coordinates={
            "scope": [scope.name for scope in scopes],
            "key": list(KEYS),
            "edit": list(EDITS),
            "condition": list(CONDITIONS),
        },
    )


def _first_query(
    model: Any, sequences: Sequences, sink: int, control: int | None, epsilon: float, n_heads: int | None
) -> int:
    """The first query that is edited, once the options are known to make sense."""
    check_whole(sink_position=sink, least=0)
    if control is not None and (not is_whole(control) or control < 0 or control == sink):
        raise ValueError(f"control_position must be another position than the sink's, {sink}, got {control!r}")
    check_share(epsilon=epsilon)
    if n_heads is not None:
        check_whole(least=0, n_heads=n_heads)
    if len(sequences) < 2:
        raise ValueError("the mean of what a sink contributes comes from other sequences; pass at least 2")
    first = max(sink, sink + N_CANDIDATES if control is None else control) + MIN_DISTANCE
    shortest = int(sequences.lengths.min())
    if shortest < first + 2:
        raise ValueError(
            f"a sequence has {shortest} tokens, but queries from position {first} on are edited and need a token "
            f"after them; use sequences of at least {first + 2} tokens"
        )
    return first


def _later(sequences: Sequences, first_query: int) -> Tensor:
    """bool [sequence, query], the queries that are edited."""
    later = sequences.real.clone()
    later[:, :first_query] = False
    return later


def _received(model: Any, sequences: Sequences, later: Tensor) -> Tensor:
    """Σ of the later queries' weights on every key, float64 [layer, sequence, head, key]."""
    request = StatisticsRequest(received=True, query_weights=later.to(model.cfg.dtype))
    return attention_statistics(model, sequences, request)["received"].double().cpu()


def _received_under(model: Any, sequences: Sequences, later: Tensor, edits: Intervention) -> Tensor:
    """The same in a run that is edited."""
    sums: list[Tensor] = []

    def read(pattern: Tensor, hook: Any) -> None:  # [sequence, head, query, key]
        sums.append(torch.einsum("bhqk,bq->bhk", pattern.double(), later.double()).cpu())

    hooks = [
        *edits.edits.items(),
        *((f"blocks.{layer}.attn.hook_pattern", read) for layer in range(model.cfg.n_layers)),
    ]
    arguments = {} if bool(sequences.real.all()) else {"attention_mask": sequences.real}
    model.run_with_hooks(sequences.tokens, return_type=None, fwd_hooks=hooks, **arguments)
    return torch.stack(sums)


def _loss_metric(sequences: Sequences, first_query: int) -> tuple[Metric, Tensor]:
    """The loss of every later query's prediction, and which of them exist, bool [sequence, row]."""
    last = (sequences.lengths - 2)[:, None]
    rows = torch.arange(first_query, int(last.max()) + 1, device=last.device).expand(len(sequences), -1)
    return token_losses(sequences.tokens, rows.minimum(last)), (rows <= last).cpu()


def _quantities(
    change: np.ndarray,
    weights: np.ndarray,
    largest: np.ndarray,
    baseline: np.ndarray,
    moved: np.ndarray,
    epsilon: float,
) -> dict[str, Quantity]:
    """change [scope, key, edit, sequence], weights [scope, key], largest [scope], moved [condition, layer, head, j]."""
    mean = change.mean(axis=3)
    error = change.std(axis=3, ddof=1) / np.sqrt(change.shape[3])
    low, high = np.moveaxis(np.apply_along_axis(lambda x: np.array(mean_interval(x)), 3, change), 3, 0)
    verdicts = [
        _verdict(largest[place] > epsilon, low[place, 0], high[place, 0], mean[place], change.shape[3])
        for place in range(len(change))
    ]
    axes, nats, share = ("scope", "key", "edit"), "nats per token", "share of 1"
    what = "change of the mean loss of later queries' predictions under an edit of what they read of a key"
    interval = "of its 95 % bootstrap interval over sequences, of 20 or more"
    return {
        "loss_change_mean": Quantity(mean, axes, nats, f"{what}, mean over sequences"),
        "loss_change_error": Quantity(error, axes, nats, "standard error of that mean over sequences"),
        "loss_change_low": Quantity(low, axes, nats, f"lower end {interval}"),
        "loss_change_high": Quantity(high, axes, nats, f"upper end {interval}"),
        "loss_change": Quantity(change, (*axes, "sequence"), nats, f"{what}, of each sequence"),
        "baseline_loss": Quantity(baseline, ("sequence",), nats, "mean loss of later queries' predictions, unedited"),
        "mean_weight": Quantity(
            weights, ("scope", "key"), share, "weight on the key, mean over later queries that see it and over heads"
        ),
        "largest_weight": Quantity(
            largest, ("scope",), share, "the largest mean weight on the sink of later queries in one head of the scope"
        ),
        "verdict": Quantity(
            np.array(verdicts), ("scope",), "",
            "no-op: without the sink's value the loss stays within ± the larger of the control's change and "
            f"{LEAST_EFFECT} nats; implicit bias: it does, but for a tenth, with a constant in its place; carries "
            "information: it does with neither",
        ),
        "weight_by_position": Quantity(
            moved.mean(axis=(1, 2)), ("condition", "position"), share,
            "weight of later queries on a key, mean over queries, sequences and heads",
        ),
        "share_of_heads_by_position": Quantity(
            (moved > epsilon).mean(axis=(1, 2)), ("condition", "position"), share,
            f"share of heads whose later queries give a key a mean weight above {epsilon}",
        ),
    }  # fmt: skip


def _verdict(has_sink: bool, low: np.ndarray, high: np.ndarray, mean: np.ndarray, n_sequences: int) -> str:
    """low and high [edit], the intervals of the effects on the sink; mean [key, edit]."""
    if not has_sink:
        return "no sink"
    if n_sequences < MIN_FOR_INTERVAL:
        return "untested"
    _, dropped, constant, _ = range(len(EDITS))
    bound = np.maximum(np.abs(mean[1]), LEAST_EFFECT)
    bound[constant] = max(bound[constant], LEFT_OVER * abs(mean[0, dropped]))
    harmless = (low >= -bound) & (high <= bound)
    matters = (low > bound) | (high < -bound)
    if harmless[dropped]:
        return "no-op"
    if matters[dropped] and harmless[constant]:
        return "implicit bias"
    return "carries information" if matters[dropped] and matters[constant] else "undecided"
