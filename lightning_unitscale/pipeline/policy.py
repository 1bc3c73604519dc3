"""Where to cut so that every stage has as much to do: costs from the profiler, the cuts by search.

The search is over positions in the order of the graph. A stage's cost is the estimated seconds of
its operations, forward and backward, and of sending and receiving what crosses its edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from lightning_unitscale.pipeline.cuts import keep_items_with_their_tuples, legal_cuts
from lightning_unitscale.pipeline.marks import insert_mark
from lightning_unitscale.pipeline.program import TensorInfo
from lightning_unitscale.pipeline.recompute import Recomputable
from lightning_unitscale.profiler import MetaInfoProp, NodeCosts
from lightning_unitscale.remat.costs import CostModel, default_cost_model


@dataclass(frozen=True)
class Cut:
    """A possible place of a cut.

    Attributes:
        before: Name of the operation behind it.
        seconds_before: Estimated seconds of all operations in front of it, both directions.
        boundary_bytes: Bytes that cross it, in one direction.
    """

    before: str
    seconds_before: float
    boundary_bytes: int


def balanced_split(num_stages: int, *, bytes_per_second: float = 2e9) -> BalancedSplit:
    """A split policy that gives every stage as much to do, by the profiler's costs.

    Args:
        num_stages: How many stages, 1 for none but the whole.
        bytes_per_second: Rate at which a boundary's tensors are sent.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> balanced_split(4).num_stages
        4
    """
    return BalancedSplit(num_stages, bytes_per_second)


@dataclass(frozen=True)
class BalancedSplit:
    """The policy of :func:`balanced_split`: call it with a captured graph."""

    num_stages: int
    bytes_per_second: float = 2e9

    def __post_init__(self) -> None:
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            raise ValueError(
                f"num_stages={self.num_stages!r}: expected a whole number of at least 1."
            )
        if not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second={self.bytes_per_second!r}: expected a rate above 0."
            )

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Put the cuts into the graph.

        Raises:
            ValueError: If the graph has too few places to cut.
        """
        graph = graph_module.graph
        keep_items_with_their_tuples(graph)
        cuts, total = possible_cuts(graph_module)
        if len(cuts) < self.num_stages - 1:
            raise ValueError(
                f"num_stages={self.num_stages}: the captured graph can be cut at {len(cuts)} "
                f"places; expected at most {len(cuts) + 1} stages."
            )
        nodes = {node.name: node for node in graph.nodes}
        for place in choose_cuts(cuts, total, self.num_stages, self.bytes_per_second):
            insert_mark(graph, nodes[cuts[place].before])
        graph_module.recompile()
        return graph_module


def possible_cuts(graph_module: fx.GraphModule) -> tuple[list[Cut], float]:
    """All places where a cut is possible, and the seconds of the whole graph."""
    graph = graph_module.graph
    inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    device = next((one.device.type for one in graph_module.parameters()), "cpu")
    profile = MetaInfoProp(graph_module, device="cuda" if device == "cuda" else "cpu").run(*inputs)
    model = default_cost_model(device)
    seconds = {one.name: sum(seconds_of(one, model)) for one in profile.nodes}
    crossing = _crossing_bytes(graph_module)
    legal = set(legal_cuts(graph))
    cuts, passed = [], 0.0
    for node in graph.nodes:
        # Behind the input operations something must cross, or the stages have nothing in common.
        if node in legal and crossing[node]:
            cuts.append(Cut(node.name, passed, crossing[node]))
        passed += seconds.get(node.name, 0.0)
    return cuts, passed


def choose_cuts(
    cuts: Sequence[Cut],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    allowed: Callable[[int, int, int], bool] = lambda stage, start, end: True,
) -> list[int]:
    """The cuts, as places in ``cuts``, for which the slowest stage is fastest. Pure.

    Of equally fast ones those with the fewest bytes at all boundaries are taken.

    Args:
        cuts: Possible cuts in the order of the graph.
        total: Seconds of the whole graph.
        num_stages: How many stages.
        bytes_per_second: Rate at which a boundary's tensors are sent.
        allowed: Whether a stage may reach from one end to another; end 0 is the graph's start, end
            ``i`` the cut ``i - 1``, and ``len(cuts) + 1`` the graph's end.

    Raises:
        ValueError: If no choice is allowed.
    """
    ends = [0.0, *(one.seconds_before for one in cuts), total]
    sends = [0.0, *(2 * one.boundary_bytes / bytes_per_second for one in cuts), 0.0]
    last = len(ends) - 1

    def cost(start: int, end: int) -> float:
        return ends[end] - ends[start] + sends[start] + sends[end]

    # best[e]: the least (slowest stage, seconds of sending) over cuts with the last one at e.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(1, num_stages + 1):
        places = [last] if stage == num_stages else range(1, last)
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in places:
            options = [
                (max(slowest, cost(start, end)), sent + sends[end], (*chosen, end))
                for start, (slowest, sent, chosen) in best.items()
                if start < end and allowed(stage - 1, start, end)
            ]
            if options:
                found[end] = min(options)
        best = found
    if last not in best:
        raise ValueError(f"num_stages={num_stages}: none of the {len(cuts)} possible cuts will do.")
    return [place - 1 for place in best[last][2][:-1]]


def seconds_of(costs: NodeCosts, model: CostModel) -> tuple[float, float]:
    """Forward and backward, each bound by what it computes or by what it moves."""
    both = (
        (costs.fwd_flops, costs.fwd_bytes_moved),
        (costs.bwd_flops, costs.bwd_bytes_moved),
    )
    forward, backward = (
        model.seconds("", flops, moved, fusible=False) if flops or moved else 0.0
        for flops, moved in both
    )
    return forward, backward


def _crossing_bytes(graph_module: fx.GraphModule) -> dict[fx.Node, int]:
    """Bytes that a cut in front of each node would hand on."""
    graph = graph_module.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    recomputable = Recomputable(graph_module)
    changes = [0] * (len(order) + 1)
    for node, place in order.items():
        example = node.meta.get("example_value")
        if node.op in {"placeholder", "get_attr", "output"} or not isinstance(example, Tensor):
            continue
        if not node.users or recomputable(node):
            continue
        size = TensorInfo.of(example).num_bytes
        changes[place + 1] += size
        changes[max(order[user] for user in node.users) + 1] -= size
    totals = itertools.accumulate(changes)
    return dict(zip(order, totals, strict=False))
