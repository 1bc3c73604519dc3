"""Find the tensors and the matmuls of a captured graph, also inside activation checkpoints.

A matmul is linear in each of its operands. Addends (a bias, the first argument of ``addmm``) are
added to it unscaled. A pass needs only this to change the units of operands. Every form has
a scale rule (``functional/rules.py``), except the few below.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.capture.aliasing import same_tensor
from lightning_unitscale.capture.decompose import attention_matmul
from lightning_unitscale.capture.graph_nodes import (
    INTERNAL,
    TRANSFORMED,
    Path,
    example_tensor,
    is_float_tensor,
    is_whole_view,
    op_name,
    tensor_name,
)
from lightning_unitscale.capture.passes import Region, StepGraph
from lightning_unitscale.functional.rules import (
    ScaleRule,
    matmul_names,
    rule_of_function,
    rule_of_method,
)

# A note on a graph: names of the tensors that its matmuls read, and of those that they make.
MATMULS = "matmuls"


class Roles(NamedTuple):
    """Roles of a matmul's parameters if it has no :class:`ScaleRule`."""

    parameters: tuple[str, ...]
    operands: tuple[str, ...]
    addends: tuple[str, ...] = ()
    is_variadic: bool = False


@dataclass(frozen=True)
class Operand:
    """One tensor argument of a matmul: its position and its name."""

    role: str
    path: Path
    node: fx.Node


@dataclass(frozen=True)
class MatmulNode:
    """A node that is a matmul, with its operands and addends."""

    node: fx.Node
    operands: tuple[Operand, ...]
    addends: tuple[Operand, ...]


_WEIGHTED = Roles(("input", "weight", "bias"), ("input", "weight"), ("bias",))
_GROUPED = Roles(("mat_a", "mat_b"), ("mat_a", "mat_b"), ("bias",))
_ROLES: dict[Any, Roles] = {
    torch.convolution: _WEIGHTED,
    torch.conv_tbc: _WEIGHTED,
    getattr(torch, "_grouped_mm", None): _GROUPED,
    getattr(F, "grouped_mm", None): _GROUPED,
}
_ROLES.pop(None, None)
# Operators of other libraries, known by name because the libraries may not be installed.
_CUSTOM_OPERATORS = {
    # transformers 5 uses it for a mixture of experts if torch has no grouped matmul.
    "transformers.grouped_mm_fallback": Roles(("input", "weight"), ("input", "weight")),
}
# Keyed by the name of torch's operation, if it is a separate function.
_SAME: dict[Any, Any] = {attention_matmul: torch.matmul, "__rmatmul__": "__matmul__"}

_NAMES = matmul_names() | {"attention_matmul", "rmatmul", "convolution", "conv_tbc", "grouped_mm"}
# Names of matmuls in the names of their results. An aten operator has its overload there.
MATMUL_WORDS = frozenset(
    name.strip("_") + overload for name in _NAMES for overload in ("", ".default")
)


def _roles_of(target: Any) -> ScaleRule | Roles | None:
    """Return the roles of the parameters of a function, a method's name, or an aten operator."""
    if hasattr(target, "overloadpacket") or hasattr(target, "overloads"):
        # Dynamo keeps an operator without its overload as the user called it.
        namespace, name, *overload = str(target).split(".")
        if overload not in ([], ["default"]):
            return None
        if (custom := _CUSTOM_OPERATORS.get(f"{namespace}.{name}")) is not None:
            return custom
        if namespace != "aten":
            return None
        target = getattr(torch, name, None) or getattr(F, name, None)
    try:
        target = _SAME.get(target, target)
        found = _ROLES.get(target)
    except TypeError:  # an unhashable callable is not in our tables
        return None
    if found is not None:
        return found
    rule = rule_of_method(target) if isinstance(target, str) else rule_of_function(target)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__")
    return None if rule is None or not rule.operands or writes else rule


