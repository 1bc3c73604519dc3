"""The units of a LightningModule's products: measured as they first run, followed as they drift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_unitscale.callbacks.distributed import joint_rms
from lightning_unitscale.callbacks.explanation import CountedSteps, Explanation, units_table
from lightning_unitscale.callbacks.steps import existing_steps, has_stepped
from lightning_unitscale.callbacks.units import (
    MeasuredUnits,
    RecalibrationSchedule,
    joint_unrepresentable,
    unrepresentable_from_state,
)
from lightning_unitscale.dispatch.attach import AttachedSession
from lightning_unitscale.dispatch.coverage import Coverage, CoverageCounter
from lightning_unitscale.dispatch.fp8 import numerics_of
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.units import Measurement, Units
from lightning_unitscale.lossless.gauge import Gauge
from lightning_unitscale.precision.fp8 import FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat


class ProductUnits(MeasuredUnits):
    """Runs the products of a LightningModule's steps in units, over fits and restarts.

    Args:
        schedule: When units are looked at again.
        simulation: Formats to simulate, if any.
        fp8: What runs in FP8, if anything does.
    """

    def __init__(
        self,
        schedule: RecalibrationSchedule,
        simulation: SimulateFormat | None,
        fp8: FP8Linears | None,
    ) -> None:
        super().__init__(schedule, fp8)
        self._units = Units()
        self._simulation = simulation
        self._attached: AttachedSession | None = None
        self._counted = CountedSteps()
        self._step_name = "training_step"

    @property
    @override
    def gauge(self) -> Gauge:
        return self._units.gauge

    @property
    def coverage(self) -> Coverage:
        """What became of the products of a training step, or of an evaluation on its own."""
        return self._counted.main

    def attach(self, module: pl.LightningModule, *, is_new: bool) -> None:
        """Let the steps of a module run in units; what is known of another one is forgotten."""
        if is_new:
            self.detach()
            self._units, self.is_calibrated, self._counted = Units(), False, CountedSteps()
            if self._fp8 is not None:
                self._fp8.forget()
        if self._attached is None:
            numerics = numerics_of((self._simulation, self._fp8), measures_range=True)
            self._attached = AttachedSession(module, existing_steps(module), self._units, numerics)

    @override
    def detach(self) -> None:
        if self._attached is not None:
            self._attached.detach()
            self._attached = None

    @override
    def before_batch(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        # The first step shows everything, what a validation before it has shown included, so that
        # all ranks agree on it.
        self._units.is_looking = self._begin(trainer) or not self.is_calibrated
        self._enter("training_step", counts=self._units.is_looking)

    @override
    def after_batch(self, trainer: pl.Trainer) -> None:
        units = self._units
        if not self.is_calibrated:
            self._adopt_first(units.take() or Measurement())
            self._read_coverage()
            return
        self._read_coverage()
        if not units.is_looking:
            # Products that have not run before.
            units.settle()
        # The accumulated batches share one gauge.
        elif has_stepped(trainer, trainer.lightning_module, self._global_step_before):
            self._look(units.take() or Measurement())
            units.is_looking = False

    @override
    def before_evaluation(self, trainer: pl.Trainer, name: str, batch: Any, *indices: int) -> None:
        self._enter(name, counts=name not in self._counted)

    @override
    def after_evaluation(self, trainer: pl.Trainer, batch_idx: int) -> None:
        measurement = self._units.take() or Measurement()
        forward, backward = measurement.forward, measurement.backward
        if trainer.state.fn != "fit" and not self.is_calibrated and batch_idx == 0:
            forward, backward = joint_rms(forward, backward)
        if forward:
            self._units.adopt(measurement, forward, backward)
        self._read_coverage()

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.is_calibrated:
            return {}
        gauge = {name: list(pair) for name, pair in self.gauge.state().items()}
        plain = {name: dict(slots) for name, slots in self._units.plain.items() if slots}
        state: dict[str, Any] = {"gauge": gauge, "depth": "products", "plain": plain}
        if self._simulation is not None and self._simulation.rounding == "stochastic":
            state["rounding_step"] = self._units.step
        return {**state, **self._fp8_state()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, without measuring again.

        A gauge of another depth, or of version 0.1.0, names other tensors and does not say where
        powers of two are not exact: units are measured again then, which changes no result.
        """
        if state.get("depth") != "products" or "plain" not in state:
            return
        self._units.step = state.get("rounding_step", 0)
        self._units.restore(Gauge.from_state(state["gauge"]), state["plain"])
        self.is_calibrated = True
        if self._fp8 is not None:
            self._fp8.leave_out(unrepresentable_from_state(state))

    @override
    def explain(self) -> Explanation:
        parts, units = self._counted.explain(), units_table(self.gauge) or ""
        if not parts:
            return Explanation("No step has run yet: run fit, validate, test or predict.", units)
        if self._simulation is not None:
            parts.append(self._simulation.summary())
        if self._fp8 is not None:
            parts += [self._fp8.summary(), self._fp8.report()]
        return Explanation(*parts, *self.events, units)

    def _adopt_first(self, measurement: Measurement) -> None:
        forward, backward = joint_rms(measurement.forward, measurement.backward)
        self._make_fit("the first batch")
        if not forward:
            return
        self._units.adopt(measurement, forward, backward)
        # A batch whose loss asks for no gradient shows half of it.
        self.is_calibrated = bool(backward)
        self._units.is_looking = False
        self._tell_new_units(len(self.gauge), "the first batch")

    def _look(self, measurement: Measurement) -> None:
        forward, backward = joint_rms(measurement.forward, measurement.backward)
        (outside,) = joint_rms(measurement.outside)
        self._make_fit(f"step {self._step_index}")
        if self._schedule.is_automatic and not outside:
            self._units.judge(measurement)
            return
        old = self.gauge
        self._units.adopt(measurement, forward, backward)
        changed = sum(self.gauge.pair(name) != old.pair(name) for name in self.gauge)
        self._tell_new_units(changed, f"step {self._step_index}", outside)

    def _make_fit(self, when: str) -> None:
        for numerics in self._session.numerics:
            self._tell_unrepresentable(numerics.fit(joint_unrepresentable), when)

    def _enter(self, name: str, *, counts: bool) -> None:
        self._step_name = name
        for numerics in self._session.numerics:
            numerics.is_training = name == "training_step"
        if counts:
            self._session.counter = CoverageCounter()

    def _read_coverage(self) -> None:
        session = self._session
        if session.counter is not None:
            self._counted.add(self._step_name, session.counter.result(), session.is_rounding)
            session.counter = None

    @property
    def _session(self) -> ProductSession:
        assert self._attached is not None
        return self._attached.session
