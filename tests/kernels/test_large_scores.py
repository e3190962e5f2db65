"""Weights keep float32's precision however large the scores are: within twice the error of a plain softmax."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention

N = 200


def plain(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Causal weights [batch, head, query, key] by torch's softmax, at the precision of the inputs."""
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("with_sink_logits", [False, True])
@pytest.mark.parametrize("spread", [5, 15, 40, 400])
def test_errors_are_those_of_a_plain_softmax(spread: float, with_sink_logits: bool) -> None:
    """Scores up to 26, 209, 1,742 and 174,200; the largest of 4 · 200 rows' errors against float64."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, N, 32, generator=generator) * spread
    k = torch.randn(1, 4, N, 32, generator=generator) * spread / 5
    request = StatisticsRequest(entropy=True, max_weight=True, received=True, pooled=(16, 16))
    # A virtual column far below every score takes no weight, but sends the statistics another way.
    sink_logits = torch.full((4,), -1e9) if with_sink_logits else None
    found = attention(q, k, k, mask=AttentionMask(), sink_logits=sink_logits, statistics=request, backend="streaming")

    def measures(p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"entropy": torch.special.entr(p).sum(-1), "max_weight": p.amax(-1), "received": p.sum(-2)}

    exact, usual = measures(plain(q.double(), k.double())), measures(plain(q, k))
    for name, expected in exact.items():
        error = (found.statistics[name] - expected).abs().max()
        allowed = 2 * (usual[name] - expected).abs().max() + 2e-5
        assert error <= allowed, f"{name}: {error:.1e}, of a plain softmax {allowed / 2:.1e}"
    assert found.statistics["max_weight"].max() <= 1 + 1e-6
    assert found.statistics["entropy"].min() >= -1e-6
    rows = found.statistics["pooled_sum"].sum((-2, -1))
    torch.testing.assert_close(rows, torch.full_like(rows, N), atol=1e-3, rtol=0)  # every row's weights sum to 1


@pytest.mark.parametrize("spread", [5, 15, 40])
def test_weights_of_single_pairs_err_by_a_few_units_of_the_score(spread: float) -> None:
    """Sink and offset mass multiply pairs outside the tiles, which rounds otherwise: |s| · 2⁻²³, a few times."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, N, 32, generator=generator) * spread
    k = torch.randn(1, 4, N, 32, generator=generator) * spread / 5
    request = StatisticsRequest(sink_keys=4, offsets=(0, 1))
    found = attention(q, k, k, mask=AttentionMask(), statistics=request, backend="streaming").statistics
    exact = plain(q.double(), k.double())
    rounding = 4 * float((q.double() @ k.double().mT / 32**0.5).abs().max()) * 2**-23
    assert (found["sink_mass"] - exact[..., :4].sum(-1)).abs().max() <= rounding
    for place, back in enumerate((0, 1)):
        expected = torch.nn.functional.pad(exact.diagonal(-back, -2, -1), (back, 0))
        assert (found["offset_mass"][..., place] - expected).abs().max() <= rounding


@pytest.mark.parametrize("spread", [400, 1e5, 1e8])
def test_no_weight_of_a_single_pair_is_above_1(spread: float) -> None:
    """Scores of which float32 keeps no digit behind the point give weights of no use, but no infinite ones."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, N, 32, generator=generator) * spread for _ in range(2))
    request = StatisticsRequest(sink_keys=1, offsets=(0, 1))
    found = attention(q, k, k, mask=AttentionMask(), statistics=request, backend="streaming").statistics
    for mass in (found["sink_mass"], found["offset_mass"]):
        assert mass.min() >= 0 and mass.max() <= 1
