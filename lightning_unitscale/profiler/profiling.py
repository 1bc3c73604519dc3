"""``profile_graph``: one training step on fake tensors, and what it costs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from lightning_unitscale.profiler.batch_size import batch_size_of, resized
from lightning_unitscale.profiler.device_kernels import calls_of
from lightning_unitscale.profiler.graph_profile import GraphProfile, make_profile
from lightning_unitscale.profiler.memory import (
    DATA_DEPENDENT,
    FakeCopies,
    StorageRecorder,
    fake_tensor_mode,
)
from lightning_unitscale.profiler.module_trace import ModulePaths, NodeTrace
from lightning_unitscale.profiler.optimizer_state import (
    OptimizerLike,
    fake_optimizer,
    state_tensors,
)
from lightning_unitscale.profiler.step_record import StepRecord

DeviceType = Literal["cpu", "cuda"]
# What a module may refer to that is neither part of it nor copied with it: Lightning's Trainer.
_SHARED = ("_trainer", "_fabric")


def profile_graph(
    module: nn.Module,
    *args: Any,
    device: DeviceType = "cpu",
    optimizer: OptimizerLike | None = None,
    method: str = "forward",
    loss: Callable[[Any], Tensor] | None = None,
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
        **kwargs: Keyword arguments of the method.

    Raises:
        ValueError: If ``device`` is none that is known, or parameters are on several devices.
        TypeError: If a tensor is not one dense storage (sharded, quantized, sparse).
        RuntimeError: If the step cannot be run without data, naming the node.

    Example:
        >>> from torch import nn
        >>> profile = profile_graph(nn.Linear(4, 2), torch.ones(8, 4))
        >>> profile.parameter_bytes
        40
    """
    target = _device(device)
    _check(module)

    def profile_at(batch_size: int | None) -> GraphProfile:
        given = (args, kwargs) if batch_size is None else resized((args, kwargs), batch_size)
        step = _FakeStep(module, given, target, optimizer)
        return make_profile(
            step.run(method, loss),
            step.module,
            batch_size=batch_size_of(given),
            profile_at=profile_at,
        )

    return profile_at(None)


class _FakeStep:
    """A module, its inputs and its optimizer, all of them fake, and the recording of one step."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        device: torch.device,
        optimizer: OptimizerLike | None,
    ) -> None:
        self.mode = fake_tensor_mode()
        self.device = device
        self.recorder = StorageRecorder(device)
        copies = FakeCopies(self.mode, device)
        self.module = _fake_copy(module, copies)
        self.inputs = tree_map(lambda one: copies.of(one) if isinstance(one, Tensor) else one, inputs)
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            with self.mode:
                self.optimizer = fake_optimizer(
                    optimizer, self.module.parameters(), copies.known(), device
                )

    def run(self, method: str, loss: Callable[[Any], Tensor] | None) -> StepRecord:
        """Forward, backward and the optimizer's step."""
        recorder, paths = self.recorder, ModulePaths(self.module)
        trace = NodeTrace(recorder, paths, calls_of(self.device))
        with self.mode, recorder, paths.watched(), _named_errors(trace):
            self._declare(trace)
            args, kwargs = self.inputs
            with trace:
                with torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda one: one):
                    output = getattr(self.module, method)(*args, **kwargs)
                    roots = _roots(output, loss)
                recorder.phase = "backward"
                if roots:
                    torch.autograd.backward(
                        roots, [None if one.numel() == 1 else torch.ones_like(one) for one in roots]
                    )
            del output, roots
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    recorder.declare(parameter.grad, "gradient")
            if self.optimizer is not None:
                recorder.phase = "optimizer"
                self.optimizer.step()
        return recorder.record(trace.nodes)

    def _declare(self, trace: NodeTrace) -> None:
        """Say what is there before the step, and what it is called."""
        for name, parameter in self.module.named_parameters():
            self.recorder.declare(parameter, "parameter", name)
            trace.name_input(parameter, name)
        for name, buffer in self.module.named_buffers():
            self.recorder.declare(buffer, "buffer", name)
            trace.name_input(buffer, name)
        for path, one in tree_flatten_with_path(self.inputs)[0]:
            if isinstance(one, Tensor):
                name = "input" + "".join(str(key) for key in path[1:])
                self.recorder.declare(one, "input", name)
                trace.name_input(one, name)
        for one in state_tensors(self.optimizer) if self.optimizer is not None else ():
            self.recorder.declare(one, "optimizer")


def _device(device: str) -> torch.device:
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


def _fake_copy(module: nn.Module, copies: FakeCopies) -> nn.Module:
    """A copy of the module, made of fake tensors, so that the user's own stays as it is."""
    kept: dict[int, Any] = {}
    for one in module.modules():
        for tensor in tree_leaves(list(one.__dict__.values())):
            if isinstance(tensor, Tensor):
                copies.of(tensor)
        for tensor in [*one.parameters(recurse=False), *one.buffers(recurse=False)]:
            copies.of(tensor)
        kept.update({id(one.__dict__.get(name)): one.__dict__.get(name) for name in _SHARED})
    try:
        return copy.deepcopy(module, memo={**kept, **copies.known()})
    except Exception as error:
        raise RuntimeError(
            f"`module={type(module).__name__}`: it cannot be copied ({error}); expected a module "
            "that copy.deepcopy takes; drop what it holds besides parameters and buffers."
        ) from error


def _roots(output: Any, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """The tensors that the backward pass starts from; none if nothing needs a gradient."""
    if loss is not None:
        output = loss(output)
    elif isinstance(getattr(output, "loss", None), Tensor):
        output = output.loss
    elif isinstance(output, dict) and isinstance(output.get("loss"), Tensor):
        output = output["loss"]
    return [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]


@contextlib.contextmanager
def _named_errors(trace: NodeTrace) -> Iterator[None]:
    """Within this context what cannot be run on fake tensors is an error that names the node."""
    try:
        yield
    except DATA_DEPENDENT as error:
        raise RuntimeError(
            f"node {trace.running}: what it does depends on the values of a tensor ({error}); "
            "expected a step whose shapes and branches follow from its inputs' shapes; take "
            ".item(), boolean indexing and branches on tensors out of it to profile it."
        ) from error
    except RuntimeError as error:
        if "Unhandled FakeTensor Device Propagation" not in str(error):
            raise
        raise RuntimeError(
            f"node {trace.running}: it mixes devices ({error}); expected all tensors of the step "
            "on the profiled device; make new tensors on the device of an input or of a parameter."
        ) from error
