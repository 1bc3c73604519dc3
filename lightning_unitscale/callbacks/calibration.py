"""The units of a LightningModule whose steps run as rewritten graphs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_unitscale.callbacks.distributed import (
    joint_measured,
    joint_rms,
    pipeline_of,
    refuse_live,
    rehearsed,
)
from lightning_unitscale.callbacks.late_units import JointLateUnits
from lightning_unitscale.callbacks.lightning_loop import LightningLoop
from lightning_unitscale.callbacks.packages import misconfigured
from lightning_unitscale.callbacks.rehearsals import (
    can_be_rehearsed,
    rehearse_evaluation,
    rehearse_training,
)
from lightning_unitscale.callbacks.rules import RuleScaling
from lightning_unitscale.callbacks.steps import (
    starting_batch,
    step_arguments,
)
from lightning_unitscale.callbacks.units import (
    MeasuredUnits,
    RecalibrationSchedule,
    joint_unrepresentable,
    unrepresentable_from_state,
)
from lightning_unitscale.capture.steps import ModuleSteps
from lightning_unitscale.functional.scale import forget_recorded_backward
from lightning_unitscale.lossless.calibrate import Calibrator, Measured
from lightning_unitscale.lossless.fp8_range import Unrepresentable
from lightning_unitscale.lossless.gauge import Gauge, GaugePair
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
from lightning_unitscale.precision.fp8 import FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat

if TYPE_CHECKING:
    import lightning.pytorch as pl


class GraphUnits(MeasuredUnits):
    """The units of a LightningModule whose captured graphs are rewritten."""

    def __init__(
        self,
        rewrite: LosslessUnitScale,
        schedule: RecalibrationSchedule,
        rules: RuleScaling,
        fp8: FP8Linears | None,
        simulation: SimulateFormat | None,
    ) -> None:
        super().__init__(schedule, simulation, fp8)
        self._rewrite = rewrite
        self._rules = rules
        self._loop: LightningLoop | None = None
        self._steps: ModuleSteps | None = None
        self._live: Calibrator | None = None
        self._late = JointLateUnits(rewrite)
        # Whether this step measures units by the schedule, and whether it measures any.
        self._is_scheduled = self._is_looking = False

    @property
    @override
    def gauge(self) -> Gauge:
        self._end_look()
        return self._rewrite.gauge

    def attach(self, loop: LightningLoop, steps: ModuleSteps, *, is_other: bool) -> None:
        """Keep the gauge of these steps."""
        self._loop, self._steps = loop, steps
        forget_recorded_backward()
        if is_other:
            self._rewrite.set_gauge(Gauge())
            self._rewrite.missing = frozenset()
            self.is_calibrated = False
            if self._fp8 is not None:
                self._fp8.forget()

    @property
    def _trainer(self) -> pl.Trainer:
        assert self._loop is not None
        return self._loop.trainer

    @override
    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        assert self._steps is not None and self._loop is not None
        self._is_scheduled = self._begin(self._loop)
        self._is_looking = self._is_scheduled or self._late.is_due(self._step_index)
        with self._starting("training_step", batch, batch_idx):
            if self._steps.steps["training_step"].fallback.reason is not None:
                return  # rules cannot scale it
            if not self.is_calibrated:
                self._calibrate(self._trainer, batch, batch_idx)
            elif self._late.needs_rehearsal(self._step_index):
                self._measure_late(self._trainer, batch, batch_idx)
        self._steps.observe("UnitScaleCallback", self._is_looking)

    @override
    def end_batch(self) -> None:
        assert self._loop is not None
        if self._live is not None:
            self._adopt_live(self._live)
        if not self._loop.has_stepped:
            return  # the accumulated batches share one gauge
        self._end_look()
        if not self._is_looking:
            self._rewrite.drift.clear()  # a callback beside this has had the step observed
            return
        # Stages without a product join in with the others.
        sent = self._rewrite.drift.send()
        judge = functools.partial(self._judge, sent, is_scheduled=self._is_scheduled)
        self._begin_look(judge, self._loop.device, is_frequent=not self._is_scheduled)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let the rules look at the gradients that an optimizer is about to use."""
        # In a format, what has no unit yet may be flushed: that says nothing of a gradient.
        is_exact = not (self._changes_numbers and self._rewrite.missing)
        self._rules.before_optimizer_step(self._trainer.lightning_module, optimizer, is_exact)

    @override
    def begin_evaluation(self, name: str, batch: Any = None, *indices: int) -> None:
        with self._starting(name, batch, *indices):
            # Alone, an evaluation measures forward units; within a fit, training has done so.
            if not (self.is_calibrated or self._is_fitting or any(indices)):
                self._calibrate_forward(name, batch, *indices)

    @property
    def _is_fitting(self) -> bool:
        return self._loop is not None and self._loop.is_fitting

    def _calibrate_forward(self, name: str, batch: Any, *indices: int) -> None:
        assert self._steps is not None
        rehearse_evaluation(
            self._trainer, self._steps, self._rewrite, name, (batch, *indices), self._joint_results
        )

    @override
    def end_evaluation(self, batch_idx: int = 0) -> None:
        if self._live is not None and not self._is_fitting:
            self._rewrite.update_gauge(self._joint_results(self._live.measured()))
            self._stop_live()

    @override
    def leave(self) -> None:
        self._stop_live()
        self._rewrite.drift.clear()
        self._pending = None
        if self._steps is not None:
            for step in self._steps.steps.values():
                step.before_call = None
        self._steps = self._loop = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if not self.is_calibrated:
            return {}
        gauge = {k: list(pair) for k, pair in self.gauge.state().items()}
        state: dict[str, Any] = {"gauge": gauge, "depth": "products", **self._fp8_state()}
        state["missing"] = sorted(self._rewrite.missing)
        if self._simulation is not None and self._simulation.rounding == "stochastic":
            state["rounding"] = self._simulation.state()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._simulation is not None and "rounding" in state_dict:
            self._simulation.set_state(state_dict["rounding"])
        # At depth "all", earlier versions named other tensors. Measuring again changes no result.
        if state_dict.get("depth") == "products":
            gauge = Gauge.from_state(state_dict["gauge"])
            # Earlier versions wrote 1 for a tensor that was zero.
            ones = [name for name, pair in gauge.items() if pair == GaugePair()]
            self._rewrite.set_gauge(gauge)
            self._rewrite.missing = frozenset(state_dict.get("missing", ones))
            self.is_calibrated = True
            if self._fp8 is not None:
                self._leave_out(self._fp8, unrepresentable_from_state(state_dict))

    @contextlib.contextmanager
    def _starting(self, name: str, batch: Any, *indices: int) -> Iterator[None]:
        """Where a batch begins: what the rules plan comes first."""
        assert self._steps is not None
        trainer = self._trainer
        step, module = self._steps.steps[name], trainer.lightning_module
        with starting_batch(module, step, *indices):
            train = name == "training_step"
            seen = rehearsed(trainer, batch) if train else batch
            arguments = step_arguments(module, name, seen, *indices)
            self._rules.plan_step(trainer, step, arguments, train=train)
            yield

    def _calibrate(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        assert self._steps is not None
        if not can_be_rehearsed(trainer.lightning_module):
            refuse_live(trainer, "it cannot be rehearsed on a batch")
            # Such a step updates weights or consumes batches by itself: it cannot be rehearsed.
            self._measure_live("training_step")
            return
        measured = rehearse_training(
            trainer, self._steps, self._rewrite, batch, batch_idx, self._joint_results
        )
        if measured is not None:
            self.is_calibrated = True
            (gradients,) = joint_rms(measured)
            self._rules.measured(trainer, gradients)
        else:
            refuse_live(trainer, "a rehearsal of it has no loss to start from")
            self._measure_live("training_step")

    def _measure_late(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        """Rehearse a step for tensors without units that no probe sees, as in a checkpoint."""
        assert self._steps is not None
        # The stages of a pipeline have no whole step any more.
        if pipeline_of(trainer) is not None or not can_be_rehearsed(trainer.lightning_module):
            return

        def of_missing(measured: Measured) -> Measured:
            late, when = self._late.of(joint_measured(measured), rehearsed=True), self._now
            if self._fp8 is not None:
                self._make_fit(self._fp8, late.unrepresentable, when)
            self._tell_late_units(late.names(), when)
            return late

        rehearse_training(trainer, self._steps, self._rewrite, batch, batch_idx, of_missing)

    def _measure_live(self, name: str) -> None:
        assert self._steps is not None
        if self._steps.sharded is not None:
            raise misconfigured(
                f"method: {type(self._steps.module).__name__}.{name} is unit-scaled by rules with "
                "ModelParallelStrategy, and a rehearsal of it has no loss that a backward pass "
                "could start from; expected automatic optimization and a step that takes a batch "
                "and returns its loss; change it, or use DDP."
            )
        self._stop_live()
        self._live = self._rewrite.calibrator()
        self._rules.gradients.watch()
        self._steps.steps[name].interpreter = self._live

    def _adopt_live(self, calibrator: Calibrator) -> None:
        measured = self._joint_results(calibrator.measured())
        if not measured.backward:
            calibrator.clear()
            return
        self._take_gauge(measured, "the first batch")
        self._rules.measured(self._trainer, *joint_rms(self._rules.gradients.watched()))
        self._stop_live()
        self.is_calibrated = True

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.release()
        self._live = None
        if self._steps is not None:
            for step in self._steps.steps.values():
                step.interpreter = None

    def _take_gauge(self, measured: Measured, when: str) -> None:
        old = self._rewrite.gauge
        self._rewrite.update_gauge(measured)
        self._tell_new_units(self._rewrite.gauge.num_changed(old), when, measured.outside)

    def _joint_results(self, measured: Measured) -> Measured:
        if self._fp8 is not None:
            self._leave_out(self._fp8, joint_unrepresentable(measured.unrepresentable))
        return joint_measured(measured)

    def _judge(
        self, arrived: Callable[[], Measured] | None, when: str, *, is_scheduled: bool
    ) -> None:
        drift = joint_measured(Measured() if arrived is None else arrived())
        late = self._late.of(drift)
        if self._fp8 is not None:
            judged = drift if is_scheduled else late
            self._make_fit(self._fp8, judged.unrepresentable, when)
        self._tell_late_units(late.names(), when)
        if is_scheduled and (not self._schedule.is_automatic or drift.outside):
            self._take_gauge(drift, when)
        else:
            self._rewrite.update_gauge(late)

    def _make_fit(self, fp8: FP8Linears, unrepresentable: Unrepresentable, when: str) -> None:
        """Take out of FP8, or out of its finer format, what no longer fits there."""
        products, gradients = (
            {name: why for name, why in reasons.items() if fp8.runs(name)}
            for reasons in (unrepresentable.products, unrepresentable.gradients)
        )
        new = self._leave_out(fp8, joint_unrepresentable(Unrepresentable(products, gradients)))
        self._tell_unrepresentable(new, when)

    def _leave_out(self, fp8: FP8Linears, unrepresentable: Unrepresentable) -> Unrepresentable:
        """Tell the pass what does not fit; graphs that have it in FP8 are rewritten again."""
        new = fp8.leave_out(unrepresentable)
        if self._steps is not None and (new.products or new.gradients):
            for step in self._steps.steps.values():
                if fp8.runs_in(step.name):
                    step.invalidate()
        return new
