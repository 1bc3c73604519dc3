"""Scale rules of matrix products in every form: matmul, addmm, einsum, tensordot, chains.

All are sums over an index space: the output sums over the indices that it does not have, and the
gradient of each operand over the indices that the operand does not have. Sums of N independent
products of unit variance have variance N.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors, matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lightning_unitscale.functional.call import scaled_op
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    broadcast,
    numel_of,
    product,
    register_rule,
    shape_of,
    unit_factors,
)

__all__ = [
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "einsum", "inner", "matmul", "mm",
    "multi_dot", "mv", "outer", "tensordot",
]  # fmt: skip

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops, matmul; any index space alike"


def _contraction(
    terms: float, index_space: float, operands: Mapping[str, Any], mult: float = 1.0
) -> Factors:
    """Factors of a product."""
    squares = {
        name: mult**2 * index_space / max(numel_of(operand), 1)
        for name, operand in operands.items()
    }
    return unit_factors(mult**2 * terms, **squares)


def _matmul_of(left: str, right: str) -> Any:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b = arguments[left], arguments[right]
        inner = shape_of(a)[-1]
        space = inner * _matmul_numel(shape_of(a), shape_of(b))
        return _contraction(inner, space, {left: a, right: b}, arguments.get("mult", 1.0))

    return factors


def _matmul_numel(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Number of elements of a product, with its batch dimensions broadcast."""
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return product(broadcast(left[:-2], right[:-2])) * rows * columns


def _added_product_of(left: str, right: str, *, is_summed_over_batch: bool = False) -> Any:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b, addend = arguments[left], arguments[right], arguments["input"]
        mult = arguments.get("mult", 1.0)
        alpha, beta = float(arguments.get("alpha", 1)), float(arguments.get("beta", 1))
        a_shape, b_shape = shape_of(a), shape_of(b)
        terms = float(a_shape[-1])
        out = _matmul_numel(a_shape, b_shape)
        index_space = terms * out
        if is_summed_over_batch:
            terms, out = terms * a_shape[0], out / max(a_shape[0], 1)
        # A bias is 0 at the start, and small beside the product later; a whole tensor is not.
        is_bias = numel_of(addend) != out or len(b_shape) < 2
        square = alpha**2 * terms + (0.0 if is_bias else (beta * mult) ** 2)
        squares = {
            "input": (beta * mult) ** 2 * out / max(numel_of(addend), 1),
            left: alpha**2 * index_space / max(numel_of(a), 1),
            right: alpha**2 * index_space / max(numel_of(b), 1),
        }
        return unit_factors(square, **squares)

    return factors


def _inner(arguments: Mapping[str, Any]) -> Factors:
    a, b = arguments["input"], arguments["other"]
    inner = shape_of(a)[-1] if shape_of(a) else 1
    space = numel_of(a) * numel_of(b) / max(inner, 1)
    return _contraction(inner, space, {"input": a, "other": b}, arguments.get("mult", 1.0))


def _outer(arguments: Mapping[str, Any]) -> Factors:
    a, b = arguments["input"], arguments["vec2"]
    space = numel_of(a) * numel_of(b)
    return _contraction(1, space, {"input": a, "vec2": b}, arguments.get("mult", 1.0))


def _tensordot(arguments: Mapping[str, Any]) -> Factors:
    a, b, dims = arguments["a"], arguments["b"], arguments.get("dims", 2)
    sizes = shape_of(a)
    if isinstance(dims, int):
        contracted = sizes[len(sizes) - dims :]
    else:
        contracted = tuple([sizes[int(dim)] for dim in dims[0]])
    terms = product(contracted)
    space = numel_of(a) * numel_of(b) / max(terms, 1)
    return _contraction(terms, space, {"a": a, "b": b}, arguments.get("mult", 1.0))


