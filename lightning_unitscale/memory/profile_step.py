"""Profile a training step on fake tensors, from a module's code or an existing graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from lightning_unitscale.arguments import check_callable, check_instance, sentence, shown
from lightning_unitscale.capture.absent_ranks import is_sharded, local_tensor, num_ranks
from lightning_unitscale.capture.graph_nodes import tensors_in
from lightning_unitscale.memory.fake_step import FakeStep, OptimizerLike
from lightning_unitscale.memory.gpus import DeviceType, parse_device
from lightning_unitscale.memory.graph_profile import GraphProfile, make_profile
from lightning_unitscale.memory.record_operators import GraphTrace, ModuleTrace

COSTS = "node_costs"


def profile_graph(
    module: nn.Module,
    *args: Any,
    device: DeviceType = "cpu",
    optimizer: OptimizerLike | None = None,
    method: str = "forward",
    loss: Callable[[Any], Tensor] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    **kwargs: Any,
) -> GraphProfile:
    """Return memory and operations of one training step of ``module`` without computing it.

    The module's own code runs on fake tensors on ``device``, which need not exist: forward,
    backward and the optimizer. Every storage is recorded until its release. The module may be on
    any device, also on ``meta``, and is not changed. A module that FSDP2 or tensor parallelism has
    sharded cannot be copied. It must be on ``meta``, within :func:`fake_process_group`, and is left
    with fake parameters. Its profile is that of rank 0.

    The backward pass starts from ``loss(output)`` if ``loss`` is given, else from the output's
    ``loss`` (attribute or key), else from every result that needs a gradient. The output lives
    until the backward pass is over, as in ``output = module(...); output.loss.backward()``.

    Args:
        module: The module.
        *args: Arguments of the method, with tensors on any device, also on ``meta``.
        device: Device whose kernels, libraries and allocator are simulated, such as
            ``"cuda:h100"``. ``"cuda"`` is the GPU of this machine, or an H100 if there is none.
        optimizer: An optimizer of the module's parameters, or a class or function for one. ``None``
            ends the step after the backward pass.
        method: Name of the method to call, such as ``training_step``.
        loss: Function from the method's result to the loss.
        context: Makes a context around the forward pass, such as ``lambda:
            torch.autocast("cuda")``.
        **kwargs: Keyword arguments of the method.

    Raises:
        ValueError: If ``device`` is unknown, there is no such method, parameters are on several
            devices, or those of a sharded module are not on ``meta``.
        TypeError: If another argument has the wrong type, or a tensor is not one dense storage
            (quantized, sparse).
        RuntimeError: If the step cannot be run without data, naming the node.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> profile = profile_graph(nn.Linear(4, 2), torch.ones(8, 4))
        >>> profile.parameter_bytes
        40
    """
    target, gpu = parse_device(device)
    check_instance("module", module, nn.Module, "a torch.nn.Module", "pass the model itself")
    _check_calls(module, optimizer, method, loss, context)
    if method == "forward":
        refuse_without_forward(module, "pass method='training_step' with its arguments")
    _check_parameters(module)

    def profile_at(batch_size: int | None) -> GraphProfile:
        inputs = (args, kwargs) if batch_size is None else resized((args, kwargs), batch_size)
        step = FakeStep(module, inputs, target, optimizer, gpu)
        trace = ModuleTrace(step.module, step.recorder)
        # FSDP gathers the parameters of the module itself in a hook, which only its call runs.
        hooked = method == "forward" and is_sharded(module)
        call = step.module if hooked else getattr(step.module, method)
        return make_profile(
            step.run(trace, call, loss, context),
            step.module,
            batch_size=batch_size_of(inputs),
            num_ranks=num_ranks(module),
            profile_at=profile_at,
        )

    if is_sharded(module):
        profile_at(None)  # only the first step allocates the buffers that FSDP keeps
    return profile_at(None)


class MetaInfoProp:
    """Interpreter that runs a graph on fake tensors and gives each of its nodes its costs.

    It takes graphs of torch functions, such as those of ``fx.symbolic_trace`` and Dynamo, and ATen
    graphs.

    Args:
        graph_module: The graph. Only ``meta["node_costs"]`` of its nodes is written.
        device: As in :func:`profile_graph`.
        optimizer: As in :func:`profile_graph`.

    Attributes:
        profile: The result of :meth:`run`, or ``None`` before it.

    Examples:
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
        self._device, self._gpu = parse_device(device)
        self._optimizer = optimizer

    def run(self, *inputs: Any, loss: Callable[[Any], Tensor] | None = None) -> GraphProfile:
        """Profile the graph.

        Args:
            *inputs: A value per placeholder. Only the metadata of tensors is read.
            loss: Function from the graph's result to the loss.

        Returns:
            The profile, whose nodes have the names of the graph's.

        Raises:
            RuntimeError: If a node cannot be run without data, naming it.
        """
        step = FakeStep(self.graph_module, (inputs, {}), self._device, self._optimizer, self._gpu)
        assert isinstance(step.module, fx.GraphModule)
        trace = GraphTrace(step.module, step.recorder)
        record = step.run(trace, trace.run, loss)
        self.profile = make_profile(record, step.module, batch_size=batch_size_of(inputs))
        costs = {node.name: node for node in self.profile.nodes}
        for node in self.graph_module.graph.nodes:
            if node.name in costs:
                node.meta[COSTS] = costs[node.name]
        return self.profile


