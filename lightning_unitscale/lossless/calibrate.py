"""Measure the tensors that have units: when there are none yet, and how far they have drifted.

Units are found by a :class:`Calibrator`, which runs a graph as it was captured. Whether they still
fit is shown by probes in the observed variant of what the graph was rewritten to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import RemovableHandle

from lightning_unitscale.capture.compiled_graph import CompiledGraph
from lightning_unitscale.functional.scale import takes_true_derivatives
from lightning_unitscale.graph.matmuls import product_of
from lightning_unitscale.graph.nodes import INTERNAL, tensor_name
from lightning_unitscale.graph.passes import StepGraph
from lightning_unitscale.graph.recorder import (
    TAP,
    CallRecord,
    CallRecorder,
    GraphInterpreter,
    stored_elements,
    tap_gradient,
)
from lightning_unitscale.lossless.fp8_range import (
    NUM_SHARES,
    Direction,
    Shares,
    Unrepresentable,
    lost_shares,
    stored_shares,
    unrepresentable_among,
)
from lightning_unitscale.lossless.gauge import Gauge
from lightning_unitscale.lossless.plan import operand_name
from lightning_unitscale.lossless.units import GAUGE, Edit
from lightning_unitscale.scales.reduce import row_dtype
from lightning_unitscale.scales.transfer import HostCopy, numbers_of

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


def stored_row(tensor: Tensor, direction: Direction, measures_range: bool = True) -> Tensor:
    """The numbers of a tensor that is in its units."""
    shares = stored_shares(tensor, direction) if measures_range else None
    return row_of(root_mean_square(tensor), shares)


def is_late_look(count: int) -> bool:
    """Whether what has been zero so far is worth a second run of a step, or a meeting of ranks."""
    return count in (1, 2, 4) or (count > 0 and count % 8 == 0)


def usable_sizes(sizes: Sizes) -> dict[str, float]:
    """Those that a unit can be taken from: of what is zero, empty or not finite none can."""
    return {name: rms for name, rms in sizes.items() if 0.0 < rms < math.inf}


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

    def names(self) -> list[str]:
        """Return the names of what a unit can be taken from."""
        return [*usable_sizes(self.forward), *usable_sizes(self.backward)]

    def of_names(self, names: Collection[str]) -> Measured:
        """The RMS of tensors of these names alone."""
        forward, backward = (
            {name: rms for name, rms in sizes.items() if name in names}
            for sizes in (self.forward, self.backward)
        )
        return Measured(forward, backward)

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


class Calibrator:
    """Runs captured graphs as they are, and measures operands and gradients of their products.

    Plain tensor hooks see the gradients, so views do not matter. In-place operations do: the result
    of a linear map is a view of its product, and writing into a view cuts off the hooks on it.
    """

    def __init__(self, *, measures_range: bool = False) -> None:
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
        """Measure a forward value."""
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
        product = product_of(node)
        if product is not None:
            for operand in product.operands:
                value = interpreter.env[operand.node]
                self.measure(operand_name(product, operand), value, is_operand=True)
        result = interpreter.evaluate(node)
        if product is not None:
            self.watch(tensor_name(node), result)
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


@dataclass(frozen=True)
class _Call:
    # Names of what the rows of each direction are of, with the exponents of their units.
    units: Mapping[Direction, tuple[tuple[str, int], ...]]
    record: CallRecord


class DriftProbes:
    """Measures stored operands, and gradients arriving at products, at the scales of a graph.

    Attributes:
        names: Of all tensors that were measured so far, zeros among them.
    """

    def __init__(self, *, measures_range: bool) -> None:
        self.names: frozenset[str] = frozenset()
        self._measures_range = measures_range
        self._calls: list[_Call] = []

    def insert(self, graph: StepGraph, applied: Sequence[tuple[Edit, fx.Node]]) -> None:
        """Add the measurements to a rewritten graph; those inside checkpoints are left out."""
        inside = set(graph.graph.nodes)
        forward = [pair for pair in applied if pair[0].forward_name and pair[1] in inside]
        backward = [pair for pair in applied if pair[0].backward_name and pair[1] in inside]
        count = max(len(forward), len(backward))
        if not count:
            return
        gauge_in_force: Callable[[], Gauge] = graph.notes[GAUGE]

        def on_record(record: CallRecord) -> None:
            gauge = gauge_in_force()
            units = tuple((str(e.forward_name), e.forward_unit.exponent(gauge)) for e, _ in forward)
            arriving = (str(edit.backward_name) for edit, _ in backward)
            gammas = tuple((name, gauge.pair(name).log2_gamma) for name in arriving)
            self._calls.append(_Call({"forward": units, "backward": gammas}, record))

        width = 1 + NUM_SHARES if self._measures_range else 1
        recorder = CallRecorder(graph, count, width, on_record)
        for row, (_, node) in enumerate(backward):
            # Between the product and its scale: there the gradient is as it is stored.
            slot, product = recorder.slot(row), node.args[0]
            with graph.graph.inserting_before(node):
                probe = graph.graph.call_function(_tap, (product, slot))
            probe.meta.update(node.meta)
            probe.meta[INTERNAL] = probe.meta[TAP] = True
            node.args = (probe, *node.args[1:])
        rows = []
        for index in range(count):
            # A part of a cut graph may have nothing but gradients to measure.
            source = (forward or backward)[index % len(forward or backward)][1]
            with graph.graph.inserting_after(source):
                arguments = source, "forward", self._measures_range
                rows.append(graph.graph.call_function(stored_row, arguments))
        recorder.finish(rows)

    def clear(self) -> None:
        """Forget what was measured."""
        self._calls.clear()

    def send(self) -> Callable[[], Measured] | None:
        """Send for what was measured since the last call; what is returned waits for it."""
        calls, self._calls = self._calls, []
        if not calls:
            return None
        units = (units for call in calls for units in call.units.values())
        self.names |= {name for names in units for name, _ in names}
        rows = [part for call in calls for part in (call.record.forward, call.record.backward)]
        copy = HostCopy(torch.cat([part.to(rows[0].device) for part in rows]))

        def arrived() -> Measured:
            return Measured.of(_rows(calls, copy.numbers().tolist()))

        return arrived


def _rows(calls: Sequence[_Call], numbers: Sequence[Sequence[float]]) -> Iterator[Row]:
    left = iter(numbers)
    for call in calls:
        count = len(call.record.forward)
        for direction, units in call.units.items():
            measured = list(itertools.islice(left, count))
            for (name, exponent), (rms, *lost) in zip(units, measured, strict=False):
                if math.isfinite(rms) and rms > 0.0:
                    yield direction, name, exponent, (math.ldexp(rms, exponent), *lost)


def _tap(tensor: Tensor, slot: Tensor) -> Tensor:
    width = slot.numel()

    def measured(gradient: Tensor) -> Tensor:
        if takes_true_derivatives():
            # It is not in the units that it would be judged by; a row of zeros says nothing.
            return gradient.new_zeros(width)
        return stored_row(gradient, "backward", width > 1)

    return tap_gradient(tensor, slot, measured)
