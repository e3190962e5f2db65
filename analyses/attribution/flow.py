"""Attention flow (Abnar and Zuidema 2020, section 3): how much could run from a query down to each token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse

UNIT = 2**30  # flows are found in whole numbers of 32 bits; a capacity of 1 is so many
MAX_EDGES = 2**18  # between all layers, such as 30 layers of 131 tokens: some seconds a prompt


def n_edges(n_layers: int, n_tokens: int) -> int:
    """Edges of the graph of a causal model."""
    return n_layers * n_tokens * (n_tokens + 1) // 2


def attention_flow(mixed: Sequence[np.ndarray], query: int, keys: Sequence[int]) -> np.ndarray:
    """The maximum flow from a query above the last layer to each key below the first, one key at a time.

    Nodes are positions between layers; ``mixed[l][i, j]``, an entry of ½ Ā + ½ I, is the capacity of the edge from
    position i above layer l to position j below it. Capacities are rounded to multiples of 2⁻³⁰, so a flow errs by no
    more than half of that for every edge of a minimum cut: 5e-8 for the 100 edges of one, at the very most 1.3e-4.

    Args:
        mixed: of each layer [query, key], the first layer first; rows sum to 1 at most.

    Returns:
        [key], from 0 to 1.
    """
    n = len(mixed[0])
    above, below, capacity = [], [], []
    for layer, of_layer in enumerate(mixed):
        whole = np.rint(of_layer * UNIT).astype(np.int32)
        i, j = whole.nonzero()
        above.append((layer + 1) * n + i)
        below.append(layer * n + j)
        capacity.append(whole[i, j])
    size = (len(mixed) + 1) * n
    edges = (np.concatenate(above), np.concatenate(below))
    graph = scipy.sparse.csr_array((np.concatenate(capacity), edges), shape=(size, size))
    top = len(mixed) * n + query
    flows = [scipy.sparse.csgraph.maximum_flow(graph, top, key).flow_value for key in keys]
    return np.array(flows, dtype=float) / UNIT
