"""Compare the graphs of a microbatch and of the whole batch to get the loss of the batch.

A loss over tokens is a mean over a different number of tokens in each microbatch. Its divisor
depends only on the batch (its labels, its mask), so every rank can compute it before the step. The
stages use this value instead of their own. The mean of the microbatches' losses, and of their
gradients, is then that of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_unitscale.capture.aliasing import memory_roots, written_arguments
from lightning_unitscale.capture.copy_graphs import is_checkpoint
from lightning_unitscale.capture.graph_nodes import example_tensor, op_name, tensor_name
from lightning_unitscale.capture.graph_variants import GraphCall
from lightning_unitscale.pipeline.batch_positions import Positions
from lightning_unitscale.pipeline.batch_rules import (
    ARITHMETIC,
    COUNTED,
    Coupled,
    Fact,
    Mean,
    Operation,
    Rows,
    Same,
    argument_of,
    of_reduced,
    of_reduction,
    of_rows,
)

_RANDOM = re.compile(
    r"rand\w*|\w*dropout\w*|bernoulli|multinomial|normal|uniform|exponential|poisson|gumbel_softmax"
    r"|rrelu|geometric|cauchy|log_normal"
)
# Operations with sizes as arguments. These sizes differ for the batch.
_TAKES_SIZES = frozenset(
    {"view", "reshape", "expand", "expand_as", "unflatten", "repeat", "tile", "broadcast_to",
     "new_zeros", "new_ones", "new_full", "new_empty", "zeros", "ones", "full", "empty", "arange",
     "split", "split_with_sizes", "chunk", "getitem", "narrow", "as_strided", "repeat_interleave",
     "pad", "setitem", "getattr", "index_select", "flatten"}
)  # fmt: skip
_FILLS = {"full": 1, "full_like": 1, "new_full": 2}
# Operations that use only the shape of their tensor.
_OF_SHAPES = frozenset(
    {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like",
     "empty_like"}
)  # fmt: skip


@dataclass(frozen=True)
class CountedMean:
    """A mean over classes, divided by the number or the weights of the valid targets."""

    node: fx.Node
    # The classes and their weights.
    target: fx.Node
    weight: fx.Node | None
    ignore_index: int  # the class that is left out

    @property
    def counts_by(self) -> list[fx.Node]:
        """Return the nodes that determine the divisor."""
        return [self.target] if self.weight is None else [self.target, self.weight]


@dataclass
class BatchFacts:
    """The relations of the tensors of a microbatch's graph to those of the batch."""

    count: int  # the number of microbatches
    graph: fx.GraphModule  # the graph of the whole batch
    # ``None`` for an output that is not a tensor.
    outputs: list[Fact | None] = field(default_factory=list)
    # Nodes whose value for the batch replaces that of the microbatch, with those of ``graph``.
    of_batch: dict[str, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    # Means over classes, paired with those of ``graph``.
    counted: dict[str, tuple[CountedMean, CountedMean]] = field(default_factory=dict)
    # Factors of terms before they are added: powers by the names of sum and term.
    term_powers: dict[tuple[str, str], int] = field(default_factory=dict)


def compare_graphs(part: GraphCall, whole: GraphCall, count: int) -> BatchFacts:
    """Find the relations of a microbatch's values to those of the batch."""
    ours, theirs = (call.graph.out_of_place().graph_module for call in (part, whole))
    are_data = [given.kind in {"input", "buffer"} for given in part.graph.inputs]
    return compare_graph_modules(ours, theirs, count, are_data)


def compare_graph_modules(
    ours: fx.GraphModule, theirs: fx.GraphModule, count: int, are_data: Sequence[bool]
) -> BatchFacts:
    """Find the relations of a microbatch's values to those of the batch."""
    found = BatchFacts(count, theirs)
    facts = _Comparison(found, are_data).walk(ours, theirs)
    returned: Any = ours.graph.output_node().args[0]
    found.outputs = [
        facts[value] if isinstance(value, fx.Node) and not isinstance(facts[value], tuple) else None
        for value in returned
    ]
    return found


class _Comparison:
    """A walk through two graphs in parallel."""

    def __init__(self, found: BatchFacts, are_data: Sequence[bool]) -> None:
        self._found = found
        self._count = found.count
        self._data_inputs = {index for index, is_data in enumerate(are_data) if is_data}

    def walk(
        self, part: fx.GraphModule, whole: fx.GraphModule, given: list[Any] | None = None
    ) -> dict[fx.Node, Any]:
        """Return the relations of all nodes."""
        pairs = _pairs(part.graph, whole.graph)
        if isinstance(pairs, str):
            return dict.fromkeys(part.graph.nodes, Coupled(pairs))
        facts: dict[fx.Node, Any] = {}
        positions = Positions()
        # Nodes that depend only on the batch. They can be computed before the step.
        data = set[fx.Node]()
        roots = memory_roots(part.graph)
        written = {roots[node] for each in part.graph.nodes for node in written_arguments(each)}
        inputs = {node: i for i, node in enumerate(part.graph.find_nodes(op="placeholder"))}
        for node, other in pairs:
            if node in inputs:
                position = inputs[node]
                facts[node] = self._of_input(node, other) if given is None else given[position]
                is_data = given is None and position in self._data_inputs
                if is_data and roots[node] not in written:
                    data.add(node)
                continue
            if node.op == "get_attr":
                facts[node] = _of_attribute(part, whole, node, other)
                is_parameter = isinstance(_attribute(part, node), nn.Parameter)
                if isinstance(facts[node], Same) and not is_parameter:
                    data.add(node)
                continue
            reads = node.all_input_nodes
            if op_name(node) in _OF_SHAPES and len(reads) == 1:
                reads = []
            if all(read in data for read in reads) and not _RANDOM.fullmatch(op_name(node)):
                data.add(node)
            known = {read: facts[read] for read in reads}
            if is_checkpoint(node):
                facts[node] = self._of_checkpoint(part, whole, node, other, facts)
                continue
            operation = Operation(node, other, known, self._count)
            facts[node] = self._of_results(operation)
            if reason := positions.reason(operation, facts[node]):
                facts[node] = operation.coupled(reason)
            for target in written_arguments(node):
                _spoil(operation, target, roots, facts, data)
            ours, theirs = example_tensor(node), example_tensor(other)
            has_one_shape = ours is not None and theirs is not None and ours.shape == theirs.shape
            # A result of the same size whose value differs for the batch.
            if given is None and node in data and has_one_shape and facts[node] != Same():
                facts[node] = Same()
                self._found.of_batch[node.name] = (node, other)
            if operation.name in COUNTED and isinstance(facts[node], Mean):
                facts[node] = self._of_counted(operation, facts[node], data)
        return facts

    def _of_input(self, node: fx.Node, other: fx.Node) -> Fact:
        part, whole = example_tensor(node), example_tensor(other)
        dims = [] if part is None or whole is None else batch_dims(part, whole, self._count)
        if dims is None or len(dims) > 1:
            return Coupled(f"{tensor_name(node)} has other sizes for the batch")
        return Rows(dims[0]) if dims else Same()

    def _of_checkpoint(
        self,
        part: fx.GraphModule,
        whole: fx.GraphModule,
        node: fx.Node,
        other: fx.Node,
        facts: Mapping[fx.Node, Any],
    ) -> Any:
        bodies = [_attribute(graph, each.args[0]) for graph, each in ((part, node), (whole, other))]
        arguments: list[Any] = list(node.args[1:])
        given = [facts.get(argument, Same()) for argument in arguments]
        inner = self.walk(bodies[0], bodies[1], given)
        returned: Any = bodies[0].graph.output_node().args[0]
        if isinstance(returned, fx.Node):
            return inner[returned]
        return tuple(inner.get(value, Same()) for value in returned)

    def _of_results(self, operation: Operation) -> Any:
        node, other = operation.node, operation.whole
        part, whole = (each.meta.get("example_value") for each in (node, other))
        if operation.name == "getitem":
            several = operation.facts.get(node.args[0])  # type: ignore[arg-type]
            if isinstance(several, tuple):
                return several[node.args[1]]
        if isinstance(part, Tensor) and isinstance(whole, Tensor):
            return self._of_result(operation, part, whole)
        if not isinstance(part, (tuple, list)) or not isinstance(whole, (tuple, list)):
            return Same()
        if len(part) != len(whole):
            return operation.coupled("has another number of results for the batch")
        return tuple(
            self._of_result(operation, a, b) if isinstance(a, Tensor) else Same()
            for a, b in zip(part, whole, strict=True)
        )

    def _of_result(self, operation: Operation, part: Tensor, whole: Tensor) -> Fact:
        dims = batch_dims(part, whole, self._count)
        known: dict[fx.Node, Fact] = {}
        for node, fact in operation.facts.items():
            if isinstance(fact, tuple):
                # The operation reads all tensors of a tuple at once.
                fact = next((each for each in fact if not isinstance(each, Same)), Same())
            if dims and isinstance(fact, (Coupled, Mean)) and _only_places(operation, node, part):
                continue
            if isinstance(fact, Coupled):
                return fact
            known[node] = fact
        operation = Operation(operation.node, operation.whole, known, self._count)
        if dims is None:
            return operation.coupled("has other sizes for the batch")
        if len(dims) > 1:
            return operation.coupled("compares each sample with each other one")
        if not _takes_same_numbers(operation):
            return operation.coupled("computes with the size of the batch")
        kinds = {type(fact) for fact in known.values()}
        if dims:
            if Mean in kinds:
                return operation.coupled("uses a mean over the batch for each sample")
            return of_rows(operation, dims[0], part)
        if Rows in kinds:
            return of_reduction(operation)
        if Mean in kinds:
            return of_reduced(operation, self._found.term_powers)
        if operation.name in ARITHMETIC and operation.factors() != 0:
            return operation.coupled("computes with the size of the batch")
        if any(isinstance(fact, Same) and fact.power for fact in known.values()):
            return operation.coupled("computes with the size of the batch")
        return Same()

    def _of_counted(self, operation: Operation, fact: Mean, data: set[fx.Node]) -> Fact:
        ours, theirs = _counted_mean(operation.node), _counted_mean(operation.whole)
        if ours is None or theirs is None:
            return fact
        if not data.issuperset(ours.counts_by):
            return operation.coupled(
                "divides by the number of targets that count, which depends on more than the batch"
            )
        self._found.counted[operation.node.name] = (ours, theirs)
        return fact


def _pairs(part: fx.Graph, whole: fx.Graph) -> list[tuple[fx.Node, fx.Node]] | str:
    """Return the paired nodes of both graphs, or why they do not correspond."""
    if len(part.nodes) != len(whole.nodes):
        return "the step has other operations for the whole batch than for a microbatch"
    pairs = dict(zip(part.nodes, whole.nodes, strict=True))
    for node, other in pairs.items():
        reads = [pairs.get(read) for read in node.all_input_nodes]
        is_same = node.op == other.op and op_name(node) == op_name(other)
        if node.op == "placeholder":
            is_same = node.op == other.op and node.target == other.target
        if not is_same or reads != other.all_input_nodes:
            return f"{tensor_name(node)} is another operation for the whole batch"
    return [pair for pair in pairs.items() if pair[0].op != "output"]


def _attribute(graph_module: fx.GraphModule, node: Any) -> Any:
    return attrgetter(str(node.target))(graph_module)


def batch_dims(part: Tensor, whole: Tensor, count: int) -> list[int] | None:
    """Return the dimensions of the samples, or ``None`` if another dimension's size differs."""
    if part.ndim != whole.ndim:
        return None
    dims = [dim for dim in range(part.ndim) if part.shape[dim] != whole.shape[dim]]
    if any(whole.shape[dim] != count * part.shape[dim] for dim in dims):
        return None
    return dims


def _of_attribute(
    part: fx.GraphModule, whole: fx.GraphModule, node: fx.Node, other: fx.Node
) -> Fact:
    ours, theirs = _attribute(part, node), _attribute(whole, other)
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return Same()
    if ours is theirs or (ours.shape == theirs.shape and torch.equal(ours, theirs)):
        return Same()
    return Coupled(f"{tensor_name(node)} is another constant for the batch")


def _spoil(
    operation: Operation,
    target: fx.Node,
    roots: Mapping[fx.Node, fx.Node],
    facts: dict[fx.Node, Any],
    data: set[fx.Node],
) -> None:
    """Note the effect of an in-place write on a tensor and all its views."""
    views = [node for node in facts if roots[node] is roots[target]]
    others = [node for node in operation.facts if node is not target]
    if not data.issuperset(others):
        data.difference_update(views)
    written = [fact for node in others for fact in (facts[node],) if not isinstance(fact, tuple)]
    of_samples = any(isinstance(fact, Rows) for fact in written)
    of_target = facts[target]
    if isinstance(of_target, Same) and isinstance(facts[roots[target]], Rows):
        of_target = operation.coupled("writes into samples at a position of the batch")
    # The target may be a part of the batch, and the operation may choose one.
    coupled = [one for one in (facts[operation.node], of_target) if isinstance(one, Coupled)]
    if coupled:
        facts.update(dict.fromkeys(views, coupled[0]))
    elif any(isinstance(fact, (Mean, Coupled)) for fact in written) or (
        of_samples and isinstance(facts[target], Same)
    ):
        reason = operation.coupled("writes batch-dependent values into a tensor")
        facts.update(dict.fromkeys(views, reason))


def _only_places(operation: Operation, node: fx.Node, result: Tensor) -> bool:
    """Check that integers shared by all samples are only offsets, such as those of experts."""
    example = example_tensor(node)
    if example is None or example.is_floating_point() or example.is_complex():
        return False
    if operation.name in ARITHMETIC and result.is_floating_point():
        return False
    whole = dict(zip(operation.node.all_input_nodes, operation.whole.all_input_nodes, strict=True))
    theirs = example_tensor(whole[node])
    return theirs is not None and theirs.shape == example.shape


def _takes_same_numbers(operation: Operation) -> bool:
    name = operation.name
    if name in _FILLS:
        nodes = (operation.node, operation.whole)
        ours, theirs = (argument_of(node, "fill_value", _FILLS[name]) for node in nodes)
        return isinstance(ours, fx.Node) or bool(ours == theirs)
    if name in _TAKES_SIZES or name in ARITHMETIC or name.startswith("rand"):
        return True
    return operation.factors() == 0


def _counted_mean(node: fx.Node) -> CountedMean | None:
    """Return the loss if it is a mean over classes that may leave out targets."""
    given = Operation(node, node, {}, 1).bound()
    if given is None or given["reduction"] != "mean":
        return None
    target, weight = given["target"], given["weight"]
    example = example_tensor(target)
    if example is None or example.is_floating_point():
        return None
    return CountedMean(node, target, weight, given["ignore_index"])
