"""Define scale rules and unit-scaled forms of matmuls, linear maps and embeddings.

Matmuls are sums over an index space. The output sums over the indices that it lacks, and the
gradient of each operand over the indices that the operand lacks. Sums of N independent products of
unit variance have variance N.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of scaling factors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_unitscale.functional.call import scaled_call, scaled_op
from lightning_unitscale.functional.moments import largest_of_normals
from lightning_unitscale.functional.rules import (
    Factors,
    ScaleRule,
    broadcast_shapes,
    numel_of,
    product,
    register_rule,
    shape_of,
    unit_factors,
)

__all__ = [
    "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "dot", "einsum", "embedding",
    "embedding_bag", "inner", "linear", "linear_readout", "matmul", "mm", "multi_dot", "mv",
    "outer", "tensordot",
]  # fmt: skip

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops, matmul; any index space alike"


def _contraction(
    terms: float, index_space: float, operands: Mapping[str, Any], mult: float
) -> Factors:
    """Return the factors of a matmul."""
    squares = {
        name: mult**2 * index_space / max(numel_of(operand), 1)
        for name, operand in operands.items()
    }
    return unit_factors(mult**2 * terms, **squares)


def _matmul_numel(left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Return the number of elements of a matmul, with its batch dimensions broadcast."""
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    return product(broadcast_shapes(left[:-2], right[:-2])) * rows * columns


def _product_of(
    left: str, right: str, terms_of: Callable[[tuple[int, ...], Mapping[str, Any]], float]
) -> Any:
    """Return the factors of a matmul with this many terms, by the shape of its left operand."""

    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b = arguments[left], arguments[right]
        terms = terms_of(shape_of(a), arguments)
        space = numel_of(a) * numel_of(b) / max(terms, 1)
        return _contraction(terms, space, {left: a, right: b}, arguments.get("mult", 1.0))

    return factors


