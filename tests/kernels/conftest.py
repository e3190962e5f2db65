"""The definitions once more, as loops over single pairs in float64, and sets of cases that cover pairs of options."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.kernels import AttentionMask, MatchLabels, StatisticsRequest

Case = dict[str, Any]


def covering_cases(options: dict[str, list[Any]], seed: int = 0) -> list[Case]:
    """Cases in which every pair of values of two options occurs, chosen greedily from random ones."""
    names, draw = list(options), random.Random(seed)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    cases = []
    while pairs:
        first = min(pairs)
        candidates = []
        for _ in range(30):
            chosen = {name: draw.randrange(len(options[name])) for name in names}
            chosen[first[0]], chosen[first[2]] = first[1], first[3]
            covered = {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}
            candidates.append((len(covered & pairs), chosen, covered))
        _, chosen, covered = max(candidates, key=lambda candidate: candidate[0])
        pairs -= covered
        cases.append({name: options[name][chosen[name]] for name in names})
    return cases


def make_inputs(case: Case, seed: int = 0) -> tuple[dict[str, Any], StatisticsRequest]:
    """Arguments of ``attention`` in float64, and a request for everything, for a case (see MASKS and OPTIONS)."""
    draw = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads = case["heads"]
    n_queries, n_keys = case["sizes"]
    d_head = 5

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def real(length: int) -> Tensor:
        return torch.rand(batch, length, generator=draw) < 0.7

    documents = torch.rand(batch, n_keys, generator=draw).lt(0.2).long().cumsum(1) % 3  # ids return: runs count
    mask = AttentionMask(
        causal=case["causal"],
        window=case["window"],
        n_global=case["n_global"],
        key_padding=real(n_keys) if case["key_padding"] else None,
        query_padding=real(n_queries) if case["query_padding"] else None,
        documents=documents if case["documents"] and n_queries <= n_keys else None,
        query_offset=case["query_offset"],
    )
    arguments = {
        "q": 2 * normal(batch, heads, n_queries, d_head),
        "k": normal(batch, kv_heads, n_keys, d_head),
        "v": normal(batch, kv_heads, n_keys, d_head),
        "mask": mask,
        "scale": case["scale"],
        "softcap": case["softcap"],
        "alibi_slopes": normal(heads).abs() if case["alibi"] else None,
        "offset_bias": normal(heads, max(0, n_queries + n_keys - 1)) if case["offset_bias"] else None,
        "sink_logits": normal(heads) if case["sink_logits"] else None,
    }

    def labels(length: int) -> Tensor:
        return torch.randint(-1, case["n_labels"], (batch, length), generator=draw)

    weights = {"none": None, "query": (batch, n_queries), "head": (batch, heads, n_queries)}[case["weights"]]
    request = StatisticsRequest(
        entropy=True,
        max_weight=True,
        mean_distance=True,
        sink_keys=2 if case["sinks"] == "count" else torch.randint(-1, n_keys, (batch, 4), generator=draw),
        offsets=(0, 1, 3, -1),
        match={name: MatchLabels(query=labels(n_queries), key=labels(n_keys)) for name in ("one", "other")},
        classes=labels(n_keys).clamp(max=15),
        received=True,
        query_weights=None if weights is None else torch.rand(weights, generator=draw, dtype=torch.float64),
        pooled=case["pooled"],
        top_keys=min(case["top_keys"], n_keys),
    )
    return arguments, request


OPTIONS: dict[str, list[Any]] = {
    "heads": [(1, 1, 1), (2, 4, 4), (1, 6, 2), (2, 3, 1)],  # batch, heads, key/value heads
    "causal": [True, False],
    "window": [None, 1, 3, 40],
    "n_global": [0, 2],
    "key_padding": [False, True],
    "query_padding": [False, True],
    "documents": [False, True],
    "query_offset": [None, 0, 2, -2],
    "scale": [None, 0.4, -1.0],
    "softcap": [None, 1.5],
    "alibi": [False, True],
    "offset_bias": [False, True],
    "sink_logits": [False, True],
    "sinks": ["count", "positions"],
    "n_labels": [1, 3, 12],
    "weights": ["none", "query", "head"],
    "top_keys": [1, 3],
}


def naive_pattern(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pattern, lse, virtual mass and visibility, pair by pair from the definitions."""
    q, k, mask = arguments["q"], arguments["k"], arguments["mask"]
    (batch, heads, n_queries, _), (_, kv_heads, n_keys, _) = q.shape, k.shape
    pattern = torch.zeros(batch, heads, n_queries, n_keys, dtype=torch.float64)
    visible = torch.zeros(batch, n_queries, n_keys, dtype=torch.bool)
    lse = torch.full((batch, heads, n_queries), -math.inf, dtype=torch.float64)
    virtual = torch.zeros_like(lse)
    for b, r, j in itertools.product(range(batch), range(n_queries), range(n_keys)):
        visible[b, r, j] = is_visible(mask, b, r, j, n_queries, n_keys)
    for b, h, r in itertools.product(range(batch), range(heads), range(n_queries)):
        scores = {
            j: naive_score(arguments, b, h, r, j, k[b, h // (heads // kv_heads), j])
            for j in range(n_keys)
            if visible[b, r, j]
        }
        sink = arguments["sink_logits"]
        terms = [*scores.values()] + ([] if sink is None else [float(sink[h])])
        if not terms:
            continue
        largest = max(terms)
        lse[b, h, r] = largest + math.log(sum(math.exp(term - largest) for term in terms))
        for j, score in scores.items():
            pattern[b, h, r, j] = math.exp(score - lse[b, h, r])
        if sink is not None:
            virtual[b, h, r] = math.exp(sink[h] - lse[b, h, r])
    return pattern, lse, virtual, visible


def is_visible(mask: AttentionMask, b: int, r: int, j: int, n_queries: int, n_keys: int) -> bool:
    """The mask's definition for one pair."""
    offset = n_keys - n_queries if mask.query_offset is None else mask.query_offset
    i = r + offset
    if mask.query_padding is not None and not mask.query_padding[b, r]:
        return False
    if mask.key_padding is not None and not mask.key_padding[b, j]:
        return False
    if mask.causal and j > i:
        return False
    if mask.window is not None and abs(i - j) >= mask.window and j >= mask.n_global:
        return False
    if mask.documents is not None:
        low, high = sorted((j, n_keys - n_queries + r))
        return len(set(mask.documents[b, low : high + 1].tolist())) == 1
    return True


def naive_score(arguments: dict[str, Any], b: int, h: int, r: int, j: int, key: Tensor) -> float:
    """The score's definition for one pair."""
    q, mask, n_keys = arguments["q"], arguments["mask"], arguments["k"].shape[2]
    offset = n_keys - q.shape[2] if mask.query_offset is None else mask.query_offset
    scale = arguments["scale"] if arguments["scale"] is not None else 1 / math.sqrt(q.shape[3])
    score = scale * sum(float(x) * float(y) for x, y in zip(q[b, h, r], key, strict=True))
    if arguments["softcap"] is not None:
        score = arguments["softcap"] * math.tanh(score / arguments["softcap"])
    if arguments["alibi_slopes"] is not None:
        score -= float(arguments["alibi_slopes"][h]) * abs(r + offset - j)
    if arguments["offset_bias"] is not None:
        score += float(arguments["offset_bias"][h, r - j + n_keys - 1])
    return score


def naive_statistics(arguments: dict[str, Any], request: StatisticsRequest) -> dict[str, Tensor]:
    """Every statistic, pair by pair from the definitions."""
    mask = arguments["mask"]
    pattern, lse, virtual, visible = naive_pattern(arguments)
    batch, heads, n_queries, n_keys = pattern.shape
    offset = n_keys - n_queries if mask.query_offset is None else mask.query_offset
    rows, classes = (batch, heads, n_queries), int(request.classes.max()) + 1

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    per_row = ("entropy", "max_weight", "mean_distance", "sink_mass", "match_mass one", "match_mass other")
    found = {name: zeros(*rows) for name in per_row}
    found |= {"lse": lse, "argmax_key": torch.full(rows, -1)}
    if arguments["sink_logits"] is not None:
        found["virtual_mass"] = virtual
    found["offset_mass"], found["class_mass"] = zeros(*rows, len(request.offsets)), zeros(*rows, classes)
    found["top_weights"] = zeros(*rows, request.top_keys)
    found["top_keys"] = torch.full((*rows, request.top_keys), -1)
    received, seeing, even = (zeros(batch, heads, n_keys) for _ in range(3))
    height, width = request.pooled
    blocks = (batch, heads, -(-n_queries // height), -(-n_keys // width))
    found["pooled_max"], found["pooled_sum"] = zeros(*blocks), zeros(*blocks)
    for b, h, r in itertools.product(*map(range, rows)):
        if virtual[b, h, r] > 0:
            found["entropy"][b, h, r] -= virtual[b, h, r] * virtual[b, h, r].log()
        weight_of_query = 1.0
        if request.query_weights is not None:
            per_head = request.query_weights.ndim == 3
            weight_of_query = float(request.query_weights[(b, h, r) if per_head else (b, r)])
        counted = isinstance(request.sink_keys, int)
        sinks = set(range(request.sink_keys) if counted else request.sink_keys[b].tolist())
        order = sorted((j for j in range(n_keys) if visible[b, r, j]), key=lambda j: (-pattern[b, h, r, j], j))
        for rank, j in enumerate(order[: request.top_keys]):
            found["top_weights"][b, h, r, rank], found["top_keys"][b, h, r, rank] = pattern[b, h, r, j], j
        if order:
            found["max_weight"][b, h, r], found["argmax_key"][b, h, r] = pattern[b, h, r, order[0]], order[0]
        for j in order:
            p, i = float(pattern[b, h, r, j]), r + offset
            found["entropy"][b, h, r] -= p * math.log(p)
            found["mean_distance"][b, h, r] += p * (i - j if mask.causal else abs(i - j))
            found["sink_mass"][b, h, r] += p * (j in sinks)
            for o, back in enumerate(request.offsets):
                found["offset_mass"][b, h, r, o] += p * (i - back == j)
            for name, labels in request.match.items():
                hit = labels.query[b, r] == labels.key[b, j] != -1 and j < i
                found[f"match_mass {name}"][b, h, r] += p * bool(hit)
            if request.classes[b, j] >= 0:
                found["class_mass"][b, h, r, request.classes[b, j]] += p
            received[b, h, j] += weight_of_query * p
            seeing[b, h, j] += 1
            even[b, h, j] += weight_of_query / len(order)
            at = (b, h, r // height, j // width)
            found["pooled_max"][at] = max(float(found["pooled_max"][at]), p)
            found["pooled_sum"][at] += p
    unseen = seeing == 0
    found["received"] = received
    found["received_mean"] = (received / seeing).masked_fill(unseen, math.nan)
    found["received_lift"] = (received / even).masked_fill(unseen, math.nan)
    return found


def flatten(statistics: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a result, those of ``match_mass`` under names of their own."""
    for name, value in statistics.items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            yield from ((f"{name} {label}", tensor) for label, tensor in value.items())


SMALL = {"sizes": [(1, 1), (7, 7), (3, 9), (9, 4), (1, 6)], "pooled": [(1, 1), (2, 3), (5, 4), (20, 20)]}
LARGE = {
    "sizes": [(70, 70), (33, 90), (90, 33), (1, 100)],
    "pooled": [(1, 1), (16, 16), (5, 70), (70, 7), (13, 100)],
}
WINDOWED = {  # several blocks of rows, most of which see a window's keys in one tile
    "heads": [(1, 6, 2), (2, 9, 3)],
    "sizes": [(203, 203), (130, 220), (220, 130)],
    "window": [24, 150],
    "query_offset": [None, 11],
    "n_labels": [3, 60],
    "pooled": [(8, 8), (7, 33)],
}

INTERPRETED = {  # a tile takes the interpreter about 10 ms
    "heads": [(1, 1, 1), (1, 4, 2), (2, 2, 1)],
    "sizes": [(40, 40), (20, 45), (45, 20), (1, 50)],
    "pooled": [(16, 16), (5, 40), (40, 7), (13, 100)],
    "n_labels": [3, 12],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The fixtures ``…_case`` run through cases that cover every pair of values of two options."""
    kinds = {"small": SMALL, "large": LARGE, "windowed": WINDOWED, "interpreted": INTERPRETED}
    for kind, options in kinds.items():
        if (name := f"{kind}_case") in metafunc.fixturenames:
            cases = covering_cases(OPTIONS | options)
            metafunc.parametrize(name, cases, ids=range(len(cases)))


@pytest.fixture(scope="session")
def oracle() -> SimpleNamespace:
    """What the tests compare with."""
    return SimpleNamespace(
        make_inputs=make_inputs,
        pattern=naive_pattern,
        statistics=naive_statistics,
        is_visible=is_visible,
        flatten=flatten,
    )
