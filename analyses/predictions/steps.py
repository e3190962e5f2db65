"""What the steps of a generation predicted and looked at, read from one pass over the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import earlier_occurrences
from workbench.analyses.result import Quantity
from workbench.analyses.running import Sequences, attention_statistics, unembedded
from workbench.analyses.token_texts import token_texts
from workbench.generation import Sampling
from workbench.kernels import StatisticsRequest, match_labels

# Name → (unit, definition) of what a head does in a step; "the query" is the token that the step reads last.
OF_HEADS = {
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
    "entropy": ("nats", "entropy of the query's weights, that on a learned sink included"),
    "mean_distance": ("tokens", "sum over keys of weight × distance from the query"),
    "virtual_sink_mass": ("share of 1", "weight on the learned sink, which is no token"),
}


def read_again(model: Any, ids: Tensor, n_prompt: int, n_keys: int) -> tuple[dict[str, Quantity], Tensor]:
    """One pass over all tokens [pos] but the last: what heads do, and logits float64 [step, d_vocab]."""
    device = model.cfg.device
    read = Sequences(ids[None, :-1], torch.ones_like(ids[None, :-1], dtype=torch.bool)).to(device)
    n_read = read.tokens.shape[1]
    rows = torch.arange(n_prompt - 1, n_read, device=device)
    request = StatisticsRequest(
        entropy=True, max_weight=True, mean_distance=True, sink_keys=1, offsets=(0, 1),
        match={"induction": match_labels(read.tokens, "induction")},
        classes=(torch.arange(n_read, device=device)[None] >= n_prompt).long(), top_keys=min(n_keys, n_read),
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
    } | {name: statistics[name] for name in ("max_weight", "entropy", "mean_distance", "top_weights", "top_keys")}
    if "virtual_mass" in statistics:
        found["virtual_sink_mass"] = statistics["virtual_mass"]
    of_heads = {name: value[:, 0, :, rows].movedim(2, 0).cpu().numpy() for name, value in found.items()}
    axes = ("step", "layer", "head")
    quantities = {
        name: Quantity(of_heads[name].astype(np.float64), axes, *OF_HEADS[name])
        for name in OF_HEADS
        if name in of_heads
    }
    quantities["largest_weights"] = Quantity(
        of_heads["top_weights"], (*axes, "place"), "share of 1", "the largest weights on tokens, in order"
    )
    quantities["largest_keys"] = Quantity(
        of_heads["top_keys"], (*axes, "place"), "", "their positions, −1 where there are no more"
    )
    return quantities, unembedded(model, kept[0])[0].double()


def step_quantities(
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
