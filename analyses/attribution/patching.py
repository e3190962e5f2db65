"""What gradients say of a prediction: attribution patching, held against true patching, and integrated gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attribution.agreement import spearman
from workbench.analyses.attribution.head_evidence import MetricName, chosen_metric, metric_of
from workbench.analyses.interventions.edits import replace_activation, replace_head
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.labels import number_or_dash
from workbench.analyses.options import check_choice
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, cached, provenance, silent
from workbench.analyses.support import check_model, emits_statistics
from workbench.analyses.tasks import PromptSet
from workbench.analyses.tasks.prompt_set import check_prompts

if TYPE_CHECKING:
    import pandas as pd

Components = Literal["heads", "mlps", "residual"]
Direction = Literal["noising", "denoising"]

TOKENS_PER_GRADIENT = 2048  # tokens of which all layers' activations are held
SMALL = 200_000_000  # parameters of a model whose estimates are compared with true patching unasked
_HOOKS = {"heads": "attn.hook_z", "mlps": "hook_mlp_out", "residual": "hook_resid_pre"}
_WHAT = {
    "heads": "a head's output z at all positions",
    "mlps": "an MLP's output at one position",
    "residual": "the residual stream that enters a layer, at one position",
}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AttributionPatching(Result):
    """First-order estimates of activation patching, and how far they are off.

    ``estimate``, and where they were compared ``effect`` and ``error`` = estimate − effect, are means over prompts,
    [layer, head] of heads, [layer, position] of MLPs and the residual stream; ``prompt_estimate`` and ``prompt_effect``
    hold every prompt's. ``correlation`` (Pearson), ``rank_correlation`` (Spearman) and ``mean_absolute_error`` compare
    the means over all components. ``clean_metric`` and ``corrupted_metric`` are of each prompt. With GradDrop there is
    ``dropped_size`` as well; ``size_correlation`` and ``dropped_size_correlation`` (Spearman) hold the mean |estimate|
    and it against the mean |effect|.
    """

    kind: ClassVar[str] = "attribution_patching"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "scatter")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"prompts": ("prompt",)}

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """Without the scatter of estimates against true effects where these are unknown."""
        return self.all_figure_kinds if "effect" in self else ("map",)

    def to_frame(self, *axes: str) -> pd.DataFrame:
        """As for any result; the main axes are those of the components."""
        return super().to_frame(*(axes or self.quantities["estimate"].axes))

    def top(self, n: int = 5) -> list[tuple[int, int]]:
        """(layer, head) or (layer, position) of the ``n`` largest estimates, whatever their sign, in order."""
        return _largest(self["estimate"], n)

    def worst(self, n: int = 5) -> list[tuple[int, int]]:
        """The same of the ``n`` estimates that are furthest from the true effect.

        Raises:
            ValueError: the estimates were not compared.
        """
        if "error" not in self:
            raise ValueError("the estimates were not compared with true patching; ask for compare=True")
        return _largest(self["error"], n)

    def name(self, layer: int, place: int) -> str:
        """L3H7, or "L3 at 7" for a position."""
        return f"L{layer}H{place}" if self.settings["components"] == "heads" else f"L{layer} at {place}"

    def summary(self) -> str:
        clean, corrupted = self["clean_metric"].mean(), self["corrupted_metric"].mean()
        unit, direction = self.settings["unit"], self.settings["direction"]
        top = ", ".join(f"{self.name(*one)} {self['estimate'][one]:+z.3f}" for one in self.top())
        lines = [
            self.provenance.sentence(),
            f"{self.settings['metric'].replace('_', ' ').capitalize()}, mean over {len(self['clean_metric'])} prompts: "
            f"{clean:+z.3f} clean, {corrupted:+z.3f} corrupted ({unit}).",
            f"{direction.capitalize()}, gradient of the {_patched(direction)} run; largest estimates: {top}.",
        ]
        if "effect" in self:
            worst = ", ".join(
                f"{self.name(*one)} ({self['estimate'][one]:+z.3f} for {self['effect'][one]:+z.3f})"
                for one in self.worst(3)
            )
            lines.append(
                f"Against true patching of all {int(np.isfinite(self['effect']).sum())}: correlation "
                f"{number_or_dash(self['correlation'])}, rank correlation "
                f"{number_or_dash(self['rank_correlation'])}, mean absolute error "
                f"{self['mean_absolute_error']:.3f} {unit}; furthest off: {worst}."
            )
            if "dropped_size" in self:
                lines.append(
                    f"Rank correlation of sizes with true patching: {number_or_dash(self['size_correlation'])}, with "
                    f"GradDrop {number_or_dash(self['dropped_size_correlation'])}."
                )
        else:
            lines.append("Not compared with true patching (compare=True does).")
        return "\n".join(lines)

    def _draw_map(self, *, quantity: str = "estimate", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        if quantity not in ("estimate", "effect", "error") or quantity not in self:
            known = [name for name in ("estimate", "effect", "error") if name in self]
            raise ValueError(f"quantity must be one of {', '.join(map(repr, known))}, got {quantity!r}")
        label = figures.axis_label(quantity, self.settings["unit"])
        draw = figures.head_map if self.settings["components"] == "heads" else figures.layer_position_map
        options: dict[str, Any] = {"signed": True} if self.settings["components"] == "heads" else {}
        figure = draw(self[quantity], label=label, theme=theme, **options)
        return Drawing(figure, f"Attribution patching of {_name_of(self.settings)}", self.define(quantity))

    def _draw_scatter(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        unit = self.settings["unit"]
        shape = self["estimate"].shape
        figure = figures.diagonal(
            self["effect"],
            self["estimate"],
            names=[self.name(layer, place) for layer in range(shape[0]) for place in range(shape[1])],
            x_label=f"true patching ({unit})",
            y_label=f"estimate ({unit})",
            note=f"r = {number_or_dash(self['correlation'])}, mean |error| = {self['mean_absolute_error']:.3f} {unit}",
            theme=theme,
        )
        title = f"Attribution patching against true patching of {_name_of(self.settings)}"
        return Drawing(figure, title, self.define("estimate", "effect"))


def _name_of(settings: Mapping[str, Any]) -> str:
    return {"heads": "heads", "mlps": "MLPs", "residual": "the residual stream"}[settings["components"]]


def _patched(direction: str) -> str:
    """The run that is patched, and whose gradient is taken."""
    return "clean" if direction == "noising" else "corrupted"


def _largest(values: np.ndarray, n: int) -> list[tuple[int, int]]:
    order = np.argsort(-np.nan_to_num(np.abs(values), nan=-1.0), axis=None, kind="stable")[:n]
    return [(int(place) // values.shape[1], int(place) % values.shape[1]) for place in order]


def attribution_patching(
    model: Any,
    prompts: PromptSet,
    *,
    components: Components = "heads",
    direction: Direction = "noising",
    metric: MetricName | None = None,
    grad_drop: bool = False,
    compare: bool | None = None,
    progress: Progress = silent,
) -> AttributionPatching:
    """What activation patching of every component would do, to first order, from one gradient.

    Patching replaces an activation a of one run by that of another, a'; its effect on the metric is estimated by
    Σ (a' − a) · ∂metric/∂a, the gradient taken in the run that is patched (Nanda 2023; Syed et al. 2023; AtP of Kramár
    et al. 2024). The estimate is exact where the metric is linear in the activation, and fails where
    softmaxes and norms saturate.

    Args:
        prompts: with corrupted versions.
        components: "heads" (z at all positions together), "mlps" (output by position) or "residual" (the stream that
            enters each layer, by position).
        direction: "noising" patches the clean run with corrupted activations and takes the clean gradient; "denoising"
            the reverse.
        metric: None takes the logit difference where prompts have foils, else the log-probability.
        grad_drop: also estimate each effect's size with the gradient through one layer after the other cut off, so that
            a direct effect and one that later layers cancel it with do not hide each other (Kramár et al. 2024,
            GradDrop); takes a gradient per layer.
        compare: also patch each component in turn and report the error; None does so for models of up to 200 million
            parameters.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: prompts without corrupted versions (or without foils, for a logit difference), an unknown option, or
            a model without next-token logits.
    """
    check_model(model, predicts=True)
    check_prompts(prompts)
    check_choice("components", components, get_args(Components))
    check_choice("direction", direction, get_args(Direction))
    metric = chosen_metric(prompts, metric)
    clean, corrupted = prompts.sequences, corrupted_sequences(prompts)
    base, donor = (clean, corrupted) if direction == "noising" else (corrupted, clean)
    names = [f"blocks.{layer}.{_HOOKS[components]}" for layer in range(model.cfg.n_layers)]
    if grad_drop and len(names) < 2:
        raise ValueError("grad_drop cuts off one layer after the other, and this model has one; leave it out")
    estimates, dropped, of_base = _estimate(
        model, prompts, base, donor, names, metric, grad_drop, lambda x: progress(0.2 * x, "gradients")
    )
    whole = metric_of(prompts, metric)
    of_donor = measure(model, donor, [Intervention()], whole)[0].numpy()
    if compare is None:
        compare = sum(parameter.numel() for parameter in model.parameters()) <= SMALL
    effects = None
    if compare:
        patches = _patches(model, donor, names, components)
        values = measure(
            model, base, [Intervention(), *patches], whole, progress=lambda done, what: progress(0.2 + 0.8 * done, what)
        ).numpy()
        effects = (values[1:] - values[0]).reshape(*estimates.shape[1:], len(prompts))
        effects = np.where(np.isnan(estimates), np.nan, np.moveaxis(effects, -1, 0))
    metrics = (of_base, of_donor) if direction == "noising" else (of_donor, of_base)
    return AttributionPatching(
        quantities=_patching_quantities(estimates, effects, metrics, components, direction, whole.unit)
        | (_dropped_quantities(dropped, estimates, effects, _axes(components), whole.unit) if grad_drop else {}),
        provenance=provenance(model, clean),
        settings={
            "prompts": prompts.name, "components": components, "direction": direction, "metric": metric,
            "unit": whole.unit, "gradient_of": f"{_patched(direction)} run",
        },
    )  # fmt: skip


def corrupted_sequences(prompts: PromptSet) -> Sequences:
    if prompts.corrupted is None:
        raise ValueError(
            f"{prompts.name} has no corrupted prompts, so there is nothing to compare the prompts with; "
            "give each prompt a corrupted version of the same length"
        )
    return Sequences(prompts.corrupted, prompts.real, "the corrupted prompts")


@torch.enable_grad()
def gradients_at(
    model: Any, sequences: Sequences, metric: Metric, names: Sequence[str], cut: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Activations at hook points, the gradient of each sequence's metric at them, and the metric, float64 [sequence].

    One run, all sequences at once: they do not see each other, so the gradient of the sum is that of each. None of it
    passes through what the layer ``cut`` adds to the stream.
    """
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:  # a bridge's hook points have other names than they are asked for by
        def read(x: Tensor, hook: Any) -> Tensor:
            kept[name] = x if x.requires_grad else x.detach().requires_grad_()
            return kept[name]

        return read

    hooks: list[tuple[str, Any]] = [(name, keep(name)) for name in names]
    outputs = [] if cut is None else [f"blocks.{cut}.hook_attn_out", f"blocks.{cut}.hook_mlp_out"]
    hooks += [(name, lambda x, hook: x.detach()) for name in outputs if name in model.hook_dict]
    batch = sequences.to(model.cfg.device)
    if emits_statistics(model):
        with model.hooks(fwd_hooks=hooks):
            stream = model(batch.tokens, attention_mask=batch.real, stop_at_layer=model.cfg.n_layers)
        logits = model.to_logits(rows_of(stream, metric))
    else:
        logits = rows_of(model.run_with_hooks(batch.tokens, return_type="logits", fwd_hooks=hooks), metric)
    values = metric(logits)
    gradients = torch.autograd.grad(
        values.sum(), [kept[name] for name in names], allow_unused=cut is not None, materialize_grads=cut is not None
    )
    return {name: kept[name].detach() for name in names}, dict(zip(names, gradients, strict=True)), values.detach()


