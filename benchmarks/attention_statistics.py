"""What each attention statistic costs, beside attention without any and beside torch's own.

    python benchmarks/attention_statistics.py [--tokens 4096] [--heads 9] [--kv-heads 3] [--d-head 64] [--repeats 7]

Prints ratios to torch's scaled_dot_product_attention on the same inputs, by default one layer of SmolLM2-135M. Times
are minima of interleaved runs in one process. On a machine that does other work the wall-clock ratios move by tens of
percent; the ratios of processor time, summed over all cores, move less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from workbench.kernels import AttentionMask, StatisticsRequest, attention

Run = Callable[[], object]


def variants(options: argparse.Namespace) -> dict[str, Run]:
    """Name -> one run, the first being torch's own."""
    n = options.tokens
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, options.d_head, generator=generator)
        for heads in (options.heads, options.kv_heads, options.kv_heads)
    )
    frequencies = 1 / torch.arange(1, 20_001)  # tokens as frequent as words of a text are (Zipf's law)
    tokens = torch.multinomial(frequencies, n, replacement=True, generator=generator)[None]
    everything = StatisticsRequest.all(tokens)
    requests = {
        "no statistics": StatisticsRequest(),
        "entropy": StatisticsRequest(entropy=True),
        "max_weight, argmax_key": StatisticsRequest(max_weight=True),
        "mean_distance": StatisticsRequest(mean_distance=True),
        "sink_mass, 4 keys": StatisticsRequest(sink_keys=4),
        "offset_mass, 2 offsets": StatisticsRequest(offsets=(0, 1)),
        "match_mass, 2 names": StatisticsRequest(match=everything.match),
        "class_mass, 8 classes": StatisticsRequest(classes=tokens % 8),
        "received, 3 forms": StatisticsRequest(received=True),
        f"pooled {everything.pooled}": StatisticsRequest(pooled=everything.pooled),
        "top_keys, 8": StatisticsRequest(top_keys=8),
        "all but class_mass, top_keys": everything,
    }

    def ours(request: StatisticsRequest) -> Run:
        return lambda: attention(q, k, v, mask=AttentionMask(), statistics=request)

    def torch_itself() -> object:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return {"torch": torch_itself} | {name: ours(request) for name, request in requests.items()}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("heads", 9), ("kv-heads", 3), ("d-head", 64), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    found = shortest(variants(options), options.repeats)
    wall, processor = found["torch"]
    print(
        f"{options.tokens} tokens, {options.heads} heads, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(f"{'':32}{'wall-clock':>22}{'processor time':>22}")
    for name, (own_wall, own_processor) in found.items():
        print(f"{name:32}{_cell(own_wall, wall)}{_cell(own_processor, processor)}")


def _cell(seconds: float, base: float) -> str:
    return f"{1e3 * seconds:11.1f} ms {seconds / base:5.2f} ×"


if __name__ == "__main__":
    main()
