"""Measure the operands of every product and the gradient that arrives at it, in one eager step.

Units are found by measuring, and in FP16 a gradient below 2**-24 measures as zero.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.capture.compiled_graph import CompiledGraph
from lightning_unitscale.graph.recorder import GraphInterpreter, stored_elements
from lightning_unitscale.lossless.fp8_range import (
    NUM_SHARES,
    Direction,
    Shares,
    Unrepresentable,
    lost_shares,
    stored_shares,
    unrepresentable_among,
)
from lightning_unitscale.scales.reduce import row_dtype
from lightning_unitscale.scales.transfer import numbers_of

# RMS of tensors, or of their gradients, by name in the gauge.
Sizes = Mapping[str, float]
# Direction, name in the gauge, exponent of the unit in force (``None`` without one), and the RMS as
# the model means it, followed by what FP8 would lose of the tensor where that was measured.
Row = tuple[Direction, str, int | None, Sequence[float]]

# The range that lossless unit scaling promises for the stored RMS of an operand.
LOW, HIGH = 0.25, 4.0


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


def combined_rms(values: list[float]) -> float:
    """RMS of equal-sized parts, scaled by the largest so that squares stay in range."""
    largest = max(values)
    if not math.isfinite(largest) or largest == 0.0:
        return largest
    return largest * math.sqrt(sum((rms / largest) ** 2 for rms in values) / len(values))


def row_of(rms: Tensor, shares: Tensor | None) -> Tensor:
    """The numbers of one tensor: its RMS, and what FP8 would lose of it where that is measured."""
    row = rms.reshape(1)
    return row if shares is None else torch.cat([row, shares.to(row.dtype)])


def stored_row(tensor: Tensor, direction: Direction, *, measures_range: bool = True) -> Tensor:
    """The numbers of a tensor that is in its units.

    Args:
        tensor: Floating point, of any shape.
        direction: Which has the formats that it may be cast to.
        measures_range: Whether to measure what these would lose.
    """
    shares = stored_shares(tensor, direction) if measures_range else None
    return row_of(root_mean_square(tensor), shares)


@dataclass(frozen=True)
class Measured:
    """What was measured of tensors with units of their own, by name in the gauge.

    Attributes:
        forward: RMS as the model means it.
        backward: RMS of the gradient as the model means it.
        outside: Tensors whose RMS in the units in force has left [1/4, 4], with that RMS.
        unrepresentable: What FP8 does not represent, though its RMS is within that range.
    """

    forward: Sizes = field(default_factory=dict)
    backward: Sizes = field(default_factory=dict)
    outside: Sizes = field(default_factory=dict)
    unrepresentable: Unrepresentable = field(default_factory=Unrepresentable)

    @staticmethod
    def of(rows: Iterable[Row]) -> Measured:
        """What rows say together: several calls measure one tensor, which has one unit."""
        true: dict[tuple[Direction, str], list[float]] = {}
        units: dict[tuple[Direction, str], int] = {}
        shares: list[Shares] = []
        for direction, name, unit, (rms, *lost) in rows:
            true.setdefault((direction, name), []).append(rms)
            if unit is not None:
                units[direction, name] = unit
            # Out of the range it gets other units first.
            if lost and (unit is None or LOW <= math.ldexp(rms, -unit) <= HIGH):
                shares.append((direction, name, lost))
        joint = {key: combined_rms(values) for key, values in true.items()}
        stored = {key: math.ldexp(joint[key], -unit) for key, unit in units.items()}
        return Measured(
            {name: rms for (direction, name), rms in joint.items() if direction == "forward"},
            {name: rms for (direction, name), rms in joint.items() if direction == "backward"},
            {
                name: rms
                for (_, name), rms in stored.items()
                if rms > 0.0 and not LOW <= rms <= HIGH
            },
            unrepresentable_among(shares),
        )

    def sizes(self) -> tuple[Sizes, Sizes]:
        """All RMS, forward and backward."""
        return self.forward, self.backward


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
        self._rows: list[tuple[Direction, str, Tensor]] = []
        self._handles: list[RemovableHandle] = []

    def __call__(self, graph: CompiledGraph, inputs: tuple[Any, ...]) -> Any:
        """Run one graph of the step; the interpreter that ``CapturedStep`` expects."""
        return graph.interpret(lambda base: GraphInterpreter(base, self._visit).run, inputs)

    @property
    def saw_gradients(self) -> bool:
        """Whether a backward pass has reached any measured tensor."""
        return any(direction == "backward" for direction, *_ in self._rows)

    def measured(self) -> Measured:
        """What was measured of every tensor, with one transfer from the device."""
        numbers = numbers_of([row for *_, row in self._rows])
        return Measured.of(
            (direction, name, None, row)
            for (direction, name, _), row in zip(self._rows, numbers, strict=True)
        )

    def clear(self) -> None:
        """Forget what was measured."""
        self.release()
        self._rows.clear()

    def measure(self, name: str, value: object, *, is_operand: bool = False) -> None:
        """Measure a forward value.

        Args:
            name: Its name.
            value: The value; all but floating-point tensors are passed over.
            is_operand: Whether a product reads it, and so may read it in FP8.
        """
        if isinstance(value, Tensor) and value.is_floating_point():
            self._add("forward", name, value, is_read=is_operand)

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
                    self._add("backward", name, gradient, is_read=True)

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

    def _add(self, direction: Direction, name: str, tensor: Tensor, *, is_read: bool) -> None:
        # Of a distributed tensor a plain one, as the RMS is.
        elements = stored_elements(tensor.detach())
        rms, shares = root_mean_square(elements), None
        if self._measures_range and is_read:
            shares = lost_shares(elements, rms, direction)
        elif self._measures_range:
            shares = rms.new_zeros(NUM_SHARES)
        self._rows.append((direction, name, row_of(rms, shares)))


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
