"""Show the scale of every tensor while a LightningModule trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_unitscale.arguments import check_choice, shown
from lightning_unitscale.callbacks.alert_actions import OnViolation, ScaleAlerts
from lightning_unitscale.callbacks.distributed import joint_snapshot, pipeline_of
from lightning_unitscale.callbacks.lightning_loop import LightningLoop
from lightning_unitscale.callbacks.lightning_steps import StepsCallback, captures_steps, enter
from lightning_unitscale.callbacks.monitored_steps import ProbedSteps, Sampling, WatchedSteps
from lightning_unitscale.callbacks.options import Simulate
from lightning_unitscale.callbacks.packages import rank_zero_info, rank_zero_warn
from lightning_unitscale.capture.name_patterns import NamePatterns
from lightning_unitscale.formats import BlockFormat, NumberFormat, get_format
from lightning_unitscale.loops.loggers import RunWriters
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.loops.ranks import is_distributed
from lightning_unitscale.monitor.torch_state import is_readable
from lightning_unitscale.scales.alerts import ScaleAlert
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.snapshot_rows import summarize, write_csv, write_json_lines
from lightning_unitscale.scales.violations import Limits
from lightning_unitscale.tensorboard.divergence import Divergence, find_divergence
from lightning_unitscale.tensorboard.history import read_run
from lightning_unitscale.tensorboard.table import scale_table
from lightning_unitscale.tensorboard.writer import TABS, TensorBoardTabs

if TYPE_CHECKING:
    import lightning.pytorch as pl


class ScaleMonitor(StepsCallback):
    """A callback that measures and shows the scale of every tensor and gradient during training.

    Every ``every_n_steps`` optimizer steps, the callback watches the training step while it runs,
    without changing a bit. Other steps run without it. If a step runs as a captured graph (rules,
    :class:`RematCallback`, pipelines), the graph contains probes instead. A module that the user
    has compiled is measured at its inputs and outputs. The statistics are logged after the
    optimizer's step. TensorBoard gets all of them. Other loggers get a few numbers, and the names,
    histograms, tables and alerts that they can show. On a CUDA device they are logged at the end of
    the next step, so that no step waits. In a Trainer the same few numbers are in
    ``trainer.callback_metrics``, where ``EarlyStopping`` and ``ModelCheckpoint`` can monitor them.
    Steps that are not sampled keep the last ones.

    Args:
        every_n_steps: Optimizer steps from one sample to the next. The first two steps of a
            training are also sampled, and the last one if the loop knows which that is.
        include: Globs of module paths or tensor names to watch, such as ``"blocks.0.*"``; all by
            default.
        exclude: Globs to leave out, even if ``include`` has them.
        formats: Names of number formats whose out-of-range elements are counted, one or several.
            For a block format such as ``"NVFP4"``, blocks of matmul operands are counted along the
            dimension that the matmul sums over: elements flushed to zero, scales out of range, and
            how far the blocks' largest magnitudes differ. Block formats that ``UnitScaleCallback``
            simulates are counted without being named. Captured graphs have no such counts.
        histograms: Whether to count binary exponents. They are shown as histograms in TensorBoard,
            and give the shares for formats that are not monitored. With ``True``, exponents and the
            shares per format come from a sample of at most 16,384 elements of each tensor.
            ``"exact"`` uses all elements. ``False`` shows only the shares.
        on_violation: What to do when a sampled step contains NaN or Inf, or exceeds ``thresholds``
            (scalars and losses only have to be finite). ``"warn"``: warn. ``"stop"``: warn and set
            ``trainer.should_stop``, so that training ends as usual, with its checkpoints.
            ``"raise"``: raise a ``ScaleViolation``. A function is called on every rank with a tuple
            of the step's new alerts (``ScaleAlert``), trends included. An error that it raises ends
            the training. ``None``: only record the alert in ``alerts`` and on the dashboard, as all
            choices do. A persistent problem is reported once, and again if it returns after ten
            clean samples.
        thresholds: Mapping from a format to one fraction of a tensor's elements, both of those that
            may overflow and of those that may become zero, or to a dict with some of the limits
            ``{"overflow": 0.0, "subnormal": 0.5, "flushed": 0.1}``. They apply to operands of
            matmuls and to gradients of matmul outputs. By default we alert on any overflow in
            a format with infinities, and on more than 0.1 % in a saturating format.
        trend_steps: Warn (never stop or raise) if a tensor's largest magnitude will leave a format
            of the thresholds within this many steps. This extrapolates the last eight samples.
            ``None`` checks no trends.
        tensorboard_tabs: Tensors in TensorBoard's own tabs (Scalars, Histograms, Custom Scalars).
            The Scales tab always shows all tensors. ``"operands"``: operands of matmuls and
            gradients of matmul outputs. ``"all"``: all tensors. ``"scales"``: none.
        first_step: The first optimizer step that may be sampled.
        last_step: The last one; both are sampled if they are reached. ``None``: no end. Outside
            this window nothing is measured, and no loss is checked.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If ``thresholds`` is not a mapping, or ``on_violation`` is a function that cannot
            be called with one argument.
        MisconfigurationException: At ``setup``, if the module is compiled already or the callback
            is given twice.
        ScaleViolation: During training, with ``on_violation="raise"``, on all ranks.

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
        formats: str | Sequence[str | NumberFormat | BlockFormat] = ("FP16", "E4M3FN", "E5M2"),
        histograms: bool | Literal["exact"] = True,
        on_violation: OnViolation | None = "warn",
        thresholds: Mapping[str | NumberFormat, Limits] | None = None,
        trend_steps: int | None = 500,
        tensorboard_tabs: TensorBoardTabs = "operands",
        first_step: int = 0,
        last_step: int | None = None,
    ) -> None:
        super().__init__()
        self._remember(locals())
        self._sampling = Sampling(every_n_steps, first_step, last_step)
        is_exact = isinstance(histograms, str) and histograms == "exact"
        if not isinstance(histograms, bool) and not is_exact:
            raise ValueError(
                f"histograms={shown(histograms)}: not a choice. Expected True, False or 'exact'. "
                "Leave it out to build histograms from a sample of every tensor."
            )
        advice = "leave it out for what matmuls read"
        check_choice("tensorboard_tabs", tensorboard_tabs, TABS, "not a choice", advice)
        self._patterns = NamePatterns(include, exclude)
        given = f"formats={shown(formats)}"
        listed = formats if isinstance(formats, (list, tuple)) else (formats,)
        found = [
            get_format(item, given=given if item is formats else f"{given}: {shown(item)}")
            for item in listed
        ]
        monitored = tuple(item for item in found if isinstance(item, NumberFormat))
        self._alerts = ScaleAlerts(on_violation, thresholds, trend_steps, monitored)
        self._layout = RowLayout(
            self._alerts.formats,
            bool(histograms),
            None if is_exact else RowLayout.sample_size,
            tuple(item for item in found if isinstance(item, BlockFormat)),
        )
        self.snapshots: list[ScaleSnapshot] = []
        self._newest: ScaleSnapshot | None = None  # of this fit
        self._steps: WatchedSteps | ProbedSteps | None = None
        self._writers = RunWriters(tensorboard_tabs, rank_zero_info)
        self._start: int | None = None
        self._sampled_step = -1
        self._is_sampling = False
        self._names_all = True
        self._num_batches = 0
        self._loss_scale = 1.0
        # A sampled step whose statistics are in transit from the device, and the number of batches
        # and ranks of each row.
        self._sent: tuple[Callable[[], ScaleSnapshot], int] | None = None

    @property
    def alerts(self) -> tuple[ScaleAlert, ...]:
        """Return the alerts so far, at most 10,000, newest last."""
        return tuple(self._alerts.alerts)

    def table(self, *, full: bool = False) -> str:
        """Return the last snapshot as a text table: matmul operands, with a line per block.

        Args:
            full: Show a line for every tensor.
        """
        if not self.snapshots:
            return "No step has been sampled yet."
        return scale_table(self.snapshots[-1], full=full)

    def to_csv(self, path: str | Path) -> None:
        """Write the snapshots as CSV, with one row per step, tensor and direction.

        Raises:
            RuntimeError: If no step has been sampled yet.
        """
        self._write("to_csv", write_csv, path)

    def to_json_lines(self, path: str | Path) -> None:
        """Write the snapshots as JSON lines, with one row per step, tensor and direction.

        Raises:
            RuntimeError: If no step has been sampled yet.
        """
        self._write("to_json_lines", write_json_lines, path)

    def compare(self, path: str | Path) -> Divergence:
        """Find where this run and another one diverge, on the rank that writes.

        Args:
            path: Folder of the other run, with its event files.

        Returns:
            The first step, tensor, module and direction in which the runs differ by more than
            chance. ``text`` is a report in a few lines.

        Raises:
            RuntimeError: If this run has written nothing to TensorBoard.
            FileNotFoundError: If the folder has no event files.
            ValueError: If the runs share no tensor or no sampled step.
        """
        if (folder := self._writers.written_folder()) is None:
            raise RuntimeError(
                f"compare: path={str(path)!r}: this run has written nothing to TensorBoard. "
                "Expected a TensorBoardLogger, and a sampled step on the rank that writes. Add one."
            )
        this_run = read_run(folder, "this run")
        return find_divergence(this_run, read_run(path, "path"))

    def _write(self, method: str, write: Callable[..., None], path: str | Path) -> None:
        if not self.snapshots:
            raise RuntimeError(
                f"{method}: path={str(path)!r}: no step has been sampled yet, so there is nothing "
                "to write. Expected a sampled step. Call it after fit()."
            )
        write(self.snapshots, path)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return  # an evaluation has no backward pass to show
        enter(trainer, self)
        loop = LightningLoop(trainer, pl_module)
        # A rank of a pipeline has only the tensors of its own stages.
        self._names_all = pipeline_of(trainer) is None
        if captures_steps(trainer):
            self.start(loop, ProbedSteps(trainer, pl_module, self, self._layout, self._patterns))
        else:
            self.start(loop)
        quiet = trainer.fast_dev_run or trainer.barebones  # type: ignore[attr-defined]
        if not trainer.loggers and not quiet:
            rank_zero_warn(
                "ScaleMonitor: the Trainer has no logger, so nothing is written. Expected one such "
                "as TensorBoardLogger. Only table() and snapshots work without one."
            )

    @override
    def start(self, loop: Loop, steps: ProbedSteps | None = None) -> None:
        self.leave()
        self._loop = loop
        self._steps = steps or self._watched(loop)
        self._alerts.start()
        self._start, self._sampled_step, self._is_sampling = None, -1, False
        self._newest = None

    def _watched(self, loop: Loop) -> WatchedSteps:
        # Formats that another callback simulates are counted as well.
        simulated = (getattr(callback, "simulate", None) for callback in loop.callbacks)
        used = [item for each in simulated if isinstance(each, Simulate) for item in each.blocks]
        blocks = tuple(dict.fromkeys((*self._layout.block_formats, *used)))
        return WatchedSteps(loop, replace(self._layout, block_formats=blocks), self._patterns)

    @override
    def begin_batch(self, batch: Any = None, batch_idx: int = 0) -> None:
        loop, steps = self._running()
        step = loop.step_index
        is_new = step != self._sampled_step
        if self._start is None:
            self._start = step
        is_continued = self._is_sampling and not is_new
        if not is_continued:
            if steps.shows_nothing:
                steps.detach()
                self._steps = steps = self._watched(loop)
            steps.clear()
            self._num_batches = 0
        # Accumulated batches are one sample, so an unplanned sample never begins in the middle.
        is_wanted = self._sampling.wants(step, self._start, is_last=loop.is_last_step)
        if self._alerts.bad_losses and self._sent is None:
            is_wanted |= self._sampling.covers(step)
        self._is_sampling = is_continued or (is_new and is_wanted)
        self._sampled_step = step
        steps.begin_batch(self._is_sampling)

    @override
    def begin_backward(self, loss: Tensor | None) -> None:
        is_covered = not self._is_sampling and self._sampling.covers(self._sampled_step)
        if is_covered and loss is not None and is_readable(loss):
            self._alerts.see_loss(self._sampled_step, loss)

    @override
    def end_backward(self) -> None:
        if self._is_sampling:
            # The scaler changes its scale in the optimizer's step. The gradients have this one.
            self._loss_scale = self._running()[0].loss_scale

    @override
    def end_batch(self) -> None:
        loop, steps = self._running()
        self._judge_sent()
        if not self._is_sampling:
            return
        steps.end_batch()
        self._num_batches += 1
        # Accumulated batches are one sample, which is complete when the optimizer has stepped.
        if not loop.has_stepped:
            return
        self._is_sampling = False
        sent = steps.take(self._sampled_step, grad_scale=self._loss_scale)
        for text in self._patterns.take_unmatched() if self._names_all else ():
            rank_zero_warn(f"ScaleMonitor: {text}")
        if sent is None:
            return
        self._sent = sent, self._num_batches * loop.num_parts
        # Ranks wait for each other anyway, and other devices need no copy.
        if is_distributed() or loop.device.type != "cuda":
            self._judge_sent()

    @override
    def finish(self) -> None:
        loop, _ = self._running()
        self._judge_sent(is_over=True)
        alerts = self._alerts.finish()
        self._writers.write_alerts(loop, alerts, self._sampled_step)
        self._writers.finish(loop, self._newest, self._alerts.of_fit)
        self._alerts.act(loop, alerts)

    @override
    def leave(self) -> None:
        steps, self._steps, self._loop = self._steps, None, None
        self._sent = None
        if steps is not None:
            steps.detach()
        self._writers.clear()

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self.begin_backward(loss)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.end_backward()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Callbacks that monitor scales read them here, and no step waits.
        self._judge_sent()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.finish()

    def _running(self) -> tuple[Loop, WatchedSteps | ProbedSteps]:
        assert self._loop is not None
        assert self._steps is not None
        return self._loop, self._steps

    def _judge_sent(self, *, is_over: bool = False) -> None:
        """Show and check the sample in transit, if there is one."""
        if self._sent is None:
            return
        (arrived, num_merged), self._sent = self._sent, None
        loop, _ = self._running()
        snapshot = joint_snapshot(arrived(), loop.device)
        self.snapshots = [*self.snapshots[-self._KEPT + 1 :], snapshot]
        self._newest = snapshot
        alerts = self._alerts.judge(
            snapshot, has_loss_scaler=loop.has_loss_scaler, num_merged=num_merged
        )
        summary = summarize(snapshot, num_merged, self._alerts.num_violations)
        if not is_over:
            loop.keep_metrics(summary.numbers)
        self._writers.write(loop, snapshot, summary, alerts)
        try:
            self._alerts.act(loop, alerts)
        except BaseException:
            # The finished run can be read now.
            self._writers.finish(loop, self._newest, self._alerts.of_fit)
            raise
