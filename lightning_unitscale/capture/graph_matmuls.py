"""Find the matmuls of a captured graph, and the roles of their arguments.

A matmul is linear in each of its operands. Addends (a bias, the first argument of ``addmm``) are
added to it unscaled. A pass needs no more to change the units of the operands. Every form has a
scale rule (``functional/rules.py``), except the few below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from lightning_unitscale.capture.decompose import attention_matmul
from lightning_unitscale.capture.graph_nodes import TRANSFORMED, Path, is_float_tensor
from lightning_unitscale.functional.rules import (
    ScaleRule,
    matmul_names,
    rule_of_function,
    rule_of_method,
)


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
class Matmul:
    """Matmul of a graph with its operands and addends."""

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
# By torch's operation of the same name, if it is a separate form.
_SAME: dict[Any, Any] = {attention_matmul: torch.matmul, "__rmatmul__": "__matmul__"}

_NAMES = matmul_names() | {"attention_matmul", "rmatmul", "convolution", "conv_tbc", "grouped_mm"}
# Names of matmuls in the names of their results. An aten operator has its overload there.
MATMUL_WORDS = frozenset(
    name.strip("_") + overload for name in _NAMES for overload in ("", ".default")
)


def _roles_of(target: Any) -> ScaleRule | Roles | None:
    """Return the roles of the parameters of a function, a method's name, or an aten operator."""
    if hasattr(target, "overloadpacket"):
        if (custom := _CUSTOM_OPERATORS.get(str(target).removesuffix(".default"))) is not None:
            return custom
        namespace, name, overload = str(target).split(".")
        if (namespace, overload) != ("aten", "default"):
            return None
        target = getattr(torch, name, None) or getattr(F, name, None)
    try:
        target = _SAME.get(target, target)
        found = _ROLES.get(target)
    except TypeError:  # an unhashable callable is not ours
        return None
    if found is not None:
        return found
    rule = rule_of_method(target) if isinstance(target, str) else rule_of_function(target)
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__")
    return None if rule is None or not rule.operands or writes else rule


def matmul_of(node: fx.Node) -> Matmul | None:
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
    return Matmul(node, operands, addends)


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
