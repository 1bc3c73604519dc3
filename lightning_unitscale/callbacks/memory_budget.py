"""Train a LightningModule within a memory budget."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_unitscale.callbacks.distributed import (
    refuse_distributed_tensors,
    refuse_sharded_parameters,
)
from lightning_unitscale.callbacks.explanation import Explanation
from lightning_unitscale.callbacks.lightning_steps import StepsCallback, enter
from lightning_unitscale.callbacks.options import check_compile, mode_of
from lightning_unitscale.callbacks.packages import (
    is_lightning,
    misconfigured,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_unitscale.capture.breaks import joined_lines, joined_reasons
from lightning_unitscale.capture.executors import CompileMode
from lightning_unitscale.capture.module_steps import ModuleSteps
from lightning_unitscale.capture.step_messages import NO_REASON
from lightning_unitscale.loops.loop import Claim
from lightning_unitscale.loops.ranks import failing_together, gathered
from lightning_unitscale.memory.budgets import Budget, check_budget
from lightning_unitscale.memory.measured_budget import MeasuredPartitioner, Parts
from lightning_unitscale.memory.offload import OP_BY_OP, HostLink, Offload, check_offload, link_of
from lightning_unitscale.memory.profile_report import format_bytes
from lightning_unitscale.memory.real_memory import (
    PeakMeter,
    gradient_bytes,
    optimizer_state_bytes,
    stepping_bytes,
)
from lightning_unitscale.memory.remat_module import StepPartitioner
from lightning_unitscale.memory.remat_plan import RematReport, reports_by_part

if TYPE_CHECKING:
    import lightning.pytorch as pl


class RematCallback(StepsCallback):
    """A callback that trains within a memory budget: same losses and weights, fewer bytes.

    ``training_step`` is captured, and its forward and backward graph are planned together. The plan
    decides which values are kept and which are recomputed, at the least estimated time within the
    budget. It changes no bit of a gradient. Random operators are kept or replayed from their
    generator's state, and your own checkpoints still run again. Batches of changing sizes share a
    plan. At the end of a run the predicted and the measured peak are logged as
    ``remat/predicted_peak_bytes`` and ``remat/measured_peak_bytes``.

    Under FSDP2 the budget is for the peak on each rank. The first three steps run with the smallest
    plans. The third is measured, and the graphs of all modules are planned together from that
    measurement.

    Args:
        budget: Limit on all tensor bytes alive at once in a training step: parameters, buffers,
            batch, activations, gradients and the optimizer's state. An int or a string such as
            ``"600MiB"`` is in bytes. A float is linear in bytes, from 0, the smallest achievable
            peak (also ``"min"``), to 1, the peak without rematerialization, so it can always be
            met. ``"min_cut"`` keeps as few bytes as possible without recomputing a matmul.
        compile: Run the captured graphs with Inductor, optionally in a mode of ``torch.compile``.
            Results are then those of ``torch.compile`` up to its rounding, with the random numbers
            of the uncompiled step. The prediction is an estimate, since fused values are not
            stored. Not available under FSDP2.
        offload: ``"host"`` also moves kept values to pinned host memory, where that costs less time
            than recomputing them. Copies run while the device computes. The budget is
            for the device's memory. On a CPU the values are copied outside torch's allocator. This
            saves nothing and is for tests. Not available with ``compile`` or under FSDP2.

    Raises:
        ValueError: If the budget is malformed, or if ``offload`` is unknown or cannot be used with
            the budget or with ``compile``. At the first batch (under FSDP2 at the third step), if
            the budget is in bytes and too small. The message names the smallest achievable peak.
        MisconfigurationException: At ``setup``, if the module is compiled already, the callback is
            given twice or with ``UnitScaleCallback(remat=...)``, or the strategy is
            ``FSDPStrategy`` or uses tensor parallelism.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_unitscale import RematCallback
        >>> remat = RematCallback(0.6)
        >>> trainer = Trainer(callbacks=[remat])  # after fit: print(remat.explain())
    """

    def __init__(
        self,
        budget: Budget,
        *,
        compile: bool | CompileMode = False,
        offload: Literal["host"] | None = None,
    ) -> None:
        super().__init__()
        self._remember(locals())
        check_compile(compile)
        self.budget = check_budget(budget)
        self.compile = compile
        self.offload = check_offload(offload, self.budget)
        if offload is not None and compile:
            raise ValueError(f"offload={offload!r}: {OP_BY_OP}")
        self.measured_peak_bytes: int | None = None
        self._is_observed = False  # whether that peak includes the statistics of ScaleMonitor
        self._steps: ModuleSteps | None = None
        self._partitioner: StepPartitioner | MeasuredPartitioner | None = None
        self._meter: PeakMeter | None = None
        self._gradients_seen = 0
        self._has_warned = False
        self._reports: list[RematReport] = []
        self._explanation = "Nothing has been planned yet: run fit."

    @property
    def reports(self) -> list[RematReport]:
        """Return the report of each graph of the training step, in the order of capture."""
        return self._reports if self._partitioner is None else list(self._partitioner.reports)

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Return the highest predicted peak of the graphs, or ``None`` before the first batch."""
        return max((report.peak_bytes for report in self.reports), default=None)

    def explain(self) -> Explanation:
        """Return the plans and, after a run, the predicted and the measured peak."""
        if self._partitioner is not None:
            self._explanation = self._partitioner.table()
        measured = "" if self.measured_peak_bytes is None else self._summary()
        return Explanation(self._explanation, measured)

    @override
    def claims(self) -> Sequence[Claim]:
        compiling = compile_claims(repr(self), self.compile)
        return (*super().claims(), budget_claim(repr(self)), *compiling)

    @override
    def captures_steps(self, trainer: pl.Trainer) -> bool:
        """Check whether the module's steps run as captured graphs, which plans need."""
        return True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return  # without gradients nothing is kept
        enter(trainer, self)
        self.measured_peak_bytes = None
        self._gradients_seen = 0
        self._partitioner = _partitioner(trainer, pl_module, self)
        self._steps = self._capture(trainer, pl_module, self._partitioner)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch, batch_idx
        if self.measured_peak_bytes is not None:
            return
        if self._meter is None:
            # The first step compiles, and creates the optimizer's state.
            if trainer.global_step >= 1 and not _is_profiled(trainer):
                self._meter = PeakMeter(pl_module.device)
                self._meter.start()
                if isinstance(self._partitioner, MeasuredPartitioner):
                    self._partitioner.meter = self._meter
            return
        if self._gradients_seen < trainer.accumulate_grad_batches:
            return
        parameters = list(pl_module.parameters())
        states = [dict(state) for opt in trainer.optimizers for state in opt.state.values()]
        gradients = [param.grad for param in parameters if param.grad is not None]
        alive = [parameters, list(pl_module.buffers()), gradients, states, batch]
        self._meter.mark(alive, beside=_bucket_bytes(trainer))
        self._gradients_seen = 0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batch = None
        self._warn_if_unplanned(pl_module)
        self._warn_of_breaks()
        if self._meter is None:
            return
        self._gradients_seen += 1
        # After all batches of an optimizer step. Later batches also hold the first one's gradients.
        if self._meter.is_marked and self._gradients_seen == trainer.accumulate_grad_batches:
            peak, parts = self._meter.stop(), self._meter.parts
            self._meter = None
            if not self._plan_by(parts):
                self.measured_peak_bytes = peak
                self._is_observed = self._steps is not None and self._steps.observed

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.predicted_peak_bytes is None:
            if _waits(self._partitioner):
                rank_zero_info(
                    "RematCallback: the run ended before a step was measured. It used the "
                    f"smallest plans. budget={self.budget!r} was not checked."
                )
            return
        metrics = {"remat/predicted_peak_bytes": float(self.predicted_peak_bytes)}
        if self.measured_peak_bytes is not None:
            metrics["remat/measured_peak_bytes"] = float(self.measured_peak_bytes)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        rank_zero_info(f"RematCallback: {self._summary()}")

    def _plan_by(self, parts: Parts) -> bool:
        """Plan the graphs of sharded modules by a measured step. Return whether they change."""
        partitioner = self._partitioner
        if not isinstance(partitioner, MeasuredPartitioner) or partitioner.is_planned:
            return False
        assert self._steps is not None
        partitioner.meter = None
        with failing_together():
            partitioner.plan(parts)
        # Capture them without marks at their edges.
        self._steps.reset()
        return True

    def _warn_if_unplanned(self, module: pl.LightningModule) -> None:
        """Warn if a step has computed gradients without a plan, which ignores the budget."""
        steps, partitioner = self._steps, self._partitioner
        if (
            self._has_warned
            or steps is None
            or partitioner is None
            or self.reports
            or _waits(partitioner)
            or all(param.grad is None for param in module.parameters())
        ):
            return
        step = steps.steps["training_step"]
        if any(graph.executor == "eager" for graph in step.graphs):
            return  # Unit scaling measured this step while it ran, so the next one is planned.
        if step.fallback.awaits_shapes:
            return  # This step gave lazy modules their shapes, so the next one is planned.
        self._has_warned = True
        reasons = joined_reasons(step.graph_breaks) or NO_REASON
        if step.refused is not None:
            reasons = f"it is called with a {step.refused}, which Dynamo does not follow"
        partitioner.give_up(step.fallback.reason or reasons)
        if step.fallback.reason is not None or step.has_warned:
            return
        rank_zero_warn(
            f"RematCallback: no part of {step.title} that trains could be captured, so it runs "
            f"uncaptured{partitioner.loss_without_plan} ({reasons}). Keep printing, .item() and "
            "shapes that depend on values out of its loops, or leave RematCallback out."
        )

    def _warn_of_breaks(self) -> None:
        if isinstance(self._partitioner, MeasuredPartitioner):
            return  # the budget holds for the whole step
        step = None if self._steps is None else self._steps.steps["training_step"]
        breaks = [] if step is None or step.second_capture.is_due else step.graph_breaks
        if self._has_warned or not breaks:
            return
        self._has_warned = True
        count = len(reports_by_part(self.reports))
        parts = (
            f"{count} parts, so budget={self.budget!r} applies to each of them"
            if count != 1
            else f"several parts, so budget={self.budget!r} applies to the only part that trains"
        )
        rank_zero_warn(
            f"RematCallback: training_step is captured in {parts}. It breaks at "
            f"{joined_lines(breaks)}. Expected a step that is one graph. Keep printing, .item() "
            "and shapes that depend on values out of it."
        )

    def _summary(self) -> str:
        predicted, measured = self.predicted_peak_bytes, self.measured_peak_bytes
        if predicted is None:
            return "nothing was planned"
        text = f"predicted peak {format_bytes(predicted)}"
        if measured is None:
            return f"{text}, not measured: the run had too few steps"
        if any(report.sizes for report in self.reports):
            return f"{text} for the planned sizes, measured {format_bytes(measured)} for others"
        error = f"{100 * (predicted / measured - 1):+.1f} %"
        if self._is_observed:
            error = "with the statistics of ScaleMonitor, which sampled that step"
        return f"{text}, measured {format_bytes(measured)} ({error})"

    @override
    def leave(self) -> None:
        self._steps = None
        meter, self._meter = self._meter, None
        with ExitStack() as leaving:  # run all parts, in reverse order, even if one raises
            leaving.callback(self._captured.close)
            if meter is not None:
                leaving.callback(meter.stop)
            self.explain()
            self._reports = self.reports
        self._partitioner = None