def matmul_of(node: fx.Node) -> MatmulNode | None:
    """Describe a node that is a matmul of real floating-point tensors."""
    is_call = node.op in ("call_function", "call_method")
    rule = _roles_of(node.target) if is_call else None
    if rule is None or TRANSFORMED in node.meta:
        return None
    if node.kwargs.get("out") is not None or not is_float_tensor(node):
        return None
    operands = tuple(operand for name in rule.operands for operand in _tensors(node, rule, name))
    if len(operands) < 2 or not all(is_float_tensor(operand.node) for operand in operands):
        return None
    addends = tuple(operand for name in rule.addends for operand in _tensors(node, rule, name))
    if not all(is_float_tensor(operand.node) for operand in addends):
        return None
    return MatmulNode(node, operands, addends)


def operands_of_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors that a torch function multiplies, or none if it is not a matmul."""
    rule = _roles_of(function) or _roles_of(getattr(function, "__name__", ""))
    if rule is None:
        return []
    values = (value for name in rule.operands for *_, value in _arguments(args, kwargs, rule, name))
    return [value for value in values if isinstance(value, Tensor)]


def _tensors(node: fx.Node, rule: ScaleRule | Roles, name: str) -> Iterator[Operand]:
    for role, path, value in _arguments(node.args, node.kwargs, rule, name):
        if isinstance(value, fx.Node):
            yield Operand(role, path, value)


def _arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], rule: ScaleRule | Roles, name: str
) -> Iterator[tuple[str, Path, Any]]:
    """Yield the role, path and value of each argument for a parameter, or of each list item."""
    if name in kwargs:
        path: Path = (name,)
        value: Any = kwargs[name]
    else:
        position = rule.parameters.index(name) if name in rule.parameters else len(args)
        if position >= len(args):
            return
        path, value = (position,), args[position]
        is_list = isinstance(value, (list, tuple))
        if rule.is_variadic and name == rule.parameters[-1] and not is_list:
            for index, item in enumerate(args[position:]):
                yield f"operand{index}", (position + index,), item
            return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"operand{index}", (*path, index), item
    else:
        yield name, path, value


class Place(NamedTuple):
    """Node and the graph, or the body of a checkpoint, that contains it."""

    region: Region
    node: fx.Node


class Places:
    """All places of a graph, in the order in which they run."""

    def __init__(self, graph: StepGraph) -> None:
        # The graph and, after it, the bodies of its checkpoints at any depth.
        self.regions = list(graph.regions())
        # The bodies, by the node that calls them.
        self.bodies = {region.call: region for region in self.regions if region.call is not None}

    def in_order(self, region: Region | None = None) -> Iterator[Place]:
        """Yield every node, those of a checkpoint before the node that calls it."""
        region = region or self.regions[0]
        for node in region.graph.nodes:
            if node in self.bodies:
                yield from self.in_order(self.bodies[node])
            yield Place(region, node)

    def probeable(self) -> list[Place]:
        """Return the places of ordinary float tensors of the user's step, each tensor once."""
        nodes = {node for region in self.regions for node in probeable_nodes(region)}
        places = list(self.in_order())
        # By name, since a rewrite may have replaced the tensor by a scaled one.
        again = {meant_name(node) for _, node in places if is_of_checkpoint(node, self.bodies)}
        return [
            place
            for place in places
            if place.node in nodes and tensor_name(place.node) not in again
        ]

    def origin(self, region: Region, node: fx.Node) -> fx.Node:
        """Return the node that made the tensor, across the borders of checkpoints."""
        if is_of_checkpoint(node, self.bodies):
            call, index = node.args
            body = self.bodies[call]  # type: ignore[index]
            result = returned_by(body.graph.output_node())[index]  # type: ignore[index]
            return self.origin(body, result) if isinstance(result, fx.Node) else node
        if region.parent is None or region.call is None or node.op != "placeholder":
            return node
        position = region.graph.find_nodes(op="placeholder").index(node)
        argument = region.call.args[1 + position]
        return self.origin(region.parent, argument) if isinstance(argument, fx.Node) else node

    def inputs_of(self, probed: Sequence[Place]) -> dict[str, tuple[str, ...]]:
        """Map every probed tensor to the probed ones that it is computed from."""
        inputs: dict[str, _Names] = {tensor_name(place.node): {} for place in probed}
        sources = self._sources(inputs)
        for region, node in self.in_order():
            name = meant_name(node)
            if name in inputs and node.op != "output" and self.origin(region, node) is node:
                inputs[name].update(_read(node, sources))
        for name, read in inputs.items():
            read.pop(name, None)
        return {name: tuple(read) for name, read in inputs.items()}

    def operands_and_matmuls(self) -> tuple[set[str], set[str]]:
        """Return the names of tensors that matmuls read, even through views, and compute."""
        # From the graph as captured, since a pass may replace matmuls by its own functions.
        tensors = (node for _, node in self.probeable() if not is_whole_view(node))
        sources = self._sources({tensor_name(node) for node in tensors})
        matmuls = [matmul for _, node in self.in_order() if (matmul := matmul_of(node))]
        operands = [operand.node for matmul in matmuls for operand in matmul.operands]
        return (
            {name for operand in operands for name in sources[operand]},
            {tensor_name(matmul.node) for matmul in matmuls},
        )

    def _sources(self, known: Container[str]) -> dict[fx.Node, _Names]:
        """Map every node to the nearest known tensors that it is or is computed from."""
        sources: dict[fx.Node, _Names] = {}
        for region, node in self.in_order():
            origin, name = self.origin(region, node), meant_name(node)
            if origin is not node:
                sources[node] = sources[origin]
            else:
                sources[node] = {name: None} if name in known else _read(node, sources)
        return sources

    def bring_out(self, probed: Sequence[Place], rows: Sequence[fx.Node]) -> list[fx.Node]:
        """Pass rows made in checkpoints on as outputs, up to the outermost graph."""
        brought = list(rows)
        region_of = [id(region) for region, _ in probed]
        for region in reversed(self.regions):
            own = [index for index, region_id in enumerate(region_of) if region_id == id(region)]
            if region.parent is None or region.call is None or not own:
                continue
            output = region.graph.output_node()
            outputs = returned_by(output)
            output.args = ((*outputs, *(brought[index] for index in own)),)
            around = region.parent.graph
            for offset, index in enumerate(own, start=len(outputs)):
                with around.inserting_after(region.call):
                    brought[index] = around.call_function(operator.getitem, (region.call, offset))
                region_of[index] = id(region.parent)
        return brought


