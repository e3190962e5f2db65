"""Registers, spills and shared memory of every shipped Triton kernel, by compiling ahead of time: no GPU is needed.

    python benchmarks/triton_resources.py [--targets sm_80 sm_90 gfx942] [--kernels forward columns …] [--json]

Launches are recorded from the functions that make them, so what is compiled is what runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workbench.kernels import AttentionMask, StatisticsRequest, launch, triton_passes
from workbench.kernels.checks import check_scores
from workbench.kernels.matches import MatchRuns
from workbench.kernels.statistics import match_labels
from workbench.kernels.triton_plan import Plan

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
LIMITS = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}  # bytes of shared memory (LDS) a program may have
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
FORWARDS = {
    "forward": StatisticsRequest(),
    "forward, entropy": StatisticsRequest(entropy=True),
    "forward, maximum": StatisticsRequest(max_weight=True),
    "forward, distance": StatisticsRequest(mean_distance=True),
    "forward, all three": StatisticsRequest(entropy=True, max_weight=True, mean_distance=True),
}
KERNELS = (*FORWARDS, "probe", "columns", "query gradient", "key gradient")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes; ``spills`` are bytes of stack on NVIDIA, spilled vector registers on AMD."""

    target: str
    kernel: str
    d_head: int
    dtype: str
    rows: int
    columns: int
    warps: int
    stages: int
    registers: int
    spills: int
    shared: int
    fits: bool
    wgmma: bool


class _Recorder(list):
    """Stands in for ``launch`` and keeps what it is called with."""

    def __call__(self, kernel: Any, n_programs: int, sizes: launch.Tiles, **arguments: Any) -> None:
        self.append((kernel, sizes, arguments))


def launches(kernel: str, d_head: int, dtype: torch.dtype, vendor: str) -> list[tuple[Any, launch.Tiles, dict]]:
    """The launches of one pass over causal attention of 512 tokens, 4 heads on 2 key/value heads."""
    n = 512
    q, k = (torch.empty(2, heads, n, d_head, dtype=dtype) for heads in (4, 2))
    plan = Plan.of(q, k, check_scores(q, k, AttentionMask(), None, None, None, None))
    rows = torch.empty(2, 4, n)
    recorder = _Recorder()
    with patch.object(triton_passes, "launch", recorder), patch.object(launch, "VENDOR", vendor):
        if kernel in FORWARDS:
            triton_passes.run_forward(q, k, k, None, plan, FORWARDS[kernel])
        elif kernel.endswith("gradient"):
            triton_passes.run_backward(q, k, k, q, rows, rows, rows, plan)
            recorder[:] = [recorder[kernel == "key gradient"]]
        else:
            weights = triton_passes.Weights(q, k, plan, rows, rows)
            if kernel == "columns":
                weights.columns(StatisticsRequest(received=True, pooled=(64, 64)))
            else:
                tokens = torch.zeros(2, n, dtype=torch.int64)
                weights.sink(torch.zeros(2, 4, dtype=torch.int64))
                weights.offsets(torch.tensor([0, 1]))
                weights.matches(MatchRuns.of(match_labels(tokens, "induction"), plan.rule.mask))
    return list(recorder)


def compiled(kernel: Any, sizes: launch.Tiles, arguments: dict[str, Any], target: str) -> Any:
    """The kernel as Triton would compile it for these arguments."""
    constants = {name for name, flag in zip(kernel.arg_names, kernel.params, strict=True) if flag.is_constexpr}
    signature: dict[str, str] = {}
    values: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants or (type(value) is int and value == 1):
            signature[name], values[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages, "enable_fp_fusion": True}
    return triton.compile(source, target=TARGETS[target], options=options)


_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
}


def usage(binary: Any, target: str) -> tuple[int, int]:
    """Registers per thread, and what is spilled."""
    if target.startswith("gfx"):
        text = binary.asm["amdgcn"]
        registers, spills = (int(re.search(rf"\.vgpr_{what}:\s*(\d+)", text)[1]) for what in ("count", "spill_count"))
        return registers, spills
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def resources(targets: list[str], kernels: list[str], widths: list[int], dtypes: list[str]) -> Iterator[Resources]:
    for target in targets:
        for name in kernels:
            for d_head in widths:
                for dtype in dtypes:
                    for kernel, sizes, arguments in launches(name, d_head, DTYPES[dtype], TARGETS[target].backend):
                        binary = compiled(kernel, sizes, arguments, target)
                        registers, spills = usage(binary, target)
                        yield Resources(
                            target=target,
                            kernel=name,
                            d_head=d_head,
                            dtype=dtype,
                            rows=arguments["BLOCK_M"],
                            columns=arguments.get("BLOCK_N", 1),
                            warps=sizes.warps,
                            stages=sizes.stages,
                            registers=registers,
                            spills=spills,
                            shared=binary.metadata.shared,
                            fits=binary.metadata.shared <= LIMITS[target],
                            wgmma="wgmma.mma_async" in binary.asm.get("ptx", ""),
                        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    if not options.json:
        print(f"triton {triton.__version__}")
        print(f"{'target':8}{'kernel':26}{'d':>4} {'dtype':9}{'tile':>9}{'warps':>6}{'stages':>7}"
              f"{'registers':>11}{'spills':>8}{'shared':>9}  fits  wgmma")  # fmt: skip
    for row in resources(options.targets, options.kernels, options.widths, options.dtypes):
        if options.json:
            print(json.dumps(dataclasses.asdict(row)), flush=True)
        else:
            print(f"{row.target:8}{row.kernel:26}{row.d_head:4} {row.dtype:9}{f'{row.rows}x{row.columns}':>9}"
                  f"{row.warps:6}{row.stages:7}{row.registers:11}{row.spills:8}{row.shared:9}  "
                  f"{'yes' if row.fits else 'NO':4}  {'yes' if row.wgmma else '-'}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
