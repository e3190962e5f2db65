"""Arguments that do not fit are refused by name, before anything is computed."""

import math

import pytest
import torch

from workbench.kernels import (
    AttentionMask,
    MatchLabels,
    StatisticsRequest,
    attention,
    attention_pattern,
    attention_scores,
    attention_weights,
    match_labels,
    pattern_statistics,
)

Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8)
MASK = AttentionMask()


def labels(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"q": Q[0]}, "^q "),
        ({"q": [1.0]}, "^q "),
        ({"q": Q.long()}, "^q "),
        ({"k": K[..., :7], "v": K[..., :7]}, "^k "),
        ({"k": K[:1], "v": K[:1]}, "^k "),
        ({"k": K.double(), "v": K.double()}, "^k .*dtype"),
        ({"k": K.to("meta"), "v": K}, "^k .*device"),
        ({"q": Q[:, :3]}, "^k has 2 heads"),
        ({"k": K[:, :0], "v": K[:, :0]}, "^k has 0 heads"),
        ({"v": K[:, :, :5]}, "^v "),
        ({"v": K[..., :4]}, "^v "),
        ({"v": K.half()}, "^v .*dtype"),
        ({"mask": None}, "mask"),
        ({"mask": AttentionMask(key_padding=torch.ones(2, 5, dtype=torch.bool))}, "key_padding"),
        ({"scale": math.nan}, "scale"),
        ({"scale": math.inf}, "scale"),
        ({"scale": "1"}, "scale"),
        ({"scale": True}, "scale"),
        ({"softcap": True}, "softcap"),
        ({"softcap": torch.tensor(2.0)}, "softcap"),
        ({"softcap": 1e38}, "softcap"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": math.inf}, "softcap"),
        ({"softcap": math.nan}, "softcap"),
        ({"alibi_slopes": torch.ones(2)}, "alibi_slopes"),
        ({"alibi_slopes": torch.ones(4, dtype=torch.int64)}, "alibi_slopes"),
        ({"offset_bias": torch.ones(4, 11)}, "offset_bias"),
        ({"sink_logits": torch.ones(1, 4)}, "sink_logits"),
        ({"sink_logits": torch.tensor([0, 0, 0, math.inf])}, "sink_logits"),
        ({"sink_logits": torch.tensor([0, 0, 0, math.nan])}, "sink_logits"),
        ({"backend": "triton", "q": Q.double(), "k": K.double(), "v": K}, "^v .*dtype"),
        ({"sink_logits": torch.ones(4, device="meta")}, "sink_logits"),
        ({"backend": "fast"}, "backend"),
        ({"backend": ["triton"]}, "backend"),
        ({"statistics": {"entropy": True}}, "^statistics must be a StatisticsRequest, got dict"),
        ({"statistics": StatisticsRequest(match=("induction",))}, "match"),
        (
            {"statistics": StatisticsRequest(match={"x": MatchLabels(labels(2, 6), labels(2, 6))})},
            r"match\['x'\].query",
        ),
        ({"statistics": StatisticsRequest(match={"x": MatchLabels(labels(2, 5), labels(1, 6))})}, r"match.*key"),
        ({"statistics": StatisticsRequest(classes=labels(2, 5))}, "classes"),
        ({"statistics": StatisticsRequest(received=True, query_weights=torch.ones(2, 6))}, "query_weights"),
        ({"statistics": StatisticsRequest(received=True, query_weights=torch.ones(2, 2, 5))}, "query_weights"),
        ({"statistics": StatisticsRequest(sink_keys=torch.tensor([[6], [0]]))}, "sink_keys"),
        ({"statistics": StatisticsRequest(sink_keys=torch.tensor([[0]]))}, "sink_keys"),
        ({"statistics": StatisticsRequest(top_keys=7)}, "top_keys"),
    ],
)
def test_attention_names_what_does_not_fit(changes, name):
    arguments = {"q": Q, "k": K, "v": K, "mask": MASK} | changes
    with pytest.raises(ValueError, match=name):
        attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"rows": 3}, "rows .*int"),
        ({"rows": slice(0.5, 2)}, "rows .*0.5"),
        ({"cols": slice(None, None, -1)}, "cols .*forwards"),
        ({"cols": torch.tensor([6])}, "cols"),
        ({"rows": torch.tensor([-6])}, "rows"),
        ({"cols": torch.tensor([0.5])}, "cols"),
        ({"softcap": 0.0}, "softcap"),
        ({"sink_logits": torch.ones(2)}, "sink_logits"),
    ],
)
def test_attention_pattern_names_what_does_not_fit(changes, name):
    arguments = {"mask": MASK, "rows": slice(None), "cols": slice(None)} | changes
    with pytest.raises(ValueError, match=name):
        attention_pattern(Q, K, **arguments)


