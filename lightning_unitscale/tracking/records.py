"""The records of the calls of probed graphs, and the snapshot of a step that is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_unitscale.graph.recorder import CallRecord
from lightning_unitscale.lossless.gauge import Factor, Gauge
from lightning_unitscale.lossless.units import Held
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.reduce import absent_rows, merge_rows, shift_rows
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.scales.tensor_statistics import FloatArray
from lightning_unitscale.tracking.fuse_rows import SharedRows


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
    """

    name: str
    module: str
    held: Held
    inputs: tuple[str, ...] = ()
    is_operand: bool = False
    is_product: bool = False


@dataclass
class ProbedCall:
    """The record of one call of a graph.

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
        return [getattr(tensor.held, which).exponent(self.gauge) for tensor in self.tensors]


class CutGraph:
    """The tensors of a graph that was cut, of which each rank of several records its own.

    Args:
        tensors: All of them, in the order of the whole graph.
        gauge: Gives the current gauge.
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
        rows = absent_rows(len(self._tensors), self._layout, self._device)
        return ProbedCall(self._tensors, CallRecord.of_rows(rows), self._gauge())

    def shared(self, name: str, value: Tensor, gradient: Tensor | None) -> ProbedCall:
        """A call of one tensor to whose gradient several parts of the graph have contributed.

        Args:
            name: The tensor's name.
            value: Its value.
            gradient: The whole gradient; ``None`` where none has arrived.
        """
        (tensor,) = (tensor for tensor in self._tensors if tensor.name == name)
        gauge = self._gauge()

        def row(of: Tensor, unit: Factor) -> Tensor:
            exponent = 0 if tensor.held.in_graph else unit.exponent(gauge)
            # As for the others, formats are counted of what is stored.
            factor = torch.tensor(2.0**-exponent, dtype=torch.float32, device=of.device)
            return statistics_row(of.detach(), self._layout, factor=factor if exponent else None)

        forward = row(value, tensor.held.sigma)[None]
        backward = None if gradient is None else row(gradient, tensor.held.gamma)[None]
        return ProbedCall((tensor,), CallRecord.of_rows(forward, backward), gauge)


def take_snapshot(
    step: int, calls: Sequence[ProbedCall], layout: RowLayout, grad_scale: float
) -> ScaleSnapshot:
    """The snapshot of several calls, with one transfer from the device.

    Args:
        step: Optimizer step of the snapshot.
        calls: At least one.
        layout: Columns of a row.
        grad_scale: Factor that the loss carried; gradients are divided by it.

    Returns:
        The snapshot; rows of a tensor that was recorded several times are merged.
    """
    device = calls[0].record.forward.device
    rows = [call.record.forward.to(device) for call in calls]
    rows += [call.record.backward.to(device) for call in calls]
    if device.type == "cpu" and len(calls) == 1:
        both = rows
    else:
        both = list(torch.cat(rows).cpu().chunk(2))
    forward, backward = (part.detach().double().numpy() for part in both)
    first = 0
    for call in calls:
        own = slice(first, first := first + len(call.tensors))
        if call.shared is not None:
            call.shared.fill(forward[own], backward[own], layout)
    # A slot that no gradient reached holds zeros, and a real row has elements.
    backward[~(backward[:, 0] > 0)] = np.nan
    sigmas, gammas = (
        np.array([unit for call in calls for unit in call.exponents(which)])
        for which in ("sigma", "gamma")
    )
    tensors = [tensor for call in calls for tensor in call.tensors]
    in_graph = np.array([tensor.held.in_graph for tensor in tensors])
    forward = _shifted(forward, sigmas * in_graph, layout)
    # A loss scaler moves by factors of two, so taking it off again is a shift as well.
    backward = _shifted(backward, gammas * in_graph - round(math.log2(grad_scale)), layout)
    names = [tensor.name for tensor in tensors]
    first_index = {name: index for index, name in reversed(list(enumerate(names)))}
    kept = sorted(first_index.values())
    if len(kept) < len(names):
        forward, backward = (_merged(rows, names, kept, layout) for rows in (forward, backward))
    return ScaleSnapshot(
        step=step,
        names=tuple(names[index] for index in kept),
        forward=forward,
        backward=backward,
        layout=layout,
        modules=tuple(tensors[index].module for index in kept),
        log2_sigma=sigmas[kept],
        log2_gamma=gammas[kept],
        counted_as_stored=True,
        inputs=tuple(tensors[index].inputs for index in kept),
        operands=tuple(tensors[index].is_operand for index in kept),
        products=tuple(tensors[index].is_product for index in kept),
    )


def _shifted(rows: FloatArray, exponents: npt.NDArray[np.int64], layout: RowLayout) -> FloatArray:
    if not exponents.any():
        return rows
    shifted = shift_rows(torch.from_numpy(rows), torch.from_numpy(exponents), layout)
    result: FloatArray = shifted.numpy()
    return result


def _merged(
    rows: FloatArray, names: Sequence[str], kept: Sequence[int], layout: RowLayout
) -> FloatArray:
    """One row a name, where each name first was."""
    merged = {names[index]: torch.from_numpy(rows[index]) for index in kept}
    first = set(kept)
    for index, name in enumerate(names):
        if index not in first:
            merged[name] = merge_rows(merged[name], torch.from_numpy(rows[index]), layout)
    result: FloatArray = torch.stack(list(merged.values())).numpy()
    return result
