"""Times the ablation of every head, one at a time, against naive loops: ``python benchmarks/head_sweep.py [MODEL]``.

Zero ablation of attn.hook_z, 16 prompts of 64 random tokens, logit difference at the last position. The naive loops run
the whole model once a head with run_with_hooks: our model, and with --bridge a TransformerLens bridge of the same
weights. They take turns every few layers, so that what else the machine does falls on all of them. The bound counts
multiplications: what restarting at the ablated layer and unembedding one position of each prompt can save at most.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench import HookedTransformer
from workbench.analyses.interventions.metrics import last_rows, logit_difference
from workbench.analyses.interventions.sweeps import Intervention, measure
from workbench.analyses.running import Sequences

LAYERS_IN_TURN = 5
Edit = tuple[str, Callable[[Tensor, Any], Tensor]]


def zero_head(head: int, z: Tensor, hook: Any) -> Tensor:
    z = z.clone()
    z[:, :, head] = 0
    return z


def bridge_of(name: str) -> Any:
    """A TransformerLens bridge of the weights that transformers reads from the folder of a fetched model."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from workbench.loading.sources import KNOWN_MODELS

    logging.disable(logging.WARNING)
    folder = KNOWN_MODELS[name].path
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return TransformerBridge.boot_transformers(
        str(folder), hf_model=reference, tokenizer=AutoTokenizer.from_pretrained(folder)
    )


def bound(model: HookedTransformer, n_positions: int) -> float:
    """Multiplications of the naive loop over those of a sweep that restarts, a head at a time.

    ``n_positions`` are those of a prompt, of which the sweep unembeds one.
    """
    cfg = model.cfg
    block = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() > 1)  # a multiplication each, per position
    unembedding = cfg.d_model * cfg.d_vocab
    naive = cfg.n_layers * block + unembedding
    sweep = (cfg.n_layers + 1) / 2 * block + unembedding / n_positions  # the mean over layers of those still to run
    return naive / sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--bridge", action="store_true", help="also the loop on a TransformerLens bridge")
    options = parser.parse_args()
    model = HookedTransformer.from_pretrained(options.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, model.cfg.d_vocab, (options.prompts, options.tokens), generator=generator)
    target, foil = torch.randint(100, model.cfg.d_vocab, (2, options.prompts), generator=generator)
    prompts = Sequences(tokens, torch.ones_like(tokens, dtype=torch.bool))
    metric = logit_difference(target, foil, last_rows(prompts.real))
    heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    edits = [(f"blocks.{layer}.attn.hook_z", partial(zero_head, head)) for layer, head in heads]

    def sweep(some: Sequence[Edit]) -> Tensor:
        return measure(model, prompts, [Intervention({name: edit}) for name, edit in some], metric)

    @torch.no_grad()
    def naive(runner: Any, some: Sequence[Edit]) -> Tensor:
        return torch.stack([metric(runner.run_with_hooks(tokens, fwd_hooks=[edit])[:, -1:]) for edit in some])

    variants: dict[str, Callable[[Sequence[Edit]], Tensor]] = {"sweep": sweep, "run_with_hooks": partial(naive, model)}
    if options.bridge:
        variants["TransformerLens bridge"] = partial(naive, bridge_of(options.model))
    times = dict.fromkeys(variants, 0.0)
    values: dict[str, Tensor] = {}
    size = LAYERS_IN_TURN * model.cfg.n_heads
    for start in range(0, len(edits), size):
        for name, run in variants.items():
            began = time.perf_counter()
            found = run(edits[start : start + size])
            times[name] += time.perf_counter() - began
            values[name] = torch.cat((values[name], found)) if start else found
    print(f"{len(heads)} heads, {options.prompts} prompts of {options.tokens} tokens")
    print(f"restarting and unembedding one position saves at most {bound(model, options.tokens):.2f} x multiplications")
    for name, seconds in times.items():
        error = (values[name] - values["sweep"]).abs().max()
        print(
            f"{name:<24}{seconds:8.1f} s {seconds / times['sweep']:6.2f} x   difference from sweep {error:.1e} logits"
        )


if __name__ == "__main__":
    main()
