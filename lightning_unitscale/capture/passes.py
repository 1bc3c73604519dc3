"""Run ordered passes over a captured graph, and hold the graph that they rewrite.

A pass states its phase, and the phases run in their declared order. So callbacks and transforms may
be given in any order. A pass never sees Dynamo's own graph: it rewrites a copy.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_unitscale.capture.aliasing import make_out_of_place
from lightning_unitscale.capture.copy_graphs import add_placeholder, fake_like, is_checkpoint
from lightning_unitscale.capture.graph_nodes import INTERNAL


class Phase(enum.IntEnum):
    """Time when a pass runs: a later phase sees the results of the earlier ones.

    ``REPARAMETRIZE`` changes the function that the step computes. All later phases and all
    measurements of the step take its result for the user's own graph. ``GATHER`` gathers shards.
    Measurements without this phase must gather them before.
    """

    REPARAMETRIZE = 0
    REWRITE = 1
    OBSERVE = 2
    GATHER = 3


@dataclass(frozen=True)
class PassRecord:
    """Record of the effects of one pass on one graph. Graphs are numbered in capture order."""

    step: str
    graph_index: int
    pass_name: str
    observed: bool
    nodes_before: int
    nodes_after: int
    seconds: float
    changes: tuple[str, ...]


@dataclass
class Region:
    """Graph, or the body of an activation checkpoint inside it."""

    graph_module: fx.GraphModule
    parent: Region | None = None
    call: fx.Node | None = None
    _threaded: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        """Return the nodes of this region."""
        return self.graph_module.graph

    def thread(self, node: fx.Node, example: Tensor | None = None) -> fx.Node:
        """Return the outermost graph's ``node`` in this region, passed down as an argument."""
        if self.parent is None or self.call is None:
            return node
        if node not in self._threaded:
            outer = self.parent.thread(node, example)
            self.call.args = (*self.call.args, outer)
            example = node.meta["example_value"] if example is None else example
            self._threaded[node] = add_placeholder(
                self.graph, f"{node.name}_inner", example, nested=True
            )
        return self._threaded[node]


