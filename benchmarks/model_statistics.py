"""What all attention statistics of a whole model cost, beside a plain forward pass and beside other tools.

    python benchmarks/model_statistics.py [--tokens 4096] [--repeats 3] [--peers]

Prints, for SmolLM2-135M on English text, time and peak memory as ratios to the same model's plain forward (flash
attention, no statistics). No variant computes logits. Times are minima of interleaved runs in one process; peak memory
is measured in a process of its own for each variant. ``--peers`` adds Hugging Face's eager attention with
``output_attentions`` and TransformerLens, whose patterns are reduced to the same statistics layer by layer where the
tool allows it; they need about 20 GB at 4,096 tokens.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from workbench import HookedTransformer, StatisticsRequest
from workbench.demo.corpus import page
from workbench.kernels import AttentionMask, pattern_statistics
from workbench.loading.sources import fetch

OURS = ("plain", "statistics")
PEERS = ("transformers sdpa, plain", "transformers eager, output_attentions", "transformer_lens, hook_pattern")


def variant(name: str, n_tokens: int) -> Callable[[], object]:
    """A function that runs one variant once; the model is loaded here."""
    model = HookedTransformer.from_pretrained("smollm2-135m")
    text = "\n".join("\n".join(islice(page(seed), 5)) for seed in range(n_tokens // 50))
    tokens = model.to_tokens(text, truncate=True)[:, :n_tokens]
    assert tokens.shape[1] == n_tokens
    request = StatisticsRequest.all(tokens)
    if name == "plain":
        return partial(model, tokens, return_type=None)
    if name == "statistics":
        return partial(model.run_with_statistics, tokens, request, return_type=None)
    del model
    return peer(name, tokens, request)


def peer(name: str, tokens: Tensor, request: StatisticsRequest) -> Callable[[], object]:
    """The same numbers by the means of another tool."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch("smollm2-135m", lambda *_: None)
    kind = "sdpa" if "sdpa" in name else "eager"
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=kind, dtype=torch.float32).eval()

    def reduce(pattern: Tensor) -> object:
        return pattern_statistics(pattern, mask=AttentionMask(), request=request)

    if name == "transformers sdpa, plain":
        return lambda: reference.model(tokens, use_cache=False)
    if name == "transformers eager, output_attentions":
        return lambda: [
            reduce(pattern) for pattern in reference.model(tokens, use_cache=False, output_attentions=True).attentions
        ]
    from transformer_lens.model_bridge import TransformerBridge

    logging.disable(logging.WARNING)
    bridge = TransformerBridge.boot_transformers(
        str(folder), hf_model=reference, tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    reduced: list[object] = []

    def read(pattern: Tensor, hook: object) -> None:
        reduced.append(reduce(pattern))

    def run() -> None:
        reduced.clear()
        bridge.run_with_hooks(
            tokens, return_type=None, fwd_hooks=[(lambda hook_name: hook_name.endswith("attn.hook_pattern"), read)]
        )

    return run


@torch.no_grad()
def times(names: tuple[str, ...], n_tokens: int, repeats: int) -> dict[str, float]:
    """The shortest of ``repeats`` interleaved runs of each variant, in seconds."""
    runs = {name: variant(name, n_tokens) for name in names}
    shortest = dict.fromkeys(names, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            shortest[name] = min(shortest[name], time.perf_counter() - start)
    return shortest


def peak_memory(name: str, n_tokens: int) -> float:
    """Largest resident size, while it runs, of a fresh process that runs the variant once, in GB (Linux)."""
    command = [sys.executable, __file__, "--tokens", str(n_tokens), "--measure-memory", name]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    return float(result.stdout.split()[-1]) if result.returncode == 0 else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", action="store_true", help="also Hugging Face eager and TransformerLens")
    parser.add_argument("--measure-memory", metavar="VARIANT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        run = variant(options.measure_memory, options.tokens)
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts afresh, without that of loading
        with torch.no_grad():
            run()
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        print(int(peak.split()[1]) * 1024 / 1e9)
        return
    names = OURS + (PEERS if options.peers else ())
    seconds = times(names, options.tokens, options.repeats)
    memory = {name: peak_memory(name, options.tokens) for name in names}
    print(f"SmolLM2-135M, {options.tokens} tokens, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in names:
        print(
            f"{name:40} {seconds[name]:8.2f} s  {seconds[name] / seconds['plain']:6.2f} × plain"
            f"   peak {memory[name]:6.2f} GB, {memory[name] - memory['plain']:+6.2f} GB to plain"
        )


if __name__ == "__main__":
    main()