_Names = dict[str, None]  # an ordered set


def _read(node: fx.Node, sources: Mapping[fx.Node, _Names]) -> _Names:
    return {name: None for read in node.all_input_nodes for name in sources[read]}


def probeable_nodes(region: Region) -> list[fx.Node]:
    """Return nodes that make an ordinary float tensor of the user's step, in graph order."""
    # Left out: nodes that passes inserted; arguments returned unchanged, which are another node's
    # tensor; nodes inside a ``vmap`` or ``grad`` transform, where tensors are wrapped; and inputs
    # of a checkpoint's body, which are tensors of the graph around it.
    nodes, depth = [], 0
    for node in region.graph.nodes:
        name = op_name(node)
        depth += ("increment_nesting" in name) - ("decrement_nesting" in name)
        if depth or node.op not in {"placeholder", "call_function", "call_method", "get_attr"}:
            continue
        if node.op == "placeholder" and region.parent is not None:
            continue
        if node.meta.get(INTERNAL) or not is_float_tensor(node):
            continue
        if same_tensor(node) is not None:
            continue
        example = example_tensor(node)
        if example is not None and example.layout == torch.strided and not example.is_nested:
            nodes.append(node)
    return nodes


def is_of_checkpoint(node: fx.Node, checkpoints: Mapping[fx.Node, Any]) -> bool:
    """Check whether the node is a result of a checkpoint, made by a node of its body."""
    return (
        node.op == "call_function"
        and node.target is operator.getitem
        and (node.args[0] in checkpoints)
    )


def meant_name(node: fx.Node) -> str:
    """Return the name of the tensor that a node makes, without the suffix for its units."""
    # Before a gauge or rules change its units, a tensor has its name and a suffix.
    return tensor_name(node).partition(":")[0]


def returned_by(output: fx.Node) -> tuple[Any, ...]:
    """Return the outputs of a graph."""
    (returned,) = output.args
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
