"""The Triton backend, run by Triton's interpreter: every option, statistic and gradient against the reference.

The interpreter calculates in numpy: it shows whether the kernels are right, not how precise a GPU's products are.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench.kernels import AttentionMask, MatchLabels, StatisticsRequest, attention, launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where -inf meets inf before the mask

FLOATS = ("q", "k", "v", "alibi_slopes", "sink_logits")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Short sequences then take several tiles; of rows and of columns there are different numbers in one."""
    for key in launch.TILES:
        monkeypatch.setitem(launch.TILES, key, launch.Tiles(rows=32, columns=16))


def everything(tokens, **changes):
    """Every statistic but classes and top keys, the map in blocks that hold more than one tile's share of pairs."""
    return dataclasses.replace(StatisticsRequest.all(tokens), pooled=(16, 20), **changes)


def with_gradients(arguments, request, backend, dtype):
    """Outputs and statistics by name, and the gradients of a fixed function of z and lse."""
    tensors = {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    leaves = {name: tensors[name].requires_grad_() for name in FLOATS if tensors.get(name) is not None}
    found = attention(**tensors, statistics=request, backend=backend)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator).to(dtype) for x in (found.z, found.lse)]
    lse = found.lse.masked_fill(found.lse == -torch.inf, 0.0)
    gradients = torch.autograd.grad((found.z * weights[0]).sum() + (lse * weights[1]).sum(), list(leaves.values()))
    return found, dict(zip(leaves, gradients, strict=True))


def assert_equal(oracle, arguments, request):
    """z, lse, statistics and gradients of the Triton backend in float32 are those of the reference in float64."""
    found, gradients = with_gradients(arguments, request, "triton", torch.float32)
    expected, expected_gradients = with_gradients(arguments, request, "reference", torch.float64)
    torch.testing.assert_close(found.z.double(), expected.z, rtol=1e-4, atol=1e-5)
    actual = dict(oracle.flatten(found.statistics))
    for name, value in oracle.flatten(expected.statistics):
        got = actual.pop(name)
        if value.is_floating_point():
            torch.testing.assert_close(
                got.double(), value, rtol=1e-4, atol=2e-5, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            weights = expected.statistics["max_weight" if name == "argmax_key" else "top_weights"]
            assert torch.equal(got[weights > 1e-30], value[weights > 1e-30]), name  # smaller ones are 0 in float32
    assert not actual
    for name, value in expected_gradients.items():
        size = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            gradients[name].double(), value, rtol=1e-4, atol=3e-5 * (1 + size), msg=lambda t, n=name: f"d{n}: {t}"
        )


def test_every_option_and_statistic_equals_the_reference(interpreted_case, oracle):
    arguments, request = oracle.make_inputs(interpreted_case)
    assert_equal(oracle, arguments, request)


@pytest.mark.parametrize("d_head", [16, 40, 64, 72, 96, 128, 256])
def test_head_dimensions(d_head, oracle):
    generator = torch.Generator().manual_seed(d_head)
    q, k, v = (torch.randn(1, heads, 40, d_head, generator=generator) for heads in (2, 1, 1))
    request = everything(torch.randint(0, 9, (1, 40), generator=generator))
    assert_equal(oracle, {"q": q, "k": k, "v": v, "mask": AttentionMask(), "alibi_slopes": None}, request)


