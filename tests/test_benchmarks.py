"""The benchmark scripts run, on little; what they print is not looked at but for whether it is right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench.kernels import AttentionOutput, dispatch, launch

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_script(monkeypatch):
    for key in launch.TILES:
        monkeypatch.setitem(launch.TILES, key, launch.Tiles(rows=32, columns=32))
    return load("attention_gpu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where -inf meets inf before the mask
@pytest.mark.parametrize("option", ["causal", "window", "padding", "documents", "bidirectional"])
def test_the_gpu_check_finds_nothing_in_the_interpreter(gpu_script, option):
    assert list(gpu_script.options(40, "cpu")) == ["causal", "window", "padding", "documents", "bidirectional"]
    assert list(gpu_script.faults(option, torch.float16, 16, 40, "cpu")) == []


def test_the_gpu_check_finds_what_is_wrong(gpu_script, monkeypatch):
    def wrong(*arguments):
        output = dispatch.BACKENDS["reference"](*arguments)
        statistics = type(output.statistics)({**output.statistics, "entropy": output.statistics["entropy"] * 1.01})
        return AttentionOutput(z=output.z, lse=output.lse, statistics=statistics)

    monkeypatch.setitem(dispatch.BACKENDS, "wrong", wrong)
    found = list(gpu_script.faults("causal", torch.float32, 16, 40, "cpu", backend="wrong"))
    assert len(found) == 1 and found[0].startswith("entropy")


def test_the_gpu_script_says_that_there_is_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, FOLDER / "attention_gpu.py"], capture_output=True, text=True)
    assert done.returncode == 1 and "no GPU" in done.stderr and "Traceback" not in done.stderr


def test_the_cpu_script_measures_every_variant():
    command = [
        sys.executable,
        FOLDER / "attention_cpu.py",
        "--tokens",
        "128",
        "--window",
        "16",
        "--each",
        "--repeats",
        "1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if " MB" in line]
    assert len(rows) == 1 + 3 + 10 + 4 + 1
    assert "nan" not in done.stdout


def test_the_decoding_script_measures_every_pass_and_policy():
    command = [sys.executable, FOLDER / "decoding.py", "--tokens", "16", "40", "--window", "8", "--repeats", "1"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert sum(" ms" in row for row in rows) == 2 and sum("cached step " in row for row in rows) >= 2
    assert sum(" MB" in row for row in rows) == 3 * 3
    assert "nan" not in done.stdout


def test_work_of_a_pass_is_counted():
    """Prefill of n tokens and then a step do the operations of a prefill of n + 1; a step reads all weights again."""
    script = load("decoding")
    model = script.build(2, 50)
    whole, prefill, step = (script.work(model, *sizes) for sizes in ((0, 41), (0, 40), (40, 1)))
    assert whole.operations == prefill.operations + step.operations
    per_token = 2 * 6 * 2 * 32 * 4
    assert prefill.bytes + per_token == step.bytes == whole.bytes
    assert prefill.intensity > 30 * step.intensity


def test_the_head_sweep_gives_what_the_naive_loop_gives():
    command = [sys.executable, FOLDER / "head_sweep.py", "demo", "--prompts", "3", "--tokens", "8"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    first, bound, *rows = done.stdout.splitlines()
    assert first == "16 heads, 3 prompts of 8 tokens" and bound.startswith("restarting")
    differences = {row.split()[0]: float(row.split()[-2]) for row in rows}
    assert set(differences) == {"sweep", "run_with_hooks"} and max(differences.values()) < 1e-4
