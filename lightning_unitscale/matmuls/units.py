"""Measure the units of a module's matmuls, and put them into force."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from lightning_unitscale.matmuls.gauge import Gauge, GaugePair
from lightning_unitscale.matmuls.measurement import (
    Extent,
    MeasuredMatmul,
    Measurement,
    Site,
    reading,
)


class Units:
    """The units in force of a module's matmuls. They outlive the session."""

    # An operand that is all zero, empty or not finite gives no unit. It is measured in each step
    # until it gives one. :meth:`receive` returns these numbers without waiting for the device.

    def __init__(self, *, is_used: bool = True) -> None:
        self.is_used = is_used
        # The units of tensors that the gauge does not contain.
        self._default = None if is_used else GaugePair()
        self.gauge = Gauge()  # the units in force, by the names of operands and matmuls
        self.plain: dict[str, dict[str, str]] = {}  # why matmuls run unscaled, by site and slot
        # The number of training steps begun, and the highest microbatch index of this step.
        self.step = self._num_more = 0
        self.rounding_step = 0  # number of the step or microbatch that seeds stochastic rounding
        self._is_training = False
        self.is_looking = False  # true if steps also measure tensors with units, for :meth:`send`
        self.sites: dict[str, Site] = {}  # the matmuls that have run, by name
        # Measured operands and gradients without a unit: their descriptions by name.
        self.lacking: dict[str, str] = {}
        self._measured: list[MeasuredMatmul] = []
        # The pending transfer, and the arrived matmuls that give new units, by slot and names.
        self._sent: Callable[[], Measurement] | None = None
        self._arrived: dict[tuple[str, ...], MeasuredMatmul] = {}

    def set_gauge(self, gauge: Gauge) -> None:
        """Put units into force from the next matmul on."""
        self.gauge = gauge
        self.lacking = {name: text for name, text in self.lacking.items() if name not in gauge}
        for site in self.sites.values():
            before = site.log2_units, site.log2_gamma
            site.take_units(gauge, self._default)
            if before != (site.log2_units, site.log2_gamma):
                site.judge(gauge)

    def restore(
        self, gauge: Gauge, plain: Mapping[str, Mapping[str, str]], lacking: Mapping[str, str]
    ) -> None:
        """Restore units, the reasons of unscaled matmuls, and the tensors without a unit."""
        self.plain = {name: dict(slots) for name, slots in plain.items()}
        for name, site in self.sites.items():
            site.plain = self.plain.setdefault(name, {})
        self.lacking = dict(lacking)
        self.set_gauge(gauge)

    def add_site(self, site: Site) -> None:
        """Add a matmul that runs for the first time, and set its units."""
        self.sites[site.name] = site
        site.plain = self.plain.setdefault(site.name, {})
        site.take_units(self.gauge, self._default)

    def begin_step(self, *, is_training: bool) -> None:
        """Begin a step, and record which sites have all of their units."""
        # Each microbatch of the previous step has its own number.
        self.step += self._num_more + is_training
        self._num_more, self.rounding_step = 0, self.step
        self._is_training = is_training
        for site in self.sites.values():
            site.is_settled = None not in site.log2_units and site.log2_gamma is not None

    def begin_part(self, index: int) -> None:
        """Begin a microbatch, which rounds as a separate step does."""
        self.rounding_step = self.step + index
        if self._is_training:
            self._num_more = max(self._num_more, index)

    def measure(
        self,
        site: Site,
        slot: str,
        names: Sequence[str],
        known: Sequence[int | None],
        dtype: torch.dtype,
        extent_of: Callable[[int], Extent],
        num_addends: int,
    ) -> MeasuredMatmul:
        """Measure operands and the addends after them, for :meth:`send` or :meth:`receive`."""
        # The first time, and in measured steps, measure all operands. Otherwise measure those
        # without a unit, so an operand that stays zero costs one row per step.
        is_whole = self.is_looking or slot not in site.seen
        chosen = [index for index, unit in enumerate(known) if is_whole or unit is None]
        addends = range(len(known), len(known) + num_addends) if is_whole else ()
        matmul = MeasuredMatmul(
            site,
            slot,
            tuple(names[index] for index in chosen),
            tuple(map(extent_of, chosen)),
            tuple(map(extent_of, addends)),
            dtype,
            tuple(known[index] for index in chosen),
            is_whole,
        )
        self._measured.append(matmul)
        if is_whole:
            site.seen[slot] = matmul
        return matmul

    def take_at_once(self, matmul: MeasuredMatmul) -> tuple[int | None, ...]:
        """Wait for the measurements of a matmul, and put its units into force."""
        operands = list(zip(matmul.names, matmul.extents, matmul.log2_units, strict=True))
        new_ones = {
            name: extent
            for name, extent, unit in operands
            if unit is None and name not in self.lacking
        }
        reading(new_ones.values())()
        new = {name: extent.rms for name, extent in new_ones.items() if extent.gives_unit}
        gradient = {name: new.pop(name) for name in [matmul.site.name] if name in new}
        taken = Gauge.of_rms(new, gradient)
        self.gauge = self.gauge.updated(taken)
        matmul.site.take_units(self.gauge, self._default)
        exponents = {name: pair.exponent for name, pair in taken.items()}
        return tuple(exponents.get(name) if unit is None else unit for name, _, unit in operands)

    def clear(self) -> None:
        """Forget the matmuls and their measurements."""
        self.sites.clear()
        self._measured.clear()
        self._sent = None
        self._arrived.clear()
        self.is_looking = False

    def send(self) -> Callable[[], Measurement]:
        """Start the transfer of new measurements, and return a function that waits for them."""
        matmuls, self._measured = self._measured, []
        read = reading(extent for each in matmuls for extent in (*each.extents, *each.addends))

        def arrived() -> Measurement:
            read()
            for matmul in matmuls:
                for name, extent in zip(matmul.names, matmul.extents, strict=True):
                    if extent.largest > 0.0:
                        matmul.site.latest[name] = extent
                    if not extent.gives_unit:
                        self.lack(matmul.site, [name])
            return Measurement.of_matmuls(matmuls)

        return arrived

    def lack(self, site: Site, names: Iterable[str]) -> None:
        """Record operands and gradients of a matmul that give no unit yet."""
        for name in names:
            if name not in self.gauge:
                self.lacking[name] = f"the gradient at {name}" if name == site.name else name

    def receive(self) -> None:
        """Receive the last call's transfer, and start one for newer measurements."""
        # To avoid waiting for the device, numbers from CUDA are read one call after their transfer
        # began. Those of other devices are read at once.
        sent, self._sent = self._sent, None
        matmuls = [] if sent is None else [*sent().matmuls]
        if self._measured:
            rows = [extent.row for matmul in self._measured for extent in matmul.extents]
            is_late = any(row is not None and row.device.type == "cuda" for row in rows)
            arrived = self.send()
            if is_late:
                self._sent = arrived
            else:
                matmuls += arrived().matmuls
        for matmul in matmuls:
            operands = zip(matmul.extents, matmul.log2_units, strict=True)
            if any(extent.gives_unit and unit is None for extent, unit in operands):
                # Keep one entry per matmul, since an evaluation may have many steps.
                self._arrived[matmul.slot, *matmul.names] = matmul
            elif matmul.is_whole:
                matmul.site.judge(self.gauge)

    def received(self) -> Measurement:
        """Return what arrived since the last call for tensors that had no unit when measured."""
        matmuls, self._arrived = list(self._arrived.values()), {}
        return Measurement.of_matmuls(matmuls)

    def settle(self) -> None:
        """Wait for all measurements, and adopt units for tensors that have none."""
        self.receive()
        self.receive()
        self.adopt(self.received().beyond(self.gauge))

    def adopt(self, measurement: Measurement) -> list[str]:
        """Adopt the units of measured tensors, and return those that had none before."""
        # Measured matmuls for which scaling would be inexact are left unscaled.
        measured = Gauge.of_rms(measurement.forward, measurement.backward)
        late = [name for name in measured if name in self.lacking]
        if measured:
            self.set_gauge(self.gauge.updated(measured))
        for site in {id(matmul.site): matmul.site for matmul in measurement.matmuls}.values():
            site.judge(self.gauge)
        return late
