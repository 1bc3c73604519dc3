"""Copy tensors between a device and the host while a plan's graphs compute.

A copy is a value of the graph that runs it. It holds the tensor that it reads until computing has
waited for it, so the allocator cannot reuse that memory before. ``record_stream`` would do
this too, but it frees memory when the copy stream is idle, not where the plan expects it.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from lightning_unitscale.memory.remat_plan import RematPlan

NumberOf = Callable[[fx.Node], int | None]
"""The place of a graph's node in the joint graph, ``None`` for nodes that torch has added."""


class OverlappedCopy:
    """One copy, which may still be running.

    An error in the middle of a step drops it. Then computing waits for it too, before the memory of
    its tensors can have another owner.
    """

    __slots__ = ("_event", "_result", "_source")

    def __init__(self, source: Tensor, result: Tensor, event: Any = None) -> None:
        self._source: Tensor | None = source
        self._result = result
        self._event = event

    def wait(self) -> Tensor:
        """Let later work of the device wait for the copy, and return its result."""
        if self._event is not None:
            self._event.wait()  # in the current stream of the device; the host does not wait
            self._event = None
        self._source = None
        return self._result

    def __del__(self) -> None:
        self.wait()


def start_to_host(tensor: Tensor) -> OverlappedCopy:
    """Start to copy a tensor to the host's memory, pinned if the tensor is on a GPU."""
    size, stride = tensor.size(), tensor.stride()
    if tensor.device.type == "cuda":
        result = torch.empty_strided(size, stride, dtype=tensor.dtype, pin_memory=True)
        return _started(tensor, result, tensor.device, "to host")
    # Outside torch's allocator, so that its events are those of the device alone, also on a CPU.
    memory = np.empty(tensor.untyped_storage().nbytes(), dtype=np.uint8)
    result = torch.from_numpy(memory).view(tensor.dtype).as_strided(size, stride)
    result.copy_(tensor)
    return OverlappedCopy(tensor, result)


def start_to_device(tensor: Tensor, device: torch.device) -> OverlappedCopy:
    """Start to copy a tensor from the host's memory to a device."""
    result = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if device.type == "cuda":
        return _started(tensor, result, device, "to device")
    result.copy_(tensor)
    return OverlappedCopy(tensor, result)


def wait_for(copy: OverlappedCopy) -> Tensor:
    """Let later work of the device wait for a copy, and return its result."""
    return copy.wait()


def _started(
    source: Tensor, result: Tensor, device: torch.device, direction: str
) -> OverlappedCopy:
    with torch.cuda.device(device):
        stream = _stream(device, direction)
        # After the kernels that compute the source, or that last used the result's memory.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            result.copy_(source, non_blocking=True)
        return OverlappedCopy(source, result, stream.record_event())


@functools.cache
def _stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Return the stream of one direction. A GPU copies in both at once."""
    return torch.cuda.Stream(device)


class _NodeFinder:
    """Finds the node before which a place of the timeline begins."""

    def __init__(
        self, graph: fx.Graph, places: Mapping[int, list[int]], number_of: NumberOf
    ) -> None:
        self._end = graph.output_node()
        self._places: list[int] = []
        self._nodes: list[fx.Node] = []
        self._last = 0
        seen: dict[int, int] = defaultdict(int)
        for node in graph.nodes:
            number = None if node.op != "call_function" else number_of(node)
            if number is None or seen[number] >= len(places.get(number, ())):
                continue
            place = places[number][seen[number]]
            seen[number] += 1
            # Items of a tuple come right after it in the graph, which may be earlier than planned.
            if node.target is not operator.getitem and place >= self._last:
                self._last = place
                self._places.append(place)
                self._nodes.append(node)

    def before(self, place: int) -> fx.Node:
        """Return the first node that runs at a place or later."""
        index = bisect_left(self._places, place)
        return self._nodes[index] if index < len(self._nodes) else self._end


def insert_moves(
    forward: fx.Graph,
    backward: fx.Graph,
    plan: RematPlan,
    in_forward: NumberOf,
    in_backward: NumberOf,
) -> None:
    """Let the forward graph return copies of moved values, which the backward graph fetches."""
    timeline = plan.timeline
    places: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
    for place, number in enumerate(timeline.nodes.tolist()):
        places[place >= timeline.num_forward][number].append(place)
    values = {in_forward(node): node for node in forward.nodes if node.op == "call_function"}
    inputs = {in_backward(node): node for node in backward.find_nodes(op="placeholder")}
    _leave(forward, _NodeFinder(forward, places[0], in_forward), plan, values)
    _return(backward, _NodeFinder(backward, places[1], in_backward), plan, inputs)


def _leave(
    graph: fx.Graph, places: _NodeFinder, plan: RematPlan, values: Mapping[int | None, fx.Node]
) -> None:
    copies: dict[int, fx.Node] = {}
    returned: dict[fx.Node, fx.Node] = {}
    for move in plan.moves:
        value = values[move.node]
        at = places.before(move.start + 1)
        with graph.inserting_before(at) if value < at else graph.inserting_after(value):
            copies[move.node] = graph.call_function(start_to_host, (value,))
    for move in sorted(plan.moves, key=lambda move: (move.release, move.start, move.node)):
        copy, at = copies[move.node], places.before(move.release + 1)
        with graph.inserting_before(at) if copy < at else graph.inserting_after(copy):
            returned[values[move.node]] = graph.call_function(wait_for, (copy,))
    output = graph.output_node()
    output.args = fx.node.map_arg(output.args, lambda node: returned.get(node, node))
    graph.lint()


def _return(
    graph: fx.Graph, places: _NodeFinder, plan: RematPlan, inputs: Mapping[int | None, fx.Node]
) -> None:
    for move in sorted(plan.moves, key=lambda move: (move.fetch, move.use, move.node)):
        value = inputs[move.node]
        first = min(value.users)
        at = min(places.before(move.fetch), first)
        with graph.inserting_before(at):
            device = value.meta["val"].device
            copy = graph.call_function(start_to_device, (value, device))
        with graph.inserting_before(first):
            fetched = graph.call_function(wait_for, (copy,))
        for user in list(value.users):
            if user is not copy:
                user.replace_input_with(value, fetched)
        # Graphs that are rewritten later read the shapes of all tensors.
        fetched.meta["val"] = value.meta["val"]
    graph.lint()
