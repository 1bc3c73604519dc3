"""Record a step on fake tensors: its operators and storages, and their nodes.

A module's own Python code runs, not Dynamo. So graph breaks do not matter, and tensors live exactly
as long as that code holds them. The values of a graph live until their last reader has run, as in
the code that FX generates.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_unitscale.capture import fake_device
from lightning_unitscale.capture.absent_ranks import has_distributed_class, local_tensor
from lightning_unitscale.capture.decompose import open_function
from lightning_unitscale.capture.graph_nodes import module_path, op_name, tensors_in, unique_name
from lightning_unitscale.functional.scale import plain_tensor
from lightning_unitscale.memory.costs import operator_costs
from lightning_unitscale.memory.gpu_kernels import DeviceCalls, calls_of, run_kernel
from lightning_unitscale.memory.gpus import GPU
from lightning_unitscale.memory.reserved import KeptWorkspaces
from lightning_unitscale.memory.step_record import (
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
from lightning_unitscale.patching import shadowed

# Keys in the metadata of autograd's functions: the forward node that made it, and when it ran.
_NODE, _TASK = "lightning_unitscale_node", "lightning_unitscale_task"
# FSDP's operator whose second argument is the buffer that a layer's parameters are gathered in.
_GATHERING = "fsdp.all_gather_copy_in.default"
_CALLS = frozenset({"call_function", "call_method", "call_module"})
# Python's names of functions with the tensor on the right. A graph has the function itself.
_REFLECTED = {"radd": "add", "rsub": "sub", "rmul": "mul", "rmatmul": "matmul", "rpow": "pow",
              "rtruediv": "truediv", "rdiv": "truediv", "rfloordiv": "floordiv",
              "rmod": "mod"}  # fmt: skip


def label(tensors: Sequence[Tensor], node: int) -> None:
    """Assign the new autograd functions behind ``tensors`` to ``node``."""
    pending: list[Any] = [tensor.grad_fn for tensor in tensors]
    while pending:
        function = pending.pop()
        if function is None or _NODE in function.metadata:
            continue
        function.metadata[_NODE] = node
        if not hasattr(function, "variable"):  # a leaf's
            pending += [following for following, _ in function.next_functions]


class StorageRecorder(fake_device.OperatorMode):
    """Recorder of every operator, and of each storage's allocation and release.

    A weak reference to each storage reports its release. So the record follows the reference counts
    of Python, of autograd's graph and of its engine.
    """

    def __init__(self, device: torch.device, gpu: GPU | None = None) -> None:
        super().__init__()
        self.device, self.gpu = device, gpu
        self.phase: Phase = "forward"
        # Index of the running forward node, and of the last node of the user's code.
        self.node = self.last_node = OUTSIDE
        self.running = ""  # name of the last node
        self.record = StepRecord(device.type, gpu=gpu)
        # The present size of each storage, and the task of the backward pass that allocated it.
        self._sizes: list[int] = []
        self._tasks: list[int] = []
        self._sums: list[tuple[int, int, int]] = []
        self._indices: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._task = 0
        self._streams = {torch.cpu.current_stream(): 0}  # a simulated GPU has the CPU's streams
        self._sums_again: Any = None
        self._kept_workspaces = KeptWorkspaces(gpu)
        self._is_paused = False

    @override
    def run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if has_distributed_class(types):
            # This is called again with the shards. The engine sums their gradients into new
            # tensors.
            self._sums_again = func
            return NotImplemented
        if self._is_paused:
            return func(*args, **kwargs)
        if sums_again := self._sums_again is func:
            self._sums_again = None
        node = self._current_node()
        inputs = tensors_in((args, kwargs))
        for tensor in inputs:
            self.storage_of(tensor)
        result = run_kernel(func, args, kwargs)
        outputs = tensors_in(result)
        costs = operator_costs(func, args, kwargs, result, device=self.device.type, gpu=self.gpu)
        self.record.operators.append(OperatorCall(str(func), self.phase, node, costs))
        self._kept_workspaces.note(func, args, self.record)
        num_storages = len(self._sizes)
        for tensor in outputs:
            index = self.storage_of(tensor, node, len(self.record.operators) - 1)
            if index != OUTSIDE:
                self._resize(index, tensor.untyped_storage().nbytes())  # by ``resize_``
        if str(func) == _GATHERING:
            self.declare(args[1], "unsharded")
        is_sum = self.phase == "backward" and func is torch.ops.aten.add.Tensor and not sums_again
        if is_sum and outputs:
            self._accumulated_in_place(inputs, len(self._sizes) > num_storages)
        return result

    def paused(self) -> AbstractContextManager[None]:
        """Record nothing in this context."""
        return shadowed(self, _is_paused=True)

    # -- nodes

    def begin_node(self, name: str) -> None:
        """Assign all following operators to the next node of the forward graph."""
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
        label(outputs, len(self.record.nodes))
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
        """Return the index of the tensor's storage, or :data:`OUTSIDE` on another device."""
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
        """Record that FSDP resizes a storage below the dispatcher, to gather or free parameters."""
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
        stream = self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))
        self.record.storages.append(StorageLife(size, node=node, born=born, stream=stream))
        self._tasks.append(self._task)
        self._indices[key] = index
        self.record.events.append(Event(index, size, born))

        def released(_: Any) -> None:
            del self._indices[key], self._watchers[key]
            # The size at the end, since it may have been resized.
            change = -self._sizes[index]
            self.record.events.append(Event(index, change, len(self.record.operators) - 1))

        self._watchers[key] = weakref.ref(storage, released)
        return index

    def _accumulated_in_place(self, inputs: Sequence[Tensor], is_new: bool) -> None:
        """Record a sum that the engine of autograd would have written into its first operand."""
        # The engine adds gradients in place if the older one has no other reference and is not a
        # view. It never does so for a tensor subclass, such as fake tensors. A sum within one
        # autograd function is part of its formula.
        if not is_new or len(inputs) < 2:
            return
        if inputs[0].shape != inputs[1].shape or inputs[0]._is_view():
            return
        old, new = self.storage_of(inputs[0]), len(self._sizes) - 1
        if OUTSIDE not in (old, new) and self._tasks[old] != self._task:
            self._sums.append((old, new, len(self.record.operators) - 1))

    # -- autograd

    def keep(self, tensor: Tensor) -> Tensor:
        """Record that autograd saves ``tensor`` for the backward pass, as its hook."""
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
        function = fake_device.current_autograd_function()
        if function is None:
            return OUTSIDE
        self._task = function.metadata.setdefault(_TASK, len(self.record.operators))
        return int(function.metadata.get(_NODE, OUTSIDE))

    # -- the end

    def finished(self) -> StepRecord:
        """Return the record, with events in the order of real tensors."""
        self._kept_workspaces.add_to(self.record)
        self.record.note_optimizer()
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


