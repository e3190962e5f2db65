"""Times the ablation of every head, one at a time, against naive loops: ``python benchmarks/head_sweep.py [MODEL]``.

Zero ablation of attn.hook_z, 16 prompts of 64 random tokens, logit difference at the last position. The naive loops run
the whole model once a head with run_with_hooks: our model, and with --bridge a TransformerLens bridge of the same
weights. They run the heads that the sweep has just done while it waits, so that what else the machine does falls on all
of them. The bound counts multiplications by weights: a sweep restarts at the ablated layer, and needs one position of
each prompt behind the attention of the last one.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench import HookedTransformer
from workbench.analyses.interventions.metrics import Metric, last_rows, logit_difference
from workbench.analyses.interventions.sweeps import Head, Intervention, measure
from workbench.analyses.running import Sequences


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
    """Multiplications by weights of the naive loop over those of the sweep, a head at a time.

    The sweep starts behind the attention of the ablated layer, and of a prompt's ``n_positions`` one goes through what
    lies behind the attention of the last: together, what lies behind one attention for one position. Logits of two
    tokens are next to nothing.
    """
    cfg, block = model.cfg, model.blocks[0]
    whole, behind_z = _n_multiplications(block), _n_multiplications(block.mlp) + block.attn.W_O.numel()
    naive = cfg.n_layers * whole + cfg.d_model * cfg.d_vocab
    mean_layers = (cfg.n_layers - 1) / 2  # behind the ablated one
    return naive / (mean_layers * whole + behind_z / n_positions)


def _n_multiplications(module: nn.Module) -> int:
    """Of one position, by the matrices of a module."""
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


@torch.no_grad()
def timed(
    model: HookedTransformer, rivals: dict[str, Any], prompts: Sequences, heads: Sequence[Head], metric: Metric
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Seconds and values [head, prompt] of the sweep and of a loop over ``rivals``, which run during its progress."""
    edits = [(f"blocks.{layer}.attn.hook_z", partial(zero_head, head)) for layer, head in heads]
    times = dict.fromkeys(rivals, 0.0)
    found: dict[str, list[Tensor]] = {name: [] for name in rivals}

    def catch_up(fraction: float, message: str) -> None:
        done = round(fraction * len(edits))
        for name, rival in rivals.items():
            began = time.perf_counter()
            for edit in edits[len(found[name]) : done]:
                found[name].append(metric(rival.run_with_hooks(prompts.tokens, fwd_hooks=[edit])[:, -1:]))
            times[name] += time.perf_counter() - began

    began = time.perf_counter()
    swept = measure(model, prompts, [Intervention({name: edit}) for name, edit in edits], metric, progress=catch_up)
    seconds = time.perf_counter() - began - sum(times.values())
    values = {"sweep": swept} | {name: torch.stack(each) for name, each in found.items()}
    return {"sweep": seconds} | times, values


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
    rivals: dict[str, Any] = {"run_with_hooks": model}
    if options.bridge:
        rivals["TransformerLens bridge"] = bridge_of(options.model)
    times, values = timed(model, rivals, prompts, heads, metric)
    print(f"{len(heads)} heads, {options.prompts} prompts of {options.tokens} tokens")
    print(
        "restarting behind the attention of the ablated layer, with one position and two tokens of a prompt "
        f"behind the last one, saves at most {bound(model, options.tokens):.2f} x multiplications"
    )
    for name, seconds in times.items():
        error = (values[name] - values["sweep"]).abs().max()
        print(
            f"{name:<24}{seconds:8.1f} s {seconds / times['sweep']:6.2f} x   difference from sweep {error:.1e} logits"
        )


if __name__ == "__main__":
    main()
