"""Sinks of position and sinks of BOS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench import HookedTransformer
from workbench.analyses import attention_sinks, chunked_text, first_token_sinks, load_result
from workbench.demo.measure import held_out_texts


def test_a_head_that_goes_by_position_has_its_sink_whatever_comes_first(
    hand_built_model: Callable[..., HookedTransformer],
) -> None:
    tokens = torch.randint(0, 60, (3, 40), generator=torch.Generator().manual_seed(0))
    found = first_token_sinks(hand_built_model(20), tokens)
    assert found.coordinates["variant"] == ["no BOS", "another token first", "one token repeated"]
    np.testing.assert_allclose(found["sink_weight"][:, 0, 1], 1.0, atol=1e-6)
    # The heads that attend evenly give position 0 the mean of 1 / (i + 1); behind another token there is one more.
    np.testing.assert_allclose(found["sink_weight"][0, 0, 2], np.mean([1 / (i + 1) for i in range(40)]))
    np.testing.assert_allclose(found["sink_weight"][1:, 0, 2], np.mean([1 / (i + 1) for i in range(41)]))


def test_the_demo_models_sink_is_its_bos(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo")
    tokens = chunked_text(model, " ".join(held_out_texts(40)), length=50, max_chunks=8)
    found = first_token_sinks(model, tokens, n_tokens=50)
    assert found.coordinates["variant"][0] == "BOS first"
    with_bos, without, other, _ = found["sink_rate"]
    assert with_bos > 0.08 and without < 0.02 and other < 0.02
    for place, ids in enumerate((tokens, tokens[:, 1:])):
        alone = attention_sinks(model, ids, n_tokens=50, sink_position=0)
        assert found["sink_rate"][place] == alone["sink_rate"][0]
        assert found["largest_other_rate"][place] == np.nanmax(alone["sink_rate"][1:])
        np.testing.assert_array_equal(found["sink_weight"][place], alone["sink_weight"])
    bare = first_token_sinks(model, tokens[:, 1:], n_tokens=50)  # BOS is put there all the same
    np.testing.assert_array_equal(bare["sink_rate"], found["sink_rate"])
    again = load_result(found.save(tmp_path / "first"))
    assert again.summary() == found.summary() and "BOS first: " in found.summary()
    for theme in ("light", "dark"):
        again.figure("map", variant="no BOS", captioned=True, theme=theme)
        assert [trace.name for trace in again.figure("rates", theme=theme).data] == ["position 0", "any other"]
    with pytest.raises(ValueError, match="variant must be one of"):
        again.figure("map", variant="BOS")
    tokens[0, 0] = 5
    with pytest.raises(ValueError, match="7 of 8 sequences start with BOS"):
        first_token_sinks(model, tokens)
