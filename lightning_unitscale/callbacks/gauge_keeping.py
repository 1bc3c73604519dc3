"""The units of a LightningModule's steps: measured on the first batch, followed while it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import (  # type: ignore[attr-defined]
    rank_zero_info,
    rank_zero_warn,
)
from torch.optim import Optimizer

from lightning_unitscale.callbacks.holding import ParameterHolding, without_held
from lightning_unitscale.callbacks.module_steps import (
    has_stepped,
    loss_scale,
    optimizer_step_index,
    step_arguments,
    takes_iterator,
)
from lightning_unitscale.callbacks.pipelined import (
    num_microbatches,
    pipeline_of,
    refuse_live,
    rehearsed,
    rehearsing,
)
from lightning_unitscale.callbacks.ranks import joint_reasons, joint_rms
from lightning_unitscale.callbacks.recalibration import Looks
from lightning_unitscale.callbacks.rule_scaling import RuleScaling
from lightning_unitscale.callbacks.tuning import searches_rate
from lightning_unitscale.functional.change_units import (
    forget_recorded_backward,
    takes_true_derivatives,
)
from lightning_unitscale.graph.captured_step import CapturedStep
from lightning_unitscale.graph.steps import ModuleSteps
from lightning_unitscale.transforms.calibration import Calibrator, Measured
from lightning_unitscale.transforms.drift import Drift
from lightning_unitscale.transforms.fp8_linears import WIDE_GRADIENT, FP8Linears
from lightning_unitscale.transforms.full_precision import runs_in_fp16
from lightning_unitscale.transforms.gauge import Gauge
from lightning_unitscale.transforms.lossless import LosslessUnitScale
from lightning_unitscale.transforms.range_loss import Misfits, RangeCalibrator
from lightning_unitscale.transforms.reachable import find_once_only
from lightning_unitscale.transforms.rehearsal import calibrate


class GaugeKeeping:
    """Measures the gauge of one LightningModule and follows its drift over fits and restarts.

    Args:
        rewrite: The pass that the gauge belongs to.
        recalibrate: When units are looked at again.
        rules: The scale rules that want to know each parameter's gradient, if there are any.
        fp8: The pass that is told which products FP8 does not fit, if there is one.
        holding: What holds the parameters in units, if anything does.
        is_rounded: Whether products are rounded to fewer bits than the Trainer's precision has.

    Attributes:
        is_calibrated: Whether a training step has been measured, in this fit or before.
        events: When new units were taken, and why, one line each.
    """

    def __init__(
        self,
        rewrite: LosslessUnitScale,
        recalibrate: Literal["auto"] | int | None,
        rules: RuleScaling | None,
        fp8: FP8Linears | None = None,
        holding: ParameterHolding | None = None,
        *,
        is_rounded: bool = False,
    ) -> None:
        self.is_calibrated = False
        self.events: list[str] = []
        self._rewrite = rewrite
        self._recalibrate = recalibrate
        self._looks = Looks(recalibrate)
        self._rules = rules
        self._fp8 = fp8
        self._holding = holding
        self._is_rounded = is_rounded
        self._steps: ModuleSteps | None = None
        self._live: Calibrator | None = None
        self._global_step_before = 0
        self._step_index = 0
        self._num_breaks = 0

    def attach(self, trainer: pl.Trainer, steps: ModuleSteps, *, is_new: bool) -> None:
        """Keep the gauge of these steps; what is known of another module's tensors is forgotten."""
        self._steps = steps
        if self._is_rounded and searches_rate(trainer):
            steps.steps["training_step"].before_call = self._before_search
        forget_recorded_backward()
        if is_new:
            self._rewrite.set_gauge(Gauge())
            self.is_calibrated = False
            if self._fp8 is not None:
                self._fp8.forget()

    def before_batch(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> bool:
        """Measure the first batch of a training; returns whether to look at the units in this."""
        self._global_step_before = trainer.global_step
        self._step_index = optimizer_step_index(trainer)
        if self._holding is not None:
            self._holding.follow(trainer)
        is_held_first = self._holding is not None and self._holding.is_unknown
        assert self._steps is not None
        self._num_breaks = len(self._steps.graph_breaks)
        if not self.is_calibrated or is_held_first:
            self._calibrate(trainer, batch, batch_idx)
        return self._looks.at(self._step_index)

    def after_batch(self, trainer: pl.Trainer) -> None:
        """Take new units where what was looked at asks for them."""
        if self._holding is not None and self._steps is not None:
            self._holding.check_graph_breaks(self._steps.graph_breaks[self._num_breaks :])
        if self._live is not None:
            self._adopt_live(trainer, self._live)
        if not has_stepped(trainer, trainer.lightning_module, self._global_step_before):
            return  # the accumulated batches share one gauge
        drift = self._rewrite.drift.take()
        if drift is None and pipeline_of(trainer) is not None:
            drift = Drift()  # stages without a product join in with the others
        if drift is not None and self._looks.at(self._step_index):
            forward, backward = joint_rms(drift.forward, drift.backward)
            (outside,) = joint_rms(drift.outside)
            if self._fp8 is not None:
                self._make_fit(self._fp8, drift.misfits)
            if self._recalibrate != "auto" or outside:
                self._take_gauge(forward, backward, f"step {self._step_index}", outside)
        if self._holding is not None and self._looks.at(self._step_index):
            always = self._recalibrate != "auto"
            self._holding.after_step(f"step {self._step_index}", always=always)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Look at the parameters and gradients that an optimizer is about to use.

        Raises:
            RuntimeError: If second derivatives were taken and parameters are held in units.
        """
        if self._holding is not None and self._holding.is_wanted and takes_true_derivatives():
            raise RuntimeError(
                "hold_parameters: a step took a backward pass with create_graph=True, and second "
                "derivatives of parameters in units of their own are not those of the model; "
                "expected first derivatives only; pass UnitScaleCallback(hold_parameters=False)."
            )
        if self._holding is not None and self._looks.at(self._step_index):
            self._holding.before_step(optimizer)

    def before_evaluation(
        self, trainer: pl.Trainer, name: str, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """An evaluation on its own measures forward units; within a fit, training has done so."""
        if self.is_calibrated or trainer.state.fn == "fit" or batch_idx or dataloader_idx:
            return
        assert self._steps is not None
        if not self._needs_units_at_once(trainer, name):
            self._measure_live(name)
            return
        module = trainer.lightning_module
        arguments = step_arguments(module, name, batch, batch_idx, dataloader_idx)
        context = f"{name.removesuffix('_step').replace('validation', 'val')}_step_context"
        with getattr(trainer.precision_plugin, context)():
            calibrate(
                self._steps.steps[name],
                self._rewrite,
                arguments,
                {},
                results=self._joint_results,
                backward=False,
            )

    def after_evaluation(self, trainer: pl.Trainer) -> None:
        """Take the units that the first batch of an evaluation has shown, if it was measured."""
        if self._live is not None and trainer.state.fn != "fit":
            self._rewrite.update_gauge(*self._joint_results(self._live))
            self._stop_live()

    def detach(self) -> None:
        """Stop measuring; the gauge stays. May be called more than once."""
        self._stop_live()
        self._rewrite.drift.clear()
        if self._steps is not None:
            for step in self._steps.steps.values():
                step.before_call = None
        self._steps = None

    def state_dict(self) -> dict[str, Any]:
        """The gauge for a checkpoint; empty before the first batch."""
        if not self.is_calibrated:
            return {}
        gauge = {k: list(pair) for k, pair in without_held(self._rewrite.gauge).state().items()}
        state: dict[str, Any] = {"gauge": gauge, "depth": self._rewrite.depth}
        if self._fp8 is not None:
            state["fp8_unfit"] = dict(self._fp8.unfit.products)
            state["fp8_wide"] = dict(self._fp8.unfit.gradients)
        if self._holding is not None and (held := self._holding.state_dict()):
            state["held"] = held
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, without measuring again."""
        # A gauge of the other depth names other tensors; measuring anew changes no result.
        if state.get("depth") == self._rewrite.depth:
            self._rewrite.set_gauge(Gauge.from_state(state["gauge"]))
            self.is_calibrated = True
            if self._holding is not None:
                self._holding.load_state_dict(state.get("held", {}))
            if self._fp8 is not None:
                known = Misfits(state.get("fp8_unfit", {}), state.get("fp8_wide", {}))
                self._leave_out(self._fp8, known)

    def _before_search(self, step: CapturedStep, args: tuple[Any, ...], _: dict[str, Any]) -> None:
        """Measure the first batch of a search for a learning rate, which calls no callbacks."""
        if self.is_calibrated or self._live is not None or torch.compiler.is_compiling():
            return
        trainer = cast(pl.LightningModule, step.owner.module).trainer
        if trainer.training:
            batch, batch_idx = (*args, 0)[:2]
            self._calibrate(trainer, batch, batch_idx)

    def _calibrate(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        assert self._steps is not None
        module = trainer.lightning_module
        if not module.automatic_optimization or takes_iterator(module):
            refuse_live(trainer, "it cannot be rehearsed on a batch")
            # Such a step updates weights or consumes batches by itself: it cannot be rehearsed.
            if self._holding is not None:
                self._holding.decline("a step that cannot be rehearsed gives no units in time")
            self._measure_live("training_step")
            return
        if not self._needs_units_at_once(trainer, "training_step"):
            # The first real step has the same bits without units, and nothing is done twice.
            self._measure_live("training_step")
            return
        if (once_only := find_once_only(module)) is not None:
            rank_zero_warn(
                "UnitScaleCallback: the first batch is run twice, once to measure units, and "
                f"{type(module).__name__} has {once_only}, which cannot be put back; expected a "
                "step that takes its data from the batch; let train_dataloader return all loaders."
            )
        batch = rehearsed(trainer, batch)
        arguments = step_arguments(module, "training_step", batch, batch_idx)
        accumulated = trainer.accumulate_grad_batches * num_microbatches(trainer)
        with trainer.precision_plugin.train_step_context(), rehearsing(trainer):
            measured = calibrate(
                self._steps.steps["training_step"],
                self._rewrite,
                arguments,
                {},
                seed_gradient=loss_scale(trainer) / accumulated,
                results=self._joint_results,
            )
        if measured is not None:
            self.is_calibrated = True
            (gradients,) = joint_rms(measured)
            if self._rules is not None:
                self._rules.measured(trainer, gradients)
            if self._holding is not None:
                step = self._steps.steps["training_step"]
                breaks = self._steps.graph_breaks[self._num_breaks :]
                self._holding.measured(trainer, step, gradients, breaks)
        else:
            refuse_live(trainer, "a rehearsal of it has no loss to start from")
            self._measure_live("training_step")

    def _needs_units_at_once(self, trainer: pl.Trainer, name: str) -> bool:
        """Whether the first real step of this name would be another one without units."""
        assert self._steps is not None
        if self._steps.changes_numbers(name) or pipeline_of(trainer) is not None:
            return True
        if self._holding is not None and self._holding.is_wanted:
            return True
        with trainer.precision_plugin.train_step_context():
            return runs_in_fp16(trainer.lightning_module)

    def _measure_live(self, name: str) -> None:
        assert self._steps is not None
        self._stop_live()
        self._live = self._rewrite.calibrator()
        if self._rules is not None:
            self._rules.gradients.watch()
        self._steps.steps[name].interpreter = self._live

    def _adopt_live(self, trainer: pl.Trainer, calibrator: Calibrator) -> None:
        forward, backward = self._joint_results(calibrator)
        if not backward:
            calibrator.clear()
            return
        self._take_gauge(forward, backward, "the first batch", {})
        if self._rules is not None:
            self._rules.measured(trainer, *joint_rms(self._rules.gradients.watched()))
        self._stop_live()
        self.is_calibrated = True

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.release()
        self._live = None
        if self._steps is not None:
            for step in self._steps.steps.values():
                step.interpreter = None

    def _take_gauge(
        self, forward: Measured, backward: Measured, when: str, outside: Mapping[str, float]
    ) -> None:
        old = self._rewrite.gauge
        new = old.updated(self._rewrite.gauge_from(forward, backward))
        changed = sum(new.pair(name) != old.pair(name) for name in new)
        self._rewrite.set_gauge(new)
        worst = sorted(outside.items(), key=lambda item: -abs(math.log2(item[1])))[:3]
        reason = ", ".join(f"{name} at RMS {rms:.3g}" for name, rms in worst)
        event = f"New units for {changed} tensors at {when}" + (f": {reason}" if reason else "")
        self.events.append(event)
        if outside:
            rank_zero_info(f"UnitScaleCallback: {event}")

    def _joint_results(self, calibrator: Calibrator) -> tuple[Measured, Measured]:
        forward, backward = joint_rms(*calibrator.results())
        if self._fp8 is not None and isinstance(calibrator, RangeCalibrator):
            self._leave_out(self._fp8, _joint_misfits(calibrator.misfits()))
        return forward, backward

    def _make_fit(self, fp8: FP8Linears, misfits: Misfits) -> None:
        """Take out of FP8, or out of its finer format, what no longer fits there."""
        products, gradients = (
            {name: why for name, why in one.items() if fp8.runs(name)}
            for one in (misfits.products, misfits.gradients)
        )
        new = self._leave_out(fp8, _joint_misfits(Misfits(products, gradients)))
        for what, reasons in (
            ("Out of FP8", new.products),
            (f"Gradients in {WIDE_GRADIENT}", new.gradients),
        ):
            if reasons:
                listed = "; ".join(f"{name}, since {why}" for name, why in reasons.items())
                self.events.append(f"{what} from step {self._step_index} on: {listed}")
                rank_zero_info(f"UnitScaleCallback: {self.events[-1]}")

    def _leave_out(self, fp8: FP8Linears, misfits: Misfits) -> Misfits:
        """Tell the pass what does not fit; what was rewritten with it in FP8 is rewritten anew.

        Returns:
            What the pass did not know yet and has to do with.
        """
        new = fp8.leave_out(misfits)
        if self._steps is not None and (new.products or new.gradients):
            for step in self._steps.steps.values():
                if fp8.runs_in(step.name):
                    step.rewrite_anew()
        return new


def _joint_misfits(misfits: Misfits) -> Misfits:
    return Misfits(*joint_reasons(misfits.products, misfits.gradients))
