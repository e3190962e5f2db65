"""On a GPU: checks every shipped configuration against float64 once, then times it beside torch's own attention.

    python benchmarks/attention_gpu.py [--only check|time] [--longest 65536]

Needs torch and triton alone. The check follows FlashAttention's rule: an error at most twice that of a plain
implementation in the same precision. Times are medians. TFLOP/s count 4 · d operations per visible pair, 10 · d for the
backward, as the literature does, and stand beside the rate of a large matrix product on the same machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from workbench.kernels import AttentionMask, StatisticsRequest, attention

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIDTHS = (40, 64, 96, 128, 256)
N_HEADS, N_KV_HEADS = 8, 2


def options(n: int, device: str) -> dict[str, dict[str, Any]]:
    """Name -> arguments of ``attention``, which together use every option."""
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(2, n, generator=generator) < 0.8
    bias, sinks = torch.randn(N_HEADS, 2 * n - 1, generator=generator), torch.randn(N_HEADS, generator=generator)
    documents = (torch.arange(n) // (n // 3 + 1)).expand(2, n)
    sets = {
        "causal": {"mask": AttentionMask()},
        "window": {"mask": AttentionMask(window=n // 4, n_global=3), "softcap": 20.0},
        "padding": {
            "mask": AttentionMask(key_padding=real.to(device), query_padding=real.to(device)),
            "sink_logits": sinks,
        },
        "documents": {
            "mask": AttentionMask(documents=documents.to(device)),
            "alibi_slopes": 2.0 ** -torch.arange(1, 9),
        },
        "bidirectional": {"mask": AttentionMask(causal=False), "offset_bias": bias},
    }
    return {
        name: {key: value.to(device) if isinstance(value, Tensor) else value for key, value in arguments.items()}
        for name, arguments in sets.items()
    }


# ---- right? --------------------------------------------------------------------------------------------------------


def measured(q: Tensor, k: Tensor, v: Tensor, request: StatisticsRequest, backend: str, **arguments: Any) -> dict:
    """z, lse, every floating statistic and the gradients of a fixed function of z and lse."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = attention(*leaves, statistics=request, backend=backend, **arguments)
    weights = torch.linspace(-1, 1, found.z.numel(), device=q.device, dtype=found.z.dtype).view_as(found.z)
    lse = found.lse.masked_fill(found.lse == -torch.inf, 0.0)
    gradients = torch.autograd.grad((found.z * weights).sum() + lse.sum(), leaves)
    statistics = {name: value for name, value in found.statistics.items() if isinstance(value, Tensor)}
    statistics |= {f"match {name}": value for name, value in found.statistics["match_mass"].items()}
    floating = {name: value for name, value in statistics.items() if value.is_floating_point()}
    return {"z": found.z, **floating, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def faults(name: str, dtype: torch.dtype, d_head: int, n: int, device: str, backend: str = "triton") -> Iterator[str]:
    """What errs more than twice as much as a plain implementation, in words."""
    arguments = options(n, device)[name]
    generator = torch.Generator().manual_seed(d_head)
    q, k, v = (
        torch.randn(2, heads, n, d_head, generator=generator).to(device, dtype)
        for heads in (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    )
    tokens = torch.randint(0, 50, (2, n), generator=generator).to(device)
    request = dataclasses.replace(StatisticsRequest.all(tokens), pooled=(48, 80), classes=tokens % 5)
    exact = {key: value.double() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    golden = measured(q.double(), k.double(), v.double(), request, "reference", **exact)
    plain = measured(q, k, v, request, "reference", **arguments)
    found = measured(q, k, v, request, backend, **arguments)
    for key, value in golden.items():
        defined = value.isfinite()
        if not torch.equal(found[key].isfinite(), defined):
            yield f"{key}: not finite elsewhere than the reference"
            continue
        error, usual = ((x[key].double() - value)[defined].abs().max().item() for x in (found, plain))
        unit = torch.finfo(dtype if key in ("z", "dq", "dk", "dv") else torch.float32).eps
        allowed = 2 * usual + 8 * unit * (1 + value[defined].abs().max().item())
        if error > allowed:
            yield f"{key}: error {error:.1e}, allowed {allowed:.1e}"


def check(n: int, device: str, widths: tuple[int, ...] = WIDTHS) -> bool:
    """Prints a line per configuration: every dtype and head dimension, and every set of options at 64."""
    cases = [(option, "bfloat16", 64) for option in options(n, device)]
    cases += [case for case in itertools.product(["causal"], DTYPES, widths) if case not in cases]
    good = True
    for option, dtype, d_head in cases:
        found = list(faults(option, DTYPES[dtype], d_head, n, device))
        good &= not found
        print(f"  {option:14}{dtype:9} d {d_head:3}  {'ok' if not found else '; '.join(found)}", flush=True)
    return good


# ---- fast? ---------------------------------------------------------------------------------------------------------

STATISTICS = {
    "z and lse": StatisticsRequest(),
    "+ entropy": StatisticsRequest(entropy=True),
    "+ max_weight": StatisticsRequest(max_weight=True),
    "+ mean_distance": StatisticsRequest(mean_distance=True),
    "+ sink_mass, 4 keys": StatisticsRequest(sink_keys=4),
    "+ offset_mass, 2": StatisticsRequest(offsets=(0, 1)),
    "+ received": StatisticsRequest(received=True),
}


def milliseconds(run: Callable[[], object]) -> float:
    return float(triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median"))


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / milliseconds(lambda: a @ a) * 1e3


def rivals(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """torch's own causal attentions that run here."""
    for name, backend in (("SDPA flash", SDPBackend.FLASH_ATTENTION), ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION)):

        def sdpa(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        yield name, sdpa
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = q.shape[2]
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda")
    compiled = torch.compile(flex_attention)
    yield "FlexAttention", lambda: compiled(q, k, v, block_mask=blocks)


def backward(run: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    z = run()
    dz = torch.randn_like(z)
    return lambda: torch.autograd.grad(z, leaves, dz, retain_graph=True)


def times(d_head: int, n: int, peak: float) -> None:
    heads = 16
    leaves = [torch.randn(1, heads, n, d_head, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    q, k, v = leaves
    pairs = heads * n * (n + 1) / 2
    tokens = torch.multinomial(1 / torch.arange(1, 20_001), n, replacement=True)[None].cuda()
    requests = STATISTICS | {
        "+ match_mass, 2": StatisticsRequest(match=StatisticsRequest.all(tokens).match),
        "+ pooled": StatisticsRequest(pooled=StatisticsRequest.all(tokens).pooled),
        "+ everything": StatisticsRequest.all(tokens),
    }
    first = None

    def line(name: str, run: Callable[[], object], operations: float) -> None:
        nonlocal first
        try:
            took = milliseconds(run)
        except RuntimeError as error:  # not every torch attention runs on every GPU
            print(f"  {name:28} does not run: {str(error).splitlines()[0]}")
            return
        first = took if first is None else first
        rate = operations * d_head * pairs / took * 1e3
        print(
            f"  {name:28}{took:9.3f} ms {rate / 1e12:7.0f} TFLOP/s {rate / peak:6.0%}  {took / first:6.2f} ×",
            flush=True,
        )

    print(f"d_head {d_head}, {n} tokens, {heads} heads, bfloat16, causal; ratios to the first line")
    with torch.no_grad():
        for name, request in requests.items():
            line(name, lambda request=request: attention(q, k, v, mask=AttentionMask(), statistics=request), 4)
        for name, run in rivals(q, k, v):
            line(name, run, 4)
    first = None
    ours = ("z and lse", lambda: attention(q, k, v, mask=AttentionMask()).z)
    for name, run in (ours, *rivals(q, k, v)):
        try:
            step = backward(run, leaves)
        except RuntimeError as error:
            print(f"  backward, {name:18} does not run: {str(error).splitlines()[0]}")
            continue
        line(f"backward, {name}", step, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("check", "time"))
    parser.add_argument("--longest", type=int, default=65_536)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here that torch can use.")
    start = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    good = True
    if arguments.only != "time":
        print("check, 300 tokens, against float64")
        good = check(300, "cuda")
    if arguments.only != "check":
        peak = matmul_rate()
        print(f"bfloat16 matrix product: {peak / 1e12:.0f} TFLOP/s")
        for d_head, n in itertools.product((64, 128), (2048, 8192, 16_384, 65_536)):
            if n <= arguments.longest:
                times(d_head, n, peak)
    print(f"{time.monotonic() - start:.0f} s")
    if not good:
        raise SystemExit("Some configurations are wrong.")


if __name__ == "__main__":
    main()
