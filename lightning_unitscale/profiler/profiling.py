"""``profile_graph``: one training step on fake tensors, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_unitscale.profiler.batch_size import batch_size_of, resized
from lightning_unitscale.profiler.device_kernels import calls_of
from lightning_unitscale.profiler.fake_step import FakeStep
from lightning_unitscale.profiler.graph_profile import GraphProfile, make_profile
from lightning_unitscale.profiler.module_trace import ModulePaths, NodeTrace
from lightning_unitscale.profiler.optimizer_state import OptimizerLike

DeviceType = Literal["cpu", "cuda"]


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
    """Memory and operations of one training step of ``module``, of which nothing is run for real.

    The module's own code runs on fake tensors that claim to be on ``device``, which need not exist,
    forward, backward and through the optimizer; what autograd keeps and when reference counts let
    go of it is recorded storage by storage. The module may be on any device, on ``meta`` too, and
    is not changed.

    What is differentiated is ``loss(output)`` if it is given, else the output's ``loss`` (attribute
    or key), else every result that needs a gradient. The output is alive until the backward pass is
    over, as in ``output = module(...); output.loss.backward()``.

    Args:
        module: The module.
        *args: What the method is called with; tensors on any device, ``meta`` too.
        device: Whose kernels and allocator are simulated.
        optimizer: An optimizer of the module's parameters, or a class or function that makes one;
            ``None`` ends the step after the backward pass.
        method: Name of the method to call, such as ``training_step``.
        loss: Makes the loss from what the method returns.
        context: Entered around the forward pass, such as ``lambda: torch.autocast("cuda")``.
        **kwargs: Keyword arguments of the method.

    Raises:
        ValueError: If ``device`` is none that is known, or parameters are on several devices.
        TypeError: If a tensor is not one dense storage (sharded, quantized, sparse).
        RuntimeError: If the step cannot be run without data, naming the node.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> profile = profile_graph(nn.Linear(4, 2), torch.ones(8, 4))
        >>> profile.parameter_bytes
        40
    """
    target = known_device(device)
    _check(module)

    def profile_at(batch_size: int | None) -> GraphProfile:
        given = (args, kwargs) if batch_size is None else resized((args, kwargs), batch_size)
        step = FakeStep(module, given, target, optimizer)
        trace = NodeTrace(step.recorder, ModulePaths(step.module), calls_of(target))
        return make_profile(
            step.run(trace, getattr(step.module, method), loss, context),
            step.module,
            batch_size=batch_size_of(given),
            profile_at=profile_at,
        )

    return profile_at(None)


def known_device(device: str) -> torch.device:
    """The device of this type.

    Raises:
        ValueError: If there are no kernels known for it.
    """
    if str(device) not in ("cpu", "cuda"):
        raise ValueError(
            f"`device={device!r}`: its kernels are not known; expected 'cpu' or 'cuda', whether or "
            "not there is one; profile for the one of the two that is more like it."
        )
    return torch.device(device)


def _check(module: nn.Module) -> None:
    lazy = [name for name, one in module.named_parameters() if nn.parameter.is_lazy(one)]
    if lazy:
        raise ValueError(
            f"`module={type(module).__name__}`: its parameter {lazy[0]} has no shape yet; expected "
            "initialized parameters; call the module once on an example before."
        )
    devices = {str(one.device): name for name, one in module.named_parameters()}
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"`module={type(module).__name__}`: its parameters are on several devices ({found}); "
            "expected one device; profile the part of each device by itself."
        )
