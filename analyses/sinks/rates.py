"""Attention sinks: keys that most heads give much of their weight to whatever the text says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import MIN_FOR_INTERVAL, N_RESAMPLES, SCORES, exceeds, known_median
from workbench.analyses.labels import SINK_SCORES, number_or_dash
from workbench.analyses.options import check_share, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, attention_statistics, cached, provenance, silent
from workbench.analyses.sinks.kinds import TOKEN_KINDS, token_kinds
from workbench.analyses.support import check_model, depends_on_length, visibility
from workbench.kernels import StatisticsRequest
from workbench.kernels.masks import is_whole

MIN_OTHER_QUERIES = 16


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AttentionSinks(Result):
    """α [layer, head, key] and sink rates by position; sink mass and norms [layer, head].

    ``coverage["sink_rate"]`` is the share of the real keys, over all layers, that enough queries see to count.
    "The sink" is the position ``settings["sink_position"]``: the one with the highest sink rate unless it was given.
    """

    kind: ClassVar[str] = "attention_sinks"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "positions", "keys", "kinds", "norms")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"positions": ("key",), "kinds": ("kind",)}

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """Kinds of tokens are those of a tokenizer."""
        return tuple(kind for kind in self.all_figure_kinds if kind != "kinds" or "sink_rate_by_kind" in self)

    @property
    def sink_position(self) -> int:
        return int(self.settings["sink_position"])

    def summary(self) -> str:
        rate, position, weight = self["sink_rate"], self.sink_position, self["sink_weight"]
        others = np.delete(rate, position)
        layer, head = (int(i) for i in np.unravel_index(np.nanargmax(weight), weight.shape))
        masses = f"Mean mass on the first {self.settings['sink_keys']} tokens: {np.nanmean(self['sink_mass']):.3f}"
        if "virtual_sink_mass" in self:
            masses += f", on the learned sink: {self['virtual_sink_mass'].mean():.3f}"
        lines = [
            self.provenance.sentence(),
            f"Sink rate (ε = {self.settings['epsilon']}, first {self.settings['n_tokens']} tokens): "
            f"{rate[position]:.1%}{self._interval_in_words(position)} at position {position}"
            + (f", at most {np.nanmax(others):.1%} at any other position." if np.isfinite(others).any() else "."),
            self.evaluated_in_words(),
            f"Mean weight on position {position}: {np.nanmean(weight):.3f} over all heads, "
            f"{weight[layer, head]:.3f} in L{layer}H{head}. {masses}.",
            f"Norms at position {position} over those of the median key, median over heads: "
            f"‖v‖ {number_or_dash(known_median(self['value_norm_ratio']), '.2f')}, "
            f"‖v W_O‖ {number_or_dash(known_median(self['output_norm_ratio']), '.2f')}.",
        ]
        if "sink_rate_by_kind" in self:
            kinds = zip(self.coordinates["kind"], self["sink_rate_by_kind"], self["n_keys_by_kind"], strict=True)
            lines.append("Sink rate by kind of token: " + ", ".join(f"{k} {r:.1%} (n = {n})" for k, r, n in kinds if n))
        return "\n".join(lines)

    def _interval_in_words(self, position: int) -> str:
        if "sink_rate_low" not in self:
            return ""
        return f" [{self['sink_rate_low'][position]:.1%}, {self['sink_rate_high'][position]:.1%}]"

    def _draw_map(
        self, *, score: str = "sink_weight", chosen: tuple[int, int] | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        bounded = ("sink_weight", "sink_mass", "head_sink_rate", "virtual_sink_mass")
        if score not in self.names("layer", "head"):
            raise ValueError(f"score must be one of {', '.join(self.names('layer', 'head'))}, got {score!r}")
        label, upper = figures.axis_label(score), 1.0 if score in bounded else None
        return Drawing(
            figures.head_map(self[score], label=label, upper=upper, chosen=chosen, theme=theme),
            f"{SINK_SCORES.get(score, label.capitalize())}, every head",
            self.define(score) + figures.framed(chosen),
        )

    def _draw_positions(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.position_bars(
            self["sink_rate"],
            x_label="key position",
            y_label=f"sink rate (ε = {self.settings['epsilon']})",
            missing=f"not evaluated: seen by fewer than {self.settings['min_other_queries']} other queries",
            theme=theme,
        )
        note = f"{self.define('sink_rate')} {self.evaluated_in_words()}"
        return Drawing(figure, "Sink rate of every key position", note)

    def _draw_keys(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        missing = f"not evaluated: seen by fewer than {self.settings['min_other_queries']} other queries"
        figure = figures.position_map(self["alpha"], label="mean weight on the key, α", missing=missing, theme=theme)
        return Drawing(figure, "Mean weight on every key position, every head", self.define("alpha"))

    def _draw_kinds(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        counted = self["n_keys_by_kind"] > 0
        rate, nothing = self["sink_rate_by_kind"][counted], np.full(counted.sum(), np.nan)
        kinds = zip(self.coordinates["kind"], self["n_keys_by_kind"], strict=True)
        names = [f"{kind} (n = {n:,})" for kind, n in kinds if n]
        x_label = f"sink rate (ε = {self.settings['epsilon']})"
        figure = figures.dots({"sink rate": (rate, nothing, nothing)}, names, x_label=x_label, theme=theme)
        return Drawing(figure, "Sink rate by kind of token", self.define("sink_rate_by_kind", "n_keys_by_kind"))

    def _draw_norms(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_scatter(
            self["output_norm_ratio"],
            self["sink_weight"],
            x_label=f"‖v W<sub>O</sub>‖ at position {self.sink_position} / median key",
            y_label=f"mean weight on position {self.sink_position}",
            ratio=True,
            theme=theme,
        )
        title = "Weight on the sink against the norm of what it adds, every head"
        return Drawing(figure, title, self.define("sink_weight", "output_norm_ratio"))

    def evaluated_in_words(self) -> str:
        """The key positions that have a sink rate, in words."""
        n, evaluated = len(self["sink_rate"]), np.isfinite(self["sink_rate"]).nonzero()[0]
        without = [str(layer) for layer in np.isnan(self["alpha"]).all(axis=(1, 2)).nonzero()[0]]
        return (
            f"Evaluated: key positions {evaluated[0]} to {evaluated[-1]} of 0 to {n - 1}, those that "
            f"{self.settings['min_other_queries']} or more other queries see"
            + (f"; none in layer{'s' * (len(without) > 1)} {', '.join(without)}." if without else ".")
        )


def attention_sinks(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    epsilon: float = 0.3,
    n_tokens: int = 64,
    sink_position: int | None = None,
    sink_keys: int = 4,
    progress: Progress = silent,
) -> AttentionSinks:
    """Which keys are sinks (Gu et al. 2024, section 3), how much weight they take, and how little they carry.

    Per sequence, head and key j, α_j is the mean of p_ij over the real queries that may see key j among the first
    ``n_tokens`` tokens: i ≥ j in causal models, i < j + W in layers with a window W, all in encoders. Key j is a sink
    of the head where α_j > ``epsilon``; its sink rate is the share of sequences, layers and heads in which it is one.
    In each layer only keys that at least 16 other queries may see count. With 20 sequences or more, rates and weights
    have percentile bootstrap intervals over them. An α that differs from ``epsilon`` by no more
    than float32 rounding counts as equal to it.

    Args:
        model: a HookedTransformer, or a TransformerBridge (O(n²) memory, sequences of one length).
        tokens: text, texts, token ids [batch, pos] with their ``attention_mask`` (1 or true = real), or tokens that say
            what they are, such as repeated_random_tokens'. Only the first ``n_tokens`` real tokens of each sequence
            are used; chunked_text cuts a long text into sequences.
        sink_position: the position whose weight and norms are reported; None takes the one with the highest sink rate.
        sink_keys: so many first real tokens of a sequence make up ``sink_mass``.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that it is not for (docs/definitions.md), sequences or windows too short for a key
            that 16 other queries see, or an option out of its range.
    """
    check_model(model)
    check_share(epsilon=epsilon)
    check_whole(sink_keys=sink_keys)
    if not is_whole(n_tokens) or n_tokens <= MIN_OTHER_QUERIES:
        raise ValueError(
            f"n_tokens must be more than the {MIN_OTHER_QUERIES} other queries that a key needs, got {n_tokens!r}"
        )
    sequences = Sequences.read(model, tokens, attention_mask).first(n_tokens)
    shortest = int(sequences.lengths.min())
    if shortest <= MIN_OTHER_QUERIES:
        raise ValueError(
            f"a sequence has {shortest} tokens, so none of its keys is seen by {MIN_OTHER_QUERIES} other queries; "
            "leave it out or use longer text"
        )
    measured = _measure(model, sequences, sink_keys, progress)
    counts = measured.n_other_queries >= MIN_OTHER_QUERIES  # [sequence, layer, key]
    if not counts.any():
        raise ValueError(
            f"this model's windows of {model.cfg.window_size} tokens show no key to {MIN_OTHER_QUERIES} other queries, "
            "so it has no sink rate; head_statistics has its sink_mass"
        )
    alpha = np.where(counts[:, :, None], measured.received, np.nan)  # [sequence, layer, head, key]
    above = np.where(np.isnan(alpha), np.nan, exceeds(alpha, epsilon))
    rate = _mean(above, (0, 1, 2))  # [key]
    position = int(np.nanargmax(rate)) if sink_position is None else sink_position
    if not is_whole(position) or not 0 <= position < len(rate) or np.isnan(rate[position]):
        evaluated = np.isfinite(rate).nonzero()[0]
        raise ValueError(
            f"sink_position must be a key that {MIN_OTHER_QUERIES} other queries see, {evaluated[0]} to "
            f"{evaluated[-1]} here, got {sink_position!r}"
        )
    quantities = _key_quantities(alpha, above, rate, position, epsilon)
    if len(sequences) >= MIN_FOR_INTERVAL:
        quantities |= _intervals(alpha[..., position], _mean(above, (1, 2)))
    quantities |= _head_quantities(measured, position, sink_keys)
    kinds = token_kinds(model, sequences)
    coordinates = {}
    if kinds is not None:
        quantities |= _kind_quantities(above, kinds)
        coordinates = {"kind": TOKEN_KINDS}
    return AttentionSinks(
        quantities=quantities,
        provenance=provenance(model, sequences),
        settings={
            "epsilon": epsilon,
            "n_tokens": min(n_tokens, sequences.tokens.shape[1]),
            "min_other_queries": MIN_OTHER_QUERIES,
            "sink_position": position,
            "sink_keys": sink_keys,
        },
        coverage={"sink_rate": int(counts.sum()) / (int(sequences.real.sum()) * counts.shape[1])},
        coordinates=coordinates,
    )


@dataclass(frozen=True, eq=False)
class _Measured:
    """Per sequence, layer and position; pads are NaN.

    Args:
        received, sink_mass, value_norm, output_norm: [sequence, layer, head, pos].
        virtual_mass: as they, of models with learned sinks.
        n_other_queries: [sequence, layer, key], how many queries besides its own may see a key.
        first_key: [sequence, layer, query], the first that a query sees.
    """

    received: np.ndarray
    sink_mass: np.ndarray
    value_norm: np.ndarray
    output_norm: np.ndarray
    n_other_queries: np.ndarray
    first_key: np.ndarray
    virtual_mass: np.ndarray | None = None


def _measure(model: Any, sequences: Sequences, sink_keys: int, progress: Progress) -> _Measured:
    request = StatisticsRequest(sink_keys=sink_keys, received=True)
    parts: dict[str, list[np.ndarray]] = {}
    n_done, n_positions = 0, sequences.tokens.shape[1]
    for batch in sequences.batches(one_length=depends_on_length(model)):
        batch = batch.to(model.cfg.device)
        statistics, seen = attention_statistics(model, batch, request), visibility(model, batch)
        value_norm, output_norm = _norms(model, batch)
        found = {
            "received": statistics["received_mean"], "sink_mass": statistics["sink_mass"],
            "value_norm": value_norm, "output_norm": output_norm,
            "n_other_queries": seen.n_other_queries, "first_key": seen.first_key,
        }  # fmt: skip
        if "virtual_mass" in statistics:
            found["virtual_mass"] = statistics["virtual_mass"]
        for name, values in found.items():
            parts.setdefault(name, []).append(_padded(values.transpose(0, 1), batch.real, n_positions))
        n_done += len(batch)
        progress(n_done / len(sequences), f"attention and values of {n_done} of {len(sequences)} sequences")
    return _Measured(**{name: np.concatenate(values) for name, values in parts.items()})


@torch.no_grad()
def _norms(model: Any, batch: Sequences) -> tuple[Tensor, Tensor]:
    """‖v_j‖ and ‖v_j W_O‖ of every head and position, each [layer, batch, head, pos]."""
    names = [f"blocks.{layer}.attn.hook_v" for layer in range(model.cfg.n_layers)]
    values = cached(model, batch, names)
    value_norms, output_norms = [], []
    for layer, name in enumerate(names):
        W_O = model.blocks[layer].attn.W_O  # [n_heads, d_head, d_model]
        v = values[name].repeat_interleave(len(W_O) // values[name].shape[2], dim=2)  # [batch, pos, n_heads, d_head]
        value_norms.append(v.norm(dim=-1).transpose(1, 2))
        output_norms.append(torch.einsum("bphe,hed->bhpd", v, W_O).norm(dim=-1))
    return torch.stack(value_norms), torch.stack(output_norms)


def _padded(values: Tensor, real: Tensor, n_positions: int) -> np.ndarray:
    """values [sequence, layer, …, pos] in float64, NaN for pads and up to ``n_positions``."""
    kept = real.view(len(real), *[1] * (values.dim() - 2), -1)
    values = torch.where(kept, values.double(), torch.nan)
    return torch.nn.functional.pad(values, (0, n_positions - values.shape[-1]), value=torch.nan).cpu().numpy()


def _mean(values: np.ndarray, axes: int | tuple[int, ...]) -> np.ndarray:
    """Mean of the known values, NaN where there is none."""
    known = np.isfinite(values)
    n = known.sum(axis=axes)
    return np.where(known, values, 0.0).sum(axis=axes) / np.where(n > 0, n, np.nan)


def _key_quantities(
    alpha: np.ndarray, above: np.ndarray, rate: np.ndarray, position: int, epsilon: float
) -> dict[str, Quantity]:
    share, at = "share of 1", f"key position {position}"
    mean_weight = f"mean weight on {at} over the real queries that see it"
    by_key, by_head = ("layer", "head", "key"), ("layer", "head")
    return {
        "sink_rate": Quantity(
            rate, ("key",), share,
            f"share of sequences, layers and heads whose mean weight on the key, α_j, exceeds {epsilon}",
        ),
        "alpha": Quantity(
            _mean(alpha, 0), by_key, share,
            "α_j, mean weight on key j over the real queries that may see it, mean over sequences",
        ),
        "sink_weight": Quantity(_mean(alpha[..., position], 0), by_head, share, f"{mean_weight}, mean over sequences"),
        "head_sink_rate": Quantity(
            _mean(above[..., position], 0), by_head, share,
            f"share of sequences in which the {mean_weight} exceeds {epsilon}",
        ),
    }  # fmt: skip


def _intervals(sink_weight: np.ndarray, rate: np.ndarray) -> dict[str, Quantity]:
    """Percentile bootstrap intervals over sequences, of sink_weight [sequence, layer, head], rate [sequence, key]."""
    counts = np.random.default_rng(0).multinomial(len(rate), np.full(len(rate), 1 / len(rate)), N_RESAMPLES)
    found = {}
    for name, axes, values in (("sink_weight", ("layer", "head"), sink_weight), ("sink_rate", ("key",), rate)):
        known = np.isfinite(values).reshape(len(values), -1)
        sums = counts @ np.where(known, values.reshape(known.shape), 0.0)  # [resample, …]
        n = counts @ known.astype(int)
        ends = np.full((2, known.shape[1]), np.nan)
        some = (n > 0).all(axis=0)  # a key that few sequences have is in no resample of some
        ends[:, some] = np.percentile(sums[:, some] / n[:, some], (2.5, 97.5), axis=0)
        for end, of_end in zip(("low", "high"), ends, strict=True):
            definition = (
                f"{'lower' if end == 'low' else 'upper'} end of the 95% bootstrap interval of {name} over sequences"
            )
            found[f"{name}_{end}"] = Quantity(of_end.reshape(values.shape[1:]), axes, "share of 1", definition)
    return found


def _head_quantities(measured: _Measured, position: int, sink_keys: int) -> dict[str, Quantity]:
    axes, share = ("layer", "head"), "share of 1"
    sees_one = measured.first_key[:, :, None] < sink_keys
    mass = np.where(sees_one, measured.sink_mass, np.nan)  # [sequence, layer, head, query]
    found = {
        "sink_mass": Quantity(
            _mean(mass, (0, 3)), axes, share,
            f"weight on the first {sink_keys} real tokens, mean over real queries that see one of them",
        )
    }  # fmt: skip
    if measured.virtual_mass is not None:
        found["virtual_sink_mass"] = Quantity(
            _mean(measured.virtual_mass, (0, 3)), axes, share, SCORES["virtual_sink_mass"].definition
        )
    for name, formula in (("value_norm", "‖v‖"), ("output_norm", "‖v W_O‖")):
        norms = getattr(measured, name)  # [sequence, layer, head, key]
        at_sink, others = norms[..., position], np.delete(norms, position, axis=-1)
        median = np.nanmedian(others, axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(median > 0, at_sink / median, np.nan)
        found[f"{name}_at_sink"] = Quantity(
            _mean(at_sink, 0), axes, "", f"{formula} of key position {position}, mean over sequences"
        )
        found[f"{name}_median"] = Quantity(
            _mean(median, 0), axes, "", f"median of {formula} over the other keys, mean over sequences"
        )
        found[f"{name}_ratio"] = Quantity(
            _mean(ratio, 0),
            axes,
            "",
            f"{formula} of key position {position} over the median key's, mean over sequences",
        )
    return found


def _kind_quantities(above: np.ndarray, kinds: np.ndarray) -> dict[str, Quantity]:
    known = np.isfinite(above)  # [sequence, layer, head, key]
    of_kind = [known & (kinds == kind)[:, None, None] for kind in range(len(TOKEN_KINDS))]
    rates = np.array([above[chosen].mean() if chosen.any() else np.nan for chosen in of_kind])
    n = np.array([chosen.any(axis=(1, 2)).sum() for chosen in of_kind])
    return {
        "sink_rate_by_kind": Quantity(rates, ("kind",), "share of 1", "sink rate of all keys of a kind of token"),
        "n_keys_by_kind": Quantity(n, ("kind",), "keys", "how many keys of that kind count"),
    }
