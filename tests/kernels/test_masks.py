"""The mask's intervals, counts and spans against its definition, pair by pair."""

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.kernels import AttentionMask
from workbench.kernels.checks import check_scores
from workbench.kernels.masks import KeyGrid
from workbench.kernels.triton_plan import Plan, edges


@st.composite
def masks(draw):
    """A mask and sizes: batch 2, up to 12 queries and 14 keys."""
    n_queries, n_keys = draw(st.integers(1, 12)), draw(st.integers(1, 14))

    def flags(length):
        row = st.lists(st.booleans(), min_size=length, max_size=length)
        return torch.tensor([draw(row), draw(row)])

    documents = None
    if n_queries <= n_keys and draw(st.booleans()):
        documents = flags(n_keys).long()
    return (
        AttentionMask(
            causal=draw(st.booleans()),
            window=draw(st.none() | st.integers(1, 16)),
            n_global=draw(st.integers(0, 4)),
            key_padding=flags(n_keys) if draw(st.booleans()) else None,
            query_padding=flags(n_queries) if draw(st.booleans()) else None,
            documents=documents,
            query_offset=draw(st.none() | st.integers(-5, 20)),
        ),
        n_queries,
        n_keys,
    )


def defined(oracle, mask, n_queries, n_keys):
    visible = torch.zeros(2, n_queries, n_keys, dtype=torch.bool)
    for b, r, j in itertools.product(range(2), range(n_queries), range(n_keys)):
        visible[b, r, j] = oracle.is_visible(mask, b, r, j, n_queries, n_keys)
    return visible


def everywhere(bound):
    row, column = torch.arange(bound.n_queries)[:, None], torch.arange(bound.n_keys)
    return bound.visible(torch.arange(2)[:, None, None], row, column)


@settings(max_examples=60, deadline=None)
@given(masks())
def test_visibility_and_counts_follow_the_definition(oracle, drawn):
    mask, n_queries, n_keys = drawn
    visible, bound = defined(oracle, mask, n_queries, n_keys), mask.bind(2, n_queries, n_keys)
    assert torch.equal(everywhere(bound), visible)
    assert torch.equal(bound.keys_per_query(), visible.sum(2))
    weights = torch.rand(2, 3, n_queries, dtype=torch.float64)
    expected = torch.einsum("bhr,brj->bhj", weights, visible.double())
    torch.testing.assert_close(bound.sum_over_queries(weights), expected)


@settings(max_examples=60, deadline=None)
@given(masks(), st.integers(1, 12), st.integers(1, 6), st.sampled_from([1, 5, 9]), st.integers(1, 3))
def test_spans_hold_every_visible_pair_once(drawn, row_block, size, period, blocks_wide):
    mask, n_queries, n_keys = drawn
    bound = mask.bind(2, n_queries, n_keys)
    visible, grid, width = everywhere(bound), KeyGrid(n_keys, size, max(size, period)), size * blocks_wide
    for sequence, start in itertools.product(range(2), range(0, n_queries, row_block)):
        rows, seen = slice(start, start + row_block), torch.zeros(n_keys, dtype=torch.bool)
        for span in bound.spans(sequence, rows, grid, width):
            tile = visible[sequence, rows, span.start : span.stop]
            assert 0 < len(span) <= width and not seen[span.start : span.stop].any()
            hidden = torch.zeros(len(span), dtype=torch.bool)
            for first, end in span.masked:
                assert span.start <= first < end <= span.stop
                hidden[first - span.start : end - span.start] = True
            assert tile[:, ~hidden].all()
            assert grid.floor(span.start) == span.start and grid.ceil(span.stop) == span.stop
            if grid.period % grid.size:
                assert span.start // grid.period == (span.stop - 1) // grid.period
            seen[span.start : span.stop] = True
        assert not (visible[sequence, rows] & ~seen).any()


@settings(max_examples=100, deadline=None)
@given(masks(), st.sampled_from([(1, 1), (3, 2), (5, 4), (4, 16)]), st.sampled_from([(1, 1), (4, 2), (6, 4)]))
def test_tiles_of_rows_hold_every_row_that_sees_a_tile_of_columns(drawn, row_cut, column_cut):
    """What the passes by columns rely on; for a causal mask or a window they visit no other tile."""
    mask, n_queries, n_keys = drawn
    q, k = torch.zeros(2, 1, n_queries, 1), torch.zeros(2, 1, n_keys, 1)
    plan = Plan.of(q, k, check_scores(q, k, mask, None, None, None, None))
    rows, columns = edges(n_queries, *row_cut, q.device), edges(n_keys, *column_cut, q.device)
    first, end = plan.row_tiles(rows, columns)  # [batch, column tile] each
    visible = everywhere(mask.bind(2, n_queries, n_keys))
    simple = mask.documents is None and mask.query_padding is None and mask.key_padding is None and not mask.n_global
    for b, c, r in itertools.product(range(2), range(columns.shape[1]), range(rows.shape[1])):
        inside = visible[b, rows[0, r] : rows[1, r], columns[0, c] : columns[1, c]]
        visited = first[b, c] <= r < end[b, c]
        assert visited or not inside.any()
        assert inside.any() or not visited or not simple or not inside.numel()


def test_spans_skip_and_unmask_what_they_can():
    """Causal with a window: of 1000 columns, a block of rows reads its window, and the triangles at its ends masked."""
    bound = AttentionMask(window=200, n_global=10).bind(1, 1000, 1000)
    spans = bound.spans(0, slice(600, 640), KeyGrid(1000), 64)
    assert [part for span in spans for part in span.masked] == [(401, 440), (601, 640)]
    assert spans[0].start == 0 and spans[0].stop == 10
    assert sum(map(len, spans)) == 10 + 239


def test_a_grid_of_blocks_in_periods():
    grid = KeyGrid(n_keys=23, size=4, period=10)
    edges = [grid.edges(i) for i in range(grid.index(22) + 1)]
    assert edges == [(0, 4), (4, 8), (8, 10), (10, 14), (14, 18), (18, 20), (20, 23)]
    for column in range(23):
        start, stop = grid.edges(grid.index(column))
        assert start <= column < stop and grid.floor(column) == start


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 0),
        ("n_global", -1),
        ("key_padding", torch.ones(2, 3)),
        ("query_padding", torch.ones(3, dtype=torch.bool)),
        ("documents", torch.zeros(2, 3, dtype=torch.int32)),
        ("documents", [[0, 0, 1]]),
    ],
)
def test_bad_masks_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        AttentionMask(**{field: value})


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (AttentionMask(key_padding=torch.ones(2, 4, dtype=torch.bool)), "key_padding"),
        (AttentionMask(query_padding=torch.ones(1, 3, dtype=torch.bool)), "query_padding"),
        (AttentionMask(documents=torch.zeros(2, 6, dtype=torch.int64)), "documents"),
    ],
)
def test_masks_of_other_sizes_are_refused(mask, name):
    with pytest.raises(ValueError, match=name):
        mask.bind(2, 3, 5)


def test_documents_need_a_key_for_every_query():
    with pytest.raises(ValueError, match="documents"):
        AttentionMask(documents=torch.zeros(1, 2, dtype=torch.int64)).bind(1, 3, 2)


def test_numbers_larger_than_any_position_mean_no_limit():
    """sys.maxsize stands for "no window" in other people's code."""
    for huge in (2**31, sys.maxsize, 2**63, 10**30):
        for causal in (True, False):
            bound = AttentionMask(causal=causal, window=huge, n_global=huge).bind(2, 4, 6)
            assert torch.equal(everywhere(bound), everywhere(AttentionMask(causal=causal).bind(2, 4, 6)))