def budget_claim(setting: str) -> Claim:
    """Return the claim to the memory budget of a step, which may be set only once."""
    return Claim("the memory budget of a step", setting)


def compile_claims(setting: str, compile: bool | CompileMode) -> tuple[Claim, ...]:
    """Return the claim to the Inductor mode of the graphs that callbacks share, if there is one."""
    mode = mode_of(compile)
    return () if mode is None else (Claim("the mode in which Inductor compiles", setting, mode),)


def _is_profiled(trainer: pl.Trainer) -> bool:
    """Check whether the profiler that measures memory would replace one that the user runs."""
    on_cpu = trainer.strategy.root_device.type == "cpu"
    return on_cpu and is_lightning(trainer.profiler, "PyTorchProfiler")  # type: ignore[attr-defined]


def _waits(partitioner: StepPartitioner | MeasuredPartitioner | None) -> bool:
    """Check whether captured graphs wait for a measured step to be planned."""
    return isinstance(partitioner, MeasuredPartitioner) and bool(partitioner.graphs)


def _partitioner(
    trainer: pl.Trainer, module: pl.LightningModule, callback: RematCallback
) -> StepPartitioner | MeasuredPartitioner:
    budget, offload = callback.budget, callback.offload
    refuse_distributed_tensors(trainer, f"budget={budget!r}")
    if not is_lightning(trainer.strategy, "ModelParallelStrategy"):
        return step_partitioner(trainer, module, budget, offload)
    if offload is not None:
        raise misconfigured(
            f"offload={offload!r}: with ModelParallelStrategy a step is split into many graphs, "
            "and a tensor is moved within one graph only. Expected offload=None for "
            "RematCallback. Leave it out, or use FSDP2's CPUOffloadPolicy for parameters."
        )
    if callback.compile:
        raise misconfigured(
            "compile=True: with ModelParallelStrategy memory is measured graph by graph, so the "
            "graphs run in eager mode. Expected compile=False for RematCallback. Leave it out."
        )
    if _is_profiled(trainer):
        raise misconfigured(
            f"budget={budget!r}: with ModelParallelStrategy memory is measured by torch's "
            "profiler on a CPU, and only one profiler can run at a time. Expected a Trainer "
            "without PyTorchProfiler. Leave that profiler out."
        )
    return MeasuredPartitioner(budget)


