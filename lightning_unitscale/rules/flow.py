"""Record the operations of a captured step, with their kinds, scale rules and readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import torch
from torch import Tensor, fx

from lightning_unitscale.capture.copy_graphs import is_checkpoint
from lightning_unitscale.capture.graph_matmuls import Places
from lightning_unitscale.capture.graph_nodes import (
    INPUT,
    WHOLE_VIEWS,
    Path,
    example_tensor,
    float_arguments,
    is_float_tensor,
    is_same_graph,
    op_name,
    tensor_name,
)
from lightning_unitscale.capture.passes import StepGraph
from lightning_unitscale.functional import rules
from lightning_unitscale.matmuls.measurement import root_mean_square

# Names in a captured graph that differ from the public ones.
_ALIASES = {"attention_matmul": torch.matmul, "safe_softmax": torch.softmax}


def rule_of(node: fx.Node) -> rules.ScaleRule | None:
    """Return the scale rule of an operation, in whichever form it is called."""
    if node.op == "call_method":
        return rules.rule_of_method(str(node.target))
    if node.op != "call_function":
        return None
    alias = _ALIASES.get(op_name(node))
    return rules.rule_of_function(node.target if alias is None else alias)


_MADE_RMS = {"zeros": 0.0, "new_zeros": 0.0, "zeros_like": 0.0, "zero": 0.0}
_MADE_RMS |= {"ones": 1.0, "new_ones": 1.0, "ones_like": 1.0}
# The RMS of standard normal numbers, and of numbers between 0 and 1.
_MADE_RMS |= {"randn": 1.0, "randn_like": 1.0, "rand": 3**-0.5, "rand_like": 3**-0.5}
_LARGEST_CONSTANT = 1e3
_FULL = frozenset({"full", "new_full", "full_like"})


def writes(node: fx.Node) -> bool:
    """Check whether an operation may write into an argument, which then is not constant."""
    target = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    name = str(target)
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in {"setitem", "__setitem__"} or node.kwargs.get("out") is not None


def takes_form_only(node: fx.Node) -> bool:
    """Check whether an operation uses only the type and shape of the tensor that it reads."""
    name = op_name(node)
    return name.startswith("new_") or name.endswith("_like")


def made_rms(node: fx.Node) -> float | None:
    """Return the RMS of a tensor made without the values of others, else ``None``."""
    name = op_name(node)
    if name in _FULL:
        value = node.kwargs.get("fill_value", node.args[-1] if len(node.args) > 1 else None)
        # A larger value is a mask, not a scale.
        is_scale = isinstance(value, (int, float)) and abs(value) < _LARGEST_CONSTANT
        return abs(float(value)) if is_scale else None  # type: ignore[arg-type]
    return _MADE_RMS.get(name)


# Operations that return the elements of one tensor, or some of them, or several times over. None of
# them changes the meaning of a factor on the tensor.
_HANDED_ON = (WHOLE_VIEWS - {"detach"}) | frozenset(
    {"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave", "tile", "getitem",
     "chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split", "split_with_sizes", "unbind",
     "narrow", "select", "index_select", "to", "type_as", "type", "float", "half", "bfloat16",
     "double", "roll", "flip", "unfold", "cuda", "cpu", "identity", "dropout", "dropout1d",
     "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
     "native_dropout", "positive", "rot90", "hsplit", "vsplit", "gather", "take_along_dim",
     "pixel_shuffle", "pixel_unshuffle", "diagonal", "from_local", "to_local", "redistribute"}
)  # fmt: skip

EMBEDDINGS = frozenset({"embedding", "embedding_bag"})
TIMES = frozenset({"mul", "rmul", "imul", "multiply"})
DIVIDED = frozenset({"truediv", "div", "itruediv", "divide", "true_divide"})
ADDS = frozenset({"add", "radd", "iadd"})
SUBTRACTS = frozenset({"sub", "isub", "subtract"})


def is_operation(node: fx.Node) -> bool:
    """Check whether the node computes a value."""
    return node.op in {"call_function", "call_method"}


def handed_on(node: fx.Node) -> fx.Node | None:
    """Return the tensor that the node only rearranges, selects from, drops from or casts."""
    if not is_operation(node):
        return None
    name = str(node.args[1]) if op_name(node) == "getattr" else op_name(node)
    if name in ADDS and len(node.args) == 2 and not node.kwargs and 0 in node.args:
        # Python's sum starts from 0.
        return next((value for value in node.args if is_float_tensor(value)), None)  # type: ignore[return-value]
    if name not in _HANDED_ON:
        return None
    first = node.args[0] if node.args else node.kwargs.get("input")
    return first if isinstance(first, fx.Node) else None


def is_softmax(node: fx.Node) -> bool:
    """Check whether the node is a softmax in any form."""
    return is_operation(node) and op_name(node) in {"softmax", "safe_softmax"}


def is_attention(node: fx.Node) -> bool:
    """Check whether the node is a fused attention."""
    return is_operation(node) and node.target is torch.nn.functional.scaled_dot_product_attention


def added_tensors(node: fx.Node) -> tuple[tuple[Path, fx.Node], tuple[Path, fx.Node]] | None:
    """Return the two float tensors that a node adds unscaled, with their paths."""
    if not is_operation(node) or op_name(node) not in ADDS:
        return None
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2 or not is_float_tensor(node):
        return None
    count = len(node.args) + len({"input", "other"} & node.kwargs.keys())
    operands = [
        (path, node) for path, node in float_arguments(node) if path[0] in {0, 1, "input", "other"}
    ]
    return (operands[0], operands[1]) if len(operands) == count == 2 else None


def reads_of(node: fx.Node) -> tuple[str, ...]:
    """Return the names of the tensors behind a node's float arguments, in its own graph."""
    # They distinguish operations with the same name in two branches of a step. Inputs of the graph
    # have no name here, since steps call them differently.
    return tuple(_source_name(source) for _, source in float_arguments(node))


