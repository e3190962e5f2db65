"""QK and OV circuits: which token a head would look for, and what it would write, by its weights alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.options import check_whole, is_whole
from workbench.analyses.prompts import ordinary_tokens
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, Progress, Sequences, provenance, silent
from workbench.analyses.support import check_model, emits_statistics
from workbench.analyses.token_texts import token_texts
from workbench.context import KeysAndQueries, position_rules

PAIRS_AT_A_TIME = 2**24  # of the vocabulary's square


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadCircuits(Result):
    """The QK and OV circuits of one head: the largest entries over the vocabulary, and all entries of given tokens.

    ``ov_logit`` [ov pair] with ``ov_read`` and ``ov_written``, ``qk_score`` [qk pair] with ``qk_query`` and ``qk_key``;
    ``ov`` [read, written] and ``qk`` [query, key] of the given tokens; ``singular_value`` [direction] of W_OV, with
    the tokens at both ends of the first directions. Models that normalise q and k have no QK circuit.
    """

    kind: ClassVar[str] = "head_circuits"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("singular", "qk", "ov")
    frame_axes: ClassVar[tuple[str, ...]] = ("ov pair",)
    further_tables: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qk_pairs": ("qk pair",), "singular_values": ("direction",), "ends": ("shown direction", "place"),
        "ov": ("read", "written"), "qk": ("query", "key"),
    }  # fmt: skip

    @property
    def name(self) -> str:
        return f"L{self.settings['layer']}H{self.settings['head']}"

    @property
    def figure_kinds(self) -> tuple[str, ...]:
        """The maps are of given tokens."""
        return ("singular", *(kind for kind in ("qk", "ov") if kind in self))

    def summary(self) -> str:
        values, offset = self["singular_value"], self.settings["offset"]
        lines = [
            self.provenance.sentence(),
            f"{self.name} among {self.settings['n_vocabulary']:,} tokens of the vocabulary.",
            f"OV, largest logits of a token where another is read: {self._pairs('ov_read', 'ov_written', 'ov_logit')}.",
            f"Of all tokens {float(self['ov_own_share']):.1%} raise themselves most.",
            f"Singular values of W_OV: {', '.join(f'{value:.3g}' for value in values[:5])}"
            + (f", … {values[-1]:.3g} ({len(values)})." if len(values) > 5 else "."),
        ]
        for direction, (read, written) in enumerate(zip(self["read_token"][:3], self["written_token"], strict=False)):
            ends = (", ".join(repr(str(token)) for token in tokens) for tokens in (read, written))
            lines.append(f"Direction {direction}: reads {next(ends)}; writes {next(ends)}.")
        if "qk_score" not in self:
            return "\n".join([*lines, "No QK circuit: this model normalises q and k, so scores are no matrix product."])
        at = "" if offset is None else f" {offset} back"
        return "\n".join([
            *lines,
            f"QK, largest scores of a key{at}: {self._pairs('qk_query', 'qk_key', 'qk_score')}.",
            f"Of all tokens {float(self['qk_own_share']):.1%} look for themselves most.",
        ])  # fmt: skip

    def _pairs(self, first: str, second: str, values: str) -> str:
        shown = zip(self[first][:5], self[second][:5], self[values][:5], strict=True)
        return ", ".join(f"{str(a)!r} → {str(b)!r} {value:+.2f}" for a, b, value in shown)

    def _draw_singular(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.curves(
            {"W_OV": self["singular_value"]}, x_label="direction", y_label="singular value of W<sub>OV</sub>",
            theme=theme,
        ).update_layout(showlegend=False)  # fmt: skip
        return Drawing(figure, f"How many directions {self.name} can carry over", self.define("singular_value"))

    def _draw_qk(self, *, theme: str = "light") -> Drawing:
        return self._draw_pairs("qk", ("query", "key"), "score", f"What {self.name} looks for", theme)

    def _draw_ov(self, *, theme: str = "light") -> Drawing:
        return self._draw_pairs("ov", ("read", "written"), "logit", f"What {self.name} writes for what it reads", theme)

    def _draw_pairs(self, name: str, axes: tuple[str, str], label: str, title: str, theme: str) -> Drawing:
        from workbench.analyses import figures

        labels = figures.token_labels([str(token) for token in self.coordinates[axes[0]]])
        figure = figures.token_pairs(
            self[name], labels, y_label=f"token: {axes[0]}", x_label=f"token: {axes[1]}", label=label, theme=theme
        )
        definition = self.quantities[name].definition
        return Drawing(figure, title, f"{definition[0].upper()}{definition[1:]}.")


@torch.no_grad()
def head_circuits(
    model: Any,
    layer: int,
    head: int,
    tokens: Input | None = None,
    *,
    offset: int = 1,
    n_pairs: int = 20,
    n_directions: int = 8,
    n_ends: int = 5,
    progress: Progress = silent,
) -> HeadCircuits:
    """The full QK and OV circuits of a head (Elhage et al. 2021, "Splitting attention head terms into circuits").

    QK, W_E W_Q W_Kᵀ W_Eᵀ: the score that query token a gives to key token b. OV, W_E W_V W_O W_U: the logit of token b
    where a is read. Embeddings go through the layer's norm, its scale included, so that in layer 0 these are the
    model's own scores and values, but for learned positions, which are left out. In later layers they are the direct
    path alone: what earlier layers make of a token is not in it.

    Scores are as the model scales them, before a soft cap or a position bias, and less their mean over keys, which the
    softmax does not see; logits are before the final norm (and one on attention's output) divides by its scale, with
    its gain, and less their mean over the tokens written. Value biases, which are written whatever is read, are left
    out. The vocabulary is without special tokens. Of its d_vocab² entries only the largest are kept, so memory is
    O(d_vocab), and time d_vocab² · d_head.

    Args:
        tokens: a text or token ids, all pairs of whose tokens are reported as well, each token once.
        offset: how many tokens back the key stands, for rotary positions.
        n_pairs: how many of the largest entries are kept.
        n_directions, n_ends: of how many singular directions of W_OV (all where there are fewer), and how many tokens
            at either end of each.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: no HookedTransformer; a model without next-token logits, or one that normalises its stream after
            every sublayer, so that no logit is a sum of parts; an option out of its range.
    """
    _check(model, layer, head, offset)
    vocabulary = ordinary_tokens(model).to(model.cfg.device)
    check_whole(n_pairs=n_pairs, n_directions=n_directions, n_ends=n_ends)
    given = None if tokens is None else Sequences.read(model, tokens)
    if given is not None and len(given) > 1:
        raise ValueError(f"head_circuits takes the tokens of one text, got {len(given)} texts")
    weights = _Weights(model, layer, head, vocabulary, offset)
    texts = token_texts(getattr(model, "tokenizer", None), vocabulary.tolist())
    quantities = _pair_quantities("ov", _largest(weights.ov(vocabulary), n_pairs, progress, "OV circuit"), texts)
    quantities |= _directions(weights, vocabulary, texts, n_directions, n_ends)
    circuits: dict[str, Callable] = {"ov": weights.ov}
    if model.cfg.qk_norm is None:
        circuits["qk"] = weights.qk
        quantities |= _pair_quantities("qk", _largest(weights.qk(vocabulary), n_pairs, progress, "QK circuit"), texts)
    coordinates: dict[str, list[str]] = {}
    if given is not None:
        chosen = torch.tensor(list(dict.fromkeys(given.tokens[0].tolist())), device=vocabulary.device)
        names = token_texts(getattr(model, "tokenizer", None), chosen.tolist())
        for name, factors in circuits.items():
            rows, columns = factors(chosen)
            entries = (rows @ columns.T).double().cpu().numpy()
            axes, unit, definition = _ABOUT[name]
            quantities[name] = Quantity(entries, axes, unit, definition)
            coordinates |= dict.fromkeys(axes, names)
    whole = Sequences(vocabulary[None].cpu(), torch.ones(1, len(vocabulary), dtype=torch.bool), "every ordinary token")
    rotary = model.cfg.positional_embedding_type == "rotary"
    return HeadCircuits(
        quantities=quantities,
        provenance=provenance(model, whole if given is None else given),
        settings={
            "layer": layer, "head": head, "offset": offset if rotary else None, "n_vocabulary": len(vocabulary),
        },
        coordinates=coordinates,
    )  # fmt: skip


_ABOUT = {
    "qk": (
        ("query", "key"), "",
        "score of a key token for a query token by the head's weights alone, less its mean over all key tokens",
    ),
    "ov": (
        ("read", "written"), "logits",
        "logit of a token where another is read, before the final norm's scale, less its mean over all tokens written",
    ),
}  # fmt: skip


def _check(model: Any, layer: int, head: int, offset: int) -> None:
    for name, value, size in (("layer", layer, model.cfg.n_layers), ("head", head, model.cfg.n_heads)):
        if not is_whole(value) or not 0 <= value < size:
            raise ValueError(f"{name} must be between 0 and {size - 1}, got {value!r}")
    check_model(model, layer=layer, predicts=True)
    if not emits_statistics(model):
        raise ValueError("head_circuits needs a HookedTransformer; load it with from_pretrained")
    if model.cfg.norm_placement == "post":
        raise ValueError(
            f"{model.cfg.model_name} normalises its stream in every layer, so its logits are no sum of parts"
        )
    if not is_whole(offset) or not 0 <= offset < model.cfg.n_ctx:
        raise ValueError(f"offset must be between 0 and {model.cfg.n_ctx - 1}, got {offset!r}")


class _Weights:
    """A head's circuits as products of two thin matrices, each [token, d_head]."""

    def __init__(self, model: Any, layer: int, head: int, vocabulary: Tensor, offset: int) -> None:
        self.model, self.head = model, head
        self.block = model.blocks[layer]
        self.attn = self.block.attn
        self.group = head // (model.cfg.n_heads // model.cfg.n_key_value_heads)
        self.norm = getattr(self.block, "ln1", None) if model.cfg.norm_placement != "output" else None
        self.rotation = self._rotations(offset)
        self.vocabulary = vocabulary
        gain = 1.0 if self.norm is None else self.norm.gain[:, None]
        self.reading = gain * self.attn.W_V[self.group]  # [d_model, d_head], of a normalised embedding
        self.writing = self._as_logits_read(self.attn.W_O[head])  # [d_head, d_model], of what W_U is multiplied with
        self.mean_unembedding = self._unembedding(vocabulary).mean(dim=0)

    def embedding(self, tokens: Tensor) -> Tensor:
        """What the layer reads of each token, [token, d_model], before the norm's gain and bias."""
        x = self.model.embed(tokens[None])[0]
        if self.model.cfg.use_embed_norm:
            x = self.model.ln_embed(x)
        if self.norm is None:
            return x
        x = x - x.mean(dim=-1, keepdim=True) if self.norm.centred else x
        return x / (x.square().mean(dim=-1, keepdim=True) + self.norm.eps).sqrt()

    def ov(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens that are read, and as they are written."""
        return self.embedding(tokens) @ self.reading, self.written(tokens) @ self.writing.T

    def written(self, tokens: Tensor) -> Tensor:
        """The directions that raise tokens' logits above the mean, [token, d_model]."""
        return self._unembedding(tokens) - self.mean_unembedding

    def qk(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens as queries, and as keys."""
        mean = self._keys(self.vocabulary).mean(dim=0)
        q = self._projected(tokens, self.attn.W_Q, self.attn.b_Q, self.head, 0) * self.model.cfg.query_key_scale
        return q, self._keys(tokens) - mean

    def _keys(self, tokens: Tensor) -> Tensor:
        return self._projected(tokens, self.attn.W_K, self.attn.b_K, self.group, 1)

    def _projected(self, tokens: Tensor, weight: Tensor, bias: Tensor | None, head: int, side: int) -> Tensor:
        x = self.embedding(tokens)
        if self.norm is not None:
            x = x * self.norm.gain + (0.0 if self.norm.b is None else self.norm.b)
        x = x @ weight[head] + (0.0 if bias is None else bias[head])
        return x if self.rotation is None else self.attn._rotate(x[:, None, None], self.rotation[side])[:, 0, 0]

    def _rotations(self, offset: int) -> tuple[Any, Any] | None:
        """Of the query and of the key, which stands ``offset`` back."""
        cfg = self.model.cfg
        if cfg.positional_embedding_type != "rotary":
            return None
        positions = torch.arange(offset + 1, device=cfg.device)[None]
        rules = position_rules(cfg, self.block.attn_type, KeysAndQueries(positions, positions), None, causal=True)
        assert rules.key_rotation is not None
        cosine, sine = rules.key_rotation
        return (cosine[:, -1:], sine[:, -1:]), (cosine[:, :1], sine[:, :1])

    def _as_logits_read(self, written: Tensor) -> Tensor:
        """What is written [d_head, d_model] as it meets the unembedding, but for the norms' scales."""
        norms = [getattr(self.block, "ln1_post", None), self.model.ln_final if self.model.cfg.has_final_norm else None]
        for norm in (norm for norm in norms if norm is not None):
            written = written - written.mean(dim=-1, keepdim=True) if norm.centred else written
            written = written * norm.gain
        return written

    def _unembedding(self, tokens: Tensor) -> Tensor:
        return self.model.W_U.T[tokens] * self.model.cfg.logit_scale


@dataclass(frozen=True, eq=False)
class _Pairs:
    """The largest entries of a circuit over the vocabulary, and the share of rows whose own column is the largest."""

    rows: list[int]
    columns: list[int]
    values: np.ndarray
    own_share: float


def _largest(factors: tuple[Tensor, Tensor], n: int, progress: Progress, what: str) -> _Pairs:
    rows, columns = factors
    n_tokens = len(rows)
    best = torch.empty(0, device=rows.device, dtype=rows.dtype)
    places = torch.empty(0, device=rows.device, dtype=torch.int64)
    n_own = 0
    for some in torch.arange(n_tokens, device=rows.device).split(max(1, PAIRS_AT_A_TIME // n_tokens)):
        entries = rows[some] @ columns.T  # [row, column]
        n_own += int((entries.argmax(dim=1) == some).sum())
        values, found = entries.flatten().topk(min(n, entries.numel()))
        best, places = torch.cat((best, values)), torch.cat((places, found + some[0] * n_tokens))
        best, kept = best.topk(min(n, len(best)))
        places = places[kept]
        progress((int(some[-1]) + 1) / n_tokens, what)
    which = [divmod(place, n_tokens) for place in places.tolist()]
    return _Pairs([a for a, _ in which], [b for _, b in which], best.double().cpu().numpy(), n_own / n_tokens)


def _pair_quantities(name: str, found: _Pairs, texts: Sequence[str]) -> dict[str, Quantity]:
    (first, second), unit, definition = _ABOUT[name]
    value, axes = ("logit" if name == "ov" else "score"), (f"{name} pair",)
    verb = "raise their own logit most" if name == "ov" else "look for themselves most"
    return {
        f"{name}_{value}": Quantity(found.values, axes, unit, f"{definition}; the largest over the vocabulary"),
        f"{name}_{first}": Quantity(np.array([texts[i] for i in found.rows]), axes, "", f"token: {first}"),
        f"{name}_{second}": Quantity(np.array([texts[i] for i in found.columns]), axes, "", f"token: {second}"),
        f"{name}_own_share": Quantity(np.array(found.own_share), (), "share of 1", f"share of tokens that {verb}"),
    }


def _directions(
    weights: _Weights, vocabulary: Tensor, texts: Sequence[str], n_directions: int, n_ends: int
) -> dict[str, Quantity]:
    """Singular values of W_OV between normalised embeddings and what W_U reads, and the tokens at either end."""
    q_in, r_in = torch.linalg.qr(weights.reading.double())
    q_out, r_out = torch.linalg.qr(weights.writing.double().T)
    left, values, right = torch.linalg.svd(r_in @ r_out.T)
    read = weights.embedding(vocabulary).double() @ (q_in @ left[:, :n_directions])  # [token, direction]
    written = weights.written(vocabulary).double() @ (q_out @ right[:n_directions].T)
    largest = read.gather(0, read.abs().argmax(dim=0, keepdim=True)).sign()  # a direction's sign is free
    axes = ("shown direction", "place")
    found = {
        "singular_value": Quantity(
            values.cpu().numpy(), ("direction",), "",
            "singular values of W_V W_O, with the gains of the norms before it and behind it",
        )
    }  # fmt: skip
    about = {"read": "tokens whose embeddings lie farthest along the direction that is read, the larger end of it",
             "written": "tokens whose logits what is written then raises most"}  # fmt: skip
    for name, along in (("read", read * largest), ("written", written * largest)):
        top = along.topk(min(n_ends, len(along)), dim=0)
        tokens = np.array([[texts[i] for i in of_one] for of_one in top.indices.T.tolist()])
        found[f"{name}_token"] = Quantity(tokens, axes, "", about[name])
        found[f"{name}_projection"] = Quantity(top.values.T.cpu().numpy(), axes, "", f"how far: {about[name]}")
    return found
