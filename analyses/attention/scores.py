"""Per-head scores: means of attention statistics over the query rows that they are defined for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.running import Progress, Sequences, attention_statistics
from workbench.analyses.support import Visibility, depends_on_length, visibility
from workbench.kernels import MatchLabels, StatisticsRequest, match_labels

MIN_FOR_INTERVAL = 20  # sequences
N_RESAMPLES = 1000
# What lies on a threshold on paper, as α = 0.05 of a key that one of 20 queries looks at, must not fall on a side of it
# by rounding: float32 holds 0.05 with an error of 1.5e-8 of it, and means of float32 weights err by some 1e-6.
ROUNDING = 1e-5


@dataclass(frozen=True)
class ScoreDefinition:
    """What a per-head score is. ``upper`` is its largest possible value, None where there is none."""

    unit: str
    definition: str
    upper: float | None = 1.0


# "{k}" is the number of sink keys.
SCORES: dict[str, ScoreDefinition] = {
    "entropy": ScoreDefinition(
        "nats", "entropy of the weights, that on a learned sink included, mean over all real queries", None
    ),
    "relative_entropy": ScoreDefinition(
        "share of 1",
        "entropy over its maximum log(visible keys), a learned sink counted as one, mean over real queries that see "
        "two or more",
    ),
    "max_weight": ScoreDefinition("share of 1", "largest weight on a token, mean over all real queries"),
    "mean_distance": ScoreDefinition(
        "tokens", "sum over keys of weight × distance |query − key|, mean over all real queries", None
    ),
    "sink_mass": ScoreDefinition(
        "share of 1", "weight on the first {k} real tokens of the sequence, mean over real queries that see one of them"
    ),
    "virtual_sink_mass": ScoreDefinition(
        "share of 1", "weight on the learned sink, which is no token, mean over all real queries"
    ),
    "self_weight": ScoreDefinition("share of 1", "weight on the query's own position, mean over all real queries"),
    "previous_token": ScoreDefinition(
        "share of 1", "weight on the token before the query, mean over real queries that have one"
    ),
    "prefix_matching": ScoreDefinition(
        "share of 1",
        "weight on all tokens that follow an earlier occurrence of the query's, mean over real queries that have one; "
        "0 where a window hides it",
    ),
    "prefix_matching_latest": ScoreDefinition(
        "share of 1",
        "weight on the token that follows the latest earlier occurrence, mean over real queries that have one; 0 where "
        "a window hides it",
    ),
    "prefix_matching_per_entry": ScoreDefinition(
        "share of 1",
        "mean weight per pair of query and token that follows an earlier occurrence (as Olsson et al. 2022 divide); 0 "
        "where a window hides it",
    ),
    "duplicate_token": ScoreDefinition(
        "share of 1",
        "weight on earlier occurrences of the query's token, mean over real queries that have one; 0 where a window "
        "hides it",
    ),
    "key_concentration": ScoreDefinition(
        "share of 1",
        "Σ_j s_j² of the shares s_j of all attention that key j receives (1 over the effective number of keys), "
        "mean over sequences",
    ),
}


def exceeds(values: np.ndarray, threshold: float) -> np.ndarray:
    """Where float32 values are above a threshold, by more than they may be off."""
    return values > threshold * (1 + ROUNDING)


def reaches(values: np.ndarray, threshold: float) -> np.ndarray:
    """Where float32 values are at a threshold, as far as they are known, or above it."""
    return values >= threshold * (1 - ROUNDING)


def known_median(values: np.ndarray) -> float:
    """The median of the values that there are; NaN where there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


