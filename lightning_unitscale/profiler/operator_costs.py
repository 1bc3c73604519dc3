"""What one ATen operator costs: floating-point operations of products, and bytes moved.

Works on anything that has the arguments of the operator: fake tensors in a dispatch mode, or the
``meta["val"]`` of the nodes of a graph that AOTAutograd traced (:func:`aten_node_costs`).

A multiplication with an addition counts as two operations. Only products are counted (matrix
products, convolutions, attention), as `torch.utils.flop_counter` does; what an elementwise
operation costs is the bytes that it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


@dataclass(frozen=True)
class OperatorCosts:
    """What one call of an operator costs.

    Attributes:
        flops: Floating-point operations of its products.
        bytes_moved: Bytes that it reads and writes; 0 for a view.
    """

    flops: int = 0
    bytes_moved: int = 0


def operator_costs(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> OperatorCosts:
    """Costs of ``function(*args, **kwargs)``, an ATen operator that returned ``result``."""
    return OperatorCosts(
        operator_flops(function, args, kwargs, result),
        operator_bytes_moved(function, (args, kwargs), result),
    )


def aten_node_costs(node: fx.Node) -> OperatorCosts:
    """Costs of a node of a graph at the level of ATen, whose values are in ``meta["val"]``.

    Sizes that are symbols count with the values they were traced with.
    """
    if node.op != "call_function":
        return OperatorCosts()
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
    return operator_costs(node.target, args, kwargs, node.meta.get("val"))


def operator_flops(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    """Floating-point operations of the products of one call; a multiply-add is two.

    References:
        The formulas of `torch.utils.flop_counter`, and those below for what it leaves out: the
        attention kernel of the CPU, products with vectors, grouped products, and the backward pass
        of a convolution in groups, which it counts once per group.
    """
    packet = getattr(function, "overloadpacket", function)
    own = _FORMULAS.get(packet)
    if own is not None:
        return int(own(args, kwargs, result))
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs, result = tree_map(_concrete, (tuple(args), dict(kwargs), result))
    return int(formula(*args, **kwargs, out_val=result))


def operator_bytes_moved(function: Any, inputs: Any, result: Any) -> int:
    """Bytes that one call reads and writes: each tensor once, what is broadcast in its own size."""
    if _is_view(function) or getattr(function, "overloadpacket", function) in _UNWRITTEN:
        return 0
    read = _distinct(one for one in tree_leaves(inputs) if isinstance(one, Tensor))
    written = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
    return sum(map(touched_bytes, [*read, *written]))


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of memory that reading the whole tensor touches: its elements, a broadcast one once."""
    strided = tensor.layout == torch.strided
    strides = tensor.stride() if strided else [1] * tensor.dim()
    sizes = [
        size
        for size, stride in zip(tensor.shape, strides, strict=True)
        if not (isinstance(stride, int) and stride == 0)
    ]
    return prod(map(int, sizes)) * tensor.element_size()


def _concrete(value: Any) -> Any:
    """A tensor as its shape in plain integers, which is all that the formulas look at."""
    return torch.Size(map(int, value.shape)) if isinstance(value, Tensor) else value


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(one): one for one in tensors}.values())


def _is_view(function: Any) -> bool:
    schema = getattr(function, "_schema", None)
    if schema is None:
        return getattr(function, "__name__", "") == "getitem"
    aliases = [one.alias_info for one in schema.arguments if one.alias_info is not None]
    return bool(aliases) and not any(one.is_write for one in aliases)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(map(int, value.shape))


def _matrix_vector(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    return 2 * prod(_shape(args[0]))


def _add_matrix_vector(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    return 2 * prod(_shape(args[1]))


def _grouped_product(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Rows of all groups times one matrix each, whichever of the two is cut into groups."""
    left, right = _shape(args[0]), _shape(args[1])
    if len(left) == 2 and len(right) == 2:  # the contracted dimension is cut
        return 2 * left[0] * left[1] * right[1]
    rows = prod(left[:-1])
    return 2 * rows * left[-1] * _shape(result)[-1]


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Two products, ``(..., S, E) (..., E, L)`` and ``(..., S, L) (..., L, Ev)``.

    A causal mask does not lower the count, as in torch's own formulas.
    """
    (*batch, length, depth), (*_, keys, _), (*_, value_depth) = map(_shape, args[:3])
    return 2 * prod(batch) * length * keys * (depth + value_depth)


def _attention_backward(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Five products: the scores anew, and the gradients of weights, query, key and value."""
    (*batch, length, depth), (*_, keys, _), (*_, value_depth) = map(_shape, args[1:4])
    return 2 * prod(batch) * length * keys * (3 * depth + 2 * value_depth)


def _convolution_backward(args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Each gradient takes as many operations as the forward pass."""
    grad, given, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    positions = _shape(given if transposed else grad)
    # The weight is (out, in / groups, *kernel), or (in, out / groups, *kernel) if transposed.
    once = 2 * positions[0] * prod(positions[2:]) * prod(_shape(weight))
    return once * (bool(mask[0]) + bool(mask[1]))


_Formula = Callable[[Sequence[Any], Mapping[str, Any], Any], int]


def _formulas() -> dict[Any, _Formula]:
    table: dict[str, _Formula] = {
        "mv": _matrix_vector,
        "dot": _matrix_vector,
        "vdot": _matrix_vector,
        "addmv": _add_matrix_vector,
        "addmv_": _add_matrix_vector,
        "_grouped_mm": _grouped_product,
        "convolution_backward": _convolution_backward,
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    }
    # Not every version of torch has them all.
    return {getattr(aten, name): one for name, one in table.items() if hasattr(aten, name)}


_FORMULAS = _formulas()

# Memory that is handed out and not written to.
_UNWRITTEN = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
)
