"""What one call of a probed graph has recorded, and what stands for the parts of a cut graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_unitscale.graph.recording import CallRecord
from lightning_unitscale.row_layout import RowLayout
from lightning_unitscale.row_reduction import absent_rows
from lightning_unitscale.statistics import statistics_row
from lightning_unitscale.transforms.gauge import Factor, Gauge
from lightning_unitscale.transforms.shared_rows import SharedRows
from lightning_unitscale.transforms.units import Held


@dataclass(frozen=True)
class ProbedTensor:
    """One tensor under observation.

    Attributes:
        name: Its name, stable across runs.
        module: Path of the module that makes it.
        held: Units in which it is stored.
        inputs: Names of the probed tensors that it is computed from.
    """

    name: str
    module: str
    held: Held
    inputs: tuple[str, ...] = ()


@dataclass
class ProbedCall:
    """What one call of a graph has recorded.

    Attributes:
        tensors: The tensors of the rows.
        record: The rows.
        gauge: The gauge of the call.
        shared: Rows that were left out, since they follow from others.
    """

    tensors: tuple[ProbedTensor, ...]
    record: CallRecord
    gauge: Gauge
    shared: SharedRows | None = None

    def exponents(self, which: Literal["sigma", "gamma"]) -> list[int]:
        """Units of the tensors, forward or backward, under the gauge of the call."""
        if not self.gauge:
            return [getattr(one.held, which).constant for one in self.tensors]
        return [getattr(one.held, which).exponent(self.gauge) for one in self.tensors]


class CutGraph:
    """The tensors of a graph that was cut, of which each rank of several records its own.

    Args:
        tensors: All of them, in the order of the whole graph.
        gauge: Gives the gauge in force.
        layout: Columns of a row.
        device: Where the rows are.

    Attributes:
        names: Names of the tensors.
    """

    def __init__(
        self,
        tensors: Sequence[ProbedTensor],
        gauge: Callable[[], Gauge],
        layout: RowLayout,
        device: torch.device,
    ) -> None:
        self.names = frozenset(one.name for one in tensors)
        self._tensors = tuple(tensors)
        self._gauge = gauge
        self._layout = layout
        self._device = device

    def joined(self, other: CutGraph) -> CutGraph:
        """Of two graphs of one step, with the tensors of both."""
        tensors = {one.name: one for one in (*self._tensors, *other._tensors)}
        return CutGraph(tuple(tensors.values()), other._gauge, self._layout, self._device)

    def absent(self) -> ProbedCall:
        """A call in which no tensor was there: put first, it gives all their places."""
        rows = absent_rows(len(self._tensors), self._layout, self._device)
        return ProbedCall(self._tensors, CallRecord(rows, torch.zeros_like(rows)), self._gauge())

    def shared(self, name: str, value: Tensor, gradient: Tensor | None) -> ProbedCall:
        """A call of one tensor, of which several parts have made a share of the gradient."""
        (tensor,) = (one for one in self._tensors if one.name == name)
        gauge = self._gauge()

        def row(of: Tensor, unit: Factor) -> Tensor:
            exponent = 0 if tensor.held.in_graph else unit.exponent(gauge)
            # As for the others, formats are counted of what is stored.
            factor = torch.tensor(2.0**-exponent, dtype=torch.float32, device=of.device)
            return statistics_row(of.detach(), self._layout, factor=factor if exponent else None)

        forward = row(value, tensor.held.sigma)[None]
        slots = torch.zeros_like(forward)
        if gradient is not None:
            slots.grad = row(gradient, tensor.held.gamma)[None]
        return ProbedCall((tensor,), CallRecord(forward, slots), gauge)
