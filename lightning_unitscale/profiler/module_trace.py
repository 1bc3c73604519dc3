"""Runs a module on fake tensors and writes down its forward graph, one node per torch function.

Nothing is traced by Dynamo: the module's own Python code runs, so what breaks its graphs does not
matter here, and tensors live exactly as long as that code holds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_unitscale.functional.func_transforms import plain_tensor
from lightning_unitscale.graph.expand import open_function
from lightning_unitscale.profiler.control_flow import run_control_flow
from lightning_unitscale.profiler.memory import forgetting_control_flow, is_control_flow
from lightning_unitscale.profiler.step_record import OUTSIDE, NodeRecord
from lightning_unitscale.profiler.storage_recorder import StorageRecorder

# What Python calls when the tensor is on the right; a graph has the function itself.
_REFLECTED = {"radd": "add", "rsub": "sub", "rmul": "mul", "rmatmul": "matmul", "rpow": "pow",
              "rtruediv": "truediv", "rdiv": "truediv", "rfloordiv": "floordiv",
              "rmod": "mod"}  # fmt: skip


class ModulePaths:
    """Path of the module whose ``forward`` is running."""

    def __init__(self, module: nn.Module) -> None:
        self._paths = {one: path for path, one in module.named_modules()}
        self._stack: list[str] = []

    @property
    def current(self) -> str:
        """The innermost one; empty for the root."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context the path is followed."""
        handles = []
        for one, path in self._paths.items():
            handles.append(one.register_forward_pre_hook(self._enter(path), prepend=True))
            handles.append(one.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._stack.clear()

    def _enter(self, path: str) -> Callable[..., None]:
        return lambda *_: self._stack.append(path)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()


class NodeTrace(TorchFunctionMode):
    """Makes a node of every torch function that the forward pass calls.

    Args:
        recorder: Notes the operators and storages; told which node is running.
        paths: Knows which module is running.
        call: Calls a function as the device would have it called.

    Attributes:
        nodes: The nodes so far.
        running: Name of the last that was begun.
    """

    def __init__(
        self,
        recorder: StorageRecorder,
        paths: ModulePaths,
        call: Callable[..., Any],
    ) -> None:
        super().__init__()
        self.nodes: list[NodeRecord] = []
        self.running = ""
        self._recorder = recorder
        self._paths = paths
        self._call = call
        self._names: dict[str, int] = {}
        # Names of tensors by identity, which is theirs only as long as they live.
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context every torch function becomes a node."""
        with forgetting_control_flow(), self._paths.watched(), self:
            yield

    def name_input(self, tensor: Tensor, name: str) -> None:
        """Say what a tensor that the graph starts from is called."""
        self._made[tensor] = name

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if func is F.multi_head_attention_forward:
            # Opened, as in a captured graph: what is inside depends on the device too.
            with self:
                return open_function(func)(*args, **kwargs)
        if is_control_flow(func):
            with self:
                return run_control_flow(func, args, kwargs)
        if recorder.phase != "forward":
            # What a checkpoint runs again is part of the backward pass.
            return self._call(func, args, kwargs)
        op = function_name(func)
        given = _tensors((args, kwargs))
        recorder.label(given, len(self.nodes) - 1)
        num_operators = len(recorder.operators)
        recorder.node = len(self.nodes)
        self.running = f"{self._paths.current}.{op}".lstrip(".")
        result = self._call(func, args, kwargs)
        made = _tensors(result)
        if made or len(recorder.operators) > num_operators:
            self._add(op, given, made)
        recorder.node = OUTSIDE
        return result

    def _add(self, op: str, given: list[Tensor], made: list[Tensor]) -> None:
        recorder = self._recorder
        name = self._unique(self.running)
        inputs = {self._made.get(one, "constant"): recorder.place(one) for one in given}
        first = made[0] if made else None
        node = NodeRecord(
            name,
            op,
            self._paths.current,
            tuple(inputs),
            tuple(inputs.values()),
            tuple(recorder.place(one) for one in made),
            () if first is None else tuple(map(int, first.shape)),
            "" if first is None else str(first.dtype).removeprefix("torch."),
        )
        recorder.label(made, len(self.nodes))
        recorder.last_node = len(self.nodes)
        self.nodes.append(node)
        for one in made:
            self._made[one] = name

    def _unique(self, base: str) -> str:
        name = base
        while name in self._names:
            name = f"{base}_{self._names[base]}"
            self._names[base] += 1
        self._names[name] = 1
        return name


def _tensors(values: Any) -> list[Tensor]:
    return [plain_tensor(one) for one in tree_leaves(values) if isinstance(one, Tensor)]


def function_name(function: Any) -> str:
    """Short name of a torch function, as a captured graph has it."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)
    name = name.split(".")[0].strip("_") or name
    return _REFLECTED.get(name, name)
