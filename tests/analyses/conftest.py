"""Models whose heads do known things: their weights are set by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workbench import HookedTransformer, TransformerConfig

VOCABULARY, CONTEXT, SHARP = 60, 160, 400.0


def hand_built(period: int, *, induction_heads: int = 1, strength: float = 20.0) -> HookedTransformer:
    """Two layers, four heads each, no MLP, a residual stream of four slots: token, position, previous token, output.

    L0H0 attends to the previous token and copies it into the third slot; L0H1 attends to position 0 and writes nothing.
    L1H0 (and L1H1, with two induction heads) attends to tokens whose previous token is the query's and copies them into
    the output slot; the last head attends ``period − 1`` back, so it shows the pattern where repetitions have that
    period, and writes nothing. All others spread their attention evenly and write a little noise.

    ``strength`` is the logit that the copied token gets from each induction head.
    """
    d_model = VOCABULARY + CONTEXT + VOCABULARY + VOCABULARY
    token, position = torch.arange(VOCABULARY), torch.arange(CONTEXT) + VOCABULARY
    previous, output = token + VOCABULARY + CONTEXT, token + 2 * VOCABULARY + CONTEXT
    width = max(VOCABULARY, CONTEXT)
    cfg = TransformerConfig(
        n_layers=2, d_model=d_model, n_heads=4, d_head=width, d_mlp=1, d_vocab=VOCABULARY, n_ctx=CONTEXT,
        normalization_type="RMS", attn_scale=1.0, model_name="hand-built",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        model.embed.W_E[token, token] = 1.0
        model.pos_embed.W_pos[torch.arange(CONTEXT), position] = 1.0
        model.unembed.W_U[output, token] = 1.0
        first, second = (block.attn for block in model.blocks)
        shift(first, 0, position, 1)
        first.W_V[0, token, token] = 1.0
        first.W_O[0, token, previous] = 1.0
        first.W_Q[1, position, 0] = SHARP
        first.W_K[1, position[0], 0] = 1.0
        for head in range(induction_heads):
            second.W_Q[head, token, token] = SHARP
            second.W_K[head, previous, token] = 1.0
            second.W_V[head, token, token] = 1.0
            second.W_O[head, token, output] = strength
        shift(second, 3, position, period - 1)
        noise = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for attention, heads in ((first, (2, 3)), (second, range(induction_heads, 3))):
            for head in heads:
                attention.W_V[head, token, token] = 1.0
                attention.W_O[head, token[:, None], output] = 0.03 * noise
    return model


def shift(attention: torch.nn.Module, head: int, position: torch.Tensor, offset: int) -> None:
    """Lets a head attend to the position ``offset`` before the query's, where there is one."""
    columns = torch.arange(CONTEXT)
    attention.W_Q[head, position, columns] = SHARP
    attention.W_K[head, position[: CONTEXT - offset], columns[: CONTEXT - offset] + offset] = 1.0


@pytest.fixture(scope="session")
def hand_built_model() -> Callable[..., HookedTransformer]:
    return hand_built


@pytest.fixture(scope="session")
def random_model() -> HookedTransformer:
    """A rotary model with grouped queries and attention sharp enough to differ from the uniform one, in float32."""
    cfg = TransformerConfig(
        n_layers=3, d_model=32, n_heads=4, n_key_value_heads=2, d_head=8, d_mlp=48, d_vocab=50, n_ctx=128,
        positional_embedding_type="rotary", normalization_type="RMS", gated_mlp=True, act_fn="silu",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    model = HookedTransformer(cfg).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
    return model