def _einsum(arguments: Mapping[str, Any]) -> Factors:
    equation, operands = arguments["equation"], arguments["operands"]
    names = [f"operands.{index}" for index in range(len(operands))]
    if not isinstance(equation, str):  # einsum(op1, [0, 1], op2, [1, 2], [0, 2])
        equation, operands = _from_sublists([equation, *operands])
        names = ["equation", *names[1::2]]
    inputs, output = _subscripts(equation, [len(shape_of(operand)) for operand in operands])
    sizes: dict[Any, int] = {}
    for labels, operand in zip(inputs, operands, strict=True):
        for label, size in zip(labels, shape_of(operand), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    mult = arguments.get("mult", 1.0)
    space = product(sizes.values())
    numel = product([sizes[label] for label in set(output)])
    squares = {}
    for name, labels in zip(names, inputs, strict=False):  # a last sublist is the output
        own = product([sizes[label] for label in set(labels)])
        squares[name] = mult**2 * space / max(own, 1)
    return unit_factors(mult**2 * space / max(numel, 1), **squares)


def _from_sublists(items: list[Any]) -> tuple[str, list[Any]]:
    """The equation of ``einsum(op1, sublist1, op2, sublist2, ..., [sublist_out])``."""

    def letters(sublist: Any) -> str:
        return "".join(["..." if i is Ellipsis else chr(ord("A") + int(i)) for i in sublist])

    operands, parts = items[0 : len(items) // 2 * 2 : 2], items[1::2]
    left = ",".join([letters(part) for part in parts])
    return (f"{left}->{letters(items[-1])}" if len(items) % 2 else left), operands


def _subscripts(equation: str, dims: list[int]) -> tuple[list[list[Any]], list[Any]]:
    """Labels of each operand and of the output; those of an ellipsis are numbers from the right."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    longest = 0
    inputs = []
    for term, dim in zip(terms, dims, strict=True):
        before, dots, after = term.partition("...")
        hidden = dim - len(before) - len(after) if dots else 0
        longest = max(longest, hidden)
        inputs.append([*before, *range(hidden - 1, -1, -1), *after])
    hidden_labels: list[Any] = list(range(longest - 1, -1, -1))
    if arrow:
        before, dots, after = right.partition("...")
        return inputs, [*before, *(hidden_labels if dots else []), *after]
    letters = left.replace(",", "").replace("...", "")
    once = sorted({letter for letter in letters if letters.count(letter) == 1})
    return inputs, [*hidden_labels, *once]


def _chain(arguments: Mapping[str, Any]) -> Factors:
    (name,) = [name for name in ("matrices", "tensors") if name in arguments]
    matrices = arguments[name]
    shapes = [shape_of(matrix) for matrix in matrices]
    first = shapes[0] if len(shapes[0]) > 1 else (1, *shapes[0])
    last = shapes[-1] if len(shapes[-1]) > 1 else (*shapes[-1], 1)
    sizes = [first[0], *[shape[0] for shape in shapes[1:]], last[-1]]
    operands = {f"{name}.{index}": matrix for index, matrix in enumerate(matrices)}
    mult = arguments.get("mult", 1.0)
    return _contraction(product(sizes[1:-1]), product(sizes), operands, mult)


_product = partial(scaled_op, kind="linear", reference=_REFERENCE)


def _of_two(function: Callable[..., Any], left: str, right: str, aliases: str = "") -> Any:
    return _product(
        function,
        _matmul_of(left, right),
        parameters=f"{left}, {right}",
        operands=f"{left} {right}",
        aliases=aliases,
    )


matmul = _of_two(torch.matmul, "input", "other", "__matmul__ imatmul")
mm = _of_two(torch.mm, "input", "mat2")
bmm = _of_two(torch.bmm, "input", "mat2")
mv = _of_two(torch.mv, "input", "vec")
dot = _of_two(torch.dot, "input", "tensor", "vdot")
inner = _product(torch.inner, _inner, parameters="input, other", operands="input other")
outer = _product(torch.outer, _outer, parameters="input, vec2", aliases="ger")
tensordot = _product(torch.tensordot, _tensordot, operands="a b")
einsum = _product(torch.einsum, _einsum, parameters="equation, *operands", operands="operands")
multi_dot = _product(
    torch.linalg.multi_dot, _chain, parameters="tensors", operands="tensors", name="multi_dot"
)
_MATRICES = ("matrices",)
register_rule(
    ScaleRule(
        "chain_matmul", _MATRICES, _chain, "linear", _REFERENCE, (), True, operands=_MATRICES
    ),
    torch.chain_matmul,
)

_ADDED = f"{_REFERENCE}; a whole tensor that is added counts as one more term, a bias as none"


def _added_to(function: Callable[..., Any], left: str, right: str) -> Any:
    factors = _added_product_of(left, right, is_summed_over_batch=function is torch.addbmm)
    return _product(
        function,
        factors,
        reference=_ADDED,
        parameters=f"input, {left}, {right}",
        weights="input",
        operands=f"{left} {right}",
    )


addmm = _added_to(torch.addmm, "mat1", "mat2")
addmv = _added_to(torch.addmv, "mat", "vec")
baddbmm = _added_to(torch.baddbmm, "batch1", "batch2")
addbmm = _added_to(torch.addbmm, "batch1", "batch2")
