"""The logit lens: what the model would predict if it stopped at each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.interventions.metrics import ROWS_PER_UNEMBEDDING
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, cached, provenance, silent, unembedded
from workbench.analyses.support import check_model, emits_statistics
from workbench.analyses.token_texts import token_texts

TOLERANCE = 1e-4  # of a bridge's logits against its unembedding, as a share of the largest


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LogitLens(Result):
    """Predictions from the residual stream before each layer, and from the last one, on one text.

    ``rank`` (1 is the most likely), ``log_probability`` of the token that follows, ``entropy`` and ``kl_to_final`` are
    [depth, query]; depth 0 is the embedding, depth l the stream that layer l − 1 leaves, the last the model's output.
    ``top_token`` [depth, query] is the most likely token's text, ``top_probability`` its probability.
    """

    kind: ClassVar[str] = "logit_lens"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "curves")
    frame_axes: ClassVar[tuple[str, ...]] = ("depth", "query")

    @property
    def first_right(self) -> np.ndarray:
        """[query], the first depth from which on the final prediction stays the most likely one."""
        agrees = self["top_token_id"] == self["top_token_id"][-1]
        return len(agrees) - np.logical_and.accumulate(agrees[::-1], axis=0).sum(axis=0)

    def summary(self) -> str:
        depth = len(self["rank"]) - 1
        settled = np.median(self.first_right)
        lines = [
            self.provenance.sentence(),
            f"The final prediction stays the most likely from depth {settled:.0f} of {depth} on (median).",
            f"KL to the final prediction: {np.mean(self['kl_to_final'][depth // 2]):.2f} nats half-way (mean).",
        ]
        if len(self.coordinates["query"]) > 1:  # the last token is followed by none, so it has no rank
            rank = np.median(self["rank"][:, :-1], axis=1)
            ranks = (
                f"Median rank of the next token: {rank[0]:.0f} at the embedding, {rank[depth // 2]:.0f} after "
                f"{depth // 2} of {depth} layers, {rank[-1]:.0f} at the end."
            )
            lines.insert(1, ranks)
        return "\n".join(lines)

    def _draw_map(self, *, first: int = 0, last: int | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        shown = slice(first, last)  # positions
        tokens = figures.token_labels([str(token) for token in self.coordinates["query"][shown]], first)
        figure = figures.lens_map(self["top_probability"][:, shown], self["top_token"][:, shown], tokens, theme=theme)
        return Drawing(figure, "Most likely next token at every depth", self.define("top_token", "top_probability"))

    def _draw_curves(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        series = {"KL to the final prediction": self["kl_to_final"], "entropy": self["entropy"]}
        if len(self.coordinates["query"]) > 1:
            series = {"loss of the next token": -self["log_probability"][:, :-1]} | series
        series = {name: values.mean(axis=1) for name, values in series.items()}
        return Drawing(
            figures.curves(series, x_label="depth (layers applied)", y_label="mean over positions (nats)", theme=theme),
            "What is known at every depth",
            self.define("log_probability", "kl_to_final", "entropy"),
        )


@torch.no_grad()
def logit_lens(
    model: Any, tokens: Input, *, attention_mask: Tensor | None = None, progress: Progress = silent
) -> LogitLens:
    """Applies the model's final norm and unembedding to the stream before each layer (nostalgebraist 2020).

    The lens reads every depth in the basis of the last: early layers need not write in it, so a high rank early on
    does not mean that the model does not know yet (Belrose et al. 2023).

    Args:
        tokens: one text, or token ids [pos] or [1, pos] with their ``attention_mask``.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: several texts, or a model without next-token logits.
    """
    check_model(model, predicts=True)
    sequences = Sequences.read(model, tokens, attention_mask)
    if len(sequences) > 1:
        raise ValueError(f"logit_lens shows one text, got {len(sequences)}; index the batch first")
    n_layers = model.cfg.n_layers
    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(n_layers)), f"blocks.{n_layers - 1}.hook_resid_post"]
    device = model.cfg.device
    streams = cached(model, sequences.to(device), names)
    ids = sequences.tokens[0].to(device)
    following = torch.cat((ids[1:], ids.new_full((1,), -1)))
    final = streams[names[-1]][0]
    _check_end(model, sequences, final)
    measured = []
    for depth, name in enumerate(names):
        measured.append(_measure(model, streams[name][0], final, following))
        progress((depth + 1) / len(names), f"depth {depth} of {n_layers}")
    found = {name: torch.stack([each[name] for each in measured]).cpu().numpy() for name in measured[0]}
    tokenizer = getattr(model, "tokenizer", None)
    texts = token_texts(tokenizer, found["top_token_id"].ravel().tolist())
    top_token = np.array(texts, dtype=np.str_).reshape(found["top_token_id"].shape)
    axes = ("depth", "query")
    return LogitLens(
        quantities={
            "rank": Quantity(
                found["rank"], axes, "", "rank of the token that follows, 1 is the most likely; NaN at the last token"
            ),
            "log_probability": Quantity(
                found["log_probability"], axes, "nats", "log-probability of what follows; NaN at the last token"
            ),
            "entropy": Quantity(found["entropy"], axes, "nats", "entropy of the prediction at this depth"),
            "kl_to_final": Quantity(found["kl_to_final"], axes, "nats", "KL(model's prediction ‖ that of this depth)"),
            "top_probability": Quantity(found["top_probability"], axes, "share of 1", "probability of that token"),
            "top_token": Quantity(top_token, axes, "", "most likely next token at this depth"),
            "top_token_id": Quantity(found["top_token_id"], axes, "", "its id"),
        },
        provenance=provenance(model, sequences),
        coordinates={"query": token_texts(tokenizer, sequences.tokens[0].tolist())},
    )


def _check_end(model: Any, sequences: Sequences, final: Tensor) -> None:
    """Refuses a bridge whose prediction is not its norm and unembedding of the last stream [pos, d_model]."""
    if emits_statistics(model):
        return
    own = model(sequences.tokens.to(final.device))[0, -1].double()
    read = unembedded(model, final[None, -1:])[0, 0].double()
    if bool(((own - read).abs() > TOLERANCE * own.abs().max().clamp_min(1)).any()):
        raise ValueError(
            "this bridge's logits are not its unembedding of the last stream (it may cap them); load the model with "
            "HookedTransformer.from_pretrained"
        )


def _measure(model: Any, stream: Tensor, final: Tensor, following: Tensor) -> dict[str, Tensor]:
    """Numbers [query] of one depth; a few rows at a time, as logits are wide."""
    parts: dict[str, list[Tensor]] = {}
    for rows in torch.arange(len(stream), device=stream.device).split(ROWS_PER_UNEMBEDDING):
        logits, final_logits = (unembedded(model, x[rows][None])[0].double() for x in (stream, final))
        log_p, log_q = logits.log_softmax(dim=-1), final_logits.log_softmax(dim=-1)
        target = following[rows]
        has_target, index = target >= 0, target.clamp(min=0)[:, None]
        own = log_p.gather(1, index)
        rank = 1 + (log_p > own).sum(dim=1).double()
        top = log_p.max(dim=1)
        found = {
            "rank": rank.masked_fill(~has_target, torch.nan),
            "log_probability": own[:, 0].masked_fill(~has_target, torch.nan),
            "entropy": -(log_p.exp() * log_p).sum(dim=1),
            "kl_to_final": (log_q.exp() * (log_q - log_p)).sum(dim=1),
            "top_probability": top.values.exp(),
            "top_token_id": top.indices,
        }
        for name, value in found.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(part) for name, part in parts.items()}