def test_attention_scores_names_what_does_not_fit():
    with pytest.raises(ValueError, match="alibi_slopes"):
        attention_scores(Q, K, mask=MASK, alibi_slopes=torch.ones(3))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((torch.ones(4, 5, 6),), r"^scores .*\[4, 5, 6\]"),
        ((torch.ones(2, 4, 5, 6, dtype=torch.int64),), "^scores .*int64"),
        (([1.0],), "^scores .*list"),
        ((torch.ones(2, 4, 5, 6), torch.ones(2)), "^sink_logits"),
    ],
)
def test_attention_weights_names_what_does_not_fit(arguments, name):
    with pytest.raises(ValueError, match=name):
        attention_weights(*arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"pattern": torch.ones(4, 5, 6)}, r"^pattern .*\[4, 5, 6\]"),
        ({"pattern": torch.ones(2, 4, 5, 6, dtype=torch.int64)}, "^pattern .*int64"),
        ({"mask": None}, "^mask .*AttentionMask.*NoneType"),
        ({"mask": AttentionMask(key_padding=torch.ones(2, 5, dtype=torch.bool))}, "^key_padding"),
        ({"request": None}, "^request .*StatisticsRequest.*NoneType"),
        ({"request": StatisticsRequest(match=("induction",))}, "^match"),
        ({"request": StatisticsRequest(classes=labels(2, 5))}, "^classes"),
        ({"virtual_mass": 0.5}, "^virtual_mass .*float"),
        ({"virtual_mass": torch.ones(2, 4, 6)}, r"^virtual_mass .*\[2, 4, 5\].*\[2, 4, 6\]"),
    ],
)
def test_pattern_statistics_names_what_does_not_fit(changes, name):
    arguments = {"pattern": torch.ones(2, 4, 5, 6), "mask": MASK, "request": StatisticsRequest(entropy=True)} | changes
    with pytest.raises(ValueError, match=name):
        pattern_statistics(arguments.pop("pattern"), **arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tokens": labels(6)}, "^tokens"),
        ({"tokens": torch.ones(2, 6)}, "^tokens .*float32"),
        ({"name": "previous"}, "^name .*previous"),
        ({"key_padding": torch.ones(2, 5, dtype=torch.bool)}, r"^key_padding .*\[2, 6\].*\[2, 5\]"),
        ({"key_padding": torch.ones(2, 6)}, "^key_padding .*bool.*float32"),
        ({"documents": torch.ones(2, 6)}, "^documents .*int64.*float32"),
        ({"documents": [[0] * 6] * 2}, "^documents .*list"),
    ],
)
def test_match_labels_names_what_does_not_fit(changes, name):
    arguments = {"tokens": labels(2, 6), "name": "induction"} | changes
    with pytest.raises(ValueError, match=name):
        match_labels(**arguments)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (StatisticsRequest, "entropy", "yes"),
        (StatisticsRequest, "sink_keys", 1.5),
        (StatisticsRequest, "sink_keys", True),
        (StatisticsRequest, "offsets", 1),
        (StatisticsRequest, "offsets", (1.5,)),
        (StatisticsRequest, "offsets", (2**32,)),
        (StatisticsRequest, "query_weights", torch.ones(1, 2, dtype=torch.complex64)),
        (AttentionMask, "query_offset", 2**31),
        (StatisticsRequest, "match", "induction"),
        (StatisticsRequest, "match", {"x": 5}),
        (StatisticsRequest, "match", ("induction", 1)),
        (StatisticsRequest, "pooled", 4),
        (StatisticsRequest, "pooled", (1.5, 2)),
        (StatisticsRequest, "top_keys", "3"),
        (StatisticsRequest, "top_keys", True),
        (AttentionMask, "causal", "no"),
        (AttentionMask, "window", 1.5),
        (AttentionMask, "n_global", 1.5),
        (AttentionMask, "query_offset", "x"),
    ],
)
def test_values_of_another_type_are_refused_when_they_are_given(kind, field, value):
    with pytest.raises(ValueError, match=field):
        kind(**{field: value})


def test_query_weights_of_another_type_are_refused():
    with pytest.raises(ValueError, match="query_weights"):
        StatisticsRequest(received=True, query_weights=[1.0])
