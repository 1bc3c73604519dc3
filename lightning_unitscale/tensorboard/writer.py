"""Writes scale snapshots into a TensorBoard event file.

For the dashboards that TensorBoard has anyway: one log2 RMS scalar and one exponent histogram per
tensor and direction, a custom-scalars layout that groups the scalars by module, and a text table.
For the Scales dashboard: the tensors that ``schema.py`` describes.

Charts show tensors as they are stored. In a run without unit scaling that is as they are meant; so
two runs side by side, with and without, show what unit scaling does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_TENSOR,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_HALF

from lightning_unitscale.row_layout import MIN_EXPONENT, NUM_EXPONENTS
from lightning_unitscale.scale_table import scale_table
from lightning_unitscale.snapshot import ScaleSnapshot
from lightning_unitscale.tensorboard.history import block_of
from lightning_unitscale.tensorboard.schema import (
    DIRECTIONS,
    PLUGIN_NAME,
    Direction,
    ExponentCounts,
    Series,
    TensorSet,
    content,
)

# TensorBoard keeps 1,000 points of a scalar, whatever is in the file. A histogram is ten times as
# large as a point, and a hundred of them are as many as one can tell apart.
_SCALARS_BEFORE_THINNING = 1000
_HISTOGRAMS_BEFORE_THINNING = 100
# Middle of every binade on the axis of log2.
_CENTERS = MIN_EXPONENT + 0.5 + np.arange(NUM_EXPONENTS)
Array = npt.NDArray[np.floating[Any]]


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

    All of a snapshot goes into one event. In long runs scalars and histograms are thinned: after
    1,000 points (100 histograms) every second is written, after twice as many every fourth, and so
    on. The vectors of the Scales dashboard, which are small, are all written.

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
        self._last_step: int | None = None
        self._num_written = 0

    def write(self, snapshot: ScaleSnapshot) -> None:
        """Write one snapshot at its step.

        A step that was just written is skipped, since TensorBoard wants steps to increase. A
        smaller one begins anew (a second fit, a resumed run), as it does for every other chart.
        """
        file_writer = self._experiment._get_file_writer()
        if file_writer is None or not len(snapshot) or snapshot.step == self._last_step:
            return
        if file_writer is not self._file_writer:
            # Tags are described once per file.
            self._file_writer = file_writer
            self._described.clear()
        observed = TensorSet(snapshot.names, snapshot.modules, snapshot.layout.formats)
        if observed.key not in self._sets:
            self._sets.add(observed.key)
            self._experiment.add_custom_scalars(custom_scalars_layout(snapshot))
        summary = Summary(value=self._values(snapshot, observed))
        file_writer.add_summary(summary, global_step=snapshot.step)
        self._last_step = snapshot.step
        self._num_written += 1

    def write_table(self, snapshot: ScaleSnapshot) -> None:
        """Write the scales of all tensors as a table, for the Text dashboard."""
        table = scale_table(snapshot, tablefmt="github")
        self._experiment.add_text("scales", table, snapshot.step)

    def _values(self, snapshot: ScaleSnapshot, observed: TensorSet) -> Iterator[Summary.Value]:
        scalars = _is_kept(self._num_written, _SCALARS_BEFORE_THINNING)
        histograms = self._histograms and _is_kept(self._num_written, _HISTOGRAMS_BEFORE_THINNING)
        for direction in DIRECTIONS:
            if np.isnan(snapshot.column("numel", direction)).all():
                continue  # no backward pass, as in validation
            log2_rms = snapshot.log2_rms(direction, stored=True)
            yield from self._vectors(snapshot, direction, log2_rms, observed)
            if scalars:
                for name, value in zip(snapshot.names, log2_rms.tolist(), strict=True):
                    if math.isfinite(value):
                        yield Summary.Value(tag=scalar_tag(direction, name), simple_value=value)
            if histograms:
                yield from self._exponents(snapshot, direction)

    def _vectors(
        self, snapshot: ScaleSnapshot, direction: Direction, log2_rms: Array, observed: TensorSet
    ) -> Iterator[Summary.Value]:
        series = Series(direction, "log2_rms", observed.key)
        yield self._tensor(series, log2_rms.astype(np.float32), observed.to_content())
        units = snapshot.log2_units(direction).astype(np.float32)
        yield self._tensor(Series(direction, "log2_unit", observed.key), units)
        fractions = snapshot.fractions(direction, stored=True).astype(np.float16)
        yield self._tensor(Series(direction, "fractions", observed.key), fractions)
        nonfinite = snapshot.column("nans", direction) + snapshot.column("infs", direction)
        if np.any(nonfinite > 0):
            series = Series(direction, "nonfinite", observed.key)
            yield self._tensor(series, nonfinite.astype(np.float32))

    def _exponents(self, snapshot: ScaleSnapshot, direction: Direction) -> Iterator[Summary.Value]:
        counts = snapshot.exponent_counts(direction)
        if counts is None:
            return
        units = snapshot.log2_units(direction).tolist()
        sampled = snapshot.column("sampled", direction).tolist()
        for name, row, unit, number in zip(snapshot.names, counts, units, sampled, strict=True):
            if not number > 0:
                continue
            measured = ExponentCounts(row, int(number), unit)
            yield self._tensor(Series(direction, "exponents", name), measured.to_vector())
            if row.any():
                histogram = exponent_histogram(row, unit)
                yield Summary.Value(tag=histogram_tag(direction, name), histo=histogram)

    def _tensor(
        self, series: Series, array: Array, description: bytes | None = None
    ) -> Summary.Value:
        half = array.dtype == np.float16
        tensor = TensorProto(
            dtype=DT_HALF if half else DT_FLOAT,
            tensor_shape=TensorShapeProto(dim=[{"size": size} for size in array.shape]),
            # Event files are little-endian on every machine.
            tensor_content=array.astype("<f2" if half else "<f4", copy=False).tobytes(),
        )
        value = Summary.Value(tag=series.tag, tensor=tensor)
        if series.tag not in self._described:
            self._described.add(series.tag)
            value.metadata.CopyFrom(_metadata(description or content()))
        return value


def scalar_tag(direction: Direction, name: str) -> str:
    """Tag of a log2 RMS scalar; what precedes the slash is a group of its own in TensorBoard."""
    return f"scales_{direction}/{name}"


def histogram_tag(direction: Direction, name: str) -> str:
    """Tag of an exponent histogram."""
    return f"exponents_{direction}/{name}"


def exponent_histogram(counts: Array, log2_unit: int = 0) -> HistogramProto:
    """Exponent counts as a histogram over log2 of the magnitude, one bucket per binade.

    Args:
        counts: Shape ``(279,)``, of the tensor as it is meant, not all zero.
        log2_unit: Unit that it is stored in; the histogram is of the stored tensor.
    """
    present = np.flatnonzero(counts)
    inside = slice(present[0], present[-1] + 1)
    kept, centers = counts[inside], _CENTERS[inside] - log2_unit
    weighted = kept * centers
    return HistogramProto(
        min=centers[0] - 0.5,
        max=centers[-1] + 0.5,
        num=kept.sum(),
        sum=weighted.sum(),
        sum_squares=weighted @ centers,
        bucket_limit=(centers + 0.5).tolist(),
        bucket=kept.tolist(),
    )


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
    """Whether the ``number``-th of a series is written when there are ever fewer."""
    stride = 1 << (number // before_thinning).bit_length()
    return number % stride == 0


def _metadata(description: bytes) -> SummaryMetadata:
    plugin_data = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=description)
    return SummaryMetadata(data_class=DATA_CLASS_TENSOR, plugin_data=plugin_data)
