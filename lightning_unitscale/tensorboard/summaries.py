"""Summaries of many tensors, laid out as protocol buffers by hand.

A message object per tensor costs ten times what its bytes do. A summary's values stand one after
the other in its bytes, so those written here and those of the protobuf library may be joined. The
field numbers are those of TensorBoard's public ``summary.proto``, ``tensor.proto`` and
``histogram.proto``, which are as old as event files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_HALF, DT_STRING

from lightning_unitscale.row_layout import MIN_EXPONENT
from lightning_unitscale.tensorboard.schema import PLUGIN_NAME

Array = npt.NDArray[np.floating[Any]]
# A key is a field's number and the kind of what follows: 1 for eight bytes, 2 for a length and as
# many bytes, 5 for four bytes.
_SUMMARY_OF_EVENT: Final = b"\x2a"
_VALUE: Final = b"\x0a"
_TAG: Final = b"\x0a"
_SIMPLE_VALUE: Final = b"\x15"
_HISTOGRAM: Final = b"\x2a"
_TENSOR: Final = b"\x42"
_METADATA: Final = b"\x4a"
_BUCKET_LIMITS: Final = b"\x32"
_BUCKETS: Final = b"\x3a"
# min, max, num, sum and sum of squares of a histogram, each after its key.
_MOMENTS: Final = np.dtype(
    [(f"{name}{k}", kind) for k in range(5) for name, kind in (("key", "u1"), ("moment", "<f8"))]
)
_MOMENT_KEYS: Final = (0x09, 0x11, 0x19, 0x21, 0x29)
# Whole numbers as the doubles that limits of buckets are, and which is the first.
_FIRST_LIMIT: Final = -1024
_LIMITS: Final = np.arange(_FIRST_LIMIT, -_FIRST_LIMIT, dtype="<f8").tobytes()


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


def event_of(values: Iterator[bytes]) -> Event:
    """An event whose summary has these values."""
    return Event.FromString(_field(_SUMMARY_OF_EVENT, b"".join(values)))


def tensor_value(tag: str, array: Array, metadata: SummaryMetadata | None = None) -> bytes:
    """A tensor of floats under a tag."""
    return _value(tag, _field(_TENSOR, tensor_proto(array).SerializeToString()), metadata)


def scalar_values(tags: Sequence[str], numbers: Array) -> Iterator[bytes]:
    """Numbers under their tags; those that are not finite are left out."""
    single = numbers.astype("<f4")
    data = single.tobytes()
    for place in np.flatnonzero(np.isfinite(single)).tolist():
        yield _value(tags[place], _SIMPLE_VALUE + data[4 * place : 4 * place + 4])


class PresentCounts:
    """Exponent counts of many tensors, without those exponents that no tensor has.

    Args:
        counts: Of the tensors as they are meant, shape ``(tensors, 279)``; NaN counts as zero.
        units: log2 of the units that they are stored in, shape ``(tensors,)``.
    """

    def __init__(self, counts: Array, units: npt.NDArray[np.int64]) -> None:
        columns = np.flatnonzero((counts > 0).any(axis=0))
        start, stop = (int(columns[0]), int(columns[-1]) + 1) if columns.size else (0, 0)
        counts = counts[:, start:stop]
        present = counts > 0
        self._counts = np.where(present, counts, 0.0)
        self._units = units
        self._lowest = MIN_EXPONENT + start
        width = stop - start
        first = present.argmax(axis=1) if width else np.zeros(len(counts), dtype=np.int64)
        ends = width - present[:, ::-1].argmax(axis=1) if width else first
        self._first = np.where(present.any(axis=1), first, 0)
        self._stop = np.where(present.any(axis=1), ends, 0)

    def vectors(self, num_sampled: Array) -> Iterator[bytes | None]:
        """The fields of tensors that ``ExponentCounts.to_vector`` makes of the rows.

        Args:
            num_sampled: How many elements of each were looked at, shape ``(tensors,)``.

        Yields:
            A field for every row, ``None`` where nothing was looked at.
        """
        width = self._counts.shape[1]
        nothing = self._stop == 0
        lowest = np.where(nothing, MIN_EXPONENT, self._lowest + self._first)
        heads = np.stack([np.nan_to_num(num_sampled), self._units, lowest], axis=1)
        counts, head_data = self._counts.astype("<f4").tobytes(), heads.astype("<f4").tobytes()
        for row, (first, stop) in enumerate(self._ranges()):
            if not heads[row, 0] > 0:
                yield None
                continue
            own = counts[4 * (row * width + first) : 4 * (row * width + stop)]
            yield _vector_start(3 + stop - first) + head_data[12 * row : 12 * row + 12] + own

    def histograms(self) -> Iterator[bytes | None]:
        """The rows as fields of histograms over log2 of the stored magnitude, a bucket per binade.

        Yields:
            A field for every row, ``None`` for a row of zeros.
        """
        width = self._counts.shape[1]
        low = self._lowest + self._first - self._units
        high = self._lowest + self._stop - self._units
        centers = self._lowest + 0.5 + np.arange(width) - self._units[:, None]
        weighted = self._counts * centers
        moments = np.empty(len(self._counts), dtype=_MOMENTS)
        numbers = (low, high, self._counts.sum(axis=1), weighted.sum(axis=1))
        for place, column in enumerate((*numbers, (weighted * centers).sum(axis=1))):
            moments[f"key{place}"] = _MOMENT_KEYS[place]
            moments[f"moment{place}"] = column
        counts, moment_data = self._counts.astype("<f8", copy=False).tobytes(), moments.tobytes()
        size = _MOMENTS.itemsize
        for row, ((first, stop), limit) in enumerate(
            zip(self._ranges(), (low + 1).tolist(), strict=True)
        ):
            if not stop:
                yield None
                continue
            start, limits, buckets = _histogram_start(stop - first)
            yield b"".join(
                (
                    start,
                    moment_data[size * row : size * row + size],
                    limits,
                    _whole_numbers(limit, stop - first),
                    buckets,
                    counts[8 * (row * width + first) : 8 * (row * width + stop)],
                )
            )

    def _ranges(self) -> Iterator[tuple[int, int]]:
        return zip(self._first.tolist(), self._stop.tolist(), strict=True)


def field_values(
    tags: Sequence[str],
    fields: Iterator[bytes | None],
    metadata: Sequence[SummaryMetadata | None] | None = None,
) -> Iterator[bytes]:
    """Fields under their tags; where there is none, nothing."""
    for place, (tag, field) in enumerate(zip(tags, fields, strict=True)):
        if field is not None:
            yield _value(tag, field, None if metadata is None else metadata[place])


def _value(tag: str, field: bytes, metadata: SummaryMetadata | None = None) -> bytes:
    if metadata is not None:
        field += _field(_METADATA, metadata.SerializeToString())
    name = tag.encode()
    length = _varint(len(name))
    size = _varint(len(_TAG) + len(length) + len(name) + len(field))
    return b"".join((_VALUE, size, _TAG, length, name, field))


def _field(key: bytes, content: bytes) -> bytes:
    return key + _varint(len(content)) + content


@functools.lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    """Seven bits to a byte, the lowest first; the highest bit says that more follow."""
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


@functools.lru_cache(maxsize=512)
def _vector_start(length: int) -> bytes:
    """All of the field of a tensor of so many floats but the floats."""
    shape = TensorShapeProto(dim=[{"size": length}])
    content = bytes(4 * length)
    whole = TensorProto(dtype=DT_FLOAT, tensor_shape=shape, tensor_content=content)
    return _field(_TENSOR, whole.SerializeToString())[: -len(content)]


@functools.lru_cache(maxsize=512)
def _histogram_start(num_buckets: int) -> tuple[bytes, bytes, bytes]:
    """What goes before the moments, the limits and the counts of a histogram."""
    length = _varint(8 * num_buckets)
    size = _MOMENTS.itemsize + 2 * (1 + len(length) + 8 * num_buckets)
    return _HISTOGRAM + _varint(size), _BUCKET_LIMITS + length, _BUCKETS + length


def _whole_numbers(first: int, number: int) -> bytes:
    start = first - _FIRST_LIMIT
    if start < 0 or 8 * (start + number) > len(_LIMITS):
        return np.arange(first, first + number, dtype="<f8").tobytes()
    return _LIMITS[8 * start : 8 * (start + number)]
