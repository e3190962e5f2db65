"""Continuing a text, and what every step of it predicts and looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import earlier_occurrences
from workbench.analyses.labels import GENERATION_SCORES
from workbench.analyses.options import check_seed, check_whole, is_number, is_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, attention_statistics, provenance, silent, unembedded
from workbench.analyses.support import check_model, emits_statistics, is_bidirectional
from workbench.analyses.token_texts import token_texts
from workbench.generation import Sampling
from workbench.kernels import StatisticsRequest, match_labels

MOST_TEMPERATURE = 100.0  # of more, all tokens are as likely as each other

# Name → (unit, definition) of what a head does in a step; "the query" is the token that the step reads last.
_OF_HEADS = {
    "first_token": ("share of 1", "weight of the step's query on the first token; 0 where a window hides it"),
    "previous_token": ("share of 1", "weight on the token before the query; NaN where the query is the first"),
    "self_weight": ("share of 1", "weight on the query's own position"),
    "prompt_mass": ("share of 1", "weight on all tokens of the prompt, the first and the query's own among them"),
    "generated_mass": ("share of 1", "weight on tokens that earlier steps have generated, the query's own among them"),
    "prefix_matching": (
        "share of 1",
        "weight on all tokens that follow an earlier occurrence of the query's; NaN where there is none, 0 where a "
        "window hides it",
    ),
    "max_weight": ("share of 1", "largest weight on a token"),
    "argmax_key": ("", "position of the token with the largest weight, −1 where no token has any"),
    "entropy": ("nats", "entropy of the query's weights, that on a learned sink included"),
    "mean_distance": ("tokens", "sum over keys of weight × distance from the query"),
    "virtual_sink_mass": ("share of 1", "weight on the learned sink, which is no token"),
}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Generation(Result):
    """A continuation of one text: what each step predicted, and where each head looked in it.

    Step s has read the prompt and the s tokens generated before; its query is the last of these, at position
    ``query(s)``, and what it predicts is the token at the position after it. ``surprise``, ``prediction_entropy``,
    ``rank`` and ``drawn_probability`` are [step], ``likely_token``, ``likely_probability`` and
    ``likely_drawn_probability`` [step, likely], the names in GENERATION_SCORES [step, layer, head]. ``token_id`` and
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

        shape = self["entropy"].shape[1:]
        for name, value, size in zip(("layer", "head"), (layer, head), shape, strict=True):
            if not is_whole(value) or not 0 <= value < size:
                raise ValueError(f"{name} must be between 0 and {size - 1}, got {value!r}")
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
            raise ValueError(f"this model has no {name}: {_OF_HEADS[name][1]}")
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
        stop_at_eos: whether generation ends with the tokenizer's end-of-sequence token.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: several texts, a model that cannot continue one, more tokens than its context leaves room for, or
            an option out of its range.
    """
    _check_generates(model)
    check_whole(n_tokens=n_tokens, n_likely=n_likely)
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
    of_heads, logits = _read_again(model, ids, n_prompt)
    progress(1.0, f"attention of {len(logits)} steps")
    tokenizer = getattr(model, "tokenizer", None)
    words = f"{len(logits)} tokens generated after {sequences.description}"
    return Generation(
        quantities=_step_quantities(logits, ids[n_prompt:].to(logits.device), sampling, n_likely, tokenizer)
        | {
            name: Quantity(of_heads[name], ("step", "layer", "head"), *_OF_HEADS[name])
            for name in _OF_HEADS
            if name in of_heads
        }
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


def _read_again(model: Any, ids: Tensor, n_prompt: int) -> tuple[dict[str, np.ndarray], Tensor]:
    """One pass over all tokens but the last: what heads do [step, layer, head], and logits float64 [step, d_vocab]."""
    device = model.cfg.device
    read = Sequences(ids[None, :-1], torch.ones_like(ids[None, :-1], dtype=torch.bool)).to(device)
    n_read = read.tokens.shape[1]
    rows = torch.arange(n_prompt - 1, n_read, device=device)
    request = StatisticsRequest(
        entropy=True, max_weight=True, mean_distance=True, sink_keys=1, offsets=(0, 1),
        match={"induction": match_labels(read.tokens, "induction")},
        classes=(torch.arange(n_read, device=device)[None] >= n_prompt).long(),
    )  # fmt: skip
    kept: list[Tensor] = []
    keep = (f"blocks.{model.cfg.n_layers - 1}.hook_resid_post", lambda x, hook: kept.append(x[:, rows]))
    with model.hooks(fwd_hooks=[keep]):
        statistics = attention_statistics(model, read, request)
    by_class = torch.nn.functional.pad(statistics["class_mass"], (0, 1))  # where nothing generated is read
    found = {
        "first_token": statistics["sink_mass"],
        "previous_token": statistics["offset_mass"][..., 1].masked_fill(
            torch.arange(n_read, device=device) == 0, torch.nan
        ),
        "self_weight": statistics["offset_mass"][..., 0],
        "prompt_mass": by_class[..., 0],
        "generated_mass": by_class[..., 1],
        "prefix_matching": statistics["match_mass"]["induction"].masked_fill(
            earlier_occurrences(read).n_targets[0] == 0, torch.nan
        ),
    } | {name: statistics[name] for name in ("max_weight", "argmax_key", "entropy", "mean_distance")}
    if "virtual_mass" in statistics:
        found["virtual_sink_mass"] = statistics["virtual_mass"]
    of_heads = {name: value[:, 0, :, rows].movedim(2, 0).cpu().numpy() for name, value in found.items()}
    for name, values in of_heads.items():
        if values.dtype.kind == "f":
            of_heads[name] = values.astype(np.float64)
    return of_heads, unembedded(model, kept[0])[0].double()


def _step_quantities(
    logits: Tensor, generated: Tensor, sampling: Sampling, n_likely: int, tokenizer: Any
) -> dict[str, Quantity]:
    """Of logits [step, d_vocab] and the tokens [step] that followed."""
    log_p, drawn = logits.log_softmax(dim=-1), sampling.probabilities(logits)
    own = log_p.gather(1, generated[:, None])
    likely = log_p.topk(min(n_likely, log_p.shape[1]), dim=1).indices
    is_missing = (likely != generated[:, None]).all(dim=1)
    likely[is_missing, -1] = generated[is_missing]
    ids = likely.cpu().numpy()
    texts = np.array(token_texts(tokenizer, ids.ravel().tolist()), dtype=np.str_).reshape(ids.shape)
    share, per_step, per_token = "share of 1", ("step",), ("step", "likely")

    def numbers(values: Tensor) -> np.ndarray:
        return values.cpu().numpy()

    return {
        "token": Quantity(
            np.array(token_texts(tokenizer, generated.tolist()), dtype=np.str_), per_step, "", "the generated token"
        ),
        "surprise": Quantity(numbers(-own[:, 0]), per_step, "nats", "minus the log-probability of the generated token"),
        "prediction_entropy": Quantity(
            numbers(-torch.xlogy(log_p.exp(), log_p.exp()).sum(dim=1)), per_step, "nats", "entropy of the prediction"
        ),
        "rank": Quantity(
            numbers(1 + (log_p > own).sum(dim=1)), per_step, "", "rank of the generated token, 1 is the most likely"
        ),
        "drawn_probability": Quantity(
            numbers(drawn.gather(1, generated[:, None])[:, 0]),
            per_step,
            share,
            "probability with which the generated token was drawn, at this temperature",
        ),
        "likely_token": Quantity(
            texts, per_token, "", "likely next tokens; the last is the generated one where that is not among them"
        ),
        "likely_token_id": Quantity(ids, per_token, "", "their ids"),
        "likely_probability": Quantity(
            numbers(log_p.exp().gather(1, likely)), per_token, share, "what the model predicts, at temperature 1"
        ),
        "likely_drawn_probability": Quantity(
            numbers(drawn.gather(1, likely)), per_token, share, "probability with which they were drawn"
        ),
    }
