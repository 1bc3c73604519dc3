"""Minimum cuts of flow networks. Pure: numbers in, masks out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_unitscale.remat.problem import Floats, Ints, Mask

try:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    HAS_SCIPY = True
except ImportError:  # pragma: no cover - scipy is a dependency, but may be broken on a platform
    HAS_SCIPY = False

# scipy's maximum_flow computes in 32-bit integers and wraps silently: all finite capacities
# together stay below this, and an infinite one is one more than all of them.
_FINITE_SUM = 2**29


class FlowNetwork:
    """Nodes and edges, to be cut again and again at different capacities.

    Args:
        num_nodes: Number of nodes; edges join nodes ``0 .. num_nodes - 1``.
        tails: Start of every edge; no edge is given twice.
        heads: End of every edge.
        source: Node on the source side.
        sink: Node on the sink side.
        use_scipy: Whether scipy's flow is used, else networkx's.
    """

    def __init__(
        self,
        num_nodes: int,
        tails: Ints,
        heads: Ints,
        source: int,
        sink: int,
        *,
        use_scipy: bool = HAS_SCIPY,
    ) -> None:
        # By tail, then head: the order of scipy's rows.
        self._order = np.lexsort((heads, tails))
        self._tails, self._heads = tails[self._order], heads[self._order]
        self._starts = np.searchsorted(self._tails, np.arange(num_nodes + 1))
        self._num_nodes, self._source, self._sink = num_nodes, source, sink
        self._residual = self._residual_by_scipy if use_scipy else self._residual_by_networkx
        # Infinite edges that are known to leave a way to cut.
        self._uncut: Mask | None = None

    def source_side(self, capacities: Floats) -> Mask:
        """The larger source side of a minimum cut: the cut lies as near to the sink as it can.

        Args:
            capacities: Non-negative capacity of every edge, ``inf`` where it must not be cut.

        Returns:
            A mask of the nodes on the source side.

        Raises:
            ValueError: If no cut of finite capacity exists.

        References:
            Ford, Fulkerson (1956): every maximum flow gives the cut nearest to the sink as the
            nodes that cannot reach it in the residual graph.
        """
        capacities = capacities[self._order]
        infinite = np.isinf(capacities)
        self._check_finite(infinite)
        finite = capacities[~infinite]
        total = float(finite.sum())
        scale = (_FINITE_SUM - len(capacities) - 2) / total if total > 0 else 1.0
        scaled = np.zeros(len(capacities), dtype=np.int64)
        # A positive capacity stays positive, or cutting there would be free.
        scaled[~infinite] = np.where(finite > 0, np.maximum(np.floor(finite * scale), 1), 0)
        scaled[infinite] = int(scaled.sum()) + 1
        starts, into = self._residual(scaled)
        # Backwards from the sink along edges with capacity left.
        return ~_reached(starts, into, self._sink)

    def _check_finite(self, infinite: Mask) -> None:
        if self._uncut is not None and np.array_equal(infinite, self._uncut):
            return
        before = np.concatenate([[0], np.cumsum(infinite)])
        if _reached(before[self._starts], self._heads[infinite], self._source)[self._sink]:
            raise ValueError("capacities: no finite cut separates the source from the sink")
        self._uncut = infinite

    def _residual_by_scipy(self, capacities: Ints) -> tuple[Ints, Ints]:
        """Where edges with capacity left into each node start, and the nodes they come from."""
        graph = csr_matrix(
            (capacities.astype(np.int32), self._heads, self._starts),
            shape=(self._num_nodes, self._num_nodes),
        )
        # The difference holds no zeros.
        residual = (graph - maximum_flow(graph, self._source, self._sink).flow).tocsc()
        return residual.indptr, residual.indices

    def _residual_by_networkx(self, capacities: Ints) -> tuple[Ints, Ints]:
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(range(self._num_nodes))
        edges = zip(self._tails.tolist(), self._heads.tolist(), capacities.tolist(), strict=True)
        for tail, head, capacity in edges:
            graph.add_edge(tail, head, capacity=capacity)
        flow = nx.algorithms.flow.boykov_kolmogorov(graph, self._source, self._sink)
        pairs = [
            (head, tail)
            for tail, head, data in flow.edges(data=True)
            if data["capacity"] - data["flow"] > 0
        ]
        into, tails = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2).T
        return np.searchsorted(into, np.arange(self._num_nodes + 1)), tails


def source_side(
    num_nodes: int,
    tails: Ints,
    heads: Ints,
    capacities: Floats,
    source: int,
    sink: int,
    *,
    use_scipy: bool = HAS_SCIPY,
) -> Mask:
    """:meth:`FlowNetwork.source_side` of a network that is cut once."""
    network = FlowNetwork(num_nodes, tails, heads, source, sink, use_scipy=use_scipy)
    return network.source_side(capacities)


def _reached(starts: Ints, heads: Ints, start: int) -> Mask:
    """Nodes that edges lead to from ``start``; those of node i end at ``heads[starts[i]:...]``."""
    num_nodes = len(starts) - 1
    reached = np.zeros(num_nodes, dtype=np.bool_)
    if HAS_SCIPY:
        ones = np.ones(len(heads))
        graph = csr_matrix((ones, heads, starts), shape=(num_nodes, num_nodes))
        reached[breadth_first_order(graph, start, return_predecessors=False)] = True
        return reached
    following: Sequence[int] = heads.tolist()
    first: Sequence[int] = starts.tolist()
    pending = [start]
    reached[start] = True
    while pending:
        node = pending.pop()
        for head in following[first[node] : first[node + 1]]:
            if not reached[head]:
                reached[head] = True
                pending.append(head)
    return reached
