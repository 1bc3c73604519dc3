"""Hold the rows of a watched step: values, gradients, and the units of operands."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_unitscale.capture.graph_matmuls import MATMUL_WORDS
from lightning_unitscale.capture.graph_recorder import local_part, stored_elements
from lightning_unitscale.matmuls.block_rounding import UNIT_SCALE, axes_of_function
from lightning_unitscale.matmuls.calls import RanMatmul
from lightning_unitscale.matmuls.gauge import TensorUnits, Unit
from lightning_unitscale.matmuls.torch_internals import sequence_number
from lightning_unitscale.monitor.names import Caller
from lightning_unitscale.monitor.probes import ProbedTensor
from lightning_unitscale.monitor.torch_state import (
    PLAIN_TYPES,
    is_readable,
    plain_functions,
    unseen,
)
from lightning_unitscale.patching import nothing
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.statistics import ReadRows, TakenRow, block_rows, step_rows

# Operations that may lie between an argument and a matmul's operand, or between its result and the
# function's result: casts, views, copies, padding, factors and biases.
_ON_THE_WAY = re.compile(
    r"(ToCopy|Copy|Clone|Alias|T|Transpose|Permute|MoveDim|View|UnsafeView|ReshapeAlias|Expand|"
    r"Squeeze|Unsqueeze|AsStrided|Select|Slice|Narrow|ConstantPadNd|Mul|Div|Add)Backward\d+"
)
_MOST_ON_THE_WAY = 16
# Units by which operands were divided, as exponents; ``None`` where they have none yet.
Log2Unit = int | None


@dataclass(eq=False, slots=True)
class TensorRow:
    """A tensor of the step."""

    # An attention that reads it may give it a better name.
    name: str
    module: str
    inputs: tuple[TensorRow, ...] = ()
    # True if it is shown. Otherwise it only connects other tensors.
    is_shown: bool = False
    # True if the step starts from it: a parameter, a buffer or a part of the batch.
    is_given: bool = False
    # True if a matmul reads it, and if a matmul makes it.
    is_operand: bool = False
    is_matmul: bool = False
    # True if it takes no part in the backward pass: a mask, a table.
    is_constant: bool = False
    is_hooked: bool = False
    # Statistics of the value, if measured, and of the gradients that have arrived.
    forward: TakenRow | None = None
    backward: list[TakenRow] = field(default_factory=list)
    # Statistics of blocks, where a matmul reads the value and where one reads the gradient, and the
    # dimension of the gradient along which its blocks lie, if one reads it.
    forward_blocks: list[TakenRow] = field(default_factory=list)
    backward_blocks: list[TakenRow] = field(default_factory=list)
    gradient_axis: int | None = None
    # Units of value and gradient, and the one in which formats of the value were counted.
    log2_sigma: int = 0
    log2_gamma: int = 0
    log2_counted: int = 0
    # True if a matmul of this step has set the unit of the value, and of the gradient. ``None`` if
    # no scaled matmul reads it.
    has_unit: bool | None = None
    has_gradient_unit: bool | None = None
    made_as: str = ""

    def __post_init__(self) -> None:
        self.made_as = self.name

    def described(self, inputs: Iterable[TensorRow]) -> ProbedTensor:
        """Return the fields of a snapshot other than numbers."""
        held = _held(self.log2_sigma, self.log2_gamma)
        names = dict.fromkeys(row.name for row in inputs if row.name != self.name)
        return ProbedTensor(
            self.name,
            self.module,
            held,
            tuple(names),
            self.is_operand,
            self.is_matmul,
            (self.has_unit is False, self.has_gradient_unit is False),
        )


class _Entry(weakref.ref[Tensor]):
    """A tensor, weakly, and its rows."""

    __slots__ = ("rows",)
    rows: tuple[TensorRow, ...]


class RowsOf:
    """The rows of tensors by identity, without keeping the tensors alive."""

    def __init__(self) -> None:
        # torch's own WeakIdKeyDictionary takes several times as long. The entry of a dead tensor
        # stays until another tensor has its address, so there are few entries even in a long call.
        self._entries: dict[int, _Entry] = {}

    def get(self, tensor: Tensor) -> tuple[TensorRow, ...] | None:
        """Return the rows of a tensor; ``None`` if it is not known."""
        entry = self._entries.get(id(tensor))
        # A dead tensor may have had the same address.
        return None if entry is None or entry() is None else entry.rows

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None

    def __setitem__(self, tensor: Tensor, rows: tuple[TensorRow, ...]) -> None:
        entry = self._entries[id(tensor)] = _Entry(tensor)
        entry.rows = rows

    def items(self) -> Iterator[tuple[Tensor, tuple[TensorRow, ...]]]:
        """Return the tensors that are still alive, and their rows."""
        for entry in list(self._entries.values()):
            if (tensor := entry()) is not None:
                # A tensor that only C++ still referenced gets its Python object back, as in
                # torch.utils.weak.
                getattr(tensor, "_fix_weakref", nothing)()
                yield tensor, entry.rows


@functools.lru_cache(maxsize=1024)
def _held(log2_sigma: int, log2_gamma: int) -> TensorUnits:
    return TensorUnits(Unit(log2=log2_sigma), Unit(log2=log2_gamma))


class Measuring:
    """Measures a running step, invisible to its modes and its autograd graph."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        # True if formats are counted when a tensor is measured, in its unit at that time. A sampled
        # row is valid for every unit.
        self.counts_stored = not layout.is_sampled
        self._rows = step_rows(layout.measured)
        self._blocks = block_rows(layout)
        # Spacing of the numbers near 1 in the coarsest type or format so far, forward and backward.
        self.spacing = (0.0, 0.0)
        # Keyed by device and unit. Few of them differ, and filling each takes a kernel.
        self._factors: dict[tuple[torch.device, int], Tensor] = {}

    def value(self, row: TensorRow, tensor: Tensor) -> None:
        """Measure a value. Formats are counted in the row's unit."""
        row.forward = self.of(tensor, row.log2_sigma)
        row.log2_counted = row.log2_sigma

    def gradient(self, row: TensorRow, gradient: Tensor) -> None:
        """Measure a gradient that has arrived."""
        row.backward.append(self.of(gradient, row.log2_gamma))
        if row.gradient_axis is not None and self.layout.block_formats:
            unit = row.log2_gamma if row.has_gradient_unit else None
            row.backward_blocks.append(self._blocks_of(gradient, row.gradient_axis, unit))

    def operand(self, row: TensorRow, tensor: Tensor, axis: int, log2_unit: Log2Unit) -> None:
        """Measure blocks of a value along the dimension of the first matmul that reads it."""
        if self.layout.block_formats and not row.forward_blocks:
            row.forward_blocks.append(self._blocks_of(tensor, axis, log2_unit))

    def _blocks_of(self, tensor: Tensor, axis: int, log2_unit: Log2Unit) -> TakenRow:
        with unseen(), torch.inference_mode():
            # If operands are scaled, the scale of a tensor is a constant.
            scale = None if log2_unit is None else UNIT_SCALE * 2.0**log2_unit
            return self._blocks.add(stored_elements(tensor), axis, scale)

    def of(self, tensor: Tensor, log2_unit: int) -> TakenRow:
        """Measure a tensor, with exact counts per format of the tensor over ``2**log2_unit``."""
        if type(tensor) in PLAIN_TYPES:
            with plain_functions():
                row = self._rows.repeat(tensor)
            if row is not None:
                return row
        # No operation is recorded in inference mode, not even for forward derivatives.
        with unseen(), torch.inference_mode():
            elements = stored_elements(tensor)
            if elements.is_floating_point():
                self.see_spacing((torch.finfo(elements.dtype).eps,) * 2)
            factor = None
            if log2_unit and self.counts_stored:
                key = elements.device, log2_unit
                if key not in self._factors:
                    # Not torch.tensor, whose copy to the device would wait for it.
                    self._factors[key] = torch.full((), 2.0**-log2_unit, device=elements.device)
                factor = self._factors[key]
            return self._rows.add(elements, *() if factor is None else (factor,))

    def see_spacing(self, spacing: tuple[float, float]) -> None:
        """Record the spacing of a tensor's type, or of the formats of a matmul."""
        self.spacing = max(self.spacing[0], spacing[0]), max(self.spacing[1], spacing[1])

    def clear(self) -> None:
        """Forget all rows since the last transfer."""
        self._rows = step_rows(self.layout.measured)
        self._blocks = block_rows(self.layout)

    def send(self) -> tuple[ReadRows, ReadRows]:
        """Start the transfer of all rows since the last one. The returned objects wait for them."""
        with unseen(), torch.inference_mode():
            return self._rows.send(), self._blocks.send()


