"""NaN goes in, NaN comes out: never a zero that looks like a number."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention
from workbench.kernels.checks import check_scores
from workbench.kernels.scores import all_finite

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("entries", "finite"),
    [((1.0, 1.0), True), ((torch.nan, 1.0), False), ((torch.inf, 1.0), False), ((torch.inf, -torch.inf), False),
     (("largest", "largest"), True), (("largest", -torch.inf), False)],
)  # fmt: skip
def test_a_sum_that_overflows_is_no_infinity_and_infinities_do_not_cancel(
    dtype: torch.dtype, entries: tuple[float | str, float | str], finite: bool
) -> None:
    q, k = torch.ones(2, 1, 2, 12, 8, dtype=dtype).unbind()
    for place, entry in enumerate(entries):
        k[0, 0, place, 0] = torch.finfo(dtype).max if entry == "largest" else entry
    rule = check_scores(q, k, AttentionMask(), None, None, None, None)
    assert all_finite(q, k, rule) is finite and all_finite(k, q, rule) is finite
