"""Times the ablation of every head, one at a time, against naive loops: ``python benchmarks/head_sweep.py [MODEL]``.

Zero ablation of attn.hook_z, 16 prompts of 64 random tokens, logit difference at the last position. The naive loops run
the whole model once a head: run_with_hooks on our model, and on a TransformerLens bridge of the same weights where the
model is one that transformers can hold. Ratios are of the minima of interleaved runs.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench import HookedTransformer
from workbench.analyses.metrics import last_rows, logit_difference
from workbench.analyses.running import Sequences
from workbench.analyses.sweeps import Intervention, measure


def zero_head(head: int, z: Tensor, hook: Any) -> Tensor:
    z = z.clone()
    z[:, :, head] = 0
    return z


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    model = HookedTransformer.from_pretrained(options.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, model.cfg.d_vocab, (options.prompts, options.tokens), generator=generator)
    target, foil = torch.randint(100, model.cfg.d_vocab, (2, options.prompts), generator=generator)
    prompts = Sequences(tokens, torch.ones_like(tokens, dtype=torch.bool))
    metric = logit_difference(target, foil, last_rows(prompts.real))
    heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    edits = [(f"blocks.{layer}.attn.hook_z", partial(zero_head, head)) for layer, head in heads]

    def sweep() -> Tensor:
        return measure(model, prompts, [Intervention({name: edit}) for name, edit in edits], metric)

    @torch.no_grad()
    def naive() -> Tensor:
        runs = [model.run_with_hooks(tokens, fwd_hooks=[edit]) for edit in edits]
        return torch.stack([metric(logits[:, -1:]) for logits in runs])

    times: dict[str, list[float]] = {"sweep": [], "naive": []}
    values: dict[str, Tensor] = {}
    for _ in range(options.repeats):
        for name, run in (("sweep", sweep), ("naive", naive)):
            start = time.perf_counter()
            values[name] = run()
            times[name].append(time.perf_counter() - start)
    ratio = min(times["naive"]) / min(times["sweep"])
    error = (values["sweep"] - values["naive"]).abs().max()
    print(
        f"{len(heads)} heads: sweep {min(times['sweep']):.1f} s, naive loop {min(times['naive']):.1f} s, {ratio:.2f} x"
    )
    print(f"largest difference {error:.1e} logits")


if __name__ == "__main__":
    main()