class ModuleTrace(TorchFunctionMode):
    """Recorder of a node for every torch function that a module's forward pass calls."""

    def __init__(self, module: nn.Module, recorder: StorageRecorder) -> None:
        super().__init__()
        self._paths = {submodule: path for path, submodule in module.named_modules()}
        self._running: list[str] = []  # paths of the modules whose ``forward`` runs
        self._recorder = recorder
        self._call = calls_of(recorder.gpu)
        self._names: Counter[str] = Counter()
        self._name_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Make every torch function a node in this context."""

        def leave(*_: Any) -> None:
            self._running.pop()

        with contextlib.ExitStack() as hooks, fake_device.forgetting_control_flow(), self:
            for module, path in self._paths.items():
                enter = partial(self._enter, path)
                hooks.enter_context(module.register_forward_pre_hook(enter, prepend=True))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            yield

    def _enter(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def name_input(self, tensor: Tensor, name: str) -> None:
        """Name a tensor that the graph starts from."""
        self._name_of[tensor] = name

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if func is F.multi_head_attention_forward:
            # Expanded, as in a captured graph, since its parts depend on the device too.
            with self:
                return open_function(func)(*args, **kwargs)
        if fake_device.is_control_flow(func):
            with self:
                return fake_device.run_control_flow(func, args, kwargs)
        if recorder.phase != "forward":
            # A checkpoint's recomputation belongs to the backward pass.
            return self._call(func, args, kwargs)
        op, path = function_name(func), self._running[-1] if self._running else ""
        inputs = list(map(plain_tensor, tensors_in((args, kwargs))))
        label(inputs, len(recorder.record.nodes) - 1)
        num_operators = len(recorder.record.operators)
        recorder.begin_node(f"{path}.{op}".lstrip("."))
        result = self._call(func, args, kwargs)
        outputs = list(map(plain_tensor, tensors_in(result)))
        if outputs or len(recorder.record.operators) > num_operators:
            name = unique_name(recorder.running, self._names)
            named = {self._name_of.get(tensor, "constant"): tensor for tensor in inputs}
            recorder.last_node = len(recorder.record.nodes)
            recorder.add_node(name, op, path, list(named.items()), outputs)
            for tensor in outputs:
                self._name_of[tensor] = name
        recorder.node = OUTSIDE
        return result


class GraphTrace(fx.Interpreter):
    """Interpreter that records each call of a graph as a node."""

    def __init__(self, graph_module: fx.GraphModule, recorder: StorageRecorder) -> None:
        super().__init__(graph_module)
        self._recorder = recorder

    def name_input(self, tensor: Tensor, name: str) -> None:
        """Do nothing, since inputs have the names of their placeholders."""

    def watching(self) -> TorchFunctionMode:
        """Call functions as on the device in this context."""
        return DeviceCalls(self._recorder.gpu)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and record it."""
        if n.op not in _CALLS:
            return super().run_node(n)
        self._recorder.begin_node(n.name)
        result = super().run_node(n)
        self._recorder.node = OUTSIDE
        inputs = [
            (read.name, tensor)
            for read in n.all_input_nodes
            for tensor in tensors_in(self.env[read])
        ]
        self._recorder.add_node(n.name, op_name(n), module_path(n), inputs, tensors_in(result))
        return result


def function_name(function: Any) -> str:
    """Return the short name of a torch function, as a captured graph has it."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)
    name = name.split(".")[0].strip("_") or name
    return _REFLECTED.get(name, name)
