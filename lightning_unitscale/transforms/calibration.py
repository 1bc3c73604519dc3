"""Measure what every product reads and the gradient that arrives at it, in one eager step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.graph.capture import is_checkpoint
from lightning_unitscale.graph.compiled_graph import CompiledGraph

Measured = Mapping[str, float]
Direction = Literal["forward", "backward"]
# What to measure of a node: its arguments by name, and its result under a name or not at all.
ArgumentsOf = Callable[[fx.Node], list[tuple[str, fx.Node]]]
NameOf = Callable[[fx.Node], str | None]


def root_mean_square(tensor: Tensor) -> Tensor:
    """RMS of a tensor as a 0-d tensor; it neither overflows nor underflows for FP32 values.

    A gradient of 1e-25 is ordinary and its square is 0 in FP32, so squares are summed in FP64.
    """
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64
    if tensor.is_sparse:
        tensor = tensor.detach().coalesce()
    if tensor.layout in {torch.sparse_coo, torch.jagged}:
        tensor = tensor.values()  # the elements that are stored
    if tensor.numel() == 0:
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm = torch.linalg.vector_norm(tensor.detach(), dtype=dtype)
    return norm / math.sqrt(tensor.numel())


class Calibrator:
    """Runs captured graphs as they are and measures named tensors on the way.

    Plain tensor hooks see the gradients, so views do not matter. In-place operations do: the result
    of a linear map is a view of its product, and writing into a view cuts off the hooks on it.

    Args:
        arguments_of: Names to measure for a node about to run: ``(name, argument)`` pairs.
        gradient_of: Name under which the gradient of the node's result is measured, or ``None``.
        result_of: Name under which the node's result is measured, or ``None``.
    """

    def __init__(
        self,
        arguments_of: ArgumentsOf,
        gradient_of: NameOf,
        result_of: NameOf,
    ) -> None:
        self.arguments_of = arguments_of
        self.gradient_of = gradient_of
        self.result_of = result_of
        self._forward: dict[str, list[Tensor]] = defaultdict(list)
        self._backward: dict[str, list[Tensor]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []

    def __call__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
        """Run one graph of the step; the interpreter that ``CapturedStep`` expects."""
        return graph.interpret(lambda base: _MeasuringInterpreter(base, self).run, inputs)

    @property
    def saw_gradients(self) -> bool:
        """Whether a backward pass has reached any measured tensor."""
        return bool(self._backward)

    def results(self) -> tuple[Measured, Measured]:
        """RMS of every tensor, forward and backward, with one transfer from the device.

        A tensor measured several times (several calls in a step) gets the RMS of all.
        """
        return _fetch(self._forward), _fetch(self._backward)

    def clear(self) -> None:
        """Forget what was measured."""
        self.release()
        self._forward.clear()
        self._backward.clear()

    def measure(self, name: str, value: object) -> None:
        """Measure a forward value."""
        if isinstance(value, Tensor) and value.is_floating_point():
            self.record("forward", name, value)

    def watch(self, name: str, value: object) -> None:
        """Measure the gradient of ``value`` when the backward pass gets there."""
        if isinstance(value, Tensor) and value.requires_grad:
            base = value._base
            if (
                base is not None
                and base.requires_grad
                and (base.numel(), base.dtype) == (value.numel(), value.dtype)
            ):
                # A product may end in a view. When another view is written into, autograd makes
                # this one's history anew without its hooks; the base keeps them.
                value = base

            def see(gradient: Tensor | None) -> None:
                # A function of the user's may say that there is none.
                if gradient is not None:
                    self.record("backward", name, gradient)

            handle = value.register_hook(see)
            if value.is_leaf:
                # A parameter, or an input, outlives the step, and so would the hook.
                self._handles.append(handle)

    def release(self) -> None:
        """Take the hooks off the parameters; called when nothing is to be measured any more."""
        for one in self._handles:
            one.remove()
        self._handles.clear()

    def record(self, direction: Direction, name: str, tensor: Tensor) -> Tensor:
        """Take down a tensor that was met; returns its RMS."""
        rms = root_mean_square(tensor)
        (self._forward if direction == "forward" else self._backward)[name].append(rms)
        return rms


class _MeasuringInterpreter(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, calibrator: Calibrator) -> None:
        super().__init__(graph_module)
        self.calibrator = calibrator

    def run_node(self, n: fx.Node) -> Any:
        if is_checkpoint(n):
            # Running the body here saves what checkpointing would recompute, for this one step,
            # but measures the products inside.
            body, *args = self.fetch_args_kwargs_from_env(n)[0]
            return _MeasuringInterpreter(body, self.calibrator).run(*args)
        calibrator = self.calibrator
        for name, argument in calibrator.arguments_of(n):
            calibrator.measure(name, self.env[argument])
        result = super().run_node(n)
        result_name, gradient_name = calibrator.result_of(n), calibrator.gradient_of(n)
        if result_name is not None:
            calibrator.measure(result_name, result)
        if gradient_name is not None:
            calibrator.watch(gradient_name, result)
        return result


def _fetch(measured: Mapping[str, list[Tensor]]) -> Measured:
    names = [name for name, values in measured.items() for _ in values]
    scalars = [one for values in measured.values() for one in values]
    if not scalars:
        return {}
    device = scalars[0].device
    numbers = torch.stack([one.to(device) for one in scalars]).tolist()
    collected: dict[str, list[float]] = defaultdict(list)
    for name, number in zip(names, numbers, strict=True):
        collected[name].append(number)
    return {name: combined_rms(values) for name, values in collected.items()}


def combined_rms(values: list[float]) -> float:
    """RMS of equal-sized parts, scaled by the largest so that squares stay in range."""
    largest = max(values)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    return largest * math.sqrt(sum((one / largest) ** 2 for one in values) / len(values))


def find_loss(output: object) -> Tensor | None:
    """The scalar that a step returned for its backward pass, if there is one."""
    candidates: list[object] = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for one in candidates:
        if isinstance(one, Tensor) and one.numel() == 1 and one.requires_grad:
            return one
    return None
