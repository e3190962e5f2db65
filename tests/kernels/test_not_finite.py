"""NaN goes in, NaN comes out: never a zero that looks like a number."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter

ROW = 5


@pytest.mark.parametrize("backend", ["reference", "streaming", "triton"])
@pytest.mark.parametrize("what", ["query", "key"])
@pytest.mark.parametrize("top_keys", [0, 1])
def test_nan_reaches_exactly_the_rows_that_see_it(backend: str, what: str, top_keys: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    (q if what == "query" else k)[0, 1, ROW] = torch.nan
    request = StatisticsRequest(entropy=True, sink_keys=2, top_keys=top_keys)
    output = attention(q, k, v, mask=AttentionMask(), statistics=request, backend=backend)
    rows = torch.arange(12)
    touched = torch.stack((torch.zeros(12, dtype=torch.bool), rows == ROW if what == "query" else rows >= ROW))[None]
    for values in (output.z.isnan().any(-1), output.lse.isnan(), output.statistics["entropy"].isnan()):
        assert torch.equal(values, touched)
    assert torch.equal(output.statistics["sink_mass"].isnan(), touched)
    if top_keys:
        assert torch.equal(output.statistics["top_weights"][..., 0].isnan(), touched)


def test_nan_behind_padding_reaches_nothing() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind()
    real = torch.arange(12)[None] < 9
    k[:, :, 9:] = torch.nan
    mask = AttentionMask(key_padding=real, query_padding=real)
    assert attention(q, k, v, mask=mask, backend="streaming").z.isfinite().all()