def rows_of(values: Tensor, metric: Metric) -> Tensor:
    """values [sequence, pos, width] at the rows that the metric reads, [sequence, row, width]."""
    return values[torch.arange(len(values), device=values.device)[:, None], metric.rows.to(values.device)]


def pieces(n: int, width: int) -> Iterator[Tensor]:
    """Indices of ``n`` prompts of ``width`` tokens, as many at a time as gradients allow."""
    yield from torch.arange(n).split(max(1, TOKENS_PER_GRADIENT // width))


def some_of(sequences: Sequences, places: Tensor) -> Sequences:
    return Sequences(sequences.tokens[places], sequences.real[places], sequences.description)


def _estimate(
    model: Any, prompts: PromptSet, base: Sequences, donor: Sequences, names: Sequence[str], metric: MetricName,
    grad_drop: bool, progress: Any,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Estimates [prompt, layer, head or position], NaN at pads; their sizes with GradDrop as these, if asked for; and
    the metric of the base run [prompt]."""
    estimates, dropped, metrics = [], [], []
    for places in pieces(len(prompts), prompts.tokens.shape[1]):
        of_some, some = metric_of(prompts.subset(places), metric), some_of(base, places)
        others = cached(model, some_of(donor, places).to(model.cfg.device), names)
        real = prompts.real[places].to(model.cfg.device)

        values, gradients, found = gradients_at(model, some, of_some, names)
        change = [(others[name] - values[name]).double() for name in names]
        estimates.append(_products(change, [gradients[name] for name in names], real))
        if grad_drop:
            cuts = (gradients_at(model, some, of_some, names, cut)[1] for cut in range(len(names)))
            sizes = [_products(change, [of_cut[name] for name in names], real).abs() for of_cut in cuts]
            dropped.append(torch.stack(sizes).sum(dim=0) / (len(names) - 1))
        metrics.append(found)
        progress(int(places[-1] + 1) / len(prompts))
    of_drop = torch.cat(dropped) if grad_drop else torch.empty(0)
    return torch.cat(estimates).cpu().numpy(), of_drop.cpu().numpy(), torch.cat(metrics).cpu().numpy()


def _products(change: Sequence[Tensor], gradients: Sequence[Tensor], real: Tensor) -> Tensor:
    """Σ change · gradient of each layer, [prompt, layer, head] from z, or [prompt, layer, position], NaN at pads."""
    layers = []
    for of_change, gradient in zip(change, gradients, strict=True):
        product = (of_change * gradient.double()).sum(dim=-1)
        layers.append(product.sum(dim=1) if product.dim() == 3 else product.masked_fill(~real, torch.nan))
    return torch.stack(layers, dim=1)


def _patches(model: Any, donor: Sequences, names: Sequence[str], components: Components) -> list[Intervention]:
    """Each component by itself, in the order of the estimates."""
    values = cached(model, donor.to(model.cfg.device), names)
    if components == "heads":
        heads = range(model.cfg.n_heads)
        return [
            replace_head(layer, head, values[name][:, :, head]) for layer, name in enumerate(names) for head in heads
        ]
    at = torch.eye(donor.tokens.shape[1], dtype=torch.bool)  # [position, pos]
    return [
        replace_activation(name, values[name], only, f"L{layer} at {place}")
        for layer, name in enumerate(names)
        for place, only in enumerate(at)
    ]


def _axes(components: Components) -> tuple[str, str]:
    return ("layer", "head" if components == "heads" else "position")


def _patching_quantities(
    estimates: np.ndarray, effects: np.ndarray | None, metrics: tuple[np.ndarray, np.ndarray], components: Components,
    direction: Direction, unit: str,
) -> dict[str, Quantity]:  # fmt: skip
    axes = _axes(components)
    donor = "corrupted" if direction == "noising" else "clean"
    about = (
        f"Σ (a' − a) · ∂metric/∂a, gradient and a of the {_patched(direction)} run, a' of the {donor} one, "
        f"a being {_WHAT[components]}"
    )
    patched = f"change of the {_patched(direction)} run's metric when {_WHAT[components]} becomes the {donor} run's"
    found = {
        "estimate": Quantity(_mean(estimates), axes, unit, f"{about}, mean over prompts"),
        "prompt_estimate": Quantity(estimates, ("prompt", *axes), unit, f"{about}, of each prompt"),
        "clean_metric": Quantity(metrics[0], ("prompt",), unit, "metric of the clean prompt"),
        "corrupted_metric": Quantity(metrics[1], ("prompt",), unit, "metric of the corrupted prompt"),
    }
    if effects is None:
        return found
    estimate, effect = _mean(estimates), _mean(effects)
    known = np.isfinite(effect)
    x, y = effect[known], estimate[known]
    varies = bool(np.ptp(x) > 0 and np.ptp(y) > 0)
    r = float(np.corrcoef(x, y)[0, 1]) if varies else float("nan")
    over, unless = "over components, of means over prompts", "; NaN where one of them does not vary"
    return found | {
        "effect": Quantity(effect, axes, unit, f"{patched}, mean over prompts"),
        "prompt_effect": Quantity(effects, ("prompt", *axes), unit, f"{patched}, of each prompt"),
        "error": Quantity(estimate - effect, axes, unit, "estimate − effect"),
        "correlation": Quantity(np.array(r), (), "", f"Pearson's r of estimate and effect {over}{unless}"),
        "rank_correlation": Quantity(
            np.array(spearman(x, y)), (), "", f"Spearman's ρ of estimate and effect {over}{unless}"
        ),
        "mean_absolute_error": Quantity(np.abs(y - x).mean(), (), unit, f"mean |estimate − effect| {over}"),
    }


def _dropped_quantities(
    dropped: np.ndarray, estimates: np.ndarray, effects: np.ndarray | None, axes: tuple[str, str], unit: str
) -> dict[str, Quantity]:
    sizes = _mean(dropped)
    about = "mean over the layers that are cut off, and over prompts, of |Σ (a' − a) · ∂metric/∂a|"
    found = {"dropped_size": Quantity(sizes, axes, unit, about)}
    if effects is None:
        return found
    true, plain = _mean(np.abs(effects)), _mean(np.abs(estimates))
    known = np.isfinite(true)
    for name, values in (("size_correlation", plain), ("dropped_size_correlation", sizes)):
        rho = np.array(spearman(true[known], values[known]))
        what = "mean |estimate|" if name == "size_correlation" else "dropped_size"
        found[name] = Quantity(
            rho, (), "", f"Spearman's ρ of {what} and mean |effect| over components; NaN where one does not vary"
        )
    return found


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the prompts that have a value; NaN where none has."""
    n = np.isfinite(values).sum(axis=0)
    return np.nansum(values, axis=0) / np.where(n > 0, n, np.nan)
