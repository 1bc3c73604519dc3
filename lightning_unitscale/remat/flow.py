"""Minimum cuts of flow networks. Pure: numbers in, masks out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_unitscale.remat.problem import Floats, Ints, Mask

try:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    HAS_SCIPY = True
except ImportError:  # pragma: no cover - scipy is a dependency, but may be broken on a platform
    HAS_SCIPY = False

Ints32 = npt.NDArray[np.int32]
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
        self._num_nodes, self._source, self._sink = num_nodes, source, sink
        # Every edge and its reverse, by tail, then head: the rows of scipy's flow.
        forth, back = tails * num_nodes + heads, heads * num_nodes + tails
        codes = np.unique(np.concatenate([forth, back]))
        self._tails, self._heads = codes // num_nodes, codes % num_nodes
        self._starts = np.searchsorted(self._tails, np.arange(num_nodes + 1))
        self._place = np.searchsorted(codes, forth)
        self._reverse = np.searchsorted(codes, self._heads * num_nodes + self._tails)
        self._flow = self._flow_by_scipy if use_scipy else self._flow_by_networkx
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
        infinite = np.isinf(capacities)
        self._check_finite(infinite)
        finite = capacities[~infinite]
        total = float(finite.sum())
        scale = (_FINITE_SUM - len(capacities) - 2) / total if total > 0 else 1.0
        scaled = np.zeros(len(capacities), dtype=np.int64)
        # A positive capacity stays positive, or cutting there would be free.
        scaled[~infinite] = np.where(finite > 0, np.maximum(np.floor(finite * scale), 1), 0)
        scaled[infinite] = int(scaled.sum()) + 1
        limits = np.zeros(len(self._heads), dtype=np.int32)
        limits[self._place] = scaled
        # Backwards from the sink along edges with capacity left.
        is_left = (limits - self._flow(limits) > 0)[self._reverse]
        return ~self._reached(is_left, self._sink)

    def _check_finite(self, infinite: Mask) -> None:
        if self._uncut is not None and np.array_equal(infinite, self._uncut):
            return
        uncut = np.zeros(len(self._heads), dtype=np.bool_)
        uncut[self._place[infinite]] = True
        if self._reached(uncut, self._source)[self._sink]:
            raise ValueError("capacities: no finite cut separates the source from the sink")
        self._uncut = infinite

    def _flow_by_scipy(self, limits: Ints32) -> Ints32:
        shape = (self._num_nodes, self._num_nodes)
        graph = csr_matrix((limits, self._heads, self._starts), shape=shape)
        flow = maximum_flow(graph, self._source, self._sink).flow
        if len(flow.data) == len(limits):  # every edge has its reverse: nothing was added
            return np.asarray(flow.data)
        return np.asarray(flow[self._tails, self._heads]).ravel()  # pragma: no cover

    def _flow_by_networkx(self, limits: Ints32) -> Ints32:
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(range(self._num_nodes))
        edges = list(zip(self._tails.tolist(), self._heads.tolist(), strict=True))
        for (tail, head), capacity in zip(edges, limits.tolist(), strict=True):
            if capacity:
                graph.add_edge(tail, head, capacity=capacity)
        found = nx.algorithms.flow.boykov_kolmogorov(graph, self._source, self._sink)
        flows = [found.edges[edge]["flow"] if found.has_edge(*edge) else 0 for edge in edges]
        return np.array(flows, dtype=np.int32)

    def _reached(self, is_open: Mask, start: int) -> Mask:
        """Nodes that open edges lead to from ``start``."""
        reached = np.zeros(self._num_nodes, dtype=np.bool_)
        starts = np.concatenate([[0], np.cumsum(is_open)])[self._starts]
        heads = self._heads[is_open]
        if HAS_SCIPY:
            shape = (self._num_nodes, self._num_nodes)
            graph = csr_matrix((np.ones(len(heads)), heads, starts), shape=shape)
            reached[breadth_first_order(graph, start, return_predecessors=False)] = True
            return reached
        following, first = heads.tolist(), starts.tolist()
        pending = [start]
        reached[start] = True
        while pending:
            node = pending.pop()
            for head in following[first[node] : first[node + 1]]:
                if not reached[head]:
                    reached[head] = True
                    pending.append(head)
        return reached


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
