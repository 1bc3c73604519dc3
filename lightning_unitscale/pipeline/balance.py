"""Balance the stages: estimate costs with the profiler, then search for the cuts.

A stage costs the estimated seconds of its operations, forward and backward, and its transfers.

With one stage per rank, dynamic programming finds the shortest step. For each limit on the slowest
stage it finds the cuts that send least. It then takes the best limit. With several stages per rank,
each cut moves in turn to the place where the ranks are most equal, until none moves. So if one
stage costs more (an output layer that is one matmul), the other stages of its rank get less. Such
moves can get stuck, so the search has many starting points. All ranks use the same seed, so they
find the same cuts.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
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
from lightning_unitscale.profiler import GraphProfile, MetaInfoProp, NodeCosts

_ROUNDING = 1e-9  # two sums may differ by this fraction in their last bits

# For several stages per rank: sweeps over the cuts, and starting points.
_SWEEPS = 50
_STARTS = 300
# Every second start draws all cuts again. The others move about this fraction of the cuts.
_REDRAW = 2
_MOVED = 0.6

# For each stage, whether it may extend from one end (row) to another (column).
Allowed = Sequence[NDArray[np.bool_]]
_Costs = NDArray[np.float64]
_Key = tuple[float, float]  # the seconds of the slowest rank, then the inequality of the ranks


@dataclass(frozen=True)
class CutCandidate:
    """A possible place of a cut."""

    before: str  # name of the operation after the cut
    seconds_before: float  # estimated seconds of all operations before it, forward and backward
    boundary_bytes: int  # bytes that cross it, forward and backward


def choose_cuts(
    cuts: Sequence[CutCandidate],
    total: float,
    num_stages: int,
    bytes_per_second: float,
    num_microbatches: int,
    *,
    rank_of: Callable[[int], int] | None = None,
    allowed: Allowed | None = None,
) -> list[int]:
    """Return the indices in ``cuts`` that give a short step."""
    # With one stage per rank the result is optimal, if a step of n microbatches takes `(n - 1) *
    # slowest + sum` of the stages' seconds. Under 1F1B passes of different stages overlap, so a
    # step takes no longer. It takes as long if the stages are equal.
    # With several stages per rank, these cuts move until the slowest rank is fast. The result may
    # not be optimal.
    ends = np.array([0.0, *(cut.seconds_before for cut in cuts), total])
    sends = np.array([0.0, *(cut.boundary_bytes / bytes_per_second for cut in cuts), 0.0])
    # Seconds of a stage from one end (row) to another (column).
    costs: _Costs = ends[None, :] - ends[:, None] + sends[:, None] + sends[None, :]
    costs[np.tril_indices(len(ends))] = np.inf
    stage_costs = [
        costs if allowed is None else np.where(allowed[stage], costs, np.inf)
        for stage in range(num_stages)
    ]
    chosen = _shortest_step(stage_costs, sends, total, num_microbatches)
    ranks = [rank_of(stage) if rank_of else stage for stage in range(num_stages)]
    if len(set(ranks)) < num_stages:
        chosen = _fastest_ranks(stage_costs, ranks, chosen)
    return [end - 1 for end in chosen[1:-1]]


def _shortest_step(
    stage_costs: Sequence[_Costs], sends: NDArray[np.float64], total: float, num_microbatches: int
) -> list[int]:
    """Return the ends of the stages of the shortest step, with one stage per rank."""
    num_stages = len(stage_costs)
    slowest = np.full(len(sends), np.inf)
    slowest[0] = 0.0
    for costs in stage_costs:
        slowest = np.maximum(slowest[:, None], costs).min(axis=0)
    if not np.isfinite(slowest[-1]):
        raise ValueError(
            f"num_stages={num_stages}: none of the {len(sends) - 2} possible cuts is allowed. Ask "
            "for fewer stages."
        )
    fastest = float(slowest[-1])
    # Slower stages can send less. Above this limit the step only gets longer.
    least, _ = _fewest_sent(stage_costs, sends, np.inf)
    most, best = _fewest_sent(stage_costs, sends, fastest * (1 + _ROUNDING))
    others = num_microbatches - 1
    window = 2 * (most - least) / others if others else np.inf
    limit = (fastest + window) * (1 + _ROUNDING)
    shortest = np.inf
    while limit >= fastest:
        sent, ends = _fewest_sent(stage_costs, sends, limit)
        if others * fastest + total + 2 * sent >= shortest:
            break
        pairs = zip(stage_costs, pairwise(ends), strict=True)
        slow = max(float(costs[start, end]) for costs, (start, end) in pairs)
        # A transfer takes time on both sides.
        seconds = others * slow + total + 2 * sent
        if seconds <= shortest * (1 + _ROUNDING):
            shortest, best = seconds, ends
        limit = slow * (1 - _ROUNDING)
    return best


def thinned(cuts: Sequence[CutCandidate], total: float, most: int) -> list[CutCandidate]:
    """Reduce cuts to about ``most``: among close cuts, keep the one that sends least."""
    # Cuts are close if nothing between them takes time. If more than `most` remain, cuts less than
    # `total / most` apart also count as close.
    kept = _best_of_each(cuts, [cut.seconds_before for cut in cuts])
    if len(kept) > most:
        kept = _best_of_each(kept, [int(cut.seconds_before / total * most) for cut in kept])
    return kept


def _best_of_each(cuts: Sequence[CutCandidate], groups: Sequence[float]) -> list[CutCandidate]:
    best: dict[float, CutCandidate] = {}
    for cut, group in zip(cuts, groups, strict=True):
        if group not in best or cut.boundary_bytes < best[group].boundary_bytes:
            best[group] = cut
    return list(best.values())


def _fewest_sent(
    stage_costs: Sequence[_Costs], sends: NDArray[np.float64], limit: float
) -> tuple[float, list[int]]:
    """Return the ends that send least below a limit, and the seconds of sending."""
    sent = np.full(len(sends), np.inf)
    sent[0] = 0.0
    before: list[NDArray[np.intp]] = []
    for costs in stage_costs:
        possible = np.isfinite(costs) & (costs <= limit)
        options = np.where(possible, sent[:, None] + sends[None, :], np.inf)
        before.append(options.argmin(axis=0))
        sent = options.min(axis=0)
    ends = [len(sends) - 1]
    for starts in reversed(before):
        ends.append(int(starts[ends[-1]]))
    return float(sent[-1]), ends[::-1]


def _fastest_ranks(stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int]) -> list[int]:
    """Move the ends of the stages until the slowest rank is fast."""
    last = ends[-1]
    key, best = _settled(stage_costs, ranks, ends)
    chance = random.Random(0)
    for start in range(_STARTS):
        if start % _REDRAW == 0:
            candidate = [0, *sorted(chance.sample(range(1, last), len(best) - 2)), last]
        else:
            # Move some cuts between the previous cut, which may have moved, and the next one.
            candidate = list(best)
            for index in range(1, len(best) - 1):
                if chance.random() < _MOVED:
                    candidate[index] = chance.randrange(candidate[index - 1] + 1, best[index + 1])
        candidate_key, candidate = _settled(stage_costs, ranks, candidate)
        if candidate_key < key:
            key, best = candidate_key, candidate
    return best


def _settled(
    stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int]
) -> tuple[_Key, list[int]]:
    """Move each cut until none moves. Return a key (smaller is better) and the cuts."""
    ends = list(ends)
    key = (np.inf, np.inf)
    for _ in range(_SWEEPS):
        loads = _loads(stage_costs, ranks, ends, ())
        new_key = float(loads.max()), float(np.square(loads).sum())
        if not new_key < key:
            break
        key = new_key
        for index in range(1, len(ranks)):
            ends[index] = _best_end(stage_costs, ranks, ends, index)
    return key, ends


def _best_end(stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int], index: int) -> int:
    """Return the best position of one cut between its two neighbors."""
    free = np.arange(ends[index - 1] + 1, ends[index + 1])
    loads = _loads(stage_costs, ranks, ends, (index - 1, index))[:, None].repeat(len(free), axis=1)
    loads[ranks[index - 1]] += stage_costs[index - 1][ends[index - 1], free]
    loads[ranks[index]] += stage_costs[index][free, ends[index + 1]]
    slowest, squares = loads.max(axis=0), np.square(loads).sum(axis=0)
    # Among positions that differ only in the last bits of a sum, take the most equal ranks.
    squares[slowest > slowest.min() * (1 + _ROUNDING)] = np.inf
    return int(free[squares.argmin()])


def _loads(
    stage_costs: Sequence[_Costs], ranks: list[int], ends: list[int], without: tuple[int, ...]
) -> NDArray[np.float64]:
    """Return the seconds of each rank without some stages."""
    loads = np.zeros(max(ranks) + 1)
    for stage, rank in enumerate(ranks):
        if stage not in without:
            loads[rank] += stage_costs[stage][ends[stage], ends[stage + 1]]
    return loads


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
