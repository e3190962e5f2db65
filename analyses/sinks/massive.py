"""What makes a key a sink: huge elements of its residual stream, its key's direction, and how little its value adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import known_median
from workbench.analyses.labels import number_or_dash
from workbench.analyses.options import check_whole, is_number
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model, check_plain_causal, emits_statistics, is_bidirectional

MIN_DISTANCE = 16  # tokens from the sink to the first query that counts


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class MassiveActivations(Result):
    """Elements of the residual stream by ``depth`` and ``place``, and the sink's part in every head [layer, head].

    Depth 0 is the embedding, depth l the stream that layer l − 1 leaves. A place is a position and a dimension that is
    massive at some depth of some sequence.
    """

    kind: ClassVar[str] = "massive_activations"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("magnitudes", "map", "norms")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"depths": ("depth",), "places": ("place",)}

    def summary(self) -> str:
        settings, at = self.settings, self.settings["sink_position"]
        rule = f"|x| > {settings['threshold']:g} and > {settings['ratio']:g} × the depth's median |x|"
        lines = [self.provenance.sentence()]
        if len(self["place_position"]):
            depths = np.flatnonzero(self["n_massive"])
            total, n_at_sink = self["n_massive"].sum(), self["n_massive_at_sink"].sum()
            lines.append(
                f"Massive activations ({rule}): at depths {depths[0]} to {depths[-1]} of {len(self['n_massive']) - 1}, "
                f"{n_at_sink / total:.1%} of them at position {at}, the sink; in dimensions "
                f"{', '.join(map(str, dict.fromkeys(self['place_dimension'].tolist()[:8])))}."
            )
        else:
            depth = int(np.argmax(self["largest"]))
            largest, usual = float(self["largest"][depth]), float(self["median"][depth])
            times = f"{largest / usual:.0f} × the median, " if usual else ""
            lines.append(
                f"No massive activation ({rule}): the largest |x| is {largest:.1f} at depth {depth}, {times}"
                f"at position {self['largest_position'][depth]}."
            )

        def middle(name: str, spec: str) -> str:
            return number_or_dash(known_median(self[name]), spec)

        lines += [
            f"Median head at position {at}: ‖v‖ {middle('value_norm_ratio', '.2f')} × and ‖k‖ "
            f"{middle('key_norm_ratio', '.2f')} × the median key's; cosine of k with the mean query "
            f"{middle('key_cosine_at_sink', '+.2f')}, of the median key {middle('key_cosine_median', '+.2f')}.",
            f"That position takes {middle('sink_weight', '.3f')} of the weight and gives "
            f"{middle('output_share', '.3f')} of the output.",
            f"Entropy {middle('entropy', '.2f')} nats with it and {middle('entropy_without_sink', '.2f')} without.",
        ]
        return "\n".join(lines)

    def _draw_magnitudes(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        series = {
            "largest |x| at the sink": self["largest_at_sink"],
            "largest |x| elsewhere": self["largest_elsewhere"],
            "median |x|": self["median"],
            "massive above": np.maximum(self.settings["threshold"], self.settings["ratio"] * self["median"]),
        }
        figure = figures.curves(series, x_label="depth (layers applied)", y_label="|x| (log scale)", theme=theme)
        figure.update_yaxes(type="log", rangemode="normal", exponentformat="power", dtick=1)
        return Drawing(figure, "Largest elements of the residual stream", self.define("largest_at_sink", "median"))

    def _draw_map(self, *, score: str = "output_share", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        if score not in self.names("layer", "head"):
            raise ValueError(f"score must be one of {', '.join(self.names('layer', 'head'))}, got {score!r}")
        quantity = self.quantities[score]
        figure = figures.head_map(
            self[score],
            label=figures.axis_label(score, quantity.unit),
            upper=1.0 if quantity.unit == "share of 1" else None,
            signed="cosine" in score,
            theme=theme,
        )
        return Drawing(figure, f"{figures.axis_label(score).capitalize()}, every head", self.define(score))

    def _draw_norms(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_scatter(
            self["sink_weight"],
            self["output_share"],
            x_label=f"mean weight on position {self.settings['sink_position']}",
            y_label="share of the output that it gives",
            theme=theme,
        )
        title = "What the sink gives against what it takes, every head"
        return Drawing(figure, title, self.define("sink_weight", "output_share"))


@torch.no_grad()
def massive_activations(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    sink_position: int = 0,
    threshold: float = 100.0,
    ratio: float = 1000.0,
    progress: Progress = silent,
) -> MassiveActivations:
    """Massive activations (Sun et al. 2024, section 2), and how a sink's key, value and weight stand out by head.

    An element of the residual stream is massive where |x| > ``threshold`` and |x| > ``ratio`` × the median |x| of its
    depth and sequence. Weights, outputs, cosines and entropies are of queries 16 or more tokens after the sink. It
    takes O(n²) memory, one layer at a time.

    Args:
        tokens: text, texts, or token ids [batch, pos] with their ``attention_mask`` (1 or true = real).

    Raises:
        ValueError: a model without attention weights, or whose queries see later tokens; a sequence without a query
            that counts; an option out of its range.
    """
    check_model(model)
    if is_bidirectional(model):
        raise ValueError("massive_activations is of models whose queries come after the sink; this one is an encoder")
    if not (is_number(threshold) and is_number(ratio)) or threshold <= 0 or ratio <= 0:
        raise ValueError(f"threshold and ratio must be positive, got {threshold!r} and {ratio!r}")
    check_whole(sink_position=sink_position, least=0)
    sequences = Sequences.read(model, tokens, attention_mask)
    shortest = int(sequences.lengths.min())
    if not 0 <= sink_position < shortest - MIN_DISTANCE:
        raise ValueError(
            f"sink_position must be a position with {MIN_DISTANCE} later tokens in every sequence, of which the "
            f"shortest has {shortest}, got {sink_position}"
        )
    depths: list[dict[str, np.ndarray]] = []
    heads: list[dict[str, np.ndarray]] = []
    places: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    for row, real in zip(sequences.tokens, sequences.real, strict=True):
        streams, of_layers = _run(model, row[real][None].to(model.cfg.device), sink_position)
        depths.append(_stack([_magnitudes(x, sink_position, threshold, ratio) for x in streams]))
        heads.append(_stack(of_layers))
        for depth, x in enumerate(streams):
            for position, dimension in _is_massive(x, threshold, ratio).nonzero().tolist():
                found = places.setdefault((position, dimension), [])
                found.append((len(depths) - 1, depth, float(x[position, dimension])))
        progress(len(depths) / len(sequences), f"{len(depths)} of {len(sequences)} sequences")
    return MassiveActivations(
        quantities=_depth_quantities(depths, threshold, ratio)
        | _place_quantities(places, len(sequences))
        | _head_quantities(heads, sink_position),
        provenance=provenance(model, sequences),
        settings={"sink_position": sink_position, "threshold": threshold, "ratio": ratio, "min_distance": MIN_DISTANCE},
        coverage={"entropy": float((sequences.lengths - sink_position - MIN_DISTANCE).sum() / sequences.real.sum())},
    )


def _stack(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def _run(model: Any, tokens: Tensor, sink: int) -> tuple[list[Tensor], list[dict[str, np.ndarray]]]:
    """One sequence [1, pos]: the stream at every depth, [pos, d_model], and of every layer numbers [head]."""
    streams: list[Tensor] = []
    layers: list[dict[str, np.ndarray]] = []
    held: dict[str, Tensor] = {}
    hooks: list[tuple[str, Callable]] = []

    def keep_stream(x: Tensor, hook: Any) -> None:
        streams.append(x[0])

    def keep(name: str) -> Callable:
        def read(x: Tensor, hook: Any) -> None:
            held[name] = x[0].double()  # [pos, head, d_head]

        return read

    def finish(pattern: Tensor, hook: Any) -> None:
        if not emits_statistics(model):
            check_plain_causal(pattern, len(layers))
        W_O = model.blocks[len(layers)].attn.W_O.double()
        layers.append(_of_heads(pattern[0].double(), held["q"], held["k"], held["v"], W_O, sink))

    rotated = "blocks.0.attn.hook_rot_q" in model.hook_dict
    for layer in range(model.cfg.n_layers):
        at = f"blocks.{layer}."
        hooks += [
            (f"{at}hook_resid_pre", keep_stream),
            *((f"{at}attn.hook_{'rot_' if rotated else ''}{name}", keep(name)) for name in "qk"),
            (f"{at}attn.hook_v", keep("v")),
            (f"{at}attn.hook_pattern", finish),
        ]
    hooks.append((f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", keep_stream))
    model.run_with_hooks(tokens, return_type=None, fwd_hooks=hooks)
    return streams, layers


def _of_heads(pattern: Tensor, q: Tensor, k: Tensor, v: Tensor, W_O: Tensor, sink: int) -> dict[str, np.ndarray]:
    """pattern [head, query, key], q [query, head, d_head], k and v [key, kv head, d_head]: numbers [head]."""
    n_heads = len(W_O)
    k, v = (x.repeat_interleave(n_heads // x.shape[1], dim=1) for x in (k, v))
    later = pattern[:, sink + MIN_DISTANCE :]
    p_sink = later[..., sink]  # [head, query]
    norms = torch.einsum("khd,hdm->khm", v, W_O).norm(dim=-1).T  # [head, key]
    output = torch.einsum("hqk,hk->hq", later, norms)
    rest = later.clone()
    rest[..., sink] = 0
    cosine = torch.cosine_similarity(k, q[sink + MIN_DISTANCE :].mean(dim=0), dim=-1).T  # [head, key]
    others = torch.arange(k.shape[0], device=k.device) != sink
    found = {
        "sink_weight": p_sink.mean(dim=1),
        "output_share": (p_sink * norms[:, sink, None] / output).nanmean(dim=1),
        "entropy": _entropy(later).nanmean(dim=1),
        "entropy_without_sink": _entropy(rest).nanmean(dim=1),
        "key_cosine_at_sink": cosine[:, sink],
        "key_cosine_median": cosine[:, others].quantile(0.5, dim=1),  # of an even number, the mean of the middle two
    }
    for name, x in (("key", k), ("value", v)):
        norm = x.norm(dim=-1).T
        median = norm[:, others].quantile(0.5, dim=1)
        found[f"{name}_norm_ratio"] = torch.where(median > 0, norm[:, sink] / median, torch.nan)
    return {name: values.cpu().numpy() for name, values in found.items()}


def _entropy(weights: Tensor) -> Tensor:
    """Of weights [head, query, key] made to sum to 1, [head, query]; NaN where they are all 0."""
    return torch.special.entr(weights / weights.sum(dim=-1, keepdim=True)).sum(dim=-1)


def _is_massive(x: Tensor, threshold: float, ratio: float) -> Tensor:
    """bool [pos, d_model] of one sequence's stream."""
    return x.abs() > max(threshold, ratio * float(x.abs().median()))