def _source_name(node: fx.Node) -> str:
    while (source := handed_on(node)) is not None:
        node = source
    if node.op != "placeholder":
        return tensor_name(node)
    return parameter_path(node) or ""


def parameter_path(node: fx.Node) -> str | None:
    """Return the module path of the parameter that a placeholder stands for, if any."""
    graph_input = node.meta.get(INPUT)
    is_parameter = graph_input is not None and graph_input.kind == "parameter"
    return graph_input.fqn if is_parameter else None  # type: ignore[union-attr]


def may_be_float(node: fx.Node) -> bool:
    """Check whether a node makes a float tensor, or a value that may contain one (a tuple)."""
    return is_float_tensor(node) or example_tensor(node) is None


def numel(node: fx.Node) -> int:
    """Return the number of elements of a node's example, or 0 if it is not a tensor."""
    tensor = example_tensor(node)
    return 0 if tensor is None else int(rules.numel_of(tensor))


def example_of(argument: Any) -> Any:
    """Return an argument as it was in the captured call, with graph inputs as their numbers."""
    # Dynamo makes a number a graph input if it had another value in an earlier capture of the code,
    # as the probability of dropout in an earlier module.
    value = argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument
    return rules.hint_of(value) if isinstance(value, torch.SymFloat) else value


def output_factor(node: fx.Node, *, mult: float = 1.0) -> float | None:
    """Return the rule's factor on the result of an operation, or ``None`` without a rule."""
    rule = rule_of(node)
    if rule is None:
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), example_of)
    arguments = rule.bind(tuple(args), kwargs)
    if mult != 1.0:
        arguments["mult"] = mult
    return rule.factors(arguments).output


# Exceptions of a rule on arguments in a form that it does not cover.
RULE_ERRORS = (TypeError, ValueError, KeyError, IndexError, AttributeError)


