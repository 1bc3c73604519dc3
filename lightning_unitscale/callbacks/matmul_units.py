"""Measure the units of a module's matmuls when they first run, and recalibrate them later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from typing_extensions import override

from lightning_unitscale.arguments import shown
from lightning_unitscale.callbacks.distributed import (
    joint_late,
    joint_measured,
    joint_reasons,
    pipeline_of,
)
from lightning_unitscale.callbacks.explanation import (
    CountedSteps,
    Explanation,
    UnitEvents,
    units_table,
)
from lightning_unitscale.callbacks.packages import rank_zero_warn
from lightning_unitscale.capture.side_effects import find_recorded_pass
from lightning_unitscale.loops.loop import Loop, LoopCallback
from lightning_unitscale.loops.ranks import any_rank, is_distributed
from lightning_unitscale.matmuls.computations import Exemption, unmatched_exemptions
from lightning_unitscale.matmuls.coverage import CoverageCounter
from lightning_unitscale.matmuls.fp8_linear import numerics_of
from lightning_unitscale.matmuls.gauge import Gauge
from lightning_unitscale.matmuls.matmul_formats import FP8Linears, SimulateFormat
from lightning_unitscale.matmuls.measurement import Measurement, Unrepresentable, is_late_look
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.matmuls.session import MatmulSession
from lightning_unitscale.matmuls.units import Units

# The first steps at which "auto" measures: the scales of a new model change the most.
_EARLY_STEPS = frozenset({8, 16, 32, 64})
_EVERY = 128
# The same after a tensor that was zero at first got its unit, since it often grows from there.
_LATE_STEPS = _EARLY_STEPS | {2, 4}


class RecalibrationSchedule:
    """The optimizer steps at which units are recalibrated."""

    def __init__(self, recalibrate: Literal["auto"] | int | None) -> None:
        is_number = isinstance(recalibrate, int) and not isinstance(recalibrate, bool)
        is_word = recalibrate is None or (isinstance(recalibrate, str) and recalibrate == "auto")
        if not (is_word or (is_number and recalibrate > 0)):  # type: ignore[operator]
            raise ValueError(
                f"recalibrate={shown(recalibrate)}: no such interval. Expected 'auto', None or a "
                "positive number of optimizer steps. Pass recalibrate='auto'."
            )
        self.recalibrate = recalibrate

    def measures_at(self, step: int, late_step: int | None = None) -> bool:
        """Check whether units are measured again at a step.

        Args:
            step: The number of optimizer steps.
            late_step: Where the last tensor that was zero at first got its unit.
        """
        if self.recalibrate is None or step <= 0:
            return False
        if self.recalibrate == "auto":
            is_late = late_step is not None and step - late_step in _LATE_STEPS
            return is_late or step in _EARLY_STEPS or step % _EVERY == 0
        return step % int(self.recalibrate) == 0


class LateAgreement:
    """The optimizer steps at which ranks agree on the units of tensors that were zero at first."""

    # Each rank counts the same steps. Ranks communicate after steps 1, 2, 4, 8 and every 8th, while
    # any rank lacks a unit. The count restarts when a training begins, and after all units are
    # measured again.

    def __init__(self) -> None:
        self._num_steps: int | None = None
        self.is_open = False  # true while any rank lacks a unit

    @property
    def is_awaited(self) -> bool:
        """Check whether new units wait until the ranks communicate."""
        return self.is_open and is_distributed()

    def start(self) -> None:
        """Begin to count steps, unless a count has begun."""
        if self._num_steps is None:
            self.begin()

    def begin(self) -> None:
        """Begin to count steps, until all ranks have all units."""
        self._num_steps, self.is_open = 0, True

    def meets(self) -> bool:
        """Count an optimizer step, and return whether ranks communicate after it."""
        self._num_steps = (self._num_steps or 0) + 1
        return self.is_open and is_late_look(self._num_steps)


class MatmulUnits(LoopCallback):
    """The scaled matmuls of a module's steps, over fits and restarts."""

    def __init__(
        self,
        schedule: RecalibrationSchedule,
        simulation: SimulateFormat | None,
        fp8: FP8Linears | None,
    ) -> None:
        # True once a training step has been measured, in this fit or before.
        self.is_calibrated = False
        self._has_forward = False  # whether only its forward pass has been measured
        self._late_step: int | None = None  # where a tensor without a unit last got one
        self._events = UnitEvents()
        self._schedule = schedule
        self._simulation = simulation
        self._fp8 = fp8
        self._option = "simulate" if fp8 is None else "precision='fp8'"
        self.counted = CountedSteps(self._option)
        # True if results depend on the units, as for rounded matmuls.
        self._changes_numbers = simulation is not None or fp8 is not None
        self._units = Units()
        self._loop: Loop | None = None
        self.attached: AttachedSession | None = None
        self._agreement = LateAgreement()
        # True while a training step runs. Its units stay until it ends.
        self._is_in_batch = False
        self._when = "step 0"  # the current optimizer step, for users
        # The last measurement, which may still be in transit, and its step.
        self._pending: tuple[Callable[[], Measurement], str] | None = None
        self._step = "", False  # the current step, and whether to keep its count in any case
        # The step that an evaluation interrupts, and the count of its matmuls.
        self._interrupted: tuple[tuple[str, bool], CoverageCounter | None] = self._step, None

    @property
    def gauge(self) -> Gauge:
        """Return the units in force; empty before the first batch."""
        self._end_measurement()
        return self._units.gauge

    def attach(self, loop: Loop, *, is_other: bool) -> None:
        """Scale the matmuls of a loop's module."""
        if is_other:
            self.leave()
            self._units, self.is_calibrated, self._has_forward = Units(), False, False
            self._late_step = None
            self.counted = CountedSteps(self._option)
            if self._fp8 is not None:
                self._fp8.forget()
        if self._fp8 is not None:
            step = getattr(loop.module, loop.training_step)
            self._fp8.is_recorded |= find_recorded_pass(loop.module, step) is not None
        self._loop, self._agreement, self._is_in_batch = loop, LateAgreement(), False
        if self.attached is None:
            numerics = numerics_of((self._simulation, self._fp8), measures_range=True)
            self.attached = AttachedSession(
                loop.module, loop.steps, self._units, numerics, outlasts_calls=loop.has_loss_outside
            )

    @property
    def _running(self) -> tuple[Loop, MatmulSession]:
        assert self._loop is not None and self.attached is not None
        return self._loop, self.attached.session

    @override
    def leave(self) -> None:
        self._pending = None
        self._events.leave()
        if self.attached is not None:
            self.attached.detach()
            self.attached = None
        self._loop = None

    @override
    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        loop, _ = self._running
        self._agreement.start()
        self._is_in_batch = True
        self._when = f"step {loop.step_index}"
        self._events.begin_batch(loop)
        # The first step takes all measurements, those of an earlier validation included, so that
        # all ranks agree.
        is_scheduled = self._schedule.measures_at(loop.step_index, self._late_step)
        self._units.is_looking = is_scheduled or not self.is_calibrated
        self._enter(loop.training_step, self._units.is_looking, is_training=True)

    @override
    def end_batch(self) -> None:
        (loop, session), units = self._running, self._units
        self._is_in_batch = False
        session.end_step()
        self._end_measurement()
        if not units.is_looking:
            if self._fp8 is not None and self._fp8.widens and is_distributed():
                # All ranks leave a format in the same step.
                units.receive()
                found = _left_out(session) if loop.has_stepped else []
            else:
                found = session.receive()
            self._events.unrepresentable(found, self._when)
            if loop.has_stepped:
                self._take_late(session)
        # The accumulated batches share one gauge.
        elif loop.has_stepped:
            is_first = units.is_looking = not self.is_calibrated
            self._pending = units.send(), "the first batch" if is_first else self._when
            # Units change no result, so from a CUDA device they may arrive after the next step.
            # Formats change results, and ranks wait for each other.
            is_late = loop.device.type == "cuda" and not is_first
            if is_distributed() or not is_late or self._changes_numbers:
                self._end_measurement()
            self._agreement.begin()
        if self.is_calibrated or loop.has_stepped:
            # After the measurement we know which matmuls run unscaled.
            self.counted.take(session, *self._step, is_training=True, when=self._when)
        _warn_of_flushed(session, self._step[0], self._when)

    @override
    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        _, session = self._running
        self._interrupted, session.counter = (self._step, session.counter), None
        self._enter(name, name not in self.counted, is_training=False)

    @override
    def end_evaluation(self, batch_idx: int = 0) -> None:
        (loop, session), units = self._running, self._units
        if not (loop.is_fitting or self.is_calibrated or batch_idx):
            session.adopt(joint_measured(units.send()()))
        # Measurements of accumulated training batches are taken with the last of them.
        elif not units.is_looking:
            self._events.unrepresentable(session.receive(), self._when)
            if not (self._is_in_batch or self._agreement.is_awaited):
                _adopt_late(self, units.received().beyond(units.gauge), self._step[0])
        self.counted.take(session, *self._step, is_training=False, when=self._when)
        _warn_of_flushed(session, self._step[0], self._when)
        step, counter = self._interrupted
        self._enter(*step, is_training=True)
        session.counter = counter

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.is_calibrated:
            return {}
        gauge = {name: list(pair) for name, pair in self.gauge.state().items()}
        plain = {name: dict(slots) for name, slots in self._units.plain.items() if slots}
        state: dict[str, Any] = {"gauge": gauge, "depth": "products", "plain": plain}
        if self._late_step is not None:
            state["late_step"] = self._late_step
        if self._units.lacking:
            state["lacking"] = dict(self._units.lacking)
        if self._simulation is not None and self._simulation.is_stochastic:
            state["rounding_step"] = self._units.step
        if self._fp8 is not None:
            unfit = self._fp8.unfit
            state |= {"fp8_unfit": dict(unfit.matmuls), "fp8_wide": dict(unfit.gradients)}
            if self._fp8.unseen:
                state["fp8_unseen"] = sorted(self._fp8.unseen)
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict` without measuring again."""
        # A gauge of depth="all" has other tensor names. Its units are measured again, which changes
        # no result.
        if state_dict.get("depth") != "products":
            return
        self._units.step = state_dict.get("rounding_step", 0)
        self._late_step = state_dict.get("late_step")
        gauge, lacking = Gauge.from_state(state_dict["gauge"]), state_dict.get("lacking", {})
        self._units.restore(gauge, state_dict["plain"], lacking)
        self.is_calibrated = True
        if self._fp8 is not None:
            unfit = state_dict.get("fp8_unfit", {}), state_dict.get("fp8_wide", {})
            self._fp8.leave_out(Unrepresentable(*unfit))
            self._fp8.unseen.update(state_dict.get("fp8_unseen", ()))

    def explain(self) -> Explanation:
        """Explain which matmuls were scaled, and when units were measured."""
        lacking = self._units.lacking
        parts, units = self.counted.explain(lacking), units_table(self.gauge, lacking) or ""
        if not parts:
            return Explanation("No step has run yet: run fit, validate, test or predict.", units)
        if self._simulation is not None:
            parts.append(self._simulation.summary())
        if self._fp8 is not None:
            parts += [self._fp8.summary(), self._fp8.report()]
        return Explanation(*parts, *self._events.lines, units)

    def _enter(self, name: str, is_counted: bool, *, is_training: bool) -> None:
        """Begin a step, or resume it."""
        _, session = self._running
        assert self.attached is not None
        self._step, self.attached.trains = (name, is_counted), is_training
        for numerics in session.numerics:
            numerics.is_training = is_training
        # Matmuls may leave their format in any step.
        if is_counted or session.format:
            session.counter = CoverageCounter()

    def _end_measurement(self) -> None:
        """Adopt the units of the last measurement, if it has not been read yet."""
        if self._pending is None:
            return
        (arrived, when), self._pending = self._pending, None
        (_, session), units = self._running, self._units
        measurement = joint_measured(arrived())
        out = _out_of_format(self._fp8)
        self._events.unrepresentable(_left_out(session, readmits=True), when)
        self._events.readmitted(sorted(out - _out_of_format(self._fp8)), when)
        if not self.is_calibrated:
            if any_rank(bool(measurement.matmuls)):
                session.adopt(measurement)
                # A batch whose loss needs no gradient measures only the forward pass. If the next
                # one does too, all matmuls are frozen.
                has_backward, is_second = any_rank(measurement.has_backward), self._has_forward
                self.is_calibrated, self._has_forward = has_backward or is_second, True
                units.is_looking = False
                if has_backward or not is_second:
                    self._events.new_units(len(units.gauge), when, {})
            return
        # Tensors without a unit get one, even if the other units stay.
        _adopt_late(self, measurement.beyond(units.gauge), when, is_joint=True)
        # Automatically, units change only if some no longer fit.
        if measurement.outside or self._schedule.recalibrate != "auto":
            old = units.gauge
            session.adopt(measurement)
            self._events.new_units(units.gauge.num_changed(old), when, measurement.outside)

    def _take_late(self, session: MatmulSession) -> None:
        """Adopt units of tensors that were zero at first, and of matmuls that first ran later."""
        # Every rank must count every step.
        units, meets = self._units, self._agreement.meets()
        if not self._agreement.is_awaited:
            _adopt_late(self, units.received().beyond(units.gauge), self._when)
        elif meets:
            measured, self._agreement.is_open = joint_late(units.received(), units.lacking)
            _adopt_late(self, measured, self._when, is_joint=True)
            self._events.unrepresentable(_left_out(session), self._when)


def _adopt_late(
    matmuls: MatmulUnits, measurement: Measurement, when: str, *, is_joint: bool = False
) -> None:
    """Adopt the units of tensors that had none, and measure again soon."""
    loop, session = matmuls._running
    late = session.adopt(measurement)
    matmuls._events.late_units(late, when)
    # All ranks must measure in the same steps.
    if any_rank(bool(late)) if is_joint else late and not is_distributed():
        matmuls._late_step = loop.step_index


def unmatched(matmuls: MatmulUnits, exempt: Iterable[Exemption]) -> list[str]:
    """Return warnings about exemptions that match no matmul."""
    trainer = getattr(matmuls._loop, "trainer", None)
    if trainer is not None and pipeline_of(trainer) is not None:
        return []  # this rank has only its own stages
    return unmatched_exemptions(exempt, matmuls._units.sites.values())


def _left_out(session: MatmulSession, *, readmits: bool = False) -> list[Unrepresentable]:
    """Exclude layers that do not fit a format on any rank, and return the new ones."""

    def joint(found: Unrepresentable) -> Unrepresentable:
        return Unrepresentable(*joint_reasons(found.matmuls, found.gradients))

    return [numerics.fit(joint, readmits=readmits) for numerics in session.numerics]


def _out_of_format(fp8: FP8Linears | None) -> set[str]:
    """Return the matmuls that have left FP8, or its finer format."""
    return set() if fp8 is None else {*fp8.unfit.matmuls, *fp8.unfit.gradients}


def _warn_of_flushed(session: MatmulSession, step: str, when: str) -> None:
    for numerics in session.numerics:
        if flushed := numerics.take_flushed():
            rank_zero_warn(f"UnitScaleCallback: {step}: flushed to zero at {when}: {flushed}")
