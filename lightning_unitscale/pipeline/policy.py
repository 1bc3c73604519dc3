"""Where to cut so that every device has as much to do: costs from the profiler, then a search."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from lightning_unitscale.functional.func_transforms import leaving_transforms
from lightning_unitscale.graph.capture import is_checkpoint, is_higher_order
from lightning_unitscale.graph.nodes import op_name
from lightning_unitscale.pipeline.cuts import keep_items_with_their_tuples, legal_cuts
from lightning_unitscale.pipeline.flow import find_gradients
from lightning_unitscale.pipeline.marks import insert_mark
from lightning_unitscale.pipeline.program import TensorInfo
from lightning_unitscale.pipeline.rank_search import balance_ranks
from lightning_unitscale.pipeline.recompute import Recomputable
from lightning_unitscale.pipeline.search import Cut, thinned
from lightning_unitscale.profiler import GraphProfile, MetaInfoProp, NodeCosts
from lightning_unitscale.remat.costs import CostModel, default_cost_model

# In ``meta`` of a graph module: the position of the loss among what it returns, if one is known.
LOSS = "loss"

# So many cuts are compared at most: the search holds a number for each two of them.
_MOST_CUTS = 1000


def balanced_split(
    num_stages: int,
    *,
    bytes_per_second: float | None = None,
    rank_of: Callable[[int], int] | None = None,
    num_microbatches: int | None = None,
) -> BalancedSplit:
    """A split policy that gives every device as much to do, by the profiler's costs.

    What is sent counts as well: of all cuts those are taken for which a step is shortest.

    Args:
        num_stages: How many stages, 1 for none but the whole.
        bytes_per_second: Rate at which a boundary's tensors are sent; by default 2e9 between
            processes on CPUs and 2e10 between GPUs.
        rank_of: The rank of a stage, if one has several: their sums are balanced then.
        num_microbatches: Microbatches of a step: with few of them it counts more what is sent in
            all. By default twice the stages.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> balanced_split(4).num_stages
        4
    """
    return BalancedSplit(num_stages, bytes_per_second, rank_of, num_microbatches)


@dataclass(frozen=True)
class BalancedSplit:
    """The policy of :func:`balanced_split`: call it with a captured graph."""

    num_stages: int
    bytes_per_second: float | None = None
    rank_of: Callable[[int], int] | None = None
    num_microbatches: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_stages, int) or self.num_stages < 1:
            raise ValueError(
                f"num_stages={self.num_stages!r}: expected a whole number of at least 1."
            )
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ValueError(
                f"bytes_per_second={self.bytes_per_second!r}: expected a rate above 0."
            )
        if self.num_microbatches is not None and not self.num_microbatches >= 1:
            raise ValueError(
                f"num_microbatches={self.num_microbatches!r}: expected a whole number of at least "
                "1."
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
        fewer = thinned(cuts, total, _MOST_CUTS)
        cuts = fewer if len(fewer) >= self.num_stages - 1 else cuts
        chosen = balance_ranks(
            cuts,
            total,
            self.num_stages,
            self.bytes_per_second or sending_rate(device_type_of(graph_module)),
            self.rank_of or (lambda stage: stage),
            self.num_microbatches or 2 * self.num_stages,
        )
        for place in chosen:
            insert_mark(graph, nodes[cuts[place].before])
        graph_module.recompile()
        return graph_module


def note_costs(graph_module: fx.GraphModule) -> GraphProfile:
    """Profile a graph, backward from its loss, and note the costs in its nodes.

    Raises:
        RuntimeError: If an operation does not run on tensors without data.
    """
    graph, loss = graph_module.graph, graph_module.meta.get(LOSS)
    inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    device = device_type_of(graph_module)
    profiled = MetaInfoProp(graph_module, device="cuda" if device == "cuda" else "cpu")
    try:
        with leaving_transforms():
            return profiled.run(*inputs, loss=None if loss is None else operator.itemgetter(loss))
    except (RuntimeError, NotImplementedError) as error:
        branches = [one for one in graph.nodes if is_higher_order(one) and not is_checkpoint(one)]
        reason = str(error).strip().partition("\n")[0]
        reason = f"it calls {op_name(branches[0])}" if branches else reason
        raise RuntimeError(
            f"the costs by which a graph is cut cannot be found ({reason}); expected operations "
            "that run on tensors without data, which transforms of torch.func and torch.cond, scan "
            "and while_loop may not; say where to cut with split_spec={path: "
            "SplitPoint.BEGINNING} or pipe_split()."
        ) from error


def possible_cuts(graph_module: fx.GraphModule) -> tuple[list[Cut], float]:
    """All places where a cut is possible, and the seconds of the whole graph."""
    graph = graph_module.graph
    profile = note_costs(graph_module)
    model = default_cost_model(device_type_of(graph_module))
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


def device_type_of(module: nn.Module) -> str:
    """Where a module's parameters are."""
    return next((one.device.type for one in module.parameters()), "cpu")


def sending_rate(device_type: str) -> float:
    """Bytes per second from one rank to the next: gloo on one machine, or a link of 200 Gb/s."""
    return 2e9 if device_type == "cpu" else 2e10


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
    """Bytes that a cut in front of each node would hand on, and back as gradients."""
    graph, loss = graph_module.graph, graph_module.meta.get(LOSS)
    returned: Any = graph.output_node().args[0]
    gradients = find_gradients(graph_module, None if loss is None else returned[loss]).of_loss
    order = {node: place for place, node in enumerate(graph.nodes)}
    recomputable = Recomputable(graph_module)
    changes = [0] * (len(order) + 1)
    for node, place in order.items():
        example = node.meta.get("example_value")
        if node.op in {"placeholder", "get_attr", "output"} or not isinstance(example, Tensor):
            continue
        if not node.users or recomputable(node):
            continue
        has_gradient = example.is_floating_point() or example.is_complex()
        directions = 2 if has_gradient and node in gradients else 1
        size = directions * TensorInfo.of(example).num_bytes
        changes[place + 1] += size
        changes[max(order[user] for user in node.users) + 1] -= size
    totals = itertools.accumulate(changes)
    return dict(zip(order, totals, strict=False))
