"""Losses beyond a window by policy, on a model that needs its first token and by definition."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench import HookedTransformer, TransformerConfig
from workbench.analyses import Streaming, load_result, streaming_perplexity
from workbench.analyses.sinks.streaming import FULL, MIDDLE, POLICIES, RECOMPUTED, SINKS, WINDOW


def bos_model(vocabulary: int, bias: float) -> HookedTransformer:
    """One head that gives all weight to token 0 wherever it sees it; its value makes the first half of the other tokens
    likelier by ``bias``. A huge constant in the stream makes the norms pass everything else through as it is."""
    token, output, anchor = torch.arange(vocabulary), torch.arange(vocabulary) + vocabulary + 1, vocabulary
    d_model, huge = 2 * vocabulary + 1, 1e5
    cfg = TransformerConfig(
        n_layers=1, d_model=d_model, n_heads=1, d_head=4, d_mlp=1, d_vocab=vocabulary, n_ctx=64,
        positional_embedding_type="none", normalization_type="RMS", attn_scale=1.0, model_name="hand-built",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(huge / d_model**0.5 if "ln" in name else 0.0)
        model.embed.W_E[token, token] = 1.0
        model.embed.W_E[:, anchor] = huge
        model.unembed.W_U[output, token] = 1.0
        attention = model.blocks[0].attn
        attention.W_Q[0, anchor, 0] = 1 / huge
        attention.W_K[0, 0, 0] = 60.0
        attention.W_V[0, 0, 0] = 1.0
        attention.W_O[0, 0, output[1 : 1 + (vocabulary - 1) // 2]] = bias
    return model


@pytest.fixture(scope="module")
def found() -> Streaming:
    """Texts of 41 tokens: token 0, then tokens 1 to 10 of 21."""
    tokens = torch.randint(1, 11, (20, 41), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = 0
    return streaming_perplexity(bos_model(21, 3.0), tokens, window=12, n_sink_tokens=2, recompute_every=5)


def test_only_policies_that_keep_the_first_token_predict(found: Streaming) -> None:
    with_it, without = log(10 + 11 * np.exp(-3.0)), log(21)
    expected = np.full(len(POLICIES), without)
    expected[[FULL, SINKS]] = with_it
    np.testing.assert_allclose(found["mean_loss"], expected, atol=1e-6)
    np.testing.assert_allclose(found["excess"], expected - with_it, atol=1e-6)
    np.testing.assert_allclose(found["perplexity"], np.exp(expected), rtol=1e-6)
    np.testing.assert_allclose(found["excess_low"], expected - with_it, atol=1e-6)  # no spread over 20 texts
    np.testing.assert_allclose(found["loss"][:, :, :12], with_it, atol=1e-6)  # nothing has left the window yet
    assert found["n_queries"].tolist() == [28, 28, 28, 28, 6]
    assert "window: 3.045 nats, perplexity 21.0 (28 queries a text), +0.689 [+0.689, +0.689]" in found.summary()
    recomputed = next(line for line in found.summary().splitlines() if line.startswith("window, recomputed"))
    assert "perplexity" not in recomputed and "at 6 queries a text" in recomputed  # of every fifth query of 28


def by_definition(model: HookedTransformer, text: Tensor, kept: list[int], query: int) -> float:
    """Loss after a query that sees the ``kept`` tokens; of one layer, so that nothing else reaches it."""
    logits = model(text[None, kept])[0, -1].double()
    return float(-logits.log_softmax(dim=0)[text[query + 1]])


@torch.no_grad()
def test_every_policy_is_what_its_definition_says() -> None:
    cfg = TransformerConfig(
        n_layers=1, d_model=24, n_heads=2, d_head=8, d_mlp=16, d_vocab=30, n_ctx=20, positional_embedding_type="rotary",
    )  # fmt: skip
    model = HookedTransformer(cfg).eval().double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    texts = torch.randint(0, 30, (2, 31), generator=generator)
    window, n_sink, start, every = 9, 3, 4, 4
    found = streaming_perplexity(
        model, texts, window=window, n_sink_tokens=n_sink, middle_start=start, recompute_every=every
    )
    expected = np.full((len(POLICIES), 2, 30), np.nan)
    for row, text in enumerate(texts):
        for query in range(30):
            seen = list(range(query + 1))
            recent = seen[-window:]
            kept = {WINDOW: recent}
            for policy, first in ((SINKS, 0), (MIDDLE, start)):
                chosen = [j for j in seen if first <= j < first + n_sink]
                others = [j for j in seen if j not in chosen]
                kept[policy] = sorted(chosen + others[-(window - len(chosen)) :])
            if query < cfg.n_ctx:
                kept[FULL] = seen
            if query < window or (query - window) % every == 0:
                kept[RECOMPUTED] = recent
            for policy, tokens in kept.items():
                expected[policy, row, query] = by_definition(model, text, tokens, query)
    np.testing.assert_allclose(found["loss"], expected, atol=1e-6)  # the model's angles are float32
    beyond = expected[:, :, window:]
    np.testing.assert_allclose(found["mean_loss"], np.nanmean(beyond, axis=(1, 2)), atol=1e-6)
    np.testing.assert_allclose(found["excess"], np.nanmean(beyond - beyond[SINKS], axis=(1, 2)), atol=1e-6)
    assert np.isnan(found["mean_loss_low"]).all()  # 2 texts have no interval
    assert found["n_queries"].tolist() == [11, 21, 21, 21, 6]
    assert (
        "Full attention ends with the model's context of 20 tokens."
        in found.figure(captioned=True).layout.title.subtitle.text
    )


def test_a_window_of_the_whole_context_leaves_full_attention_nothing(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (1, 131), generator=torch.Generator().manual_seed(2))
    found = streaming_perplexity(random_model, tokens, window=128, recompute_every=1)
    assert np.isnan(found["mean_loss"][FULL]) and found["n_queries"].tolist() == [0, 2, 2, 2, 2]
    assert "full attention: none, as the model's context ends at 128 tokens." in found.summary()


def test_text_is_read_with_bos_and_cut_to_the_shortest() -> None:
    model = HookedTransformer.from_pretrained("demo")
    texts = ["Once there was a cook named Ada. One day she went to the market." * 2, "The sun rose. " * 40]
    found = streaming_perplexity(model, texts, window=16)
    lengths = [len(model.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert found.provenance.n_tokens == 2 * (1 + min(lengths)) and "starting with BOS" in found.summary()
    assert found.settings["middle_start"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 4}, "window must exceed n_sink_tokens"),
        ({"window": 129}, "model's context of 128"),
        ({"window": 39}, "needs 41"),
        ({"n_sink_tokens": 0}, "n_sink_tokens"),
        ({"middle_start": 3}, "behind the 4 sink tokens"),
        ({"recompute_every": 0}, "recompute_every"),
        ({"tokens": "text"}, "no tokenizer"),
    ],
)
def test_bad_options_are_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"tokens": torch.arange(40), "window": 16} | options
    with pytest.raises(ValueError, match=message):
        streaming_perplexity(random_model, **arguments)


def test_it_is_saved_and_drawn(found: Streaming, tmp_path: Path) -> None:
    again = load_result(found.save(tmp_path / "streaming"))
    assert again.summary() == found.summary() and list(again.tables()) == ["", "losses"]
    for theme in ("light", "dark"):
        assert [trace.name for trace in again.figure("curves", theme=theme).data] == list(POLICIES)
        (dots,) = again.figure("excess", captioned=True, theme=theme).data
        assert list(dots.y) == [policy for policy in POLICIES if policy != POLICIES[SINKS]]
    curve = again.figure("curves", bin_width=10).data[RECOMPUTED]
    np.testing.assert_allclose(curve.x, [4.5, 14.5, 24.5, 34.5])
    known = again["mean_loss_by_query"][RECOMPUTED][[10, 11, 12, 17]]  # of queries 10 to 19
    np.testing.assert_allclose(curve.y[1], known.mean())
