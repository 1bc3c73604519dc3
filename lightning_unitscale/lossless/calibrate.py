"""Measure the operands of every product and the gradient that arrives at it, in one eager step.

Units are found by measuring, and in FP16 a gradient below 2**-24 measures as zero.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.capture.compiled_graph import CompiledGraph
from lightning_unitscale.graph.recorder import GraphInterpreter, stored_elements
from lightning_unitscale.lossless.fp8_range import (
    Direction,
    Unrepresentable,
    lost_shares,
    unrepresentable_among,
)
from lightning_unitscale.scales.reduce import row_dtype
from lightning_unitscale.scales.transfer import numbers_of

Measured = Mapping[str, float]


def root_mean_square(tensor: Tensor) -> Tensor:
    """RMS of a tensor as a 0-d tensor; it neither overflows nor underflows for FP32 values.

    A gradient of 1e-25 is ordinary and its square is 0 in FP32, so squares are summed in FP64.
    """
    dtype = row_dtype(tensor.device)
    tensor = stored_elements(tensor.detach())
    if tensor.numel() == 0:
        return torch.zeros((), dtype=dtype, device=tensor.device)
    norm = torch.linalg.vector_norm(tensor, dtype=dtype)
    return norm / math.sqrt(tensor.numel())


class Calibrator:
    """Runs captured graphs as they are and measures named tensors on the way.

    Plain tensor hooks see the gradients, so views do not matter. In-place operations do: the result
    of a linear map is a view of its product, and writing into a view cuts off the hooks on it.

    Args:
        operands_of: What to measure before a node runs, as pairs of a name and an argument.
        result_name: Name under which the gradient of a node's result is measured, or ``None``.
        measures_results: Whether the results themselves are measured as well.
        measures_range: Whether to count what FP8 would lose of operands and gradients.
    """

    def __init__(
        self,
        operands_of: Callable[[fx.Node], list[tuple[str, fx.Node]]],
        result_name: Callable[[fx.Node], str | None],
        *,
        measures_results: bool = False,
        measures_range: bool = False,
    ) -> None:
        self._operands_of = operands_of
        self._result_name = result_name
        self._measures_results = measures_results
        self._measures_range = measures_range
        self._forward: dict[str, list[Tensor]] = defaultdict(list)
        self._backward: dict[str, list[Tensor]] = defaultdict(list)
        self._lost: list[tuple[Direction, str, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def __call__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
        """Run one graph of the step; the interpreter that ``CapturedStep`` expects."""
        return graph.interpret(lambda base: GraphInterpreter(base, self._visit).run, inputs)

    @property
    def saw_gradients(self) -> bool:
        """Whether a backward pass has reached any measured tensor."""
        return bool(self._backward)

    def results(self) -> tuple[Measured, Measured]:
        """RMS of every tensor, forward and backward, with one transfer from the device.

        A tensor measured several times (several calls in a step) gets the RMS of all.
        """
        both = (self._forward, self._backward)
        rms = [value for values_of in both for values in values_of.values() for value in values]
        numbers = iter(numbers_of(rms))
        forward, backward = (
            {name: combined_rms([*islice(numbers, len(values))]) for name, values in of.items()}
            for of in both
        )
        return forward, backward

    def unrepresentable(self) -> Unrepresentable:
        """What FP8 cannot represent of the measured tensors; one transfer from the device."""
        shares = numbers_of([lost for *_, lost in self._lost])
        return unrepresentable_among(
            (direction, name, numbers)
            for (direction, name, _), numbers in zip(self._lost, shares, strict=True)
        )

    def clear(self) -> None:
        """Forget what was measured."""
        self.release()
        self._forward.clear()
        self._backward.clear()
        self._lost.clear()

    def measure(self, name: str, value: object, *, is_operand: bool = False) -> None:
        """Measure a forward value.

        Args:
            name: Its name.
            value: The value; all but floating-point tensors are passed over.
            is_operand: Whether a product reads it, and so may read it in FP8.
        """
        if isinstance(value, Tensor) and value.is_floating_point():
            rms = root_mean_square(value)
            self._forward[name].append(rms)
            if is_operand:
                self._measure_range("forward", name, value, rms)

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
                # a new history for this one without its hooks; the base keeps them.
                value = base

            def see(gradient: Tensor | None) -> None:
                # A function of the user's may say that there is none.
                if gradient is not None:
                    rms = root_mean_square(gradient)
                    self._backward[name].append(rms)
                    self._measure_range("backward", name, gradient, rms)

            handle = value.register_hook(see)
            if value.is_leaf:
                # A parameter, or an input, outlives the step, and so would the hook.
                self._handles.append(handle)

    def release(self) -> None:
        """Take the hooks off the parameters; called when nothing is to be measured any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _visit(self, interpreter: GraphInterpreter, node: fx.Node) -> Any:
        for name, operand in self._operands_of(node):
            self.measure(name, interpreter.env[operand], is_operand=True)
        result = interpreter.evaluate(node)
        result_name = self._result_name(node)
        if result_name is not None:
            if self._measures_results:
                self.measure(result_name, result)
            self.watch(result_name, result)
        return result

    def _measure_range(self, direction: Direction, name: str, tensor: Tensor, rms: Tensor) -> None:
        if self._measures_range:
            self._lost.append((direction, name, lost_shares(tensor.detach(), rms, direction)))