@dataclass(frozen=True, eq=False)
class HeadScore:
    """Sums over the rows that count, by sequence, so that sequences can be resampled.

    Args:
        sums: float64 [sequence, layer, head].
        counts: float64 [sequence, layer], the rows (or pairs) summed over.
        rows: how many queries count, over all layers.
        n_rows: how many real queries there are in all layers.
    """

    sums: np.ndarray
    counts: np.ndarray
    rows: int
    n_rows: int

    @classmethod
    def joined(cls, parts: Sequence[HeadScore]) -> HeadScore:
        """The score of all sequences, from those of some each."""
        return cls(
            np.concatenate([part.sums for part in parts]),
            np.concatenate([part.counts for part in parts]),
            sum(part.rows for part in parts),
            sum(part.n_rows for part in parts),
        )

    @property
    def mean(self) -> np.ndarray:
        """[layer, head]; NaN where no row counts."""
        counts = self.counts.sum(axis=0)[:, None]
        return self.sums.sum(axis=0) / np.where(counts > 0, counts, np.nan)

    @property
    def coverage(self) -> float:
        return self.rows / self.n_rows

    def interval(self, confidence: float, seed: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Percentile bootstrap over the sequences with rows that count (Efron & Tibshirani 1993, chapter 13).

        Returns low and high, each [layer, head], or None for fewer than 20 such sequences. A layer in which no row
        counts has NaN.
        """
        used, layers = (self.counts > 0).any(axis=1), (self.counts > 0).any(axis=0)
        if used.sum() < MIN_FOR_INTERVAL:
            return None
        sums, counts = self.sums[used][:, layers], self.counts[used][:, layers, None]
        from scipy import stats  # takes half a second to import, which one text has no use for

        found = stats.bootstrap(
            (sums, counts * np.ones_like(sums)),
            lambda sums, counts, axis: sums.sum(axis=axis) / counts.sum(axis=axis),
            paired=True,
            vectorized=True,
            axis=0,
            n_resamples=N_RESAMPLES,
            batch=50,
            confidence_level=confidence,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
        ends = np.full((2, *self.sums.shape[1:]), np.nan)
        ends[:, layers] = found.confidence_interval
        return ends[0], ends[1]


@dataclass(frozen=True, eq=False)
class MeasuredHeads:
    """Scores by name, and the attention that every key position receives.

    ``received`` is float64 [layer, head, key]: mean over the sequences that reach that far of ``received_mean``.
    ``n_other_queries`` [layer, key] is how many other queries see the key, in the sequence where most do.
    """

    scores: Mapping[str, HeadScore]
    received: np.ndarray
    n_other_queries: np.ndarray


def measure_heads(model: Any, sequences: Sequences, sink_keys: int, progress: Progress) -> MeasuredHeads:
    """Every score of SCORES that the model has for every head, with one run of it over the sequences."""
    parts: dict[str, list[HeadScore]] = {}
    received: np.ndarray | float = 0.0
    n_other: np.ndarray | int = 0
    n_done, n_positions = 0, sequences.tokens.shape[1]
    for batch in sequences.batches(one_length=depends_on_length(model)):
        batch = batch.to(model.cfg.device)
        earlier = earlier_occurrences(batch)
        request = StatisticsRequest(
            entropy=True, max_weight=True, mean_distance=True, sink_keys=sink_keys, offsets=(0, 1),
            match=_match_labels(batch, earlier), received=True,
        )  # fmt: skip
        statistics = attention_statistics(model, batch, request)
        seen = visibility(model, batch)
        for name, score in _batch_scores(statistics, batch, earlier, seen, sink_keys).items():
            parts.setdefault(name, []).append(score)
        missing = (0, n_positions - batch.tokens.shape[1])
        batch_received = statistics["received_mean"].double().nan_to_num(0.0).sum(dim=1).cpu().numpy()
        received = received + np.pad(batch_received, ((0, 0), (0, 0), missing))
        batch_others = seen.n_other_queries.amax(dim=1).cpu().numpy()  # [layer, key]
        n_other = np.maximum(n_other, np.pad(batch_others, ((0, 0), missing)))
        n_done += len(batch)
        progress(n_done / len(sequences), f"attention statistics of {n_done} of {len(sequences)} sequences")
    scores = {name: HeadScore.joined(batches) for name, batches in parts.items()}
    return MeasuredHeads(scores, received / sequences.real.sum(dim=0).numpy(), np.asarray(n_other))


@dataclass(frozen=True, eq=False)
class EarlierOccurrences:
    """Of each token's earlier occurrences in its sequence, int64 [batch, pos] each; 0 and −1 for pads.

    Args:
        n_occurrences: how many there are.
        n_targets: how many of them are followed by a token before this one, the targets of an induction head.
        latest_target: position of the latest of those followers, −1 where there is none.
    """

    n_occurrences: Tensor
    n_targets: Tensor
    latest_target: Tensor


def earlier_occurrences(batch: Sequences) -> EarlierOccurrences:
    """Found in O(n), so that long texts need no n × n matrix."""
    shape = batch.tokens.shape
    counts, targets, latest = torch.zeros(shape), torch.zeros(shape), torch.full(shape, -1)
    counts, targets = counts.long(), targets.long()
    for row, (tokens, length) in enumerate(zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)):
        seen: dict[int, list[int]] = {}
        for position, token in enumerate(tokens[:length]):
            places = seen.setdefault(token, [])
            counts[row, position] = len(places)
            # The token right before cannot be a source: what follows it is the query itself.
            sources = places[:-1] if places and places[-1] == position - 1 else places
            targets[row, position] = len(sources)
            if sources:
                latest[row, position] = sources[-1] + 1
            places.append(position)
    return EarlierOccurrences(*(found.to(batch.tokens.device) for found in (counts, targets, latest)))


def _match_labels(batch: Sequences, earlier: EarlierOccurrences) -> dict[str, MatchLabels]:
    labels = {name: match_labels(batch.tokens, name, key_padding=batch.real) for name in ("induction", "duplicate")}
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    labels["latest"] = MatchLabels(query=earlier.latest_target, key=positions.repeat(len(batch), 1))
    return labels


def _batch_scores(
    statistics: Mapping[str, Any], batch: Sequences, earlier: EarlierOccurrences, seen: Visibility, sink_keys: int
) -> dict[str, HeadScore]:
    real, n_layers = batch.real, len(seen.n_keys)
    n_rows = int(real.sum()) * n_layers

    def over(rows: Tensor, values: Tensor, weights: Tensor | None = None) -> HeadScore:
        """values [layer, batch, head, row] summed over rows bool [batch, row] (of every layer) or [layer, batch, row],
        divided by the weights of these rows."""
        rows = rows.expand(n_layers, *real.shape)
        sums = torch.where(rows[:, :, None], values, 0.0).double().sum(dim=3).transpose(0, 1)  # [batch, layer, head]
        counts = (rows.long() if weights is None else rows * weights).sum(dim=2).T.double()  # [batch, layer]
        return HeadScore(sums.cpu().numpy(), counts.cpu().numpy(), int(rows.sum()), n_rows)

    entropy, match, offset = statistics["entropy"], statistics["match_mass"], statistics["offset_mass"]
    n_columns = seen.n_keys + ("virtual_mass" in statistics)  # of the softmax, [layer, batch, row]
    has_key_before = real & (torch.arange(real.shape[1], device=real.device) > 0)
    has_target = earlier.n_targets > 0
    received = statistics["received"].double()
    shares = received / received.sum(dim=3, keepdim=True)  # [layer, batch, head, key]
    concentration = shares.square().sum(dim=3).transpose(0, 1).cpu().numpy()
    found = {
        "entropy": over(real, entropy),
        "relative_entropy": over(real & (n_columns > 1), entropy / n_columns.clamp(min=2).log()[:, :, None]),
        "max_weight": over(real, statistics["max_weight"]),
        "mean_distance": over(real, statistics["mean_distance"]),
        "sink_mass": over(real & (seen.first_key < sink_keys), statistics["sink_mass"]),
        "self_weight": over(real, offset[..., 0]),
        "previous_token": over(has_key_before, offset[..., 1]),
        "prefix_matching": over(has_target, match["induction"]),
        "prefix_matching_latest": over(has_target, match["latest"]),
        "prefix_matching_per_entry": over(has_target, match["induction"], earlier.n_targets),
        "duplicate_token": over(earlier.n_occurrences > 0, match["duplicate"]),
        "key_concentration": HeadScore(concentration, np.ones((len(batch), n_layers)), n_rows, n_rows),
    }
    if "virtual_mass" in statistics:
        found["virtual_sink_mass"] = over(real, statistics["virtual_mass"])
    return found
