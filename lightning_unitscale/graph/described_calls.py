"""What a call of one of torch's operations is, apart from the graph that it is in.

A network calls an operation on tensors of one shape in each of its blocks, and a step is captured
more than once. What torch does with such a call need not be found out each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from lightning_unitscale.functional.rules import hint_of

_CONSTANTS = frozenset({bool, int, float, complex, str, type(None), type(...)})
_CONSTANTS |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
_MAX_KNOWN = 10_000
Found = TypeVar("Found")


def found_once(known: dict[Hashable, Found], node: fx.Node, find: Callable[[], Found]) -> Found:
    """What there is to know of a call, if it is not known of another one that is the same."""
    description = described_call(node)
    if description is None:
        return find()
    if description not in known:
        found = find()
        if len(known) >= _MAX_KNOWN:
            known.clear()
        known[description] = found
    return known[description]


def described_call(node: fx.Node) -> Hashable | None:
    """What two calls have in common that do the same with the memory of what they are given.

    It is the operation, whether autocast is on, the constants among the arguments, and of tensors
    their classes, types, devices, sizes and strides, with the numbers that symbols were in the
    capture. ``None`` if the operation is not torch's, or if there is more to the call: a function
    among its arguments, a tensor that is not strided, a size that depends on values.
    """
    root = (getattr(node.target, "__module__", None) or "").partition(".")[0]
    if node.op == "call_function" and root not in {"torch", "_operator"}:
        return None
    places = {argument: place for place, argument in enumerate(node.all_input_nodes)}
    autocast = tuple(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    try:
        return node.op, node.target, autocast, _described([node.args, node.kwargs], places)
    except LookupError:
        return None


def _described(value: Any, places: Mapping[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return fx.Node, places[value], _described(value.meta.get("example_value"), places)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise LookupError("no sizes and strides tell what it is")
        lengths = (*value.size(), *value.stride())
        sizes = tuple(_described(each, {}) for each in lengths)
        return type(value), value.dtype, value.device, sizes
    if isinstance(value, Mapping):
        return Mapping, tuple((name, _described(item, places)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return isinstance(value, list), tuple(_described(item, places) for item in value)
    if isinstance(value, slice):
        return slice, _described((value.start, value.stop, value.step), places)
    number = hint_of(value)
    if type(number) not in _CONSTANTS or (number is None and value is not None):
        raise LookupError(f"{value} is more than it says")
    return type(number), number
