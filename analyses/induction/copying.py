"""Whether heads copy what they attend to: in a run, by their weights, and among the tokens they promote most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import HeadScore
from workbench.analyses.induction.ablation import highest
from workbench.analyses.induction.stream_weights import StreamWeights, centred, check_one_stream
from workbench.analyses.labels import COPYING_SCORES
from workbench.analyses.prompts import RepeatedTokens, Spacing, repeated_random_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, Sequences, cached, provenance, silent
from workbench.analyses.support import check_model

N_TOP = 5  # logits that count as promoted
ROWS_AT_A_TIME = 1024  # logits of so many positions are held at once


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CopyingScores(Result):
    """``in_situ``, ``eigenvalues``, ``eigenvalues_of_weights``, ``top_share`` and ``weight`` [layer, head].

    ``in_situ_low`` and ``in_situ_high`` are there from 20 sequences on.
    """

    kind: ClassVar[str] = "copying_scores"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "scatter")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")

    def top(self, n: int = 5) -> list[tuple[int, int]]:
        """(layer, head) of the ``n`` heads that raise the attended token's logit most, in order."""
        return highest(self["in_situ"], n)

    def summary(self) -> str:
        lines = [self.provenance.sentence(), f"{'head':<9}{'gain in situ (logits)':<32}{'eigenvalues':>12}{'top 5':>8}"]
        for layer, head in self.top():
            gain = f"{self['in_situ'][layer, head]:+.3f}"
            if "in_situ_low" in self:
                gain += f" [{self['in_situ_low'][layer, head]:+.3f}, {self['in_situ_high'][layer, head]:+.3f}]"
            lines.append(
                f"{f'L{layer}H{head}':<9}{gain:<32}{self['eigenvalues'][layer, head]:>+12.3f}"
                f"{self['top_share'][layer, head]:>8.1%}"
            )
        last = self["in_situ"].size - 1
        layer, head = highest(self["in_situ"], last + 1)[last]
        lines.append(
            f"Lowest gain: L{layer}H{head} {self['in_situ'][layer, head]:+.3f}. By chance "
            f"{self.settings['top_chance']:.2%} of attended tokens would be among the top {N_TOP} logits."
        )
        return "\n".join(lines)

    def _draw_map(self, *, score: str = "in_situ", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        if score not in COPYING_SCORES:
            raise ValueError(f"score must be one of {', '.join(COPYING_SCORES)}, got {score!r}")
        label = figures.axis_label(COPYING_SCORES[score].lower(), self.quantities[score].unit)
        shares = score == "top_share"
        figure = figures.head_map(
            self[score], label=label, signed=not shares, upper=1.0 if shares else None, theme=theme
        )
        return Drawing(figure, f"{COPYING_SCORES[score]}, every head", self.define(score))

    def _draw_scatter(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_scatter(
            self["eigenvalues"], self["in_situ"], x_label="copying by eigenvalues, Σ Re λ / Σ |λ|",
            y_label="logit gain of the attended token (logits)", theme=theme,
        )  # fmt: skip
        return Drawing(figure, "Copying in a run against copying by weights", self.define("in_situ", "eigenvalues"))


@torch.no_grad()
def copying_scores(
    model: Any,
    *,
    length: int = 64,
    n_sequences: int = 20,
    n_copies: int = 2,
    spacing: Spacing = "fixed",
    seed: int = 0,
    prepend_bos: bool | None = None,
    progress: Progress = silent,
) -> CopyingScores:
    """How much each head raises the logit of the tokens that it attends to (Elhage et al. 2021; Olsson et al. 2022).

    1. In situ, on repeated random tokens: the logit that the head's output gives to each attended token, over the mean
       of the vocabulary, weighted by attention. The final norm's scale is held at its value in the run.
    2. By weights alone: Σ Re λ / Σ |λ| of the eigenvalues of the head's map from tokens to logits.
    3. The share of the attention that goes to tokens among the head's own five largest logits.

    The first and the third are of queries in the repetitions; BOS as an attended token counts for nothing.

    Args:
        model: a HookedTransformer.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that it is not for (docs/definitions.md), or what repeated_random_tokens refuses.
    """
    check_model(model, predicts=True)
    check_one_stream(model, "copying_scores")
    if model.cfg.use_mlm_head:
        raise ValueError(f"{model.cfg.model_name} has a masked-LM head, which no head writes to in a straight line")
    kind: dict[str, Any] = dict(
        length=length, n_sequences=n_sequences, n_copies=n_copies, spacing=spacing, seed=seed, prepend_bos=prepend_bos
    )
    prompts = repeated_random_tokens(model, **kind)
    sequences = Sequences.read(model, prompts)
    unembedding = _unembedding(model)
    run = _Run.of(model, sequences, prompts)
    parts: list[_Layer] = []
    for layer in range(model.cfg.n_layers):
        parts.append(_layer_scores(model, run, layer, unembedding))
        progress((layer + 1) / model.cfg.n_layers, f"copying in layer {layer}")
    return CopyingScores(
        quantities=_quantities(parts, len(sequences), seed),
        provenance=provenance(model, sequences),
        settings=kind | {"top_chance": min(1.0, N_TOP / model.cfg.d_vocab)},
        coverage={name: run.rows[0].numel() / prompts.tokens.numel() for name in ("in_situ", "top_share")},
    )


def _unembedding(model: Any) -> Tensor:
    """What turns the stream, divided by the final norm's scale, into logits: [d_vocab, d_model]."""
    directions = model.tokens_to_residual_directions(torch.arange(model.cfg.d_vocab, device=model.cfg.device))
    wide = directions if directions.dtype == torch.float64 else directions.float()
    return centred(wide, model.ln_final)


@dataclass(frozen=True, eq=False)
class _Run:
    """What all heads are scored on.

    Args:
        rows: the queries that count, as indices of sequence and position, each [row].
        sources: bool [sequence, pos], the attended tokens that count.
        scale: of the final norm, [row].
    """

    sequences: Sequences
    rows: tuple[Tensor, Tensor]
    sources: Tensor
    scale: Tensor

    @classmethod
    def of(cls, model: Any, sequences: Sequences, prompts: RepeatedTokens) -> _Run:
        on_device = sequences.to(model.cfg.device)
        sources = torch.ones_like(on_device.real)
        sources[:, 0] = not prompts.has_bos
        batch, position = (prompts.copy > 0).to(model.cfg.device).nonzero(as_tuple=True)
        last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
        stream = cached(model, on_device, [last])[last][batch, position].double()
        stream = centred(stream, model.ln_final)
        scale = (stream.square().mean(dim=-1) + model.ln_final.eps).sqrt()
        return cls(on_device, (batch, position), sources, scale)


@dataclass(frozen=True, eq=False)
class _Layer:
    """Scores of the heads of a layer: sums over rows [sequence, head] of gain, attention and promoted attention, and
    both eigenvalue scores [head]."""

    gain: Tensor
    weight: Tensor
    promoted: Tensor
    n_rows: Tensor  # [sequence]
    eigenvalues: Tensor
    eigenvalues_of_weights: Tensor


def _layer_scores(model: Any, run: _Run, layer: int, unembedding: Tensor) -> _Layer:
    block, cfg = model.blocks[layer], model.cfg
    stream = StreamWeights.of(model, layer)
    names = {name: f"blocks.{layer}.{suffix}" for name, suffix in (
        ("pattern", "attn.hook_pattern"), ("z", "attn.hook_z"), ("post", "ln1_post.hook_scale"),
    ) if name != "post" or hasattr(block, "ln1_post")}  # fmt: skip
    values = cached(model, run.sequences, list(names.values()))
    batch, position = run.rows
    z = values[names["z"]][batch, position].to(unembedding.dtype)  # [row, head, d_head]
    weights = values[names["pattern"]][batch, :, position].to(unembedding.dtype)  # [row, head, key]
    weights = weights * run.sources[batch][:, None]
    scale = run.scale
    if "post" in names:
        scale = scale * values[names["post"]][batch, position, 0].double()
    tokens = run.sequences.tokens[batch]  # [row, key]
    embedding = _embedding(model)
    found: dict[str, list[Tensor]] = {name: [] for name in ("gain", "weight", "promoted", "folded", "plain")}
    for head in range(cfg.n_heads):
        to_logits = stream.W_O[head] @ unembedding.T  # [d_head, d_vocab]
        to_logits = to_logits - to_logits.mean(dim=1, keepdim=True)
        gain, promoted = _gains(z[:, head], weights[:, head], tokens, to_logits)
        found["gain"].append(gain / scale)
        found["promoted"].append(promoted)
        found["weight"].append(weights[:, head].sum(dim=1).double())
        found["folded"].append(_eigenvalue_score(to_logits, embedding @ stream.W_V[head]))
        group = head // (cfg.n_heads // cfg.n_key_value_heads)
        W_V, W_O = (w.to(unembedding.dtype) for w in (block.attn.W_V[group], block.attn.W_O[head]))
        found["plain"].append(_eigenvalue_score(W_O @ model.W_U.to(W_O.dtype), model.W_E.to(W_V.dtype) @ W_V))
    sums = {
        name: torch.zeros(len(run.sequences), cfg.n_heads, dtype=torch.float64, device=batch.device).index_add_(
            0, batch, torch.stack(found[name], dim=1).double()
        )
        for name in ("gain", "weight", "promoted")
    }
    n_rows = torch.bincount(batch, minlength=len(run.sequences)).double()
    return _Layer(**sums, n_rows=n_rows, eigenvalues=torch.stack(found["folded"]),
                  eigenvalues_of_weights=torch.stack(found["plain"]))  # fmt: skip


def _embedding(model: Any) -> Tensor:
    """Token vectors as they enter the stream, but for the scale of a norm on them: [d_vocab, d_model]."""
    wide = model.W_E if model.W_E.dtype == torch.float64 else model.W_E.float()
    norm = getattr(model, "ln_embed", None)
    return wide if norm is None else centred(wide, norm) * norm.gain.to(wide.dtype)


def _gains(z: Tensor, weights: Tensor, tokens: Tensor, to_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, Σ over keys of weight × logit of the key's token, and of weight × whether it is a top logit.

    z [row, d_head], weights and tokens [row, key], to_logits [d_head, d_vocab]; float64 [row] each, before any scale.
    """
    gains, promoted = [], []
    for some in torch.arange(len(z), device=z.device).split(ROWS_AT_A_TIME):
        logits = z[some] @ to_logits  # [row, d_vocab]
        least = logits.topk(min(N_TOP, logits.shape[1]), dim=1).values[:, -1:]
        of_tokens = logits.gather(1, tokens[some])  # [row, key]
        gains.append((weights[some] * of_tokens).sum(dim=1).double())
        is_top = (of_tokens >= least) & (of_tokens > 0)  # a head that writes nothing has logits of 0 alone
        promoted.append((weights[some] * is_top).sum(dim=1).double())
    return torch.cat(gains), torch.cat(promoted)


def _eigenvalue_score(to_logits: Tensor, from_tokens: Tensor) -> Tensor:
    """Σ Re λ / Σ |λ| of from_tokens [d_vocab, d_head] @ to_logits [d_head, d_vocab]; NaN where all are 0.

    The eigenvalues of A B that are not 0 are those of B A, which is d_head × d_head.
    """
    values = torch.linalg.eigvals((to_logits @ from_tokens).double())
    total = values.abs().sum()
    return torch.where(total > 0, values.real.sum() / total, torch.nan)


def _quantities(parts: list[_Layer], n_sequences: int, seed: int) -> dict[str, Quantity]:
    axes = ("layer", "head")
    sums = {
        name: torch.stack([getattr(part, name) for part in parts], dim=1).cpu().numpy()  # [sequence, layer, head]
        for name in ("gain", "weight", "promoted")
    }
    counts = parts[0].n_rows.cpu().numpy()[:, None].repeat(len(parts), axis=1)  # [sequence, layer]
    n_rows = int(counts[:, 0].sum())
    gain = HeadScore(sums["gain"], counts, n_rows * len(parts), n_rows * len(parts))
    weight, promoted = sums["weight"].sum(axis=0), sums["promoted"].sum(axis=0)
    logits, share, queries = "logits", "share of 1", "mean over queries in the repetitions"
    found = {
        "in_situ": Quantity(
            gain.mean, axes, logits,
            "Σ over attended tokens of weight × the logit that the head's output gives to that token, over the "
            f"vocabulary's mean; {queries}",
        ),
        "eigenvalues": Quantity(
            torch.stack([part.eigenvalues for part in parts]).cpu().numpy(), axes, "",
            "Σ Re λ / Σ |λ| of the map from tokens to logits, gains of norms folded in, logits less the vocabulary's "
            "mean",
        ),
        "eigenvalues_of_weights": Quantity(
            torch.stack([part.eigenvalues_of_weights for part in parts]).cpu().numpy(), axes, "",
            "Σ Re λ / Σ |λ| of W_E W_V W_O W_U, the weights as they are",
        ),
        "top_share": Quantity(
            promoted / np.where(weight > 0, weight, np.nan), axes, share,
            f"share of the attention that goes to tokens among the {N_TOP} largest logits of the head's output",
        ),
        "weight": Quantity(weight / n_rows, axes, share, f"attention on tokens other than BOS, {queries}"),
    }  # fmt: skip
    if (ends := gain.interval(0.95, seed)) is not None:
        for name, which, values in zip(("low", "high"), ("lower", "upper"), ends, strict=True):
            what = f"{which} end of the 95 % bootstrap interval over sequences of in_situ"
            found[f"in_situ_{name}"] = Quantity(values, axes, logits, what)
    return found
