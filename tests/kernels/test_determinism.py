"""The same inputs give the same bits, and nothing outside the call changes."""

import threading

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention

N = 700
MASKS = {"causal": AttentionMask(), "window": AttentionMask(window=300, n_global=4)}


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, N, 16, generator=generator) for heads in (6, 2, 2))
    tokens = torch.randint(0, 50, (2, N), generator=generator)
    return q, k, v, StatisticsRequest.all(tokens)


def bits(output, oracle):
    return [output.z, output.lse, *(value for _, value in oracle.flatten(output.statistics))]


def assert_same_bits(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0))


@pytest.mark.parametrize("mask", MASKS)
def test_repeated_runs_on_any_number_of_threads(mask, inputs, oracle):
    q, k, v, request = inputs
    first = bits(attention(q, k, v, mask=MASKS[mask], statistics=request), oracle)
    before = torch.get_num_threads()
    try:
        for n_threads in (1, 2, 5):
            torch.set_num_threads(n_threads)
            assert_same_bits(bits(attention(q, k, v, mask=MASKS[mask], statistics=request), oracle), first)
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mask", MASKS)
def test_statistics_leave_the_output_alone(mask, inputs):
    q, k, v, request = inputs
    alone, beside = (attention(q, k, v, mask=MASKS[mask], statistics=asked) for asked in (None, request))
    assert torch.equal(alone.z, beside.z) and torch.equal(alone.lse, beside.lse)


@pytest.mark.parametrize("mask", MASKS)
def test_a_sequence_does_not_depend_on_its_batch(mask, inputs):
    q, k, v, _ = inputs
    request = StatisticsRequest(entropy=True, received=True, max_weight=True, pooled=(16, 16))
    together = attention(q, k, v, mask=MASKS[mask], statistics=request)
    alone = attention(q[1:], k[1:], v[1:], mask=MASKS[mask], statistics=request)
    assert torch.equal(alone.z, together.z[1:])
    for name, value in alone.statistics.items():
        assert torch.equal(value.nan_to_num(-7.0), together.statistics[name][1:].nan_to_num(-7.0)), name


def test_inputs_are_not_written_to(inputs):
    q, k, v, request = inputs
    copies = [x.clone() for x in (q, k, v, request.match["induction"].key)]
    real = torch.arange(N) > torch.tensor([[100], [3]])
    mask = AttentionMask(window=99, key_padding=real, query_padding=real.clone())
    attention(q, k, v, mask=mask, alibi_slopes=torch.ones(6), statistics=request)
    for x, copy in zip((q, k, v, request.match["induction"].key), copies, strict=True):
        assert torch.equal(x, copy)
    assert real.sum() == 2 * N - 101 - 4


@pytest.mark.parametrize("mask", MASKS)
def test_modes_of_the_caller_do_not_matter(mask, inputs, oracle):
    q, k, v, request = inputs
    first = bits(attention(q, k, v, mask=MASKS[mask], statistics=request), oracle)
    with torch.inference_mode():
        assert_same_bits(bits(attention(q, k, v, mask=MASKS[mask], statistics=request), oracle), first)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(bits(attention(q, k, v, mask=MASKS[mask], statistics=request), oracle), first)


def test_calls_from_several_threads(inputs, oracle):
    q, k, v, request = inputs
    first = bits(attention(q, k, v, mask=AttentionMask(), statistics=request), oracle)
    found, before = [], torch.get_num_threads()

    def call():
        found.append(bits(attention(q, k, v, mask=AttentionMask(), statistics=request), oracle))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for one in found:
        assert_same_bits(one, first)
    assert torch.get_num_threads() == before


def test_an_error_in_a_worker_reaches_the_caller(inputs, monkeypatch):
    from workbench.kernels import tile_statistics

    def fail(*_arguments):
        raise MemoryError("no tile left")

    monkeypatch.setattr(tile_statistics, "hide", fail)
    q, k, v, request = inputs
    before = torch.get_num_threads()
    with pytest.raises(MemoryError, match="no tile left"):
        attention(q, k, v, mask=AttentionMask(), statistics=request)
    assert torch.get_num_threads() == before
