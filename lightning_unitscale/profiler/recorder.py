"""A mode that notes every operator of a step and every storage's life."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.functional.scale import plain_tensor
from lightning_unitscale.graph.nodes import tensors_in
from lightning_unitscale.patching import shadowed
from lightning_unitscale.profiler.costs import operator_costs
from lightning_unitscale.profiler.fake_device import (
    DispatchMode,
    FakeScalars,
    current_autograd_function,
    run_operator,
)
from lightning_unitscale.profiler.record import (
    OUTSIDE,
    Event,
    Kind,
    NodeCosts,
    NodeRecord,
    OperatorCall,
    Phase,
    StepRecord,
    StorageLife,
)
from lightning_unitscale.profiler.sharded import is_distributed, local_tensor

# Keys of what is noted on autograd's functions: the forward node that made it, and when it ran.
_NODE, _TASK = "lightning_unitscale_node", "lightning_unitscale_task"
# FSDP's operator whose second argument is the buffer that a layer's parameters are gathered in.
_GATHERING = "fsdp.all_gather_copy_in.default"


class StorageRecorder(DispatchMode):
    """Notes every operator, and when each storage of the device is allocated and released.

    Storages are told apart by identity and their release is seen by a weak reference, so what is
    recorded is what reference counts did: those of Python, of autograd's graph and of its engine.

    Attributes:
        phase: The part of the step that runs.
        node: Index of the forward node that runs.
        last_node: Index of the last node of the user's code.
        running: Name of the last node that was begun.
        record: What was seen so far, the events in the order in which they happened.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.phase: Phase = "forward"
        self.node = self.last_node = OUTSIDE
        self.running = ""
        self.record = StepRecord(device.type)
        # The present size of each storage, and the task of the backward pass that allocated it.
        self._sizes: list[int] = []
        self._tasks: list[int] = []
        self._sums: list[tuple[int, int, int]] = []
        self._indices: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._task = 0
        self._sums_anew: Any = None
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_distributed(types):
            # It calls this again with the shards. The engine sums such gradients into new tensors.
            self._sums_anew = func
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if sums_anew := self._sums_anew is func:
            self._sums_anew = None
        if func is torch.ops.prim.device.default or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and self.phase == "optimizer":
            return FakeScalars.answer(args[0])
        node = self._current_node()
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            self.storage_of(tensor)
        result = run_operator(func, args, kwargs)
        outputs = tensors_in(result)
        costs = operator_costs(func, args, kwargs, result, device=self.device.type)
        self.record.operators.append(OperatorCall(str(func), self.phase, node, costs))
        num_storages = len(self._sizes)
        for tensor in outputs:
            self._follow(tensor, node)
        if str(func) == _GATHERING:
            self.declare(args[1], "unsharded")
        is_sum = self.phase == "backward" and func is torch.ops.aten.add.Tensor and not sums_anew
        if is_sum and outputs:
            self._accumulated_in_place(inputs, len(self._sizes) > num_storages)
        return result

    def paused(self) -> AbstractContextManager[None]:
        """Within this context nothing is noted."""
        return shadowed(self, _is_paused=True)

    # -- nodes

    def begin_node(self, name: str) -> None:
        """What follows belongs to the next node of the forward graph."""
        self.node, self.running = len(self.record.nodes), name

    def add_node(
        self,
        name: str,
        op: str,
        module: str,
        inputs: Sequence[tuple[str, Tensor]],
        outputs: Sequence[Tensor],
    ) -> None:
        """Add a node that has run."""
        first = outputs[0] if outputs else None
        self.label(outputs, len(self.record.nodes))
        names = NodeCosts(
            name,
            op,
            module,
            tuple(read for read, _ in inputs),
            () if first is None else tuple(map(int, first.shape)),
            "" if first is None else str(first.dtype).removeprefix("torch."),
        )
        read = tuple(self.storage_of(tensor) for _, tensor in inputs)
        self.record.nodes.append(NodeRecord(names, read, tuple(map(self.storage_of, outputs))))

    # -- storages

    def storage_of(self, tensor: Tensor) -> int:
        """Index of the tensor's storage; :data:`OUTSIDE` if it is on another device.

        A storage that was not seen before has been there from the beginning.
        """
        tensor = local_tensor(tensor)
        if not self._counts(tensor):
            return OUTSIDE
        storage = tensor.untyped_storage()
        index = self._indices.get(storage._cdata)
        return self._register(storage, OUTSIDE, OUTSIDE) if index is None else index

    def declare(self, tensor: Tensor, kind: Kind) -> None:
        """Say what a tensor is that is there before the step, or stays after it."""
        index = self.storage_of(tensor)
        if index != OUTSIDE:
            self.record.storages[index].kind = kind

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type and tensor.layout == torch.strided

    def _follow(self, tensor: Tensor, node: int) -> None:
        if not self._counts(tensor):
            return
        storage = tensor.untyped_storage()
        index = self._indices.get(storage._cdata)
        if index is None:
            self._register(storage, node, len(self.record.operators) - 1)
            return
        self._resize(index, storage.nbytes())  # by ``resize_``

    def resizing(self, storage: Any, num_bytes: int) -> None:
        """Say that a storage is about to get another size, below the dispatcher.

        So does FSDP allocate and free what it gathers.
        """
        index = self._indices.get(storage._cdata)
        if index is None:
            index = self._register(storage, OUTSIDE, OUTSIDE)
        self.record.storages[index].kind = "unsharded"
        self._resize(index, num_bytes)

    def _resize(self, index: int, num_bytes: int) -> None:
        change = num_bytes - self._sizes[index]
        if change:
            self._sizes[index] = num_bytes
            life = self.record.storages[index]
            life.num_bytes = max(life.num_bytes, num_bytes)
            self.record.events.append(Event(index, change, len(self.record.operators) - 1))

    def _register(self, storage: Any, node: int, born: int) -> int:
        index, key = len(self._sizes), storage._cdata
        size = storage.nbytes()
        self._sizes.append(size)
        self.record.storages.append(StorageLife(size, node=node, born=born))
        self._tasks.append(self._task)
        self._indices[key] = index
        self.record.events.append(Event(index, size, born))

        def released(_: Any) -> None:
            del self._indices[key], self._watchers[key]
            # The size at the end: it may have been resized.
            change = -self._sizes[index]
            self.record.events.append(Event(index, change, len(self.record.operators) - 1))

        self._watchers[key] = weakref.ref(storage, released)
        return index

    def _accumulated_in_place(self, inputs: Sequence[Tensor], is_new: bool) -> None:
        """Note a sum that the engine of autograd would have written into its first operand.

        Where gradients meet, the engine adds the new one to the old in place if nobody else has
        it and it is no view (whose base would be somebody else), but never into a tensor subclass,
        as fake tensors are. A sum within one autograd function is its formula's.
        """
        if not is_new or len(inputs) < 2:
            return
        if inputs[0].shape != inputs[1].shape or inputs[0]._is_view():
            return
        old, new = self.storage_of(inputs[0]), len(self._sizes) - 1
        if OUTSIDE not in (old, new) and self._tasks[old] != self._task:
            self._sums.append((old, new, len(self.record.operators) - 1))

    # -- autograd

    def label(self, tensors: Sequence[Tensor], node: int) -> None:
        """Say that the autograd functions behind ``tensors``, as far as new, are of ``node``."""
        pending: list[Any] = [tensor.grad_fn for tensor in tensors]
        while pending:
            function = pending.pop()
            if function is None or _NODE in _notes(function):
                continue
            _notes(function)[_NODE] = node
            if not hasattr(function, "variable"):  # a leaf's
                pending += [following for following, _ in function.next_functions]

    def keep(self, tensor: Tensor) -> Tensor:
        """Hook of autograd: ``tensor`` is saved for the backward pass."""
        index = self.storage_of(plain_tensor(tensor))
        if index != OUTSIDE and self.phase == "forward":
            # An autograd function of the user's saves after its last node.
            node = self.last_node if self.node == OUTSIDE else self.node
            self.record.saved.append((index, node))
            if self.record.storages[index].kind == "temporary":
                self.record.storages[index].kind = "activation"
        return tensor

    def _current_node(self) -> int:
        if self.phase != "backward":
            return self.node
        function = current_autograd_function()
        if function is None:
            return OUTSIDE
        self._task = _notes(function).setdefault(_TASK, len(self.record.operators))
        return int(_notes(function).get(_NODE, OUTSIDE))

    # -- the end

    def finished(self) -> StepRecord:
        """The record, with events in the order in which they happen on real tensors."""
        # What was seen late and had been there from the beginning comes first.
        events = sorted(self.record.events, key=lambda event: event.operator != OUTSIDE)
        born = {event.storage: order for order, event in enumerate(events) if event.change > 0}
        for old, new, operator in self._sums:
            start = born[new]
            for order in range(start + 1, len(events)):
                if events[order].operator != operator:
                    break  # somebody still reads the old gradient: it was not overwritten
                if events[order].storage == old:
                    events[start], events[order] = events[order], events[start]
                    break
        return replace(self.record, events=events)


def _notes(function: Any) -> dict[Any, Any]:
    """What Python code may note on a function of autograd; it lives as long as that."""
    notes: dict[Any, Any] = function.metadata
    return notes
