"""Run one step around the outputs of all microbatches of a pipeline."""

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
from lightning_unitscale.strategies.metrics import detached

# A call of ``self.log`` or ``self.log_dict``: method, positional and keyword arguments.
Logged = tuple[str, tuple[Any, ...], dict[str, Any]]


@dataclass
class StepCall:
    """A call of a step, which runs up to the pipeline and once more as a whole."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    # Gives the same random numbers each time, on every rank.
    seed: int
    device: torch.device
    # The arguments with which the step calls the pipeline.
    arguments: Arguments = ((), {})

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """Seed the random numbers within this context, in which the step runs."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            yield


# Runs the step, and returns its result and its calls of the log methods.
Around = Callable[[PipelinedGraph, StepCall, list[Any]], tuple[Any, list[Logged]]]


class JointStep:
    """Runs the step on the rank of the last stage, when it has the outputs of all microbatches."""

    def __init__(self, graph: PipelinedGraph, call: StepCall, around: Around) -> None:
        self._graph = graph
        self._call = call
        self._around = around
        self._outputs: dict[int, list[Any]] = {}
        # The result of the step without gradients, and its calls of the log methods.
        self.result: Any = None
        self.logged: list[Logged] = []
        # Positions of the outputs that the loss uses.
        self.used: tuple[int, ...] = ()
        # The error of the user's code.
        self.failed: Exception | None = None

    def finish(self, index: int, outputs: Sequence[Any]) -> Tensor:
        """Take the outputs of a microbatch, and return the tensor that begins its backward pass."""
        leaves = [
            value.detach().requires_grad_(value.requires_grad)
            if isinstance(value, Tensor)
            else value
            for value in outputs
        ]
        self._outputs[index] = leaves
        if len(self._outputs) == self._graph.runner.num_microbatches:
            try:
                self._run()
            except Exception as error:
                self.failed = error
                raise
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        values = [outputs[place] for place in places]
        start: Tensor = _StartOfBackward.apply([leaves[place] for place in places], *values)
        return start

    def _run(self) -> None:
        parts = [self._outputs[index] for index in sorted(self._outputs)]
        with self._call.seeded():
            result, self.logged = self._around(self._graph, self._call, self._graph.joined(parts))
        # The caller's autocast is for forward passes.
        with torch.autocast(self._call.device.type, enabled=False):
            (_loss_of(result) / self._graph.runner.num_accumulated).backward()
        self.used = tuple(
            place
            for place, leaves in enumerate(zip(*parts, strict=True))
            if any(isinstance(leaf, Tensor) and leaf.grad is not None for leaf in leaves)
        )
        self.result = tree_map(detached, result)


class _StartOfBackward(torch.autograd.Function):
    """Begins a microbatch's backward pass with the gradients that the joint step has left."""

    @staticmethod
    @override
    def forward(ctx: Any, leaves: list[Tensor], *outputs: Tensor) -> Tensor:
        """Return zero: the gradients come later."""
        ctx.leaves = leaves
        return outputs[0].new_zeros(())

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients, and zeros for an output that the loss does not use."""
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return None, *found


def _loss_of(result: Any) -> Tensor:
    loss = returned_loss(result)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RuntimeError(
            f"training_step returned {type(loss).__name__}. Return a loss of one number with a "
            "gradient, or a dict with the key 'loss'."
        )
    return loss
