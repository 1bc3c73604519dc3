"""Fake tensors on a device that need not exist, and a mode that notes every storage's life.

The file of the profiler that touches torch's own names. Checked on torch 2.13: ``FakeTensorMode``
and its exceptions, ``_current_autograd_node``, ``_execution_engine``, ``_IncludeDispatchKeyGuard``,
``_cdata`` of a storage, and that C++ asks a fake tensor for its device through the operator ``prim::device``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

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

DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
# Keys of what is noted on autograd's functions: the forward node that made it, and when it ran.
_NODE, _TASK = "lightning_unitscale_node", "lightning_unitscale_task"
# What C++ is told of the simulated device. Python's own is without an index.
_STAND_IN = torch.device("cpu", 0)


class SimulatedDevice(FakeTensorMode):
    """The mode in which nothing is computed; constants of the user's become fake by themselves.

    C++ looks up a stream and a queue for the device of every tensor that takes part in autograd,
    and ends the process where the device has no driver. So C++ is told that the device is
    ``cpu:0``, and what it wants to make there is made on the device; Python code sees the device
    itself. A CPU's queue also means that the backward pass runs in the calling thread, where
    dispatch modes can see it.

    Args:
        device: The device, which need not exist.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and not self.in_kernel_invocation:
            given: torch.device = args[0].device
            return given if given.type == "cpu" else _STAND_IN
        kwargs = kwargs or {}
        # ``to`` compares the devices in C++, where both are the stand-in, and calls ``_to_copy``.
        is_made = kwargs.get("device") == _STAND_IN and func.overloadpacket is not torch.ops.aten.to
        if is_made and self.device.type != "cpu":
            kwargs = {**kwargs, "device": self.device}
        return super().__torch_dispatch__(func, types, args, kwargs)


class FakeCopies:
    """Fake tensors on one device in place of real (or fake, or meta) ones: only metadata is read.

    Tensors that share a storage get fakes that do; the same tensor always gets the same fake.

    Args:
        mode: The fake mode.
        device: Where the fakes claim to be.
    """

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._bases: dict[int, Tensor] = {}
        self._fakes: dict[int, Tensor] = {}
        # Identities are of living objects only.
        self._alive: list[Any] = []

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of ``tensor``, a parameter if it is one.

        Raises:
            TypeError: If it is of a class that is more than one plain tensor.
        """
        if id(tensor) not in self._fakes:
            self._alive.append(tensor)
            self._fakes[id(tensor)] = self._make(tensor)
        return self._fakes[id(tensor)]

    def known(self) -> dict[int, Tensor]:
        """The fakes made so far, by the identity of what they stand for."""
        return self._fakes

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor):
            raise TypeError(
                f"tensor={type(tensor).__name__} of layout {tensor.layout}: its memory is not one "
                "plain storage; expected dense tensors; profile the module before it is sharded, "
                "quantized or made sparse."
            )
        storage = tensor.untyped_storage()
        if storage._cdata not in self._bases:
            self._alive.append(storage)
            count = -(-storage.nbytes() // tensor.element_size())
            with self._mode:
                self._bases[storage._cdata] = torch.empty(
                    count, dtype=tensor.dtype, device=self._device
                )
        base = self._bases[storage._cdata]
        with self._mode, torch.no_grad():
            flat = base if base.dtype == tensor.dtype else base.view(tensor.dtype)
            fake = flat.as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


class StorageRecorder(TorchDispatchMode):
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
        result = _run(func, args, kwargs)
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
        pending = [one.grad_fn for one in tensors if one.grad_fn is not None]
        while pending:
            function = pending.pop()
            if function is None or _NODE in function.metadata:
                continue
            function.metadata[_NODE] = node
            if not hasattr(function, "variable"):  # a leaf's
                pending += [one for one, _ in function.next_functions]

    def keep(self, tensor: Tensor) -> Tensor:
        """Hook of autograd: ``tensor`` is saved for the backward pass."""
        place = self.place(tensor)
        if place != OUTSIDE and self.phase == "forward":
            # An autograd function of the user's saves after its last node.
            node = self.last_node if self.node == OUTSIDE else self.node
            self.saved.append(SavedStorage(place, node))
        return tensor

    def _current_node(self) -> int:
        if self.phase != "backward":
            return self.node
        function = torch._C._current_autograd_node()
        if function is None:
            return OUTSIDE
        self._task = function.metadata.setdefault(_TASK, len(self.operators))
        return function.metadata.get(_NODE, OUTSIDE)

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


@contextlib.contextmanager
def autocast_for(device: torch.device) -> Iterator[None]:
    """Within this context ``torch.autocast`` of the simulated device works.

    Where there is no GPU, torch switches its autocast off with a warning; and its kernels look for
    tensors on a GPU, which C++ sees none of. So autocast of the CPU stands in for it, with the
    type that was asked for; the functions in which the two differ are in ``device_kernels``.
    """
    if device.type == "cpu":
        yield
        return
    original = torch.autocast.__init__

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == device.type:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(device.type)
        original(self, device_type, dtype, *args, **kwargs)

    setattr(torch.autocast, "__init__", init)  # noqa: B010 (an assignment mypy would refuse)
    try:
        with torch._C._IncludeDispatchKeyGuard(torch.DispatchKey.AutocastCPU):
            yield
    finally:
        setattr(torch.autocast, "__init__", original)  # noqa: B010


def run_backward(roots: Sequence[Tensor]) -> None:
    """``torch.autograd.backward`` with gradients of one.

    The function itself would be seen by torch function modes as one call, within which they are
    off; but what a checkpoint runs again must be called as in the forward pass.
    """
    gradients = tuple(torch.ones_like(one) for one in roots)
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class FakeScalars(TorchDispatchMode):
    """Answers a program that asks a fake tensor for its value.

    Optimizers look at their step count; what they allocate does not depend on it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.answer(args[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def answer(tensor: Tensor) -> float | int:
        """The value of a tensor that has none; neither 0 nor 1, which may be divided by."""
        return 0.5 if tensor.is_floating_point() else 2


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operator on fake tensors."""
    packet = getattr(func, "overloadpacket", func)
    if packet is getattr(torch.ops.aten, "_grouped_mm", None) and args[0].dtype != torch.bfloat16:
        # Fake tensors know the shapes for BF16 only, the kernels also other types (torch 2.13).
        in_bf16 = [
            one.bfloat16() if isinstance(one, Tensor) and one.is_floating_point() else one
            for one in args
        ]
        return func(*in_bf16, **kwargs).to(args[0].dtype)
    if packet is torch.ops.aten.native_layer_norm and args[0].device.type == "cpu":
        result, *statistics = func(*args, **kwargs)
        # Of 16-bit inputs with FP32 gains the CPU keeps them in FP32, which fake tensors do not.
        dtype = args[0].dtype if args[2] is None else args[2].dtype
        return (result, *(one.to(dtype) for one in statistics))
    return func(*args, **kwargs)
