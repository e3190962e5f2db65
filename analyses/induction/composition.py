"""Which heads read what which others write, by their weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.induction.stream_weights import StreamWeights, check_one_stream
from workbench.analyses.options import check_seed, check_whole, is_whole
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Progress, silent, weights_provenance
from workbench.components.positions import rotate
from workbench.context import KeysAndQueries, position_rules

Composition = Literal["k", "q", "v"]
Head = tuple[int, int]

_AXES = ("source_layer", "source_head", "layer", "head")
_READS = {"k": "keys", "q": "queries", "v": "values"}


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadComposition(Result):
    """``k_composition``, ``q_composition`` and ``v_composition`` [source_layer, source_head, layer, head], less chance.

    NaN where the source is in no earlier layer, and of heads that read or write nothing. ``chance`` and ``chance_sd``
    are what random matrices of these shapes have.
    """

    kind: ClassVar[str] = "head_composition"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("pairs", "sources", "strongest")
    frame_axes: ClassVar[tuple[str, ...]] = _AXES

    def top(self, composition: Composition = "k", n: int = 5) -> list[tuple[Head, Head]]:
        """The ``n`` pairs ((layer, head) that writes, (layer, head) that reads) with the largest composition."""
        values = self[f"{_checked(composition)}_composition"]
        order = np.argsort(-np.nan_to_num(values, nan=-np.inf), axis=None, kind="stable")[:n]
        pairs = zip(*np.unravel_index(order, values.shape), strict=True)
        found = [((int(a), int(b)), (int(c), int(d))) for a, b, c, d in pairs]
        return [(source, reader) for source, reader in found if np.isfinite(values[(*source, *reader)])]

    def summary(self) -> str:
        chance, spread = float(self["chance"]), float(self["chance_sd"])
        lines = [self.provenance.sentence()]
        for kind, what in _READS.items():
            pairs = ", ".join(
                f"L{a}H{b} → L{c}H{d} {self[f'{kind}_composition'][a, b, c, d]:+.3f}"
                for (a, b), (c, d) in self.top(kind)  # type: ignore[arg-type]
            )
            lines.append(f"{kind.upper()}-composition (into {what}): {pairs or 'none'}.")
        offset = self.settings["offset"]
        rotary = "" if offset is None else f" Queries are turned as if they stood {offset} tokens behind their keys."
        lines.append(
            f"Above chance, which is {chance:.4f} ± {spread:.4f} (random matrices of the same shapes, "
            f"{self.settings['n_draws']} draws).{rotary}"
        )
        return "\n".join(lines)

    def _draw_pairs(self, *, composition: Composition = "k", theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        name = f"{_checked(composition)}_composition"
        n_layers, n_heads = self[name].shape[:2]
        square = self[name].reshape(n_layers * n_heads, -1).T
        figure = figures.pair_map(square, n_heads=n_heads, label=_label(composition), theme=theme)
        return Drawing(figure, f"{composition.upper()}-composition of every pair of heads", self.define(name))

    def _draw_sources(
        self, *, composition: Composition = "k", into: Head | None = None, theme: str = "light"
    ) -> Drawing:
        from workbench.analyses import figures

        name = f"{_checked(composition)}_composition"
        values = self[name]
        if into is None:
            pairs = self.top(composition, 1)
            into = pairs[0][1] if pairs else (values.shape[0] - 1, 0)
        layer, head = into
        if not (0 <= layer < values.shape[2] and 0 <= head < values.shape[3]):
            raise ValueError(f"into must be the layer and head of a head of the model, got {into!r}")
        figure = figures.head_map(values[:, :, layer, head], label=_label(composition), signed=True, theme=theme)
        title = f"Whose output L{layer}H{head} reads in its {_READS[composition]}, every earlier head"
        return Drawing(figure, title, self.define(name))

    def _draw_strongest(self, *, n: int = 10, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        kinds: tuple[Composition, ...] = get_args(Composition)
        values = [self[f"{kind}_composition"] for kind in kinds]
        pairs = list(dict.fromkeys(pair for kind in kinds for pair in self.top(kind, n)))
        pairs = sorted(pairs, key=lambda pair: -max(np.nan_to_num([of[pair[0] + pair[1]] for of in values])))[:n]
        names = [f"L{a}H{b} → L{c}H{d}" for (a, b), (c, d) in pairs]
        none = np.full(len(names), np.nan)
        series = {
            f"{kind.upper()}, into {_READS[kind]}": (np.array([of[a + b] for a, b in pairs]), none, none)
            for kind, of in zip(kinds, values, strict=True)
        }
        figure = figures.dots(series, names, x_label="composition above chance", theme=theme)
        note = self.define(*(f"{kind}_composition" for kind in kinds))
        return Drawing(figure, "The pairs of heads that compose most", note)


def _label(composition: Composition) -> str:
    return f"{composition.upper()}-composition above chance"


def _checked(composition: str) -> str:
    if composition not in get_args(Composition):
        raise ValueError(
            f"composition must be one of {', '.join(map(repr, get_args(Composition)))}, got {composition!r}"
        )
    return composition


@torch.no_grad()
def head_composition(
    model: Any, *, offset: int = 0, n_draws: int = 20, seed: int = 0, progress: Progress = silent
) -> HeadComposition:
    """How much of what each head reads is what each earlier head writes (Elhage et al. 2021, "Composition").

    With x the stream as columns, W_QK destination × source and W_OV output × input:
    K = ‖W_QK W_OV‖ / (‖W_QK‖ ‖W_OV‖), Q the same with W_QKᵀ, V = ‖W_OV² W_OV¹‖ / (‖W_OV²‖ ‖W_OV¹‖), Frobenius norms,
    gains of norms folded in, less the mean of random Gaussian matrices of the same shapes. What MLPs and norms' scales
    do in between is not in it: weights say what could be read, an ablation says what is.

    Args:
        model: a HookedTransformer.
        offset: with rotary positions, how far behind its key a query stands. At 0, the default, W_QK is what matches
            contents, with no distance preferred; 1 is right for heads that look at the previous token.
        n_draws: random matrices for chance.
        progress: called with the fraction done and what was done.

    Raises:
        ValueError: a model that it is not for (docs/definitions.md), or an option out of its range.
    """
    check_one_stream(model, "head_composition")
    cfg = model.cfg
    if cfg.qk_norm is not None:
        raise ValueError(
            f"{cfg.model_name} normalises queries and keys, so no matrix W_QK says how well they match; ablate the "
            "source and watch the reader's attention instead"
        )
    if not is_whole(offset) or not 0 <= offset < cfg.n_ctx:
        raise ValueError(f"offset must be a whole number of tokens from 0 to {cfg.n_ctx - 1}, got {offset!r}")
    check_whole(n_draws=n_draws, least=2)
    check_seed(seed)
    rotary = cfg.positional_embedding_type == "rotary"
    found = {kind: torch.full((cfg.n_layers, cfg.n_heads) * 2, torch.nan) for kind in get_args(Composition)}
    writers: list[Tensor] = []
    for layer in range(cfg.n_layers):
        stream = StreamWeights.of(model, layer)
        W_Q, W_K = _turned(model, layer, stream, offset) if rotary else (stream.W_Q, stream.W_K)
        readers = _readers(W_Q, W_K, stream.W_V, stream.W_O)
        for source, writer in enumerate(writers):
            for kind, reader in readers.items():
                found[kind][source, :, layer] = _composition(writer, reader).cpu()
        writers.append(_writer(stream.W_V, stream.W_O))
        progress((layer + 1) / cfg.n_layers, f"composition into layer {layer}")
    chance = _chance(cfg.d_model, cfg.d_head, n_draws, seed)
    return HeadComposition(
        quantities=_quantities(found, chance),
        provenance=weights_provenance(model),
        settings={"offset": offset if rotary else None, "n_draws": n_draws, "seed": seed},
    )


def _turned(model: Any, layer: int, stream: StreamWeights, offset: int) -> tuple[Tensor, Tensor]:
    """W_Q and W_K with the rotations of a query at position ``offset`` and a key at position 0."""
    turned = []
    for weight, position in ((stream.W_Q, offset), (stream.W_K, 0)):
        ids = torch.tensor([[position]], device=weight.device)
        rules = position_rules(
            model.cfg, model.blocks[layer].attn_type, KeysAndQueries(query_ids=ids, key_ids=ids), None, causal=True
        )
        assert rules.key_rotation is not None
        rotation = tuple(part.to(weight.dtype) for part in rules.key_rotation)
        flat = rotate(weight.flatten(0, 1)[None, None], rotation, model.cfg.rotary_adjacent_pairs)  # type: ignore[arg-type]
        turned.append(flat[0, 0].view_as(weight))
    return turned[0], turned[1]


def _writer(W_V: Tensor, W_O: Tensor) -> Tensor:
    """[head, d_head, d_model] of Frobenius norm 1 that stands for W_V W_O: with W_V = q r it is r W_O."""
    return _unit(_triangle(W_V) @ W_O)


def _readers(W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor) -> dict[Composition, Tensor]:
    """[head, d_model, d_head] of norm 1 each: what reads the stream, times the triangle of what it is multiplied by."""
    return {
        "k": _unit(W_K @ _triangle(W_Q).mT),
        "q": _unit(W_Q @ _triangle(W_K).mT),
        "v": _unit(W_V @ _triangle(W_O.mT).mT),
    }


def _triangle(weight: Tensor) -> Tensor:
    """r of weight [head, d_model, d_head] = q r: ‖weight x‖ = ‖r x‖, as q keeps lengths."""
    return torch.linalg.qr(weight, mode="r").R


def _unit(weight: Tensor) -> Tensor:
    norm = torch.linalg.matrix_norm(weight, keepdim=True)
    return weight / torch.where(norm > 0, norm, torch.nan)


def _composition(writer: Tensor, reader: Tensor) -> Tensor:
    """‖writer reader‖ of every pair of heads, [writer, reader]: products of d_head × d_head, all of a layer at once."""
    product = writer.flatten(0, 1) @ reader.transpose(0, 1).flatten(1)  # [writer · d_head, reader · d_head]
    shape = len(writer), writer.shape[1], len(reader), reader.shape[2]
    return product.view(shape).square().sum(dim=(1, 3)).sqrt()


def _chance(d_model: int, d_head: int, n_draws: int, seed: int) -> Tensor:
    """Composition of Gaussian factors [d_model, d_head], float64 [draw]; of one distribution for all three kinds."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n_draws):
        W_Q, W_K, W_V, W_O = torch.randn(4, 1, d_model, d_head, generator=generator)
        found.append(_composition(_writer(W_V, W_O.mT), _unit(W_K @ _triangle(W_Q).mT)))
    return torch.cat(found).flatten().double()


def _quantities(found: Mapping[Composition, Tensor], chance: Tensor) -> dict[str, Quantity]:
    mean = float(chance.mean())
    formulas: dict[Composition, str] = {
        "k": "‖W_QK W_OV‖ / (‖W_QK‖ ‖W_OV‖)",
        "q": "‖(W_QK)ᵀ W_OV‖ / (‖W_QK‖ ‖W_OV‖)",
        "v": "‖W_OV W_OV′‖ / (‖W_OV‖ ‖W_OV′‖), W_OV′ the source's,",
    }
    quantities = {
        f"{kind}_composition": Quantity(
            found[kind].double().numpy() - mean, _AXES, "",
            f"{formula} less chance: how much of what the head's {_READS[kind]} read the source writes",
        )
        for kind, formula in formulas.items()
    }  # fmt: skip
    what = "composition of Gaussian matrices of the same shapes"
    quantities["chance"] = Quantity(np.array(mean), (), "", f"{what}, mean over draws")
    quantities["chance_sd"] = Quantity(np.array(float(chance.std())), (), "", f"{what}, standard deviation over draws")
    return quantities
