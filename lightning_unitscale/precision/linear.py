"""Products that are linear layers, and the node of one rewritten to run in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from lightning_unitscale.functional.low_precision import Scaling, fp8_linear
from lightning_unitscale.functional.scale import change_gradient_units, change_units
from lightning_unitscale.graph.matmuls import Operand, Product
from lightning_unitscale.graph.nodes import (
    INPUT,
    INTERNAL,
    MODULE,
    argument_at,
    example_tensor,
    is_whole_view,
    op_name,
)
from lightning_unitscale.graph.passes import Region

# Roles of the two operands by the kind of product, and whether the weight is (k, n), not (n, k).
_FORMS = {
    ("input", "weight"): False,
    ("input", "other"): True,
    ("input", "mat2"): True,
    ("mat1", "mat2"): True,
}
_LINEAR = "linear"
_KEEPS_PARAMETER = {"scale", "scale_bwd", "mul", "to", "float", "bfloat16", "half", "type"}
_KEEPS_PARAMETER |= {"change_units", "change_gradient_units"}


@dataclass(frozen=True)
class Linear:
    """A product that is a linear layer.

    Attributes:
        product: The product.
        input: The operand of shape ``(..., k)``.
        weight: The 2-D operand.
        bias: What is added, if anything is.
        is_turned: Whether the weight has shape ``(k, n)``.
    """

    product: Product
    input: Operand
    weight: Operand
    bias: Operand | None
    is_turned: bool


def linear_of(product: Product) -> Linear | None:
    """The product as a linear layer: ``F.linear``, or a 2-D parameter as the second matrix."""
    node = product.node
    roles = tuple(operand.role for operand in product.operands)
    if len(roles) != 2 or roles not in _FORMS or op_name(node) == "rmatmul":
        return None
    first, second = product.operands
    if op_name(node) != _LINEAR:
        is_matrix = (weight := example_tensor(second.node)) is not None and weight.dim() == 2
        # A convolution has an input and a weight too, and its weight is a parameter.
        if not _FORMS[roles] or not is_matrix or not _is_parameter(second.node):
            return None
    bias = product.addends[0] if product.addends else None
    return Linear(product, first, second, bias, _FORMS[roles])


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node is a parameter, in other units, another type or another arrangement."""
    while is_whole_view(node) or op_name(node) in _KEEPS_PARAMETER:
        if not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    described = node.meta.get(INPUT)
    return described is not None and described.kind == "parameter"


# A factor in a graph: a number, or a node that makes a 0-d tensor.
_Factor = float | fx.Node


def rewrite_linear(
    region: Region,
    linear: Linear,
    scaling: Scaling,
    takes_units_in: bool,
    options: dict[str, Any],
) -> None:
    """Let the node of the product run in FP8."""
    graph, node = region.graph, linear.product.node
    paths = [operand.path for operand in (linear.input, linear.weight)]
    bias = None if linear.bias is None else argument_at(node, linear.bias.path)
    input, weight = (argument_at(node, path) for path in paths)
    factors: tuple[_Factor, ...] = (1.0,) * 6
    result = None
    if scaling == "constant" and takes_units_in:
        input, of_input, of_grad_input = _source(node, linear.input.path)
        weight, of_weight, of_grad_weight = _source(node, linear.weight.path)
        result = _result(node)
        of_result, of_gradient = (1.0, 1.0) if result is None else _factors(result)
        if result is not None and bias is not None:
            # It is added after the result's change of units, which it has to go through as well.
            with graph.inserting_before(node):
                bias = _inner(graph.create_node(*_same_change(result, bias)), bias, node)
        factors = (of_input, of_weight, of_result, of_gradient, of_grad_input, of_grad_weight)
    if linear.is_turned:
        with graph.inserting_before(node):
            weight = _inner(graph.call_method("t", (weight,)), weight, node)
        weight.meta["example_value"] = weight.meta["example_value"].t()
    if result is not None:
        # The tensor that is shown is the one in true units, which the node makes now.
        node.meta.pop(INTERNAL, None)
        node.meta.update(result.meta)
        result.replace_all_uses_with(node)
    read = list(node.all_input_nodes)
    node.op, node.target, node.kwargs = "call_function", fp8_linear, options
    node.args = (input, weight, bias, scaling, node.meta["example_value"].dtype, *factors)
    for change in (*([] if result is None else [result]), *read):
        if not change.users and _is_change_of_units(change):
            graph.erase_node(change)


def _source(node: fx.Node, path: tuple[int | str, ...]) -> tuple[fx.Node, _Factor, _Factor]:
    """What an argument is made of, and by which factors, if only this node reads it."""
    argument: fx.Node = argument_at(node, path)
    source = argument.args[0] if argument.args else None
    alone = set(argument.users) == {node}
    if not alone or not _is_change_of_units(argument) or not isinstance(source, fx.Node):
        return argument, 1.0, 1.0
    return source, *_factors(argument)


def _result(node: fx.Node) -> fx.Node | None:
    """The change of units of the node's result, if it is the only reader of the result."""
    users = list(node.users)
    only = users[0] if len(users) == 1 else None
    if only is None or not _is_change_of_units(only) or only.args[0] is not node:
        return None
    return only


def _is_change_of_units(node: fx.Node) -> bool:
    """Whether the node changes units of the gauge, whose factors are nodes: powers of two."""
    is_change = node.op == "call_function" and node.target in (change_units, change_gradient_units)
    return is_change and all(isinstance(factor, fx.Node) for factor in node.args)


def _same_change(change: fx.Node, source: fx.Node) -> tuple[str, Any, tuple[Any, ...]]:
    """What makes a node that changes the units of ``source`` as ``change`` does."""
    return change.op, change.target, (source, *change.args[1:])


def _inner(node: fx.Node, source: fx.Node, product: fx.Node) -> fx.Node:
    """A node that users are not shown, described like its source."""
    node.meta["example_value"] = source.meta["example_value"]
    node.meta[MODULE] = product.meta.get(MODULE, "")
    node.meta[INTERNAL] = True
    return node


def _factors(change: fx.Node) -> tuple[_Factor, _Factor]:
    """Factors forward and backward of a change of units."""
    forward, backward = change.args[1:] if change.target is change_units else (1.0, change.args[1])
    return forward, backward  # type: ignore[return-value]
