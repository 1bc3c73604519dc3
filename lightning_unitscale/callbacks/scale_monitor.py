"""The callback that shows the scale of every tensor while a LightningModule trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor
from typing_extensions import override

from lightning_unitscale.arguments import check_choice
from lightning_unitscale.callbacks.alerts import (
    OnViolation,
    ScaleAlerts,
    ScaleViolation,
    has_loss_scaler,
    summary_scalars,
)
from lightning_unitscale.callbacks.distributed import (
    joint_snapshot,
    num_microbatches,
    num_replicas,
    pipeline_of,
)
from lightning_unitscale.callbacks.monitored_steps import MonitoredSteps, ProbedSteps, WatchedSteps
from lightning_unitscale.callbacks.steps import (
    StepsCallback,
    captures_steps,
    has_stepped,
    loss_scale,
    optimizer_step_index,
)
from lightning_unitscale.formats import NumberFormat, get_format
from lightning_unitscale.graph.name_patterns import NamePatterns
from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.scales.export import write_csv, write_json_lines
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.violations import Limits
from lightning_unitscale.tensorboard.table import scale_table
from lightning_unitscale.tensorboard.writer import NAMESPACE, TABS, ScaleWriter, TensorBoardTabs


class ScaleMonitor(StepsCallback):
    """Measures the scale of every tensor and gradient of ``training_step`` and shows it.

    Every ``every_n_steps`` optimizer steps the training step is watched while it runs, as it is
    written and with the same bits; all other steps cost nothing. What a step runs as a captured
    graph (:class:`UnitScaleCallback` by rules or of all tensors, :class:`RematCallback`, pipelines)
    carries probes instead, and a module that the user has compiled is measured where it begins and
    ends. The statistics are logged when the optimizer has stepped: to TensorBoard as scalars,
    exponent histograms and a table, to any other logger as summary scalars.

    Args:
        every_n_steps: Optimizer steps from one sample to the next; the first step is sampled.
        include: Globs of module paths or tensor names to watch, such as ``"blocks.0.*"``; all by
            default.
        exclude: Globs to leave out, stronger than ``include``.
        formats: Number formats whose out-of-range elements are counted, by name; one or several.
        histograms: Whether to count binary exponents, for histograms in TensorBoard and for formats
            that are not monitored: ``True`` of a sample of 16,384 elements per tensor, ``"exact"``
            of all elements, ``False`` of none.
        on_violation: What follows when a sampled step has a NaN or an infinity, or loses more to a
            format than ``thresholds`` allow (scalars and losses are in no format: they only have to
            be finite). ``"warn"``: a warning. ``"stop"``: a warning, and
            ``trainer.should_stop``, so that training ends as it always does, checkpoints included.
            ``"raise"``: a ``ScaleViolation``. ``None``: nothing but an entry in ``alerts`` and on
            the dashboard, as in all cases. What lasts is told once, and again when it comes back
            after ten sampled steps.
        thresholds: Format -> the fraction of a tensor's elements that may overflow, and that may be
            flushed to zero; or format -> ``{"overflow": 0.0, "subnormal": 0.5, "flushed": 0.1}``,
            any of the three. By default no element may overflow a monitored format that has
            infinities, and one of a thousand a format that has none.
        trend_steps: Warn (never stop or raise) of a tensor whose largest magnitude, growing as over
            the last eight samples, leaves a format of the thresholds within this many steps;
            ``None`` looks at no trends.
        tensorboard_tabs: What TensorBoard's own tabs (Scalars, Histograms, Custom Scalars) show
            beside the Scales tab, which always has everything: ``"operands"``, the tensors that
            matrix products read and the gradients that arrive at products; ``"all"`` tensors; or
            ``"scales"``, none.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If ``thresholds`` is no mapping.
        MisconfigurationException: At ``setup``, if the module is compiled already or the callback
            is given twice.
        ScaleViolation: While training, with ``on_violation="raise"``, on all ranks.

    Attributes:
        snapshots: The last snapshots, at most 100, newest last.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_unitscale import ScaleMonitor
        >>> monitor = ScaleMonitor(every_n_steps=10)
        >>> trainer = Trainer(callbacks=[monitor])  # after fit: print(monitor.table())
    """

    _KEPT = 100

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        formats: str | Sequence[str | NumberFormat] = ("FP16", "E4M3FN", "E5M2"),
        histograms: bool | Literal["exact"] = True,
        on_violation: OnViolation | None = "warn",
        thresholds: Mapping[str | NumberFormat, Limits] | None = None,
        trend_steps: int | None = 500,
        tensorboard_tabs: TensorBoardTabs = "operands",
    ) -> None:
        super().__init__()
        self._remember(locals())
        if (
            isinstance(every_n_steps, bool)
            or not isinstance(every_n_steps, int)
            or every_n_steps < 1
        ):
            raise ValueError(
                f"every_n_steps={every_n_steps!r}: not a number of steps; expected an integer of "
                "at least 1; pass every_n_steps=50."
            )
        if not isinstance(histograms, bool) and histograms != "exact":
            raise ValueError(
                f"histograms={histograms!r}: no such choice; expected True, False or 'exact'; "
                "leave it out for a sample of every tensor."
            )
        check_choice(
            "tensorboard_tabs",
            tensorboard_tabs,
            TABS,
            "no such choice",
            "leave it out for what products read",
        )
        self.every_n_steps = every_n_steps
        self._tabs = tensorboard_tabs
        self._patterns = NamePatterns(include, exclude)
        listed = (formats,) if isinstance(formats, (str, NumberFormat)) else formats
        monitored = tuple(map(get_format, listed))
        self._alerts = ScaleAlerts(on_violation, thresholds, trend_steps, monitored)
        self._layout = RowLayout(
            self._alerts.formats,
            bool(histograms),
            None if histograms == "exact" else RowLayout.sample_size,
        )
        self.snapshots: list[ScaleSnapshot] = []
        self._steps: MonitoredSteps | None = None
        self._writers: dict[int, ScaleWriter] = {}
        self._sampled_step = -1
        self._is_sampling = False
        self._num_batches = 0
        self._global_step_before = 0
        self._loss_scale = 1.0

    @property
    def alerts(self) -> tuple[ScaleAlert, ...]:
        """What was wrong so far, at most 10,000 alerts, newest last."""
        return tuple(self._alerts.alerts)

    def table(self, *, full: bool = False) -> str:
        """The last snapshot as a text table: of what products read, a line per block.

        Args:
            full: A line for every tensor.
        """
        if not self.snapshots:
            return "No step has been sampled yet."
        return scale_table(self.snapshots[-1], full=full)

    def to_csv(self, path: str | Path) -> None:
        """Write the snapshots as CSV: one row per step, tensor and direction."""
        write_csv(self.snapshots, path)

    def to_json_lines(self, path: str | Path) -> None:
        """Write the snapshots as JSON lines: one row per step, tensor and direction."""
        write_json_lines(self.snapshots, path)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return  # an evaluation has no backward pass to show
        self._restore()
        kind = ProbedSteps if captures_steps(trainer) else WatchedSteps
        self._steps = kind(trainer, pl_module, self, self._layout, self._patterns)
        self._alerts.start()
        self._sampled_step, self._is_sampling = -1, False
        quiet = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]
        if not trainer.loggers and not quiet:
            rank_zero_warn(
                "ScaleMonitor: the Trainer has no logger, so nothing is written; expected one such "
                "as TensorBoardLogger; table() and snapshots work without."
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._steps is not None
        step = optimizer_step_index(trainer)
        is_new = step != self._sampled_step
        is_continued = self._is_sampling and not is_new
        if not is_continued:
            self._steps.clear()
            self._num_batches = 0
        # Accumulated batches are one sample: an unforeseen one is not begun in the middle.
        is_wanted = is_new and self._alerts.wants_sample
        self._is_sampling = is_continued or is_wanted or step % self.every_n_steps == 0
        self._sampled_step = step
        self._global_step_before = trainer.global_step
        self._steps.begin_batch(self._is_sampling)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        assert self._steps is not None
        if self._is_sampling:
            self._steps.begin_backward()
        else:
            self._alerts.see_loss(self._sampled_step, loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._is_sampling:
            # The scaler changes its scale in the optimizer's step; the gradients have this one.
            self._loss_scale = loss_scale(trainer)
            assert self._steps is not None
            self._steps.end_backward()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        assert self._steps is not None
        if self._is_sampling:
            self._steps.end_batch()
            self._num_batches += 1
        # Accumulated batches are one sample: it is complete when the optimizer has stepped.
        if self._is_sampling and has_stepped(trainer, pl_module, self._global_step_before):
            self._is_sampling = False
            self._take(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write_last(trainer)
        alerts = self._alerts.finish()
        self._write_alerts(trainer, alerts, self._sampled_step)
        self._alerts.act(trainer, alerts)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, ScaleViolation):
            self._write_last(trainer)
        super().on_exception(trainer, pl_module, exception)

    def _take(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert self._steps is not None
        snapshot = self._steps.take(self._sampled_step, grad_scale=self._loss_scale)
        # A rank of a pipeline sees the tensors of its own stages.
        for text in self._patterns.take_unmatched() if pipeline_of(trainer) is None else ():
            rank_zero_warn(f"ScaleMonitor: {text}")
        if snapshot is None:
            return
        snapshot = joint_snapshot(snapshot, module.device)
        self.snapshots = [*self.snapshots[-self._KEPT + 1 :], snapshot]
        alerts = self._alerts.judge(
            snapshot,
            has_loss_scaler=has_loss_scaler(trainer),
            is_before_units=self._steps.is_before_units,
            num_merged=self._num_batches * num_microbatches(trainer) * num_replicas(trainer),
        )
        self._log(trainer, snapshot, complete=bool(alerts))
        self._write_alerts(trainer, alerts, snapshot.step)
        self._alerts.act(trainer, alerts)

    def _log(self, trainer: pl.Trainer, snapshot: ScaleSnapshot, *, complete: bool) -> None:
        if not trainer.is_global_zero:
            return
        scalars = summary_scalars(snapshot)
        for logger in trainer.loggers:
            if not isinstance(logger, TensorBoardLogger):
                logger.log_metrics(scalars, step=snapshot.step)
                continue
            if self._tabs != "scales":
                behind = {name.replace("scales", NAMESPACE, 1): scalars[name] for name in scalars}
                logger.log_metrics(behind, step=snapshot.step)
            self._writer(logger).write(snapshot, complete=complete)

    def _write_alerts(self, trainer: pl.Trainer, alerts: Sequence[ScaleAlert], step: int) -> None:
        if not alerts or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                self._writer(logger).write_alerts(alerts, step)

    def _write_last(self, trainer: pl.Trainer) -> None:
        if self.snapshots and trainer.is_global_zero:
            for writer in self._writers.values():
                writer.finish(self.snapshots[-1])

    def _writer(self, logger: TensorBoardLogger) -> ScaleWriter:
        key = id(logger.experiment)
        if key not in self._writers:
            self._writers[key] = ScaleWriter(logger.experiment, tabs=self._tabs)
        return self._writers[key]

    @override
    def _restore(self) -> None:
        if self._steps is None:
            return
        self._writers.clear()
        self._steps.detach()
        self._steps = None
