"""Scale rules of matrix products in every form: matmul, addmm, einsum, tensordot, chains.

All are sums over an index space: the output sums over the indices that it does not have, and the
gradient of each operand over the indices that the operand does not have. Sums of N independent
products of unit variance have variance N.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors, matmul.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import numel_of, product, shape_of

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops, matmul; any index space alike"


def _contraction(
    terms: float, index_space: float, operands: Mapping[str, Any], mult: float = 1.0
) -> Factors:
    """Factors of a product.

    Args:
        terms: Number of products in the sum that makes one element of the output.
        index_space: Product of the sizes of all indices.
        operands: The tensors by name.
        mult: As in every rule. Every gradient holds it once: the others have it as a factor, and
            the first operand's is that of the operand divided by it.
    """
    gradients = {
        name: unit_factor(mult**2 * index_space / max(numel_of(operand), 1))
        for name, operand in operands.items()
    }
    return Factors(unit_factor(mult**2 * terms), gradients)


def _matmul_of(left: str, right: str) -> Any:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b = arguments[left], arguments[right]
        inner = shape_of(a)[-1]
        return _contraction(
            inner,
            inner * _matmul_numel(shape_of(a), shape_of(b)),
            {left: a, right: b},
            arguments.get("mult", 1.0),
        )

    return factors


def _matmul_numel(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Number of elements of a product, with its batch dimensions broadcast."""
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return product(_broadcast(left[:-2], right[:-2])) * rows * columns


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(first), len(second))
    first = (1,) * (length - len(first)) + first
    second = (1,) * (length - len(second)) + second
    return tuple([b if a == 1 else a for a, b in zip(first, second, strict=True)])


def _added_product_of(left: str, right: str) -> Any:
    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b, addend = arguments[left], arguments[right], arguments["input"]
        mult = arguments.get("mult", 1.0)
        alpha, beta = float(arguments.get("alpha", 1)), float(arguments.get("beta", 1))
        a_shape, b_shape = shape_of(a), shape_of(b)
        terms = float(a_shape[-1])
        out = _matmul_numel(a_shape, b_shape)
        index_space = terms * out
        if len(a_shape) == 3 and arguments.get("is_summed_over_batch"):
            terms, out = terms * a_shape[0], out / max(a_shape[0], 1)
        # A bias is 0 at the start, and small beside the product later; a whole tensor is not.
        is_bias = numel_of(addend) != out or len(b_shape) < 2
        square = alpha**2 * terms + (0.0 if is_bias else (beta * mult) ** 2)
        return Factors(
            unit_factor(square),
            {
                "input": unit_factor((beta * mult) ** 2 * out / max(numel_of(addend), 1)),
                left: unit_factor(alpha**2 * index_space / max(numel_of(a), 1)),
                right: unit_factor(alpha**2 * index_space / max(numel_of(b), 1)),
            },
        )

    return factors


def _addbmm(arguments: Mapping[str, Any]) -> Factors:
    return _added_product_of("batch1", "batch2")({**arguments, "is_summed_over_batch": True})


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
    places = [f"operands.{index}" for index in range(len(operands))]
    if not isinstance(equation, str):  # einsum(op1, [0, 1], op2, [1, 2], [0, 2])
        equation, operands = _from_sublists([equation, *operands])
        places = ["equation", *places[1::2]]
    inputs, output = _subscripts(equation, [len(shape_of(one)) for one in operands])
    sizes: dict[Any, int] = {}
    for labels, operand in zip(inputs, operands, strict=True):
        for label, size in zip(labels, shape_of(operand), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    mult = arguments.get("mult", 1.0)
    space = product(sizes.values())
    made = product([sizes[label] for label in set(output)])
    gradients = {}
    for index, labels in enumerate(inputs):
        own = product([sizes[label] for label in set(labels)])
        gradients[places[index]] = unit_factor(mult**2 * space / max(own, 1))
    return Factors(unit_factor(mult**2 * space / max(made, 1)), gradients)


def _from_sublists(items: list[Any]) -> tuple[str, list[Any]]:
    """The equation of ``einsum(op1, sublist1, op2, sublist2, ..., [sublist_out])``."""

    def letters(sublist: Any) -> str:
        return "".join(["..." if one is Ellipsis else chr(ord("A") + int(one)) for one in sublist])

    operands, parts = items[0 : len(items) // 2 * 2 : 2], items[1::2]
    left = ",".join([letters(one) for one in parts])
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
    (name,) = [one for one in ("matrices", "tensors") if one in arguments]
    matrices = arguments[name]
    shapes = [shape_of(one) for one in matrices]
    first = shapes[0] if len(shapes[0]) > 1 else (1, *shapes[0])
    last = shapes[-1] if len(shapes[-1]) > 1 else (*shapes[-1], 1)
    sizes = [first[0], *[shape[0] for shape in shapes[1:]], last[-1]]
    mult = arguments.get("mult", 1.0)
    space = product(sizes)
    return Factors(
        unit_factor(mult**2 * product(sizes[1:-1])),
        {
            f"{name}.{index}": unit_factor(mult**2 * space / max(numel_of(one), 1))
            for index, one in enumerate(matrices)
        },
    )


def _product(name: str, left: str, right: str, factors: Any = None) -> ScaleRule:
    return ScaleRule(name, (left, right), factors or _matmul_of(left, right), "linear", _REFERENCE)


def _added(name: str, left: str, right: str, factors: Any = None) -> ScaleRule:
    return ScaleRule(
        name,
        ("input", left, right),
        factors or _added_product_of(left, right),
        "linear",
        _REFERENCE + "; a whole tensor that is added counts as one more term, a bias as none",
        weights=("input",),
    )


MATMUL = register_rule(
    _product("matmul", "input", "other"), names=("matmul", "__matmul__", "imatmul")
)
MM = register_rule(_product("mm", "input", "mat2"), names=("mm",))
BMM = register_rule(_product("bmm", "input", "mat2"), names=("bmm",))
MV = register_rule(_product("mv", "input", "vec"), names=("mv",))
DOT = register_rule(_product("dot", "input", "tensor"), names=("dot", "vdot"))
INNER = register_rule(_product("inner", "input", "other", _inner), names=("inner",))
OUTER = register_rule(_product("outer", "input", "vec2", _outer), names=("outer", "ger"))
TENSORDOT = register_rule(
    ScaleRule("tensordot", ("a", "b", "dims"), _tensordot, "linear", _REFERENCE),
    torch.tensordot,
)
ADDMM = register_rule(_added("addmm", "mat1", "mat2"), names=("addmm",))
ADDMV = register_rule(_added("addmv", "mat", "vec"), names=("addmv",))
BADDBMM = register_rule(_added("baddbmm", "batch1", "batch2"), names=("baddbmm",))
ADDBMM = register_rule(_added("addbmm", "batch1", "batch2", _addbmm), names=("addbmm",))
EINSUM = register_rule(
    ScaleRule("einsum", ("equation", "operands"), _einsum, "linear", _REFERENCE, is_variadic=True),
    torch.einsum,
)
CHAIN_MATMUL = register_rule(
    ScaleRule("chain_matmul", ("matrices",), _chain, "linear", _REFERENCE, is_variadic=True),
    torch.chain_matmul,
)
MULTI_DOT = register_rule(
    ScaleRule("multi_dot", ("tensors",), _chain, "linear", _REFERENCE),
    torch.linalg.multi_dot,
)
