"""Model statistics: what a user asks, by name and by count, against the materialised pattern."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from workbench import MatchLabels, StatisticsRequest
from workbench.kernels import match_labels
from workbench.statistics import rank_in_document

FIRST = 5


@pytest.fixture(scope="session")
def padded(tokens):
    """Left pads in one row, right pads in another, none in the third."""
    mask = torch.ones_like(tokens)
    mask[0, :FIRST] = 0
    mask[1, -FIRST:] = 0
    return mask


def naive(pattern, tokens, real, documents):
    """Every statistic of the default request in float64, one query at a time; NaN for pads' rows."""
    batch, heads, n, _ = pattern.shape
    p = pattern.double()
    out = {
        name: torch.zeros(batch, heads, n, dtype=torch.float64)
        for name in (
            "entropy",
            "max_weight",
            "mean_distance",
            "sink_mass",
            "previous",
            "induction",
            "duplicate",
            "received",
        )
    }
    for b in range(batch):
        for i in range(n):
            if not real[b, i]:
                continue
            row = p[b, :, i]
            visible = [j for j in range(i + 1) if real[b, j] and documents[b, j] == documents[b, i]]
            first = [j for j in range(n) if real[b, j] and documents[b, j] == documents[b, i]][:4]
            out["entropy"][b, :, i] = torch.special.entr(row).sum(-1)
            out["max_weight"][b, :, i] = row.amax(-1)
            out["mean_distance"][b, :, i] = sum(row[:, j] * (i - j) for j in visible)
            out["sink_mass"][b, :, i] = sum(row[:, j] for j in first if j <= i)
            out["previous"][b, :, i] = row[:, i - 1] if i - 1 in visible else 0
            for j in visible[:-1]:
                if tokens[b, j] == tokens[b, i]:
                    out["duplicate"][b, :, i] += row[:, j]
            for before, j in zip(visible[:-1], visible[1:], strict=True):
                if tokens[b, before] == tokens[b, i] and j < i:
                    out["induction"][b, :, i] += row[:, j]
            out["received"][b] += row
    return out


@torch.no_grad()
@pytest.mark.parametrize("packed", [False, True])
def test_default_request_equals_a_naive_count(pair, tokens, padded, packed):
    documents = torch.tensor([0] * 70 + [1] * 80).expand(3, -1) if packed else torch.zeros_like(tokens)
    arguments = {"attention_mask": padded} | ({"documents": documents} if packed else {})
    _, statistics = pair.model.run_with_statistics(tokens, **arguments)
    _, cache = pair.model.run_with_cache(tokens, names_filter=lambda name: name.endswith("pattern"), **arguments)
    for layer in range(pair.model.cfg.n_layers):
        expected = naive(cache["pattern", layer], tokens, padded, documents)
        actual = {
            name: statistics[name][layer]
            for name in ("entropy", "max_weight", "mean_distance", "sink_mass", "received")
        }
        actual["previous"] = statistics["offset_mass"][layer, ..., 1]
        actual |= {name: statistics["match_mass"][name][layer] for name in ("induction", "duplicate")}
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name].double(), value, atol=2e-4, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_shapes_have_a_leading_layer_axis(pair, tokens):
    request = StatisticsRequest(
        entropy=True, max_weight=True, sink_keys=4, offsets=(0, 1, 5), match=("induction",), received=True,
        pooled=(64, 64), top_keys=3, classes=tokens % 2,
    )  # fmt: skip
    _, statistics = pair.model.run_with_statistics(tokens, request)
    heads = pair.model.cfg.n_heads
    shapes = {name: tuple(value.shape) for name, value in statistics.items() if name != "match_mass"}
    per_query = (3, 3, heads, 150)
    assert shapes["entropy"] == shapes["lse"] == shapes["argmax_key"] == shapes["received"] == per_query
    assert shapes["offset_mass"] == (*per_query, 3)
    assert shapes["top_keys"] == (*per_query, 3)
    assert shapes["pooled_max"] == (3, 3, heads, 3, 3)
    assert statistics["match_mass"]["induction"].shape == per_query
    torch.testing.assert_close(statistics["class_mass"].sum(-1), torch.ones(per_query), atol=1e-5, rtol=0)
    with pytest.raises(KeyError, match="was not requested"):
        statistics["mean_distance"]


def test_a_hook_on_a_statistic_equals_the_request(pair, tokens, padded):
    _, statistics = pair.model.run_with_statistics(tokens, attention_mask=padded)
    names = {
        "hook_entropy": statistics["entropy"][..., None],
        "hook_sink_mass": statistics["sink_mass"][..., None],
        "hook_offset_mass": statistics["offset_mass"],
        "hook_match_mass": torch.stack(list(statistics["match_mass"].values()), -1),
        "hook_received": statistics["received"][..., None],
        "hook_lse": statistics["lse"][..., None],
    }
    _, cache = pair.model.run_with_cache(
        tokens, names_filter=lambda name: name.rpartition(".")[2] in names, attention_mask=padded
    )
    for suffix, values in names.items():
        for layer, value in enumerate(values):
            torch.testing.assert_close(cache[f"blocks.{layer}.attn.{suffix}"], value, atol=1e-6, rtol=1e-6)


def test_statistics_do_not_change_the_output(pair, tokens):
    logits, _ = pair.model.run_with_statistics(tokens)
    torch.testing.assert_close(logits, pair.model(tokens), atol=1e-5, rtol=1e-5)


