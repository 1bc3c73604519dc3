"""Writes scale snapshots into a TensorBoard event file.

For the dashboards that TensorBoard has anyway: one log2 RMS scalar and one exponent histogram per
tensor and direction, a custom-scalars layout that groups the scalars by module, a text table, and
the graph of the step with the scale of every tensor.
For the Scales dashboard: the tensors that ``schema.py`` describes.

Charts show tensors as they are stored. In a run without unit scaling that is as they are meant; so
two runs side by side, with and without, show what unit scaling does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

from lightning_unitscale.alerts import ScaleAlert, alerts_text, alerts_to_json
from lightning_unitscale.scale_table import scale_table
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.tensorboard.graph_def import annotated_graph
from lightning_unitscale.tensorboard.history import block_of
from lightning_unitscale.tensorboard.records import speed_up
from lightning_unitscale.tensorboard.schema import (
    ALERTS_TAG,
    DIRECTIONS,
    Direction,
    Series,
    TensorSet,
    content,
)
from lightning_unitscale.tensorboard.summaries import (
    PresentCounts,
    event_of,
    field_values,
    plugin_metadata,
    scalar_values,
    tensor_value,
    text_proto,
)

Array = npt.NDArray[np.floating[Any]]
Part: TypeAlias = Literal["vectors", "fractions", "scalars", "exponents", "histograms"]
# After how many of each the writer begins to leave out: every second, after twice as many three of
# four, and so on. TensorBoard itself keeps 2,000 points of the Scales dashboard, 1,000 scalars and
# 50 histograms; what is larger is thinned earlier, and the file stays in bounds.
_BEFORE_THINNING: Final[dict[Part, int]] = {
    "vectors": 2000,
    "fractions": 500,
    "scalars": 250,
    "exponents": 64,
    "histograms": 16,
}
_OF_EXPONENTS: Final[tuple[Part, ...]] = ("exponents", "histograms")


class SummaryWriter(Protocol):
    """What is used of a ``torch.utils.tensorboard.SummaryWriter``."""

    def _get_file_writer(self) -> Any:
        """The open event file; underscored, but what every ``add_*`` method goes through."""

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        """Write Markdown."""

    def add_custom_scalars(self, layout: dict[str, Any]) -> None:
        """Write a layout of charts."""


class ScaleWriter:
    """Writes the snapshots of one run.

    All of a snapshot goes into one event. In long runs steps are left out: of histograms first, of
    the vectors of the Scales dashboard after 2,000. Where something was wrong, and at the end of
    the run, everything is written.

    Args:
        experiment: The summary writer of the run (``TensorBoardLogger.experiment``); the stand-in
            that Lightning gives to other ranks than the first writes nothing.
        histograms: Whether to write exponent histograms, where snapshots have them.

    Example:
        >>> writer = ScaleWriter(trainer.logger.experiment)  # doctest: +SKIP
        >>> writer.write(snapshot)  # doctest: +SKIP
    """

    def __init__(self, experiment: SummaryWriter, *, histograms: bool = True) -> None:
        self._experiment = experiment
        self._histograms = histograms
        self._sets: set[str] = set()
        self._described: set[str] = set()
        self._file_writer: Any = None
        self._observed: TensorSet | None = None
        self._last_step: int | None = None
        self._num_written = 0
        self._missing: set[Part] = set()

    def write(self, snapshot: ScaleSnapshot, *, complete: bool = False) -> None:
        """Write one snapshot at its step.

        A step that was just written is skipped, since TensorBoard wants steps to increase. A
        smaller one begins anew (a second fit, a resumed run), as it does for every other chart.

        Args:
            snapshot: What to write.
            complete: Leave nothing out, however long the run is already.
        """
        file_writer = self._experiment._get_file_writer()
        if file_writer is None or not len(snapshot) or snapshot.step == self._last_step:
            return
        number, self._num_written = self._num_written, self._num_written + 1
        parts = {
            part for part in get_args(Part) if complete or _is_kept(number, _BEFORE_THINNING[part])
        }
        self._last_step = snapshot.step
        self._missing = set(get_args(Part)) - parts
        self._write(file_writer, snapshot, parts)

    def finish(self, snapshot: ScaleSnapshot) -> None:
        """Write what was left out of the last snapshot, and its scales as a table and a graph."""
        file_writer = self._experiment._get_file_writer()
        if file_writer is None:
            return
        if snapshot.step == self._last_step and self._missing:
            missing, self._missing = self._missing, set()
            self._write(file_writer, snapshot, missing)
        self.write_table(snapshot)
        if len(snapshot):
            graph = annotated_graph(snapshot).SerializeToString()
            file_writer.add_event(Event(graph_def=graph), step=snapshot.step)

    def write_table(self, snapshot: ScaleSnapshot) -> None:
        """Write the scales of all tensors as a table, for the Text dashboard."""
        table = scale_table(snapshot, tablefmt="github")
        self._experiment.add_text("scales", table, snapshot.step)

    def write_alerts(self, alerts: Sequence[ScaleAlert], step: int) -> None:
        """Write the alerts of a step, for the Text dashboard and the Scales dashboard."""
        file_writer = self._experiment._get_file_writer()
        if file_writer is None:
            return
        lines = alerts_text(alerts).splitlines()
        self._experiment.add_text("scales_alerts", "\n".join(f"- {one}" for one in lines), step)
        text = text_proto(alerts_to_json(alerts))
        value = Summary.Value(tag=ALERTS_TAG, tensor=text, metadata=plugin_metadata(content()))
        file_writer.add_summary(Summary(value=[value]), global_step=step)

    def _write(self, file_writer: Any, snapshot: ScaleSnapshot, parts: set[Part]) -> None:
        if not parts:
            return
        if file_writer is not self._file_writer:
            # Tags are described once per file.
            self._file_writer = file_writer
            self._described.clear()
            speed_up(file_writer)
        observed = self._observed
        if observed is None or not _is_of(observed, snapshot):
            observed = _tensor_set(snapshot)
            self._observed = observed
        if observed.key not in self._sets:
            self._sets.add(observed.key)
            self._experiment.add_custom_scalars(custom_scalars_layout(snapshot))
        event = event_of(self._values(snapshot, observed, parts))
        file_writer.add_event(event, step=snapshot.step)

    def _values(
        self, snapshot: ScaleSnapshot, observed: TensorSet, parts: set[Part]
    ) -> Iterator[bytes]:
        for direction in DIRECTIONS:
            if np.isnan(snapshot.column("numel", direction)).all():
                continue  # no backward pass, as in validation
            log2_rms = snapshot.log2_rms(direction, stored=True)
            if "vectors" in parts:
                yield from self._vectors(snapshot, direction, log2_rms, observed)
            if "fractions" in parts:
                fractions = snapshot.fractions(direction, stored=True).astype(np.float16)
                yield self._tensor(Series(direction, "fractions", observed.key), fractions)
            if "scalars" in parts:
                yield from scalar_values(
                    [scalar_tag(direction, name) for name in snapshot.names], log2_rms
                )
            counts = snapshot.exponent_counts(direction)
            if counts is None or not self._histograms or parts.isdisjoint(_OF_EXPONENTS):
                continue
            present = PresentCounts(counts, snapshot.log2_units(direction))
            if "exponents" in parts:
                yield from self._exponents(snapshot, direction, present)
            if "histograms" in parts:
                tags = [histogram_tag(direction, name) for name in snapshot.names]
                yield from field_values(tags, present.histograms())

    def _vectors(
        self, snapshot: ScaleSnapshot, direction: Direction, log2_rms: Array, observed: TensorSet
    ) -> Iterator[bytes]:
        series = Series(direction, "log2_rms", observed.key)
        yield self._tensor(series, log2_rms.astype(np.float32), observed.to_content)
        units = snapshot.log2_units(direction).astype(np.float32)
        yield self._tensor(Series(direction, "log2_unit", observed.key), units)
        nonfinite = snapshot.column("nans", direction) + snapshot.column("infs", direction)
        if np.any(nonfinite > 0):
            series = Series(direction, "nonfinite", observed.key)
            yield self._tensor(series, nonfinite.astype(np.float32))

    def _exponents(
        self, snapshot: ScaleSnapshot, direction: Direction, present: PresentCounts
    ) -> Iterator[bytes]:
        num_sampled = snapshot.column("sampled", direction)
        tags = [Series(direction, "exponents", name).tag for name in snapshot.names]
        # A tensor without elements to look at is described when it has some.
        metadata = [
            self._metadata(tag) if number > 0 else None
            for tag, number in zip(tags, num_sampled.tolist(), strict=True)
        ]
        yield from field_values(tags, present.vectors(num_sampled), metadata)

    def _tensor(
        self, series: Series, array: Array, description: Callable[[], bytes] = content
    ) -> bytes:
        return tensor_value(series.tag, array, self._metadata(series.tag, description))

    def _metadata(
        self, tag: str, description: Callable[[], bytes] = content
    ) -> SummaryMetadata | None:
        """What makes a tag the plugin's, which is written with its first value."""
        if tag in self._described:
            return None
        self._described.add(tag)
        return plugin_metadata(description())


