"""Nodes of a step that runs on fake tensors: of a module's own code, or of an existing graph.

A module's own Python code runs, not Dynamo: graph breaks do not matter, and tensors live exactly as
long as that code holds them. The values of a graph live until their last reader has run, as in the
code that FX generates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_unitscale.functional.scale import plain_tensor
from lightning_unitscale.graph.decompose import open_function
from lightning_unitscale.graph.nodes import module_path, op_name, tensors_in
from lightning_unitscale.profiler.fake_device import (
    calls_of,
    forgetting_control_flow,
    is_control_flow,
    run_control_flow,
)
from lightning_unitscale.profiler.record import OUTSIDE
from lightning_unitscale.profiler.recorder import StorageRecorder

_CALLS = frozenset({"call_function", "call_method", "call_module"})
# Python's names of functions if the tensor is on the right; a graph has the function itself.
_REFLECTED = {"radd": "add", "rsub": "sub", "rmul": "mul", "rmatmul": "matmul", "rpow": "pow",
              "rtruediv": "truediv", "rdiv": "truediv", "rfloordiv": "floordiv",
              "rmod": "mod"}  # fmt: skip


class ModuleTrace(TorchFunctionMode):
    """Makes a node of every torch function that a module's forward pass calls."""

    def __init__(self, module: nn.Module, recorder: StorageRecorder) -> None:
        super().__init__()
        self._paths = {submodule: path for path, submodule in module.named_modules()}
        self._running: list[str] = []  # paths of the modules whose ``forward`` runs
        self._recorder = recorder
        self._call = calls_of(recorder.device)
        self._names: dict[str, int] = {}
        self._name_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context every torch function becomes a node."""

        def leave(*_: Any) -> None:
            self._running.pop()

        with contextlib.ExitStack() as hooks, forgetting_control_flow(), self:
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
            # Opened, as in a captured graph: its parts depend on the device too.
            with self:
                return open_function(func)(*args, **kwargs)
        if is_control_flow(func):
            with self:
                return run_control_flow(func, args, kwargs)
        if recorder.phase != "forward":
            # A checkpoint's recomputation belongs to the backward pass.
            return self._call(func, args, kwargs)
        op, path = function_name(func), self._running[-1] if self._running else ""
        inputs = list(map(plain_tensor, tensors_in((args, kwargs))))
        recorder.label(inputs, len(recorder.record.nodes) - 1)
        num_operators = len(recorder.record.operators)
        recorder.begin_node(f"{path}.{op}".lstrip("."))
        result = self._call(func, args, kwargs)
        outputs = list(map(plain_tensor, tensors_in(result)))
        if outputs or len(recorder.record.operators) > num_operators:
            name = self._unique(recorder.running)
            named = {self._name_of.get(tensor, "constant"): tensor for tensor in inputs}
            recorder.last_node = len(recorder.record.nodes)
            recorder.add_node(name, op, path, list(named.items()), outputs)
            for tensor in outputs:
                self._name_of[tensor] = name
        recorder.node = OUTSIDE
        return result

    def _unique(self, base: str) -> str:
        name = base
        while name in self._names:
            name = f"{base}_{self._names[base]}"
            self._names[base] += 1
        self._names[name] = 1
        return name


class GraphTrace(fx.Interpreter):
    """Runs a graph and records each of its calls as a node."""

    def __init__(self, graph_module: fx.GraphModule, recorder: StorageRecorder) -> None:
        super().__init__(graph_module)
        self._recorder = recorder

    def name_input(self, tensor: Tensor, name: str) -> None:
        """Do nothing: inputs have the names of their placeholders."""

    def watching(self) -> TorchFunctionMode:
        """Within this context call functions as on the device."""
        return _DeviceCalls(self._recorder.device)

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


class _DeviceCalls(TorchFunctionMode):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._call = calls_of(device)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def function_name(function: Any) -> str:
    """Return the short name of a torch function, as a captured graph has it."""
    name = getattr(function, "__name__", str(function))
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)
    name = name.split(".")[0].strip("_") or name
    return _REFLECTED.get(name, name)
