"""Balance the stages: estimate costs with the profiler, then search for the cuts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx, nn

from lightning_unitscale.arguments import check_callable, check_count, check_positive
from lightning_unitscale.capture.copy_graphs import is_checkpoint, is_higher_order
from lightning_unitscale.capture.graph_nodes import op_name
from lightning_unitscale.functional.scale import leaving_transforms
from lightning_unitscale.memory.costs import CostModel, default_cost_model
from lightning_unitscale.pipeline.cuts import (
    LOSS,
    insert_mark,
    keep_items_with_their_tuples,
    legal_cuts,
)
from lightning_unitscale.pipeline.dataflow import crossing_bytes, is_call
from lightning_unitscale.pipeline.program import named_tensors
from lightning_unitscale.pipeline.search import Allowed, CutCandidate, choose_cuts, thinned
from lightning_unitscale.profiler import GraphProfile, MetaInfoProp, NodeCosts

_MOST_CUTS = 1000  # limit on the compared cuts: the search keeps a number for each pair of them


def balanced_split(
    num_stages: int,
    *,
    bytes_per_second: float | None = None,
    rank_of: Callable[[int], int] | None = None,
    num_microbatches: int | None = None,
) -> BalancedSplit:
    """Return a split policy that balances the stages by the profiler's costs.

    It includes the time of transfers, and minimizes the length of a step.

    Args:
        num_stages: Number of stages; 1 cuts nothing.
        bytes_per_second: Rate at which a boundary's tensors are sent. The default is 2e9 between
            processes on CPUs and 2e10 between GPUs.
        rank_of: Function from a stage to its rank. Needed only if a rank has several stages.
        num_microbatches: Microbatches of a step. With fewer of them, transfers count more. The
            default is twice the number of stages.

    Raises:
        ValueError: If an argument is out of range.

    Examples:
        >>> balanced_split(4).num_stages
        4
    """
    return BalancedSplit(num_stages, bytes_per_second, rank_of, num_microbatches)


@dataclass(frozen=True)
class BalancedSplit:
    """Split policy of :func:`balanced_split`, called with a captured graph."""

    num_stages: int
    bytes_per_second: float | None = None
    rank_of: Callable[[int], int] | None = None
    num_microbatches: int | None = None
    # By the ``id`` of a tensor: the stages that may read it. Any stage may read other tensors.
    stages_of: Mapping[int, frozenset[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_count("num_stages", self.num_stages)
        if self.bytes_per_second is not None:
            check_positive("bytes_per_second", self.bytes_per_second, "bytes")
        if self.rank_of is not None:
            expected = "a function from a stage to its rank"
            check_callable("rank_of", self.rank_of, expected, "leave it out for one stage a rank")
        if self.num_microbatches is not None:
            check_count("num_microbatches", self.num_microbatches)

    def __call__(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Put the cuts into the graph."""
        graph = graph_module.graph
        keep_items_with_their_tuples(graph)
        cuts, total = possible_cuts(graph_module)
        # If tensors must stay in their stages, a cut that sends more may be the only one.
        fewer = cuts if self.stages_of else thinned(cuts, total, _MOST_CUTS)
        cuts = fewer if len(fewer) >= self.num_stages - 1 else cuts
        try:
            if len(cuts) < self.num_stages - 1:
                raise ValueError(
                    f"num_stages={self.num_stages}: the captured graph can be cut at {len(cuts)} "
                    f"places. Expected at most {len(cuts) + 1} stages. Ask for fewer."
                )
            chosen = choose_cuts(
                cuts,
                total,
                self.num_stages,
                self.bytes_per_second or sending_rate(device_type_of(graph_module)),
                self.num_microbatches or 2 * self.num_stages,
                rank_of=self.rank_of,
                allowed=self._allowed(graph_module, cuts) if self.stages_of else None,
            )
        except ValueError as error:
            if not self.stages_of:
                raise
            raise RuntimeError(
                "the step was recaptured (another batch size, or Python state that it reads has "
                "changed). Its graph uses the parameters in an order for which no cuts keep them "
                "on their ranks. Mark the cuts with pipe_split() or "
                "split={path: SplitPoint.BEGINNING}."
            ) from error
        nodes = {node.name: node for node in graph.nodes}
        for index in chosen:
            insert_mark(graph, nodes[cuts[index].before])
        graph_module.recompile()
        return graph_module

    def _allowed(self, graph_module: fx.GraphModule, cuts: Sequence[CutCandidate]) -> Allowed:
        """Return which stages read no tensors of other stages."""
        tensors = named_tensors(graph_module, remove_duplicate=False)
        ends = {cut.before for cut in cuts}
        # For each stage and end: operations just before the end that it must not contain.
        counts = np.zeros((self.num_stages, len(cuts) + 2), dtype=int)
        end = 1
        for node in filter(is_call, graph_module.graph.nodes):
            end += node.name in ends
            for read in node.all_input_nodes:
                tensor = tensors.get(str(read.target)) if read.op == "get_attr" else None
                stages = self.stages_of.get(id(tensor), range(self.num_stages))
                counts[[stage not in stages for stage in range(self.num_stages)], end] += 1
        return [row[:, None] == row[None, :] for row in counts.cumsum(axis=1)]


