"""Operations that read one tensor several times, and the order in which its gradients arrive.

Autograd adds the gradients of a tensor up one by one, as they arrive, and another order may give
another last bit. A change of units in front of an argument has an order of its own: what arrives
there is added up first, and several of them pass on what they got from the last made to the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from lightning_unitscale.graph.aliasing import same_tensor
from lightning_unitscale.graph.capture import fake_mode_of, is_higher_order
from lightning_unitscale.graph.nodes import (
    TRANSFORMED,
    Path,
    argument_at,
    argument_paths,
    example_tensor,
    requires_grad,
)

# Where a gradient comes from: minus the number of an operation of autograd's, and which of its
# results. They come in this order: autograd runs the operation that was recorded last first.
_Arrival = tuple[int, int]


def repeated_reads(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """For each operation the arguments that are read several times in one place.

    ``F.rms_norm`` is several operations to autograd, and two of them read its input. Left out are
    arguments that nobody else reads: their gradients are added up in one order anyway.
    """
    shared = _shared(graph)
    found: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in graph.nodes:
        if node.op == "output" or is_higher_order(node) or TRANSFORMED in node.meta:
            continue
        places = [one for one in argument_paths(node) if argument_at(node, one) in shared]
        arrivals = _arrivals(node, places) if places else {}
        several = (argument_at(node, path) for path in places if len(arrivals[path]) > 1)
        if read := tuple(dict.fromkeys(several)):
            found[node] = read
    return found


def first_to_last(node: fx.Node, places: Sequence[Path]) -> list[Path]:
    """Places of one argument of an operation, in the order in which their gradients arrive."""
    arrivals = _arrivals(node, places)
    return sorted(places, key=lambda path: min(arrivals[path], default=(0, 0)))


def _shared(graph: fx.Graph) -> set[fx.Node]:
    """Tensors with a gradient that more than one operation of this or of other graphs reads."""
    tensors: dict[fx.Node, fx.Node] = {}
    readers: Counter[fx.Node] = Counter()
    for node in graph.nodes:
        source = same_tensor(node)
        tensors[node] = node if source is None else tensors[source]
        if source is None:
            readers.update({tensors[one] for one in node.all_input_nodes})
    return {
        node
        for node, tensor in tensors.items()
        if requires_grad(node) and (readers[tensor] > 1 or tensor.op == "placeholder")
    }


def _arrivals(node: fx.Node, places: Sequence[Path]) -> Mapping[Path, list[_Arrival]]:
    """Which gradients arrive at each place, found by running the operation without numbers."""
    with fake_mode_of(node.graph), torch.enable_grad():
        given = {path: _stand_in(argument_at(node, path)) for path in places}
        args = [_with(given, one, (i,)) for i, one in enumerate(node.args)]
        kwargs = {name: _with(given, one, (name,)) for name, one in node.kwargs.items()}
        # An operation that writes into a tensor gives it another history.
        receivers = {path: one.grad_fn for path, one in given.items()}
        found: dict[Any, list[_Arrival]] = {one: [] for one in receivers.values()}
        try:
            if node.op == "call_method":
                result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                result = node.target(*args, **kwargs)
        except Exception:
            # It cannot be run by itself: an operation of its own to autograd.
            result = None
    roots = [one.grad_fn for one in tree_leaves(result) if isinstance(one, Tensor)]
    for operation in _operations(roots, found):
        for index, (receiver, _) in enumerate(operation.next_functions):
            if receiver in found:
                found[receiver].append((-operation._sequence_nr(), index))
    return {path: found[one] for path, one in receivers.items()}


def _stand_in(argument: fx.Node) -> Tensor:
    example = example_tensor(argument)
    assert example is not None
    # Not a leaf, which nothing may write into.
    return torch.empty_like(example.detach()).requires_grad_().clone()


def _with(given: Mapping[Path, Tensor], value: Any, path: Path) -> Any:
    """An argument with what is given for places in it, and example values for all others."""
    if path in given:
        return given[path]
    if isinstance(value, (list, tuple)):
        items = [_with(given, one, (*path, i)) for i, one in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    return fx.map_arg(value, _example)


def _example(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return value.detach() if isinstance(value, Tensor) else value


def _operations(roots: Sequence[Any], stop: Container[Any]) -> Iterator[Any]:
    """Operations of autograd's graph from ``roots`` down to those of ``stop``."""
    pending = [one for one in dict.fromkeys(roots) if one is not None and one not in stop]
    seen = set(pending)
    while pending:
        operation = pending.pop()
        yield operation
        for one, _ in operation.next_functions:
            if one is not None and one not in seen and one not in stop:
                seen.add(one)
                pending.append(one)
