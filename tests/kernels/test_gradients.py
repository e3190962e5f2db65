"""z and lse are differentiable on every backend, in every input, also where torch's own kernel gives z."""

import pytest
import torch

from workbench.kernels import AttentionMask, StatisticsRequest, attention

PADDING = torch.tensor([[False, True, False, True]])
MASKS = {
    "causal": AttentionMask(),
    "bidirectional": AttentionMask(causal=False),
    "padding": AttentionMask(key_padding=PADDING, query_padding=PADDING),
    "window": AttentionMask(window=2, n_global=1),
    "empty rows": AttentionMask(query_offset=-2),
}
OPTIONS = {
    "plain": {},
    "sink": {"sink_logits": None},
    "everything": {"softcap": 1.5, "alibi_slopes": None, "offset_bias": None, "sink_logits": None},
}


def make(options):
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = {"q": leaf(1, 2, 4, 2), "k": leaf(1, 1, 4, 2), "v": leaf(1, 1, 4, 2)}
    tables = {name: leaf(2, 7) if name == "offset_bias" else leaf(2) for name in options if name != "softcap"}
    return inputs | tables


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_those_of_finite_differences(mask, options, backend):
    given = make(OPTIONS[options])
    softcap = OPTIONS[options].get("softcap")

    def run(*tensors):
        arguments = dict(zip(given, tensors, strict=True))
        found = attention(**arguments, mask=MASKS[mask], softcap=softcap, backend=backend)
        return found.z, found.lse.masked_fill(found.lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(run, tuple(given.values()), fast_mode=True)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("read", ["z", "lse", "both"])
def test_gradients_agree_between_backends(window, read):
    """Long enough for several blocks, with only one of the outputs used or both, from views of one projection."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2, 150, 3, 4, 8, generator=generator)
    gradients = []
    for backend in ("reference", "streaming"):
        qkv = base.clone().requires_grad_()
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        found = attention(q, k[:, :2], v[:, :2], mask=AttentionMask(window=window), backend=backend)
        loss = {"z": found.z.sin().sum(), "lse": found.lse.sin().sum()}
        (sum(loss.values()) if read == "both" else loss[read]).backward()
        gradients.append(qkv.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "streaming"])
@pytest.mark.parametrize("window", [None, 3])
def test_statistics_are_detached(backend, window):
    q = torch.randn(1, 2, 20, 4, requires_grad=True)
    request = StatisticsRequest.all(torch.arange(20)[None])
    options = {"sink_logits": torch.zeros(2, requires_grad=True), "statistics": request, "backend": backend}
    found = attention(q, q, q, mask=AttentionMask(window=window), **options)
    assert found.z.requires_grad and found.lse.requires_grad
    for name, value in found.statistics.items():
        values = value.values() if name == "match_mass" else [value]
        assert not any(x.requires_grad for x in values), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gets_gradients_of_its_own_type(dtype):
    q = torch.randn(1, 2, 20, 4).to(dtype).requires_grad_()
    attention(q, q, q, mask=AttentionMask()).z.sum().backward()
    assert q.grad.dtype == dtype and q.grad.isfinite().all()
