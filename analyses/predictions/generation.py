"""Continuing a text, and what every step of it predicts and looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.labels import GENERATION_SCORES
from workbench.analyses.options import check_seed, check_whole, is_number, is_whole
from workbench.analyses.predictions.steps import OF_HEADS, read_again, step_quantities
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model, emits_statistics, is_bidirectional
from workbench.analyses.token_texts import token_texts
from workbench.generation import Sampling

MOST_TEMPERATURE = 100.0  # of more, all tokens are as likely as each other


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Generation(Result):
    """A continuation of one text: what each step predicted, and where each head looked in it.

    Step s has read the prompt and the s tokens generated before; its query is the last of these, at position
    ``query(s)``, and what it predicts is the token at the position after it. ``surprise``, ``prediction_entropy``,
    ``rank`` and ``drawn_probability`` are [step], ``likely_token``, ``likely_probability`` and
    ``likely_drawn_probability`` [step, likely], the names in GENERATION_SCORES [step, layer, head]. ``largest_weights``
    [step, layer, head, place] are the largest weights of every row, ``largest_keys`` their positions. ``token_id`` and
    ``coordinates["position"]`` hold the whole text, prompt first.
    """

    kind: ClassVar[str] = "generation"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("steps", "prediction", "map", "head")
    frame_axes: ClassVar[tuple[str, ...]] = ("step", "layer", "head")
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {"steps": ("step",), "predictions": ("step", "likely")}

    @property
    def n_steps(self) -> int:
        """How many tokens were generated."""
        return len(self["surprise"])

    @property
    def text(self) -> str:
        """What was generated."""
        return "".join(str(token) for token in self["token"])

    def query(self, step: int) -> int:
        """Position of the token that a step reads last."""
        return int(self.settings["n_prompt"]) - 1 + step

    def row(self, step: int, layer: int, head: int) -> tuple[np.ndarray, float]:
        """Where a head looks in a step: weights [position] of the whole text, and what is on keys beyond the largest
        that are kept, whose weights stand as 0.

        Raises:
            ValueError: there is no such step or head.
        """
        step = self._step(step)
        self._check_head(layer, head)
        weights = np.zeros(len(self["token_id"]))
        keys, largest = self["largest_keys"][step, layer, head], self["largest_weights"][step, layer, head]
        weights[keys[keys >= 0]] = largest[keys >= 0]
        on_tokens = self["prompt_mass"][step, layer, head] + self["generated_mass"][step, layer, head]
        return weights, max(float(on_tokens - weights.sum()), 0.0)

    def summary(self) -> str:
        surprise, entropy = self["surprise"], self["prediction_entropy"]
        last, generated = self.n_steps - 1, self["generated_mass"]
        lines = [
            self.provenance.sentence(),
            f"Generated {self._how_in_words()}: {self.text!r}.",
            f"Surprise {surprise.mean():z.3f} nats per token, entropy of the prediction {entropy.mean():z.3f} (means); "
            f"{(self['rank'] == 1).sum()} of {self.n_steps} tokens were the most likely.",
        ]
        if last:
            layer, head = np.unravel_index(generated[last].argmax(), generated[last].shape)
            lines.append(
                f"In the last step {generated[last].mean():.3f} of the weight is on generated tokens (mean over "
                f"heads), most in L{layer}H{head}: {generated[last, layer, head]:.3f}."
            )
        lines.append(
            f"On the first token {self['first_token'].mean():.3f}, on the query itself "
            f"{self['self_weight'].mean():.3f} (means over steps and heads)."
        )
        return "\n".join(lines)

    def _how_in_words(self) -> str:
        settings = self.settings
        how = "greedily" if not settings["temperature"] else (
            f"at temperature {settings['temperature']:g} with seed {settings['seed']}"
        )  # fmt: skip
        ended = ", then the text ended" if settings["ended"] else ""
        return f"{self.n_steps} token{'s' if self.n_steps > 1 else ''} {how}{ended}"

    def _step(self, step: int) -> int:
        if not is_whole(step) or not -self.n_steps <= step < self.n_steps:
            raise ValueError(f"step must be between 0 and {self.n_steps - 1}, or negative from the end, got {step!r}")
        return step % self.n_steps

    def _check_head(self, layer: int, head: int) -> None:
        for name, value, size in zip(("layer", "head"), (layer, head), self["entropy"].shape[1:], strict=True):
            if not is_whole(value) or not 0 <= value < size:
                raise ValueError(f"{name} must be between 0 and {size - 1}, got {value!r}")

    def _step_labels(self) -> list[str]:
        from workbench.analyses import figures

        return figures.token_labels([str(token) for token in self["token"]], 0)

    def _draw_steps(self, *, step: int | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        series = {
            "surprise of the generated token": self["surprise"],
            "entropy of the prediction": self["prediction_entropy"],
        }
        figure = figures.step_curves(
            series,
            self._step_labels(),
            y_label="nats",
            marked=None if step is None else self._step(step),
            theme=theme,
        )
        note = f"{self.define('surprise', 'prediction_entropy')} {self._generated_in_words()}"
        return Drawing(figure, "How sure every step was", note)

    def _draw_prediction(self, *, step: int = 0, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        step = self._step(step)
        series = {"probability": self["likely_probability"][step]}
        if self.settings["temperature"] not in (0, 1):
            series[f"drawn at temperature {self.settings['temperature']:g}"] = self["likely_drawn_probability"][step]
        tokens = [str(token) for token in self["likely_token"][step]]
        chosen = int(np.flatnonzero(self["likely_token_id"][step] == self["token_id"][self.query(step) + 1])[0])
        return Drawing(
            figures.paired_bars(series, tokens, label="probability", marked=chosen, theme=theme),
            f"Prediction of step {step}",
            f"{self.define('likely_probability')} The arrow marks the token that was generated. "
            f"{self._generated_in_words()}",
        )

    def _draw_map(
        self,
        *,
        step: int = 0,
        score: str = "prompt_mass",
        chosen: tuple[int, int] | None = None,
        theme: str = "light",
    ) -> Drawing:
        from workbench.analyses import figures

        step = self._step(step)
        values = self._score(score)
        # One scale for all steps, so that colours can be compared from step to step.
        unit = self.quantities[score].unit
        upper = 1.0 if unit == "share of 1" else float(np.nanmax(values, initial=0.0)) or 1.0
        label = figures.axis_label(score, unit)
        figure = figures.head_map(values[step], label=label, upper=upper, chosen=chosen, theme=theme)
        title = f"{GENERATION_SCORES[score]} of every head in step {step}"
        return Drawing(figure, title, f"{self.define(score)} {self._query_in_words(step)}{figures.framed(chosen)}")

    def _draw_head(self, *, layer: int = 0, head: int = 0, step: int | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        self._check_head(layer, head)
        names = [name for name in GENERATION_SCORES if name in self and self.quantities[name].unit == "share of 1"]
        figure = figures.step_map(
            np.stack([self[name][:, layer, head] for name in names]),
            [GENERATION_SCORES[name].lower() for name in names],
            self._step_labels(),
            label="share of the weight",
            marked=None if step is None else self._step(step),
            theme=theme,
        )
        title = f"Where L{layer}H{head} looks in every step"
        return Drawing(figure, title, f"{self.define(*names)} {self._generated_in_words()}")

    def _score(self, name: str) -> np.ndarray:
        if name not in GENERATION_SCORES:
            raise ValueError(f"score must be one of {', '.join(GENERATION_SCORES)}, got {name!r}")
        if name not in self:
            raise ValueError(f"this model has no {name}: {OF_HEADS[name][1]}")
        return self[name]

    def _query_in_words(self, step: int) -> str:
        from workbench.analyses import figures

        place = self.query(step)
        query, generated = (str(self.coordinates["position"][at]) for at in (place, place + 1))
        return (
            f"Step {step} reads “{figures.show_token(query)}” at position {place} last, and generates "
            f"“{figures.show_token(generated)}”."
        )

    def _generated_in_words(self) -> str:
        return f"Generated {self._how_in_words()}."


@torch.no_grad()
def generation_statistics(
    model: Any,
    tokens: Input,
    *,
    n_tokens: int = 24,
    temperature: float = 0.0,
    seed: int = 0,
    n_likely: int = 10,
    n_keys: int = 32,
    stop_at_eos: bool = True,
    progress: Progress = silent,
) -> Generation:
    """Continues a text on a key/value cache, then reads all of it once for what every step predicted and looked at.

    In a causal model a token's attention and prediction do not depend on what follows it, so the rows of one pass over
    the whole text are those of the steps (up to rounding), and statistics cost O(n) memory. That needs positions that
    later tokens do not change; where a model's rotations depend on the length, it is refused.

    Args:
        tokens: one text, or token ids [pos] or [1, pos]: the prompt.
        n_tokens: so many are generated; fewer where the model ends the text before.
        temperature: 0 takes the most likely token; above, logits are divided by it and a token is drawn.
        seed: of the draws.
        n_likely: how many next tokens of each step are kept; the last gives way to the generated one where that is not
            among them.
        n_keys: so many of the largest weights of every row are kept with their keys.
        stop_at_eos: whether generation ends with the tokenizer's end-of-sequence token.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: several texts, a model that cannot continue one, more tokens than its context leaves room for, or
            an option out of its range.
    """
    _check_generates(model)
    check_whole(n_tokens=n_tokens, n_likely=n_likely, n_keys=n_keys)
    check_seed(seed)
    if not is_number(temperature) or not 0 <= temperature <= MOST_TEMPERATURE:
        raise ValueError(
            f"temperature must be 0 (the most likely token) or a number up to {MOST_TEMPERATURE:g}, got {temperature!r}"
        )
    sequences = Sequences.read(model, tokens)
    if len(sequences) > 1:
        raise ValueError(f"generation_statistics continues one text, got {len(sequences)}; index the batch first")
    n_prompt = sequences.tokens.shape[1]
    _check_length(model, n_prompt, n_tokens)
    sampling = Sampling(temperature=float(temperature), seed=seed if temperature else None)
    ids = _continued(model, sequences.tokens[0], n_tokens, sampling, stop_at_eos, progress)
    of_heads, logits = read_again(model, ids, n_prompt, n_keys)
    progress(1.0, f"attention of {len(logits)} steps")
    tokenizer = getattr(model, "tokenizer", None)
    words = f"{len(logits)} tokens generated after {sequences.description}"
    return Generation(
        quantities=step_quantities(logits, ids[n_prompt:].to(logits.device), sampling, n_likely, tokenizer)
        | of_heads
        | {"token_id": Quantity(ids.cpu().numpy(), ("position",), "", "ids of the prompt and what was generated")},
        provenance=provenance(model, replace(sequences, description=words)),
        settings={
            "n_prompt": n_prompt, "n_tokens": n_tokens, "temperature": temperature, "seed": seed,
            "ended": len(logits) < n_tokens,
        },
        coordinates={"position": token_texts(tokenizer, ids.tolist())},
    )  # fmt: skip


def _check_generates(model: Any) -> None:
    check_model(model)
    if is_bidirectional(model):
        raise ValueError(
            f"{getattr(model.cfg, 'model_name', 'this model')} is an encoder: it reads a text from both sides and "
            "cannot continue one; generation needs a causal model, such as gpt2 or the demo model"
        )
    check_model(model, predicts=True)
    if not emits_statistics(model):
        raise ValueError("generation_statistics needs a HookedTransformer; load it with from_pretrained")


def _check_length(model: Any, n_prompt: int, n_tokens: int) -> None:
    cfg, scaling = model.cfg, model.cfg.rope_scaling
    if n_prompt + n_tokens > cfg.n_ctx:
        room = cfg.n_ctx - n_prompt
        raise ValueError(
            f"n_tokens must be at most {room}, which is what the context of {cfg.n_ctx:,} leaves after a prompt of "
            f"{n_prompt:,} tokens, got {n_tokens}"
            if room > 0
            else f"the prompt of {n_prompt:,} tokens fills the context of {cfg.n_ctx:,}, which leaves no n_tokens to "
            "generate; shorten it"
        )
    if scaling is not None and scaling.changes_between(n_prompt, n_prompt + n_tokens - 1):
        raise ValueError(
            f"{cfg.model_name} rotates queries and keys by the length of the text, which changes between {n_prompt:,} "
            f"and {n_prompt + n_tokens - 1:,} tokens, so that one pass does not show what each step saw; shorten the "
            "prompt, or lower n_tokens"
        )


def _continued(
    model: Any, prompt: Tensor, n_tokens: int, sampling: Sampling, stop_at_eos: bool, progress: Progress
) -> Tensor:
    """The prompt [pos] and what is generated after it, [pos + step]."""
    n_done = 0

    def tell(x: Tensor, hook: Any) -> None:
        nonlocal n_done
        progress(n_done / (n_tokens + 1), f"token {n_done + 1} of {n_tokens}")
        n_done += 1

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", tell)]):
        return model.generate(
            prompt[None], n_tokens, temperature=sampling.temperature, seed=sampling.seed, stop_at_eos=stop_at_eos
        )[0]
