"""A dispatch mode that records every operator of a step and the life of every storage."""

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

# Keys in the metadata of autograd's functions: the forward node that made it, and when it ran.
_NODE, _TASK = "lightning_unitscale_node", "lightning_unitscale_task"
# FSDP's operator whose second argument is the buffer that a layer's parameters are gathered in.
_GATHERING = "fsdp.all_gather_copy_in.default"


class StorageRecorder(DispatchMode):
    """Records every operator, and when each storage of the device is allocated and released.

    A weak reference to each storage reports its release. So the record shows the reference counts
    of Python, of autograd's graph and of its engine.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.phase: Phase = "forward"
        # Index of the forward node that runs, and of the last node of the user's code.
        self.node = self.last_node = OUTSIDE
        self.running = ""  # name of the last node that was begun
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
            # This is called again with the shards. The engine sums such gradients into new tensors.
            self._sums_anew = func
            return NotImplemented
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if sums_anew := self._sums_anew is func:
            self._sums_anew = None
        if func is torch.ops.prim.device.default or func.namespace == "profiler":
            return func(*args, **kwargs)
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
            index = self.storage_of(tensor, node, len(self.record.operators) - 1)
            if index != OUTSIDE:
                self._resize(index, tensor.untyped_storage().nbytes())  # by ``resize_``
        if str(func) == _GATHERING:
            self.declare(args[1], "unsharded")
        is_sum = self.phase == "backward" and func is torch.ops.aten.add.Tensor and not sums_anew
        if is_sum and outputs:
            self._accumulated_in_place(inputs, len(self._sizes) > num_storages)
        return result

    def paused(self) -> AbstractContextManager[None]:
        """Within this context record nothing."""
        return shadowed(self, _is_paused=True)

    # -- nodes

    def begin_node(self, name: str) -> None:
        """Let all following operators belong to the next node of the forward graph."""
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

    def storage_of(self, tensor: Tensor, node: int = OUTSIDE, born: int = OUTSIDE) -> int:
        """Return the index of the tensor's storage; :data:`OUTSIDE` if it is on another device.

        An unknown storage is one of this node and operator, by default from before the step.
        """
        tensor = local_tensor(tensor)
        if tensor.device.type != self.device.type or tensor.layout != torch.strided:
            return OUTSIDE
        return self._index(tensor.untyped_storage(), node, born)

    def declare(self, tensor: Tensor, kind: Kind) -> None:
        """Set the kind of a tensor that exists before the step, or stays after it."""
        index = self.storage_of(tensor)
        if index != OUTSIDE:
            self.record.storages[index].kind = kind

    def resizing(self, storage: Any, num_bytes: int) -> None:
        """Record that a storage gets another size below the dispatcher.

        FSDP allocates and frees gathered parameters like this.
        """
        index = self._index(storage)
        self.record.storages[index].kind = "unsharded"
        self._resize(index, num_bytes)

    def _resize(self, index: int, num_bytes: int) -> None:
        change = num_bytes - self._sizes[index]
        if change:
            self._sizes[index] = num_bytes
            life = self.record.storages[index]
            life.num_bytes = max(life.num_bytes, num_bytes)
            self.record.events.append(Event(index, change, len(self.record.operators) - 1))

    def _index(self, storage: Any, node: int = OUTSIDE, born: int = OUTSIDE) -> int:
        key = storage._cdata
        if key in self._indices:
            return self._indices[key]
        index, size = len(self._sizes), storage.nbytes()
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
        """Record a sum that the engine of autograd would have written into its first operand.

        The engine adds gradients in place if nothing else refers to the older one and it is no
        view. It never does so for a tensor subclass, such as fake tensors. A sum within one
        autograd function belongs to its formula.
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
        """Assign the new ones of the autograd functions behind ``tensors`` to ``node``."""
        pending: list[Any] = [tensor.grad_fn for tensor in tensors]
        while pending:
            function = pending.pop()
            if function is None or _NODE in function.metadata:
                continue
            function.metadata[_NODE] = node
            if not hasattr(function, "variable"):  # a leaf's
                pending += [following for following, _ in function.next_functions]

    def keep(self, tensor: Tensor) -> Tensor:
        """Record that autograd saves ``tensor`` for the backward pass; a hook of it."""
        index = self.storage_of(plain_tensor(tensor))
        if index != OUTSIDE and self.phase == "forward":
            # An autograd function of the user saves after its last node.
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
        self._task = function.metadata.setdefault(_TASK, len(self.record.operators))
        return int(function.metadata.get(_NODE, OUTSIDE))

    # -- the end

    def finished(self) -> StepRecord:
        """Return the record, with events in the order of real tensors."""
        # Storages from before the step come first, even if they were seen later.
        events = sorted(self.record.events, key=lambda event: event.operator != OUTSIDE)
        born = {event.storage: order for order, event in enumerate(events) if event.change > 0}
        for old, new, operator in self._sums:
            start = born[new]
            for order in range(start + 1, len(events)):
                if events[order].operator != operator:
                    break  # the old gradient is still read, so it was not overwritten
                if events[order].storage == old:
                    events[start], events[order] = events[order], events[start]
                    break
        return replace(self.record, events=events)
