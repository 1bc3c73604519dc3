"""Which products of a graph are linear layers that FP8 hardware can run, and why others are not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from lightning_unitscale.functional.scaled_product import MULTIPLE
from lightning_unitscale.graph.nodes import (
    INPUT,
    example_tensor,
    is_whole_view,
    op_name,
)
from lightning_unitscale.graph.products import Operand, Product

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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
    """The product as a linear layer: ``F.linear``, or a 2-D parameter as the second matrix.

    Returns:
        ``None`` for a product of two activations, a convolution, an attention.
    """
    node = product.node
    roles = tuple(one.role for one in product.operands)
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


def why_not_fp8(linear: Linear) -> str | None:
    """What about a linear layer FP8 cannot do, or ``None`` if it can."""
    node = linear.product.node
    tensors = [example_tensor(one) for one in (linear.input.node, linear.weight.node, node)]
    for tensor in tensors:
        if tensor is None or tensor.dtype not in _DTYPES:
            return f"made of {'no tensor' if tensor is None else tensor.dtype}"
    read, weight, _ = tensors
    assert read is not None and weight is not None
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions, not 2"
    if read.dim() == 0:
        return "its input is a number"
    for name in ("beta", "alpha"):
        if node.kwargs.get(name, 1) != 1:
            return f"it has {name}={node.kwargs[name]}"
    num_inputs, num_outputs = weight.shape if linear.is_turned else weight.shape[::-1]
    for name, size in (("input", num_inputs), ("output", num_outputs)):
        if not isinstance(size, int):
            return f"its number of {name} features is not fixed"
        if size % MULTIPLE or size == 0:
            return f"its {size} {name} features are no multiple of {MULTIPLE}"
    return None


def _is_parameter(node: fx.Node) -> bool:
    """Whether a node is a parameter, in other units, another type or another arrangement."""
    while is_whole_view(node) or op_name(node) in _KEEPS_PARAMETER:
        if not node.args or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    described = node.meta.get(INPUT)
    return described is not None and described.kind == "parameter"
