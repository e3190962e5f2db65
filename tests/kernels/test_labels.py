"""Labels made by hand, and the request that asks for everything."""

import pytest
import torch

from workbench.kernels import MatchLabels, StatisticsRequest, attention, match_labels
from workbench.kernels.masks import AttentionMask

TOKENS = torch.tensor([[7, 8, 7, 9, 8], [5, 5, 3, 5, 5]])


def test_induction_labels_are_the_tokens_before():
    labels = match_labels(TOKENS, "induction")
    assert torch.equal(labels.query, TOKENS)
    assert labels.key.tolist() == [[-1, 7, 8, 7, 9], [-1, 5, 5, 3, 5]]


def test_duplicate_labels_are_the_tokens():
    labels = match_labels(TOKENS, "duplicate")
    assert torch.equal(labels.query, TOKENS) and torch.equal(labels.key, TOKENS)


def test_padding_matches_nothing_and_precedes_nothing():
    real = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
    labels = match_labels(TOKENS, "induction", key_padding=real)
    assert labels.query.tolist() == [[-1, -1, 7, 9, 8], [5, 5, 3, 5, -1]]
    assert labels.key.tolist() == [[-1, -1, -1, 7, 9], [-1, 5, 5, 3, -1]]


def test_a_document_begins_with_nothing_before_it():
    labels = match_labels(TOKENS, "induction", documents=torch.tensor([[0, 0, 1, 1, 0], [4, 4, 4, 4, 4]]))
    assert labels.key.tolist() == [[-1, 7, -1, 7, -1], [-1, 5, 5, 3, 5]]


@pytest.mark.parametrize(("n", "block"), [(1, 1), (256, 1), (257, 2), (4096, 16), (5000, 20)])
def test_everything_is_asked_for_at_most_256_blocks_a_side(n, block):
    request = StatisticsRequest.all(torch.zeros(1, n, dtype=torch.int64))
    assert request.pooled == (block, block) and -(-n // block) <= 256
    assert set(request.match) == {"induction", "duplicate"}
    assert request.entropy and request.max_weight and request.mean_distance and request.received
    assert request.sink_keys == 4 and request.offsets == (0, 1) and request.classes is None and request.top_keys == 0


def test_sinks_are_a_set():
    """A position given twice counts once."""
    q = torch.zeros(1, 1, 4, 2)
    request = StatisticsRequest(sink_keys=torch.tensor([[2, 0, -1, 2]]))
    found = attention(q, q, q, mask=AttentionMask(causal=False), statistics=request)
    torch.testing.assert_close(found.statistics["sink_mass"][0, 0], torch.full((4,), 0.5))


def test_a_missing_statistic_is_named():
    q = torch.zeros(1, 1, 2, 2)
    statistics = attention(q, q, q, mask=AttentionMask()).statistics
    assert list(statistics) == ["lse"]
    with pytest.raises(KeyError, match="entropy.*lse"):
        statistics["entropy"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"sink_keys": 0}, "sink_keys"),
        ({"sink_keys": torch.tensor([[-2]])}, "sink_keys"),
        ({"sink_keys": torch.tensor([0.0])}, "sink_keys"),
        ({"offsets": (1, 1)}, "offsets"),
        ({"classes": torch.full((1, 4), 16)}, "classes"),
        ({"classes": torch.zeros(4, dtype=torch.int64)}, "classes"),
        ({"pooled": (0, 4)}, "pooled"),
        ({"pooled": (4,)}, "pooled"),
        ({"query_weights": torch.ones(1, 4)}, "query_weights"),
        ({"top_keys": -1}, "top_keys"),
    ],
)
def test_bad_requests_are_refused(fields, name):
    with pytest.raises(ValueError, match=name):
        StatisticsRequest(**fields)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"tokens": TOKENS.float(), "name": "induction"}, "tokens"),
        ({"tokens": TOKENS[0], "name": "induction"}, "tokens"),
        ({"tokens": TOKENS, "name": "previous"}, "name"),
        ({"tokens": TOKENS, "name": "induction", "key_padding": torch.ones(2, 4, dtype=torch.bool)}, "key_padding"),
        ({"tokens": TOKENS, "name": "induction", "documents": TOKENS[:1]}, "documents"),
    ],
)
def test_bad_labels_are_refused(arguments, name):
    with pytest.raises(ValueError, match=name):
        match_labels(**arguments)


def test_labels_are_integers_from_minus_one():
    with pytest.raises(ValueError, match="key"):
        MatchLabels(query=TOKENS, key=TOKENS - 10)