class RunningFunction:
    """A function that a step calls, with the arguments that matmuls read and their units."""

    # Before the dispatcher runs the matmul of a function, torch may cast its arguments (autocast
    # also caches the cast weight for the next call), or transpose, expand, copy or scale them. The
    # dispatcher then sees another tensor, perhaps in other memory. Its autograd graph leads back to
    # the argument. Without a graph, its size identifies the argument.

    def __init__(
        self,
        word: str,
        caller: Caller,
        inputs: tuple[TensorRow, ...],
        arguments: Sequence[Tensor] = (),
    ) -> None:
        self.word, self.caller, self.inputs = word, caller, inputs
        # An argument, its unit and its name in the gauge, in the order in which matmuls read them.
        self.units: list[tuple[Tensor, Log2Unit, str]] = []
        # With each of them the operand that a matmul reads, and the dimension that it sums over.
        self.read: list[tuple[Tensor, int]] = []
        self._given = arguments
        # Arguments that were found by their size, which several may have.
        self._taken: set[int] = set()
        self._ran: list[RanMatmul] = []

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """Return the dimensions of the arguments that are summed over, without a session."""
        return axes_of_function(self.word, self._given) if self.word in MATMUL_WORDS else ()

    @functools.cached_property
    def _arguments(self) -> list[Tensor]:
        return [tensor for tensor in self._given if is_readable(tensor)]

    def see(self, ran: RanMatmul) -> None:
        """Record a matmul that the function has run."""
        self._ran.append(ran)
        found = self._by_memory(ran.operands)
        read = zip(found, ran.operands, ran.axes, ran.log2_sigmas, ran.names, strict=True)
        for argument, operand, axis, unit, name in read:
            if argument is None:
                argument = self._by_graph(operand)
            if argument is None and operand.grad_fn is None:
                argument = self._by_size(operand)
            if argument is not None:
                self.units.append((argument, unit, name))
                self.read.append((operand, axis))

    def matmul_of(self, result: Tensor) -> RanMatmul | None:
        """Return the matmul that computed a result."""
        if not self._ran:
            return None
        if result.grad_fn is None:
            # It was computed for the gradient of another node: a checkpoint, or the user's own
            # function.
            return self._ran[-1]
        for node, _ in _way(result.grad_fn, result.output_nr):
            number = sequence_number(node)
            for ran in reversed(self._ran):
                if number in ran.nodes:
                    return ran
        return None

    def _by_memory(self, operands: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the argument at each operand's memory. Parts of one argument come in order."""
        left = list(self._arguments)
        found: list[Tensor | None] = []
        for operand in operands:
            memory, begin = _place(operand)
            places = [(tensor, *_place(tensor)) for tensor in left]
            parts = [(tensor, start) for tensor, where, start in places if where == memory]
            exact = [tensor for tensor, start in parts if start == begin]
            argument = next(iter((*exact, *(tensor for tensor, _ in parts))), None)
            if argument is not None:
                left = [tensor for tensor in left if tensor is not argument]
            found.append(argument)
        return found

    def _by_graph(self, operand: Tensor) -> Tensor | None:
        """Return the argument that an operand was computed from, according to autograd's graph."""
        if operand.grad_fn is None:
            return None
        for node, output in _way(operand.grad_fn, operand.output_nr):
            for tensor in self._arguments:
                if tensor.grad_fn is None:
                    is_same = getattr(node, "variable", None) is tensor
                else:
                    is_same = tensor.grad_fn is node and tensor.output_nr == output
                if is_same:
                    return tensor
        return None

    def _by_size(self, operand: Tensor) -> Tensor | None:
        numel = operand.numel()
        same = [tensor for tensor in self._arguments if local_part(tensor).numel() == numel]
        if not same:  # it was expanded to a batch
            same = [t for t in self._arguments if t.numel() and numel % t.numel() == 0]
        free = [tensor for tensor in same if id(tensor) not in self._taken]
        argument = next(iter((*free, *same)), None)
        self._taken.add(id(argument))
        return argument


def gradient_axis(own: int, result: Tensor) -> int:
    """Return the dimension of a result's gradient that the gradient of the first operand sums over.

    ``own`` is the dimension of that operand that the matmul sums over. The last dimensions of the
    result may have been transposed since.
    """
    if own != -1 or result.dim() < 2:
        return own
    part = local_part(result)
    steps = [
        (step, -index)
        for index, (size, step) in enumerate(zip(part.shape, part.stride(), strict=True))
        if size > 1
    ]
    return -min(steps)[1] if steps else -1


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return the memory of a tensor, and where it begins there."""
    tensor = local_part(tensor)
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return tensor.untyped_storage().data_ptr(), begin


def _way(node: Any, output: int) -> Iterator[tuple[Any, int]]:
    """Return autograd nodes and their outputs from one node on, back toward the inputs."""
    # It ends after the first node that does not connect an argument to a matmul. If two tensors
    # were added, the first has the shape of the matmul.
    for _ in range(_MOST_ON_THE_WAY):
        yield node, output
        if _ON_THE_WAY.fullmatch(node.name()) is None:
            return
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if not edges:
            return
        node, output = edges[0]


def shown_inputs(rows: Iterable[TensorRow]) -> dict[TensorRow, dict[TensorRow, None]]:
    """Return, for each row, the shown rows that it is computed from, through hidden rows."""
    inputs: dict[TensorRow, dict[TensorRow, None]] = {}
    for row in rows:
        sources: dict[TensorRow, None] = {}
        for source in row.inputs:
            sources.update({source: None} if source.is_shown else inputs.get(source, {}))
        inputs[row] = sources
    return inputs
