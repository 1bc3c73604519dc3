"""A step's graph as passes have rewritten it, to be cut: its own inputs beside the user's.

What a pass adds as an input (the factors of a gauge, keys of random roundings) every rank makes for
itself, like the batch, and it is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_unitscale.graph.capture import GraphInput, fake_mode_of
from lightning_unitscale.graph.compiled_graph import CompiledGraph
from lightning_unitscale.graph.nodes import NAME
from lightning_unitscale.graph.passes import StepGraph

_EXAMPLE = "example_value"


class RewrittenGraph:
    """A captured graph after the passes of its step.

    Args:
        graph: The captured graph.

    Attributes:
        graph: What the passes have made of it; every node has its example.
        inputs: What its placeholders are.

    Raises:
        RuntimeError: If a pass brings something out of the graph: of a cut one it could not.
    """

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph: StepGraph = graph.rewritten()
        if self.graph.results or self.graph.wrappers:
            raise RuntimeError(
                f"{self.graph.step}: a pass takes results out of the whole graph, and a pipeline "
                "has none; expected UnitScaleCallback, ScaleMonitor and RematCallback alone; take "
                "other transforms off the module."
            )
        own = [GraphInput(node.name, "input", None, node.name) for node, _ in self.graph.states]
        self.inputs: tuple[GraphInput, ...] = (*graph.inputs, *own)
        fill_examples(self.graph.graph)

    def examples(self, given: Sequence[Any]) -> list[Any]:
        """As :meth:`values`, with examples of the passes' own inputs."""
        return [*given, *(node.meta[_EXAMPLE] for node, _ in self.graph.states)]

    def values(self, given: Sequence[Any]) -> list[Any]:
        """The user's inputs of one call, followed by the passes' own."""
        return [*given, *(supply() for _, supply in self.graph.states)]


def fill_examples(graph: fx.Graph) -> None:
    """Give an example to every operation that a pass has inserted without one, by fake tensors."""
    for node in graph.nodes:
        # Whatever was captured has a name.
        if node.op not in {"call_function", "call_method"} or {NAME, _EXAMPLE} & node.meta.keys():
            continue
        read = node.all_input_nodes
        if not read or any(_EXAMPLE not in one.meta for one in read):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta[_EXAMPLE])
        with fake_mode_of(graph), torch.enable_grad():
            node.meta[_EXAMPLE] = (
                node.target(*args, **kwargs)
                if callable(node.target)
                else getattr(args[0], node.target)(*args[1:], **kwargs)
            )
