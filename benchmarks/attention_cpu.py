"""What attention statistics cost on a CPU, beside torch's own attention without any.

    python benchmarks/attention_cpu.py [--tokens 512 4096 16384] [--window 512] [--repeats 5] [--each]

One layer of SmolLM2-135M's shape (9 heads on 3 key/value heads of 64, float32, causal). Times are minima of interleaved
runs in one process, memory is the peak of a process of its own above its inputs. On a machine that does other work the
wall-clock ratios move by tens of percent; those of processor time, summed over all cores, move less. ``--each`` prints
every statistic alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workbench.kernels import AttentionMask, StatisticsRequest, attention

HEADS, KV_HEADS, D_HEAD = 9, 3, 64
LARGEST_PATTERN = 4096  # tokens up to which patterns are materialised here
Run = Callable[[], object]


def variants(n: int, options: argparse.Namespace) -> dict[str, Run]:
    """Name -> one run, the first being torch's own causal attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, D_HEAD, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    frequencies = 1 / torch.arange(1, 20_001)  # tokens as frequent as words of a text are (Zipf's law)
    tokens = torch.multinomial(frequencies, n, replacement=True, generator=generator)[None]
    everything = StatisticsRequest.all(tokens)
    requests = {
        "z and lse": StatisticsRequest(),
        "z, entropy, maximum": StatisticsRequest(entropy=True, max_weight=True),
        "z, all but classes, top keys": everything,
    }
    if options.each:
        requests |= {
            "entropy": StatisticsRequest(entropy=True),
            "max_weight": StatisticsRequest(max_weight=True),
            "mean_distance": StatisticsRequest(mean_distance=True),
            "sink_mass, 4 keys": StatisticsRequest(sink_keys=4),
            "offset_mass, 2 offsets": StatisticsRequest(offsets=(0, 1)),
            "match_mass, 2 names": StatisticsRequest(match=everything.match),
            "class_mass, 8 classes": StatisticsRequest(classes=tokens % 8),
            "received": StatisticsRequest(received=True),
            "pooled": StatisticsRequest(pooled=everything.pooled),
            "top_keys, 8": StatisticsRequest(top_keys=8),
        }
    runs: dict[str, Run] = {
        "torch": partial(scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True),
        **{
            name: partial(attention, q, k, v, mask=AttentionMask(), statistics=asked)
            for name, asked in requests.items()
        },
    }
    if (window := options.window) is not None:
        # torch's operator knows no window; one that hides a single pair sends causal attention through the same tiles.
        for kind, mask in (("causal", AttentionMask(window=n - 1)), (f"window {window}", AttentionMask(window=window))):
            for name, asked in (("z and lse", StatisticsRequest()), ("all", everything)):
                runs[f"{kind} in tiles, {name}"] = partial(attention, q, k, v, mask=mask, statistics=asked)
    if n <= LARGEST_PATTERN:
        asked = {"mask": AttentionMask(), "statistics": everything, "backend": "reference"}
        runs["all from the whole pattern"] = partial(attention, q, k, v, **asked)
    if options.flex:
        runs["FlexAttention"] = flex(q, k, v)
    return runs


def share(window: int, n: int) -> float:
    """The part of the pairs of causal attention that a window leaves."""
    window = min(window, n)
    return (n * window - window * (window - 1) / 2) / (n * (n + 1) / 2)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Run:
    """torch's FlexAttention, which needs a C++ compiler on a CPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu")
    compiled = torch.compile(flex_attention)
    run = partial(compiled, q, k, v, block_mask=blocks, enable_gqa=True)
    run()  # compiles
    return run


@torch.no_grad()
def shortest(runs: dict[str, Run], repeats: int) -> dict[str, tuple[float, float]]:
    """Minima of wall-clock and of processor time in seconds."""
    found = {name: (float("inf"), float("inf")) for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            wall, processor = time.perf_counter(), time.process_time()
            run()
            wall, processor = time.perf_counter() - wall, time.process_time() - processor
            found[name] = (min(found[name][0], wall), min(found[name][1], processor))
    return found


def peak_memory(name: str, n: int, options: argparse.Namespace) -> float:
    """What a fresh process that runs the variant once takes above its inputs, in MB (Linux)."""
    command = [sys.executable, __file__, "--tokens", str(n), "--measure-memory", name]
    command += (["--window", str(options.window)] if options.window else []) + (["--each"] if options.each else [])
    command += ["--flex"] if name == "FlexAttention" else []
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    return float(result.stdout.split()[-1]) if result.returncode == 0 else float("nan")


def resident(field: str) -> float:
    """VmRSS or VmHWM of this process, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument("--window", type=int, help="also a window of so many keys, beside the same code without")
    parser.add_argument("--each", action="store_true", help="also every statistic alone")
    parser.add_argument("--flex", action="store_true", help="also FlexAttention, which takes a minute to compile")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure-memory", metavar="VARIANT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure_memory:
        for n in (64, options.tokens[0]):  # a short run first, which loads what is loaded only once
            runs = variants(n, options)
            run = runs[options.measure_memory]
            if n == 64:
                run()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts afresh
        before = resident("VmRSS")
        with torch.no_grad():
            run()
        print(resident("VmHWM") - before)
        return
    print(f"{HEADS} heads of {D_HEAD}, float32, causal, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for n in options.tokens:
        found = shortest(variants(n, options), options.repeats)
        wall, processor = found["torch"]
        pattern = HEADS * n * n * 4 / 1e6
        if options.window is not None:
            for name in ("z and lse", "all"):
                window, causal = found[f"window {options.window} in tiles, {name}"], found[f"causal in tiles, {name}"]
                shares = [part / whole / share(options.window, n) for part, whole in zip(window, causal, strict=True)]
                print(
                    f"\nwindow {options.window} of {n}, {name}: {shares[0]:.2f} × its share of the causal time "
                    f"({share(options.window, n):.1%} of the pairs), {shares[1]:.2f} × of processor time"
                )
        print(f"\n{f'{n} tokens':32}{'wall-clock':>22}{'processor time':>22}{'memory':>12}  of the pattern")
        for name, (own_wall, own_processor) in found.items():
            memory = peak_memory(name, n, options)
            cells = _cell(own_wall, wall) + _cell(own_processor, processor)
            print(f"{name:32}{cells}{memory:9.0f} MB{memory / pattern:10.1%}", flush=True)


def _cell(seconds: float, base: float) -> str:
    return f"{1e3 * seconds:11.1f} ms {seconds / base:5.2f} ×"


if __name__ == "__main__":
    main()
