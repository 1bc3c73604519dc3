"""A mode that notes every operator of a step and every storage's life."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_unitscale.functional.func_transforms import plain_tensor
from lightning_unitscale.profiler.memory import (
    DispatchMode,
    FakeScalars,
    current_autograd_function,
    run_operator,
)
from lightning_unitscale.profiler.operator_costs import operator_costs
from lightning_unitscale.profiler.step_record import (
    OUTSIDE,
    Event,
    Kind,
    NodeRecord,
    OperatorCall,
    Phase,
    SavedStorage,
    StepRecord,
    StorageLife,
)
from lightning_unitscale.profiler.workspace import workspace_bytes

# Keys of what is noted on autograd's functions: the forward node that made it, and when it ran.
_NODE, _TASK = "lightning_unitscale_node", "lightning_unitscale_task"


class StorageRecorder(DispatchMode):
    """Notes every operator, and when each storage of the device is allocated and released.

    Storages are told apart by identity and their release is seen by a weak reference, so what is
    recorded is what reference counts did: those of Python, of autograd's graph and of its engine.

    Args:
        device: Storages on devices of another type are not counted.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.phase: Phase = "forward"
        self.node = self.last_node = OUTSIDE
        self.operators: list[OperatorCall] = []
        self.events: list[Event] = []
        self.saved: list[SavedStorage] = []
        self._sizes: list[int] = []
        self._births: list[tuple[int, int]] = []
        self._tasks: list[int] = []
        self._sums: list[tuple[int, int, int]] = []
        self._kinds: dict[int, Kind] = {}
        self._names: dict[int, str] = {}
        self._places: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._task = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args)
        if func is torch.ops.aten._local_scalar_dense.default and self.phase == "optimizer":
            return FakeScalars.answer(args[0])
        node = self._current_node()
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        for one in given:
            self.place(one)
        result = run_operator(func, args, kwargs)
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        costs = operator_costs(func, args, kwargs, result)
        workspace = workspace_bytes(func, args, kwargs, result, self.device.type)
        self.operators.append(
            OperatorCall(str(func), self.phase, node, costs.flops, costs.bytes_moved, workspace)
        )
        num_storages = len(self._sizes)
        for one in made:
            self._follow(one, node)
        if self.phase == "backward" and func is torch.ops.aten.add.Tensor and made:
            self._accumulated_in_place(given, len(self._sizes) > num_storages)
        return result

    # -- storages

    def place(self, tensor: Tensor) -> int:
        """Place of the tensor's storage; :data:`OUTSIDE` if it is on another device.

        A storage that was not seen before has been there from the beginning.
        """
        if tensor.device.type != self.device.type or tensor.layout != torch.strided:
            return OUTSIDE
        storage = tensor.untyped_storage()
        place = self._places.get(storage._cdata)
        return self._register(storage, OUTSIDE, OUTSIDE) if place is None else place

    def declare(self, tensor: Tensor, kind: Kind, name: str = "") -> None:
        """Say what a tensor is that is there before the step, or stays after it."""
        place = self.place(tensor)
        if place != OUTSIDE:
            self._kinds[place] = kind
            self._names.setdefault(place, name)

    def _follow(self, tensor: Tensor, node: int) -> None:
        if tensor.device.type != self.device.type or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        place = self._places.get(storage._cdata)
        if place is None:
            self._register(storage, node, len(self.operators) - 1)
            return
        change = storage.nbytes() - self._sizes[place]
        if change:  # ``resize_``
            self._sizes[place] += change
            self.events.append(Event(place, change, len(self.operators) - 1))

    def _register(self, storage: Any, node: int, born: int) -> int:
        place, key = len(self._sizes), storage._cdata
        size = storage.nbytes()
        self._sizes.append(size)
        self._births.append((node, born))
        self._tasks.append(self._task)
        self._places[key] = place
        if born != OUTSIDE:
            self.events.append(Event(place, size, born))

        def released(_: Any) -> None:
            del self._places[key], self._watchers[key]
            # The size at the end: it may have been resized.
            self.events.append(Event(place, -self._sizes[place], len(self.operators) - 1))

        self._watchers[key] = weakref.ref(storage, released)
        return place

    def _accumulated_in_place(self, given: Sequence[Tensor], is_new: bool) -> None:
        """Note a sum that the engine of autograd would have written into its first operand.

        Where gradients meet, the engine adds the new one to the old in place if nobody else has
        it and it is no view (whose base would be somebody else), but never into a tensor subclass,
        as fake tensors are. A sum within one autograd function is its formula's.
        """
        if not is_new or len(given) < 2 or given[0].shape != given[1].shape or given[0]._is_view():
            return
        old, new = self.place(given[0]), len(self._sizes) - 1
        if OUTSIDE not in (old, new) and self._tasks[old] != self._task:
            self._sums.append((old, new, len(self.operators) - 1))

    # -- autograd

    def label(self, tensors: Sequence[Tensor], node: int) -> None:
        """Say that the autograd functions behind ``tensors``, as far as new, are of ``node``."""
        pending: list[Any] = [one.grad_fn for one in tensors]
        while pending:
            function = pending.pop()
            if function is None or _NODE in _notes(function):
                continue
            _notes(function)[_NODE] = node
            if not hasattr(function, "variable"):  # a leaf's
                pending += [one for one, _ in function.next_functions]

    def keep(self, tensor: Tensor) -> Tensor:
        """Hook of autograd: ``tensor`` is saved for the backward pass."""
        place = self.place(plain_tensor(tensor))
        if place != OUTSIDE and self.phase == "forward":
            # An autograd function of the user's saves after its last node.
            node = self.last_node if self.node == OUTSIDE else self.node
            self.saved.append(SavedStorage(place, node))
        return tensor

    def _current_node(self) -> int:
        if self.phase != "backward":
            return self.node
        function = current_autograd_function()
        if function is None:
            return OUTSIDE
        self._task = _notes(function).setdefault(_TASK, len(self.operators))
        return int(_notes(function).get(_NODE, OUTSIDE))

    # -- the end

    def record(self, nodes: Sequence[NodeRecord]) -> StepRecord:
        """What was seen, as data.

        Args:
            nodes: The forward graph.
        """
        return StepRecord(
            self.device.type,
            tuple(nodes),
            self._storages(),
            tuple(self.operators),
            self._ordered_events(),
            tuple(self.saved),
        )

    def _ordered_events(self) -> tuple[Event, ...]:
        """Allocations and releases in the order in which they happen on real tensors."""
        events = list(self.events)
        born = {one.storage: place for place, one in enumerate(events) if one.change > 0}
        for old, new, operator in self._sums:
            start = born[new]
            for place in range(start + 1, len(events)):
                if events[place].operator != operator:
                    break  # somebody still reads the old gradient: it was not overwritten
                if events[place].storage == old:
                    events[start], events[place] = events[place], events[start]
                    break
        return tuple(events)

    def _storages(self) -> tuple[StorageLife, ...]:
        """Every storage of the device, by its place."""
        kept = {one.storage for one in self.saved}
        return tuple(
            StorageLife(
                size,
                self._kinds.get(place, "activation" if place in kept else "temporary"),
                *self._births[place],
                self._names.get(place, ""),
            )
            for place, size in enumerate(self._sizes)
        )


def _notes(function: Any) -> dict[Any, Any]:
    """What Python code may note on a function of autograd; it lives as long as that."""
    notes: dict[Any, Any] = function.metadata
    return notes