@pytest.mark.parametrize("heads", [(9, 3), (8, 1), (12, 12)])
def test_grouped_heads(heads, oracle):
    """GQA and MQA; 12 heads with the slopes of ALiBi for a number of heads that is no power of two."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 33, 8) for n in (heads[0], heads[1], heads[1]))
    slopes = torch.cat((2.0 ** -torch.arange(1, 9), 2.0 ** -(torch.arange(1, 9, 2) / 2)))[: heads[0]]
    arguments = {"q": q, "k": k, "v": v, "mask": AttentionMask(), "alibi_slopes": slopes}
    assert_equal(oracle, arguments, StatisticsRequest(entropy=True, received=True))


def test_statistics_on_or_off_change_no_bit():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 70, 24) for heads in (2, 1, 1))
    mask = AttentionMask(window=30, n_global=2)
    bare = attention(q, k, v, mask=mask, backend="triton")
    for _ in range(2):
        full = attention(q, k, v, mask=mask, statistics=everything(torch.arange(70)[None] % 9), backend="triton")
        assert torch.equal(full.z, bare.z) and torch.equal(full.lse, bare.lse)


def test_two_runs_give_the_same_bits(oracle):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 50, 24) for heads in (2, 1, 1))
    arguments = {"q": q, "k": k, "v": v, "mask": AttentionMask()}
    request = everything(torch.arange(100).view(2, 50) % 9, top_keys=3)
    (first, gradients), (second, again) = (
        with_gradients(arguments, request, "triton", torch.float32) for _ in range(2)
    )
    again_by_name = dict(oracle.flatten(second.statistics))
    for name, value in oracle.flatten(first.statistics):
        assert torch.equal(value, again_by_name[name]), name
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "offset"])
def test_layouts(view, oracle):
    """Tensors that are not contiguous, gradients that come in with other strides."""
    torch.manual_seed(0)
    if view == "transposed":
        q, k, v = (torch.randn(2, 35, 2, 24).transpose(1, 2) for _ in range(3))
    elif view == "sliced":
        q, k, v = torch.randn(2, 2, 35, 100)[..., 1:97:4].unbind(0)[0].expand(3, 2, 2, 35, 24).unbind(0)
    elif view == "expanded":
        q, k, v = (torch.randn(1, 1, 35, 24).expand(2, 2, -1, -1) for _ in range(3))
    else:
        q, k, v = torch.randn(3 * 2 * 2 * 35 * 24 + 5)[5:].view(3, 2, 2, 35, 24).unbind(0)
    assert_equal(oracle, {"q": q, "k": k, "v": v, "mask": AttentionMask()}, StatisticsRequest(received=True))


def test_gradient_of_a_sum_arrives_with_strides_of_zero():
    torch.manual_seed(0)
    gradients = []
    for backend in ("triton", "reference"):
        q, k, v = (
            torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (0, 1, 2)
        )
        attention(q, k, v, mask=AttentionMask(), backend=backend).z.sum().backward()
        gradients.append((q.grad, k.grad, v.grad))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_indices_do_not_wrap_at_32_bits():
    """Heads that lie more than 2³¹ elements apart; the memory between them is reserved and never touched."""
    apart = 2**31 + 64
    memory = torch.empty(apart + 40 * 16, dtype=torch.float16)  # 4 GiB of address space
    q = memory.as_strided((1, 2, 40, 16), (0, apart, 16, 1))
    q.copy_(torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(0)))
    request = StatisticsRequest(received=True, offsets=(1,))
    found, expected = (
        attention(x, x, x, mask=AttentionMask(), statistics=request, backend="triton") for x in (q, q.contiguous())
    )
    assert torch.equal(found.z, expected.z)
    for name in ("received", "offset_mass"):
        assert torch.equal(found.statistics[name], expected.statistics[name])


def test_memory_around_the_tensors_is_neither_read_nor_written():
    """NaN on all sides of q, k, v: guard bands between the rows, behind padding, after the end."""
    torch.manual_seed(0)
    n, d = 37, 24

    def guarded(heads):
        memory = torch.full((1, heads, n + 4, d + 8), torch.nan)
        memory[:, :, 2:-2, 4:-4] = torch.randn(1, heads, n, d)
        return memory, memory[:, :, 2:-2, 4:-4]

    (mq, q), (mk, k), (mv, v) = guarded(4), guarded(2), guarded(2)
    real = torch.arange(n)[None] >= 5
    mask = AttentionMask(key_padding=real, query_padding=real)
    request = dataclasses.replace(StatisticsRequest.all(torch.arange(n)[None] % 7, key_padding=real), pooled=(16, 20))
    clean = attention(
        *(torch.where(real[:, None, :, None], x, 0.0) for x in (q, k, v)),
        mask=mask,
        statistics=request,
        backend="triton",
    )
    for x in (q, k, v):
        x[:, :, :5] = torch.nan
    before = [m.clone() for m in (mq, mk, mv)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = attention(*leaves, mask=mask, statistics=request, backend="triton")
    assert torch.equal(found.z, clean.z) and torch.equal(found.lse, clean.lse)
    for name, value in clean.statistics.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found.statistics[name].nan_to_num(), value.nan_to_num()), name
    for gradient in torch.autograd.grad(found.z.sum() + found.lse[:, :, 5:].sum(), leaves):
        assert gradient.isfinite().all()
        assert (gradient[:, :, :5] == 0).all()
    for memory, old in zip((mq, mk, mv), before, strict=True):
        torch.testing.assert_close(memory, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """float16 as the interpreter rounds it; bfloat16 is calculated in float32 there, its output rounded."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 40, 32).to(dtype) for heads in (4, 2, 2))
    exact = attention(q.double(), k.double(), v.double(), mask=AttentionMask(), backend="reference")
    plain = attention(q, k, v, mask=AttentionMask(), backend="reference")
    request = StatisticsRequest(entropy=True, received=True)
    found = attention(q, k, v, mask=AttentionMask(), statistics=request, backend="triton")
    assert found.z.dtype == dtype and found.lse.dtype == torch.float32
    error, plain_error = ((x.z.double() - exact.z).abs().max() for x in (found, plain))
    assert error <= 2 * plain_error + torch.finfo(dtype).eps
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


