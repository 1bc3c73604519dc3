"""Write scales to loggers, as far as each can show them, by the name of the logger's class.

A logger's package is imported only after the user has begun a run of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, TypeAlias

from typing_extensions import override

from lightning_unitscale.arguments import shown
from lightning_unitscale.loops.loop import Loop
from lightning_unitscale.matmuls.coverage import Coverage
from lightning_unitscale.precision.diagnosis import diagnose
from lightning_unitscale.precision.report import PrecisionReport
from lightning_unitscale.scales.alerts import ScaleAlert, alerts_text
from lightning_unitscale.scales.layout import DIRECTIONS, finite
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.snapshot_rows import (
    ScaleSummary,
    exponent_histogram,
    lost_kinds,
    snapshot_rows,
)
from lightning_unitscale.tensorboard.table import scale_table
from lightning_unitscale.tensorboard.writer import (
    SCALES_URL,
    ScaleWriter,
    TensorBoardTabs,
    Thinning,
    command_for_logger,
    write_precision,
)

# The content of ``Coverage.to_json()``; ``None`` without a step that was counted.
CoverageNumbers: TypeAlias = Mapping[str, Any] | None
Log: TypeAlias = Callable[[Mapping[str, Any], int], None]  # logs values by name at a step
# The number of tables after which the writers omit some.
_TABLES: Final = {"table": 8}
_COLUMNS: Final = ("tensor", "module", "direction", "operand", "log2_rms", "log2_rms_stored")


class NumberWriter:
    """A writer to a logger whose ``log`` is only known to take numbers."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._thinning = Thinning(_TABLES)

    def write(self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool) -> None:
        """Write a snapshot at its step."""
        self._log(summary.numbers, snapshot.step)

    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        """Write the alerts of a step, if the logger supports them."""

    def write_event(self, text: str, step: int) -> None:
        """Write a line about matmuls whose format changed, if the logger supports texts."""

    def finish(self, snapshot: ScaleSnapshot) -> None:
        """Write the omitted parts of the last snapshot."""
        if self._thinning.left_out(snapshot.step):
            self._write_table(snapshot)

    def write_summary(self, text: str, coverage: CoverageNumbers, step: int) -> None:
        """Write the summary of a run at its end, if the logger supports texts."""

    def _write_table(self, snapshot: ScaleSnapshot) -> None:
        """Write the table of a snapshot, if the logger supports tables."""


Writer: TypeAlias = ScaleWriter | NumberWriter  # writers of the snapshots of a run


class TextWriter(NumberWriter):
    """A writer to a logger that also takes texts, such as a CSV file."""

    @override
    def write(self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool) -> None:
        self._log({**summary.numbers, **summary.tensors}, snapshot.step)

    @override
    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        self._log({"scales/alerts": alerts_text(alerts)}, step)

    @override
    def write_event(self, text: str, step: int) -> None:
        self._log({"scales/formats": text}, step)

    @override
    def write_summary(self, text: str, coverage: CoverageNumbers, step: int) -> None:
        self._log({"scales/diagnosis": text}, step)


class WandbWriter(TextWriter):
    """A writer of histograms and tables to W&B, or to Trackio, which has the same classes."""

    def __init__(self, log: Log, package: str = "wandb", run: Any = None) -> None:
        super().__init__(log)
        self._package = package
        self._run = run  # if it has a summary as well as a history

    @override
    def write(self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool) -> None:
        # In one call, because each call makes a row of the run's history.
        values: dict[str, Any] = {**summary.numbers, **summary.tensors}
        for direction in DIRECTIONS:
            if (histogram := exponent_histogram(snapshot, direction)) is not None:
                own = import_module(self._package).Histogram(np_histogram=histogram)
                values[f"scales/exponents/{direction}"] = own
        if self._thinning.due(snapshot.step, complete=complete):
            values["scales/table"] = self._table(snapshot)
        self._log(values, snapshot.step)

    @override
    def write_summary(self, text: str, coverage: Mapping[str, Any] | None, step: int) -> None:
        if self._run is None:
            super().write_summary(text, coverage, step)
        else:  # a log would add a row to the user's history
            self._run.summary["scales/diagnosis"] = text

    @override
    def _write_table(self, snapshot: ScaleSnapshot) -> None:
        self._log({"scales/table": self._table(snapshot)}, snapshot.step)

    def _table(self, snapshot: ScaleSnapshot) -> Any:
        lost = lost_kinds(snapshot.layout)
        shares = [f"{name}.{kind}" for name, kinds in lost for kind in kinds]
        columns = [*_COLUMNS, *shares]
        rows = [[finite(row[column]) for column in columns] for row in snapshot_rows(snapshot)]
        return import_module(self._package).Table(columns=columns, data=rows)


