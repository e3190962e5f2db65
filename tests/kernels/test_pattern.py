"""Rectangles of the pattern are parts of the whole one."""

import torch

from workbench.kernels import attention_pattern, attention_scores, attention_weights


def test_rectangles_of_any_rows_and_columns(large_case, oracle):
    arguments, _ = oracle.make_inputs(large_case)
    arguments.pop("v")
    sink_logits = arguments.pop("sink_logits")
    q, k = arguments.pop("q"), arguments.pop("k")
    whole, _, _ = attention_weights(attention_scores(q, k, **arguments), sink_logits)
    n_queries, n_keys = whole.shape[2:]
    rows, columns = torch.tensor([0, n_queries - 1, -1, 0]), torch.randint(-n_keys, n_keys, (9,))
    for row, column in ((rows, columns), (slice(1, None, 2), columns), (rows, slice(None)), (slice(0, 0), slice(2, 8))):
        found = attention_pattern(q, k, rows=row, cols=column, sink_logits=sink_logits, **arguments)
        torch.testing.assert_close(found, whole[:, :, row][..., column])
