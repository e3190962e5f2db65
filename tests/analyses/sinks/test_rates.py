from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import attention_sinks
from workbench.analyses.running import Sequences
from workbench.analyses.sinks.kinds import TOKEN_KINDS, token_kinds
from workbench.analyses.sinks.rates import MIN_OTHER_QUERIES


def test_a_perfect_sink_is_found_where_it_is(hand_built_model: Callable[..., HookedTransformer]) -> None:
    model = hand_built_model(20)
    tokens = torch.randint(0, 60, (3, 50), generator=torch.Generator().manual_seed(0))
    found = attention_sinks(model, tokens, epsilon=0.3)
    assert found.sink_position == 0
    np.testing.assert_allclose(found["alpha"][0, 1, 0], 1.0, atol=1e-6)
    np.testing.assert_allclose(found["alpha"][0, 1, 1:34], 0.0, atol=1e-6)
    assert found["head_sink_rate"][0, 1] == 1.0 and found["sink_mass"][0, 1] == pytest.approx(1.0)
    # Even attention gives key 0 the mean of 1 / (i + 1).
    assert found["sink_weight"][0, 2] == pytest.approx(np.mean([1 / (i + 1) for i in range(50)]))
    assert np.isnan(found["sink_rate"][34:]).all() and np.isfinite(found["sink_rate"][:34]).all()
    assert "Evaluated: key positions 0 to 33 of 0 to 49, those that 16 or more other queries see." in found.summary()
    (span,) = found.figure("positions").layout.shapes
    assert (span.x0, span.x1, span.name) == (33.5, 49.5, "not evaluated: seen by fewer than 16 other queries")
    assert found.tables()["positions"]["sink_rate"].isna().to_numpy().nonzero()[0].tolist() == list(range(34, 50))


