"""Protocol buffers of summaries, for many tensors at once.

What can be done for all tensors together is: a call of NumPy per tensor costs ten times what it
computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_HALF, DT_STRING

from lightning_unitscale.row_layout import MIN_EXPONENT, NUM_EXPONENTS
from lightning_unitscale.tensorboard.schema import PLUGIN_NAME

Array = npt.NDArray[np.floating[Any]]
# Middle of every binade on the axis of log2.
_CENTERS: Final = MIN_EXPONENT + 0.5 + np.arange(NUM_EXPONENTS)


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


def present_ranges(counts: Array) -> list[tuple[int, int]]:
    """Where the counts of every row begin and end, zeros left out; ``(0, 0)`` for a row of zeros.

    Args:
        counts: Shape ``(rows, bins)``.
    """
    present = counts > 0
    first = present.argmax(axis=1)
    stop = counts.shape[1] - present[:, ::-1].argmax(axis=1)
    stop = np.where(present.any(axis=1), stop, 0)
    return list(zip(first.tolist(), stop.tolist(), strict=True))


def exponent_histograms(
    counts: Array, units: npt.NDArray[np.int64]
) -> Iterator[HistogramProto | None]:
    """Exponent counts as histograms over log2 of the magnitude, one bucket per binade.

    Args:
        counts: Of the tensors as they are meant, shape ``(tensors, 279)``.
        units: log2 of the units that they are stored in, shape ``(tensors,)``; a histogram is of
            the stored tensor.

    Yields:
        A histogram for every row, ``None`` for a row of zeros.
    """
    centers = _CENTERS - units[:, None]
    weighted = counts * centers
    numbers = counts.sum(axis=1).tolist()
    sums, squares = weighted.sum(axis=1).tolist(), (weighted * centers).sum(axis=1).tolist()
    rows = zip(present_ranges(counts), counts, units.tolist(), numbers, sums, squares, strict=True)
    for (first, stop), row, unit, number, total, square in rows:
        if not stop:
            yield None
            continue
        low = MIN_EXPONENT + first - unit
        high = MIN_EXPONENT + stop - unit
        yield HistogramProto(
            min=low,
            max=high,
            num=number,
            sum=total,
            sum_squares=square,
            bucket_limit=range(low + 1, high + 1),
            bucket=row[first:stop].tolist(),
        )