@dataclass
class Flow:
    """All operations of a step in execution order, with the readers of each."""

    # A placeholder may stand for a node of another graph of the step, or of the graph around a
    # checkpoint. Readers and sources then refer to that node.

    nodes: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)  # float tensors that leave the step
    parameters: dict[str, fx.Node] = field(default_factory=dict)
    _same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _order: dict[fx.Node, int] = field(default_factory=dict)
    graph: nx.DiGraph = field(default_factory=nx.DiGraph)  # an edge to each reader of a result
    _graphs: dict[fx.Graph, fx.GraphModule] = field(default_factory=dict)
    _learned: set[fx.Node] = field(default_factory=set)
    _gradients: set[fx.Node] = field(default_factory=set)
    _of_data: set[fx.Node] = field(default_factory=set)
    _sizes: dict[fx.Node, Tensor] = field(default_factory=dict)

    def resolve(self, node: fx.Node) -> fx.Node:
        """Return the node that made a tensor, in any graph."""
        while node in self._same:
            node = self._same[node]
        return node

    def order(self, node: fx.Node) -> int:
        """Return the position of a node in the order of execution."""
        return self._order[self.resolve(node)]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that made a node's arguments."""
        return [self.resolve(source) for source in node.all_input_nodes]

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the operations that read a node's result, in any graph."""
        return list(self.graph.successors(self.resolve(node)))

    def is_learned(self, node: fx.Node) -> bool:
        """Check whether a tensor depends on a parameter, with or without a gradient."""
        return self.resolve(node) in self._learned

    def is_of_gradients(self, node: fx.Node) -> bool:
        """Check whether a tensor was made of gradients that a step has read from its parameters."""
        return self.resolve(node) in self._gradients

    def is_weight(self, node: fx.Node) -> bool:
        """Check whether a tensor is a parameter, or made of parameters alone (a normalized one)."""
        return self.is_learned(node) and self.resolve(node) not in self._of_data

    def note_size(self, node: fx.Node, value: object) -> None:
        """Remember the size of a factor or divisor of another tensor."""
        if isinstance(value, Tensor) and not value.is_complex() and value.numel() > 0:
            share = torch.count_nonzero(value).clamp(min=1) / value.numel()
            real = value if value.is_floating_point() else value.float()
            self._sizes[self.resolve(node)] = root_mean_square(real) / share.sqrt()

    def size(self, node: fx.Node) -> float | None:
        """Return the RMS of a tensor's nonzero entries, if it is not learned and was measured."""
        node = self.resolve(node)
        if node in self._learned or node not in self._sizes:
            return None
        return float(self._sizes[node])

    def root(self, node: fx.Node) -> fx.Node:
        """Return the origin of a tensor, through operations that only pass it on."""
        node = self.resolve(node)
        while (source := handed_on(node)) is not None:
            node = self.resolve(source)
        return node

    def parameter_of(self, node: fx.Node) -> str | None:
        """Return the path of the parameter whose elements the tensor has."""
        return parameter_path(self.root(node))

    def has_graph(self, graph: fx.Graph) -> bool:
        """Check whether a graph has been added."""
        return graph in self._graphs

    def first_capture(self, graph_module: fx.GraphModule) -> fx.GraphModule:
        """Return an earlier capture of the same graph, or the graph itself."""
        if self.has_graph(graph_module.graph):
            return graph_module
        same = (other for other in self._graphs.values() if is_same_graph(other, graph_module))
        return next(same, graph_module)

    def add_graph(self, graph_module: fx.GraphModule, links: Mapping[int, fx.Node]) -> None:
        """Append a graph."""
        self._graphs[graph_module.graph] = graph_module
        for position, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
            if position in links:
                self._same[node] = links[position]
        places = Places(StepGraph(graph_module, observed=False))
        for region, node in places.in_order():
            if (origin := places.origin(region, node)) is not node:
                self._same[node] = origin
            elif node.op != "output" and node not in self._same and not is_checkpoint(node):
                self._add_node(node)

    def _add_node(self, node: fx.Node) -> None:
        fqn = parameter_path(node)
        if fqn in self.parameters:
            self._same[node] = self.parameters[fqn]
            return
        self._order[node] = len(self.nodes)
        self.nodes.append(node)
        self.graph.add_node(node)
        if fqn is not None:
            self.parameters[fqn] = node
            self._learned.add(node)
        elif node.op == "placeholder":
            graph_input = node.meta.get(INPUT)
            kind = "input" if graph_input is None else graph_input.kind
            if kind == "gradient":
                self._gradients.add(node)
            if kind not in {"parameter", "buffer"}:
                self._of_data.add(node)
        if is_operation(node):
            sources = dict.fromkeys(self.sources(node))
            self.graph.add_edges_from((source, node) for source in sources)
            for source in () if takes_form_only(node) else sources:
                for marked in (self._gradients, self._of_data):
                    if source in marked:
                        marked.add(node)
                if source in self._learned and may_be_float(node):
                    self._learned.add(node)