def test_statistics_under_an_ablation(pair, tokens):
    """Hooks that are active apply: with layer 0 silenced, layer 1 attends differently, layer 0 does not."""
    _, clean = pair.model.run_with_statistics(tokens)
    with pair.model.hooks([("blocks.0.hook_attn_out", lambda x, hook: torch.zeros_like(x))]):
        _, ablated = pair.model.run_with_statistics(tokens)
    assert torch.equal(clean["entropy"][0], ablated["entropy"][0])
    assert not torch.equal(clean["entropy"][1], ablated["entropy"][1])


def test_a_run_from_a_residual_counts_its_layers(pair, tokens):
    residual = pair.model(tokens, stop_at_layer=1)
    request = StatisticsRequest(entropy=True)
    _, part = pair.model.run_with_statistics(residual, request, start_at_layer=1, return_type=None)
    _, whole = pair.model.run_with_statistics(tokens, request)
    assert part.layer_indices == (1, 2)
    assert torch.equal(part["entropy"], whole["entropy"][1:])
    with pytest.raises(ValueError, match="needs tokens"):
        pair.model.run_with_statistics(residual, start_at_layer=1)


def test_labels_of_other_tokens_are_refused(pair, tokens):
    other = {"duplicate": match_labels((tokens + 1) % 23, "duplicate")}
    with pytest.raises(ValueError, match="other tokens"):
        pair.model.run_with_statistics(tokens, StatisticsRequest(match=other))
    own = {"duplicate": match_labels(tokens, "duplicate")}
    _, given = pair.model.run_with_statistics(tokens, StatisticsRequest(match=own))
    _, named = pair.model.run_with_statistics(tokens, StatisticsRequest(match=("duplicate",)))
    assert torch.equal(given["match_mass"]["duplicate"], named["match_mass"]["duplicate"])


def test_labels_of_the_users_own(pair, tokens):
    """Every earlier key matches: what is left over is the weight on the query itself."""
    same = torch.zeros_like(tokens)
    request = StatisticsRequest(match={"earlier": MatchLabels(query=same, key=same)}, offsets=(0,))
    _, statistics = pair.model.run_with_statistics(tokens, request)
    total = statistics["match_mass"]["earlier"] + statistics["offset_mass"][..., 0]
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="give labels for others"):
        pair.model.run_with_statistics(tokens, StatisticsRequest(match=("earlier",)))


def test_a_hook_without_parameters_says_what_it_needs(pair, tokens):
    with pytest.raises(ValueError, match="classes"):
        pair.model.run_with_cache(tokens, names_filter="blocks.0.attn.hook_class_mass")


def test_ranks_restart_at_documents_and_skip_pads():
    real = torch.tensor([[False, True, True, False, True, True, True]])
    documents = torch.tensor([[7, 7, 7, 3, 3, 3, 7]])
    assert rank_in_document(real, None)[real].tolist() == [0, 1, 2, 3, 4]
    assert rank_in_document(real, documents)[real].tolist() == [0, 1, 0, 1, 0]


def test_a_run_inside_a_hook_leaves_the_statistics_alone(pair, tokens):
    model = pair.model
    _, expected = model.run_with_statistics(tokens)
    inner = []

    def look_elsewhere(x, hook):
        if len(inner) < 2:  # the runs inside meet this hook as well
            inner.append(None)
            inner.append(model(tokens))
            inner.append(model.run_with_statistics(tokens[:1, :5])[1]["entropy"])

    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_post", look_elsewhere)]):
        _, statistics = model.run_with_statistics(tokens)
    assert torch.equal(statistics["entropy"], expected["entropy"])
    assert inner[-1].shape[1:] == (1, model.cfg.n_heads, 5)


def test_threads_on_one_model_keep_their_statistics_apart(pair, tokens):
    inputs = [tokens, tokens[:1, :7]]
    expected = [pair.model.run_with_statistics(given)[1]["entropy"] for given in inputs]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: pair.model.run_with_statistics(inputs[i % 2])[1]["entropy"], range(20)))
    assert all(torch.equal(entropy, expected[i % 2]) for i, entropy in enumerate(found))


@pytest.mark.parametrize("layers", [{"stop_at_layer": 0}, {"stop_at_layer": -3}])
def test_statistics_of_no_layer_are_refused(pair, tokens, layers):
    with pytest.raises(ValueError, match="a layer with softmax attention that runs"):
        pair.model.run_with_statistics(tokens, **layers)


@pytest.mark.parametrize("request_", ["entropy", True, {"entropy": True}])
def test_a_request_of_another_kind_is_refused(pair, tokens, request_):
    with pytest.raises(ValueError, match="must be a StatisticsRequest"):
        pair.model.run_with_statistics(tokens, request_)


def test_padded_texts_say_which_rows_count(pair, tokens):
    """Means over all rows would take the zeros of pads for measurements."""
    real = torch.arange(150) < torch.tensor([150, 90, 20])[:, None]
    _, padded = pair.model.run_with_statistics(tokens, StatisticsRequest(entropy=True), attention_mask=real)
    assert torch.equal(padded.real, real)
    _, alone = pair.model.run_with_statistics(tokens[2:, :20], StatisticsRequest(entropy=True))
    assert alone.real is None
    mean = padded["entropy"][:, 2, :, padded.real[2]].mean(dim=-1)
    torch.testing.assert_close(mean, alone["entropy"][:, 0].mean(dim=-1))
