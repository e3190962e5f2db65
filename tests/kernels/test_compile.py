"""torch.compile breaks its graph where it must: outputs, statistics and gradients stay what they are."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter
@pytest.mark.parametrize("n_threads", [1, 2])  # with one thread the work is not handed to others, so it is compiled
@pytest.mark.parametrize(
    ("backend", "window"), [("streaming", None), ("streaming", 9), ("triton", None)], ids=["flash", "tiles", "triton"]
)
def test_torch_compile_changes_nothing(backend, window, n_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: n_threads)
    torch.compiler.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3))

    def step(q, k, v):
        mask, request = AttentionMask(window=window), StatisticsRequest(entropy=True)
        found = attention(2 * q, k, v, mask=mask, statistics=request, backend=backend)
        return found.z.sin(), found.statistics["entropy"] + 1

    expected, found = step(q, k, v), torch.compile(step, backend="aot_eager")(q, k, v)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(z.sum(), (q, k, v)) for z, _ in (expected, found)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
