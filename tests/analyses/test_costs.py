"""What analyses are expected to take, against what they take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses.costs import estimate_analysis
from workbench.analyses.prompts import DescribedTokens
from workbench.errors import ModelNotFoundError
from workbench.estimates import Estimate, Speed, bytes_in_words, estimate_run, measured_speed, seconds_in_words
from workbench.loading.sizes import weights_bytes

MEASURE = r"""
import ctypes, json, re, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from workbench import HookedTransformer, analyses
model = HookedTransformer.from_pretrained("demo")
def resident(field):
    return 1024 * int(re.search(field + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
def run(name, shape):
    getattr(analyses, name)(model, torch.randint(0, 1792, shape))
def measured(name, shape):
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh, without that of whoever started this
    before = resident("VmRSS")
    run(name, shape)
    return resident("VmHWM") - before
names = json.loads(sys.argv[1])
for name in names:
    run(name, (1, 32))
print(json.dumps([measured(*pair) for pair in names.items()]))
"""
SHAPES = {"what_if": (1, 256), "head_statistics": (16, 256), "logit_lens": (1, 256), "attention_sinks": (128, 64)}
SPEED = Speed(products=1e-10, pairs=1e-8, measured_pairs=4e-8, entries=2e-8, calls=1e-3)


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def estimated(model: HookedTransformer, name: str, shape: tuple[int, int]) -> Estimate:
    inputs = DescribedTokens(torch.zeros(shape, dtype=torch.int64), "zeros")
    arguments = (model.cfg.n_layers - 1, 0) if name == "head_pattern" else ()
    estimate = estimate_analysis(name, model, inputs, arguments)
    assert estimate is not None
    return estimate


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from Linux's /proc")
def test_memory_is_known_within_a_factor_of_two(demo: HookedTransformer, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, json.dumps(SHAPES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    ratios = {
        name: measured / estimated(demo, name, shape).n_bytes
        for (name, shape), measured in zip(SHAPES.items(), json.loads(done.stdout), strict=True)
    }
    assert all(0.5 < ratio < 2 for ratio in ratios.values()), ratios


def test_work_grows_as_it_should(demo: HookedTransformer) -> None:
    cfg = demo.cfg
    short, long = (estimated(demo, "head_statistics", (1, n)) for n in (128, 256))
    # Of a token in a layer: d_model · (4 · 4 heads of 32, for queries, keys, values and output, and 3 · d_mlp).
    assert short.products == 128 * 4 * 128 * (4 * 128 + 3 * 352)
    assert long.products == 2 * short.products
    assert short.measured_pairs == cfg.n_layers * cfg.n_heads * 128 * 129 / 2
    assert estimated(demo, "head_pattern", (1, 128)).measured_pairs == 128 * 129 / 2  # of the one head
    # Every depth and, beside each, the end: 1792 probabilities of 128 tokens, twice 5 times.
    assert estimated(demo, "logit_lens", (1, 128)).entries == 10 * 128 * 1792
    ten, twenty = (estimated(demo, "attribution_agreement", (n, 16)).seconds(SPEED) for n in (10, 20))
    assert twenty > ten
    assert estimate_analysis("head_circuits", demo) is None


def test_estimates_add_up_and_say_so() -> None:
    one, other = Estimate(100, products=10, calls=1), Estimate(300, products=5)
    assert one + other == Estimate(300, products=15, calls=1)  # one after the other: the larger peak
    assert (one * 3).keeping(50) == Estimate(150, products=30, calls=3)
    assert (one + other).seconds(Speed(2.0, 0, 0, 0, 0.5)) == 30.5
    assert [bytes_in_words(n) for n in (3e5, 1.26e6, 45e6, 1.24e9, 14e9)] == [
        "less than 1 MB", "1.3 MB", "45 MB", "1.2 GB", "14 GB",
    ]  # fmt: skip
    assert [seconds_in_words(s) for s in (0.3, 41.6, 88, 91, 3000, 7300)] == [
        "less than 1 s", "42 s", "88 s", "1.5 min", "50 min", "2 h",
    ]  # fmt: skip


def test_windows_see_fewer_pairs() -> None:
    cfg = TransformerConfig(
        n_layers=2, d_model=8, n_heads=3, d_head=4, d_mlp=8, d_vocab=10, n_ctx=64, attn_types=("local", "global"),
        window_size=4,
    )  # fmt: skip
    # Of 10 tokens the first 4 see 1 + 2 + 3 + 4 keys, the other 6 see 4; without a window 55.
    assert estimate_run(cfg, 10).pairs == 3 * ((10 + 24) + 55)
    # d_model · (4 · 3 heads of 4, for queries, keys, values and output, and 2 · d_mlp), and the unembedding.
    assert estimate_run(cfg, 40, n_layers=1, logits=True).products == 40 * (8 * (4 * 12 + 2 * 8) + 8 * 10)
    assert estimate_run(cfg, 1).products == estimate_run(cfg, 32).products  # which wait for the weights alike


def test_what_runs_token_by_token_is_counted_so(demo: HookedTransformer) -> None:
    def of(name: str, shape: tuple[int, int], **options: int) -> Estimate:
        inputs = DescribedTokens(torch.zeros(shape, dtype=torch.int64), "zeros")
        found = estimate_analysis(name, demo, inputs, (), options)
        assert found is not None
        return found

    # The whole text, three first windows, 100 tokens with each of three caches, and 25 windows, which fit into one run.
    streamed = of("streaming_perplexity", (1, 164), window=64, recompute_every=4)
    assert streamed.calls == pytest.approx(demo.cfg.n_layers * (1 + 3 + 3 * 100 + 1))
    # The prompt, 24 tokens, and all of them again.
    assert of("generation_statistics", (1, 60), n_tokens=24).calls == demo.cfg.n_layers * (1 + 24 + 1)


def test_weights_are_counted_from_the_files_headers(demo: HookedTransformer, tmp_path: Path) -> None:
    held = sum(parameter.numel() * parameter.element_size() for parameter in demo.parameters())
    assert weights_bytes("demo") == held and weights_bytes("demo", torch.float16) == held / 2
    demo.save_pretrained(tmp_path / "copy")
    assert weights_bytes(tmp_path / "copy") == held
    assert weights_bytes("nobody/has-this-model") is None
    with pytest.raises(ModelNotFoundError, match="there is no folder or file"):
        weights_bytes("/nowhere/at/all")


def test_speed_is_measured_once_and_is_plausible() -> None:
    speed = measured_speed()
    assert measured_speed() is speed
    assert 1e-13 < speed.products < 1e-8 and speed.products < speed.pairs < speed.measured_pairs < 1e-5
