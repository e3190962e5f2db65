"""The Triton kernels compiled ahead of time for GPUs that need not be there: nothing spills, everything fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "triton_resources.py"


def resources(tmp_path, *options):
    """What the script prints, compiled anew and not by the interpreter that the other tests use."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(SCRIPT), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_forward_and_columns_neither_spill_nor_outgrow_shared_memory(tmp_path, target):
    kernels = ("forward", "forward, all three", "columns")
    found = resources(
        tmp_path, "--targets", target, "--kernels", *kernels, "--widths", "40", "64", "128", "--dtypes", "float16"
    )
    assert [(row["kernel"], row["d_head"]) for row in found] == [(name, d) for name in kernels for d in (40, 64, 128)]
    for row in found:
        assert row["spills"] == 0 and row["fits"], row
        assert row["wgmma"] == (target == "sm_90"), row


def test_gradients_and_probes_compile(tmp_path):
    kernels = ("probe", "query gradient", "key gradient")
    found = resources(
        tmp_path, "--targets", "sm_90", "--kernels", *kernels, "--widths", "128", "--dtypes", "bfloat16", "float32"
    )
    assert len(found) == 2 * (3 + 1 + 1)  # sink, offset and match mass are three kinds of probe
    assert all(row["spills"] == 0 and row["fits"] for row in found), found
