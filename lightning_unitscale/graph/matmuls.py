"""Every form in which a graph can hold a matrix product, and the roles of its arguments.

A product is linear in each of its operands; addends (a bias, the first argument of ``addmm``) are
added to it as they are. That is all a pass needs in order to change the units of the operands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.graph.decompose import attention_product
from lightning_unitscale.graph.nodes import TRANSFORMED, Path, is_float_tensor


@dataclass(frozen=True)
class ProductRule:
    """Where one kind of product has its operands.

    Attributes:
        parameters: Names of the leading positional parameters, in order.
        operands: Parameters in which the product is linear; a list of tensors counts each one.
        addends: Parameters that are added to the product.
        fused_attention: Whether the first two operands meet inside a softmax, whose temperature
            (the ``scale`` argument) must take up their units.
    """

    parameters: tuple[str, ...]
    operands: tuple[str, ...]
    addends: tuple[str, ...] = ()
    fused_attention: bool = False


@dataclass(frozen=True)
class Operand:
    """One tensor argument of a product: where it stands, and what it is called."""

    role: str
    path: Path
    node: fx.Node


@dataclass(frozen=True)
class Product:
    """A matrix product of a graph with its operands and addends."""

    node: fx.Node
    rule: ProductRule
    operands: tuple[Operand, ...]
    addends: tuple[Operand, ...]


# Products by the names that torch has for them, as functions, methods and operators: parameters,
# operands and addends.
_BY_NAME = (
    ("linear convolution conv_tbc", "input weight bias", "input weight", "bias"),
    ("conv1d conv2d conv3d", "input weight bias", "input weight", "bias"),
    ("conv_transpose1d conv_transpose2d", "input weight bias", "input weight", "bias"),
    ("conv_transpose3d", "input weight bias", "input weight", "bias"),
    ("bilinear", "input1 input2 weight bias", "input1 input2 weight", "bias"),
    ("matmul __matmul__ __rmatmul__ inner", "input other", "input other", ""),
    ("mm bmm", "input mat2", "input mat2", ""),
    ("mv", "input vec", "input vec", ""),
    ("dot", "input tensor", "input tensor", ""),
    ("addmm", "input mat1 mat2", "mat1 mat2", "input"),
    ("baddbmm addbmm", "input batch1 batch2", "batch1 batch2", "input"),
    ("addmv", "input mat vec", "mat vec", "input"),
    ("grouped_mm _grouped_mm", "mat_a mat_b", "mat_a mat_b", "bias"),
    ("tensordot", "a b", "a b", ""),
    ("einsum", "equation operands", "operands", ""),
    ("chain_matmul", "operands", "operands", ""),
    ("multi_dot", "tensors", "tensors", ""),
)
_ATTENTION = ProductRule(
    ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
    ("query", "key", "value"),
    fused_attention=True,
)

_METHODS: dict[str, ProductRule] = {}
_FUNCTIONS: dict[Any, ProductRule] = {F.scaled_dot_product_attention: _ATTENTION}
for _names, _parameters, _operands, _addends in _BY_NAME:
    _rule = ProductRule(
        tuple(_parameters.split()), tuple(_operands.split()), tuple(_addends.split())
    )
    for _name in _names.split():
        for _scope in (torch, F, torch.linalg, operator):
            if hasattr(_scope, _name):
                _FUNCTIONS[getattr(_scope, _name)] = _rule
        if hasattr(Tensor, _name):
            _METHODS[_name] = _rule
        if hasattr(getattr(torch.ops.aten, _name, None), "default"):
            _FUNCTIONS[getattr(torch.ops.aten, _name).default] = _rule
_FUNCTIONS[attention_product] = _FUNCTIONS[torch.matmul]

# What products are called in the names of their results.
PRODUCT_WORDS = frozenset(
    name.strip("_") for name in (*_METHODS, *(function.__name__ for function in _FUNCTIONS))
)

# Operators of other libraries, known by name because those libraries may not be there.
_CUSTOM_OPERATORS: dict[str, ProductRule] = {
    # What transformers 5 runs a mixture of experts with where torch has no grouped product.
    "transformers.grouped_mm_fallback": ProductRule(("input", "weight"), ("input", "weight")),
}

# Why no factor can reach the operands of a product, or it writes into a tensor of the user's.
DISTANCES = "a kernel of distances"
RECURRENT = "a recurrent kernel, whose products are inside of it"
FUSED = "a fused inference kernel, whose products are inside of it"


def rule_of(node: fx.Node) -> ProductRule | None:
    """The product rule of a node, or ``None`` when it is no matrix product."""
    if node.op == "call_function":
        try:
            rule = _FUNCTIONS.get(node.target)
        except TypeError:  # an unhashable callable is none of ours
            return None
        return rule or _CUSTOM_OPERATORS.get(str(node.target).removesuffix(".default"))
    if node.op == "call_method":
        return _METHODS.get(str(node.target))
    return None


def product_of(node: fx.Node) -> Product | None:
    """Describe a node that is a product of real floating-point tensors."""
    rule = rule_of(node)
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
    return Product(node, rule, operands, addends)


def operands_of_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """The tensors that a function of torch multiplies; none if it is no matrix product."""
    try:
        rule = _FUNCTIONS.get(function)
    except TypeError:  # an unhashable callable is none of ours
        return []
    rule = rule or _METHODS.get(getattr(function, "__name__", ""))
    if rule is None:
        return []
    values = (value for name in rule.operands for *_, value in _arguments(args, kwargs, rule, name))
    return [value for value in values if isinstance(value, Tensor)]


def _tensors(node: fx.Node, rule: ProductRule, name: str) -> Iterator[Operand]:
    for role, path, value in _arguments(node.args, node.kwargs, rule, name):
        if isinstance(value, fx.Node):
            yield Operand(role, path, value)


def _arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], rule: ProductRule, name: str
) -> Iterator[tuple[str, Path, Any]]:
    """What a product is given for a parameter: role, path and value; of a list each item."""
    if name in kwargs:
        path: Path = (name,)
        value: Any = kwargs[name]
    else:
        position = rule.parameters.index(name) if name in rule.parameters else len(args)
        if position >= len(args):
            return
        path, value = (position,), args[position]
        variadic = name == rule.parameters[-1] == "operands" and not isinstance(
            value, (list, tuple)
        )
        if variadic:
            for index, item in enumerate(args[position:]):
                yield f"operand{index}", (position + index,), item
            return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield f"operand{index}", (*path, index), item
    else:
        yield name, path, value
