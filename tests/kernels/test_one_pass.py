"""Under a window z, lse and statistics come from the same tiles: what they are, and that scores are calculated once."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention
from workbench.kernels.tiles import Tiling

N, WINDOW = 300, 70


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, N, 16, generator=generator) for heads in (6, 2, 2))
    tokens = torch.randint(0, 9, (2, N), generator=generator)
    weights = torch.rand(2, N, generator=generator)
    request = StatisticsRequest.all(tokens)
    request = dataclasses.replace(request, pooled=(16, 32), query_weights=weights, classes=tokens % 3, top_keys=3)
    return q, k, v, request


def minus_infinity_bias() -> torch.Tensor:
    """[head, 2 · N - 1]: every seventh offset is out of reach, and so are all keys that the first rows see."""
    bias = torch.zeros(6, 2 * N - 1)
    bias[:, ::7] = -torch.inf
    bias[0, N - 1 :] = -torch.inf
    return bias


RULES = {
    "window": {"mask": AttentionMask(window=WINDOW)},
    "both sides": {"mask": AttentionMask(causal=False, window=WINDOW // 2)},
    "global keys": {"mask": AttentionMask(window=WINDOW, n_global=3)},
    "documents": {"mask": AttentionMask(window=WINDOW, documents=torch.arange(N).expand(2, -1) // 110)},
    "padding": {"mask": AttentionMask(window=WINDOW, key_padding=torch.arange(N) >= torch.tensor([[130], [3]]))},
    "bias": {"mask": AttentionMask(window=WINDOW), "offset_bias": minus_infinity_bias()},
    "soft cap": {"mask": AttentionMask(window=WINDOW), "softcap": 3000.0, "alibi_slopes": torch.linspace(0.1, 1, 6)},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [1, 30])  # scores up to about 20 and 20,000: lse alone would round weights
def test_one_pass_equals_the_reference(rule, spread, inputs, oracle):
    q, k, v, request = inputs
    q, k, v = (q * spread).double(), (k * spread).double(), v.double()
    arguments = {key: x.double() if isinstance(x, torch.Tensor) else x for key, x in RULES[rule].items()}
    expected = attention(q, k, v, **arguments, statistics=request, backend="reference")
    found = attention(q, k, v, **arguments, statistics=request, backend="streaming")
    torch.testing.assert_close(found.z, expected.z)
    torch.testing.assert_close(found.lse, expected.lse)
    actual, wanted = (dict(oracle.flatten(output.statistics)) for output in (found, expected))
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        message = f"{name}: {{}}".format
        torch.testing.assert_close(actual[name], value, equal_nan=True, atol=1e-8, rtol=1e-8, msg=message)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pooled", [None, (16, 32), (3, 3)])  # the last needs tiles of its own
def test_statistics_leave_the_output_alone(rule, pooled, inputs):
    q, k, v, request = inputs
    alone = attention(q, k, v, **RULES[rule])
    beside = attention(q, k, v, **RULES[rule], statistics=dataclasses.replace(request, pooled=pooled))
    assert torch.equal(alone.z, beside.z) and torch.equal(alone.lse, beside.lse)


def test_scores_are_calculated_once(inputs, monkeypatch):
    q, k, v, request = inputs
    calls, scores = [], Tiling.scores
    monkeypatch.setattr(Tiling, "scores", lambda *arguments: (calls.append(0), scores(*arguments))[1])
    counts = []
    for asked in (None, request, dataclasses.replace(request, pooled=(3, 3))):
        calls.clear()
        attention(q, k, v, mask=AttentionMask(window=WINDOW), statistics=asked)
        counts.append(len(calls))
    assert counts[0] == counts[1] < counts[2]
