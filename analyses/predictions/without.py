"""What one text's predictions become when parts of the model are switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.interventions.metrics import ROWS_PER_UNEMBEDDING
from workbench.analyses.interventions.sweeps import Intervention
from workbench.analyses.interventions.switches import switched_off
from workbench.analyses.options import check_position, check_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Sequences, provenance
from workbench.analyses.support import check_model, emits_statistics
from workbench.analyses.token_texts import token_texts


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SwitchedOff(Result):
    """Predictions of one text with and without the parts in ``settings["off"]``.

    ``loss_before`` and ``loss_after`` [query] are those of the token that follows, ``kl`` [query] how far the whole
    prediction moves. ``probability_before`` and ``probability_after`` [token] are of the likeliest next tokens at
    ``settings["position"]``, in either run.
    """

    kind: ClassVar[str] = "switched_off"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("next_token", "text")
    frame_axes: ClassVar[tuple[str, ...]] = ("query",)
    further_tables: ClassVar = {"next_token": ("token",)}

    def summary(self) -> str:
        place, likely = self.settings["position"], self.coordinates["token"]
        now, then = int(self["probability_before"].argmax()), int(self["probability_after"].argmax())
        lines = [
            self.provenance.sentence(),
            f"Switched off: {self.off_in_words()}.",
            f"After token {place}, {likely[now]!r} with {self['probability_before'][now]:.3f}, then "
            f"{likely[then]!r} with {self['probability_after'][then]:.3f}; KL {self['kl'][place]:.3f} nats.",
        ]
        if (losses := self.mean_losses()) is not None:
            before, after = losses
            lines.insert(2, f"Mean loss {before:.3f} nats per token, then {after:.3f} ({after - before:+z.3f}).")
        return "\n".join(lines)

    def mean_losses(self) -> tuple[float, float] | None:
        """In nats per token, before and after; None of a single token, which no other follows."""
        before, after = (self[f"loss_{when}"][:-1] for when in ("before", "after"))
        return (float(before.mean()), float(after.mean())) if len(before) else None

    def off_in_words(self) -> str:
        """The parts that are switched off."""
        return ", ".join(self.settings["off"]) or "nothing"

    def _draw_next_token(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.paired_bars(
            {"as it is": self["probability_before"], "switched off": self["probability_after"]},
            [str(token) for token in self.coordinates["token"]],
            label="probability",
            theme=theme,
        )
        return Drawing(
            figure,
            f"Next token after position {self.settings['position']}",
            f"{self.define('probability_after')} Switched off: {self.off_in_words()}.",
        )

    def _draw_text(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        series = {
            "change of the loss": self["loss_after"] - self["loss_before"],
            "KL divergence of the prediction": self["kl"],
        }
        return Drawing(
            figures.curves(series, x_label="position (tokens)", y_label="nats", theme=theme),
            "Where predictions move",
            f"{self.define('loss_after', 'kl')} Switched off: {self.off_in_words()}.",
        )


@torch.no_grad()
def what_if(
    model: Any, tokens: Input, off: Sequence[str] = (), *, position: int | None = None, n_tokens: int = 10
) -> SwitchedOff:
    """Runs a text as it is and with parts of the model switched off.

    Args:
        tokens: one text, or token ids [pos] or [1, pos].
        off: names of parts; see ``workbench.analyses.interventions.switches.WRITTEN_AS``.
        position: of the token whose next one is shown; negative ones count from the end, None is where the prediction
            moves most, and the last where nothing moves.
        n_tokens: how many next tokens are shown.

    Raises:
        ValueError: several texts, a name or position that there is not, or a model without next-token logits.
    """
    check_model(model, predicts=True)
    if not emits_statistics(model):
        raise ValueError("what_if needs a HookedTransformer; load it with from_pretrained")
    sequences = Sequences.read(model, tokens)
    if len(sequences) > 1:
        raise ValueError(f"what_if shows one text, got {len(sequences)}; index the batch first")
    ids = sequences.tokens[0]
    if position is not None:
        check_position(position, len(ids))
    check_whole(n_tokens=n_tokens)
    before, after = (
        _last_stream(model, ids, part) for part in (Intervention(), switched_off(model, off, len(ids)))
    )  # [pos, d_model]
    found = _compare(model, before, after, ids)
    if position is None:
        position = int(found["kl"].argmax()) if found["kl"].any() else -1
    place = position % len(ids)
    chances = [model.to_logits(x[place][None, None])[0, 0].double().softmax(dim=-1) for x in (before, after)]
    likely = torch.maximum(*chances).topk(min(n_tokens, len(chances[0]))).indices
    tokenizer = getattr(model, "tokenizer", None)
    loss = "loss of the token that follows, NaN at the last"
    chance = "probability of each of the likeliest next tokens"
    return SwitchedOff(
        quantities={
            "loss_before": Quantity(found["loss_before"], ("query",), "nats", f"{loss}, the model as it is"),
            "loss_after": Quantity(found["loss_after"], ("query",), "nats", f"{loss}, with parts switched off"),
            "kl": Quantity(found["kl"], ("query",), "nats", "KL(prediction as it is ‖ with parts switched off)"),
            "probability_before": Quantity(
                chances[0][likely].cpu().numpy(), ("token",), "share of 1", f"{chance}, the model as it is"
            ),
            "probability_after": Quantity(
                chances[1][likely].cpu().numpy(), ("token",), "share of 1", f"{chance}, with parts switched off"
            ),
        },
        provenance=provenance(model, sequences),
        settings={"off": list(off), "position": place},
        coordinates={
            "query": token_texts(tokenizer, ids.tolist()),
            "token": token_texts(tokenizer, likely.tolist()),
        },
    )


def _last_stream(model: Any, ids: Tensor, intervention: Intervention) -> Tensor:
    """What is unembedded, [pos, d_model]."""
    n_layers = model.cfg.n_layers
    with model.hooks(fwd_hooks=list(intervention.edits.items())):
        return model(ids[None].to(model.cfg.device), stop_at_layer=n_layers)[0]


def _compare(model: Any, before: Tensor, after: Tensor, ids: Tensor) -> dict[str, np.ndarray]:
    """Losses and divergence [query], a few rows at a time, as logits are wide; the last token has no loss."""
    following = torch.cat((ids[1:], ids.new_zeros(1))).to(before.device)
    parts: dict[str, list[Tensor]] = {"loss_before": [], "loss_after": [], "kl": []}
    for rows in torch.arange(len(ids), device=before.device).split(ROWS_PER_UNEMBEDDING):
        log_p, log_q = (model.to_logits(x[rows][None])[0].double().log_softmax(dim=-1) for x in (before, after))
        target = following[rows][:, None]
        parts["loss_before"].append(-log_p.gather(1, target)[:, 0])
        parts["loss_after"].append(-log_q.gather(1, target)[:, 0])
        parts["kl"].append((log_p.exp() * (log_p - log_q)).sum(dim=1).clamp_min(0))
    found = {name: torch.cat(values).cpu().numpy() for name, values in parts.items()}
    for name in ("loss_before", "loss_after"):
        found[name][-1] = np.nan
    return found
