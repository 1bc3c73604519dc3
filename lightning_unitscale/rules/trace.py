"""Trace the graphs of one step as one flow of tensors, across graph breaks and into checkpoints."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.dynamo.graphs import is_checkpoint
from lightning_unitscale.graph.nodes import INPUT, is_float_tensor, is_same_graph, op_name
from lightning_unitscale.graph.recorder import GraphInterpreter
from lightning_unitscale.lossless.calibrate import root_mean_square
from lightning_unitscale.rules.operations import (
    DIVIDED,
    TIMES,
    handed_on,
    is_operation,
    may_be_float,
    parameter_path,
    takes_form_only,
)


@dataclass
class Flow:
    """Every operation of a step in the order in which they run, and who reads whom.

    A placeholder that another graph of the step, or the graph around a checkpoint, has made is that
    other node: readers and sources go across.

    Attributes:
        nodes: Operations and inputs, in the order of execution.
        outputs: Float tensors that leave the step.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    _same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _order: dict[fx.Node, int] = field(default_factory=dict)
    _readers: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    _parameters: dict[fx.Node, str] = field(default_factory=dict)
    _by_fqn: dict[str, fx.Node] = field(default_factory=dict)
    _graphs: dict[fx.Graph, fx.GraphModule] = field(default_factory=dict)
    _learned: set[fx.Node] = field(default_factory=set)
    _gradients: set[fx.Node] = field(default_factory=set)
    _of_data: set[fx.Node] = field(default_factory=set)
    _sizes: dict[fx.Node, Tensor] = field(default_factory=dict)

    def resolve(self, node: fx.Node) -> fx.Node:
        """The node that made a tensor, in whichever graph."""
        while node in self._same:
            node = self._same[node]
        return node

    def order(self, node: fx.Node) -> int:
        """Position of a node in the order of execution."""
        return self._order[self.resolve(node)]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that made a node's arguments."""
        return [self.resolve(source) for source in node.all_input_nodes]

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """The operations that read a node's result, in any graph."""
        return self._readers[self.resolve(node)]

    def parameter(self, node: fx.Node) -> str | None:
        """Path in the module of the parameter that the node is, if it is one."""
        return self._parameters.get(self.resolve(node))

    def parameters(self) -> dict[str, fx.Node]:
        """The node of every parameter."""
        return dict(self._by_fqn)

    def node_of_parameter(self, fqn: str) -> fx.Node:
        """The node of one parameter."""
        return self._by_fqn[fqn]

    def is_learned(self, node: fx.Node) -> bool:
        """Whether a tensor depends on a parameter; it need not require a gradient for that."""
        return self.resolve(node) in self._learned

    def is_of_gradients(self, node: fx.Node) -> bool:
        """Whether a tensor was made of gradients that a step has read off its parameters."""
        return self.resolve(node) in self._gradients

    def is_weight(self, node: fx.Node) -> bool:
        """Whether a tensor is a parameter, or was made of parameters alone (a normalized one)."""
        return self.is_learned(node) and self.resolve(node) not in self._of_data

    def note_size(self, node: fx.Node, value: object) -> None:
        """Remember the size of what another tensor is multiplied or divided by."""
        if isinstance(value, Tensor) and not value.is_complex() and value.numel() > 0:
            share = torch.count_nonzero(value).clamp(min=1) / value.numel()
            real = value if value.is_floating_point() else value.float()
            self._sizes[self.resolve(node)] = root_mean_square(real) / share.sqrt()

    def size(self, node: fx.Node) -> float | None:
        """RMS of the entries that are not zero of a tensor that is not learned; 1 for a mask.

        ``None`` for any other tensor, and where no run has seen its values.
        """
        node = self.resolve(node)
        if node in self._learned or node not in self._sizes:
            return None
        return float(self._sizes[node])

    def root(self, node: fx.Node) -> fx.Node:
        """Where a tensor comes from, seen through what only hands it on."""
        node = self.resolve(node)
        while (source := handed_on(node)) is not None:
            node = self.resolve(source)
        return node

    def parameter_of(self, node: fx.Node) -> str | None:
        """Path of the parameter whose elements the tensor has."""
        return self.parameter(self.root(node))

    def has_graph(self, graph: fx.Graph) -> bool:
        """Whether a graph has been added."""
        return graph in self._graphs

    def first_capture(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """The graph that has been added and is the same, captured another time; or itself."""
        if self.has_graph(graph_module.graph):
            return graph_module
        same = (other for other in self._graphs.values() if is_same_graph(other, graph_module))
        return next(same, graph_module)

    def add_graph(self, graph_module: fx.GraphModule, links: Mapping[int, fx.Node]) -> None:
        """Append a graph.

        Args:
            graph_module: The graph.
            links: Positions of placeholders that nodes of earlier graphs made.
        """
        self._graphs[graph_module.graph] = graph_module
        for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
            if position in links:
                self._same[node] = links[position]
        self._add_nodes(graph_module)

    def finish(self, outputs: Sequence[fx.Node]) -> None:
        """Say what leaves the step, once every graph is there."""
        self.outputs = [self.resolve(node) for node in outputs]

    def _add_nodes(self, graph_module: fx.GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.op == "output" or node in self._same:
                continue
            if node.op == "placeholder" and self._is_known_parameter(node):
                continue
            if is_checkpoint(node):
                self._add_checkpoint(graph_module, node)
                continue
            self._order[node] = len(self.nodes)
            self.nodes.append(node)
            if node.op == "placeholder":
                graph_input = node.meta.get(INPUT)
                kind = "input" if graph_input is None else graph_input.kind
                if kind == "gradient":
                    self._gradients.add(node)
                if kind not in {"parameter", "buffer"}:
                    self._of_data.add(node)
            if is_operation(node):
                sources = dict.fromkeys(self.sources(node))
                for source in sources:
                    self._readers[source].append(node)
                for source in () if takes_form_only(node) else sources:
                    for marked in (self._gradients, self._of_data):
                        if source in marked:
                            marked.add(node)
                    if source in self._learned and may_be_float(node):
                        self._learned.add(node)

    def _is_known_parameter(self, node: fx.Node) -> bool:
        fqn = parameter_path(node)
        if fqn is None:
            return False
        if fqn in self._by_fqn:
            self._same[node] = self._by_fqn[fqn]
            return True
        self._by_fqn[fqn] = node
        self._parameters[node] = fqn
        self._learned.add(node)
        return False

    def _add_checkpoint(self, graph_module: fx.GraphModule, call: fx.Node) -> None:
        body_node, *arguments = call.args
        assert isinstance(body_node, fx.Node)
        body = getattr(graph_module, str(body_node.target))
        placeholders = body.graph.find_nodes(op="placeholder")
        for inner, outer in zip(placeholders, arguments, strict=False):
            if isinstance(outer, fx.Node):
                self._same[inner] = outer
        self._add_nodes(body)
        returned: Any = body.graph.output_node().args[0]
        if isinstance(returned, fx.Node):
            self._same[call] = returned
            return
        for reader in call.users:
            if reader.target is operator.getitem and isinstance(reader.args[1], int):
                item = returned[reader.args[1]]
                if isinstance(item, fx.Node):
                    self._same[reader] = item


class Recorder:
    """Runs the graphs of a step as they are, and records which reads what another one made."""

    def __init__(self) -> None:
        self.flow = Flow()
        self._made: dict[int, tuple[Tensor, fx.Node]] = {}
        self._read: set[fx.Node] = set()

    def __call__(self, graph: Any, inputs: tuple[Any, ...]) -> Any:
        """Run one graph; the interpreter that ``CapturedStep`` expects."""

        def run_with(captured: fx.GraphModule) -> Any:
            graph_module = self.flow.first_capture(captured)

            def run(*values: Any) -> Any:
                outputs = GraphInterpreter(graph_module, self._visit).run(*values)
                self._record(graph_module, values, outputs)
                return outputs

            return run

        return graph.interpret(run_with, inputs)

    def result(self) -> Flow:
        """The flow of everything that ran."""
        outputs = [node for _, node in self._made.values() if node not in self._read]
        self.flow.finish(outputs)
        return self.flow

    def _visit(self, interpreter: GraphInterpreter, node: fx.Node) -> Any:
        """Note the sizes of factors."""
        if is_operation(node) and op_name(node) in TIMES | DIVIDED:
            for factor in node.all_input_nodes:
                value = interpreter.env[factor]
                if not getattr(value, "requires_grad", False):
                    self.flow.note_size(factor, value)
        return interpreter.evaluate(node)

    def _record(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        links = {
            position: self._made[id(value)][1]
            for position, value in enumerate(inputs)
            if id(value) in self._made
        }
        self._read.update(links.values())
        if not self.flow.has_graph(graph_module.graph):
            self.flow.add_graph(graph_module, links)
        returned: Any = graph_module.graph.output_node().args[0]
        for node, value in zip(returned, outputs, strict=False):
            # The tensor is kept: its identity says something only as long as it lives.
            if isinstance(value, Tensor) and isinstance(node, fx.Node) and is_float_tensor(node):
                self._made[id(value)] = (value, node)