class MlflowWriter(NumberWriter):
    """A writer to an MLflow run: numbers as metrics, names as tags, texts as artifacts."""

    def __init__(self, log: Log, client: Any, run_id: str) -> None:
        super().__init__(log)
        self._client = client
        self._run_id = run_id
        self._alerts: list[str] = []
        self._events: list[str] = []

    @override
    def write(self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool) -> None:
        super().write(snapshot, summary, complete=complete)
        run_tag = import_module("mlflow.entities").RunTag
        tags = [run_tag(*pair) for pair in summary.tensors.items()]
        self._client.log_batch(self._run_id, tags=tags)
        if self._thinning.due(snapshot.step, complete=complete):
            self._write_table(snapshot)

    @override
    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        self._alerts.append(alerts_text(alerts))
        self._client.log_text(self._run_id, "\n".join(self._alerts), "scales/alerts.txt")

    @override
    def write_event(self, text: str, step: int) -> None:
        self._events.append(text)
        self._client.log_text(self._run_id, "\n".join(self._events), "scales/formats.txt")

    @override
    def _write_table(self, snapshot: ScaleSnapshot) -> None:
        self._client.log_text(self._run_id, scale_table(snapshot), "scales/table.txt")

    @override
    def write_summary(self, text: str, coverage: CoverageNumbers, step: int) -> None:
        self._client.log_text(self._run_id, text, "scales/diagnosis.txt")


_Maker: TypeAlias = Callable[[Any, TensorBoardTabs], Writer]


class RunWriters:
    """The writers to the loggers of a loop, on the rank that writes."""

    def __init__(self, tabs: TensorBoardTabs, say: Callable[[str], None]) -> None:
        self._tabs = tabs
        self._say = say
        self._writers: dict[int, Writer] = {}
        self._folder: str | None = None  # of the last event file

    def write(
        self,
        loop: Loop,
        snapshot: ScaleSnapshot,
        summary: ScaleSummary,
        alerts: Sequence[ScaleAlert],
    ) -> None:
        """Write a snapshot and its alerts at its step."""
        for writer in self._of(loop):
            writer.write(snapshot, summary, complete=bool(alerts))
        self.write_alerts(loop, alerts, snapshot.step)

    def write_alerts(self, loop: Loop, alerts: Sequence[ScaleAlert], step: int) -> None:
        """Write the alerts of a step, if there are any."""
        for writer in self._of(loop) if alerts else ():
            writer.write_alerts(alerts, step)

    def write_event(self, loop: Loop, text: str, step: int) -> None:
        """Write a line about matmuls whose format changed at a step."""
        for writer in self._of(loop):
            writer.write_event(text, step)

    def finish(
        self, loop: Loop, newest: ScaleSnapshot | None, alerts: Sequence[ScaleAlert]
    ) -> None:
        """Write the omitted parts of a run's last snapshot, and the summary of the run."""
        if newest is None or not self._writers:
            return
        found = (getattr(callback, "coverage", None) for callback in loop.callbacks)
        counted = next((each for each in found if isinstance(each, Coverage) and each.counts), None)
        coverage = None if counted is None else counted.to_json()
        summary = str(diagnose(newest, alerts, coverage))
        for writer in self._writers.values():
            writer.finish(newest)
            writer.write_summary(summary, coverage, newest.step)

    def written_folder(self) -> str | None:
        """Return the folder of the last event file, also after its run."""
        for writer in self._writers.values():
            if isinstance(writer, ScaleWriter):
                self._folder = writer.written_folder()
        return self._folder

    def clear(self) -> None:
        """Drop the writers of a run that has ended. They could not be copied."""
        self.written_folder()
        self._writers.clear()

    def _of(self, loop: Loop) -> list[Writer]:
        for logger in loop.loggers if loop.is_global_zero else ():
            if id(logger) not in self._writers:
                writer = self._writers[id(logger)] = _maker(logger)(logger, self._tabs)
                if isinstance(writer, ScaleWriter):
                    self._say(
                        f"ScaleMonitor: to see the scales during the run, start "
                        f"{command_for_logger(logger)} and open {SCALES_URL}"
                    )
        return list(self._writers.values())


