"""Find the inputs of each stage: received values, arguments of the call and attributes.

A later stage recomputes masks, positions and rotary tables instead of receiving them. They depend
only on the call's arguments and constant buffers. They cost almost nothing, and their bits are the
same.

A stage that begins inside a region of autocast or ``no_grad`` enters it again.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor, fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from lightning_unitscale.capture import graph_nodes
from lightning_unitscale.capture.aliasing import (
    aliased_by_mutation,
    memory_roots,
    written_arguments,
)
from lightning_unitscale.capture.copy_graphs import autocast_dtypes
from lightning_unitscale.pipeline.program import TensorInfo


@dataclass(frozen=True)
class StageReads:
    """Inputs and outputs of one stage, as nodes of the whole graph in its order."""

    # Values from the previous stage and for the next one, relayed values included.
    received: list[fx.Node]
    sent: list[fx.Node]
    inputs: list[fx.Node]  # arguments of the call
    # Parameters, buffers, constants and nested graphs, and the names of those that it writes.
    attributes: list[fx.Node]
    written: set[str]
    recomputed: list[fx.Node]  # cheap operations of earlier stages that this stage runs again
    operations: list[fx.Node]


def is_call(node: fx.Node) -> bool:
    """Check whether a node calls something, such as an operation or a mark of a cut."""
    return node.op not in {"placeholder", "get_attr", "output"}


def is_switch(node: fx.Node) -> bool:
    """Check whether a node only switches a mode."""
    return node.target in (_enter_autocast, _exit_autocast, torch._C._set_grad_enabled)


def open_switches(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the switches of the regions around each node, outermost first."""
    opened: dict[fx.Node, tuple[fx.Node, ...]] = {}
    switches: tuple[fx.Node, ...] = ()
    for node in graph.nodes:
        opened[node] = switches
        if node.target is _exit_autocast:
            switches = tuple(switch for switch in switches if switch is not node.args[0])
        elif node.target is torch._C._set_grad_enabled:
            switches = tuple(switch for switch in switches if switch.target is not node.target)
        if node.target is _enter_autocast or (is_switch(node) and node.args[0] is False):
            switches = (*switches, node)
    return opened


def close(graph: fx.Graph, switch: fx.Node) -> None:
    """Append the switch that ends the region of ``switch``."""
    if switch.target is _enter_autocast:
        graph.call_function(_exit_autocast, (switch,))
    else:
        graph.call_function(torch._C._set_grad_enabled, (True,))


def _switch_grad(enabled: bool, callers: bool) -> None:
    torch.set_grad_enabled(enabled and callers)


def respect_callers_grad_mode(graph: fx.Graph) -> None:
    """Let the end of ``no_grad`` in a graph restore the caller's grad mode."""
    switches = graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    if not switches:
        return
    with graph.inserting_before(next(filter(is_call, graph.nodes))):
        callers = graph.call_function(torch.is_grad_enabled)
    for switch in switches:
        switch.target, switch.args = _switch_grad, (switch.args[0], callers)


def _find_flow(
    graph_module: fx.GraphModule, stages: Mapping[fx.Node, int], num_stages: int
) -> tuple[list[set[fx.Node]], dict[fx.Node, tuple[int, int]]]:
    """Return each stage's inputs and recomputed nodes, and first and last stage of sent values."""
    recomputable = find_recomputable(graph_module)
    taken: list[set[fx.Node]] = [set() for _ in range(num_stages)]
    spans: dict[fx.Node, tuple[int, int]] = {}

    def read_by(reader: fx.Node, stage: int) -> None:
        if is_switch(reader):
            return  # a later stage in the same region enters it again
        for node in reader.all_input_nodes:
            home = stages.get(node)
            if home == stage or node in taken[stage]:
                continue
            if home is None or node in recomputable:
                taken[stage].add(node)
                if home is not None:
                    read_by(node, stage)
            else:
                _, last = spans.get(node, (home, home))
                spans[node] = home, max(last, stage)

    for node, stage in stages.items():
        read_by(node, stage)
    read_by(graph_module.graph.output_node(), num_stages - 1)
    return taken, spans


