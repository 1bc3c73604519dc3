"""Turn in-place operations into out-of-place ones where nobody can tell the difference.

A probe or a gauge gives a tensor a new identity. An in-place operation on the old one would then be
lost or refused by autograd, so it is rewritten first: only for a tensor that the graph itself made,
that owns its memory, and that no view looks into.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.dynamo.graphs import fake_mode_of
from lightning_unitscale.graph.aliasing import (
    find_effects,
    looks_into,
    owns_result,
    returned_argument,
    set_out_of_place,
    written_arguments,
)
from lightning_unitscale.graph.nodes import call, example_tensor, tensor_name

# Key of ``node.meta`` of an operation that was made out of place: its op and target before.
WRITTEN_AS = "written_as"

# Their forms out of place compute something else: ``Tensor.bernoulli`` reads its probabilities from
# the very values that ``bernoulli_`` overwrites, and in place the gradients of ELU and its kin are
# computed from the result, which has other last bits than from the input.
_NO_COUNTERPART = {"bernoulli", "elu", "celu", "selu"}


def make_out_of_place(graph: fx.Graph) -> tuple[str, ...]:
    """Rewrite in place every in-place operation that can be; returns what was changed and left."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    changed, kept = 0, []
    find_effects(graph)
    for node in list(graph.nodes):
        if not written_arguments(node):
            continue
        target = returned_argument(node)
        replacement = _functional(node)
        if (
            target is None
            or replacement is None
            or not _owns_memory(
                target, [user for user in target.users if order[user] < order[node]]
            )
            or not _same_result(graph, node, target, replacement)
        ):
            kept.append(tensor_name(node))
            continue
        function, args, kwargs = replacement
        node.meta[WRITTEN_AS] = (node.op, node.target)
        node.op = "call_function" if callable(function) else "call_method"
        node.target = function
        node.args, node.kwargs = args, kwargs
        set_out_of_place(node)
        # The old tensor and the result were one object: later readers must see the new value.
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)
        changed += 1
    lines = [f"{changed} in-place operations made out of place"] if changed else []
    if kept:
        lines.append(f"{len(kept)} in-place operations kept: {', '.join(kept[:4])}")
    return tuple(lines)


def _owns_memory(node: fx.Node, earlier: Sequence[fx.Node]) -> bool:
    """Whether the graph made this tensor, fresh, and none of its earlier readers looks into it."""
    return owns_result(node) and not any(looks_into(user, node) for user in earlier)


def _functional(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The function or method that computes the same out of place, with its arguments.

    Its name follows from torch's and Python's own conventions; whether it does compute the same,
    :func:`_same_result` finds out.
    """
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    if getattr(operator, name, None) is node.target and name.startswith("i"):
        function = getattr(operator, name[1:], None) or getattr(operator, f"{name[1:]}_", None)
        return None if function is None else (function, node.args, dict(node.kwargs))
    if name.rstrip("_") in _NO_COUNTERPART:
        return None
    position = _inplace_flag(node)
    if position is not None:
        args = tuple(False if i == position else arg for i, arg in enumerate(node.args))
        kwargs = {key: value for key, value in node.kwargs.items() if key != "inplace"}
        return node.target, args, kwargs
    if not name.endswith("_") or name.endswith("__"):
        return None
    if node.op == "call_method" and hasattr(Tensor, name[:-1]):
        return name[:-1], node.args, dict(node.kwargs)
    if node.op == "call_function" and hasattr(torch, name[:-1]):
        return getattr(torch, name[:-1]), node.args, dict(node.kwargs)
    return None


def _same_result(
    graph: fx.Graph, node: fx.Node, target: fx.Node, replacement: tuple[Any, tuple[Any, ...], Any]
) -> bool:
    """Whether the out-of-place form makes a new tensor of the same type, shape and layout.

    An in-place operation keeps the type of its target where the other one promotes.
    """
    before, after = example_tensor(target), example_tensor(node)
    if before is None or after is None:
        return False
    function, args, kwargs = replacement
    values = fx.map_arg(args, lambda arg: arg.meta.get("example_value"))
    options = fx.map_arg(kwargs, lambda arg: arg.meta.get("example_value"))
    try:
        with fake_mode_of(graph), torch.no_grad():
            result = call(function, values, options)
    except Exception:
        return False
    return (
        isinstance(result, Tensor)
        and result.dtype == before.dtype
        and result.shape == before.shape
        and result.stride() == before.stride()
        and result.untyped_storage() is not before.untyped_storage()
    )


def _inplace_flag(node: fx.Node) -> int | None:
    """Position of the parameter ``inplace`` of the function that is called, if it is set."""
    try:
        names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None  # a method, or one of C's
    if "inplace" not in names:
        return None
    position = names.index("inplace")
    value = node.args[position] if len(node.args) > position else node.kwargs.get("inplace")
    return position if value is True else None
