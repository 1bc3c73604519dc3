"""The units of one module's matmuls: measured, and in force."""

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
    """The units in force of a module's matmuls; they outlive the session that runs these."""

    # An operand that is all zero, empty or not finite gives no unit. It is measured again in each
    # step until it gives one. These numbers come by :meth:`receive`, which waits for no device.

    def __init__(self, *, is_used: bool = True) -> None:
        self.is_used = is_used
        # Of a tensor without a unit.
        self._default = None if is_used else GaugePair()
        self.gauge = Gauge()  # the units in force, by the names of operands and matmuls
        # By site, which of its matmuls run as they are, and why.
        self.plain: dict[str, dict[str, str]] = {}
        # How many training steps have begun, and which microbatch of the step runs.
        self.step = self._num_more = 0
        # Number of the step, or of the microbatch, that random numbers are drawn for.
        self.rounding_step = 0
        self._is_training = False
        # Whether the steps measure what has units already, for :meth:`send`.
        self.is_looking = False
        # The matmuls that have run, by name; each knows its own units.
        self.sites: dict[str, Site] = {}
        # Names of operands and gradients that were measured and have no unit yet, with what
        # to call them.
        self.lacking: dict[str, str] = {}
        self._measured: list[MeasuredMatmul] = []
        # What was sent for, and by slot and names what has arrived and gives new units.
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
        """Go on from what was in force, from what ran plain in it, and what had no unit yet."""
        self.plain = {name: dict(slots) for name, slots in plain.items()}
        for name, site in self.sites.items():
            site.plain = self.plain.setdefault(name, {})
        self.lacking = dict(lacking)
        self.set_gauge(gauge)

    def add_site(self, site: Site) -> None:
        """Tell a matmul that runs for the first time what is known of it."""
        self.sites[site.name] = site
        site.plain = self.plain.setdefault(site.name, {})
        site.take_units(self.gauge, self._default)

    def begin_step(self, *, is_training: bool) -> None:
        """Note which sites have all of their units in this step."""
        # Each microbatch of the step before was one of its own.
        self.step += self._num_more + is_training
        self._num_more, self.rounding_step = 0, self.step
        self._is_training = is_training
        for site in self.sites.values():
            site.is_settled = None not in site.log2_units and site.log2_gamma is not None

    def begin_part(self, index: int) -> None:
        """Begin a microbatch of a step, which rounds as a step of its own does."""
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
        # The first time, and in a look, all are measured. At other times operands without a unit
        # are, so that one that stays zero costs a row in each step.
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
        """Wait for what was measured of a matmul, and put its units into force."""
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
        """Forget the matmuls that ran, and what was measured of them."""
        self.sites.clear()
        self._measured.clear()
        self._sent = None
        self._arrived.clear()
        self.is_looking = False

    def send(self) -> Callable[[], Measurement]:
        """Send for what was measured since the last call; what is returned waits for it."""
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
        """Note operands and gradients of a matmul that give no unit: they get one late."""
        for name in names:
            if name not in self.gauge:
                self.lacking[name] = f"the gradient at {name}" if name == site.name else name

    def receive(self) -> None:
        """Receive what was sent for in the last call, and send for what was measured since."""
        # It waits for no device: from CUDA, numbers arrive one call after they were sent, whether
        # they are there before or not; from elsewhere at once.
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
                # One for each, however many steps an evaluation has.
                self._arrived[matmul.slot, *matmul.names] = matmul
            elif matmul.is_whole:
                matmul.site.judge(self.gauge)

    def received(self) -> Measurement:
        """What has arrived since the last call, of what had no unit when it was measured."""
        matmuls, self._arrived = list(self._arrived.values()), {}
        return Measurement.of_matmuls(matmuls)

    def settle(self) -> None:
        """Wait for all that was measured, and take the units of what has none."""
        self.receive()
        self.receive()
        self.adopt(self.received().beyond(self.gauge))

    def adopt(self, measurement: Measurement) -> list[str]:
        """Take the units of measured tensors, and return which of them had none before.

        Matmuls of the measurement in which the units in force are inexact are left unscaled.
        """
        measured = Gauge.of_rms(measurement.forward, measurement.backward)
        late = [name for name in measured if name in self.lacking]
        if measured:
            self.set_gauge(self.gauge.updated(measured))
        for site in {id(matmul.site): matmul.site for matmul in measurement.matmuls}.values():
            site.judge(self.gauge)
        return late
