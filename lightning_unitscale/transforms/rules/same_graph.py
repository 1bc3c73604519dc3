"""Whether two captured graphs are one and the same, captured twice.

Dynamo captures a piece of code again when one of its guards fails, and some fail at every call: a
class that a step defines while it runs is another class each time. The graphs are then
structurally identical, and what is known of one is known of the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.graph.nodes import INPUT, example_tensor, tensor_name


def is_same_graph(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Whether two graphs of one step have the same operations on the same tensors, by name."""
    if len(first.graph.nodes) != len(second.graph.nodes):
        return False
    pairs = dict(zip(second.graph.nodes, first.graph.nodes, strict=True))
    return all(
        _is_same_node(one, other)
        and fx.map_arg((other.args, other.kwargs), pairs.__getitem__) == (one.args, one.kwargs)
        and (one.op != "get_attr" or _has_same_value(first, second, str(one.target), other))
        for other, one in pairs.items()
    )


def _is_same_node(first: fx.Node, second: fx.Node) -> bool:
    if first.op != second.op:
        return False
    if first.op not in {"placeholder", "get_attr"} and first.target != second.target:
        return False
    if first.op != "output" and tensor_name(first) != tensor_name(second):
        return False
    given = [one.meta.get(INPUT) for one in (first, second)]
    origins = [None if one is None else (one.kind, one.fqn) for one in given]
    return origins[0] == origins[1] and _form(first) == _form(second)


def _form(node: fx.Node) -> Any:
    """What else of a tensor a decision may depend on."""
    tensor = example_tensor(node)
    # As text: a size may be a symbol, which compares by being asked for its value.
    return tensor if tensor is None else (str(tensor.shape), tensor.dtype, tensor.requires_grad)


def _has_same_value(
    first: fx.GraphModule, second: fx.GraphModule, target: str, other: fx.Node
) -> bool:
    values = _attribute(first, target), _attribute(second, str(other.target))
    if all(isinstance(one, fx.GraphModule) for one in values):
        return is_same_graph(*values)
    if all(isinstance(one, Tensor) for one in values):
        return torch.equal(*values)
    return bool(values[0] is values[1])


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
