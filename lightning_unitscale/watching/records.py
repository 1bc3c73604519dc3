"""The records of the calls of probed graphs, and the snapshot of a step that is made of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_unitscale.graph.recorder import CallRecord
from lightning_unitscale.lossless.gauge import Gauge, Unit
from lightning_unitscale.lossless.held import Held
from lightning_unitscale.scales.estimates import completed_rows
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.reduce import absent_rows, merge_rows, shift_rows
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.transfer import HostCopy, numbers_on


@dataclass(frozen=True)
class ProbedTensor:
    """One tensor under observation.

    Attributes:
        name: Its name, stable across runs.
        module: Path of the module that makes it.
        held: Units in which it is stored.
        inputs: Names of the probed tensors that it is computed from.
        is_operand: Whether a matrix product reads it.
        is_product: Whether a matrix product makes it.
        lacks_unit: Whether its unit, and that of its gradient, is still to be measured.
        made_by: Kind and target of the node of a graph that makes it.
    """

    name: str
    module: str
    held: Held
    inputs: tuple[str, ...] = ()
    is_operand: bool = False
    is_product: bool = False
    lacks_unit: tuple[bool, bool] = (False, False)
    made_by: tuple[str, Any] | None = None

    def lacks_unit_in(self, gauge: Gauge) -> tuple[bool, bool]:
        """Return whether a matmul reads it without a unit, or its gradient, under a gauge."""
        value, gradient = self.lacks_unit
        names = self.held.sigma.operand, self.held.gamma.gradient
        lacks = [bool(name) and name not in gauge for name in names]
        return value or lacks[0], gradient or lacks[1]


@dataclass(frozen=True)
class ProbedCall:
    """The record of one call of a graph.

    Attributes:
        tensors: The tensors of the rows.
        record: The rows.
        gauge: The gauge of the call.
    """

    tensors: tuple[ProbedTensor, ...]
    record: CallRecord
    gauge: Gauge


class CutGraph:
    """The tensors of a graph that was cut, of which each rank of several records its own.

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
        self.names = frozenset(tensor.name for tensor in tensors)
        self._tensors = tuple(tensors)
        self._gauge = gauge
        self._layout = layout
        self._device = device

    def joined(self, other: CutGraph) -> CutGraph:
        """The cut graph with the tensors of both."""
        tensors = {tensor.name: tensor for tensor in (*self._tensors, *other._tensors)}
        return CutGraph(tuple(tensors.values()), other._gauge, self._layout, self._device)

    def absent(self) -> ProbedCall:
        """A call in which every tensor was absent: put first, it gives their order."""
        rows = absent_rows(len(self._tensors), self._layout.measured, self._device)
        return ProbedCall(self._tensors, CallRecord.of_rows(rows), self._gauge())

    def shared(self, name: str, value: Tensor, gradient: Tensor | None) -> ProbedCall:
        """A call of one tensor to whose gradient several parts of the graph have contributed."""
        (tensor,) = (tensor for tensor in self._tensors if tensor.name == name)
        gauge = self._gauge()

        def row(of: Tensor, unit: Unit) -> Tensor:
            exponent = 0 if self._layout.is_sampled else unit.exponent(gauge)
            # As for the others, formats are counted of what is stored.
            (factor,) = numbers_on(of.device, [2.0**-exponent], torch.float32)
            layout = self._layout.measured
            return statistics_row(of.detach(), layout, factor=factor if exponent else None)

        forward = row(value, tensor.held.sigma)[None]
        backward = None if gradient is None else row(gradient, tensor.held.gamma)[None]
        return ProbedCall((tensor,), CallRecord.of_rows(forward, backward), gauge)


def sent_snapshot(
    step: int, calls: Sequence[ProbedCall], layout: RowLayout, grad_scale: float
) -> Callable[[], ScaleSnapshot]:
    """Send for the rows of several calls as one; what is returned waits for their snapshot."""
    device = calls[0].record.forward.device
    rows = [call.record.forward.to(device) for call in calls]
    rows += [call.record.backward.to(device) for call in calls]
    copy = HostCopy(torch.cat(rows))
    tensors = [(tensor, call.gauge) for call in calls for tensor in call.tensors]

    def arrived() -> ScaleSnapshot:
        forward, backward = copy.numbers().double().chunk(2)
        return snapshot_of(step, tensors, layout, grad_scale, forward, backward)

    return arrived


def snapshot_of(
    step: int,
    described: Sequence[tuple[ProbedTensor, Gauge]],
    layout: RowLayout,
    grad_scale: float,
    forward: Tensor,
    backward: Tensor,
) -> ScaleSnapshot:
    """Return the snapshot of measured rows on the host; those of the same tensor are merged."""
    measured = layout.measured
    # A slot that no gradient reached holds zeros, and a real row has elements.
    backward = torch.where(backward[:, :1] > 0, backward, math.nan)
    tensors = [tensor for tensor, _ in described]
    sigmas = np.array([tensor.held.sigma.exponent(gauge) for tensor, gauge in described])
    gammas = np.array([tensor.held.gamma.exponent(gauge) for tensor, gauge in described])
    log2_loss_scale = round(math.log2(grad_scale))
    # A loss scaler moves by factors of two, so taking it off again is a shift.
    backward = shift_rows(backward, np.full(len(tensors), -log2_loss_scale), measured)
    positions: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        positions.setdefault(tensor.name, []).append(index)
    kept = [indices[0] for indices in positions.values()]
    if len(kept) < len(tensors):
        merge = functools.partial(merge_rows, layout=measured)
        forward, backward = (
            torch.stack([functools.reduce(merge, rows[indices]) for indices in positions.values()])
            for rows in (forward, backward)
        )
    log2_sigma, log2_gamma = sigmas[kept], gammas[kept]
    if layout.is_sampled:
        forward = completed_rows(forward, layout, log2_sigma)
        backward = completed_rows(backward, layout, log2_gamma - log2_loss_scale)
    return ScaleSnapshot(
        step=step,
        names=tuple(positions),
        forward=forward.numpy(),
        backward=backward.numpy(),
        layout=layout,
        modules=tuple(tensors[index].module for index in kept),
        log2_sigma=log2_sigma,
        log2_gamma=log2_gamma,
        inputs=tuple(tensors[index].inputs for index in kept),
        operands=tuple(tensors[index].is_operand for index in kept),
        products=tuple(tensors[index].is_product for index in kept),
        lacking_units=tuple(tensors[index].lacks_unit_in(described[index][1]) for index in kept),
        log2_loss_scale=log2_loss_scale,
    )
