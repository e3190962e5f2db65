"""Edits that hold everything still but one path through the model: path patching, direct effects, kept patterns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor

from workbench.analyses.interventions.edits import Replacement, replace_activation, replace_head, together
from workbench.analyses.interventions.sweeps import Head, Intervention
from workbench.analyses.running import Sequences, cached
from workbench.analyses.support import emits_statistics
from workbench.components.heads import project


@dataclass(frozen=True)
class Receiver:
    """What a head reads by one of its inputs. Of fewer key and value heads, "k" and "v" mean the one that the head
    shares with the others of its group, so that a path to it changes the keys or values of all of them."""

    layer: int
    head: int
    input: Literal["q", "k", "v"]


Receivers = Literal["logits"] | Sequence[Receiver]


@dataclass(frozen=True, eq=False)
class CleanRun:
    """What a model does with prompts as they are, kept to hold parts of it there. O(n) in memory.

    Args:
        values: hook point → activation: hook_z, hook_q, hook_k and hook_resid_pre of every layer.
    """

    model: Any
    values: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Any, prompts: Sequences) -> Self:
        layers = range(model.cfg.n_layers)
        kept = ("hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_z")
        names = [f"blocks.{layer}.{what}" for layer in layers for what in kept]
        return cls(model, cached(model, prompts.to(model.cfg.device), names))

    def keeping_patterns(self, layer: int, head: int, value: Replacement) -> Intervention:
        """A head's output becomes ``value``, and all attention stays as it is (Olsson et al. 2022, "pattern-preserving
        ablation"): what the head changes in the values that later heads read goes on, what it changes in where they
        look does not. Later layers keep their queries and keys, which gives their patterns back without building them.
        """
        kept = [
            replace_activation(name, self.values[name])
            for later in range(layer + 1, self.model.cfg.n_layers)
            for name in (f"blocks.{later}.attn.hook_q", f"blocks.{later}.attn.hook_k")
        ]
        return together([replace_head(layer, head, value), *kept], f"L{layer}H{head}, patterns kept")

    def along_path(self, sender: Head, value: Replacement, receivers: Receivers) -> Intervention:
        """A head's output becomes ``value`` for its receivers alone: path patching (Goldowsky-Dill et al. 2023; Wang et
        al. 2022, section 3.1).

        Every other head and every MLP between the sender and its receivers writes what it wrote; what comes after a
        receiver is computed anew. The norms on the path, the final one among them, are computed anew as well. With
        "logits" nothing but the direct path changes, so that its effect is the sender's *direct effect*. Hooks of one's
        own on the stream are taken to add to it, the same whatever it holds.

        Args:
            value: as in ``replace_head``.

        Raises:
            ValueError: a model whose paths cannot be told apart, or a receiver that does not come after the sender.
        """
        check_paths(self.model)
        layer, head = sender
        change = self._change(layer, head, value)
        if receivers == "logits":

            def add(stream: Tensor, hook: Any) -> Tensor:
                return stream + change

            return Intervention({f"blocks.{self.model.cfg.n_layers - 1}.hook_resid_post": add}, f"L{layer}H{head}")
        for receiver in receivers:
            if receiver.layer <= layer:
                raise ValueError(f"L{receiver.layer}H{receiver.head} does not come after L{layer}H{head}")
        edits = [self._received(receiver, change) for receiver in receivers]
        return together(edits, f"L{layer}H{head} → {', '.join(edit.name for edit in edits)}")

    def _change(self, layer: int, head: int, value: Replacement) -> Tensor:
        """Of what the layer's attention adds to the stream, [prompt, pos, d_model]."""
        clean, block = self.values[f"blocks.{layer}.attn.hook_z"], self.model.blocks[layer]
        edited = clean.clone()
        edited[:, :, head] = torch.as_tensor(value, dtype=clean.dtype, device=clean.device)
        with torch.no_grad():
            if block.cfg.norm_placement not in ("sandwich", "output"):
                return (edited - clean)[:, :, head] @ block.attn.W_O[head]
            new, old = (block.ln1_post(block.attn.out(z)) for z in (edited, clean))
            return new - old

    def _received(self, receiver: Receiver, change: Tensor) -> Intervention:
        """The receiver's query, key or value, read from the stream with the change."""
        block, what = self.model.blocks[receiver.layer], receiver.input
        weight, bias = getattr(block.attn, f"W_{what.upper()}"), getattr(block.attn, f"b_{what.upper()}")
        place = receiver.head * len(weight) // self.model.cfg.n_heads  # the key and value head of its group
        own = slice(place, place + 1)
        with torch.no_grad():
            stream = self.values[f"blocks.{receiver.layer}.hook_resid_pre"] + change
            read = block.attention_inputs(stream)["qkv".index(what)]
            read = read[:, :, own] if read.dim() == 4 else read  # where each head has its own copy
            new = project(read, weight[own], None if bias is None else bias[own])  # [prompt, pos, 1, d_head]

        def edit(x: Tensor, hook: Any) -> Tensor:
            x = x.clone()
            x[:, :, own] = new
            return x

        name = f"L{receiver.layer}H{receiver.head} {what}"
        return Intervention({f"blocks.{receiver.layer}.attn.hook_{what}": edit}, name)


def has_paths(model: Any) -> bool:
    """Whether single paths through the model can be told apart; ``check_paths`` says why not."""
    return emits_statistics(model) and model.cfg.norm_placement != "post"


def check_paths(model: Any) -> None:
    """Refuses the models whose paths cannot be told apart.

    Raises:
        ValueError: a model of another library, or one that normalises the stream itself.
    """
    if not emits_statistics(model):
        raise ValueError(
            "paths through a model need a HookedTransformer; load it with HookedTransformer.from_pretrained"
        )
    if model.cfg.norm_placement == "post":
        raise ValueError(
            f"{model.cfg.model_name} normalises the residual stream behind every layer, so the stream is no sum of "
            "what heads write, and a single path has no meaning in it"
        )
