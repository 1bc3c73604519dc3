"""Scale rules of sums, products by element, reductions, joins and dropout.

References:
    Blake, Orr, Luschi, "Unit Scaling" (arXiv 2303.11257), table of ops, add and dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_unitscale.functional.rule import Factors, ScaleRule, register_rule, unit_factor
from lightning_unitscale.functional.sizes import numel_of, product, shape_of

_REFERENCE = "Unit Scaling (arXiv 2303.11257), table of ops"
# The constant of torch's alpha_dropout: the value that SELU tends to from below.
_SELU_FLOOR = -1.7580993408473766


def _broadcast_numel(first: Any, second: Any) -> float:
    a, b = shape_of(first), shape_of(second)
    length = max(len(a), len(b))
    a, b = (1,) * (length - len(a)) + a, (1,) * (length - len(b)) + b
    return product([n if m == 1 else m for m, n in zip(a, b, strict=True)])


def _uses(numel: float, value: Any) -> float:
    return numel / max(numel_of(value), 1)


def _add(arguments: Mapping[str, Any]) -> Factors:
    input, other = arguments["input"], arguments["other"]
    alpha, mult = float(arguments.get("alpha", 1)), arguments.get("mult", 1.0)
    numel = _broadcast_numel(input, other)
    # One number for all does not change the spread of the rest.
    if numel_of(other) == 1:
        square = mult**2
    elif numel_of(input) == 1:
        square = alpha**2
    else:
        square = mult**2 + alpha**2
    return Factors(
        unit_factor(square),
        {
            "input": unit_factor(mult**2 * _uses(numel, input)),
            "other": unit_factor(alpha**2 * _uses(numel, other)),
        },
    )


def _mul(arguments: Mapping[str, Any]) -> Factors:
    input, other = arguments["input"], arguments["other"]
    mult = arguments.get("mult", 1.0)
    numel = _broadcast_numel(input, other)
    return Factors(
        unit_factor(mult**2),
        {
            "input": unit_factor(mult**2 * _uses(numel, input)),
            "other": unit_factor(mult**2 * _uses(numel, other)),
        },
    )


def _reduced(arguments: Mapping[str, Any]) -> float:
    """Number of elements that go into each one of the output."""
    shape = shape_of(arguments["input"])
    dim = arguments.get("dim")
    if dim is None or dim == ():
        return product(shape)
    dims = (dim,) if isinstance(dim, int) else dim
    return product([shape[one] for one in dims]) if shape else 1


def _sum(arguments: Mapping[str, Any]) -> Factors:
    mult = arguments.get("mult", 1.0)
    return Factors(unit_factor(mult**2 * _reduced(arguments)), {"input": unit_factor(mult**2)})


def _mean(arguments: Mapping[str, Any]) -> Factors:
    mult, count = arguments.get("mult", 1.0), max(_reduced(arguments), 1)
    return Factors(unit_factor(mult**2 / count), {"input": unit_factor((mult / count) ** 2)})


def _join(arguments: Mapping[str, Any]) -> Factors:
    factor = unit_factor(arguments.get("mult", 1.0) ** 2)
    return Factors(factor, {"tensors": factor})


def _kept(arguments: Mapping[str, Any], default: bool) -> float:
    training = arguments.get("training", arguments.get("train", default))
    return 1 - arguments.get("p", 0.5) if training else 1.0


def _dropout(arguments: Mapping[str, Any]) -> Factors:
    kept, mult = _kept(arguments, default=True), arguments.get("mult", 1.0)
    factor = unit_factor(mult**2 / kept) if kept > 0 else 1.0
    return Factors(factor, {"input": factor})


def _alpha_dropout(arguments: Mapping[str, Any]) -> Factors:
    kept, mult = _kept(arguments, default=False), arguments.get("mult", 1.0)
    dropped = 1 - kept
    # a (x or the floor) + b, with a and b such that mean 0 and variance 1 stay so.
    square = 1 / (kept * (1 + dropped * _SELU_FLOOR**2)) if kept > 0 else 0.0
    output = 1 + square * kept * (mult**2 - 1)
    return Factors(unit_factor(output), {"input": unit_factor(mult**2 * square * kept)})


_BINARY = ("input", "other")
_REDUCTION = ("input", "dim", "keepdim", "dtype")
_DROPOUT = ("input", "p", "training", "inplace")

ADD = register_rule(
    ScaleRule("add", _BINARY, _add, "sum", _REFERENCE + ", add; alpha weighs the second"),
    names=("add", "iadd", "__add__", "__radd__", "__iadd__"),
)
SUB = register_rule(
    ScaleRule("sub", _BINARY, _add, "sum", "as add: a sign changes no scale"),
    names=("sub", "isub", "subtract", "__sub__", "__isub__"),
)
MUL = register_rule(
    ScaleRule(
        "mul",
        _BINARY,
        _mul,
        "linear",
        "a product of two independent tensors at RMS 1 is at RMS 1; sums over what is broadcast",
    ),
    names=("mul", "imul", "multiply", "__mul__", "__rmul__", "__imul__"),
)
SUM = register_rule(
    ScaleRule("sum", _REDUCTION, _sum, "linear", "a sum of n independent numbers has variance n"),
    names=("sum",),
)
MEAN = register_rule(
    ScaleRule("mean", _REDUCTION, _mean, "linear", "a mean of n numbers has variance 1 / n"),
    names=("mean",),
)
CAT = register_rule(
    ScaleRule("cat", ("tensors", "dim"), _join, "linear", "moves numbers, and changes none"),
    torch.concat,  # not by name: operator.concat joins lists
    names=("cat", "concatenate"),
)
STACK = register_rule(
    ScaleRule("stack", ("tensors", "dim"), _join, "linear", "moves numbers, and changes none"),
    names=("stack", "hstack", "vstack", "dstack"),
)
for _name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"):
    register_rule(
        ScaleRule(_name, _DROPOUT, _dropout, "linear", _REFERENCE + ", dropout"), names=(_name,)
    )
for _name in ("alpha_dropout", "feature_alpha_dropout"):
    register_rule(
        ScaleRule(
            _name,
            _DROPOUT,
            _alpha_dropout,
            "activation",
            "keeps mean 0 and variance 1 by its own design; the gradient passes where kept",
        ),
        names=(_name,),
    )