def _magnitudes(x: Tensor, sink: int, threshold: float, ratio: float) -> dict[str, np.ndarray]:
    size, massive = x.abs(), _is_massive(x, threshold, ratio)
    largest = size.amax(dim=1)  # [pos]
    elsewhere = largest.clone()
    elsewhere[sink] = 0
    found = {
        "largest": largest.max(), "largest_position": largest.argmax(), "largest_at_sink": largest[sink],
        "largest_elsewhere": elsewhere.max(), "median": size.median(),
        "n_massive": massive.sum(), "n_massive_at_sink": massive[sink].sum(),
    }  # fmt: skip
    return {name: value.double().cpu().numpy() for name, value in found.items()}


def _depth_quantities(depths: list[dict[str, np.ndarray]], threshold: float, ratio: float) -> dict[str, Quantity]:
    found = _stack(depths)  # [sequence, depth]
    largest, of = found["largest"].argmax(axis=0), "over sequences"
    rule = f"|x| > {threshold:g} and > {ratio:g} × the median |x| of the depth and sequence"
    position = np.take_along_axis(found["largest_position"], largest[None], axis=0)[0].astype(int)

    def quantity(values: np.ndarray, unit: str, definition: str) -> Quantity:
        return Quantity(values, ("depth",), unit, definition)

    return {
        "largest": quantity(found["largest"].max(axis=0), "", f"largest |x| of the residual stream, maximum {of}"),
        "largest_position": quantity(position, "position", "where that is"),
        "largest_at_sink": quantity(
            found["largest_at_sink"].mean(axis=0), "", f"largest |x| of the residual stream at the sink, mean {of}"
        ),
        "largest_elsewhere": quantity(
            found["largest_elsewhere"].mean(axis=0), "", f"largest |x| at any other position, mean {of}"
        ),
        "median": quantity(found["median"].mean(axis=0), "", f"median |x| of the residual stream, mean {of}"),
        "n_massive": quantity(found["n_massive"].mean(axis=0), "elements", f"elements with {rule}, mean {of}"),
        "n_massive_at_sink": quantity(found["n_massive_at_sink"].mean(axis=0), "elements", "those at the sink"),
    }


