"""From tensors under someone else's names to a state dict under ours, by a table in which nothing may be left over."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.config import TransformerConfig
from workbench.errors import CorruptWeightsError
from workbench.loading.progress import Progress

Op = Callable[[Tensor, TransformerConfig], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class WeightRule:
    """One line of a family's table. ``{layer}`` in ``source`` matches a number, which ``target`` repeats.

    ``op`` takes the source tensor and the configuration and returns views, one for each target.
    """

    source: str
    target: str | tuple[str, ...]
    op: Op

    def targets(self, layer: str | None) -> tuple[str, ...]:
        """The names under which the results go into the state dict."""
        names = (self.target,) if isinstance(self.target, str) else self.target
        return tuple(name.format(layer=layer) for name in names)


# Operations. "Linear" is torch's layout [out, in].


def keep(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """As it is."""
    return tensor


def transpose(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[out, in] → [in, out]"""
    return tensor.T


def first_positions(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[positions, d_model] → [n_ctx, d_model]"""
    return tensor[: cfg.n_ctx]


def split_output_heads(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """Linear [head · d_head, d_model] → [head, d_model, d_head]"""
    return tensor.unflatten(0, (-1, cfg.d_head)).transpose(1, 2)


def split_heads_bias(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[head · d_head] → [head, d_head]"""
    return tensor.unflatten(0, (-1, cfg.d_head))


def split_input_heads(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """[head · d_head, d_model] → [head, d_head, d_model]"""
    return tensor.unflatten(0, (-1, cfg.d_head))


def split_input_heads_of_linear(tensor: Tensor, cfg: TransformerConfig) -> Tensor:
    """Linear [d_model, head · d_head] → [head, d_head, d_model]"""
    return split_input_heads(tensor.T, cfg)


def split_fused_heads(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """[d_model, 3 · head · d_head] → q, k and v, each [head, d_model, d_head]"""
    return tensor.unflatten(1, (3, -1, cfg.d_head)).permute(1, 2, 0, 3).unbind()


def split_fused_heads_bias(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """[3 · head · d_head] → q, k and v, each [head, d_head]"""
    return tensor.unflatten(0, (3, -1, cfg.d_head)).unbind()


def convert_weights(
    source: Mapping[str, Tensor],
    rules: Sequence[WeightRule],
    cfg: TransformerConfig,
    expected: Mapping[str, torch.Size],
    *,
    prefix: str = "",
    harmless: Sequence[str] = (),
    described_as: str = "the checkpoint",
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """A state dict in ``cfg.dtype`` on ``cfg.device`` whose tensors own their memory.

    Tensors are read, converted and released one by one, so that beside the result only one of them is in memory.
    Each keeps the order in which its source lay in memory: a projection [head · d_head, d_model] becomes a strided
    [head, d_model, d_head], which the model multiplies by without rearranging it.

    Args:
        source: tensors by name; read lazily, each at most once.
        expected: our parameter names and their shapes.
        prefix: what may precede every source name.
        harmless: name patterns of tensors that hold no parameter.
        described_as: the source's name in error messages.

    Raises:
        CorruptWeightsError: a tensor without a place, a parameter without a tensor, or a shape or type that is wrong.
    """
    plan = _plan(source, rules, expected, prefix, harmless, described_as)
    state: dict[str, Tensor] = {}
    for done, (name, (rule, targets)) in enumerate(plan.items()):
        if progress is not None:
            progress("Loading weights", done, len(plan))
        tensor = source[name]
        if not tensor.is_floating_point() or tensor.is_meta:
            state_of = "is not in memory" if tensor.is_meta else f"is {tensor.dtype}, not floating point"
            raise CorruptWeightsError(f"{described_as}: {name} {state_of}; load unquantised weights")
        try:
            results = rule.op(tensor, cfg)
        except (RuntimeError, IndexError):  # torch's own words name sizes but no tensor
            raise CorruptWeightsError(_wrong_shape(described_as, name, tensor)) from None
        for target, result in zip(targets, (results,) if isinstance(results, Tensor) else results, strict=True):
            if result.shape != expected[target]:
                raise CorruptWeightsError(_wrong_shape(described_as, name, tensor))
            state[target] = result.detach().to(device=cfg.device, dtype=cfg.dtype, copy=True)
    return state


def refuse_untied(source: Mapping[str, Tensor], tied: tuple[str, str], prefix: str, described_as: str) -> None:
    """Checks that the two embeddings of a tied model are equal where the source holds both.

    Raises:
        CorruptWeightsError: they differ, so the configuration or the weights are wrong.
    """
    output, input_ = ([name for name in source if name.removeprefix(prefix) == wanted] for wanted in tied)
    if output and input_ and not torch.equal(source[output[0]], source[input_[0]]):
        raise CorruptWeightsError(
            f"{described_as}: the configuration ties {output[0]} to {input_[0]}, but they differ; "
            "set tie_word_embeddings to false in config.json, or remove the one that does not belong"
        )


def _plan(
    names: Mapping[str, Tensor],
    rules: Sequence[WeightRule],
    expected: Mapping[str, torch.Size],
    prefix: str,
    harmless: Sequence[str],
    described_as: str,
) -> dict[str, tuple[WeightRule, tuple[str, ...]]]:
    """Which rule each source tensor falls under, and what it fills, before anything is read."""
    patterns = [(_pattern(rule.source), rule) for rule in rules]
    ignored = [_pattern(pattern) for pattern in harmless]
    plan: dict[str, tuple[WeightRule, tuple[str, ...]]] = {}
    filled: dict[str, str] = {}  # target -> source
    for name in names:
        bare = name.removeprefix(prefix)
        if any(pattern.fullmatch(bare) for pattern in ignored):
            continue
        match, rule = next(((m, rule) for pattern, rule in patterns if (m := pattern.fullmatch(bare))), (None, None))
        targets = () if rule is None or match is None else rule.targets(match.groupdict().get("layer"))
        if rule is None or not set(targets) <= set(expected):
            raise CorruptWeightsError(
                f"{described_as}: the tensor {name} has no place in a model of this configuration; "
                "config.json and weights do not belong together"
            )
        if taken := [filled[target] for target in targets if target in filled]:
            raise CorruptWeightsError(f"{described_as}: {name} and {taken[0]} are the same parameter; remove one")
        filled |= dict.fromkeys(targets, name)
        plan[name] = rule, targets
    if missing := [target for target in expected if target not in filled]:
        raise CorruptWeightsError(
            f"{described_as}: {len(missing)} of {len(expected)} parameters have no tensor, "
            f"among them {missing[0]} ({_source_of(missing[0], rules)}); the weights are incomplete"
        )
    return plan


def _pattern(source: str) -> re.Pattern[str]:
    return re.compile(re.escape(source).replace(re.escape("{layer}"), r"(?P<layer>0|[1-9]\d*)"))


def _source_of(target: str, rules: Sequence[WeightRule]) -> str:
    """The source name that would have filled a target."""
    for rule in rules:
        for name in (rule.target,) if isinstance(rule.target, str) else rule.target:
            if match := _pattern(name).fullmatch(target):
                return rule.source.format(**match.groupdict())
    raise KeyError(f"no rule fills {target}")


def _wrong_shape(described_as: str, name: str, tensor: Tensor) -> str:
    return (
        f"{described_as}: {name} has shape {list(tensor.shape)}, which does not fit the configuration; "
        "config.json and weights do not belong together"
    )
