"""One call of a step as one captured graph with its inputs, of which nothing has run yet.

Dynamo lets a frame's side effects follow the frame's graph. Whoever stops a step where its graph is
called has the graph and its inputs, and nothing that the step does beside the graph was done: it
can be measured on them as often as needed, and nothing of the user's Python has to be undone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_unitscale.capture.compiled_graph import CompiledGraph, Interpreter
from lightning_unitscale.capture.rollback import restorers_of
from lightning_unitscale.graph.aliasing import memory_roots, written_arguments

if TYPE_CHECKING:
    from lightning_unitscale.capture.captured_step import CapturedStep


class NotOneGraphError(Exception):
    """A call of a step is not one graph; says why."""


class GraphReached(BaseException):
    """Raised in place of a graph's run; no ``except Exception`` of a user's sees it."""

    def __init__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.graph = graph
        self.inputs = inputs


def stop_at_graph(graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
    """The interpreter that runs no graph, but raises."""
    raise GraphReached(graph, inputs)


@dataclass(frozen=True)
class GraphCall:
    """The one graph that a call of a step runs.

    Attributes:
        step: The step.
        graph: The graph.
        inputs: What the call gives it: parameters and buffers as well.
    """

    step: CapturedStep
    graph: CompiledGraph
    inputs: tuple[Any, ...]

    @property
    def differentiable(self) -> list[int]:
        """Positions among the graph's outputs of tensors with a gradient, each tensor once."""
        nodes: Any = self.graph.base.graph.output_node().args[0]
        positions: dict[Any, int] = {}
        for position, node in enumerate(nodes):
            example = getattr(node, "meta", {}).get("example_value")
            if isinstance(example, Tensor) and example.requires_grad:
                positions.setdefault(node, position)
        return list(positions.values())

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[tuple[Callable[[Interpreter], Any], tuple[Any, ...]]]:
        """Within this context the graph may run; afterwards nothing of that has happened.

        Covered: torch's random states, and the memory of inputs that the graph writes into.

        Yields:
            What runs the graph with an interpreter, and the inputs, with which a backward pass
            ends.
        """
        inputs = tuple(_leaf(value) for value in self.inputs)
        restorers = [restore for value in self._written(inputs) for restore in restorers_of(value)]
        devices = {value.device for value in inputs if isinstance(value, Tensor)}
        was_rehearsing, self.step.is_rehearsing = self.step.is_rehearsing, True
        with (
            torch.random.fork_rng([device for device in devices if device.type == "cuda"]),
            torch.set_grad_enabled(torch.is_grad_enabled()),
        ):
            try:
                yield lambda interpreter: interpreter(self.graph, inputs), inputs
            finally:
                self.step.is_rehearsing = was_rehearsing
                for restore in restorers:
                    restore()

    def _written(self, inputs: Sequence[Any]) -> Iterator[Any]:
        """The inputs that the graph may write into: parameters only if an operation says so.

        Kernels of normalisation layers write into running statistics, and their schemas are silent.
        """
        graph = self.graph.base.graph
        roots = memory_roots(graph)
        mutated = {roots[target] for node in graph.nodes for target in written_arguments(node)}
        placeholders = graph.find_nodes(op="placeholder")
        for node, origin, value in zip(placeholders, self.graph.inputs, inputs, strict=True):
            if origin.kind != "parameter" or roots[node] in mutated:
                yield value


def _leaf(value: Any) -> Any:
    """The same tensor without what has computed it, through which no backward pass may go."""
    if not isinstance(value, Tensor) or value.is_leaf:
        return value
    return value.detach().requires_grad_()
