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

READING = "Loading weights"  # what is reported meanwhile
Op = Callable[[Tensor, TransformerConfig], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class WeightRule:
    """One line of a family's table. ``{layer}`` in ``source`` matches a number, which ``target`` repeats.

    ``op`` takes the source tensor and the configuration and returns views, one for each target. With ``{expert}`` in
    ``source``, they are that expert's rows of targets [n_experts, …]; a second rule may fill the same targets from
    tensors that hold all experts.
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


def positions_after(n_skipped: int) -> Op:
    """[n_skipped + positions, d_model] → [n_ctx, d_model], for tables that begin with rows for pads"""
    return lambda tensor, cfg: tensor[n_skipped : n_skipped + cfg.n_ctx]


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


def split_fused_heads_of_linear(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """Linear [3 · head · d_head, d_model] → q, k and v, each [head, d_model, d_head]"""
    return split_fused_heads(tensor.T, cfg)


def split_fused_heads_bias(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """[3 · head · d_head] → q, k and v, each [head, d_head]"""
    return tensor.unflatten(0, (3, -1, cfg.d_head)).unbind()


def split_grouped_heads(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """Linear [group · (queries + key + value) · d_head, d_model] → q, k and v, each [head, d_model, d_head]

    A group is a key/value head behind the query heads that read it, often a single one.
    """
    groups = tensor.unflatten(0, (cfg.n_key_value_heads, -1, cfg.d_head)).transpose(2, 3)
    return groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]


def split_grouped_heads_bias(tensor: Tensor, cfg: TransformerConfig) -> tuple[Tensor, ...]:
    """[group · (queries + key + value) · d_head] → q, k and v, each [head, d_head]"""
    groups = tensor.unflatten(0, (cfg.n_key_value_heads, -1, cfg.d_head))
    return groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]


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
    [head, d_model, d_head], which the model multiplies by without rearranging it. Experts that come one by one are
    stacked into contiguous targets.

    Args:
        source: tensors by name; read lazily, each at most once.
        expected: our parameter names and their shapes.
        prefix: what may precede every source name.
        harmless: name patterns of tensors that hold no parameter; ``{rest}`` stands for any end of a name.
        described_as: the source's name in error messages.

    Raises:
        CorruptWeightsError: a tensor without a place, a parameter without a tensor, or a shape or type that is wrong.
    """
    plan = _plan(source, rules, expected, prefix, harmless, described_as)
    state: dict[str, Tensor] = {}
    for done, (name, (rule, targets, expert)) in enumerate(plan.items()):
        if progress is not None:
            progress(READING, done, len(plan))
        shapes = {target: expected[target] for target in targets}
        _fill(state, shapes, source, name, rule, expert, cfg, described_as)
    return state


def _fill(
    state: dict[str, Tensor],
    shapes: Mapping[str, torch.Size],
    source: Mapping[str, Tensor],
    name: str,
    rule: WeightRule,
    expert: int | None,
    cfg: TransformerConfig,
    described_as: str,
) -> None:
    """Reads and converts one tensor. It is released on return, before the next is read."""
    tensor = source[name]
    if not tensor.is_floating_point() or tensor.is_meta:
        state_of = "is not in memory" if tensor.is_meta else f"is {tensor.dtype}, not floating point"
        raise CorruptWeightsError(f"{described_as}: {name} {state_of}; load unquantised weights")
    try:
        results = rule.op(tensor, cfg)
    except (RuntimeError, IndexError):  # torch's own words name sizes but no tensor
        raise CorruptWeightsError(_wrong_shape(described_as, name, tensor)) from None
    for (target, shape), result in zip(
        shapes.items(), (results,) if isinstance(results, Tensor) else results, strict=True
    ):
        if result.shape != (shape if expert is None else shape[1:]):
            raise CorruptWeightsError(_wrong_shape(described_as, name, tensor))
        if expert is None:
            state[target] = result.detach().to(device=cfg.device, dtype=cfg.dtype, copy=True)
            continue
        if target not in state:
            state[target] = torch.empty(shape, device=cfg.device, dtype=cfg.dtype)
        state[target][expert] = result.detach()


def differing(source: Mapping[str, Tensor], pair: tuple[str, str], prefix: str) -> list[str]:
    """The source's names of two tensors where it holds both and they are not equal; else nothing."""
    found = [name for wanted in pair for name in source if name.removeprefix(prefix) == wanted]
    return found if len(found) == 2 and not torch.equal(source[found[0]], source[found[1]]) else []


def refuse_differing(source: Mapping[str, Tensor], repeats: Mapping[str, str], prefix: str, described_as: str) -> None:
    """Checks that tensors which repeat others are equal to them, where the source holds both.

    Args:
        repeats: names of such tensors -> the names of those that they repeat.

    Raises:
        CorruptWeightsError: they differ, so the configuration or the weights are wrong.
    """
    for pair in repeats.items():
        if found := differing(source, pair, prefix):
            raise CorruptWeightsError(
                f"{described_as}: the configuration ties {found[0]} to {found[1]}, but they differ; "
                "set tie_word_embeddings to false in config.json, or remove the one that does not belong"
            )


def refuse_other_tables(
    source: Mapping[str, Tensor], computed: Mapping[str, Callable[[torch.Size], Tensor]], prefix: str, described_as: str
) -> None:
    """Checks that what the model computes itself is what the source holds.

    Raises:
        CorruptWeightsError: the source holds another table, which the model would not use.
    """
    for name in source:
        if (compute := computed.get(name.removeprefix(prefix))) is None:
            continue
        table = source[name]
        if table.dim() != 2 or not torch.allclose(
            table.float(), compute(table.shape), atol=2e-2 if table.itemsize < 4 else 1e-5
        ):
            raise CorruptWeightsError(
                f"{described_as}: {name} is not the table that this architecture computes: it was trained, or is "
                "damaged, and would not be used"
            )


def _plan(
    names: Mapping[str, Tensor],
    rules: Sequence[WeightRule],
    expected: Mapping[str, torch.Size],
    prefix: str,
    harmless: Sequence[str],
    described_as: str,
) -> dict[str, tuple[WeightRule, tuple[str, ...], int | None]]:
    """Which rule each source tensor falls under, and what it fills, of one expert or whole, before anything is read."""
    patterns = [(_pattern(rule.source), rule) for rule in rules]
    ignored = [_pattern(pattern) for pattern in harmless]
    plan: dict[str, tuple[WeightRule, tuple[str, ...], int | None]] = {}
    filled: dict[str, dict[int | None, str]] = {}  # target -> expert, or None for the whole -> source
    for name in names:
        bare = name.removeprefix(prefix)
        if any(pattern.fullmatch(bare) for pattern in ignored):
            continue
        match, rule = next(((m, rule) for pattern, rule in patterns if (m := pattern.fullmatch(bare))), (None, None))
        numbers = {} if match is None else match.groupdict()
        targets = () if rule is None else rule.targets(numbers.get("layer"))
        expert = int(numbers["expert"]) if "expert" in numbers else None
        if rule is None or not all(_has_place(target, expert, expected) for target in targets):
            raise CorruptWeightsError(
                f"{described_as}: the tensor {name} has no place in a model of this configuration; "
                "config.json and weights do not belong together"
            )
        for target in targets:
            parts = filled.setdefault(target, {})
            if taken := [parts[part] for part in parts if expert is None or part in (expert, None)]:
                raise CorruptWeightsError(f"{described_as}: {name} and {taken[0]} are the same parameter; remove one")
            parts[expert] = name
        plan[name] = rule, targets, expert
    if missing := [
        (target, part) for target in expected for part in _missing_parts(filled.get(target), expected[target])
    ]:
        (target, part), absent = missing[0], len({target for target, _ in missing})
        raise CorruptWeightsError(
            f"{described_as}: {absent} of {len(expected)} parameters have no tensor, "
            f"among them {target} ({_source_of(target, part, rules)}); the weights are incomplete"
        )
    return plan


def _has_place(target: str, expert: int | None, expected: Mapping[str, torch.Size]) -> bool:
    return target in expected and (expert is None or expert < expected[target][0])


def _missing_parts(parts: Mapping[int | None, str] | None, shape: torch.Size) -> list[int | None]:
    """What of a target no tensor fills: the whole (None), or the experts that the others lack."""
    if not parts:
        return [None]
    return [] if None in parts else [expert for expert in range(shape[0]) if expert not in parts]


def _pattern(source: str) -> re.Pattern[str]:
    pattern = re.escape(source)
    for number in ("layer", "expert"):
        pattern = pattern.replace(re.escape(f"{{{number}}}"), rf"(?P<{number}>0|[1-9]\d*)")
    return re.compile(pattern.replace(re.escape("{rest}"), ".+"))


def _source_of(target: str, expert: int | None, rules: Sequence[WeightRule]) -> str:
    """The source name that would have filled a target, or an expert's part of it."""
    for rule in rules:
        for name in (rule.target,) if isinstance(rule.target, str) else rule.target:
            match = _pattern(name).fullmatch(target)
            if match and (expert is None or "{expert}" in rule.source):
                return rule.source.format(**match.groupdict(), expert=expert or 0)
    raise KeyError(f"no rule fills {target}")


def _wrong_shape(described_as: str, name: str, tensor: Tensor) -> str:
    return (
        f"{described_as}: {name} has shape {list(tensor.shape)}, which does not fit the configuration; "
        "config.json and weights do not belong together"
    )