def find_reads(
    graph_module: fx.GraphModule, stages: Mapping[fx.Node, int], num_stages: int
) -> list[StageReads]:
    """Return the inputs of every stage. Stages in between relay values."""
    graph = graph_module.graph
    taken_by_stage, spans_of = _find_flow(graph_module, stages, num_stages)
    for node in spans_of:
        if not isinstance(node.meta.get("example_value"), Tensor):
            name, op = graph_nodes.tensor_name(node), graph_nodes.op_name(node)
            raise RuntimeError(
                f"{name} of {node.meta.get(graph_nodes.MODULE)!r} is needed after a cut, but it is "
                f"not a tensor ({op}). Only tensors can be sent. Move the cut."
            )
    roots = memory_roots(graph)
    spans = [(node, *spans_of[node]) for node in graph.nodes if node in spans_of]
    reads = []
    for index, taken in enumerate(taken_by_stage):
        in_order = [node for node in graph.nodes if node in taken]
        operations = [node for node, stage in stages.items() if stage == index]
        written = {roots[target] for node in operations for target in written_arguments(node)}
        reads.append(
            StageReads(
                received=[node for node, first, last in spans if first < index <= last],
                sent=[node for node, first, last in spans if first <= index < last],
                inputs=[node for node in in_order if node.op == "placeholder"],
                attributes=[node for node in in_order if node.op == "get_attr"],
                written={str(root.target) for root in written if root.op == "get_attr"},
                recomputed=[node for node in in_order if is_call(node)],
                operations=operations,
            )
        )
    names = [{str(node.target) for node in stage_reads.attributes} for stage_reads in reads]
    for stage, stage_reads in enumerate(reads):
        for fqn in stage_reads.written:
            users = [index for index, of_stage in enumerate(names) if fqn in of_stage]
            if users != [stage]:
                raise ValueError(
                    f"buffer {fqn}: stage {stage} writes into it and stages {users} use it. A "
                    "buffer that is written must be in one stage. Move the cuts."
                )
    return reads


def crossing_bytes(graph_module: fx.GraphModule, loss: fx.Node | None) -> dict[fx.Node, int]:
    """Return the bytes that a cut before each operation sends, gradients included."""
    operations = [node for node in graph_module.graph.nodes if is_call(node)]
    stages = {node: position for position, node in enumerate(operations)}
    gradients = find_gradients(graph_module, loss)
    changes = [0] * (len(operations) + 1)
    # Treat every operation as a stage.
    _, spans = _find_flow(graph_module, stages, len(stages))
    for node, (first, last) in spans.items():
        example = node.meta.get("example_value")
        if isinstance(example, Tensor):
            directions = 2 if can_have_gradient(example) and node in gradients else 1
            size = directions * TensorInfo.of(example).num_bytes
            changes[first + 1] += size
            changes[last + 1] -= size
    return dict(zip(operations, itertools.accumulate(changes), strict=False))


def can_have_gradient(tensor: Tensor) -> bool:
    """Check whether a tensor's type supports gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def find_gradients(graph_module: fx.GraphModule, loss: fx.Node | None) -> frozenset[fx.Node]:
    """Return the nodes that may get a gradient from the loss, or from any result without a loss."""
    graph = graph_module.graph
    roots = memory_roots(graph)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for target in written_arguments(node):
            writers.setdefault(roots[target], []).append(node)
    parameters = graph_module.named_parameters(remove_duplicate=False)
    trainable = {name for name, param in parameters if param.requires_grad}

    def writers_of(node: fx.Node) -> list[fx.Node]:
        return writers.get(roots[node], []) if is_call(node) else []

    def takes_gradient(node: fx.Node) -> bool:
        if node.op == "get_attr":
            return str(node.target) in trainable
        return bool(writers_of(node)) or _differentiable(node)

    flow = nx.DiGraph()  # edges go from a node with a gradient to its inputs
    for node in graph.nodes:
        flow.add_edges_from((node, read) for read in filter(takes_gradient, node.all_input_nodes))
        flow.add_edges_from((node, writer) for writer in writers_of(node))
    returned = filter(_differentiable, graph.output_node().all_input_nodes)
    return _reached(flow, returned if loss is None else [loss])


def find_sources(graph: fx.Graph, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return nodes and all nodes that their values depend on, memory writes included."""
    roots = memory_roots(graph)
    writers: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    flow = nx.DiGraph()  # edges go to each node that a value depends on
    for node in graph.nodes:
        for read in node.all_input_nodes:
            flow.add_edges_from((node, source) for source in (read, *writers[roots[read]]))
        for target in written_arguments(node):
            writers[roots[target]].append(node)
    return _reached(flow, nodes)


