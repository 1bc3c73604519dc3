"""The units of a module's matmuls: measured as they first run, followed as they drift."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from lightning_unitscale.callbacks.distributed import joint_late, joint_measured, joint_reasons
from lightning_unitscale.callbacks.explanation import (
    CountedSteps,
    Explanation,
    UnitEvents,
    units_table,
)
from lightning_unitscale.callbacks.packages import rank_zero_warn
from lightning_unitscale.callbacks.step_schedules import LateAgreement, RecalibrationSchedule
from lightning_unitscale.dispatch.attach import AttachedSession
from lightning_unitscale.dispatch.coverage import Coverage, CoverageCounter
from lightning_unitscale.dispatch.fp8 import numerics_of
from lightning_unitscale.dispatch.measurement import Measurement
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.units import Units
from lightning_unitscale.loops.loop import Loop, LoopCallback
from lightning_unitscale.lossless.gauge import Gauge, GaugePair
from lightning_unitscale.lossless.measured import Unrepresentable
from lightning_unitscale.precision.fp8 import FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat
from lightning_unitscale.ranks import any_rank, is_distributed

# Version of a state. In states without one, a tensor of zeros had unit 1.
_STATE_VERSION = 1


class ProductUnits(LoopCallback):
    """Scales the matmuls of a module's steps, over fits and restarts."""

    def __init__(
        self,
        schedule: RecalibrationSchedule,
        simulation: SimulateFormat | None,
        fp8: FP8Linears | None,
    ) -> None:
        # Whether a training step has been measured, in this fit or before.
        self.is_calibrated = False
        self._events = UnitEvents()
        self._schedule = schedule
        self._simulation = simulation
        self._fp8 = fp8
        self._counted = self._new_counts()
        # Whether results depend on the units, as those of rounded matmuls do.
        self._changes_numbers = simulation is not None or fp8 is not None
        self._step_index = 0
        # Ends the last look, whose numbers may be on their way.
        self._pending: Callable[[], None] | None = None
        self._units = Units()
        self._attached: AttachedSession | None = None
        # Whether the count of the step that runs is wanted, whatever it shows.
        self._is_counted = False
        self._step_name = ""
        self._agreement = LateAgreement()
        # Whether a training step has begun, whose units stay until it ends.
        self._is_in_batch = False
        # The step that an evaluation interrupts, and the count of its matmuls.
        self._interrupted: tuple[str, CoverageCounter | None, bool] = "", None, False
        self._loop: Loop | None = None

    @property
    def gauge(self) -> Gauge:
        """Return the units in force; empty before the first batch."""
        self._end_look()
        return self._units.gauge

    @property
    def coverage(self) -> Coverage:
        """The coverage of the matmuls of a training step, or of an evaluation on its own."""
        return self._counted.main

    def attach(self, loop: Loop, *, is_other: bool) -> None:
        """Let the steps of a loop's module run in units."""
        if is_other:
            self.leave()
            self._units, self.is_calibrated, self._counted = Units(), False, self._new_counts()
            if self._fp8 is not None:
                self._fp8.forget()
        self._loop, self._agreement, self._is_in_batch = loop, LateAgreement(), False
        if self._attached is None:
            numerics = numerics_of((self._simulation, self._fp8), measures_range=True)
            self._attached = AttachedSession(
                loop.module,
                loop.steps,
                self._units,
                numerics,
                outlasts_calls=loop.has_loss_outside,
            )

    @override
    def leave(self) -> None:
        self._pending = None
        if self._attached is not None:
            self._attached.detach()
            self._attached = None
        self._loop = None

    @override
    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        loop = self._running
        self._agreement.start()
        self._is_in_batch = True
        # The first step shows everything, what a validation before it has shown included, so that
        # all ranks agree on it.
        self._step_index = loop.step_index
        is_scheduled = self._schedule.looks_at(self._step_index)
        self._units.is_looking = is_scheduled or not self.is_calibrated
        self._enter(loop.training_step, is_training=True, counts=self._units.is_looking)

    @override
    def end_batch(self) -> None:
        units = self._units
        self._is_in_batch = False
        self._session.end_step()
        self._end_look()
        if not units.is_looking:
            self._receive()
            if self._running.has_stepped:
                self._take_late()
        # The accumulated batches share one gauge.
        elif self._running.has_stepped:
            if self.is_calibrated:
                units.is_looking = False
                self._begin_look(units.send())
            else:
                self._adopt_first(units.take())
            self._agreement.begin()
        if self.is_calibrated or self._running.has_stepped:
            # Which matmuls are left unscaled is known once they have units.
            self._read_coverage()
        self._warn_of_flushed()

    @override
    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        self._interrupted = self._step_name, self._session.counter, self._is_counted
        self._session.counter = None
        self._enter(name, is_training=False, counts=name not in self._counted)

    @override
    def end_evaluation(self, batch_idx: int = 0) -> None:
        units, name = self._units, self._step_name
        if not (self._running.is_fitting or self.is_calibrated or batch_idx):
            self._session.adopt(joint_measured(units.take()))
        # Measurements of accumulated training batches are taken with the last of them.
        elif not units.is_looking:
            self._receive()
            if not (self._is_in_batch or (self._agreement.is_open and is_distributed())):
                self._adopt(units.new_in(units.received()), name)
        self._read_coverage()
        self._warn_of_flushed()
        interrupted, counter, is_counted = self._interrupted
        self._enter(interrupted, is_training=True, counts=is_counted)
        self._session.counter = counter

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.is_calibrated:
            return {}
        gauge = {name: list(pair) for name, pair in self.gauge.state().items()}
        plain = {name: dict(slots) for name, slots in self._units.plain.items() if slots}
        state: dict[str, Any] = {
            "gauge": gauge,
            "depth": "products",
            "plain": plain,
            "version": _STATE_VERSION,
        }
        if self._units.lacking:
            state["lacking"] = dict(self._units.lacking)
        if self._fp8 is not None and self._fp8.unseen:
            state["fp8_unseen"] = sorted(self._fp8.unseen)
        if self._simulation is not None and self._simulation.rounding == "stochastic":
            state["rounding_step"] = self._units.step
        if self._fp8 is not None:
            unfit = self._fp8.unfit
            state |= {"fp8_unfit": dict(unfit.products), "fp8_wide": dict(unfit.gradients)}
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`, without measuring again.

        A gauge of another depth, or of version 0.1.0, names other tensors and does not say where
        powers of two are not exact: units are measured again then, which changes no result. So are
        units of 1 of a state without a version, which may be of tensors of zeros.
        """
        if state_dict.get("depth") != "products" or "plain" not in state_dict:
            return
        self._units.step = state_dict.get("rounding_step", 0)
        gauge, lacking = _gauge_from_state(state_dict), state_dict.get("lacking", {})
        self._units.restore(gauge, state_dict["plain"], lacking)
        self.is_calibrated = True
        if self._fp8 is not None:
            unfit = state_dict.get("fp8_unfit", {}), state_dict.get("fp8_wide", {})
            self._fp8.leave_out(Unrepresentable(*unfit))
            self._fp8.unseen.update(state_dict.get("fp8_unseen", ()))

    def explain(self) -> Explanation:
        """Explain which matmuls were scaled, and when units were taken."""
        lacking = self._units.lacking
        parts, units = self._counted.explain(lacking), units_table(self.gauge, lacking) or ""
        if not parts:
            return Explanation("No step has run yet: run fit, validate, test or predict.", units)
        if self._simulation is not None:
            parts.append(self._simulation.summary())
        if self._fp8 is not None:
            parts += [self._fp8.summary(), self._fp8.report()]
        return Explanation(*parts, *self._events.lines, units)

    def _new_counts(self) -> CountedSteps:
        return CountedSteps("simulate" if self._fp8 is None else "precision='fp8'")

    def _begin_look(self, arrived: Callable[[], Measurement]) -> None:
        """Look at what the step has measured, on a CUDA device after the next one.

        Units change no result, so they can be late; formats do, and ranks wait for each other.
        """
        self._pending = functools.partial(self._judge, arrived, f"step {self._step_index}")
        is_late = self._running.device.type == "cuda"
        if is_distributed() or not is_late or self._changes_numbers:
            self._end_look()

    def _end_look(self) -> None:
        if self._pending is not None:
            judge, self._pending = self._pending, None
            judge()

    def _adopt_first(self, measurement: Measurement) -> None:
        measurement = joint_measured(measurement)
        self._make_fit("the first batch")
        if not any_rank(bool(measurement.products)):
            return
        self._session.adopt(measurement)
        # A batch whose loss asks for no gradient shows half of it.
        self.is_calibrated = any_rank(measurement.has_backward)
        self._units.is_looking = False
        self._events.new_units(len(self.gauge), "the first batch", {})

    def _receive(self) -> None:
        for unfit in self._session.receive():
            self._events.unrepresentable(unfit, f"step {self._step_index}")

    def _take_late(self) -> None:
        """Take the units of what was zero at first, or has not run before."""
        # Each rank counts each step.
        when, meets = f"step {self._step_index}", self._agreement.meets()
        if not (self._agreement.is_open and is_distributed()):
            if self._units.has_received:
                self._adopt(self._units.new_in(self._units.received()), when)
        elif meets:
            measured, meets_again = joint_late(self._units.received(), self._units.lacking)
            self._adopt(measured, when)
            self._make_fit(when)
            self._agreement.is_open = meets_again

    def _adopt(self, measurement: Measurement, when: str) -> None:
        if late := self._session.adopt(measurement):
            self._events.late_units(late, when)

    def _judge(self, arrived: Callable[[], Measurement], when: str) -> None:
        measurement = joint_measured(arrived())
        self._make_fit(when)
        # Tensors without a unit get one, even if the other units stay.
        self._adopt(self._units.new_in(measurement), when)
        if self._schedule.is_automatic and not measurement.outside:
            self._units.judge(measurement)
            return
        old = self.gauge
        self._session.adopt(measurement)
        self._events.new_units(self.gauge.num_changed(old), when, measurement.outside)

    def _make_fit(self, when: str) -> None:
        for numerics in self._session.numerics:
            self._events.unrepresentable(numerics.fit(_joint_unrepresentable), when)

    def _warn_of_flushed(self) -> None:
        for numerics in self._session.numerics:
            if flushed := numerics.take_flushed():
                rank_zero_warn(
                    f"UnitScaleCallback: {self._step_name}: flushed to zero at step "
                    f"{self._step_index}: {flushed}"
                )

    def _enter(self, name: str, *, is_training: bool, counts: bool) -> None:
        self._step_name = name
        assert self._attached is not None
        self._attached.trains = is_training
        for numerics in self._session.numerics:
            numerics.is_training = is_training
        self._is_counted = counts
        # Any step may lose its format.
        if counts or self._session.is_rounding:
            self._session.counter = CoverageCounter()

    def _read_coverage(self) -> None:
        session = self._session
        counter, session.counter = session.counter, None
        if counter is None:
            return
        if not self._is_counted and not self._counted.has_news(self._step_name, counter):
            return
        self._counted.add(
            self._step_name,
            counter.result(lacking=tuple(self._units.lacking.values()), format=session.format),
            is_training=self._step_name == self._running.training_step,
            when=f"step {self._step_index}",
        )

    @property
    def _running(self) -> Loop:
        assert self._loop is not None
        return self._loop

    @property
    def _session(self) -> ProductSession:
        assert self._attached is not None
        return self._attached.session


def _joint_unrepresentable(unrepresentable: Unrepresentable) -> Unrepresentable:
    """Return the layers that do not fit on any rank."""
    return Unrepresentable(*joint_reasons(unrepresentable.products, unrepresentable.gradients))


def _gauge_from_state(state: Mapping[str, Any]) -> Gauge:
    """Return the units of a saved state, without those that may be of a tensor of zeros."""
    gauge = Gauge.from_state(state["gauge"])
    if "version" in state:
        return gauge
    return Gauge({name: pair for name, pair in gauge.items() if pair != GaugePair()})
