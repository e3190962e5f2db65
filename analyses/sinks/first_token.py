"""Whether the first position is a sink because of what stands there, or because it is the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.options import check_seed
from workbench.analyses.prompts import bos_token, ordinary_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.sinks.rates import attention_sinks
from workbench.analyses.support import check_model, is_bidirectional

WITH_BOS, WITHOUT, OTHER, REPEATED = "BOS first", "no BOS", "another token first", "one token repeated"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class FirstTokenSinks(Result):
    """Sink rates [variant] of position 0 and of the position that has the highest among the others."""

    kind: ClassVar[str] = "first_token_sinks"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("rates", "map")
    frame_axes: ClassVar[tuple[str, ...]] = ("variant",)
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"heads": ("variant", "layer", "head")}

    def summary(self) -> str:
        lines = [self.provenance.sentence(), f"Sink rate of position 0 (ε = {self.settings['epsilon']}):"]
        for place, variant in enumerate(self.coordinates["variant"]):
            lines.append(
                f"{variant}: {self['sink_rate'][place]:.1%}{self._interval(place)}, mean weight "
                f"{self['mean_weight'][place]:.3f}; of other positions at most "
                f"{self['largest_other_rate'][place]:.1%}, at {self['other_position'][place]}."
            )
        return "\n".join(lines)

    def _interval(self, place: int) -> str:
        low, high = self["sink_rate_low"][place], self["sink_rate_high"][place]
        return f" [{low:.1%}, {high:.1%}]" if np.isfinite(low) else ""

    def _draw_rates(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        nothing = np.full(len(self["sink_rate"]), np.nan)
        figure = figures.dots(
            {"position 0": (self["sink_rate"], self["sink_rate_low"], self["sink_rate_high"]),
             "any other": (self["largest_other_rate"], nothing, nothing)},
            list(map(str, self.coordinates["variant"])),
            x_label=f"sink rate (ε = {self.settings['epsilon']})",
            theme=theme,
        )  # fmt: skip
        return Drawing(figure, "Sink rate by what comes first", self.define("sink_rate", "largest_other_rate"))

    def _draw_map(self, *, variant: str | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        variants = list(map(str, self.coordinates["variant"]))
        variant = variants[0] if variant is None else variant
        if variant not in variants:
            raise ValueError(f"variant must be one of {', '.join(variants)}, got {variant!r}")
        figure = figures.head_map(
            self["sink_weight"][variants.index(variant)], label="mean weight on position 0", upper=1.0, theme=theme
        )
        return Drawing(figure, f"Mean weight on position 0, {variant}", self.define("sink_weight"))


def first_token_sinks(
    model: Any,
    tokens: Input,
    *,
    attention_mask: Tensor | None = None,
    epsilon: float = 0.3,
    n_tokens: int = 64,
    seed: int = 0,
    progress: Progress = silent,
) -> FirstTokenSinks:
    """Sink rate of position 0 on the same texts behind BOS, without it, and behind a random token in its place.

    Beside them one random token repeated to the same length, which only positions tell apart (Gu et al. 2024, section
    3). A sink that stays whatever comes first is one of position; one that comes and goes with BOS is one of BOS. Sink
    rates are those of ``attention_sinks``, over the first ``n_tokens`` tokens.

    Args:
        tokens: text, texts, or token ids [batch, pos] with their ``attention_mask``; all with BOS or all without, which
            is taken off and put back.
        seed: of the random tokens, one for each sequence.

    Raises:
        ValueError: an encoder, sequences of which only some start with BOS, or as ``attention_sinks``.
    """
    check_model(model)
    if is_bidirectional(model):
        raise ValueError("first_token_sinks is of models with a beginning of sequence; this one is an encoder")
    check_seed(seed)
    sequences = Sequences.read(model, tokens, attention_mask)
    bos = bos_token(model, None)
    n_with = 0 if bos is None else int((sequences.tokens[:, 0] == bos).sum())
    if n_with not in (0, len(sequences)):
        raise ValueError(f"{n_with} of {len(sequences)} sequences start with BOS; pass all with it, or all without")
    body, real = (part[:, int(n_with > 0) :] for part in (sequences.tokens, sequences.real))
    ordinary = ordinary_tokens(model)
    drawn = ordinary[torch.randint(len(ordinary), (len(body), 1), generator=torch.Generator().manual_seed(seed))]
    variants = {} if bos is None else {WITH_BOS: _behind(torch.full_like(drawn, bos), body, real)}
    variants |= {
        WITHOUT: (body, real),
        OTHER: _behind(drawn, body, real),
        REPEATED: _behind(drawn, drawn.expand(body.shape), real),
    }
    found = []
    for place, (name, (ids, mask)) in enumerate(variants.items()):
        progress(place / len(variants), name)
        found.append(
            attention_sinks(model, ids, attention_mask=mask, epsilon=epsilon, n_tokens=n_tokens, sink_position=0)
        )
    progress(1.0, "done")
    rates = [sinks["sink_rate"] for sinks in found]
    share, weight = "share of 1", np.stack([sinks["sink_weight"] for sinks in found])
    others = [int(np.nanargmax(rate[1:])) + 1 if np.isfinite(rate[1:]).any() else -1 for rate in rates]
    return FirstTokenSinks(
        quantities={
            "sink_rate": Quantity(
                np.array([rate[0] for rate in rates]), ("variant",), share,
                f"share of sequences, layers and heads whose mean weight on position 0 exceeds {epsilon}",
            ),
            **{
                f"sink_rate_{end}": Quantity(
                    np.array([one[f"sink_rate_{end}"][0] if f"sink_rate_{end}" in one else np.nan for one in found]),
                    ("variant",), share,
                    f"{which} end of its 95% bootstrap interval over sequences, of 20 or more",
                )
                for end, which in (("low", "lower"), ("high", "upper"))
            },
            "largest_other_rate": Quantity(
                np.array([rate[at] if at > 0 else np.nan for rate, at in zip(rates, others, strict=True)]),
                ("variant",), share,
                "the highest sink rate of any other position",
            ),
            "other_position": Quantity(
                np.array(others), ("variant",), "position", "that position; −1 where none has a rate"
            ),
            "mean_weight": Quantity(
                np.nanmean(weight, axis=(1, 2)), ("variant",), share, "mean weight on position 0 over all heads"
            ),
            "sink_weight": Quantity(
                weight, ("variant", "layer", "head"), share,
                "mean weight on position 0 over the real queries that see it, mean over sequences",
            ),
        },
        provenance=provenance(model, sequences),
        settings={"epsilon": epsilon, "n_tokens": n_tokens, "seed": seed},
        coverage={"sink_rate": found[0].coverage["sink_rate"]},
        coordinates={"variant": list(variants)},
    )  # fmt: skip


def _behind(first: Tensor, body: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [sequence, pos] behind a first token [sequence, 1], and which are real."""
    return torch.cat((first, body), dim=1), torch.cat((torch.ones_like(real[:, :1]), real), dim=1)