def _reached(flow: nx.DiGraph, nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return nodes and all nodes that their edges reach."""
    flow.add_edges_from(("start", node) for node in nodes)
    return frozenset(nx.descendants(flow, "start") if "start" in flow else ())


def _differentiable(node: fx.Node) -> bool:
    if node.op == "placeholder" and "example_value" not in node.meta:
        return False
    tensors = graph_nodes.tensors_in(node.meta.get("example_value"))
    return not tensors or any(tensor.requires_grad for tensor in tensors)


# Longer chains are relayed, because launching their kernels would cost more than the transfer.
_LONGEST_CHAIN = 48

_CHEAP = frozenset(
    {"abs", "add", "and", "arange", "bitwise_and", "bitwise_not", "bitwise_or", "bool",
     "broadcast_to", "cat", "ceil", "chunk", "clamp", "clone", "contiguous", "cos", "cumsum",
     "detach", "div", "einsum", "eq", "exp", "expand", "expand_as", "eye", "flatten", "float",
     "floor", "floordiv", "full", "full_like", "ge", "getattr", "getitem", "gt", "int", "invert",
     "le", "log", "log2", "logical_and", "logical_not", "logical_or", "logical_xor", "long",
     "lt", "masked_fill", "matmul", "max", "maximum", "min", "minimum", "mod", "mul", "narrow",
     "ne", "neg", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "or", "outer",
     "permute", "pow", "reciprocal", "remainder", "repeat", "reshape", "rsqrt", "rsub", "select",
     "sign", "sin", "size", "split", "sqrt", "squeeze", "stack", "sub", "sum", "t", "to",
     "transpose", "tril", "triu", "truediv", "type", "type_as", "unbind", "unsqueeze", "view",
     "where", "xor", "zeros", "zeros_like"}
)  # fmt: skip


def find_recomputable(graph_module: fx.GraphModule) -> set[fx.Node]:
    """Return the operations that a later stage recomputes, with their dependencies."""
    graph = graph_module.graph
    buffers = {name for name, _ in graph_module.named_buffers(remove_duplicate=False)}
    autocast, switches = autocast_dtypes(graph), open_switches(graph)
    written = aliased_by_mutation(graph)
    # For each node, the operations that compute it, if all of them may run again.
    chains: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or (
            node.op == "get_attr" and str(node.target) in buffers and node not in written
        ):
            chains[node] = frozenset()
        # A stage starts under the caller's autocast, outside the graph's regions.
        in_region = any(switch.target is _enter_autocast for switch in switches[node])
        if in_region or node in autocast or node in written or not _is_cheap(node):
            continue
        operands = [chains.get(operand) for operand in node.all_input_nodes]
        chain = frozenset({node}).union(*filter(None, operands))
        if None not in operands and len(chain) <= _LONGEST_CHAIN:
            chains[node] = chain
    return set(filter(is_call, chains))


def _is_cheap(node: fx.Node) -> bool:
    if node.op not in {"call_function", "call_method"} or node.meta.get(graph_nodes.TRANSFORMED):
        return False
    example = node.meta.get("example_value")
    if isinstance(example, Tensor) and example.requires_grad:
        return False
    return node.target is operator.getitem or graph_nodes.op_name(node) in _CHEAP
