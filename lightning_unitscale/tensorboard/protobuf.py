"""The messages of an event file: summaries of many tensors, and fast checksums for their records.

Messages are TensorBoard's own protobuf classes; numbers go into them as packed bytes
(``tensor_content``) wherever the message has such a field.

Every record of an event file ends in a CRC-32C of its bytes. TensorBoard without TensorFlow
computes it byte by byte in Python: three megabytes a second, in a thread that holds the interpreter
and so slows the training down. ``use_fast_checksums`` makes one open event file compute it with
``google-crc32c``. It replaces a private attribute (checked on TensorBoard 2.21); where that has
moved, the file stays as it is, only slow.
"""

from __future__ import annotations

import functools
import logging
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import (
    DATA_CLASS_TENSOR,
    HistogramProto,
    Summary,
    SummaryMetadata,
)
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_HALF, DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_unitscale.scales.layout import MIN_EXPONENT
from lightning_unitscale.tensorboard.schema import PLUGIN_NAME

Array = npt.NDArray[np.floating[Any]]
_CRC_MASK: Final = 0xA282EAD8  # of the TFRecord format
_log = logging.getLogger(__name__)


def tensor_proto(array: Array) -> TensorProto:
    """A tensor of floats: half precision stays, all else becomes single."""
    half = array.dtype == np.float16
    return TensorProto(
        dtype=DT_HALF if half else DT_FLOAT,
        tensor_shape=TensorShapeProto(dim=[{"size": size} for size in array.shape]),
        # Event files are little-endian on every machine.
        tensor_content=array.astype("<f2" if half else "<f4", copy=False).tobytes(),
    )


def text_proto(text: str) -> TensorProto:
    """A text as a tensor."""
    return TensorProto(dtype=DT_STRING, string_val=[text.encode()])


def plugin_metadata(description: bytes) -> SummaryMetadata:
    """Metadata that makes a tag the plugin's."""
    plugin_data = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=description)
    return SummaryMetadata(data_class=DATA_CLASS_TENSOR, plugin_data=plugin_data)


class SummaryEvent:
    """An event with a summary, filled value by value.

    Attributes:
        event: The message.
    """

    def __init__(self) -> None:
        self.event = Event()
        self._values = self.event.summary.value

    def add_tensor(
        self, tag: str, tensor: TensorProto, metadata: SummaryMetadata | None = None
    ) -> None:
        """Add a tensor under a tag.

        Args:
            tag: The tag.
            tensor: Its value.
            metadata: Describes the tag, if this is its first value.
        """
        self._values.add(tag=tag, tensor=tensor, metadata=metadata)

    def add_scalars(self, tags: Sequence[str], numbers: Array) -> None:
        """Add numbers under their tags; those that are not finite are left out."""
        for tag, number in zip(tags, numbers.tolist(), strict=True):
            if math.isfinite(number):
                self._values.add(tag=tag, simple_value=number)

    def add_value(self, tag: str) -> Summary.Value:
        """Add a tag, and return the message to fill: cheaper than to copy a filled one."""
        return self._values.add(tag=tag)


