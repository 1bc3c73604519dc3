"""What loggers get of the scales, each what it can show.

A logger's package is imported when its user has begun a run of it, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, Protocol, TypeAlias

from typing_extensions import override

from lightning_unitscale.scales.alerts import ScaleAlert, alerts_text
from lightning_unitscale.scales.export import finite, snapshot_rows
from lightning_unitscale.scales.layout import DIRECTIONS, FORMAT_KINDS
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.summary import ScaleSummary, exponent_histogram
from lightning_unitscale.tensorboard.table import scale_table
from lightning_unitscale.tensorboard.writer import is_kept

# Logs values by name at a step.
Log: TypeAlias = Callable[[Mapping[str, Any], int], None]
# After how many tables the writers begin to leave out.
_TABLES: Final = 8
_COLUMNS: Final = ("tensor", "module", "direction", "operand", "log2_rms", "log2_rms_stored")


class Writer(Protocol):
    """What writes the snapshots of a run; ``ScaleWriter`` does into event files."""

    def write(
        self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool = False
    ) -> None:
        """Write a snapshot at its step.

        Args:
            snapshot: What to write.
            summary: The same in a few numbers.
            complete: Leave nothing out, however long the run is already.
        """

    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        """Write what was wrong at a step."""

    def finish(self, snapshot: ScaleSnapshot) -> None:
        """Write what was left out of the last snapshot."""


class NumberWriter:
    """Writes to a logger of which is known that it takes numbers.

    Args:
        log: Of the logger.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    def write(
        self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool = False
    ) -> None:
        """Log the numbers."""
        self._log(summary.numbers, snapshot.step)

    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        """It has no place for them."""

    def finish(self, snapshot: ScaleSnapshot) -> None:
        """Nothing was left out."""


class TextWriter(NumberWriter):
    """Writes to a logger that takes texts as well, such as a CSV file."""

    @override
    def write(
        self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool = False
    ) -> None:
        self._log({**summary.numbers, **summary.tensors}, snapshot.step)

    @override
    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        self._log({"scales/alerts": alerts_text(alerts)}, step)


class TableSteps:
    """At which samples tables are written: in long runs at fewer and fewer, and at the last one."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._last: int | None = None

    def takes(self, step: int, *, complete: bool) -> bool:
        """Whether the sample of a step has a table."""
        number, self._num_samples = self._num_samples, self._num_samples + 1
        has_table = complete or is_kept(number, _TABLES)
        if has_table:
            self._last = step
        return has_table

    def lacks(self, step: int) -> bool:
        """Whether the last sample has had none."""
        return self._last != step


class WandbWriter(TextWriter):
    """Writes to W&B, or to Trackio, which has the same classes: histograms and tables as well.

    Args:
        log: Of a run.
        package: ``"wandb"`` or ``"trackio"``.
    """

    def __init__(self, log: Log, package: str = "wandb") -> None:
        super().__init__(log)
        self._package = package
        self._tables = TableSteps()

    @override
    def write(
        self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool = False
    ) -> None:
        # In one call: each makes a row of the run's history.
        values: dict[str, Any] = {**summary.numbers, **summary.tensors}
        for direction in DIRECTIONS:
            if (histogram := exponent_histogram(snapshot, direction)) is not None:
                own = import_module(self._package).Histogram(np_histogram=histogram)
                values[f"scales/exponents/{direction}"] = own
        if self._tables.takes(snapshot.step, complete=complete):
            values["scales/table"] = self._table(snapshot)
        self._log(values, snapshot.step)

    @override
    def finish(self, snapshot: ScaleSnapshot) -> None:
        if self._tables.lacks(snapshot.step):
            self._log({"scales/table": self._table(snapshot)}, snapshot.step)

    def _table(self, snapshot: ScaleSnapshot) -> Any:
        formats = snapshot.layout.formats
        shares = [f"{item.name}.{kind}" for item in formats for kind in FORMAT_KINDS]
        columns = [*_COLUMNS, *shares]
        rows = [[finite(row[column]) for column in columns] for row in snapshot_rows(snapshot)]
        return import_module(self._package).Table(columns=columns, data=rows)


class MlflowWriter(NumberWriter):
    """Writes to an MLflow run: numbers as metrics, names as tags, texts as artifacts.

    Args:
        log: Logs metrics.
        client: The ``MlflowClient``.
        run_id: The run.
    """

    def __init__(self, log: Log, client: Any, run_id: str) -> None:
        super().__init__(log)
        self._client = client
        self._run_id = run_id
        self._tables = TableSteps()
        self._alerts: list[str] = []

    @override
    def write(
        self, snapshot: ScaleSnapshot, summary: ScaleSummary, *, complete: bool = False
    ) -> None:
        super().write(snapshot, summary)
        run_tag = import_module("mlflow.entities").RunTag
        tags = [run_tag(*pair) for pair in summary.tensors.items()]
        self._client.log_batch(self._run_id, tags=tags)
        if self._tables.takes(snapshot.step, complete=complete):
            self._write_table(snapshot)

    @override
    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        self._alerts.append(alerts_text(alerts))
        self._client.log_text(self._run_id, "\n".join(self._alerts), "scales/alerts.txt")

    @override
    def finish(self, snapshot: ScaleSnapshot) -> None:
        if self._tables.lacks(snapshot.step):
            self._write_table(snapshot)

    def _write_table(self, snapshot: ScaleSnapshot) -> None:
        self._client.log_text(self._run_id, scale_table(snapshot), "scales/table.txt")
