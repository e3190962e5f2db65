"""Prompts with a right next token: what a task is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from workbench.analyses.interventions import metrics
from workbench.analyses.interventions.metrics import Metric
from workbench.analyses.running import Sequences


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts, the token that should follow each, and what it is compared with. All tensors are on the CPU.

    Args:
        tokens: int64 [prompt, pos]; real tokens first, then pads (id 0).
        real: bool [prompt, pos].
        target: int64 [prompt], the right next token.
        foil: int64 [prompt], the wrong one that it is held against.
        corrupted: int64 [prompt, pos], prompts of the same lengths that do not call for the target.
        name: of the task, in a word or two.
        description: what the prompts are, in one line of words.

    Raises:
        ValueError: shapes that do not fit together, a prompt without a token or with pads before tokens, a foil that
            is the target, or a corrupted prompt that is the prompt itself.
    """

    tokens: Tensor
    real: Tensor
    target: Tensor
    foil: Tensor | None
    corrupted: Tensor | None
    name: str
    description: str

    def __post_init__(self) -> None:
        shape = tuple(self.tokens.shape)
        if len(shape) != 2 or not len(self.tokens):
            raise ValueError(f"tokens must be [prompt, pos] and hold a prompt, got shape {shape}")
        for field, expected in (("real", shape), ("target", shape[:1]), ("foil", shape[:1]), ("corrupted", shape)):
            value = getattr(self, field)
            if value is not None and tuple(value.shape) != expected:
                raise ValueError(f"{field} must have the shape {expected} to fit the tokens, got {tuple(value.shape)}")
        if not bool(self.real[:, 0].all()) or bool((self.real[:, 1:] & ~self.real[:, :-1]).any()):
            raise ValueError("real must mark the first tokens of each prompt, at least one: pads come after the text")
        if self.foil is not None:
            _refuse(self.foil == self.target, "the foil is the target")
        if self.corrupted is not None:
            _refuse(~((self.corrupted != self.tokens) & self.real).any(dim=1), "the corrupted prompt is the prompt")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def sequences(self) -> Sequences:
        """The prompts as models read them."""
        return Sequences(self.tokens, self.real, self.description)

    @property
    def rows(self) -> Tensor:
        """The position whose logits give the next token, int64 [prompt, 1]."""
        return metrics.last_rows(self.real)

    def logit_difference(self) -> Metric:
        """Logit of the target less that of the foil. Raises ValueError for prompts without foils."""
        if self.foil is None:
            raise ValueError(
                f"{self.name} has no foils, so there is no logit to subtract; give each prompt a foil, "
                "or take log_probability()"
            )
        return metrics.logit_difference(self.target, self.foil, self.rows)

    def log_probability(self) -> Metric:
        """Log-probability of the target, in nats."""
        return metrics.log_probability(self.target, self.rows)

    def subset(self, indices: Sequence[int] | Tensor) -> Self:
        """Some of the prompts, in that order, which the description counts.

        Raises:
            ValueError: none of them, or one that is not there.
        """
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        if not chosen.numel() or int(chosen.min()) < 0 or int(chosen.max()) >= len(self):
            raise ValueError(f"indices must be some of 0 to {len(self) - 1}, got {chosen.tolist()}")
        per_prompt = {field: getattr(self, field) for field in self._per_prompt()}
        kept = {field: value[chosen] for field, value in per_prompt.items() if value is not None}
        counted = f"; {len(chosen)} of them" if len(chosen) != len(self) else ""
        return replace(self, **kept, description=self.description + counted)

    def _per_prompt(self) -> tuple[str, ...]:
        """Fields with one entry for each prompt."""
        return ("tokens", "real", "target", "foil", "corrupted")

    def halves(self, seed: int = 0) -> tuple[Self, Self]:
        """Two random halves that share no prompt; the first has one more where their number is odd.

        Raises:
            ValueError: a single prompt.
        """
        if len(self) < 2:
            raise ValueError(f"{self.name} has one prompt, which has no two halves; take more prompts")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        middle = (len(self) + 1) // 2
        return self.subset(order[:middle].sort().values), self.subset(order[middle:].sort().values)


@dataclass(frozen=True, eq=False)
class YearPrompts(PromptSet):
    """Prompts that call for a year later than the one they name (Hanna et al. 2023).

    Args:
        years: int64 [year], the tokens of the numbers 0 to 99, or of the digits 0 to 9, that end a year.
        start: int64 [prompt], the number that ends the first year.
    """

    years: Tensor
    start: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        if tuple(self.start.shape) != (len(self),) or not 0 <= int(self.start.min()) <= int(self.start.max()) < len(
            self.years
        ):
            raise ValueError("start must hold one number for each prompt, an index into years")

    def probability_difference(self) -> Metric:
        """Σ p of the later years less Σ p of the others, the first year among them; from −1 to 1."""
        years, rows = self.years, self.rows
        sign = torch.where(torch.arange(len(years)) > self.start[:, None], 1.0, -1.0)  # [prompt, year]

        def score(logits: Tensor) -> Tensor:
            at = logits[:, 0].softmax(dim=-1)[:, years.to(logits.device)]
            return (at * sign.to(at)).sum(dim=1)

        return Metric("probability difference", "probability", rows, score)

    def _per_prompt(self) -> tuple[str, ...]:
        return (*super()._per_prompt(), "start")


def check_prompts(prompts: Any) -> None:
    """Refuses what holds no answers, such as texts. Raises ValueError."""
    if not isinstance(prompts, PromptSet):
        raise ValueError(
            f"prompts must be a PromptSet, got {type(prompts).__name__}; make one with read_prompts, or take a task "
            "such as factual_recall(model)"
        )


def _refuse(wrong: Tensor, what: str) -> None:
    """Names the first prompt that is wrong; bool [prompt]."""
    if bool(wrong.any()):
        raise ValueError(f"prompt {int(wrong.nonzero()[0])}: {what}; it could not tell anything")
