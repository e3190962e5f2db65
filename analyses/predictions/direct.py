"""Direct logit attribution: what each component writes towards one logit and away from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workbench.analyses.options import check_whole
from workbench.analyses.predictions.next_token import next_token_prompt
from workbench.analyses.result import Drawing, Quantity, Result
from workbench.analyses.running import Input, cached, provenance
from workbench.analyses.support import check_model, check_one_length, emits_statistics
from workbench.analyses.tasks.prompt_set import PromptSet
from workbench.analyses.token_texts import token_texts

TOLERANCE = 1e-4  # of the parts' sum, as a share of the largest logit difference


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DirectLogitAttribution(Result):
    """Contributions to the logit difference at each prompt's last token, in logits, mean over prompts and per prompt.

    ``head_contribution`` [layer, head], ``mlp_contribution`` and ``attention_bias_contribution`` [layer],
    ``embedding_contribution`` and ``constant_contribution`` are means; ``prompt_head_contribution`` [prompt, layer,
    head] and so on hold every prompt's. All parts of a prompt sum to
    ``logit_difference`` [prompt], up to ``gap`` [prompt], which is rounding.
    """

    kind: ClassVar[str] = "direct_logit_attribution"
    all_figure_kinds: ClassVar[tuple[str, ...]] = ("map", "layers", "parts")
    frame_axes: ClassVar[tuple[str, ...]] = ("layer", "head")
    further_tables: ClassVar = {"layers": ("layer",), "prompts": ("prompt",)}

    def top(self, n: int = 5) -> list[tuple[int, int]]:
        """The ``n`` heads with the largest contributions, whatever their sign, in order."""
        order = np.argsort(-np.abs(self["head_contribution"]), axis=None, kind="stable")[:n]
        return [tuple(map(int, np.unravel_index(place, self["head_contribution"].shape))) for place in order]  # type: ignore[misc]

    def parts(self) -> dict[str, float]:
        """Every part's mean contribution by its name, the largest first: heads (L2H1), MLPs (M2), the bias of attention
        (L2 bias), the embedding, and the biases behind the stream."""
        heads, biases, mlps = (self[f"{name}_contribution"] for name in ("head", "attention_bias", "mlp"))
        found = {f"L{layer}H{head}": float(value) for (layer, head), value in np.ndenumerate(heads)}
        found |= {f"M{layer}": float(value) for layer, value in enumerate(mlps)}
        found |= {f"L{layer} bias": float(value) for layer, value in enumerate(biases)}
        found |= {name: float(self[f"{name}_contribution"]) for name in ("embedding", "constant")}
        return dict(sorted(found.items(), key=lambda part: -part[1]))

    def summary(self) -> str:
        heads = ", ".join(
            f"L{layer}H{head} {self['head_contribution'][layer, head]:+z.3f}" for layer, head in self.top()
        )
        whole = self["logit_difference"]
        names = {"all heads": "head", "MLPs": "mlp", "embeddings": "embedding", "attention biases": "attention_bias",
                 "biases of the final norm and the unembedding": "constant"}  # fmt: skip
        sums = [f"{words} {self[f'{name}_contribution'].sum():+z.3f}" for words, name in names.items()]
        return "\n".join(
            [
                self.provenance.sentence(),
                f"Logit difference {self._where()}: {whole.mean():+z.3f}.",
                f"Largest heads: {heads}.",
                f"Together: {', '.join(sums)}.",
                f"The parts miss the logit difference by {np.abs(self['gap']).max():.1e} at most (rounding).",
            ]
        )

    def _where(self) -> str:
        n = len(self["logit_difference"])
        return "at the last token" if n == 1 else f"at the last token, mean over {n} prompts"

    def _draw_map(self, *, chosen: tuple[int, int] | None = None, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        figure = figures.head_map(
            self["head_contribution"],
            label="contribution (logits)",
            signed=True,
            marked=self.top(3) if chosen is None else (),
            chosen=chosen,
            theme=theme,
        )
        title = "Direct contribution of every head to the logit difference"
        return Drawing(figure, title, self.define("head_contribution") + figures.framed(chosen))

    def _draw_layers(self, *, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        series = {"attention heads": self["head_contribution"].sum(axis=1), "MLP": self["mlp_contribution"]}
        return Drawing(
            figures.curves(series, x_label="layer", y_label="contribution (logits)", theme=theme),
            "Direct contribution of every layer to the logit difference",
            self.define("head_contribution", "mlp_contribution"),
        )

    def _draw_parts(self, *, n_parts: int = 14, theme: str = "light") -> Drawing:
        from workbench.analyses import figures

        check_whole(n_parts=n_parts)
        total = float(self["logit_difference"].mean())
        figure = figures.part_bars(self.parts(), total, n_parts=n_parts, label="logit difference", theme=theme)
        note = (
            f"The {min(n_parts, len(self.parts()))} largest parts, each from where the one above it ends; L2H1 is a "
            "head, M2 an MLP, L2 bias what attention adds whatever it reads, constant the biases behind the stream. "
            f"They add up to the logit difference {self._where()}, {total:+.3f}, up to "
            f"{np.abs(self['gap']).max():.0e}, which is rounding."
        )
        return Drawing(figure, "What pushes the target, and what the foil", note)


@torch.no_grad()
def direct_logit_attribution(
    model: Any,
    prompts: PromptSet | Input,
    *,
    position: int | None = None,
    target: str | int | None = None,
    foil: str | int | None = None,
) -> DirectLogitAttribution:
    """Splits logit(target) − logit(foil), at the last token of each prompt, into what each component wrote.

    The stream that is unembedded is the sum of the embedding and of what every head and MLP added. With the scale of
    the final norm (and of norms on sublayers' outputs) held at its value in this run, each part goes through them
    linearly (Elhage et al. 2021, "Logit attribution"; nostalgebraist 2020). The unit is logits before a soft cap.

    A part says what a component wrote itself, not what its output made later layers write: ablation says that.

    Args:
        prompts: prompts with targets and foils, or one text (or its token ids [pos] or [1, pos]).
        position: of a text, the token whose next one is predicted; negative ones count from the end, None is the last
            one that another token follows.
        target: of a text, a word that is one token, or a token id; None is the token that follows, and the likeliest
            where none does.
        foil: as ``target``; None is the likeliest other token.

    Raises:
        ValueError: prompts without foils, or of several lengths where rotations depend on them; a position that there
            is not, or an answer that is not one token; or a model whose stream is no sum: post-norm, or a masked-LM
            head.
    """
    check_model(model, predicts=True)
    _check_sum(model)
    if isinstance(prompts, PromptSet):
        of_text = {"position": position, "target": target, "foil": foil}
        if given := [name for name, value in of_text.items() if value is not None]:
            raise ValueError(f"{given[0]} is of one text; prompts bring their own")
    else:
        prompts = next_token_prompt(model, prompts, position, target, foil)
    if prompts.foil is None:
        raise ValueError("direct_logit_attribution splits a logit difference, so each prompt needs a foil")
    check_one_length(model, prompts.real)
    parts = _Parts(model, prompts)
    heads, biases, mlps = (torch.stack(found, dim=1) for found in zip(*parts.layers(), strict=True))
    embedding = parts.contribution(parts.at("blocks.0.hook_resid_pre"))
    constant = parts.constant()
    whole = parts.whole()
    gap = whole - heads.sum(dim=(1, 2)) - biases.sum(dim=1) - mlps.sum(dim=1) - embedding - constant
    if bool((gap.abs() > TOLERANCE * whole.abs().max().clamp_min(1)).any()):
        raise ValueError(
            f"the parts miss the logit difference by {float(gap.abs().max()):.1e}: the model's type is too narrow, or "
            "something breaks the sum, such as an active hook or a soft cap of a bridge; use float32, and a "
            "HookedTransformer (from_pretrained)"
        )
    return DirectLogitAttribution(
        quantities=_quantities(heads, biases, mlps, embedding, constant, whole, gap),
        provenance=provenance(model, prompts.sequences),
        settings={"prompts": prompts.name} | _answers(model, prompts),
    )


def _answers(model: Any, prompts: PromptSet) -> dict[str, Any]:
    """Of a single prompt: where its last token stands, and what its answers are."""
    if len(prompts) > 1 or prompts.foil is None:
        return {}
    ids = [int(prompts.target), int(prompts.foil)]
    target, foil = token_texts(getattr(model, "tokenizer", None), ids)
    return {"position": int(prompts.rows), "target": target, "foil": foil}


def _check_sum(model: Any) -> None:
    """Refuses models whose stream before the unembedding is no sum of what sublayers wrote, or not known to be one."""
    cfg = model.cfg
    if not emits_statistics(model):
        if any(hasattr(block, "ln1_post") for block in model.blocks):
            raise ValueError(
                "direct_logit_attribution knows norms on sublayers' outputs of a HookedTransformer only; load the "
                "model with HookedTransformer.from_pretrained"
            )
    elif cfg.norm_placement == "post" or cfg.use_mlm_head:
        raise ValueError(f"{cfg.model_name} normalises its stream in every layer, so its logits are no sum of parts")


class _Parts:
    """What was written to the stream at the last token of each prompt, and its share of the logit difference."""

    def __init__(self, model: Any, prompts: PromptSet) -> None:
        self.model, self.prompts = model, prompts
        assert prompts.foil is not None
        device = model.cfg.device
        self.rows = prompts.rows.to(device)  # [prompt, 1]
        self.norm = _FinalNorm.of(model)
        target, foil = prompts.target.to(device), prompts.foil.to(device)
        self.direction = self.norm.directions(target) - self.norm.directions(foil)  # [prompt, d_model]
        self.bias = self.norm.bias(target) - self.norm.bias(foil)
        norms = [name for name in model.hook_dict if name.endswith(("ln1_post.hook_scale", "ln2_post.hook_scale"))]
        suffixes = ("attn.hook_z", "hook_attn_out", "hook_mlp_out")
        written = [f"blocks.{layer}.{suffix}" for layer in range(model.cfg.n_layers) for suffix in suffixes]
        last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
        names = ["blocks.0.hook_resid_pre", last, *written, *norms]
        values = cached(model, prompts.sequences.to(device), names)
        self.values = {name: self._last(values[name]) for name in names}
        self.stream = self.values[last]
        self.scale = self.norm.scale(self.stream)

    def at(self, name: str) -> Tensor:
        return self.values[name]

    def layers(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Contributions of a layer's heads [prompt, head], of its attention bias and of its MLP, each [prompt]."""
        for layer, block in enumerate(self.model.blocks):
            z = self.at(f"blocks.{layer}.attn.hook_z")  # [prompt, n_heads, d_head]
            heads = torch.einsum("phe,hed->phd", z, block.attn.W_O.double())
            out = self.at(f"blocks.{layer}.hook_attn_out")
            if not emits_statistics(self.model):
                _check_heads(heads, block.attn, out, layer)
            if hasattr(block, "ln1_post"):
                heads = self._through(block.ln1_post, heads, self.at(f"blocks.{layer}.ln1_post.hook_scale")[:, None])
            of_heads = self.contribution(heads)
            yield (
                of_heads,
                self.contribution(out) - of_heads.sum(dim=1),
                self.contribution(self.at(f"blocks.{layer}.hook_mlp_out")),
            )

    def contribution(self, part: Tensor) -> Tensor:
        """A part's share [prompt, …] of the logit difference; part [prompt, …, d_model]."""
        if self.norm.centred:
            part = part - part.mean(dim=-1, keepdim=True)
        between = [1] * (part.dim() - 2)
        direction, scale = (x.view(len(x), *between, x.shape[-1]) for x in (self.direction, self.scale))
        return (part / scale * direction).sum(dim=-1)

    def constant(self) -> Tensor:
        """What no part wrote: the final norm's bias and the unembedding's, [prompt]."""
        return self.bias

    def whole(self) -> Tensor:
        """The logit difference [prompt] before a soft cap: the model's own, or from the whole stream where it caps."""
        prompts = self.prompts
        if not emits_statistics(self.model):
            return self.logit_difference(self.model(prompts.tokens.to(self.rows.device)))
        if self.model.cfg.output_logits_soft_cap is not None:
            return self.contribution(self.stream) + self.bias
        return self.logit_difference(self.model(prompts.tokens, attention_mask=prompts.real))

    def logit_difference(self, logits: Tensor) -> Tensor:
        return self.prompts.logit_difference()(logits.gather(1, self.rows[..., None].expand(-1, -1, logits.shape[-1])))

    def _last(self, value: Tensor) -> Tensor:
        """value [prompt, pos, …] at the last token, float64 [prompt, …]."""
        return value[torch.arange(len(value), device=value.device), self.rows[:, 0]].double()

    @staticmethod
    def _through(norm: Any, part: Tensor, scale: Tensor) -> Tensor:
        """A part of a sublayer's output behind the norm on it, whose scale is held; its bias is nobody's part."""
        part = part - part.mean(dim=-1, keepdim=True) if norm.centred else part
        return part / scale * norm.gain.double()


def _check_heads(heads: Tensor, attn: Any, out: Tensor, layer: int) -> None:
    """Refuses a bridge of which heads [prompt, head, d_model] and bias are not what attention wrote, [prompt, d]."""
    bias = getattr(attn, "b_O", None)
    missing = out - heads.sum(dim=1) - (0.0 if bias is None else bias.double())
    if bool((missing.abs() > TOLERANCE * out.abs().max().clamp_min(1)).any()):
        raise ValueError(
            f"the heads of layer {layer} do not sum to what its attention writes; load the model with "
            "HookedTransformer.from_pretrained"
        )


@dataclass(frozen=True, eq=False)
class _FinalNorm:
    """The final norm and the unembedding behind it, as directions of the normalised stream."""

    directions: Callable[[Tensor], Tensor]  # of tokens, [prompt, d_model]
    bias: Callable[[Tensor], Tensor]  # of their logits, [prompt]
    centred: bool
    eps: float

    @classmethod
    def of(cls, model: Any) -> _FinalNorm:
        norm = model.ln_final
        if emits_statistics(model):
            return cls(
                lambda tokens: model.tokens_to_residual_directions(tokens).double(),
                lambda tokens: model.logit_bias(tokens).double(),
                getattr(norm, "centred", False),
                getattr(norm, "eps", 0.0),
            )
        W_U, b_U = model.W_U.double(), model.b_U.double()
        gain = norm.w.double() + norm.uses_weight_offset
        shift = getattr(norm, "b", None)
        shift = torch.zeros_like(gain) if shift is None else shift.double()
        return cls(
            lambda tokens: W_U.T[tokens] * gain,
            lambda tokens: b_U[tokens] + W_U.T[tokens] @ shift,
            not norm.uses_rms_norm,
            model.cfg.eps,
        )

    def scale(self, stream: Tensor) -> Tensor:
        """What a stream [prompt, d_model] is divided by, [prompt, 1]."""
        centred = stream - stream.mean(dim=-1, keepdim=True) if self.centred else stream
        return (centred.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()


def _quantities(
    heads: Tensor, biases: Tensor, mlps: Tensor, embedding: Tensor, constant: Tensor, whole: Tensor, gap: Tensor
) -> dict[str, Quantity]:
    unit = "logits"
    parts = {
        "head": (heads, ("layer", "head"), "what the head's output z W_O adds to logit(target) − logit(foil)"),
        "attention_bias": (
            biases,
            ("layer",),
            "what the attention's output bias adds, and its norm's where it has one",
        ),
        "mlp": (mlps, ("layer",), "what the MLP's output adds, its bias included"),
        "embedding": (embedding, (), "what the embeddings, with positions, add"),
        "constant": (constant, (), "what the final norm's bias and the unembedding's bias add"),
    }
    found: dict[str, Quantity] = {}
    for name, (values, axes, definition) in parts.items():
        array = values.cpu().numpy()
        found[f"{name}_contribution"] = Quantity(array.mean(axis=0), axes, unit, f"{definition}, mean over prompts")
        found[f"prompt_{name}_contribution"] = Quantity(array, ("prompt", *axes), unit, f"{definition}, of each prompt")
    found["logit_difference"] = Quantity(whole.cpu().numpy(), ("prompt",), unit, "logit(target) − logit(foil)")
    found["gap"] = Quantity(gap.cpu().numpy(), ("prompt",), unit, "logit difference less the sum of all parts")
    return found
