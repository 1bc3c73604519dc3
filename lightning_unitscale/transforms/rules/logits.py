"""The way from a product to the softmax that reads it, through scaling and masking."""

from __future__ import annotations

from typing import Any

from torch import fx

from lightning_unitscale.graph.nodes import example_tensor, is_float_tensor, op_name
from lightning_unitscale.graph.products import product_of
from lightning_unitscale.transforms.rules.flow import Flow, handed_on, is_operation, is_softmax

# Steps that are followed: scaling, a bias, a mask, a soft cap, casts and views.
_MAX_STEPS = 24
_MASKING = frozenset({"masked_fill", "where", "add", "iadd", "sub", "clamp", "max", "tanh"})
_DIVISIONS = frozenset({"truediv", "div", "itruediv", "divide"})
_PRODUCTS = frozenset({"mul", "rmul", "imul", "multiply"})


def times_number(node: fx.Node) -> fx.Node | None:
    """The tensor that the node multiplies by, or divides by, a Python number."""
    if not is_operation(node) or op_name(node) not in _DIVISIONS | _PRODUCTS:
        return None
    values = _multiplied(node)
    tensors = [one for one in values if isinstance(one, fx.Node) and is_float_tensor(one)]
    numbers = [one for one in values if isinstance(one, (int, float))]
    if len(tensors) != 1 or len(numbers) != 1 or len(node.args) + len(node.kwargs) != 2:
        return None
    if op_name(node) in _DIVISIONS and values[0] is not tensors[0]:
        return None
    return tensors[0]


def number_of(node: fx.Node) -> float:
    """The factor of a node for which :func:`times_number` found a tensor."""
    number = abs(float(next(one for one in _multiplied(node) if isinstance(one, (int, float)))))
    if op_name(node) in _DIVISIONS:
        return 1 / number if number else float("inf")
    return number


def _multiplied(node: fx.Node) -> tuple[Any, ...]:
    """Both sides of a product or a quotient, by position or by name."""
    return (*node.args, *(node.kwargs[one] for one in ("input", "other") if one in node.kwargs))


def logit_factor(flow: Flow, node: fx.Node) -> float | None:
    """What a tensor is multiplied by on its way to a softmax; ``None`` if it is on no such way."""
    factor = 1.0
    current = node
    for _ in range(_MAX_STEPS):
        readers = [one for one in flow.readers(current) if _makes_floats(one)]
        if any(is_softmax(one) for one in readers):
            return factor
        step = next((one for one in readers if _leads_on(flow, current, one)), None)
        if step is None:
            return None
        if times_number(step) is not None:
            factor *= number_of(step)
        current = step
    return None


def _leads_on(flow: Flow, node: fx.Node, reader: fx.Node) -> bool:
    source = handed_on(reader)
    if source is not None:
        return flow.resolve(source) is flow.resolve(node)
    return times_number(reader) is not None or (
        op_name(reader) in _MASKING and product_of(reader) is None
    )


def _makes_floats(node: fx.Node) -> bool:
    return is_float_tensor(node) or example_tensor(node) is None
