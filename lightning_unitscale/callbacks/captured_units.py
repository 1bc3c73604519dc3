"""All that a ``UnitScaleCallback`` does to a module that it scales by rules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_unitscale.callbacks.calibration import GraphUnits
from lightning_unitscale.callbacks.captured_run import capture_run
from lightning_unitscale.callbacks.distributed import (
    pipeline_of,
    refuse_sharded_parameters,
)
from lightning_unitscale.callbacks.explanation import Explanation, units_table
from lightning_unitscale.callbacks.lightning_loop import LightningLoop
from lightning_unitscale.callbacks.options import Rules
from lightning_unitscale.callbacks.packages import is_lightning, misconfigured
from lightning_unitscale.callbacks.remat import RematCallback, step_partitioner
from lightning_unitscale.callbacks.rules import RuleScaling
from lightning_unitscale.callbacks.steps import all_callbacks
from lightning_unitscale.callbacks.units import RecalibrationSchedule
from lightning_unitscale.capture.gathering import GatherParameters
from lightning_unitscale.capture.sharded import ShardedModule
from lightning_unitscale.dispatch.captured_formats import CapturedFormats
from lightning_unitscale.dispatch.coverage import Coverage
from lightning_unitscale.dynamo.executors import CompileMode
from lightning_unitscale.graph.passes import GraphPass
from lightning_unitscale.lossless.rewrite import LosslessUnitScale
from lightning_unitscale.precision.fp8 import FP8Linears
from lightning_unitscale.precision.simulate import SimulateFormat

if TYPE_CHECKING:
    import lightning.pytorch as pl


class CapturedUnits(GraphUnits):
    """Rules, units and formats of a LightningModule's captured steps."""

    def __init__(
        self,
        method: Rules,
        schedule: RecalibrationSchedule,
        rules: RuleScaling,
        fp8: FP8Linears | None,
        simulation: SimulateFormat | None,
        *,
        remat: str | int | float | None,
        compile: bool | CompileMode,
    ) -> None:
        rewrite = LosslessUnitScale(measures_range=fp8 is not None)
        super().__init__(rewrite, schedule, rules, fp8, simulation)
        self._method = method
        self._remat = remat
        self._compile = compile
        self._leaving = ExitStack()
        self._gathering: GatherParameters | None = None
        self._counting: list[GraphPass] = []
        self._last_explanation = Explanation(
            "Nothing has been captured yet: run fit, validate, test or predict."
        )

    def capture(
        self,
        loop: LightningLoop,
        owner: pl.Callback,
        *,
        is_other: bool,
    ) -> None:
        """Let the steps of a module run as graphs that are rewritten."""
        trainer, module = loop.trainer, loop.module
        if self._fp8 is not None:
            # Stages are cut from one rewritten graph, whether their units are looked at or not;
            # those of what is zero at first have to be, on any schedule.
            self._fp8.takes_units_in = pipeline_of(trainer) is None
        is_sharded = is_lightning(trainer.strategy, "ModelParallelStrategy")
        self._check_sharding(trainer, is_sharded=is_sharded)
        self._rules.attach(trainer, module, is_other=is_other)
        remat = self._remat
        steps = self._steps = capture_run(
            trainer,
            module,
            owner,
            None if remat is None else step_partitioner(trainer, module, remat),
            compile=self._compile,
            passes=self._passes,
            leaving=self._leaving,
        )
        if is_sharded:
            steps.sharded = ShardedModule(module)
            self._gathering = GatherParameters(steps.sharded)
        self.attach(loop, steps, is_other=is_other)
        if is_other:
            self._counted = self._new_counts()
        # A pipeline runs parts of a graph, and no step.
        formats = None if pipeline_of(trainer) is not None else self._fp8 or self._simulation
        self._counting = [] if formats is None else [CapturedFormats(formats, self._count)]
        for graph_pass in self._passes():
            if graph_pass not in steps.passes:
                steps.add_pass(graph_pass)

    def _check_sharding(self, trainer: pl.Trainer, *, is_sharded: bool) -> None:
        """Refuse to scale by rules what the steps of a sharded module cannot have."""
        if not is_sharded:
            refuse_sharded_parameters(
                trainer,
                f"method={self._method!r}",
                "sets whole parameters to RMS 1",
                "ModelParallelStrategy with fully_shard, DDP, or method='lossless'",
            )
        elif self._compile:
            raise misconfigured(
                f"compile=True with method={self._method!r}: FSDP gathers parameters in the middle "
                "of the graph, which Inductor does not compile; expected compile=False with "
                "ModelParallelStrategy; leave it out, or use DDP."
            )
        elif any(isinstance(callback, RematCallback) for callback in all_callbacks(trainer)):
            raise misconfigured(
                f"method={self._method!r} with RematCallback: by rules FSDP gathers parameters in "
                "the middle of the graph, of which nothing can run again then; expected only one "
                "of them with ModelParallelStrategy; checkpoint the blocks yourself, or use DDP."
            )

    @override
    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        assert self._steps is not None
        fallback = self._steps.steps["training_step"].fallback
        if not fallback.is_due(self._steps.executor):
            super().begin_batch(batch, batch_idx)
        if fallback.reason is not None:
            self._is_scheduled = self._is_looking = False  # no graph of it runs

    def start_fit(self) -> None:
        """Give the Trainer's settings their meaning for gradients in units."""
        self._rules.start_fit(self._trainer)

    @override
    def explain(self) -> Explanation:
        if self._steps is None:
            return self._last_explanation
        units = units_table(self.gauge) or ""
        return Explanation(self._steps.explain(), *self.events, self._late.report(), units)

    @override
    def leave(self) -> None:
        steps = self._steps
        if steps is None:
            return
        with ExitStack() as leaving:  # all of it, if one part raises; the last part comes first
            leaving.callback(setattr, steps, "sharded", None)
            leaving.callback(self._leaving.close)
            leaving.callback(self._rules.restore)
            leaving.callback(super().leave)
            self._last_explanation = self.explain()
        self._gathering = None
        self._counting = []

    def _count(self, name: str, coverage: Coverage, call: str) -> None:
        is_training = name == "training_step"
        when = f"step {self._step_index}" if is_training else call
        self._counted.add(name, coverage, is_training=is_training, when=when)

    def _passes(self) -> list[GraphPass]:
        rules = [self._rules.rules, self._rules.gradients]
        simulation = [] if self._simulation is None else [self._simulation]
        fp8 = [] if self._fp8 is None else [self._fp8]
        gathering = [] if self._gathering is None else [self._gathering]
        return [*rules, *self._counting, self._rewrite, *simulation, *fp8, *gathering]