def _tensor_set(snapshot: ScaleSnapshot) -> TensorSet:
    return TensorSet(snapshot.names, snapshot.modules, snapshot.layout.formats, snapshot.inputs)


def _is_of(observed: TensorSet, snapshot: ScaleSnapshot) -> bool:
    return (
        observed.names == snapshot.names
        and observed.modules == snapshot.modules
        and observed.formats == snapshot.layout.formats
        and observed.inputs == snapshot.inputs
    )


def scalar_tag(direction: Direction, name: str) -> str:
    """Tag of a log2 RMS scalar; what precedes the slash is a group of its own in TensorBoard."""
    return f"scales_{direction}/{name}"


def histogram_tag(direction: Direction, name: str) -> str:
    """Tag of an exponent histogram."""
    return f"exponents_{direction}/{name}"


def custom_scalars_layout(snapshot: ScaleSnapshot) -> dict[str, dict[str, list[Any]]]:
    """Charts that put the tensors of one block into one picture, for ``add_custom_scalars``.

    Returns:
        Block -> direction -> a multi-line chart of the tensors' scalars.
    """
    blocks: dict[str, list[str]] = {}
    for name, module in zip(snapshot.names, snapshot.modules, strict=True):
        blocks.setdefault(block_of(module) or "(top level)", []).append(name)
    return {
        block: {
            f"{direction}: log2 RMS": [
                "Multiline",
                # TensorBoard takes them for regular expressions.
                [f"^{re.escape(scalar_tag(direction, name))}$" for name in names],
            ]
            for direction in DIRECTIONS
        }
        for block, names in blocks.items()
    }


def _is_kept(number: int, before_thinning: int) -> bool:
    """Whether the ``number``-th of a series is written, when ever fewer are."""
    stride = 1 << (number // before_thinning).bit_length()
    return number % stride == 0
