"""Whether heads copy what they attend to: in a run, by their weights, and among the tokens they promote most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.attention.scores import HeadScore
from workbench.analyses.induction.ablation import highest
from workbench.analyses.induction.stream_weights import StreamWeights, centred, check_one_stream
from workbench.analyses.labels import COPYING_SCORES, number_or_dash
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
                f"{f'L{layer}H{head}':<9}{gain:<32}{number_or_dash(self['eigenvalues'][layer, head], '+.3f'):>12}"
                f"{self['top_share'][layer, head]:>8.1%}"
            )
        last = self["in_situ"].size - 1
        layer, head = highest(self["in_situ"], last + 1)[last]
        lines.append(
            f"Lowest gain: L{layer}H{head} {self['in_situ'][layer, head]:+.3f}. By chance "
            f"{self.settings['top_chance']:.2%} of attended tokens would be among the top {N_TOP} logits."
        )
        return "\n".join(lines)

    def _draw_map(
        self, *, score: str = "in_situ", chosen: tuple[int, int] | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        if score not in COPYING_SCORES:
            raise ValueError(f"score must be one of {', '.join(COPYING_SCORES)}, got {score!r}")
        label = figures.axis_label(COPYING_SCORES[score].lower(), self.quantities[score].unit)
        shares = score == "top_share"
        figure = figures.head_map(
            self[score], label=label, signed=not shares, upper=1.0 if shares else None, chosen=chosen, theme=theme
        )
        note = self.define(score) + figures.framed(chosen)
        return Drawing(figure, f"{COPYING_SCORES[score]}, every head", note)

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
    rows = _Rows.of(model, sequences.to(model.cfg.device), prompts)
    to_logits, embedding = _unembedding(model), _embedding(model)
    in_run, by_weights = [], []
    for layer, seen in enumerate(_layers(model, rows.sequences)):
        stream = StreamWeights.of(model, layer)
        logits_of_heads = [_centred_logits(W_O, to_logits) for W_O in stream.W_O]
        in_run.append(rows.scores(seen, logits_of_heads))
        folded = [_eigenvalue_score(of, embedding @ W_V) for of, W_V in zip(logits_of_heads, stream.W_V, strict=True)]
        by_weights.append(torch.stack((torch.stack(folded), _plain_eigenvalues(model, layer))))
        progress((layer + 1) / model.cfg.n_layers, f"copying in layer {layer}")
    return CopyingScores(
        quantities=_quantities(torch.stack(in_run, dim=2), torch.stack(by_weights, dim=1), rows.per_sequence, seed),
        provenance=provenance(model, sequences),
        settings=kind | {"top_chance": min(1.0, N_TOP / model.cfg.d_vocab)},
        coverage=dict.fromkeys(("in_situ", "top_share", "weight"), len(rows.position) / prompts.tokens.numel()),
    )


def _unembedding(model: Any) -> Tensor:
    """What turns the stream, divided by the final norm's scale, into logits: [d_vocab, d_model]."""
    directions = model.tokens_to_residual_directions(torch.arange(model.cfg.d_vocab, device=model.cfg.device))
    return centred(_wide(directions), model.ln_final)


def _embedding(model: Any) -> Tensor:
    """Token vectors as they enter the stream, but for the scale of a norm on them: [d_vocab, d_model]."""
    wide = _wide(model.W_E)
    norm = getattr(model, "ln_embed", None)
    return wide if norm is None else centred(wide, norm) * norm.gain.to(wide.dtype)


def _layers(model: Any, sequences: Sequences) -> Iterator[Mapping[str, Tensor]]:
    """Pattern, z and, where there is one, the scale of the norm on attention's output, layer after layer."""
    residual = model(sequences.tokens, attention_mask=sequences.real, stop_at_layer=0)
    for layer, block in enumerate(model.blocks):
        names = {"pattern": "attn.hook_pattern", "z": "attn.hook_z", "after": "hook_resid_post"}
        if hasattr(block, "ln1_post"):
            names["scale"] = "ln1_post.hook_scale"
        names = {name: f"blocks.{layer}.{suffix}" for name, suffix in names.items()}
        values = model.run_with_cache(
            residual, start_at_layer=layer, stop_at_layer=layer + 1, names_filter=list(names.values())
        )[1]
        residual = values[names["after"]]
        yield {name: values[full] for name, full in names.items()}