def log_precision(loggers: Sequence[Any], report: PrecisionReport, step: int) -> None:
    """Write a precision report to loggers that show texts of several lines."""
    for logger in loggers:
        if any(kind.__name__ == "TensorBoardLogger" for kind in type(logger).__mro__):
            write_precision(logger.experiment, str(report), report.as_page(), step)


def checked_loggers(loggers: Any) -> tuple[Any, ...]:
    """Return one logger or several as a tuple, after a check."""
    given = tuple(loggers) if isinstance(loggers, (list, tuple)) else (loggers,)
    for logger in given:
        _maker(logger)
    return given


def mlflow_run(run: Any) -> MlflowWriter:
    """Return a writer to a run of MLflow, with the current tracking server."""
    mlflow, run_id = import_module("mlflow"), run.info.run_id

    def log(values: Mapping[str, Any], step: int) -> None:
        mlflow.log_metrics(dict(values), step=step, run_id=run_id)

    return MlflowWriter(log, mlflow.MlflowClient(), run_id)


def _wandb_run(run: Any) -> WandbWriter:
    run.define_metric("scales/*", step_metric="scales/step")

    def log(values: Mapping[str, Any], step: int) -> None:
        # Added to the row of the user's next call, because a row of its own would shift the axis.
        run.log({**values, "scales/step": step}, commit=False)

    return WandbWriter(log, run=run)


def _metrics(logger: Any) -> Log:
    return lambda values, step: logger.log_metrics(dict(values), step=step)


# By the name of the class in any of Lightning's packages. Other classes have their package too.
_MAKERS: Final[Mapping[str, _Maker]] = {
    "TensorBoardLogger": lambda logger, tabs: ScaleWriter(logger.experiment, tabs=tabs),
    "CSVLogger": lambda logger, _: TextWriter(_metrics(logger)),
    "WandbLogger": lambda logger, _: WandbWriter(_metrics(logger), run=logger.experiment),
    "MLFlowLogger": lambda logger, _: MlflowWriter(
        _metrics(logger), logger.experiment, logger.run_id
    ),
    "SummaryWriter": lambda writer, tabs: ScaleWriter(writer, tabs=tabs),
    "wandb.Run": lambda run, _: _wandb_run(run),
    "trackio.Run": lambda run, _: WandbWriter(
        lambda values, step: run.log(dict(values), step=step), "trackio"
    ),
    "mlflow.ActiveRun": lambda run, _: mlflow_run(run),
}


def _maker(logger: Any) -> _Maker:
    if isinstance(logger, NumberWriter):
        return lambda writer, _: writer
    for kind in type(logger).__mro__:
        package = kind.__module__.partition(".")[0]
        maker = _MAKERS.get(kind.__name__) or _MAKERS.get(f"{package}.{kind.__name__}")
        if maker is not None:
            return maker
    if hasattr(logger, "log_metrics"):
        return lambda logger, _: NumberWriter(_metrics(logger))
    raise TypeError(
        f"loggers={shown(logger)}: unknown logger. Expected one of Lightning's, a "
        "SummaryWriter, a run of W&B, Trackio or MLflow, or an object with log_metrics(values, "
        "step=). Pass one of those."
    )