class ExponentMessages:
    """Exponent counts of many tensors as messages, without the exponents that no tensor has.

    Args:
        counts: Counts of the true values, shape ``(tensors, 279)``; NaN counts as zero.
        units: log2 of the units that the tensors are stored in, shape ``(tensors,)``.
    """

    def __init__(self, counts: Array, units: npt.NDArray[np.int64]) -> None:
        columns = np.flatnonzero((counts > 0).any(axis=0))
        start, stop = (int(columns[0]), int(columns[-1]) + 1) if columns.size else (0, 1)
        counts = counts[:, start:stop]
        present = counts > 0
        self._counts = np.where(present, counts, 0.0)
        self._units = units
        self._lowest = MIN_EXPONENT + start
        not_empty = present.any(axis=1)
        self._first = np.where(not_empty, present.argmax(axis=1), 0)
        self._stop = np.where(not_empty, stop - start - present[:, ::-1].argmax(axis=1), 0)

    def fill_tensors(self, num_sampled: Array, value_of: Callable[[int], Summary.Value]) -> None:
        """Fill one tensor per row, as ``ExponentCounts.from_vector`` reads it.

        Args:
            num_sampled: How many elements of each were looked at, shape ``(tensors,)``.
            value_of: Returns the message for a row; called where elements were looked at.
        """
        lowest = np.where(self._stop == 0, MIN_EXPONENT, self._lowest + self._first)
        heads = np.stack([np.nan_to_num(num_sampled), self._units, lowest], axis=1)
        counts, head_bytes = self._counts.astype("<f4").tobytes(), heads.astype("<f4").tobytes()
        width = self._counts.shape[1]
        for row, first, stop in self._rows(heads[:, 0] > 0):
            tensor = value_of(row).tensor
            tensor.CopyFrom(_vector_proto(3 + stop - first))
            own = counts[4 * (row * width + first) : 4 * (row * width + stop)]
            tensor.tensor_content = head_bytes[12 * row : 12 * row + 12] + own

    def fill_histograms(
        self, value_of: Callable[[int], Summary.Value], chosen: npt.NDArray[np.bool_]
    ) -> None:
        """Fill one histogram per row over log2 of the stored magnitude, a bucket per binade.

        Args:
            value_of: Returns the message for a row; called for rows that are not all zero.
            chosen: Which rows to fill one for.
        """
        units = self._units[:, None]
        centers = self._lowest + 0.5 + np.arange(self._counts.shape[1]) - units
        weighted = self._counts * centers
        moments = np.stack(
            [self._counts.sum(axis=1), weighted.sum(axis=1), (weighted * centers).sum(axis=1)],
            axis=1,
        ).tolist()
        start = (self._lowest - self._units).tolist()
        counts = self._counts.tolist()
        for row, first, stop in self._rows(chosen & (self._stop > 0)):
            histogram = value_of(row).histo
            histogram.CopyFrom(_empty_histogram(start[row] + first, start[row] + stop))
            histogram.num, histogram.sum, histogram.sum_squares = moments[row]
            histogram.bucket.extend(counts[row][first:stop])

    def _rows(self, chosen: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
        """Position, first and last column of some of the rows."""
        rows = np.flatnonzero(chosen)
        columns = (rows, self._first[rows], self._stop[rows])
        return zip(*(column.tolist() for column in columns), strict=True)


# Copying a message is cheaper than filling one number by number.
@functools.lru_cache(maxsize=4096)
def _empty_histogram(low: int, high: int) -> HistogramProto:
    return HistogramProto(min=low, max=high, bucket_limit=range(low + 1, high + 1))


@functools.lru_cache(maxsize=512)
def _vector_proto(length: int) -> TensorProto:
    return TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[{"size": length}]))


class FastRecordWriter(RecordWriter):
    """TensorBoard's writer of records, with checksums by ``google-crc32c``: the same bytes.

    Args:
        writer: The open file.
    """

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._file = writer

    def write(self, data: bytes) -> None:
        """Append one record."""
        header = struct.pack("<Q", len(data))
        self._file.write(header + _masked_crc(header) + data + _masked_crc(data))


def use_fast_checksums(file_writer: Any) -> bool:
    """Make an open event file compute its checksums with ``google-crc32c``.

    Args:
        file_writer: What ``SummaryWriter._get_file_writer()`` returns.

    Returns:
        Whether it does now.
    """
    try:
        worker = file_writer.event_writer._async_writer._worker
        current = worker._record_writer
        if type(current) is RecordWriter:
            # The file's own thread reads the attribute for every record.
            worker._record_writer = FastRecordWriter(current._writer)
    except AttributeError as error:
        _log.info("Event file: checksums stay slow, %s", error)
        return False
    return isinstance(worker._record_writer, FastRecordWriter)


def _masked_crc(data: bytes) -> bytes:
    """The checksum as the TFRecord format stores it: rotated, with a constant added."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFF_FFFF)
