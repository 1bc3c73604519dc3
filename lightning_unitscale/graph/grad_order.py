"""Operations that read one tensor several times, and the order in which its gradients arrive.

Autograd adds the gradients of a tensor up one by one, as they arrive, and another order may give
another last bit. A change of units in front of an argument has an order of its own: what arrives
there is added up first, and several of them pass on what they got from the last made to the first.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lightning_unitscale.dynamo.graphs import fake_mode_of
from lightning_unitscale.graph.nodes import (
    Path,
    argument_at,
    call,
    changed_arguments,
    example_tensor,
    tensors_in,
)

# Where a gradient comes from: minus the number of an operation of autograd's, and which of its
# results. They come in this order: autograd runs the operation that was recorded last first.
_Arrival = tuple[int, int]


def first_to_last(node: fx.Node, paths: Sequence[Path]) -> list[Path]:
    """Places of one argument of an operation, in the order in which their gradients arrive."""
    arrivals = _arrivals(node, paths)
    return sorted(paths, key=lambda path: min(arrivals[path], default=(0, 0)))


def _arrivals(node: fx.Node, paths: Sequence[Path]) -> Mapping[Path, list[_Arrival]]:
    """Which gradients arrive at each place, found by running the operation without numbers."""
    with fake_mode_of(node.graph), torch.enable_grad():
        stand_ins = {path: _stand_in(argument_at(node, path)) for path in paths}
        args, kwargs = _arguments(node, stand_ins)
        # An operation that writes into a tensor gives it another history.
        receivers = {path: stand_in.grad_fn for path, stand_in in stand_ins.items()}
        arrivals: dict[Any, list[_Arrival]] = {receiver: [] for receiver in receivers.values()}
        try:
            result = call(node.target, args, kwargs)
        except Exception:
            # It cannot be run by itself: an operation of its own to autograd.
            result = None
    roots = [tensor.grad_fn for tensor in tensors_in(result)]
    for operation in autograd_operations(roots, arrivals):
        for index, (receiver, _) in enumerate(operation.next_functions):
            if receiver in arrivals:
                arrivals[receiver].append((-operation._sequence_nr(), index))
    return {path: arrivals[receiver] for path, receiver in receivers.items()}


def _stand_in(argument: fx.Node) -> Tensor:
    example = example_tensor(argument)
    assert example is not None
    # Not a leaf, which nothing may write into.
    return torch.empty_like(example.detach()).requires_grad_().clone()


def _arguments(
    node: fx.Node, stand_ins: Mapping[Path, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a node: stand-ins at their places, and example values for all others."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    for path, stand_in in stand_ins.items():
        args, kwargs = changed_arguments(args, kwargs, path, stand_in)
    return args, kwargs


def _example(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return value.detach() if isinstance(value, Tensor) else value


def autograd_operations(roots: Iterable[Any], stop: Container[Any] = ()) -> Iterator[Any]:
    """Operations of autograd's graph, each once, from some down to others."""
    pending = [
        operation
        for operation in dict.fromkeys(roots)
        if operation is not None and operation not in stop
    ]
    seen = set(pending)
    while pending:
        operation = pending.pop()
        yield operation
        for source, _ in operation.next_functions:
            if source is not None and source not in seen and source not in stop:
                seen.add(source)
                pending.append(source)
