"""Plan a training step on a device that need not exist, from a joint graph traced on fake tensors.

The module's own code runs on fake tensors, as for a profile, and every operator of the forward and
the backward pass becomes a node. Dynamo is not involved, so any step that can be profiled can be
planned.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_unitscale.capture import fake_device
from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.memory.costs import CostModel, default_cost_model
from lightning_unitscale.memory.fake_step import FakeStep, own_loss
from lightning_unitscale.memory.gpu_kernels import DeviceCalls, run_kernel
from lightning_unitscale.memory.gpus import parse_device
from lightning_unitscale.memory.joint_graph import JointGraphReader, is_mutable
from lightning_unitscale.memory.problem import NodeRegion, RematNode, RematProblem

# The reader of joint graphs treats an input of this name as a gradient from outside.
_TANGENT = "tangents"


class _Tracer(fake_device.OperatorMode):
    """Tracer of every operator as a node, with less work per operator than FX's own tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self._nodes: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def input(self, tensor: Tensor, name: str) -> fx.Node:
        """Add an input of the graph."""
        node = self.graph.placeholder(name)
        self._assign(node, tensor)
        return node

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor. A tensor from before the trace is a constant."""
        return self._nodes[tensor] if tensor in self._nodes else self.input(tensor, "constant")

    @override
    def run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not fake_device.is_composite(func):
            return self._add(func, args, kwargs)
        with self:
            return func.decompose(*args, **kwargs)

    def _add(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = tree_map_only(Tensor, self.node_of, (args, kwargs))
        result = func(*args, **kwargs)
        node = self.graph.call_function(func, *arguments)
        if isinstance(result, (tuple, list)):
            node.meta["val"] = type(result)(map(_snapshot, result))
            for position, output in enumerate(result):
                if isinstance(output, Tensor):
                    item = self.graph.call_function(operator.getitem, (node, position))
                    self._assign(item, output)
        elif isinstance(result, Tensor):
            self._assign(node, result)
        else:
            node.meta["val"] = result
        if is_mutable(node) and not isinstance(result, Tensor):
            for tensor in tensors_in(args[0]):
                self._nodes[tensor] = node
        return result

    def _assign(self, node: fx.Node, tensor: Tensor) -> None:
        node.meta["val"] = _snapshot(tensor)
        self._nodes[tensor] = node


def _snapshot(value: Any) -> Any:
    return fake_device.snapshot(value) if isinstance(value, Tensor) else value


class _Kernels(fake_device.DispatchMode):
    """Mode that corrects operators on fake tensors where they differ from the kernels."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_kernel(func, args, kwargs or {})


def traced_problem(
    module: nn.Module,
    *args: Any,
    device: str = "cpu",
    method: str = "forward",
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    cost_model: CostModel | None = None,
    **kwargs: Any,
) -> RematProblem:
    """Return the joint graph of a training step on a simulated device.

    The arguments are those of :func:`~lightning_unitscale.profiler.profile_graph`. A method returns
    the loss, or a dict with ``"loss"``.

    Raises:
        RuntimeError: If nothing of the step requires a gradient.
    """
    target, gpu = parse_device(device)
    step = FakeStep(module, (args, kwargs), target, None, gpu)
    params = list(step.module.parameters())
    trained = [param for param in params if param.requires_grad]
    others = tree_leaves([params, list(step.module.buffers()), step.inputs])
    given = list({id(value): value for value in others if isinstance(value, Tensor)}.values())
    call, (args, kwargs) = getattr(step.module, method), step.inputs
    num_outputs = 0

    def run(tangent: Tensor) -> list[Tensor | None]:
        nonlocal num_outputs
        with context():
            output = call(*args, **kwargs)
        loss = loss_of(output, module)
        outputs = list({id(value): value for value in tree_leaves(output)}.values())
        outputs = [value for value in outputs if isinstance(value, Tensor)]
        num_outputs = len(outputs)
        gradients = torch.autograd.grad([loss], trained, [tangent], allow_unused=True)
        return [*outputs, *gradients]

    simulation = fake_device.simulating(target, *([gpu.capability] if gpu else ()))
    tracer = _Tracer()
    with step.mode, simulation, DeviceCalls(gpu):
        tangent = torch.ones((), device=target)
        for index, tensor in enumerate(given):
            tracer.input(tensor, f"input_{index}")
        tracer.input(tangent, _TANGENT)
        with tracer, _Kernels():
            results = run(tangent)
    tracer.graph.output([None if each is None else tracer.node_of(each) for each in results])
    model = cost_model or default_cost_model(target.type)
    reader = JointGraphReader(tracer.graph, num_outputs, model)
    return out_of_place(reader.read(), [is_mutable(node) for node in reader.nodes])


def out_of_place(problem: RematProblem, writes: Sequence[bool]) -> RematProblem:
    """Return the graph with a new value for each operation that writes into an earlier one."""
    # AOTAutograd rewrites graphs like this before they are planned. Writes into inputs stay.
    newest: dict[int, int] = {}  # the node with the present value of each traced storage
    nodes: list[RematNode] = []

    def present(index: int) -> int:
        return newest.get(problem.nodes[index].base, index)

    for index, node in enumerate(problem.nodes):
        inputs = tuple(sorted({present(i) for i in node.inputs}))
        base = problem.nodes[node.base]
        if writes[index] and node.base != index and base.region is not NodeRegion.INPUT:
            newest[node.base] = index
            is_random = node.replay_bytes > 0
            nodes.append(
                replace(
                    node,
                    inputs=inputs,
                    base=index,
                    owner=index,
                    num_bytes=base.num_bytes,
                    can_save=True,
                    can_recompute=not is_random,
                )
            )
            continue
        own = newest.get(node.base, node.base) if node.base != index else index
        owner = own if own != node.base else node.owner
        nodes.append(replace(node, inputs=inputs, base=own, owner=owner))
    forward, backward = (
        tuple(dict.fromkeys(map(present, outputs)))
        for outputs in (problem.forward_outputs, problem.backward_outputs)
    )
    return RematProblem(tuple(nodes), forward, backward, problem.sizes)


def loss_of(output: Any, module: nn.Module) -> Tensor:
    """Return the loss of a step's result: itself, or its ``loss``."""
    loss = own_loss(output)
    if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
        raise RuntimeError(
            f"module={type(module).__name__}: its step returns no loss that requires a gradient. "
            "Expected a scalar, or a dict with the key 'loss'. Return one."
        )
    return loss


def at_batch(low: RematProblem, high: RematProblem, sizes: tuple[int, int], size: int) -> Any:
    """Return the joint graph at another batch size, interpolated between two, or ``None``."""

    def operators(problem: RematProblem) -> list[Any]:
        return [(node.kind, node.inputs, node.base, node.owner) for node in problem.nodes]

    if operators(low) != operators(high):
        return None
    share = (size - sizes[0]) / (sizes[1] - sizes[0])
    pairs = zip(low.nodes, high.nodes, strict=True)
    return replace(low, nodes=tuple(_between(first, second, share) for first, second in pairs))


def _between(first: RematNode, second: RematNode, share: float) -> RematNode:
    def line(name: str) -> float:
        start, end = getattr(first, name), getattr(second, name)
        return max(0.0, start + share * (end - start))

    return replace(
        first,
        num_bytes=round(line("num_bytes")),
        workspace_bytes=round(line("workspace_bytes")),
        seconds=line("seconds"),
        flops=line("flops"),
    )