def test_what_triton_does_not_do_goes_to_the_streaming_backend():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    for tensors in (q, torch.randn(1, 2, 9, 300), torch.randn(1, 2, 0, 4)):
        found = attention(tensors, tensors, tensors, mask=AttentionMask(), backend="triton")
        expected = attention(tensors, tensors, tensors, mask=AttentionMask(), backend="streaming")
        assert torch.equal(found.z, expected.z)
    bias = torch.randn(2, 17, requires_grad=True)
    q = q.float()
    attention(q, q, q, mask=AttentionMask(), offset_bias=bias, backend="triton").z.sum().backward()
    assert bias.grad is not None and bias.grad.abs().max() > 0


def test_ties_go_to_the_lowest_column():
    key = torch.randn(1, 1, 5, 8, generator=torch.Generator().manual_seed(0)).repeat(1, 1, 12, 1)
    q = torch.randn(1, 1, 60, 8, generator=torch.Generator().manual_seed(1))
    request = StatisticsRequest(max_weight=True)
    for mask in (AttentionMask(causal=False), AttentionMask(window=50, n_global=3)):
        found = attention(q, key, key, mask=mask, statistics=request, backend="triton").statistics
        expected = attention(q.double(), key.double(), key.double(), mask=mask, statistics=request, backend="reference")
        assert torch.equal(found["argmax_key"], expected.statistics["argmax_key"])