def step_partitioner(
    trainer: pl.Trainer, module: pl.LightningModule, budget: Budget, offload: Offload = None
) -> StepPartitioner:
    """Return the partitioner of a LightningModule's steps, with its Trainer's memory."""
    refuse_sharded_parameters(
        trainer,
        f"budget={budget!r}",
        "plans a step that is captured whole, on whole parameters",
        "DDP or PipelineStrategy, or RematCallback() with FSDP2 by ModelParallelStrategy",
    )
    weak_trainer = weakref.ref(trainer)

    def around() -> tuple[int, int, int]:
        trainer = weak_trainer()
        return (0, 0, 0) if trainer is None else _trainer_bytes(trainer)

    if offload == "host":
        # All ranks make the same plans, so they assume the slowest link that any rank measures.
        rates = gathered(link_of(trainer.strategy.root_device.type).bytes_per_second)
        offload = HostLink(min(rates))
    return StepPartitioner(budget, module, around, offload)


def _trainer_bytes(trainer: pl.Trainer) -> tuple[int, int, int]:
    """Return the bytes outside the module: in a whole step, and in parts of it."""
    # The parts are its forward pass, and the step of the optimizer.
    gradients = gradient_bytes(trainer.lightning_module)
    always = optimizer_state_bytes(trainer.optimizers) + _bucket_bytes(trainer)
    stepping = stepping_bytes(trainer.optimizers)
    if trainer.accumulate_grad_batches > 1:
        return always + gradients, 0, stepping
    # Lightning drops the last step's gradients between the forward and the backward pass.
    return always, gradients, gradients + stepping


def _bucket_bytes(trainer: pl.Trainer) -> int:
    """Return the bytes of DDP's gradient buckets, besides the gradients."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    return gradient_bytes(trainer.lightning_module)
