"""How far operands and gradients have drifted from the gauge, measured in the observed variant."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from lightning_unitscale.functional.scale import takes_true_derivatives
from lightning_unitscale.graph.nodes import INTERNAL
from lightning_unitscale.graph.passes import StepGraph
from lightning_unitscale.graph.recorder import TAP, CallRecord, CallRecorder, tap_gradient
from lightning_unitscale.lossless.calibrate import Measured, Row, stored_row
from lightning_unitscale.lossless.fp8_range import NUM_SHARES, Direction
from lightning_unitscale.lossless.gauge import Gauge
from lightning_unitscale.lossless.units import GAUGE, Edit
from lightning_unitscale.scales.transfer import HostCopy


@dataclass(frozen=True)
class _Call:
    # Names of what the rows of each direction are of, with the exponents of their units.
    units: Mapping[Direction, tuple[tuple[str, int], ...]]
    record: CallRecord


class DriftProbes:
    """Measures stored operands, and gradients arriving at products, at the scales of a graph.

    Args:
        measures_range: Whether to measure what FP8 would lose as well.
    """

    def __init__(self, *, measures_range: bool) -> None:
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
                rows.append(
                    graph.graph.call_function(
                        stored_row,
                        (source, "forward"),
                        {"measures_range": self._measures_range},
                    )
                )
        recorder.finish(rows)

    def clear(self) -> None:
        """Forget what was measured."""
        self._calls.clear()

    def send(self) -> Callable[[], Measured] | None:
        """Send for what was measured since the last call; what is returned waits for it."""
        calls, self._calls = self._calls, []
        if not calls:
            return None
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

    def row_of(gradient: Tensor) -> Tensor:
        if takes_true_derivatives():
            # It is not in the units that it would be judged by; a row of zeros says nothing.
            return gradient.new_zeros(width)
        return stored_row(gradient, "backward", measures_range=width > 1)

    return tap_gradient(tensor, slot, row_of)