@pytest.mark.parametrize("spread", [5, 40, 400])
def test_weights_keep_their_digits_at_large_scores(spread):
    """Scores up to 26, 1,742 and 174,200: errors at most twice those of a plain float32 softmax.

    Probes multiply pairs one by one, which rounds otherwise than the forward's products do: a share of |s| · 2⁻²³ more.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 64, 32, generator=generator) * spread
    k = torch.randn(1, 2, 64, 32, generator=generator) * spread / 5
    labels = MatchLabels(torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.int64))
    request = StatisticsRequest(entropy=True, max_weight=True, received=True, sink_keys=4, match={"all": labels})
    exact, plain, found = (
        dict(attention(x, y, y, mask=AttentionMask(), statistics=request, backend=backend).statistics)
        for x, y, backend in ((q.double(), k.double(), "reference"), (q, k, "reference"), (q, k, "triton"))
    )
    for results in (exact, plain, found):
        results["match_mass"] = results["match_mass"]["all"]
    rounding = float(exact["lse"].abs().max()) * torch.finfo(torch.float32).eps
    for name, more in (("entropy", 0), ("max_weight", 0), ("received", 0), ("sink_mass", 4), ("match_mass", 4)):
        error, usual = ((x[name] - exact[name]).abs().max() for x in (found, plain))
        assert error <= 2 * usual + 2e-5 + more * rounding, f"{name}: {error:.1e}, of a plain softmax {usual:.1e}"


def test_functional_transforms_are_refused():
    """torch.func cannot see into the kernels: it says so instead of giving a wrong gradient."""
    q = torch.randn(1, 1, 20, 16)

    def total(q):
        return attention(q, q, q, mask=AttentionMask(), backend="triton").z.sum()

    with pytest.raises(RuntimeError, match="functorch|setup_context"):
        torch.func.grad(total)(q)


@pytest.mark.parametrize("cap", [0.3, 30, 50, 1e3, 1e5, 1e20])
def test_a_soft_cap_of_any_size_keeps_its_digits(cap):
    """From caps that bind everywhere to such as change nothing."""
    q, k, v = (torch.randn(1, 1, 30, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    arguments = {"mask": AttentionMask(), "softcap": float(cap)}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = attention(*leaves, **arguments, backend="triton")
    exact_leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attention(*exact_leaves, **arguments, backend="reference")
    torch.testing.assert_close(found.z.double(), exact.z, rtol=2e-6, atol=2e-6)
    gradients, expected = (
        torch.autograd.grad(output.z.square().sum(), of) for output, of in ((found, leaves), (exact, exact_leaves))
    )
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sink", [-torch.inf, -1e30, -1e5, 1e5])
def test_sink_logits_of_any_size(sink, oracle):
    """-inf is no sink at all, also in rows that see nothing else."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    mask = AttentionMask(key_padding=torch.arange(20)[None] > 5)
    logits = torch.tensor([sink])
    request = StatisticsRequest(entropy=True, max_weight=True, mean_distance=True, received=True)
    exact = attention(
        q.double(),
        k.double(),
        v.double(),
        mask=mask,
        sink_logits=logits.double(),
        statistics=request,
        backend="reference",
    )
    for backend in ("triton", "streaming"):
        found = attention(q, k, v, mask=mask, sink_logits=logits, statistics=request, backend=backend)
        torch.testing.assert_close(found.z.double(), exact.z, rtol=1e-4, atol=1e-6)
        actual = dict(oracle.flatten(found.statistics))
        for name, value in oracle.flatten(exact.statistics):
            if name != "argmax_key":
                torch.testing.assert_close(actual[name].double(), value, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_gradients_of_empty_rows_stay_there():
    """lse is -inf where a row is empty, and where(…) hands its gradient on as NaN: it must reach nothing."""
    torch.manual_seed(0)
    mask = AttentionMask(key_padding=torch.arange(20)[None] > 5)
    gradients = []
    for backend in ("triton", "reference"):
        leaves = [
            torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3)
        ]
        found = attention(*leaves, mask=mask, backend=backend)
        loss = found.z.sum() + torch.where(found.lse > -torch.inf, found.lse**2, 0.0).sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(*gradients, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_blocks_larger_than_the_map_are_the_map():
    torch.manual_seed(0)
    q = torch.randn(1, 1, 20, 8)
    huge, whole = (
        attention(q, q, q, mask=AttentionMask(), statistics=StatisticsRequest(pooled=size), backend="triton").statistics
        for size in ((10**6, 10**6), (20, 20))
    )
    assert torch.equal(huge["pooled_max"], whole["pooled_max"]) and torch.equal(huge["pooled_sum"], whole["pooled_sum"])
    assert whole["pooled_sum"].shape == (1, 1, 1, 1)