def naive_alpha(pattern: np.ndarray) -> np.ndarray:
    """α_j of one pattern [n, n]; NaN for keys with fewer than 16 later queries."""
    n = len(pattern)
    return np.array([pattern[j:, j].mean() if n - 1 - j >= 16 else np.nan for j in range(n)])


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_number_is_what_its_definition_gives(random_model: HookedTransformer, side: str) -> None:
    epsilon, n_tokens, sink_keys = 0.06, 40, 2
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 50, (n,), generator=generator) for n in (60, 17, 33)]
    tokens, mask = torch.full((3, 60), 7), torch.zeros(3, 60)
    for place, row in enumerate(rows):
        span = slice(60 - len(row), 60) if side == "left" else slice(0, len(row))
        tokens[place, span], mask[place, span] = row, 1
    result = attention_sinks(
        random_model, tokens, attention_mask=mask, epsilon=epsilon, n_tokens=n_tokens, sink_keys=sink_keys
    )
    n_layers, n_heads = random_model.cfg.n_layers, random_model.cfg.n_heads
    alphas = np.full((3, n_layers, n_heads, n_tokens), np.nan)
    masses: list[tuple[int, np.ndarray]] = []
    norms = {name: np.full((3, n_layers, n_heads, n_tokens), np.nan) for name in ("value_norm", "output_norm")}
    for place, row in enumerate(rows):
        _, cache = random_model.run_with_cache(row[:n_tokens])
        n = len(row[:n_tokens])
        for layer in range(n_layers):
            patterns = cache[f"blocks.{layer}.attn.hook_pattern"][0].double().numpy()
            values = cache[f"blocks.{layer}.attn.hook_v"][0].double()
            for head in range(n_heads):
                alphas[place, layer, head, :n] = naive_alpha(patterns[head])
                v = values[:, head // 2]
                norms["value_norm"][place, layer, head, :n] = v.norm(dim=1).numpy()
                W_O = random_model.blocks[layer].attn.W_O[head].double()
                norms["output_norm"][place, layer, head, :n] = (v @ W_O).norm(dim=1).detach().numpy()
            masses.append((layer, patterns[:, :, :sink_keys].sum(axis=2)))
    above = np.where(np.isnan(alphas), np.nan, alphas > epsilon)
    rate = np.array(
        [np.nanmean(above[..., j]) if np.isfinite(above[..., j]).any() else np.nan for j in range(n_tokens)]
    )
    np.testing.assert_allclose(result["sink_rate"], rate, atol=1e-9)
    position = int(np.nanargmax(rate))
    assert result.sink_position == position and 0 < rate[position] < 1
    has_alpha = np.isfinite(alphas).any(axis=0)
    np.testing.assert_allclose(result["alpha"][has_alpha], np.nanmean(alphas[:, has_alpha], axis=0), atol=1e-6)
    np.testing.assert_allclose(result["sink_weight"], np.nanmean(alphas[..., position], axis=0), atol=1e-6)
    np.testing.assert_allclose(result["head_sink_rate"], np.nanmean(above[..., position], axis=0), atol=1e-9)
    for layer in range(n_layers):
        of_layer = np.concatenate([mass for at, mass in masses if at == layer], axis=1)  # [head, row]
        np.testing.assert_allclose(result["sink_mass"][layer], of_layer.mean(axis=1), atol=1e-6)
    for name, norm in norms.items():
        at_sink, median = norm[..., position], np.nanmedian(np.delete(norm, position, axis=3), axis=3)
        np.testing.assert_allclose(result[f"{name}_at_sink"], np.nanmean(at_sink, axis=0), rtol=1e-5)
        np.testing.assert_allclose(result[f"{name}_median"], np.nanmean(median, axis=0), rtol=1e-5)
        np.testing.assert_allclose(result[f"{name}_ratio"], np.nanmean(at_sink / median, axis=0), rtol=1e-5)


def test_only_the_first_tokens_count(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (2, 100), generator=torch.Generator().manual_seed(2))
    whole, short = attention_sinks(random_model, tokens, n_tokens=30), attention_sinks(random_model, tokens[:, :30])
    np.testing.assert_array_equal(whole["alpha"], short["alpha"])
    assert whole.settings["n_tokens"] == 30
    assert whole.provenance.inputs_sha256 == short.provenance.inputs_sha256
    assert whole.provenance.inputs == f"the first 30 tokens of {short.provenance.inputs}"


def test_a_chosen_position_is_reported(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(3))
    found = attention_sinks(random_model, tokens, sink_position=5)
    np.testing.assert_allclose(found["sink_weight"], found["alpha"][..., 5])
    assert "at position 5" in found.summary()


class Tokenizer:
    """Token i is a text of its own kind; see TEXTS."""

    bos_token_id = 0
    all_special_ids = (0,)

    def decode(self, ids: list[int]) -> str:
        return TEXTS[ids[0]]

    def convert_ids_to_tokens(self, token: int) -> str:
        return TEXTS[token]


TEXTS = ["<bos>", " the", "ing", "\n", " ,", "42", " x1", "中"]
KINDS = (
    "special", "start of word", "rest of word", "white space", "punctuation", "digits", "start of word", "rest of word"
)  # fmt: skip


def test_sink_rates_by_kind_of_token(random_model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "tokenizer", Tokenizer())
    tokens = torch.randint(0, len(TEXTS), (4, 40), generator=torch.Generator().manual_seed(4))
    tokens[:, 0] = torch.tensor([0, 0, 1, 3])
    found = attention_sinks(random_model, tokens, epsilon=0.06)
    assert found.coordinates["kind"] == list(TOKEN_KINDS)
    assert "2 of 4 starting with BOS" in found.summary()
    kinds = np.array([[KINDS[i] for i in row] for row in tokens.tolist()])
    kinds[:, 0] = "first token"
    # From sequences one at a time, whose α is that of a single sequence.
    above = np.stack([attention_sinks(random_model, row, epsilon=0.06)["alpha"] > 0.06 for row in tokens])
    for place, kind in enumerate(TOKEN_KINDS):
        chosen = (kinds == kind) & (np.arange(40) < 40 - MIN_OTHER_QUERIES)
        assert found["n_keys_by_kind"][place] == chosen.sum()
        expected = above.mean(axis=(1, 2))[chosen].mean()
        np.testing.assert_allclose(found["sink_rate_by_kind"][place], expected, atol=1e-9)


SENTENCE_PIECES = {
    "<unk>": "special", "▁the": "start of word", "s": "rest of word", "▁": "white space", "▁,": "punctuation",
    "▁12": "digits", "3": "digits",
}  # fmt: skip
WORD_PIECES = {
    "[UNK]": "special", "the": "start of word", "##s": "rest of word", ",": "punctuation", "12": "digits",
    "##3": "digits",
}  # fmt: skip


@pytest.mark.parametrize("pieces", [SENTENCE_PIECES, WORD_PIECES])
def test_words_start_where_tokenizers_mark_it(pieces: dict[str, str]) -> None:
    """Decoding one token takes the space before it away, and WordPiece marks the tokens that start no word."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    unknown = next(iter(pieces))
    if "##s" in pieces:
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
        tokenizer.decoder = decoders.WordPiece()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
        tokenizer.decoder = decoders.Metaspace()
    reader = SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown))
    tokens = torch.tensor([[0, *range(len(pieces))]])
    found = token_kinds(reader, Sequences(tokens, torch.ones_like(tokens, dtype=torch.bool)))
    assert found is not None
    assert [TOKEN_KINDS[kind] for kind in found[0]] == ["first token", *pieces.values()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": torch.arange(16)}, "16 tokens, so none of its keys"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": 30}, "epsilon"),
        ({"n_tokens": 16}, "n_tokens"),
        ({"sink_keys": 0}, "sink_keys"),
        ({"sink_position": 24}, "0 to 23 here, got 24"),
        ({"sink_position": -1}, "0 to 23 here, got -1"),
    ],
)
def test_bad_options_are_refused(random_model: HookedTransformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_sinks(random_model, **({"tokens": torch.arange(40)} | options))


@pytest.mark.parametrize(("epsilon", "n_above"), [(0.05, 38), (0.1, 24), (0.15, 16)])
def test_a_weight_that_equals_epsilon_on_paper_is_not_above_it(epsilon: float, n_above: int) -> None:
    # Of 20 queries, one, two or three look at key 0 in several heads: there α_0 is 1, 2 or 3 / 20 but for rounding.
    draw = random.Random(2)
    tokens = torch.tensor([draw.sample(range(2, 1700), 20) for _ in range(3)])
    models = [HookedTransformer.from_pretrained("demo", dtype=dtype) for dtype in (torch.float32, torch.float64)]
    single, double = (attention_sinks(model, tokens, epsilon=epsilon, sink_position=0) for model in models)
    # Of 3 sequences × 16 heads, so many have an α_0 in float64 that exceeds ε by more than 1e-6 of it.
    alpha = np.stack([attention_sinks(models[1], row, sink_position=0)["alpha"][..., 0] for row in tokens])
    assert (alpha / epsilon - 1 > 1e-6).sum() == n_above
    for found in (single, double):
        assert found["sink_rate"][0] == n_above / 48
        np.testing.assert_array_equal(found["head_sink_rate"], (alpha / epsilon - 1 > 1e-6).mean(axis=0))
        assert found["sink_rate_by_kind"][TOKEN_KINDS.index("first token")] == n_above / 48


def test_coverage_is_the_share_of_keys_that_count(random_model: HookedTransformer) -> None:
    assert attention_sinks(random_model, torch.arange(20)).coverage["sink_rate"] == 4 / 20  # as float64 has it


def test_intervals_are_those_of_resampled_sequences(random_model: HookedTransformer) -> None:
    tokens = torch.randint(0, 50, (24, 30), generator=torch.Generator().manual_seed(5))
    found = attention_sinks(random_model, tokens, epsilon=0.08, sink_position=2)
    alone = [attention_sinks(random_model, row, epsilon=0.08, sink_position=2) for row in tokens]
    rates = np.stack([one["sink_rate"] for one in alone])[:, :14]
    drawn = np.random.default_rng(1).integers(0, 24, (4000, 24))
    low, high = np.percentile(rates[drawn].mean(axis=1), (2.5, 97.5), axis=0)
    np.testing.assert_allclose(found["sink_rate_low"][:14], low, atol=0.02)
    np.testing.assert_allclose(found["sink_rate_high"][:14], high, atol=0.02)
    weights = np.stack([one["sink_weight"] for one in alone])  # [sequence, layer, head]
    low, high = np.percentile(weights[drawn].mean(axis=1), (2.5, 97.5), axis=0)
    np.testing.assert_allclose(found["sink_weight_low"], low, atol=0.003)
    np.testing.assert_allclose(found["sink_weight_high"], high, atol=0.003)
    assert np.isnan(found["sink_rate_low"][14:]).all() and "sink_rate_low" not in alone[0]
    assert f"[{found['sink_rate_low'][2]:.1%}, {found['sink_rate_high'][2]:.1%}] at position 2" in found.summary()


def test_every_figure_is_drawn(random_model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, len(TEXTS), (2, 30), generator=torch.Generator().manual_seed(6))
    without = attention_sinks(random_model, tokens)
    assert without.figure_kinds == ("map", "positions", "keys", "norms")
    monkeypatch.setattr(random_model, "tokenizer", Tokenizer())
    found = attention_sinks(random_model, tokens)
    for kind in found.figure_kinds:
        for theme in ("light", "dark"):
            found.figure(kind, captioned=True, theme=theme)
    assert list(found.figure("kinds").data[0].y)[0] == "first token (n = 2)"
    assert found.figure("keys").data[0].y[-1] == "L2H3"
