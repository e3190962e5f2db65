"""The reference against loops over single pairs, and what it does at the edges."""

import math

import pytest
import torch

from workbench.kernels import (
    AttentionMask,
    StatisticsRequest,
    attention,
    attention_scores,
    attention_weights,
    pattern_statistics,
)


def test_reference_follows_the_definitions(small_case, oracle):
    arguments, request = oracle.make_inputs(small_case)
    pattern, lse, _, _ = oracle.pattern(arguments)
    found = attention(**arguments, statistics=request, backend="reference")
    group = arguments["q"].shape[1] // arguments["v"].shape[1]
    torch.testing.assert_close(found.z, pattern @ arguments["v"].repeat_interleave(group, 1))
    torch.testing.assert_close(found.lse, lse)
    expected = oracle.statistics(arguments, request)
    actual = dict(oracle.flatten(found.statistics))
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, equal_nan=True, msg=f"{name}: {{}}".format)


def test_a_row_without_keys():
    q = torch.randn(1, 1, 3, 4)
    mask = AttentionMask(query_offset=-2)  # rows sit at -2, -1, 0
    request = StatisticsRequest(entropy=True, max_weight=True, received=True, top_keys=2)
    found = attention(q, q, q, mask=mask, statistics=request, backend="reference")
    assert found.lse[0, 0, :2].tolist() == [-math.inf, -math.inf]
    assert not found.z[0, 0, :2].any() and not found.statistics["entropy"][0, 0, :2].any()
    assert found.statistics["argmax_key"][0, 0].tolist() == [-1, -1, 0]
    assert found.statistics["top_keys"][0, 0].tolist() == [[-1, -1], [-1, -1], [0, -1]]
    assert found.statistics["received_mean"][0, 0, 0] == 1 and found.statistics["received_mean"][0, 0, 1:].isnan().all()


def test_a_row_without_keys_sees_the_virtual_column():
    q = torch.randn(1, 1, 2, 4)
    mask, sink_logits = AttentionMask(query_padding=torch.tensor([[False, True]])), torch.tensor([0.7])
    request = StatisticsRequest(entropy=True)
    found = attention(q, q, q, mask=mask, sink_logits=sink_logits, statistics=request, backend="reference")
    assert found.lse[0, 0, 0].item() == pytest.approx(0.7)
    assert found.statistics["virtual_mass"][0, 0, 0] == 1 and found.statistics["entropy"][0, 0, 0] == 0


def test_scores_and_weights_make_up_the_reference():
    q, k, v = (torch.randn(2, heads, 6, 4, dtype=torch.float64) for heads in (4, 2, 2))
    mask, options = AttentionMask(window=3), {"scale": 0.3, "softcap": 2.0, "alibi_slopes": torch.rand(4)}
    sink_logits = torch.randn(4)
    scores = attention_scores(q, k, mask=mask, **options)
    pattern, lse, virtual_mass = attention_weights(scores, sink_logits)
    found = attention(q, k, v, mask=mask, sink_logits=sink_logits, backend="reference", **options)
    assert (scores == -torch.inf).sum() == (pattern == 0).sum() == 8 * (36 - 15)
    torch.testing.assert_close(pattern.sum(3) + virtual_mass, torch.ones(2, 4, 6, dtype=torch.float64))
    torch.testing.assert_close(found.z, pattern @ v.repeat_interleave(2, 1), rtol=0, atol=0)
    torch.testing.assert_close(found.lse, lse, rtol=0, atol=0)
    torch.testing.assert_close(found.statistics["virtual_mass"], virtual_mass, rtol=0, atol=0)


def test_statistics_describe_an_edited_pattern():
    pattern = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75], [1.0, 0.0, 0.0]])[None, None]
    mask = AttentionMask(query_padding=torch.tensor([[True, True, False]]))
    request = StatisticsRequest(entropy=True, max_weight=True, received=True, offsets=(0, 1), pooled=(2, 3))
    found = pattern_statistics(pattern, mask=mask, request=request)
    assert "lse" not in found
    torch.testing.assert_close(found["entropy"][0, 0, 0], torch.tensor(math.log(2)))
    assert found["argmax_key"][0, 0].tolist() == [0, 2, -1]
    assert found["received"][0, 0].tolist() == [0.5, 0.75, 0.75]  # the padded row counts in nothing
    assert found["offset_mass"][0, 0].tolist() == [[0.5, 0.0], [0.25, 0.0], [0.0, 0.0]]
    assert found["pooled_sum"][0, 0].tolist() == [[2.0], [0.0]]


def test_statistics_accumulate_in_float32():
    """4096 weights of 1/4096 sum to 1; in float16 or bfloat16 they would not."""
    for dtype in (torch.float16, torch.bfloat16):
        q = torch.zeros(1, 1, 4096, 1, dtype=dtype)
        request = StatisticsRequest(received=True, sink_keys=4096, entropy=True)
        for backend in ("reference", "streaming"):
            found = attention(q[:, :, :1], q, q, mask=AttentionMask(causal=False), statistics=request, backend=backend)
            assert found.z.dtype == dtype and found.lse.dtype == found.statistics["entropy"].dtype == torch.float32
            assert found.statistics["sink_mass"].item() == pytest.approx(1, abs=1e-6)
            assert found.statistics["entropy"].item() == pytest.approx(math.log(4096), rel=1e-6)