class StepGraph:
    """Graph under rewrite, with inputs and outputs of its own besides the user's."""

    def __init__(self, graph_module: fx.GraphModule, *, observed: bool, step: str = "") -> None:
        self.graph_module = graph_module
        self.step = step
        self.observed = observed  # with probes, as on sampled steps
        self.notes: dict[str, Any] = {}  # messages from one pass to another
        tensors = (node.meta.get("example_value") for node in graph_module.graph.nodes)
        floats = (one for one in tensors if isinstance(one, Tensor) and one.is_floating_point())
        self.device = next((tensor.device for tensor in floats), torch.device("cpu"))
        self.states: list[tuple[fx.Node, Callable[[], Tensor]]] = []
        self.results: list[tuple[fx.Node, Callable[[Tensor], None]]] = []

    @property
    def graph(self) -> fx.Graph:
        """Return the nodes of the outermost graph."""
        return self.graph_module.graph

    def regions(self) -> Iterator[Region]:
        """Yield the graph and, after it, the bodies of its activation checkpoints at any depth."""
        pending = [Region(self.graph_module)]
        while pending:
            region = pending.pop()
            yield region
            for node in region.graph.find_nodes(
                op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint
            ):
                body = node.args[0]
                if is_checkpoint(node) and isinstance(body, fx.Node) and body.op == "get_attr":
                    nested = getattr(region.graph_module, str(body.target))
                    pending.append(Region(nested, region, node))

    def add_state(self, name: str, supply: Callable[[], Tensor], example: Tensor) -> fx.Node:
        """Add an input with the value of ``supply()`` at each call. It never recompiles."""
        node = add_placeholder(
            self.graph, f"unitscale_{name}_{len(self.states)}", fake_like(self.graph, example)
        )
        node.meta[INTERNAL] = True
        self.states.append((node, supply))
        return node

    def add_result(self, node: fx.Node, sink: Callable[[Tensor], None]) -> None:
        """Make ``node`` an output, and call ``sink`` with its value after every call."""
        self.results.append((node, sink))

    def finish(self) -> None:
        """Append the results to the graph's outputs and check the graph."""
        output = self.graph.output_node()
        returned = output.args[0]
        outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        output.args = ((*outputs, *(node for node, _ in self.results)),)
        for region in self.regions():
            region.graph.lint()
            region.graph_module.recompile()

    def example_inputs(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``inputs`` of the captured graph followed by examples of the states."""
        return (*inputs, *(node.meta["example_value"] for node, _ in self.states))


class GraphPass(abc.ABC):
    """Pass that rewrites one graph in place. It may keep state across the graphs of a step."""

    name: str
    phase: Phase
    out_of_place: bool = False  # rewrite in-place operations out of place first
    kept_whole: tuple[Callable[..., Any], ...] = ()  # functions that no capture traces

    @property
    def attentions(self) -> Mapping[str, bool]:
        """Return whether to expand attentions into matmuls, by name. torch decides on others."""
        return {}

    @abc.abstractmethod
    def run(self, graph: StepGraph) -> tuple[str, ...]:
        """Rewrite ``graph`` and return the changes, one line per kind of change."""

    def report(self) -> str:
        """Return the pass's text in ``explain()`` besides its changes to each graph."""
        return ""

    def before_cut(self, graph: StepGraph) -> frozenset[str]:
        """Prepare a rewritten, unobserved graph to be cut into parts. Every rank calls this."""
        return frozenset()

    def observe_part(self, graph: StepGraph) -> None:  # noqa: B027
        """Add the pass's observations, except ``ELSEWHERE`` ones, to a part of a cut graph."""

    def see_shared(self, name: str, value: Tensor, gradient: Tensor | None) -> None:  # noqa: B027
        """Observe a parameter that several parts of a cut graph use."""

    def see_uncaptured(  # noqa: B027
        self, module: nn.Module, read: Sequence[Tensor], *, in_step: bool
    ) -> None:
        """Check the tensors that a matmul reads outside of all graphs, while a step runs or not."""

    def before_step(self, module: nn.Module) -> None:  # noqa: B027
        """Prepare for a call of a captured step of ``module``."""

    def after_step(self, module: nn.Module, result: Any) -> None:  # noqa: B027
        """Finish a call that returned ``result``. A rehearsal is not a call."""


def run_passes(
    graph: StepGraph,
    passes: Sequence[GraphPass],
    *,
    step: str,
    graph_index: int,
    out_of_place: bool = False,
) -> list[PassRecord]:
    """Run the passes in the order of their phases, and equal phases in the given order."""
    # Passes of phase `OBSERVE` run on the observed variant only. If a pass or the caller asks for
    # it, in-place operations are replaced first, in every region.
    due = sorted(
        (
            graph_pass
            for graph_pass in passes
            if graph.observed or graph_pass.phase is not Phase.OBSERVE
        ),
        key=lambda graph_pass: graph_pass.phase,
    )
    records = []

    def record(name: str, run: Callable[[], tuple[str, ...]]) -> None:
        before, start = len(graph.graph.nodes), time.perf_counter()
        changes = run()
        seconds = time.perf_counter() - start
        after = len(graph.graph.nodes)
        records.append(
            PassRecord(step, graph_index, name, graph.observed, before, after, seconds, changes)
        )

    if out_of_place or any(graph_pass.out_of_place for graph_pass in due):
        regions = [region.graph for region in graph.regions()]
        record("out of place", lambda: tuple(chain.from_iterable(map(make_out_of_place, regions))))
    for graph_pass in due:
        record(graph_pass.name, lambda graph_pass=graph_pass: graph_pass.run(graph))  # type: ignore[misc]
    graph.finish()
    return records
