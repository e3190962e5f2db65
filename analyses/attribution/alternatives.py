"""Is attention the only explanation? Predictions under other weights than the model's (Jain and Wallace 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch

from workbench.analyses.attribution.agreement import MIN_FOR_INTERVAL, kendall, mean_interval
from workbench.analyses.attribution.answer_rows import AnswerRows, even, furthest, jensen_shannon, shuffled
from workbench.analyses.options import check_choice, check_seed, check_share, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, provenance, silent
from workbench.analyses.support import check_model
from workbench.analyses.tasks import PromptSet
from workbench.analyses.tasks.prompt_set import check_prompts

if TYPE_CHECKING:
    import pandas as pd

Scope = Literal["layers", "heads"]

LN_2 = float(np.log(2))
# Of a layer these are means over heads, as each head has its own weights.
_OF_EACH_HEAD = ("max_weight", "divergence", "most_divergence")
_MEANS = {
    "max_weight": ("share of 1", "largest weight of the answer position on a key that may move"),
    "median_distance": (
        "share of 1",
        "median over permutations of the weights of the total variation distance of the prediction, ½ Σ |p − q|",
    ),
    "even_distance": ("share of 1", "total variation distance of the prediction when the weight is spread evenly"),
    "divergence": (
        "nats", "largest Jensen–Shannon divergence from the model's weights that was found with the prediction within ε"
    ),
    "most_divergence": ("nats", "the largest that any weights could have: all on the key with the least"),
    "divergence_distance": ("share of 1", "total variation distance of the prediction under the weights of divergence"),
}  # fmt: skip


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AlternativeAttention(Result):
    """What the model predicts when the weights of the answer position are others, by layer or by head.

    ``max_weight``, ``median_distance``, ``even_distance``, ``divergence``, ``most_divergence`` and
    ``divergence_distance`` are means over prompts, with ``{name}_low`` and ``{name}_high`` where there are 20, and
    ``prompt_{name}`` of each prompt. ``tau`` is Kendall's τ-b over prompts of largest weight and median distance. Where
    all heads of a layer change at once, ``max_weight`` and divergences are means over its heads.
    """

    kind: ClassVar[str] = "alternative_attention"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("permutation", "adversarial", "map")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer",)
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "prompts": ("layer", "prompt"), "prompts_of_heads": ("layer", "head", "prompt"),
    }  # fmt: skip

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """Without the map of heads where layers are looked at."""
        return self.all_figure_kinds if self.settings["scope"] == "heads" else self.all_figure_kinds[:2]

    def to_frame(self, *axes: str) -> pd.DataFrame:
        """As for any result; the main axes are those of layers or heads."""
        return super().to_frame(*(axes or self.quantities["divergence"].axes))

    def summary(self) -> str:
        n, epsilon = self["prompt_divergence"].shape[-1], self.settings["epsilon"]
        every = "heads" if self.settings["scope"] == "heads" else "layers, all heads of each at once"
        lines = [
            self.provenance.sentence(),
            f"Weights of the answer position changed in {self['divergence'].size} {every}, one at a time; n = {n} "
            f"prompt{'s' * (n > 1)}, {self.settings['n_permutations']} permutations; adversarial weights keep the "
            f"prediction within ε = {epsilon:g}. Distances of predictions: total variation.",
        ]
        order = np.argsort(-self["median_distance"], axis=None, kind="stable")
        lines += [f"{self._names()[place]}: {self._in_words(int(place))}." for place in order[:8]]
        if len(order) > 8:
            lines.append(f"{len(order) - 8} more, whose permutations move the prediction less.")
        lines.append(
            "Other weights with the same prediction show that it does not pin the weights down, not that they are not "
            "used. Where even weights give the same prediction too, it does not depend on them, and this says little."
        )
        return "\n".join(lines)

    def _names(self) -> list[str]:
        shape = self["divergence"].shape
        return [f"L{place[0]}" + "".join(f"H{head}" for head in place[1:]) for place in np.ndindex(shape)]

    def _in_words(self, place: int) -> str:
        def mean(name: str) -> str:
            value, low, high = (self[name + end].flat[place] for end in ("", "_low", "_high"))
            return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if np.isfinite(low) else "")

        return (
            f"largest weight {self['max_weight'].flat[place]:.2f}; prediction moved {mean('median_distance')} by "
            f"permuted weights, {mean('even_distance')} by even ones; adversarial weights as far as "
            f"{mean('divergence')} of {self['most_divergence'].flat[place]:.3f} nats (Jensen–Shannon)"
        )

    def _draw_permutation(self, *, theme: str = "light") -> Drawing:
        return self._scatter(
            "median_distance", "median distance of the prediction (TVD)", None, theme,
            "What permuting the weights does to the prediction",
        )  # fmt: skip

    def _draw_adversarial(self, *, theme: str = "light") -> Drawing:
        epsilon = self.settings["epsilon"]
        return self._scatter(
            "divergence", f"divergence reached at ε = {epsilon:g} (JS, nats)", ("ln 2", LN_2), theme,
            "How far weights can be from the model's with the same prediction",
        )  # fmt: skip

    def _scatter(self, name: str, label: str, limit: tuple[str, float] | None, theme: str, title: str) -> Drawing:
        from workbench.analyses import figures

        values = self[f"prompt_{name}"]
        layers = np.broadcast_to(np.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1)), values.shape)
        names = [f"{unit}, prompt {prompt}" for unit in self._names() for prompt in range(values.shape[-1])]
        per_layer = self.settings["scope"] == "layers"
        figure = figures.weight_scatter(
            self["prompt_max_weight"].reshape(-1),
            values.reshape(-1),
            layers=layers.reshape(-1),
            names=names,
            x_label=f"largest weight{', mean of heads' * per_layer}",
            y_label=label,
            limit=limit,
            theme=theme,
        )
        return Drawing(figure, title, self.define("prompt_max_weight", f"prompt_{name}"))

    def _draw_map(self, *, quantity: str = "median_distance", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        if quantity not in _MEANS:
            raise ValueError(f"quantity must be one of {', '.join(map(repr, _MEANS))}, got {quantity!r}")
        unit = self.quantities[quantity].unit
        figure = figures.head_map(self[quantity], label=figures.axis_label(quantity, unit), theme=theme)
        return Drawing(figure, f"{figures.axis_label(quantity).capitalize()} of every head", self.define(quantity))


def alternative_attention(
    model: Any,
    prompts: PromptSet,
    *,
    scope: Scope = "layers",
    epsilon: float = 0.05,
    n_permutations: int = 100,
    n_starts: int = 3,
    n_steps: int = 30,
    keep_first: bool = False,
    seed: int = 0,
    progress: Progress = silent,
) -> AlternativeAttention:
    """Whether other attention would have given the same prediction: the tests of Jain and Wallace (2019), section 4.2.

    Changed are the weights of the answer position, the last token of each prompt, in one layer or head at a time; all
    that comes after follows. Three alternatives: *permutations* of the weights among the tokens that it sees, weights
    spread *evenly* (Wiegreffe and Pinter 2019, section 3.2), and *adversarial* weights as far as possible from the
    model's while the prediction stays within ``epsilon``. The search is a heuristic: what it reports is a lower bound.

    Args:
        scope: "layers" changes all heads of a layer at once, each by itself, the nearest to the single attention that
            the paper looked at; "heads" one head at a time, n_heads times as long.
        epsilon: total variation distance that still counts as the same prediction.
        n_starts, n_steps: of the search.
        keep_first: leaves the weight on the first token as it is. A head that rests there does nothing, and moving that
            weight to another token makes it do something.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: an unknown option or one out of its range, or a model that this cannot be asked of.
    """
    check_model(model, predicts=True)
    check_prompts(prompts)
    check_choice("scope", scope, get_args(Scope))
    check_share(epsilon=epsilon)
    check_whole(n_permutations=n_permutations, n_starts=n_starts, n_steps=n_steps)
    check_seed(seed)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    units = [list(range(n_heads))] if scope == "layers" else [[head] for head in range(n_heads)]
    generator = torch.Generator().manual_seed(seed)
    found: list[dict[str, np.ndarray]] = []
    for layer in range(n_layers):
        rows = AnswerRows(model, prompts, layer, keep_first=keep_first)
        for heads in units:
            found.append(_of_unit(rows, heads, epsilon, n_permutations, n_starts, n_steps, generator))
            n = n_layers * len(units)
            progress(len(found) / n, f"{len(found)} of {n} {scope}")
    axes = ("layer",) if scope == "layers" else ("layer", "head")
    shape = (n_layers, *([n_heads] if scope == "heads" else []), len(prompts))
    values = {name: np.stack([of_unit[name] for of_unit in found]).reshape(shape) for name in _MEANS}
    return AlternativeAttention(
        quantities=_quantities(values, axes, seed),
        provenance=provenance(model, prompts.sequences),
        settings={
            "task": prompts.name, "scope": scope, "epsilon": epsilon, "n_permutations": n_permutations,
            "n_starts": n_starts, "n_steps": n_steps, "keep_first": keep_first, "seed": seed,
        },
    )  # fmt: skip


def _of_unit(
    rows: AnswerRows, heads: Sequence[int], epsilon: float, n_permutations: int, n_starts: int, n_steps: int,
    generator: torch.Generator,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Every number of _MEANS for heads that change together, [prompt] each."""
    weights, free = rows.weights[:, heads], rows.free[:, heads]
    permuted = rows.distances(shuffled(weights, free, n_permutations, generator), heads)
    best = furthest(
        weights, free, lambda x: rows.distances(x, heads), lambda x: rows.gradients(x, heads),
        epsilon=epsilon, n_starts=n_starts, n_steps=n_steps,
    )  # fmt: skip
    least = weights.masked_fill(~free, torch.inf).argmin(dim=-1)
    mass = (weights * free).sum(dim=-1, keepdim=True)
    corner = torch.where(free, torch.nn.functional.one_hot(least, weights.shape[-1]) * mass, weights)
    numbers = {
        "max_weight": weights.masked_fill(~free, 0.0).amax(dim=-1).mean(dim=-1),
        "median_distance": permuted.quantile(0.5, dim=0),
        "even_distance": rows.distances(even(weights, free)[None], heads)[0],
        "divergence": jensen_shannon(best, weights).mean(dim=-1),
        "most_divergence": jensen_shannon(corner, weights).mean(dim=-1),
        "divergence_distance": rows.distances(best[None], heads)[0],
    }
    return {name: value.cpu().numpy() for name, value in numbers.items()}


