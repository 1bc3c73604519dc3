"""The units of a LightningModule's products: measured as they first run, followed as they drift."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_info,
    rank_zero_warn,
)

from lightning_unitscale.callbacks.module_steps import (
    existing_steps,
    has_stepped,
    optimizer_step_index,
)
from lightning_unitscale.callbacks.ranks import joint_reasons, joint_rms
from lightning_unitscale.callbacks.recalibration import Looks
from lightning_unitscale.dispatch.attach import AttachedSession
from lightning_unitscale.dispatch.coverage import Coverage
from lightning_unitscale.dispatch.fp8 import FP8Products
from lightning_unitscale.dispatch.measured import Measurement
from lightning_unitscale.dispatch.numerics import Numerics
from lightning_unitscale.dispatch.session import ProductSession
from lightning_unitscale.dispatch.simulate import SimulatedProducts
from lightning_unitscale.transforms.fp8_linears import WIDE_GRADIENT, FP8Linears
from lightning_unitscale.transforms.gauge import Gauge
from lightning_unitscale.transforms.range_loss import Misfits
from lightning_unitscale.transforms.simulate_format import SimulateFormat


class ProductUnits:
    """Runs the products of a LightningModule's steps in units, over fits and restarts.

    Args:
        recalibrate: When units are looked at again.
        simulation: Formats to simulate, if any.
        fp8: What runs in FP8, if anything does.

    Attributes:
        is_calibrated: Whether a training step has been measured, in this fit or before.
        events: When new units were taken, and why, one line each.
    """

    def __init__(
        self,
        recalibrate: Literal["auto"] | int | None,
        simulation: SimulateFormat | None,
        fp8: FP8Linears | None,
    ) -> None:
        self._gauge = Gauge()
        self.is_calibrated = False
        self.events: list[str] = []
        self._recalibrate = recalibrate
        self._looks = Looks(recalibrate)
        self._simulation = simulation
        self._fp8 = fp8
        self._fp8_products: FP8Products | None = None
        self._attached: AttachedSession | None = None
        self._plain: dict[str, dict[str, str]] = {}
        self._rounding_step = 0
        self._step_index = 0
        self._global_step_before = 0
        # By the name of the step, what was counted last.
        self._coverages: dict[str, Coverage] = {}
        self._step_name = "training_step"

    @property
    def gauge(self) -> Gauge:
        """The units in force; empty before the first batch."""
        return self._gauge if self._attached is None else self._attached.session.gauge

    @property
    def coverage(self) -> Coverage:
        """What became of the products of a training step, or of an evaluation on its own."""
        last = next(iter(self._coverages.values()), Coverage())
        return self._coverages.get("training_step", last)

    @property
    def is_attached(self) -> bool:
        """Whether a module's steps run in units now."""
        return self._attached is not None

    def attach(self, module: pl.LightningModule, *, is_new: bool) -> None:
        """Let the steps of a module run in units; what is known of another one is forgotten."""
        if is_new:
            self._gauge, self._plain, self.is_calibrated = Gauge(), {}, False
            self._coverages = {}
            if self._fp8 is not None:
                self._fp8.forget()
        if self._attached is not None:
            return
        self._attached = AttachedSession(
            module,
            existing_steps(module),
            self._numerics(),
            is_training=lambda name: name == "training_step",
        )
        session = self._attached.session
        session.set_plain_products(self._plain)
        session.set_gauge(self._gauge)
        session.step = self._rounding_step

    def before_batch(self, trainer: pl.Trainer) -> None:
        """A training batch begins."""
        assert self._attached is not None
        self._global_step_before = trainer.global_step
        self._step_index = optimizer_step_index(trainer)
        session = self._attached.session
        is_look = self._looks.at(self._step_index)
        # The first step shows everything, what a validation before it has shown included, so that
        # all ranks agree on it.
        session.is_looking = is_look or not self.is_calibrated
        self._begin("training_step")
        if session.is_looking:
            session.count()

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Take units of what was measured, and new ones where they have drifted."""
        assert self._attached is not None
        session = self._attached.session
        if not self.is_calibrated:
            self._adopt_first(session.take() or Measurement())
            self._read_coverage(session)
            return
        self._read_coverage(session)
        # The accumulated batches share one gauge.
        if session.is_looking and has_stepped(
            trainer, trainer.lightning_module, self._global_step_before
        ):
            self._look(session.take() or Measurement())
            session.is_looking = False
        elif not session.is_looking and (measurement := session.take()) is not None:
            # Products that have not run before.
            session.adopt(measurement.forward, measurement.backward, measurement)

    def before_evaluation(self, name: str) -> None:
        """A batch of an evaluation begins, on its own or within a fit, in the step of this name."""
        assert self._attached is not None
        self._begin(name)
        if name not in self._coverages:
            self._attached.session.count()

    def after_evaluation(self, trainer: pl.Trainer, batch_idx: int) -> None:
        """Take the units that an evaluation has shown."""
        assert self._attached is not None
        session = self._attached.session
        measurement = session.take()
        forward, backward = {}, {}
        if measurement is not None:
            forward, backward = dict(measurement.forward), dict(measurement.backward)
        if trainer.state.fn != "fit" and not self.is_calibrated and batch_idx == 0:
            forward, backward = joint_rms(forward, backward)
        if forward:
            session.adopt(forward, backward, measurement or Measurement())
        self._read_coverage(session)

    def detach(self) -> None:
        """Put the module's own steps back; the gauge stays. May be called more than once."""
        if self._attached is None:
            return
        self._keep(self._attached)
        self._attached.detach()
        self._attached = None

    def state_dict(self) -> dict[str, Any]:
        """The gauge for a checkpoint; empty before the first batch."""
        if not self.is_calibrated:
            return {}
        if self._attached is not None:
            self._keep(self._attached)
        gauge = {name: list(pair) for name, pair in self.gauge.state().items()}
        state: dict[str, Any] = {"gauge": gauge, "depth": "products", "plain": self._plain}
        if self._simulation is not None and self._simulation.rounding == "stochastic":
            state["rounding_step"] = self._rounding_step
        if self._fp8 is not None:
            state["fp8_unfit"] = dict(self._fp8.unfit.products)
            state["fp8_wide"] = dict(self._fp8.unfit.gradients)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, without measuring again.

        A gauge of another depth, or of version 0.1.0, names other tensors and does not say where
        powers of two are not exact: units are measured again then, which changes no result.
        """
        if state.get("depth") != "products" or "plain" not in state:
            return
        self._gauge = Gauge.from_state(state["gauge"])
        self._plain = {name: dict(slots) for name, slots in state["plain"].items()}
        self._rounding_step = state.get("rounding_step", 0)
        self.is_calibrated = True
        if self._fp8 is not None:
            self._fp8.leave_out(Misfits(state.get("fp8_unfit", {}), state.get("fp8_wide", {})))
        if self._attached is not None:
            self._attached.session.set_plain_products(self._plain)
            self._attached.session.set_gauge(self._gauge)
            self._attached.session.step = self._rounding_step

    def explain(self) -> str:
        """What became of the products of a step, of FP8's layers, and of the units."""
        if not self._coverages:
            return "No step has run yet: run fit, validate, test or predict."
        lines = [f"{name}: {coverage.line()}" for name, coverage in self._coverages.items()]
        parts = ["\n".join(lines), self.coverage.table()]
        if self._simulation is not None:
            parts.append(self._simulation.summary())
        if self._fp8 is not None:
            parts += [self._fp8.summary(), self._fp8.report()]
        return "\n\n".join([*parts, *self.events])

    def _numerics(self) -> Numerics | None:
        if self._simulation is not None:
            return SimulatedProducts(self._simulation)
        if self._fp8 is not None:
            self._fp8_products = FP8Products(self._fp8)
            return self._fp8_products
        return None

    def _keep(self, attached: AttachedSession) -> None:
        self._gauge = attached.session.gauge
        self._plain = attached.session.plain_products()
        self._rounding_step = attached.session.step

    def _adopt_first(self, measurement: Measurement) -> None:
        assert self._attached is not None
        session = self._attached.session
        forward, backward = joint_rms(measurement.forward, measurement.backward)
        self._make_fit("the first batch")
        if not forward:
            return
        session.adopt(forward, backward, measurement)
        # A batch whose loss asks for no gradient shows half of it.
        self.is_calibrated = bool(backward)
        session.is_looking = False
        self.events.append(f"New units for {len(self.gauge)} tensors at the first batch")

    def _look(self, measurement: Measurement) -> None:
        assert self._attached is not None
        session = self._attached.session
        forward, backward = joint_rms(measurement.forward, measurement.backward)
        (outside,) = joint_rms(measurement.outside)
        self._make_fit(f"step {self._step_index}")
        if self._recalibrate == "auto" and not outside:
            session.judge(measurement)
            return
        old = session.gauge
        session.adopt(forward, backward, measurement)
        changed = sum(self.gauge.pair(name) != old.pair(name) for name in self.gauge)
        worst = sorted(outside.items(), key=lambda item: -abs(math.log2(item[1])))[:3]
        reason = ", ".join(f"{name} at RMS {rms:.3g}" for name, rms in worst)
        event = f"New units for {changed} tensors at step {self._step_index}"
        self.events.append(event + (f": {reason}" if reason else ""))
        if outside:
            rank_zero_info(f"UnitScaleCallback: {self.events[-1]}")

    def _make_fit(self, when: str) -> None:
        """Take out of FP8, or out of its finer format, what does not fit there."""
        if self._fp8 is None or self._fp8_products is None:
            return
        before = Misfits(dict(self._fp8.unfit.products), dict(self._fp8.unfit.gradients))
        found = self._fp8_products.misfits()
        # What the ranks have found by themselves in this step counts for all of them.
        known = Misfits(
            {**self._fp8.unfit.products, **found.products},
            {**self._fp8.unfit.gradients, **found.gradients},
        )
        joint = Misfits(*joint_reasons(known.products, known.gradients))
        self._fp8_products.leave_out(joint)
        new = self._fp8.unfit.without(before)
        for what, reasons in (
            ("Out of FP8", new.products),
            (f"Gradients in {WIDE_GRADIENT}", new.gradients),
        ):
            if reasons:
                listed = "; ".join(f"{name}, since {why}" for name, why in reasons.items())
                self.events.append(f"{what} from {when} on: {listed}")
                rank_zero_info(f"UnitScaleCallback: {self.events[-1]}")

    def _begin(self, name: str) -> None:
        self._step_name = name
        if self._fp8_products is not None:
            self._fp8_products.is_training = name == "training_step"

    def _read_coverage(self, session: ProductSession) -> None:
        coverage = session.coverage()
        if coverage is None:
            return
        is_first = self._step_name not in self._coverages
        self._coverages[self._step_name] = coverage
        if is_first:
            self._tell(session, coverage)

    def _tell(self, session: ProductSession, coverage: Coverage) -> None:
        """One line on a step that was counted first, and a warning if much of it ran plain."""
        if len(self._coverages) == 1 or self._step_name == "training_step":
            rank_zero_info(f"UnitScaleCallback: {self._step_name}: {coverage.line()}.")
        # An evaluation that rounds nothing has the same numbers in units and without.
        matters = self._step_name == "training_step" or session.is_rounding
        if matters and (shortfall := coverage.shortfall()):
            rank_zero_warn(f"UnitScaleCallback: {self._step_name}: {shortfall}")