def _check_calls(module: nn.Module, optimizer: Any, method: Any, loss: Any, context: Any) -> None:
    """Raise if :func:`profile_graph` cannot call one of its arguments."""
    if not isinstance(method, str) or not callable(getattr(module, method, None)):
        raise ValueError(
            f"method={shown(method)}: {type(module).__name__} has no such method. Expected the "
            "name of one. Pass for example method='forward'."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        expected = "an optimizer, or a class or function that makes one"
        check_callable("optimizer", optimizer, expected, "leave it out for a step without one")
    if loss is not None:
        expected = "a function from the output to the loss"
        check_callable("loss", loss, expected, "leave it out for the output's own")
    check_callable("context", context, "a function that makes a context", "leave it out for none")


def refuse_without_forward(module: nn.Module, advice: str) -> None:
    """Raise if a module cannot be called, such as a LightningModule that has only steps."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    is_absent = owner is nn.Module or owner.__name__ == "LightningModule"
    if is_absent and "forward" not in vars(module):
        raise ValueError(
            f"module={type(module).__name__}: it has no forward. Expected a module that can be "
            f"called. {sentence(advice)}"
        )


def refuse_lazy(module: nn.Module) -> None:
    """Raise if a parameter has no shape yet."""
    for name, param in module.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ValueError(
                f"module={type(module).__name__}: its parameter {name} has no shape yet. "
                "Expected initialized parameters. Call the module once on an example before."
            )


def _check_parameters(module: nn.Module) -> None:
    """Raise if parameters have no shape yet, or are on several devices."""
    refuse_lazy(module)
    params = module.named_parameters()
    devices = {str(local_tensor(param).device): name for name, param in params}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"`module={type(module).__name__}`: its parameters are on several devices ({listed}). "
            "Expected one device. Profile the part of each device by itself."
        )


def batch_size_of(inputs: Any) -> int | None:
    """Return the first dimension that most input tensors have, or ``None`` without one."""
    sizes = [int(tensor.shape[0]) for tensor in tensors_in(inputs) if tensor.dim()]
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def resized(inputs: Any, batch_size: int) -> Any:
    """Return the inputs with another batch size, as tensors without memory."""
    before = batch_size_of(inputs)

    def resize(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != before:
            return value
        shape = (batch_size, *value.shape[1:])
        meta = torch.empty(shape, dtype=value.dtype, device="meta")
        return meta.requires_grad_(value.requires_grad)

    return tree_map(resize, inputs)
