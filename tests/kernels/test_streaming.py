"""The streaming backend against the reference: every option and statistic, every float type, tiles of any size."""

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.kernels import AttentionMask, MatchLabels, StatisticsRequest, attention, tiles
from workbench.kernels.matches import MatchRuns


@pytest.fixture(params=["one tile", "many tiles"])
def tile_size(request, monkeypatch):
    """Small tiles send even short sequences through many of them."""
    if request.param == "many tiles":
        monkeypatch.setattr(tiles, "_TILE_ROWS", 16)
        monkeypatch.setattr(tiles, "_TILE_SIZE", 16 * 24)


def at_precision(arguments, dtype):
    """The arguments with tensors that take part in products in another type."""
    floats = ("q", "k", "v", "alibi_slopes", "offset_bias", "sink_logits")
    return {
        name: value.to(dtype) if name in floats and value is not None else value for name, value in arguments.items()
    }


@pytest.mark.usefixtures("tile_size")
def test_streaming_equals_the_reference(large_case, oracle):
    assert_equals_the_reference(large_case, oracle)


def test_blocks_of_rows_under_a_window(windowed_case, oracle):
    assert_equals_the_reference(windowed_case, oracle)


def assert_equals_the_reference(case, oracle):
    arguments, request = oracle.make_inputs(case)
    expected = attention(**arguments, statistics=request, backend="reference")
    found = attention(**arguments, statistics=request, backend="streaming")
    torch.testing.assert_close(found.z, expected.z)
    torch.testing.assert_close(found.lse, expected.lse)
    actual = dict(oracle.flatten(found.statistics))
    for name, value in oracle.flatten(expected.statistics):
        torch.testing.assert_close(
            actual.pop(name),
            value,
            equal_nan=True,
            atol=1e-10,
            rtol=1e-9,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert not actual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_a_plain_calculation(large_case, oracle, dtype):
    """At most twice the reference's own error at this precision, and a few units in the last place."""
    arguments, request = oracle.make_inputs(large_case)
    low = at_precision(arguments, dtype)
    exact = attention(**at_precision(low, torch.float64), statistics=request, backend="reference")
    plain = attention(**low, statistics=request, backend="reference")
    found = attention(**low, statistics=request, backend="streaming")
    assert found.z.dtype == dtype and found.lse.dtype == torch.float32
    scale = 1 + exact.lse[exact.lse.isfinite()].abs().max() if exact.lse.isfinite().any() else 1.0
    assert_no_worse(found.z, plain.z, exact.z, torch.finfo(dtype).eps)
    assert_no_worse(found.lse, plain.lse, exact.lse, 4 * torch.finfo(torch.float32).eps)
    actual, reference = dict(oracle.flatten(found.statistics)), dict(oracle.flatten(plain.statistics))
    for name, value in oracle.flatten(exact.statistics):
        if not value.is_floating_point():
            continue  # ties between nearly equal weights may fall either way
        # A weight is exp(s - lse) of a rounded lse: relative error eps · |lse|.
        assert_no_worse(actual[name], reference[name], value, 4 * torch.finfo(torch.float32).eps * scale, name)


def assert_no_worse(found, plain, exact, unit, name="output"):
    defined = exact.isfinite()
    assert torch.equal(found.isfinite(), defined) and torch.equal(found.isnan(), exact.isnan()), name
    if not defined.any():
        return
    error, plain_error = ((x.double() - exact)[defined].abs().max() for x in (found, plain))
    size = 1 + exact[defined].abs().max()
    assert error <= 2 * plain_error + unit * size, f"{name}: {error} against {plain_error}, size {size}"


def test_long_sequences(oracle):
    """Several pieces of work, each of several tiles, with text-like repetition of labels."""
    generator = torch.Generator().manual_seed(0)
    n = 1300
    q, k, v = (torch.randn(1, heads, n, 16, generator=generator) for heads in (3, 1, 1))
    tokens = torch.multinomial(1 / torch.arange(1, 500), n, replacement=True, generator=generator)[None]
    request = StatisticsRequest.all(tokens)
    exact = attention(q.double(), k.double(), v.double(), mask=AttentionMask(), statistics=request, backend="reference")
    found = attention(q, k, v, mask=AttentionMask(), statistics=request)
    torch.testing.assert_close(found.z.double(), exact.z, rtol=1e-4, atol=1e-5)
    actual = dict(oracle.flatten(found.statistics))
    for name, value in oracle.flatten(exact.statistics):
        if name == "argmax_key":
            assert (actual[name] == value).float().mean() > 0.999  # nearly equal weights may change places
        else:
            torch.testing.assert_close(actual[name].double(), value, rtol=1e-4, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("window", [None, 2000])
@pytest.mark.parametrize("top_keys", [0, 40])
def test_memory_does_not_grow_with_the_number_of_pairs(window, top_keys):
    n = 4000
    q = torch.randn(1, 1, n, 8)
    request = dataclasses.replace(StatisticsRequest.all(torch.arange(n)[None] % 50), top_keys=top_keys)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the mode sees the calling thread alone
    try:
        with torch.no_grad(), LargestTensor() as largest:
            attention(q, q, q, mask=AttentionMask(window=window), statistics=request)
    finally:
        torch.set_num_threads(threads)
    assert 8 * n <= largest.size <= n * n / 16


def test_whatever_the_request_the_statistics_are_the_same(oracle):
    """Each statistic alone, where passes skip what is not asked for, equals itself among all."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 200, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = AttentionMask(window=90, n_global=3)
    labels = MatchLabels(torch.randint(-1, 20, (2, 200)), torch.randint(-1, 20, (2, 200)))
    everything = StatisticsRequest(
        entropy=True,
        max_weight=True,
        mean_distance=True,
        sink_keys=4,
        offsets=(0, 1),
        match={"labels": labels},
        classes=torch.randint(-1, 4, (2, 200)),
        received=True,
        pooled=(16, 16),
        top_keys=3,
    )
    together = dict(oracle.flatten(attention(q, k, v, mask=mask, statistics=everything).statistics))
    for field in dataclasses.fields(everything):
        alone = StatisticsRequest(**{field.name: getattr(everything, field.name)})
        for name, value in oracle.flatten(attention(q, k, v, mask=mask, statistics=alone).statistics):
            torch.testing.assert_close(value, together[name], equal_nan=True)


def test_a_constant_text_matches_everything():
    """As many matching pairs as there are pairs: no list of them is made."""
    n = 600
    q = torch.zeros(1, 2, n, 4)
    constant = torch.zeros(1, n, dtype=torch.int64)
    request = StatisticsRequest(match={"same": MatchLabels(constant, constant)})
    mass = attention(q, q, q, mask=AttentionMask(), statistics=request).statistics["match_mass"]["same"]
    rows = torch.arange(n)
    torch.testing.assert_close(mass[0, 1], rows / (rows + 1))  # all but the query's own key


def test_runs_of_matches_stay_within_a_window():
    """The same token everywhere: of all earlier keys that match, a row visits those that it sees."""
    n, window, offset = 50, 8, 10
    bound = AttentionMask(window=window).bind(1, n, n + offset)
    queries, keys = torch.zeros(1, n, dtype=torch.int64), torch.zeros(1, n + offset, dtype=torch.int64)
    runs = MatchRuns.of(MatchLabels(queries, keys), bound)
    position = torch.arange(n) + offset
    assert torch.equal(runs.count[0], position.clamp(max=window - 1))
    assert torch.equal(runs.columns[0, runs.first[0]], position - runs.count[0])


def test_labels_may_be_large():
    """Labels are compared, not counted with: hashes serve as labels."""
    labels = torch.tensor([[2**62, 5, 2**62, 2**62 + 1, 5]])
    q = torch.zeros(1, 1, 5, 2)
    request = StatisticsRequest(match={"hash": MatchLabels(labels, labels)})
    mass = attention(q, q, q, mask=AttentionMask(), statistics=request).statistics["match_mass"]["hash"]
    torch.testing.assert_close(mass[0, 0], torch.tensor([0, 0, 1 / 3, 0, 1 / 5]))


def test_ties_go_to_the_lowest_column():
    torch.manual_seed(0)
    key = torch.randn(1, 1, 5, 8).repeat(1, 1, 200, 1)  # every key returns every five columns, across tiles
    q = torch.randn(1, 1, 1000, 8)
    request = StatisticsRequest(max_weight=True, top_keys=3)
    found = attention(q, key, key, mask=AttentionMask(causal=False), statistics=request).statistics
    first = found["argmax_key"][0, 0]
    assert (first < 5).all()
    assert torch.equal(found["top_keys"][0, 0], first[:, None] + torch.tensor([0, 5, 10]))
    assert torch.equal(found["top_weights"][..., 0], found["max_weight"])


@pytest.mark.parametrize("logit", [10.0, 1e3, 1e5])
def test_entropy_keeps_its_digits_at_large_scores(logit):
    """lse - E[s] would lose them: two equal keys among scores of this size have entropy log 2."""
    q, k = torch.full((1, 1, 1, 1), logit), torch.ones(1, 1, 2, 1)
    found = attention(q, k, k, mask=AttentionMask(causal=False), scale=1.0, statistics=StatisticsRequest(entropy=True))
    assert found.statistics["entropy"].item() == pytest.approx(math.log(2), abs=2e-7 * logit)


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("window", [None, 3])
def test_what_lies_behind_padding_does_not_matter(backend, window, oracle):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, 8) for heads in (4, 2, 2))
    real = torch.arange(40) >= torch.tensor([[0], [17]])
    mask = AttentionMask(window=window, key_padding=real, query_padding=real)
    request = StatisticsRequest.all(torch.randint(0, 9, (2, 40)), key_padding=real)
    clean = attention(q, k, v, mask=mask, statistics=request, backend=backend)
    poisoned = [torch.where(real[:, None, :, None], x, torch.nan).requires_grad_() for x in (q, k, v)]
    found = attention(*poisoned, mask=mask, statistics=request, backend=backend)
    (found.z.sum() + found.lse[found.lse.isfinite()].sum()).backward()
    torch.testing.assert_close(found.z, clean.z)
    for name, value in oracle.flatten(clean.statistics):
        torch.testing.assert_close(dict(oracle.flatten(found.statistics))[name], value, equal_nan=True)
    for x in poisoned:
        assert x.grad.isfinite().all() and not x.grad[1, :, :17].any()


@pytest.mark.parametrize("window", [None, 50])
def test_layout_changes_nothing(window):
    """Slices of one projection, expanded heads, transposed and offset memory give what contiguous copies give."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 70, 3, 4, 8)
    views = [x.transpose(1, 2) for x in qkv.unbind(2)]
    assert_layout_is_free(views, window)
    expanded = torch.randn(2, 1, 70, 8).expand(2, 4, 70, 8)
    assert_layout_is_free([expanded, expanded, expanded], window)
    last_axis_strided = torch.randn(2, 4, 8, 70).mT
    assert_layout_is_free([last_axis_strided] * 3, window)
    offset = torch.randn(5000)[7:].as_strided((2, 4, 70, 8), (2240, 560, 8, 1))
    assert_layout_is_free([offset] * 3, window)


def assert_layout_is_free(views, window):
    mask, request = AttentionMask(window=window), StatisticsRequest.all(torch.arange(70).expand(2, 70))
    found = attention(*views, mask=mask, statistics=request)
    expected = attention(*(x.contiguous() for x in views), mask=mask, statistics=request)
    torch.testing.assert_close(found.z, expected.z)
    torch.testing.assert_close(found.statistics["received"], expected.statistics["received"])


@pytest.mark.parametrize("sizes", [(0, 0), (0, 3), (3, 0)])
def test_nothing_to_attend(sizes, oracle):
    n_queries, n_keys = sizes
    q, k = torch.randn(1, 2, n_queries, 4), torch.randn(1, 2, n_keys, 4)
    request = StatisticsRequest(entropy=True, max_weight=True, received=True, pooled=(2, 2), sink_keys=1)
    for backend in ("reference", "streaming"):
        found = attention(q, k, k, mask=AttentionMask(), statistics=request, backend=backend)
        assert found.z.shape == (1, 2, n_queries, 4) and not found.z.any()
        assert (found.lse == -torch.inf).all() and found.statistics["received"].shape == (1, 2, n_keys)


def test_infinite_biases_hide_keys(oracle):
    torch.manual_seed(0)
    q = torch.randn(1, 1, 30, 4)
    bias = torch.zeros(1, 59)
    bias[:, :35] = -torch.inf  # nothing nearer than six columns back
    request = StatisticsRequest(entropy=True, max_weight=True, mean_distance=True, received=True, top_keys=2)
    expected, found = (
        attention(q, q, q, mask=AttentionMask(), offset_bias=bias, statistics=request, backend=backend)
        for backend in ("reference", "streaming")
    )
    assert (found.lse[0, 0, :6] == -torch.inf).all() and (found.statistics["mean_distance"][0, 0, 6:] >= 6).all()
    torch.testing.assert_close(found.z, expected.z)
    actual = dict(oracle.flatten(found.statistics))
    for name, value in oracle.flatten(expected.statistics):
        torch.testing.assert_close(actual[name], value, equal_nan=True)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_scales_that_are_not_positive(scale):
    """torch's operator masks before it scales, which would let exactly the hidden keys through."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 20, 4)
    expected, found = (
        attention(q, q, q, mask=AttentionMask(), scale=scale, backend=name) for name in ("reference", "streaming")
    )
    torch.testing.assert_close(found.z, expected.z)
    torch.testing.assert_close(found.lse, expected.lse)


def test_padding_longer_than_a_tile_of_the_operator():
    """Rows whose first tiles hold no key: no -inf minus -inf."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 1500, 4)
    real = torch.arange(1500)[None] >= 1400
    for window in (None, 1499):
        mask = AttentionMask(key_padding=real, query_padding=real, window=window)
        found = attention(q, q, q, mask=mask)
        alone = attention(*[q[:, :, 1400:]] * 3, mask=AttentionMask())
        torch.testing.assert_close(found.z[:, :, 1400:], alone.z)
        assert (found.lse[:, :, :1400] == -torch.inf).all() and not found.z[:, :, :1400].any()


@pytest.mark.parametrize("d_head", [1, 40, 64, 72, 96, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (8, 1)])
def test_head_dimensions_and_groups(d_head, heads, oracle):
    """Sizes of real models; windows and n_q ≠ n_k take the tiles, the plain causal case torch's operator."""
    generator = torch.Generator().manual_seed(d_head)
    k, v = (torch.randn(1, heads[1], 150, d_head, generator=generator) for _ in range(2))
    request = StatisticsRequest(entropy=True, received=True, offsets=(1,), max_weight=True)
    for n_queries, mask in ((150, AttentionMask()), (150, AttentionMask(window=40, n_global=2)), (60, AttentionMask())):
        q = torch.randn(1, heads[0], n_queries, d_head, generator=generator)
        found = attention(q, k, v, mask=mask, statistics=request)
        exact = attention(q.double(), k.double(), v.double(), mask=mask, statistics=request, backend="reference")
        torch.testing.assert_close(found.z.double(), exact.z, rtol=1e-4, atol=1e-5)
        for name in ("entropy", "received", "offset_mass", "max_weight"):
            torch.testing.assert_close(found.statistics[name].double(), exact.statistics[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "streaming"])
def test_weights_of_queries_that_are_padding_do_not_matter(backend):
    torch.manual_seed(0)
    q = torch.randn(1, 2, 12, 8)
    mask = AttentionMask(query_padding=torch.arange(12)[None] < 9)
    received = []
    for behind in (0.0, torch.nan):
        weights = torch.arange(12.0)[None].clone()
        weights[:, 9:] = behind
        request = StatisticsRequest(received=True, query_weights=weights)
        received.append(attention(q, q, q, mask=mask, statistics=request, backend=backend).statistics["received_lift"])
    assert received[0].isfinite().any()
    assert torch.equal(received[0].nan_to_num(), received[1].nan_to_num())


def test_a_bias_of_the_lowest_number_hides_no_row():
    """The lowest finite number often means "hardly": where all keys have it, a row spreads its weight evenly."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 9, 4)
    bias = torch.full((1, 17), torch.finfo(torch.float32).min)
    found = attention(q, q, q, mask=AttentionMask(), offset_bias=bias)
    torch.testing.assert_close(found.z, q.cumsum(2) / torch.arange(1, 10)[:, None])
