"""Costs of the nodes of an existing graph, written into their metadata."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_unitscale.graph.nodes import module_path, op_name
from lightning_unitscale.profiler.batch_size import batch_size_of
from lightning_unitscale.profiler.device_kernels import Call, calls_of
from lightning_unitscale.profiler.fake_step import FakeStep
from lightning_unitscale.profiler.graph_profile import GraphProfile, make_profile
from lightning_unitscale.profiler.optimizer_state import OptimizerLike
from lightning_unitscale.profiler.profiling import DeviceType, known_device
from lightning_unitscale.profiler.step_record import OUTSIDE, NodeRecord
from lightning_unitscale.profiler.storage_recorder import StorageRecorder

COSTS = "node_costs"
_CALLS = frozenset({"call_function", "call_method", "call_module"})


class MetaInfoProp:
    """Runs a graph on fake tensors and gives each of its nodes its costs.

    For graphs at the level of torch functions, such as ``fx.symbolic_trace`` and Dynamo make, and
    of ATen. Values live until their last reader has run, as in the code that FX generates.

    Args:
        graph_module: The graph; only ``meta["node_costs"]`` of its nodes is written.
        device: Whose kernels and allocator are simulated; it need not exist.
        optimizer: As in :func:`profile_graph`.

    Attributes:
        profile: What :meth:`run` found.

    Example:
        >>> import torch
        >>> from torch import fx, nn
        >>> graph_module = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
        >>> profile = MetaInfoProp(graph_module).run(torch.ones(8, 4))
        >>> [node.fwd_mem_out for node in profile.nodes]
        [64, 64]
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        *,
        device: DeviceType = "cpu",
        optimizer: OptimizerLike | None = None,
    ) -> None:
        self.graph_module = graph_module
        self.profile: GraphProfile | None = None
        self._device = known_device(device)
        self._optimizer = optimizer

    def run(self, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> GraphProfile:
        """Profile the graph.

        Args:
            *inputs: A value per placeholder; of tensors only the metadata is read.
            loss: Makes the loss from what the graph returns.

        Returns:
            The profile, whose nodes have the names of the graph's.

        Raises:
            RuntimeError: If a node cannot be run without data, naming it.
        """
        step = FakeStep(self.graph_module, (inputs, {}), self._device, self._optimizer)
        assert isinstance(step.module, fx.GraphModule)
        trace = _GraphTrace(step.module, step.recorder, calls_of(self._device))
        self.profile = make_profile(
            step.run(trace, trace.run, loss), step.module, batch_size=batch_size_of(inputs)
        )
        costs = {one.name: one for one in self.profile.nodes}
        for node in self.graph_module.graph.nodes:
            if node.name in costs:
                node.meta[COSTS] = costs[node.name]
        return self.profile

    def summary(self, limit: int | None = None) -> str:
        """Totals, the peak, and a row per node, the largest first.

        Raises:
            RuntimeError: If nothing was run yet.
        """
        if self.profile is None:
            raise RuntimeError("MetaInfoProp.summary(): nothing was profiled yet; call run() first")
        return self.profile.summary(limit)


class _GraphTrace(fx.Interpreter):
    """Runs a graph and records each of its calls as a node."""

    def __init__(self, graph_module: fx.GraphModule, recorder: StorageRecorder, call: Call) -> None:
        super().__init__(graph_module)
        self.nodes: list[NodeRecord] = []
        self.running = ""
        self._recorder = recorder
        self._call = call

    def name_input(self, tensor: Tensor, name: str) -> None:
        """Inputs have the names of their placeholders."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context functions are called as the device would have them called."""
        with _DeviceCalls(self._call):
            yield

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and record it."""
        if n.op not in _CALLS:
            return super().run_node(n)
        recorder, self.running = self._recorder, n.name
        inputs = [
            (one.name, recorder.place(tensor))
            for one in n.all_input_nodes
            for tensor in _tensors(self.env[one])
        ]
        recorder.node = len(self.nodes)
        result = super().run_node(n)
        recorder.node = OUTSIDE
        made = _tensors(result)
        recorder.label(made, len(self.nodes))
        first = made[0] if made else None
        self.nodes.append(
            NodeRecord(
                n.name,
                op_name(n),
                module_path(n),
                tuple(name for name, _ in inputs),
                tuple(storage for _, storage in inputs),
                tuple(recorder.place(one) for one in made),
                () if first is None else tuple(map(int, first.shape)),
                "" if first is None else str(first.dtype).removeprefix("torch."),
            )
        )
        return result


class _DeviceCalls(TorchFunctionMode):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]
