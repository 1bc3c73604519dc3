"""One training step of a module on fake tensors, recorded."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks as saving
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from lightning_unitscale.functional.func_transforms import hooks_in_transforms
from lightning_unitscale.profiler.fake_copies import FakeCopies
from lightning_unitscale.profiler.memory import (
    DATA_DEPENDENT,
    SimulatedDevice,
    run_backward,
    simulating,
)
from lightning_unitscale.profiler.optimizer_state import (
    OptimizerLike,
    fake_optimizer,
    state_tensors,
)
from lightning_unitscale.profiler.step_record import NodeRecord, StepRecord
from lightning_unitscale.profiler.storage_recorder import StorageRecorder

# What a module may refer to that is neither part of it nor copied with it: Lightning's Trainer.
_SHARED = ("_trainer", "_fabric")
# How fake tensors say it in torch 2.11 and 2.13.
_MIXED_DEVICES = (
    "Unhandled FakeTensor Device Propagation",
    "Expected all tensors to be on the same device",
)


class Trace(Protocol):
    """Makes the nodes of the forward graph while it runs."""

    nodes: list[NodeRecord]
    running: str

    def name_input(self, tensor: Tensor, name: str) -> None:
        """Say what a tensor that the graph starts from is called."""

    def watching(self) -> AbstractContextManager[Any]:
        """Within this context what runs is noted."""


class FakeStep:
    """A module, its inputs and its optimizer, all of them fake, and the recording of one step."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Any,
        device: torch.device,
        optimizer: OptimizerLike | None,
    ) -> None:
        self.mode = SimulatedDevice(device)
        self.device = device
        self.recorder = StorageRecorder(device)
        copies = FakeCopies(self.mode)
        self.module = _fake_copy(module, copies)
        self.inputs = tree_map(
            lambda one: copies.of(one) if isinstance(one, Tensor) else one, inputs
        )
        self.optimizer: Optimizer | None = None
        if optimizer is not None:
            with self.mode:
                self.optimizer = fake_optimizer(
                    optimizer, self.module.parameters(), copies.known(), device
                )

    def run(
        self,
        trace: Trace,
        forward: Callable[..., Any],
        loss: Callable[[Any], Tensor] | None = None,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> StepRecord:
        """Forward, backward and the optimizer's step.

        Args:
            trace: Makes the nodes.
            forward: Called with the fake inputs.
            loss: Makes the loss from what ``forward`` returns.
            context: Entered around the forward pass.

        Raises:
            RuntimeError: If the step cannot be run without data, naming the node.
        """
        recorder = self.recorder
        with self.mode, recorder, simulating(self.device), _named_errors(trace):
            self._declare(trace)
            args, kwargs = self.inputs
            with trace.watching():
                with saving(recorder.keep, lambda one: one), hooks_in_transforms(), context():
                    output = forward(*args, **kwargs)
                    roots = _roots(output, loss)
                recorder.phase = "backward"
                if roots:
                    run_backward(roots)
            del output, roots
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    recorder.declare(parameter.grad, "gradient")
            if self.optimizer is not None:
                recorder.phase = "optimizer"
                self.optimizer.step()
        return recorder.record(trace.nodes)

    def _declare(self, trace: Trace) -> None:
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
def _named_errors(trace: Trace) -> Iterator[None]:
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
        if not any(one in str(error) for one in _MIXED_DEVICES):
            raise
        raise RuntimeError(
            f"node {trace.running}: it mixes devices ({error}); expected all tensors of the step "
            "on the profiled device; make new tensors on the device of an input or of a parameter."
        ) from error