def note_costs(graph_module: fx.GraphModule) -> GraphProfile:
    """Profile a graph and its backward pass from the loss, and note the costs in its nodes."""
    graph, loss = graph_module.graph, graph_module.meta.get(LOSS)
    inputs = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    device = device_type_of(graph_module)
    profiled = MetaInfoProp(graph_module, device="cuda" if device == "cuda" else "cpu")
    try:
        with leaving_transforms():
            return profiled.run(*inputs, loss=None if loss is None else operator.itemgetter(loss))
    except (RuntimeError, NotImplementedError) as error:
        branches = [
            node for node in graph.nodes if is_higher_order(node) and not is_checkpoint(node)
        ]
        reason = str(error).strip().partition("\n")[0]
        reason = f"it calls {op_name(branches[0])}" if branches else reason
        raise RuntimeError(
            f"the costs by which a graph is cut cannot be estimated ({reason}). Transforms of "
            "torch.func, and torch.cond, scan and while_loop, may not run on tensors without data. "
            "Mark the cuts with split_spec={path: SplitPoint.BEGINNING} or pipe_split()."
        ) from error


def possible_cuts(graph_module: fx.GraphModule) -> tuple[list[CutCandidate], float]:
    """Return all possible cuts, and the estimated seconds of the whole graph."""
    graph = graph_module.graph
    profile = note_costs(graph_module)
    model = default_cost_model(device_type_of(graph_module))
    seconds = {node.name: sum(seconds_of(node, model)) for node in profile.nodes}
    loss = graph_module.meta.get(LOSS)
    returned: Any = graph.output_node().args[0]
    crossing = crossing_bytes(graph_module, None if loss is None else returned[loss])
    legal = set(legal_cuts(graph))
    cuts, passed = [], 0.0
    for node in graph.nodes:
        # A tensor must cross a cut. Otherwise the stages would be unrelated.
        if node in legal and crossing[node]:
            cuts.append(CutCandidate(node.name, passed, crossing[node]))
        passed += seconds.get(node.name, 0.0)
    return cuts, passed


def device_type_of(module: nn.Module) -> str:
    """Return the device type of a module's parameters."""
    return next((param.device.type for param in module.parameters()), "cpu")


def sending_rate(device_type: str) -> float:
    """Return the assumed bytes per second between ranks: gloo locally, or a 200 Gb/s link."""
    return 2e9 if device_type == "cpu" else 2e10


def seconds_of(costs: NodeCosts, model: CostModel) -> tuple[float, float]:
    """Return forward and backward seconds, each bound by computation or memory traffic."""

    def seconds(flops: float, moved: int) -> float:
        return model.seconds("", flops, moved, fusible=False) if flops or moved else 0.0

    return (
        seconds(costs.fwd_flops, costs.fwd_bytes_moved),
        seconds(costs.bwd_flops, costs.bwd_bytes_moved),
    )