def combined_rms(values: list[float]) -> float:
    """RMS of equal-sized parts, scaled by the largest so that squares stay in range."""
    largest = max(values)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    return largest * math.sqrt(sum((rms / largest) ** 2 for rms in values) / len(values))


def find_loss(output: object) -> Tensor | None:
    """The scalar that a step returned for its backward pass, if there is one."""
    candidates: list[object] = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.numel() == 1 and candidate.requires_grad:
            return candidate
    return None


def runs_in_fp16(module: nn.Module) -> bool:
    """Whether parameters of the module are FP16, or autocast casts to it here and now."""
    parameters = list(module.parameters())
    if any(param.dtype == torch.float16 for param in parameters):
        return True
    return any(
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == torch.float16
        for device_type in {param.device.type for param in parameters}
    )


@contextlib.contextmanager
def warning_where_fp16_is_cast_to(title: str) -> Iterator[None]:
    """What a module in FP16 measures in FP32 within this context is left out if it fails.

    Args:
        title: Name of the module and its method, for the warning.
    """
    try:
        yield
    except RuntimeError as error:
        warnings.warn(
            f"{title}: it runs in FP16 and not in FP32 "
            f"({str(error).splitlines()[0]}), so units are measured in FP16, where small "
            "gradients are zero; expected a step without casts to torch.float16 of its "
            "own; use tensor.to(other.dtype) for them.",
            stacklevel=6,
        )


@contextlib.contextmanager
def full_precision(module: nn.Module) -> Iterator[None]:
    """Within this context FP16 parameters and buffers are FP32, and autocast is off.

    So are attributes of the modules that name FP16, to which steps cast: a LightningModule's
    ``dtype`` is one. The tensors that were there come back afterwards, untouched.
    """
    tensors = [*module.parameters(), *module.buffers()]
    wide = {
        tensor: nn.Parameter(tensor.detach().float(), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.float()
        for tensor in tensors
        if tensor.dtype == torch.float16
    }
    tensor_attributes = [
        (owner, name, tensor)
        for owner in module.modules()
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and tensor in wide
    ]
    dtype_attributes = [
        (attributes, name)
        for attributes in map(vars, module.modules())
        for name, value in attributes.items()
        if value is torch.float16
    ]
    default = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for device_type in {tensor.device.type for tensor in tensors}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        try:
            # Other objects, not other ``data`` in them: with a change of type a parameter loses its
            # node of the autograd graph, and with it DDP's hook that averages the gradient.
            for owner, name, tensor in tensor_attributes:
                setattr(owner, name, wide[tensor])
            for attributes, name in dtype_attributes:
                attributes[name] = torch.float32
            if default == torch.float16:
                torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(default)
            for attributes, name in dtype_attributes:
                attributes[name] = torch.float16
            for owner, name, tensor in tensor_attributes:
                setattr(owner, name, tensor)


def in_full_precision(value: Any) -> Any:
    """A structure with its FP16 tensors in FP32."""

    def widened(leaf: Any) -> Any:
        is_half = isinstance(leaf, Tensor) and leaf.dtype == torch.float16
        return leaf.float() if is_half else leaf

    return tree_map(widened, value)
