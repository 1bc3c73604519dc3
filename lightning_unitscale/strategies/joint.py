"""One step around the outputs of all microbatches of a pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from typing_extensions import override

from lightning_unitscale.graph.nodes import returned_loss
from lightning_unitscale.pipeline.called import Arguments
from lightning_unitscale.strategies.method import PipelinedGraph

# A call of ``self.log`` or ``self.log_dict``: method, positional and keyword arguments.
Logged = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass
class StepCall:
    """A call of a step, which runs up to the pipeline and once more as a whole.

    Attributes:
        args: Its arguments.
        kwargs: Its keyword arguments.
        seed: Of the random numbers that the step sees each time, on every rank.
        device: Where it runs.
        arguments: What it calls the pipeline with.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seed: int
    device: torch.device
    arguments: Arguments = ((), {})

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """Within this context the step runs."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield


# Runs the step; returns its result and what it has logged.
Around = Callable[[PipelinedGraph, StepCall, list[Any]], tuple[Any, list[Logged]]]


class JointStep:
    """Runs the step on the rank of the last stage, when it has the outputs of all microbatches.

    Attributes:
        result: What the step has returned, without gradients.
        logged: What it has logged.
        used: Positions of the outputs that the loss uses.
        failed: What the user's code has raised.
    """

    def __init__(
        self, graph: PipelinedGraph, call: StepCall, device: torch.device, around: Around
    ) -> None:
        self._graph = graph
        self._call = call
        self._device = device
        self._around = around
        self._outputs: dict[int, list[Any]] = {}
        self.result: Any = None
        self.logged: list[Logged] = []
        self.used: tuple[int, ...] = ()
        self.failed: list[Exception] = []

    def finish(self, index: int, outputs: Sequence[Any]) -> Tensor:
        """Take the outputs of a microbatch; returns what its backward pass begins with."""
        leaves = [_leaf(value) for value in outputs]
        self._outputs[index] = leaves
        if len(self._outputs) == self._graph.runner.num_microbatches:
            try:
                self._run()
            except Exception as error:
                self.failed.append(error)
                raise
        places = [i for i, leaf in enumerate(leaves) if _needs_gradient(leaf)]
        values = [outputs[place] for place in places]
        start: Tensor = _StartOfBackward.apply([leaves[place] for place in places], *values)
        return start

    def _run(self) -> None:
        parts = [self._outputs[index] for index in sorted(self._outputs)]
        with self._call.seeded():
            result, self.logged = self._around(self._graph, self._call, self._graph.joined(parts))
        # The caller's autocast is for forward passes.
        with torch.autocast(self._device.type, enabled=False):
            (_loss_of(result) / self._graph.runner.num_accumulated).backward()
        places = range(len(parts[0]))
        self.used = tuple(p for p in places if any(_has_gradient(part[p]) for part in parts))
        self.result = tree_map(detached, result)


class _StartOfBackward(torch.autograd.Function):
    """Begins a microbatch's backward pass with the gradients that the joint step has left."""

    @staticmethod
    @override
    def forward(ctx: Any, leaves: list[Tensor], *outputs: Tensor) -> Tensor:
        """Returns zero: the gradients come later."""
        ctx.leaves = leaves
        return outputs[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Returns the gradients; zeros where the loss does not use an output."""
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return None, *found


def detached(value: Any) -> Any:
    """Return a tensor on the host without its gradient; anything else as it is."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _loss_of(result: Any) -> Tensor:
    loss = returned_loss(result)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RuntimeError(
            f"training_step returned {type(loss).__name__}; expected a loss of one number with a "
            "gradient, or a dict with the key 'loss'."
        )
    return loss


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad is not None
