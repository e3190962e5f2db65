"""Which models an analysis can be asked about, and who sees whom in each of their layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.kernels import AttentionMask

if TYPE_CHECKING:
    from workbench.analyses.running import Sequences

LEAST_SUM = 0.98  # of a query's weights without a learned sink, in any float type


def emits_statistics(model: Any) -> bool:
    """Whether the model is a HookedTransformer, which takes masks, stops at layers and restarts from them."""
    return hasattr(model, "run_with_statistics")


def is_bidirectional(model: Any) -> bool:
    """Whether queries see the tokens after them as well."""
    return getattr(model.cfg, "attention_dir", "causal") == "bidirectional"


def depends_on_length(model: Any) -> bool:
    """Whether a batch's longest sequence decides how its others are read: rotations that are scaled by length."""
    scaling = getattr(model.cfg, "rope_scaling", None)
    return emits_statistics(model) and scaling is not None and scaling.depends_on_length


def check_one_length(model: Any, real: Tensor) -> None:
    """Refuses prompts of several lengths where the longest would decide how the others are read.

    Args:
        real: bool [prompt, pos], their real tokens.

    Raises:
        ValueError: what to do instead.
    """
    if depends_on_length(model) and not bool(real.all()):
        raise ValueError(
            "this model's rotations depend on a prompt's length, so prompts of several lengths cannot share a run; "
            "pass prompts of one length at a time"
        )


def check_model(model: Any, *, layer: int | None = None, predicts: bool = False) -> None:
    """Refuses the models that an analysis would have no number for, or a wrong one.

    Args:
        layer: the only layer that is looked at; None is all of them.
        predicts: whether the analysis is about the prediction of the next token.

    Raises:
        ValueError: what the model is, and what can be done with it.
    """
    if isinstance(model, str):
        raise ValueError(
            f"model must be a loaded model, such as HookedTransformer.from_pretrained({model!r}), got text"
        )
    cfg = model.cfg
    name = getattr(cfg, "model_name", type(model).__name__)
    if getattr(cfg, "n_encoder_layers", None) is not None:
        raise ValueError(
            f"{name} is an encoder–decoder, and analyses are of models that read one text; its attention statistics "
            "come from model.run_with_statistics with collect_from='encoder', 'decoder' or 'cross'"
        )
    kinds = getattr(cfg, "layer_types", None) or ()
    softmax = [place for place, kind in enumerate(kinds) if kind != "linear"]
    if len(softmax) < len(kinds) and (layer is None or layer not in softmax):
        linear = next(place for place, kind in enumerate(kinds) if kind == "linear") if layer is None else layer
        others = ", ".join(map(str, softmax))
        raise ValueError(
            f"layer {linear} of {name} has linear attention, which has no weights to look at; "
            + (
                f"head_pattern and model.run_with_statistics show those of layers {others}"
                if softmax
                else "nor has any"
            )
        )
    if broken := _broken_weights(model):
        raise ValueError(
            f"{broken} of {name} holds NaN or infinity, so its numbers would mean nothing; mend the weights"
        )
    if getattr(model, "training", False) and getattr(cfg, "dropout", 0.0):
        raise ValueError(f"{name} is in training mode, where dropout makes its numbers random; call model.eval() first")
    if predicts and is_bidirectional(model):
        raise ValueError(
            f"{name} is bidirectional: it sees the next token, so it cannot be tested for predicting it; "
            "head_statistics and attention_sinks work on such models"
        )
    if predicts and not getattr(cfg, "use_unembed", True):
        raise ValueError(
            f"{name} has no language-model head, so it has no losses; load a checkpoint that has one, or use "
            "head_statistics and attention_sinks, which need none"
        )


def _broken_weights(model: Any) -> str | None:
    """The name of the first parameter with NaN or infinity; None where there is none. Takes 2 ms a 10⁷ weights."""
    for name, parameter in model.named_parameters() if hasattr(model, "named_parameters") else ():
        if parameter.is_floating_point() and parameter.numel():
            weights = parameter.detach()
            # A sum is fast and passes on what is no number, but may overflow by itself.
            if not bool(weights.sum().isfinite()) and not all(bool(end.isfinite()) for end in weights.aminmax()):
                return str(name)
    return None


def check_plain_causal(pattern: Tensor, layer: int) -> None:
    """Refuses a pattern [batch, head, n, n] whose queries do not see all earlier tokens, themselves, and nothing else.

    A model that gives only its patterns does not say what its mask was.

    Raises:
        ValueError: how the pattern shows it.
    """
    if bool(pattern.triu(1).any()):
        found = "queries that attend to later tokens"
    elif bool((pattern.sum(dim=3) < LEAST_SUM).any()):
        found = "weights that do not sum to 1 (a learned sink)"
    elif bool((pattern[:, :, -1, 0] == 0).all()):
        found = "queries that do not see the first token (a sliding window)"
    else:
        return
    raise ValueError(
        f"layer {layer} has {found}, which analyses know of a HookedTransformer only; load the model with "
        "HookedTransformer.from_pretrained"
    )


@dataclass(frozen=True, eq=False)
class Visibility:
    """Who sees whom in each layer; pads see and are seen by nobody.

    Args:
        n_keys: int64 [layer, batch, query], how many keys a query sees.
        first_key: int64 [layer, batch, query], the first of them; the number of positions for pads.
        n_other_queries: int64 [layer, batch, key], how many queries besides the key's own see it.
    """

    n_keys: Tensor
    first_key: Tensor
    n_other_queries: Tensor


def visibility(model: Any, batch: Sequences) -> Visibility:
    """Who sees whom in each layer of a model that reads these sequences. O(n) in memory."""
    size, device = batch.tokens.shape, batch.tokens.device
    found = {}
    masks = layer_masks(model)
    for mask in dict.fromkeys(masks):
        bound = replace(mask, key_padding=batch.real, query_padding=batch.real).bind(size[0], size[1], size[1], device)
        n_seeing = bound.sum_over_queries(batch.real[:, None].double())[:, 0].long()
        found[mask] = (
            bound.keys_per_query(),
            torch.minimum(bound.first, bound.global_first),
            (n_seeing - 1).clamp(min=0),
        )
    return Visibility(*(torch.stack(part) for part in zip(*(found[mask] for mask in masks), strict=True)))


def layer_masks(model: Any) -> Sequence[AttentionMask]:
    """The mask of each layer, apart from padding; layers of one kind share theirs."""
    cfg = model.cfg
    if not emits_statistics(model):
        return [AttentionMask()] * cfg.n_layers  # see check_plain_causal
    causal = not is_bidirectional(model)
    whole = AttentionMask(causal=causal)
    local = AttentionMask(causal=causal, window=cfg.window_size, n_global=cfg.n_global_tokens)
    return [local if kind == "local" else whole for kind in cfg.layer_types]