@dataclass(frozen=True, eq=False)
class _Rows:
    """The queries that heads are scored on: those of repetitions.

    Args:
        sequence, position: which they are, int64 [row].
        sources: bool [sequence, pos], the attended tokens that count.
        scale: of the final norm, [row].
    """

    sequences: Sequences
    sequence: Tensor
    position: Tensor
    sources: Tensor
    scale: Tensor

    @classmethod
    def of(cls, model: Any, sequences: Sequences, prompts: RepeatedTokens) -> _Rows:
        sources = torch.ones_like(sequences.real)
        sources[:, 0] = not prompts.has_bos
        sequence, position = (prompts.copy > 0).to(sources.device).nonzero(as_tuple=True)
        last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
        stream = centred(cached(model, sequences, [last])[last][sequence, position].double(), model.ln_final)
        scale = (stream.square().mean(dim=-1) + model.ln_final.eps).sqrt()
        return cls(sequences, sequence, position, sources, scale)

    @property
    def per_sequence(self) -> Tensor:
        """How many rows each sequence has, float64 [sequence]."""
        return torch.bincount(self.sequence, minlength=len(self.sequences)).double()

    def scores(self, seen: Mapping[str, Tensor], logits_of_heads: list[Tensor]) -> Tensor:
        """Sums over rows of gain, of attention, and of attention to tokens that are promoted: [3, sequence, head].

        ``logits_of_heads`` are [d_head, d_vocab] each.
        """
        at = self.sequence, self.position
        z, tokens = seen["z"][at], self.sequences.tokens[self.sequence]  # [row, head, d_head], [row, key]
        weights = seen["pattern"][self.sequence, :, self.position] * self.sources[self.sequence][:, None]
        scale = self.scale * seen["scale"][at][:, 0].double() if "scale" in seen else self.scale
        found = []
        for head, to_logits in enumerate(logits_of_heads):
            of_head = weights[:, head].to(to_logits.dtype)  # [row, key]
            gain, promoted = _gains(z[:, head].to(to_logits.dtype), of_head, tokens, to_logits)
            found.append(torch.stack((gain / scale, of_head.sum(dim=1).double(), promoted)))
        by_row = torch.stack(found, dim=2)  # [3, row, head]
        sums = by_row.new_zeros(3, len(self.sequences), len(logits_of_heads))
        return sums.index_add_(1, self.sequence, by_row)


def _centred_logits(W_O: Tensor, unembedding: Tensor) -> Tensor:
    """From a head's z to the logits of its output, less their mean: [d_head, d_vocab]."""
    to_logits = W_O @ unembedding.T
    return to_logits - to_logits.mean(dim=1, keepdim=True)


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


def _plain_eigenvalues(model: Any, layer: int) -> Tensor:
    """The eigenvalue score of each head's weights as they are, float64 [head]."""
    attn, W_E, W_U = model.blocks[layer].attn, _wide(model.W_E), _wide(model.W_U)
    W_V = attn.W_V.repeat_interleave(model.cfg.n_heads // model.cfg.n_key_value_heads, dim=0)
    pairs = zip(_wide(attn.W_O), _wide(W_V), strict=True)
    return torch.stack([_eigenvalue_score(of_O @ W_U, W_E @ of_V) for of_O, of_V in pairs])


def _eigenvalue_score(to_logits: Tensor, from_tokens: Tensor) -> Tensor:
    """Σ Re λ / Σ |λ| of from_tokens [d_vocab, d_head] @ to_logits [d_head, d_vocab]; NaN where all are 0.

    The eigenvalues of A B that are not 0 are those of B A, which is d_head × d_head.
    """
    values = torch.linalg.eigvals((to_logits @ from_tokens).double())
    total = values.abs().sum()
    return torch.where(total > 0, values.real.sum() / total, torch.nan)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _quantities(sums: Tensor, eigenvalues: Tensor, per_sequence: Tensor, seed: int) -> dict[str, Quantity]:
    """From sums of gain, attention and promoted attention [3, sequence, layer, head], and both eigenvalue scores
    [2, layer, head]."""
    axes = ("layer", "head")
    gains, weights, promotions = sums.cpu().numpy()
    folded, plain = eigenvalues.cpu().numpy()
    counts = per_sequence.cpu().numpy()[:, None].repeat(gains.shape[1], axis=1)  # [sequence, layer]
    n_rows = int(counts.sum())
    gain = HeadScore(gains, counts, n_rows, n_rows)
    weight, promoted = weights.sum(axis=0), promotions.sum(axis=0)
    logits, share, queries = "logits", "share of 1", "mean over queries in the repetitions"
    found = {
        "in_situ": Quantity(
            gain.mean, axes, logits,
            "Σ over attended tokens of weight × the logit that the head's output gives to that token, over the "
            f"vocabulary's mean; {queries}",
        ),
        "eigenvalues": Quantity(
            folded, axes, "",
            "Σ Re λ / Σ |λ| of the map from tokens to logits, gains of norms folded in, logits less the vocabulary's "
            "mean",
        ),
        "eigenvalues_of_weights": Quantity(
            plain, axes, "",
            "Σ Re λ / Σ |λ| of W_E W_V W_O W_U, the weights as they are",
        ),
        "top_share": Quantity(
            promoted / np.where(weight > 0, weight, np.nan), axes, share,
            f"share of the attention that goes to tokens among the {N_TOP} largest logits of the head's output",
        ),
        "weight": Quantity(weight / counts[:, 0].sum(), axes, share, f"attention on tokens other than BOS, {queries}"),
    }  # fmt: skip
    if (ends := gain.interval(0.95, seed)) is not None:
        for name, which, values in zip(("low", "high"), ("lower", "upper"), ends, strict=True):
            what = f"{which} end of the 95 % bootstrap interval over sequences of in_situ"
            found[f"in_situ_{name}"] = Quantity(values, axes, logits, what)
    return found
