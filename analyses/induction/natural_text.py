"""Prefix matching on text that nobody repeated, against the same sets of keys a few tokens beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import SCORES, HeadScore, earlier_occurrences
from workbench.analyses.induction.ablation import highest
from workbench.analyses.options import check_seed, check_whole, is_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, attention_statistics, provenance, silent
from workbench.analyses.support import check_model, depends_on_length
from workbench.kernels import MatchLabels, StatisticsRequest, match_labels

LEAST_SHIFT = 2  # one token back stands the earlier occurrence itself, which duplicate-token heads look at


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class PrefixMatchingInText(Result):
    """``prefix_matching``, ``shifted`` and ``excess`` [layer, head], and ``shift_excess`` [shift, layer, head].

    ``excess_low`` and ``excess_high`` are there from 20 sequences with rows that count on.
    """

    kind: ClassVar[str] = "prefix_matching_in_text"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "heads")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")

    def top(self, n: int = 5) -> list[tuple[int, int]]:
        """(layer, head) of the ``n`` heads with the largest excess, in order."""
        return highest(self["excess"], n)

    def summary(self) -> str:
        heads = [
            f"L{layer}H{head} {self['excess'][layer, head]:+.3f}{self._interval(layer, head)} "
            f"({self['prefix_matching'][layer, head]:.3f} against {self['shifted'][layer, head]:.3f})"
            for layer, head in self.top()
        ]
        lines = [
            self.provenance.sentence(),
            f"Prefix matching above shifted keys: {'; '.join(heads)}.",
            f"{self.coverage['excess']:.0%} of the queries count. Keys were shifted by {self.settings['n_shifts']} "
            f"random distances of {LEAST_SHIFT} to {self.settings['max_shift']} tokens, each both ways.",
        ]
        if "excess_low" not in self:
            lines.append("Fewer than 20 sequences: no intervals.")
        return "\n".join(lines)

    def _interval(self, layer: int, head: int) -> str:
        if "excess_low" not in self:
            return ""
        return f" [{self['excess_low'][layer, head]:+.3f}, {self['excess_high'][layer, head]:+.3f}]"

    def _draw_map(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        return Drawing(
            figures.head_map(self["excess"], label="excess (share of attention)", signed=True, theme=theme),
            "Prefix matching in text above shifted keys, every head",
            self.define("excess"),
        )

    def _draw_heads(self, *, n: int = 8, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        heads = self.top(n)
        at = tuple(np.array(heads).T)
        spread = self["shift_excess"][:, *at]
        low, high = (self[f"excess_{end}"][at] if "excess_low" in self else None for end in ("low", "high"))
        none = np.full(len(heads), np.nan)
        series = {
            "excess": (self["excess"][at], none if low is None else low, none if high is None else high),
            "by draw of the shifts": (spread.mean(axis=0), spread.min(axis=0), spread.max(axis=0)),
        }
        figure = figures.dots(
            series, [f"L{layer}H{head}" for layer, head in heads], x_label="excess (share of attention)", theme=theme
        )
        note = (
            f"{self.define('excess')} Bars: 95 % bootstrap interval over sequences; smallest and largest of the draws."
        )
        return Drawing(figure, "Prefix matching in text above shifted keys", note)


def prefix_matching_in_text(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    n_shifts: int = 4,
    max_shift: int = 16,
    seed: int = 0,
    progress: Progress = silent,
) -> PrefixMatchingInText:
    """Attention to what followed earlier occurrences of the present token, beyond what keys near by get.

    In natural text tokens recur at all distances, so a head that looks near, or everywhere, has some prefix matching
    without matching anything. The null has the same keys, all shifted by as many tokens: as many keys at nearly the
    same distances. Each of ``n_shifts`` random distances, drawn for each sequence anew, is taken both ways. A query
    counts where, for some distance, both shifted sets lie between key 1 and the query. Memory is O(n).

    Args:
        tokens: text or token ids; 20 sequences or more give intervals (chunked_text cuts a text).
        n_shifts: different distances, from 2 to ``max_shift`` tokens.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a text in which no query counts, or an option out of its range.
    """
    check_model(model)
    check_whole(max_shift=max_shift, least=LEAST_SHIFT)
    check_seed(seed)
    if not is_whole(n_shifts) or not 1 <= n_shifts <= max_shift - LEAST_SHIFT + 1:
        raise ValueError(f"n_shifts must be between 1 and {max_shift - LEAST_SHIFT + 1}, got {n_shifts!r}")
    sequences = Sequences.read(model, tokens, attention_mask)
    generator = torch.Generator().manual_seed(seed)
    names = ("prefix_matching", "shifted", "excess", *(f"shift {place}" for place in range(n_shifts)))
    parts: dict[str, list[HeadScore]] = {name: [] for name in names}
    n_done = 0
    for batch in sequences.batches(one_length=depends_on_length(model)):
        shifts = torch.stack([torch.randperm(max_shift - LEAST_SHIFT + 1, generator=generator) for _ in batch.tokens])
        shifts = shifts[:, :n_shifts] + LEAST_SHIFT  # [batch, shift]
        device = model.cfg.device
        for name, score in zip(names, _batch_scores(model, batch.to(device), shifts.to(device)), strict=True):
            parts[name].append(score)
        n_done += len(batch)
        progress(n_done / len(sequences), f"attention in {n_done} of {len(sequences)} sequences")
    scores = {name: HeadScore.joined(found) for name, found in parts.items()}
    if not scores["excess"].rows:
        raise ValueError(
            "no query of these texts counts: tokens do not recur, or only too near to the query or the beginning for a "
            "shift; pass longer texts"
        )
    return PrefixMatchingInText(
        quantities=_quantities(scores, n_shifts, seed),
        provenance=provenance(model, sequences),
        settings={"n_shifts": n_shifts, "max_shift": max_shift, "seed": seed},
        coverage={name: scores["excess"].coverage for name in ("prefix_matching", "shifted", "excess")},
    )


def _batch_scores(model: Any, batch: Sequences, shifts: Tensor) -> list[HeadScore]:
    """Prefix matching, its null and the difference, then the difference by shift; shifts are [batch, shift]."""
    labels = match_labels(batch.tokens, "induction", key_padding=batch.real)
    matches = {"targets": labels}
    for place, shift in enumerate(shifts.T):
        matches |= {f"{place}{way:+d}": MatchLabels(labels.query, _moved(labels.key, way * shift)) for way in (1, -1)}
    offsets = tuple(range(1, int(shifts.max()) + 1))
    statistics = attention_statistics(model, batch, StatisticsRequest(match=matches, offsets=offsets))
    mass = statistics["match_mass"]
    targets = mass["targets"].double()  # [layer, batch, head, query]
    first, last = _target_range(batch)
    row = torch.arange(batch.tokens.shape[1], device=first.device)
    counted = torch.zeros_like(batch.real)
    null, n_valid, by_shift = torch.zeros_like(targets), torch.zeros_like(first), []
    for place, shift in enumerate(shifts.T):
        valid = (first - shift[:, None] >= 1) & (last + shift[:, None] < row)  # [batch, query]
        back = mass[f"{place}-1"].double() - _ahead(statistics["offset_mass"], labels, shift)
        both = (mass[f"{place}+1"].double() + back) / 2
        null += torch.where(valid[:, None], both, 0.0)
        n_valid += valid
        counted |= valid
        by_shift.append(_score(targets - both, valid, batch))
    null /= n_valid.clamp(min=1)[:, None]
    return [_score(values, counted, batch) for values in (targets, null, targets - null)] + by_shift


def _moved(key: Tensor, shift: Tensor) -> Tensor:
    """Labels of keys [batch, key], each row ``shift`` [batch] columns further on; −1 where none comes from."""
    source = torch.arange(key.shape[1], device=key.device) - shift[:, None]
    inside = (source >= 0) & (source < key.shape[1])
    return torch.where(inside, key.gather(1, source.clamp(0, key.shape[1] - 1)), -1)


def _target_range(batch: Sequences) -> tuple[Tensor, Tensor]:
    """The first and the last target of each query, int64 [batch, query]; last is the number of columns without any."""
    n = batch.tokens.shape[1]
    place = torch.arange(n, device=batch.tokens.device).expand_as(batch.tokens).masked_fill(~batch.real, n)
    earliest = torch.full((len(batch), int(batch.tokens.max()) + 1), n, device=place.device)
    earliest = earliest.scatter_reduce(1, batch.tokens, place, "amin")
    last = earlier_occurrences(batch).latest_target
    return earliest.gather(1, batch.tokens) + 1, torch.where(last < 0, n, last)


def _ahead(offset_mass: Tensor, labels: MatchLabels, shift: Tensor) -> Tensor:
    """What a shift back brings in that was no target: keys that stood at the query or behind it.

    Equal labels mark such keys, too, and behind the query its own token always has one. offset_mass [layer, batch,
    head, query, offset − 1].
    """
    n = labels.key.shape[1]
    row = torch.arange(n, device=shift.device)
    found = torch.zeros(offset_mass.shape[:4], dtype=torch.float64, device=shift.device)
    for offset in range(1, offset_mass.shape[4] + 1):
        column = row - offset + shift[:, None]  # [batch, query], where the key stood before the shift
        ahead = (column >= row) & (column < n)
        marked = ahead & (labels.key.gather(1, column.clamp(0, n - 1)) == labels.query) & (labels.query >= 0)
        found += torch.where(marked[:, None], offset_mass[..., offset - 1].double(), 0.0)
    return found


def _score(values: Tensor, rows: Tensor, batch: Sequences) -> HeadScore:
    """values [layer, batch, head, query] summed over rows bool [batch, query] of every layer."""
    n_layers = len(values)
    sums = torch.where(rows[:, None], values, 0.0).sum(dim=3).transpose(0, 1)  # [batch, layer, head]
    counts = rows.sum(dim=1).double()[:, None].expand(-1, n_layers)
    return HeadScore(
        sums.cpu().numpy(), counts.cpu().numpy(), int(rows.sum()) * n_layers, int(batch.real.sum()) * n_layers
    )


_OF_ONE_DRAW = "excess over the keys of one draw of shifts, another distance in each sequence, both ways"


def _quantities(scores: Mapping[str, HeadScore], n_shifts: int, seed: int) -> dict[str, Quantity]:
    axes, unit = ("layer", "head"), "share of 1"
    over = "mean over queries whose keys can be shifted"
    definitions = {
        "prefix_matching": f"{SCORES['prefix_matching'].definition.partition(',')[0]}, {over}",
        "shifted": f"weight on as many keys a few tokens before and after these, {over}",
        "excess": "prefix matching less shifted: weight on what follows an earlier occurrence of the query's token, "
        "beyond that on keys a few tokens beside it",
    }
    found = {name: Quantity(scores[name].mean, axes, unit, what) for name, what in definitions.items()}
    by_shift = np.stack([scores[f"shift {place}"].mean for place in range(n_shifts)])
    found["shift_excess"] = Quantity(by_shift, ("shift", *axes), unit, _OF_ONE_DRAW)
    if (ends := scores["excess"].interval(0.95, seed)) is not None:
        for name, which, values in zip(("low", "high"), ("lower", "upper"), ends, strict=True):
            what = f"{which} end of the 95 % bootstrap interval over sequences of excess"
            found[f"excess_{name}"] = Quantity(values, axes, unit, what)
    return found
