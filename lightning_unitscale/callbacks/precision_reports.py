"""Report what low precision costs in a training step, and leave out what costs the most."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from lightning_unitscale.callbacks.distributed import joint_reasons
from lightning_unitscale.callbacks.lightning_loop import LightningLoop
from lightning_unitscale.callbacks.lightning_steps import step_arguments, step_context
from lightning_unitscale.callbacks.options import FP8, MEASURED
from lightning_unitscale.callbacks.packages import rank_zero_info
from lightning_unitscale.capture.side_effects import optimizes_itself
from lightning_unitscale.loops.loggers import log_precision
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.matmuls.computations import Exemption, checked_exempt
from lightning_unitscale.matmuls.coverage import join_first
from lightning_unitscale.matmuls.matmul_formats import FP8Linears, SimulateFormat
from lightning_unitscale.matmuls.scaled_methods import AttachedSession
from lightning_unitscale.precision.measured_step import Effort, MeasuredStep
from lightning_unitscale.precision.meter import Meter, refuse_steps
from lightning_unitscale.precision.report import PrecisionReport

# A report that a callback makes by itself costs less than one on request.
_SAMPLED = Effort(directions=8, pairs=1)
_FORMAT = "E4M3FN"


class PrecisionReports:
    """The reports of one callback, and the exemptions that follow from them."""

    def __init__(self, options: FP8 | None, own: FP8Linears | SimulateFormat | None) -> None:
        self._options, self._own = options, own
        self.is_measured = options is not None and options.exclude == MEASURED
        given = () if options is None else checked_exempt(options.exempt)
        self._given = given if self.is_measured or own is None else tuple(own.exempt)
        # The last report's choice, if there was one.
        self._chosen: tuple[Exemption, ...] | None = None
        self._last: Callable[[], tuple[MeasuredStep, Loop]] | None = None
        self._chosen_at: int | None = None  # the optimizer step of the last report that chose
        self.lines: list[str] = []  # for ``explain()``

    def check(self, loop: Loop, *, is_captured: bool = False) -> None:
        """Refuse to measure later in a training that cannot be measured."""
        if not self.is_measured:
            return
        reasons = {
            "a report needs the steps of a Lightning Trainer": not isinstance(loop, LightningLoop),
            "a report cannot run captured steps": is_captured,
            "a report cannot run a step that calls the optimizer": optimizes_itself(loop.module),
        }
        for reason, is_true in reasons.items():
            if is_true:
                raise ValueError(
                    f"exclude={MEASURED!r}: {reason}. Expected names or 'auto' here. Pass for "
                    "example FP8(exclude=['head'])."
                )

    def begin_batch(
        self, loop: Loop, attached: AttachedSession | None, batch: Any, batch_idx: int
    ) -> None:
        """Take the batch of a step that is about to begin, and measure it if a report is due."""
        self.leave()
        if attached is None or not isinstance(loop, LightningLoop):
            return
        self._last = functools.partial(_measured_step, loop, attached, batch, batch_idx)
        if self.is_measured and attached.session.units.gauge and self._is_due(loop.step_index):
            self._choose(self.report(effort=_SAMPLED), loop.step_index)

    def leave(self) -> None:
        """Forget the last batch."""
        self._last = None

    def _is_due(self, step: int) -> bool:
        # A report costs about 18 steps, so one at each doubling from 1,024 on costs below 2 %.
        assert self._options is not None
        if step == self._chosen_at:  # an accumulated batch, whose step has begun
            return False
        ratio, rest = divmod(step, self._options.measured_from)
        return rest == 0 and ratio > 0 and ratio & (ratio - 1) == 0

    def report(
        self, formats: Sequence[Any] | None = None, effort: Effort | None = None
    ) -> PrecisionReport:
        """Report on the last training batch, by default in the formats in use."""
        if self._last is None:
            raise ValueError(
                "precision_report(): no training batch has begun under a Trainer. Expected a call "
                "during or right after a training step. In other places use "
                "lightning_unitscale.precision_report(module, *batch)."
            )
        step, loop = self._last()
        own = () if self._own is None else (self._own,)
        meter = Meter(step, formats or formats_of(self._own), own)
        report = meter.report(effort or Effort(), self._given)
        if loop.is_global_zero:
            log_precision(loop.loggers, report, loop.step_index)
        return report

    def _choose(self, report: PrecisionReport, step: int) -> None:
        assert self._options is not None
        self._chosen_at = step
        chosen = report.smallest_exemption(self._options.max_damage)
        if not math.isfinite(report.loss):  # of this batch, which measures nothing
            chosen = self._chosen or ()
        # All ranks leave out the union of their exemptions.
        (joint,) = joint_reasons({f"{name}|{what}": MEASURED for name, what in chosen})
        self.exempt([tuple(each.rsplit("|", 1)) for each in sorted(joint)])
        names = join_first([f"{name} ({what})" for name, what in self._chosen or ()])
        self.lines.append(f"Exempt from step {step} on, as measured: {names or 'nothing'}")
        rank_zero_info(f"UnitScaleCallback: {self.lines[-1]}. {report.summary()}")

    def exempt(self, chosen: Sequence[Any]) -> None:
        """Leave out the computations of a report, in place of earlier ones."""
        assert self._own is not None
        self._chosen = checked_exempt(list(chosen))
        self._own.exempt.set((*self._given, *self._chosen))

    def state_dict(self) -> dict[str, Any]:
        """Return the exemptions in force, if a report chose them."""
        return {} if self._chosen is None else {"exempt": [list(each) for each in self._chosen]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Leave out the computations that the checkpoint's run left out."""
        if self.is_measured and "exempt" in state:
            self.exempt(state["exempt"])


def formats_of(own: FP8Linears | SimulateFormat | None) -> tuple[Any, ...]:
    """Return the formats of operands and gradients that matmuls run in."""
    if isinstance(own, SimulateFormat):
        return (own,)
    return (_FORMAT if own is None else (_FORMAT, own.gradient_format),)


def _measured_step(
    loop: LightningLoop, attached: AttachedSession, batch: Any, batch_idx: int
) -> tuple[MeasuredStep, Loop]:
    module, name = loop.module, loop.training_step
    refuse_steps(module)
    args = step_arguments(module, name, batch, batch_idx)
    step = MeasuredStep(
        module,
        functools.partial(getattr(module, name), *args),
        attached,
        functools.partial(step_context, loop.trainer, name),
        None,
    )
    return step, loop
