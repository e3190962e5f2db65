"""What a run of a model takes, from its configuration alone: memory exactly enough to plan by, time roughly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import psutil
import torch

from workbench.config import TransformerConfig
from workbench.kernels import AttentionMask, StatisticsRequest, attention

STATISTICS_BYTES = 160  # of one head and token: some twenty numbers, twice while the layers' are put together
TILE_BYTES = 12_000_000  # of the scores that statistics hold at a time
FEWEST_ROWS = 32  # of a matrix product: over fewer it takes as long, as it waits for the weights
CALL_SECONDS = 1e-3  # of a layer, however few tokens it reads


@dataclass(frozen=True)
class Estimate:
    """What a computation takes beside the model's weights.

    Args:
        n_bytes: of memory, at its peak.
        products: multiply–adds in matrix products.
        pairs: pairs of a query and a key that it sees, over all heads.
        measured_pairs: those of them whose statistics are computed.
        entries: probabilities over the vocabulary in float64.
        calls: layers that run, however many tokens each reads.
    """

    n_bytes: float = 0.0
    products: float = 0.0
    pairs: float = 0.0
    measured_pairs: float = 0.0
    entries: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        """Both, one after the other."""
        work = {name: getattr(self, name) + getattr(other, name) for name in _WORK}
        return Estimate(n_bytes=max(self.n_bytes, other.n_bytes), **work)

    def __mul__(self, times: float) -> Estimate:
        """The same so many times, one after the other."""
        return replace(self, **{name: getattr(self, name) * times for name in _WORK})

    def keeping(self, n_bytes: float) -> Estimate:
        """The same with so many bytes that are held all the time."""
        return replace(self, n_bytes=self.n_bytes + n_bytes)

    def seconds(self, speed: Speed) -> float:
        return sum(getattr(self, name) * getattr(speed, name) for name in _WORK)


@dataclass(frozen=True)
class Speed:
    """Seconds for one of each kind of work; names as of Estimate."""

    products: float
    pairs: float
    measured_pairs: float
    entries: float
    calls: float


_WORK = tuple(field.name for field in fields(Speed))


def estimate_run(
    cfg: TransformerConfig,
    n_tokens: int,
    *,
    n_sequences: int = 1,
    n_layers: int | None = None,
    statistics: bool = False,
    logits: bool = False,
    streams: bool = False,
) -> Estimate:
    """One run without gradients over ``n_sequences`` of ``n_tokens`` each, all at a time.

    Args:
        n_layers: so many layers run; None is all.
        statistics: whether attention statistics are computed, as ``run_with_statistics`` does.
        logits: whether all positions are unembedded.
        streams: whether the residual stream at every layer is kept.
    """
    n, layers = n_sequences * n_tokens, cfg.n_layers if n_layers is None else n_layers
    queries, keys = cfg.n_heads * cfg.d_head, cfg.n_key_value_heads * cfg.d_head
    n_matrices = 3 if cfg.gated_mlp else 2
    width = cfg.d_mlp * (cfg.moe.n_experts_per_token if cfg.moe else 1)
    per_layer = cfg.d_model * (2 * queries + 2 * keys + n_matrices * width)  # multiply–adds of a token
    in_attention = 2 * cfg.d_model + 3 * (queries + keys)  # numbers of a token that exist at a time
    in_mlp = 3 * cfg.d_model + n_matrices * width
    size = cfg.dtype.itemsize
    n_bytes = n * size * max(in_attention, in_mlp)
    n_bytes += n * size * cfg.d_vocab * logits + n * size * cfg.d_model * (layers + 1) * streams
    if statistics:
        n_bytes += STATISTICS_BYTES * layers * cfg.n_heads * n + TILE_BYTES
    pairs = n_sequences * cfg.n_heads * sum(_visible(cfg, kind, n_tokens) for kind in cfg.layer_types[:layers])
    return Estimate(
        n_bytes=n_bytes,
        products=max(n, FEWEST_ROWS) * (layers * per_layer + cfg.d_model * cfg.d_vocab * logits),
        pairs=0.0 if statistics else pairs,
        measured_pairs=pairs if statistics else 0.0,
        calls=layers,
    )


def _visible(cfg: TransformerConfig, kind: str, n: int) -> float:
    """Pairs of a query and a key that it sees, in one head of a layer on ``n`` tokens."""
    if cfg.attention_dir == "bidirectional":
        return float(n * n)
    seen = n if kind != "local" or cfg.window_size is None else min(cfg.window_size + cfg.n_global_tokens, n)
    return seen * (seen + 1) / 2 + (n - seen) * seen


@cache
def measured_speed(device: str = "cpu") -> Speed:
    """How fast this machine is, measured once on each device, in about 0.1 s, and in float32."""

    def seconds(run: Callable[[], Any]) -> float:
        return min(_timed(run, device) for _ in range(4))

    generator = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    x, weights, logits = numbers(256, 512), numbers(512, 512), numbers(32, 8192)
    q, n = numbers(1, 4, 512, 64), 512
    request = StatisticsRequest(entropy=True, max_weight=True, mean_distance=True, sink_keys=4, received=True)
    options: dict[str, Any] = {"mask": AttentionMask(causal=True), "scale": 0.125}
    n_pairs = 4 * n * (n + 1) / 2
    with torch.no_grad():
        return Speed(
            products=seconds(lambda: x @ weights) / (256 * 512 * 512),
            pairs=seconds(lambda: attention(q, q, q, **options)) / n_pairs,
            measured_pairs=seconds(lambda: attention(q, q, q, statistics=request, **options)) / n_pairs,
            entries=3 * seconds(lambda: logits.double().log_softmax(dim=-1).exp()) / logits.numel(),
            calls=CALL_SECONDS,
        )


def _timed(run: Callable[[], Any], device: str) -> float:
    started = time.perf_counter()
    run()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def free_memory(device: str | torch.device = "cpu") -> int:
    """Bytes that a device has left."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def bytes_in_words(n_bytes: float) -> str:
    """Such as "1.2 GB", with two digits that count."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if n_bytes >= 0.995 * size:
            return f"{n_bytes / size:.1f} {unit}" if n_bytes < 9.95 * size else f"{n_bytes / size:,.0f} {unit}"
    return "less than 1 MB"


def seconds_in_words(seconds: float) -> str:
    """Such as "40 s" or "3 min", with at most two digits."""
    if seconds < 1:
        return "less than 1 s"
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 1.5 * size or unit == "s":
            return f"{float(f'{seconds / size:.2g}'):,.3g} {unit}"
    raise AssertionError("seconds are the least unit")
