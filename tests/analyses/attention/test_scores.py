from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.analyses.attention.scores import earlier_occurrences
from workbench.analyses.running import Sequences


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=3))
def test_earlier_occurrences_are_counted_by_their_definition(rows: list[list[int]]) -> None:
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]).bool()
    found = earlier_occurrences(Sequences(tokens, real))
    for place, row in enumerate(rows):
        for i in range(width):
            inside = i < len(row)
            earlier = [j for j in range(i) if inside and row[j] == row[i]]
            targets = [j for j in range(1, i) if inside and row[j - 1] == row[i]]
            assert found.n_occurrences[place, i] == len(earlier)
            assert found.n_targets[place, i] == len(targets)
            assert found.latest_target[place, i] == max(targets, default=-1)
