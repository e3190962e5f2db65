"""Models train: gradients reach every weight by every path, and each kind of model learns what only it can."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from workbench import HookedEncoderDecoder, HookedTransformer, TransformerConfig

SIZES: dict[str, Any] = {
    "n_layers": 2, "d_model": 32, "n_heads": 2, "d_head": 16, "d_mlp": 64, "d_vocab": 12, "n_ctx": 16,
}  # fmt: skip
MASK = 11  # the token that hides another


def train(model: HookedTransformer, loss_of_batch: Callable[[], Tensor], steps: int) -> list[float]:
    """The losses of AdamW's steps."""
    optimiser = torch.optim.AdamW(model.train().parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = loss_of_batch()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def cycles(rows: int, length: int) -> Tensor:
    """[rows, length]: each token is the one before plus 1, modulo 11, from a random start."""
    return (torch.randint(0, 11, (rows, 1)) + torch.arange(length)) % 11


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_decoder_learns_the_next_token(dropout):
    """From about ln(d_vocab), the loss of knowing nothing, to almost none: each token determines the next."""
    torch.manual_seed(0)
    model = HookedTransformer(TransformerConfig(**SIZES, dropout=dropout))
    losses = train(model, lambda: model(cycles(16, 12), return_type="loss"), steps=60)
    assert abs(losses[0] - math.log(12)) < 0.2
    with torch.no_grad():
        assert model.eval()(cycles(16, 12), return_type="loss") < 0.05


def test_an_encoder_decoder_learns_to_copy():
    """Random source texts: only cross-attention can tell what comes next, so with another's source it guesses."""
    torch.manual_seed(0)
    model = HookedEncoderDecoder(TransformerConfig(**SIZES, n_encoder_layers=1, decoder_start_token_id=MASK))

    def losses_of(encoder_reads_another: bool = False) -> Tensor:
        source = torch.randint(0, 11, (32, 5))
        target = torch.cat((torch.full((32, 1), MASK), source), dim=1)
        return model(source.roll(1, 0) if encoder_reads_another else source, "loss", decoder_input=target)

    train(model, losses_of, steps=250)
    model.eval()
    with torch.no_grad():
        assert losses_of() < 0.1
        assert losses_of(encoder_reads_another=True) > math.log(11)


def test_an_encoder_learns_what_is_masked():
    """The word at a mask in a cycle follows from either neighbour; each is masked alone, so one always shows."""
    torch.manual_seed(0)
    cfg = TransformerConfig(**SIZES, attention_dir="bidirectional", use_mlm_head=True, init_mode="xavier")
    model = HookedTransformer(cfg)

    def masked_loss() -> Tensor:
        tokens = cycles(32, 9)
        hidden = torch.zeros_like(tokens, dtype=torch.bool)
        hidden[torch.arange(32), torch.randint(0, 9, (32,))] = True
        logits = model(tokens.masked_fill(hidden, MASK))
        return nn.functional.cross_entropy(logits[hidden], tokens[hidden])

    losses = train(model, masked_loss, steps=150)
    assert losses[0] > 2 and sum(losses[-10:]) / 10 < 0.1


# Gradients


def gradients(mechanism: Any, backend: str = "auto", autocast: bool = False) -> dict[str, Tensor]:
    """Of a weighted sum of all outputs, by parameter."""
    model = mechanism.model
    model.set_attention_backend(backend)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = mechanism.output()
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output)
    (output * weights).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def key_bias_matters(name: str, cfg: TransformerConfig) -> bool:
    """Softmax does not see a number that the scores of a query share, such as q · b_K.

    They share it no more where the keys' biases are rotated, each by its position.
    """
    return cfg.positional_embedding_type == "rotary" and "cross_attn" not in name


def test_gradients_reach_every_weight(mechanism):
    """… that the function depends on, in training mode, with dropout, which by chance leaves some out of a batch."""
    mechanism.model._reconfigure(dropout=0.1)
    mechanism.model.train()
    torch.manual_seed(0)
    for name, gradient in gradients(mechanism).items():
        assert gradient.isfinite().all(), name
        if name.endswith("b_K") and not key_bias_matters(name, mechanism.model.cfg):
            assert gradient.abs().max() < 1e-10, name
        else:
            assert gradient.abs().max() > 1e-6, name


def test_the_kernel_and_the_materialised_pattern_have_the_same_gradients(mechanism):
    flash, materialised = (gradients(mechanism, backend) for backend in ("flash", "materialised"))
    for name, gradient in flash.items():
        largest = max(1.0, float(gradient.abs().max()))
        assert (gradient - materialised[name]).abs().max() < 1e-10 * largest, name


def test_autocast_gives_the_gradients_to_its_precision(mechanism):
    """Under torch.autocast to bfloat16, of 8 bits, weights stay float32 and their gradients point where they should.

    The cosine of rounded to exact gradients of all weights together; 1 % of noise in each step would leave 0.999.
    """
    mechanism.model.float()
    exact, rounded = gradients(mechanism), gradients(mechanism, autocast=True)
    for name, gradient in rounded.items():
        assert gradient.dtype == torch.float32 and gradient.isfinite().all(), name
        if not name.endswith("b_K"):
            assert gradient.any(), name
    exact_flat, rounded_flat = (torch.cat([g.flatten() for g in each.values()]) for each in (exact, rounded))
    assert nn.functional.cosine_similarity(exact_flat, rounded_flat, dim=0) > 0.98