def _contracted(sizes: tuple[int, ...], arguments: Mapping[str, Any]) -> float:
    dims = arguments.get("dims", 2)
    if isinstance(dims, int):
        return product(sizes[len(sizes) - dims :])
    return product([sizes[int(dim)] for dim in dims[0]])


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
    """Return the equation of ``einsum(op1, sublist1, op2, sublist2, ..., [sublist_out])``."""

    def letters(sublist: Any) -> str:
        return "".join(["..." if i is Ellipsis else chr(ord("A") + int(i)) for i in sublist])

    operands, parts = items[0 : len(items) // 2 * 2 : 2], items[1::2]
    left = ",".join([letters(part) for part in parts])
    return (f"{left}->{letters(items[-1])}" if len(items) % 2 else left), operands


def _subscripts(equation: str, dims: list[int]) -> tuple[list[list[Any]], list[Any]]:
    """Return the labels of operands and output. An ellipsis's are numbers from the right."""
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
    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b = arguments[left], arguments[right]
        inner = shape_of(a)[-1]
        space = inner * _matmul_numel(shape_of(a), shape_of(b))
        return _contraction(inner, space, {left: a, right: b}, arguments.get("mult", 1.0))

    return _product(
        function,
        factors,
        parameters=f"{left}, {right}",
        operands=f"{left} {right}",
        aliases=aliases,
    )


matmul = _of_two(torch.matmul, "input", "other", "__matmul__ imatmul")
mm = _of_two(torch.mm, "input", "mat2")
bmm = _of_two(torch.bmm, "input", "mat2")
mv = _of_two(torch.mv, "input", "vec")
dot = _of_two(torch.dot, "input", "tensor", "vdot")
inner = _product(
    torch.inner,
    _product_of("input", "other", lambda sizes, _: sizes[-1] if sizes else 1),
    parameters="input, other",
    operands="input other",
)
outer = _product(
    torch.outer, _product_of("input", "vec2", lambda *_: 1), parameters="input, vec2", aliases="ger"
)
tensordot = _product(torch.tensordot, _product_of("a", "b", _contracted), operands="a b")
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
    def factors(arguments: Mapping[str, Any]) -> Factors:
        a, b, addend = arguments[left], arguments[right], arguments["input"]
        mult = arguments.get("mult", 1.0)
        alpha, beta = float(arguments.get("alpha", 1)), float(arguments.get("beta", 1))
        a_shape, b_shape = shape_of(a), shape_of(b)
        terms = float(a_shape[-1])
        out = _matmul_numel(a_shape, b_shape)
        index_space = terms * out
        if function is torch.addbmm:  # it also sums over the batch
            terms, out = terms * a_shape[0], out / max(a_shape[0], 1)
        # A bias is 0 at the start, and small compared to the matmul later. A whole tensor is not.
        is_bias = numel_of(addend) != out or len(b_shape) < 2
        square = alpha**2 * terms + (0.0 if is_bias else (beta * mult) ** 2)
        squares = {
            "input": (beta * mult) ** 2 * out / max(numel_of(addend), 1),
            left: alpha**2 * index_space / max(numel_of(a), 1),
            right: alpha**2 * index_space / max(numel_of(b), 1),
        }
        return unit_factors(square, **squares)

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

_LINEAR_REFERENCE = (
    "Unit Scaling (arXiv 2303.11257), table of ops; u-muP (arXiv 2407.17465), table 2"
)


def _linear(arguments: Mapping[str, Any]) -> Factors:
    weight = shape_of(arguments["weight"])
    fan_in, fan_out = weight[-1], weight[0] if len(weight) > 1 else 1
    mult = arguments.get("mult", 1.0)
    rows = numel_of(arguments["input"]) / max(fan_in, 1)
    return unit_factors(mult**2 * fan_in, input=mult**2 * fan_out, weight=mult**2 * rows, bias=rows)


def _bilinear(arguments: Mapping[str, Any]) -> Factors:
    fan_out, left, right = shape_of(arguments["weight"])
    mult = arguments.get("mult", 1.0)
    rows = numel_of(arguments["input1"]) / max(left, 1)
    return unit_factors(
        mult**2 * left * right,
        input1=mult**2 * fan_out * right,
        input2=mult**2 * fan_out * left,
        weight=mult**2 * rows,
        bias=rows,
    )


def _embedding(arguments: Mapping[str, Any]) -> Factors:
    lookups = numel_of(arguments["input"])
    num_embeddings = shape_of(arguments["weight"])[0]
    return unit_factors(1.0, weight=lookups / num_embeddings)


def _embedding_bag(arguments: Mapping[str, Any]) -> Factors:
    input = shape_of(arguments["input"])
    num_embeddings, width = shape_of(arguments["weight"])
    lookups = numel_of(arguments["input"])
    if len(input) == 2:
        bags = float(input[0])
    else:
        offsets = arguments.get("offsets")
        bags = numel_of(offsets) - bool(arguments.get("include_last_offset"))
    size = lookups / max(bags, 1)
    mode = arguments.get("mode", "mean")
    if mode == "max":
        largest = largest_of_normals(max(round(size), 1))
        return unit_factors(largest, weight=bags / num_embeddings)
    share = 1 / size if mode == "mean" and size else 1.0
    return unit_factors(
        size * share**2, weight=share**2 * lookups / num_embeddings, per_sample_weights=width
    )


linear = scaled_op(
    F.linear,
    _linear,
    "linear",
    f"{_LINEAR_REFERENCE}. The gradients of weight and bias get ``rows**-0.5``, rows being those "
    "of this call: with averaged gradients of several devices, or accumulated ones, the caller "
    "corrects them",
    "input, weight, bias=None",
    weights="weight bias",
    operands="input weight",
)
bilinear = scaled_op(
    F.bilinear,
    _bilinear,
    "linear",
    "a sum of in1 * in2 independent products of unit variance, and so for its gradients",
    "input1, input2, weight, bias=None",
    weights="weight bias",
    operands="input1 input2 weight",
)
# torch.embedding has the two tensors in the other order, but graphs contain F.embedding.
_EMBEDDING = register_rule(
    ScaleRule(
        "embedding",
        tuple(inspect.signature(F.embedding).parameters),
        _embedding,
        "linear",
        f"{_LINEAR_REFERENCE}; a row of the weight is looked up lookups / num_embeddings times",
        ("weight",),
    ),
    F.embedding,
)
embedding_bag = scaled_op(
    F.embedding_bag,
    _embedding_bag,
    "linear",
    "an embedding, and a sum, mean or maximum over bags of equal size",
    weights="weight",
    aliases=None,
)


def linear_readout(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, constraint: str | None = None
) -> Tensor:
    """Apply a network's unit-scaled output layer, whose factor is ``1 / in_features``.

    References:
        Blake et al., "u-muP" (arXiv 2407.17465), table 2, output weights.
    """
    return linear(input, weight, bias, constraint=constraint, scale_power=(1.0, 0.5, 0.5))


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of a table, unit-scaled.

    References:
        Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops: the gradient of the
        weight gets ``(num_embeddings / number of lookups)**0.5``.
    """
    for name, value, default in (
        ("max_norm", max_norm, None),
        ("scale_grad_by_freq", scale_grad_by_freq, False),
        ("sparse", sparse, False),
    ):
        if value is not default:
            raise ValueError(
                f"embedding: {name}={value}: it has no unit-scaled form. Expected {default}. Use "
                "torch.nn.functional.embedding for this table."
            )
    return scaled_call(
        _EMBEDDING,
        F.embedding,
        (input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse),
    )