def _quantities(values: Mapping[str, np.ndarray], axes: tuple[str, ...], seed: int) -> dict[str, Quantity]:
    found, shape = {}, next(iter(values.values())).shape[:-1]
    texts = {
        name: text + ", mean over the layer's heads" * (name in _OF_EACH_HEAD and axes == ("layer",))
        for name, (_, text) in _MEANS.items()
    }
    for name, (unit, _) in _MEANS.items():
        found[name] = Quantity(values[name].mean(axis=-1), axes, unit, f"{texts[name]}, mean over prompts")
        of_units = values[name].reshape(-1, values[name].shape[-1])
        ends = np.array([mean_interval(of_unit, seed=seed) for of_unit in of_units]).reshape(*shape, 2)
        for place, (end, which) in enumerate((("low", "lower"), ("high", "upper"))):
            found[f"{name}_{end}"] = Quantity(
                ends[..., place], axes, unit, f"{which} end of the 95 % bootstrap interval of {name} over prompts"
            )
    pairs = (values[name].reshape(-1, values[name].shape[-1]) for name in ("max_weight", "median_distance"))
    few = values["max_weight"].shape[-1] < MIN_FOR_INTERVAL
    taus = [float("nan") if few else kendall(x, y) for x, y in zip(*pairs, strict=True)]
    text = "Kendall's τ-b over prompts of max_weight and median_distance, NaN for fewer than 20"
    found["tau"] = Quantity(np.array(taus).reshape(shape), axes, "", text)
    for name, (unit, _) in _MEANS.items():
        found[f"prompt_{name}"] = Quantity(values[name], (*axes, "prompt"), unit, f"{texts[name]}, of each prompt")
    return found
