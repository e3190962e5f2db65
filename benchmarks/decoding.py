"""What a key/value cache saves and costs, and what bounds reading a prompt and writing on.

    python benchmarks/decoding.py [--tokens 128 512 2048] [--repeats 3] [--window 256]

Prints, for a random rotary model and each length of text:

- the time of reading it at once (prefill), of one more token on the cache, and of one more token without a cache, which
  reads everything again;
- the operations of prefill and of a decoding step for each byte of memory that they must touch (weights, keys and
  values), and the rates that were reached. A pass over many tokens uses each weight many times, a decoding step once:
  prefill is bound by arithmetic, decoding by memory.
- the cache's bytes, for as many key/value heads as heads (MHA), fewer (GQA) and one (MQA), and for each policy.

Times are minima of interleaved runs in one process; trust their ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from workbench import HookedTransformer, KVCache, TransformerConfig

KEY_VALUE_HEADS = {"MHA": 8, "GQA": 2, "MQA": 1}


def build(n_key_value_heads: int, n_ctx: int) -> HookedTransformer:
    cfg = TransformerConfig(
        n_layers=6, d_model=256, n_heads=8, d_head=32, d_mlp=1024, d_vocab=2048, n_ctx=n_ctx,
        n_key_value_heads=n_key_value_heads, positional_embedding_type="rotary", normalization_type="RMS",
        gated_mlp=True, act_fn="silu",
    )  # fmt: skip
    return HookedTransformer(cfg).eval()


def text(n_tokens: int) -> Tensor:
    return torch.randint(0, 2048, (1, n_tokens), generator=torch.Generator().manual_seed(0))


class Work(NamedTuple):
    """What one pass of ``n_new`` tokens after ``n_before`` must do."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        return self.operations / self.bytes


def work(model: HookedTransformer, n_before: int, n_new: int) -> Work:
    """Each weight multiplies and adds once for each token; each visible key and each value once for each head."""
    cfg = model.cfg
    weights = sum(p.numel() for name, p in model.named_parameters() if name != "embed.W_E")  # of which rows are read
    visible = n_new * n_before + n_new * (n_new + 1) / 2
    operations = 2 * weights * n_new + 4 * visible * cfg.n_heads * cfg.d_head * cfg.n_layers
    cached = (n_before + n_new) * KVCache().bytes_per_token(cfg)
    return Work(operations, weights * cfg.dtype.itemsize + cached)


@torch.no_grad()
def times(model: HookedTransformer, lengths: list[int], repeats: int) -> dict[tuple[str, int], float]:
    """Seconds for (what, length): the shortest of ``repeats`` interleaved runs."""
    runs: dict[tuple[str, int], Callable[[], object]] = {}
    for n in lengths:
        tokens, cache = text(n + 1), KVCache()
        model(tokens[:, :n], kv_cache=cache)
        runs["prefill", n] = partial(model, tokens[:, :n])  # what a cache remembers of it costs nothing more
        runs["cached step", n] = partial(model, tokens[:, n:], kv_cache=cache)  # a token longer every time: no matter
        runs["step without", n] = partial(model, tokens)
    shortest = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            shortest[key] = min(shortest[key], time.perf_counter() - start)
    return shortest


@torch.no_grad()
def memory(n_tokens: int, window: int) -> dict[tuple[str, str], int]:
    """The cache's bytes for (heads, policy) after a text; a window, which is full by then, reads 8 tokens beyond."""
    found = {}
    for heads, n_key_value_heads in KEY_VALUE_HEADS.items():
        model = build(n_key_value_heads, n_tokens)
        policies = {
            "full": KVCache(),
            f"window {window}": KVCache(window=window),
            f"window {window}, 4 sinks": KVCache(window=window, n_sink_tokens=4),
        }
        for policy, cache in policies.items():
            n = n_tokens if cache.window is None else min(n_tokens, window + 8)
            model(text(n), return_type=None, kv_cache=cache)
            found[heads, policy] = cache.nbytes
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    lengths = sorted(options.tokens)
    model = build(KEY_VALUE_HEADS["MHA"], lengths[-1] + options.repeats + 1)
    print(f"{model.cfg.n_layers} layers of {model.cfg.d_model}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    seconds = times(model, lengths, options.repeats)
    print(f"\n{'tokens':>7} {'prefill':>10} {'cached step':>12} {'without':>10} {'without ÷ cached':>17}")
    for n in lengths:
        prefill, cached, without = (seconds[what, n] for what in ("prefill", "cached step", "step without"))
        print(f"{n:7} {prefill * 1e3:7.1f} ms {cached * 1e3:9.1f} ms {without * 1e3:7.1f} ms {without / cached:17.1f}")
    print(f"\n{'tokens':>7} {'pass':12} {'operations per byte':>20} {'10⁹ operations/s':>17} {'10⁹ bytes/s':>12}")
    for n in lengths:
        for what, done in (("prefill", work(model, 0, n)), ("cached step", work(model, n, 1))):
            per_second = 1e-9 / seconds[what, n]
            rates = f"{done.operations * per_second:17.1f} {done.bytes * per_second:12.2f}"
            print(f"{n:7} {what:12} {done.intensity:20.2f} {rates}")
    print(f"\ncache after {2 * options.window} tokens")
    held = memory(2 * options.window, options.window)
    for (heads, policy), n_bytes in held.items():
        of_largest = n_bytes / held["MHA", "full"]
        print(f"{heads} {policy:20} {n_bytes / 1e6:9.3f} MB {of_largest:7.1%} of MHA, full")


if __name__ == "__main__":
    main()