def _place_quantities(places: dict[tuple[int, int], list], n_sequences: int) -> dict[str, Quantity]:
    """places: (position, dimension) → (sequence, depth, value) of every time it is massive; the most often first."""
    order = sorted(places, key=lambda place: (-len(places[place]), place))
    found = {
        "place_position": ([p for p, _ in order], "position", "where an element is massive"),
        "place_dimension": ([d for _, d in order], "dimension", "its dimension of the residual stream"),
        "place_share": (
            [len({sequence for sequence, _, _ in places[place]}) / n_sequences for place in order],
            "share of 1", "share of sequences in which it is massive at some depth",
        ),
        "place_first_depth": ([min(d for _, d, _ in places[p]) for p in order], "", "the first depth at which it is"),
        "place_last_depth": ([max(d for _, d, _ in places[p]) for p in order], "", "the last depth at which it is"),
        "place_value": (
            [float(np.mean([x for _, _, x in places[place]])) for place in order], "", "its mean value there",
        ),
    }  # fmt: skip
    types = {"place_share": float, "place_value": float}
    return {
        name: Quantity(np.array(values, dtype=types.get(name, int)), ("place",), unit, definition)
        for name, (values, unit, definition) in found.items()
    }


def _head_quantities(heads: list[dict[str, np.ndarray]], sink: int) -> dict[str, Quantity]:
    means = {}
    for name, values in _stack(heads).items():  # [sequence, layer, head]
        known = np.isfinite(values)
        n = known.sum(axis=0)
        means[name] = np.where(known, values, 0.0).sum(axis=0) / np.where(n > 0, n, np.nan)
    share, at, of = "share of 1", f"key position {sink}", "mean over later queries and sequences"
    about = {
        "sink_weight": (share, f"weight on {at}, {of}"),
        "output_share": (share, f"‖p v W_O‖ of {at} over the sum of ‖p v W_O‖ of all keys, {of}"),
        "entropy": ("nats", f"entropy of the weights on keys, {of}"),
        "entropy_without_sink": (
            "nats",
            f"entropy of the weights on all keys but {at}, scaled to sum to 1, {of}",
        ),
        "key_cosine_at_sink": ("", f"cosine of the key at {at} with the mean later query, mean over sequences"),
        "key_cosine_median": ("", "median of that cosine over the other keys, mean over sequences"),
        "key_norm_ratio": ("", f"‖k‖ of {at} over the median of the other keys', mean over sequences"),
        "value_norm_ratio": ("", f"‖v‖ of {at} over the median of the other keys', mean over sequences"),
    }
    return {
        name: Quantity(means[name], ("layer", "head"), unit, definition) for name, (unit, definition) in about.items()
    }
