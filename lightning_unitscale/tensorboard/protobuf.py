"""Create the messages of an event file, and speed up the checksums of its records.

Messages are TensorBoard's own protobuf classes. Numbers are packed bytes (``tensor_content``) if
the message has such a field.

Every record of an event file ends in a CRC-32C of its bytes. TensorBoard without TensorFlow
computes it byte by byte in Python at 3 MB/s, in a thread that holds the interpreter lock and slows
training down. ``use_fast_checksums`` makes an open event file use ``google-crc32c``. It replaces a
private attribute (checked on TensorBoard 2.21). If that is missing, checksums stay slow.
"""

from __future__ import annotations

import logging
import math
import struct
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt
from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, HistogramProto, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_HALF, DT_STRING
from tensorboard.compat.proto.versions_pb2 import VersionDef
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_unitscale.scales.alerts import op_of
from lightning_unitscale.scales.layout import DIRECTIONS, MIN_EXPONENT
from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.tensorboard.schema import PLUGIN_NAME, ExponentCounts

Array = npt.NDArray[np.floating[Any]]
_CRC_MASK: Final = 0xA282EAD8  # constant of the TFRecord format
# TensorBoard has good colors only for a few devices, fewer than there are powers of two.
_POWERS_PER_COLOR: Final = 4
_log = logging.getLogger(__name__)


def fill_tensor(tensor: TensorProto, array: Array) -> None:
    """Fill a message with a tensor, in half precision or else in single."""
    half = array.dtype == np.float16
    tensor.dtype = DT_HALF if half else DT_FLOAT
    for size in array.shape:
        tensor.tensor_shape.dim.add().size = size
    # Event files are little-endian on every machine.
    tensor.tensor_content = array.astype("<f2" if half else "<f4", copy=False).tobytes()


def text_proto(text: str) -> TensorProto:
    """Return a text as a tensor message."""
    return TensorProto(dtype=DT_STRING, string_val=[text.encode()])


def plugin_metadata(description: bytes) -> SummaryMetadata:
    """Return metadata that assigns a tag to the plugin."""
    plugin_data = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=description)
    return SummaryMetadata(data_class=DATA_CLASS_TENSOR, plugin_data=plugin_data)


def histogram_proto(exponents: ExponentCounts) -> HistogramProto | None:
    """Return counts over log2 of the stored magnitude, per binade; ``None`` if all are zero."""
    (present,) = np.nonzero(exponents.counts > 0)
    if not present.size:
        return None
    counts = exponents.counts[present[0] : present[-1] + 1]
    low = MIN_EXPONENT + int(present[0]) - exponents.log2_unit
    limits = low + 1 + np.arange(counts.size)
    return HistogramProto(
        min=low,
        max=limits[-1],
        num=counts.sum(),
        sum=counts @ (limits - 0.5),
        sum_squares=counts @ (limits - 0.5) ** 2,
        bucket_limit=limits.tolist(),
        bucket=counts.tolist(),
    )


def annotated_graph(snapshot: ScaleSnapshot) -> GraphDef:
    """Return the tensors of a snapshot as a graph, with their inputs and scales."""
    # Module paths become the nesting of nodes. A click on a node shows its true and stored RMS
    # among its attributes. A node's device can be any text. Here it is the power of two near its
    # RMS, in steps of four, so "Color by: Device" colors by scale.
    paths: dict[str, str] = {}
    taken: set[str] = set()
    named = list(zip(snapshot.names, snapshot.modules, strict=True))
    for name, module in named:
        path = node_path(name, module)
        paths[name] = path if path not in taken else f"{path}_of_{len(paths)}"
        taken.add(paths[name])
    scales = {
        direction: [
            snapshot.log2_rms(direction, stored=stored).tolist() for stored in (False, True)
        ]
        for direction in DIRECTIONS
    }
    nodes = []
    for index, (name, module) in enumerate(named):
        attributes = {"step": AttrValue(i=snapshot.step)}
        for direction, (true, stored) in scales.items():
            text = _scale_text(true[index], stored[index])
            attributes[direction] = AttrValue(s=text.encode())
        nodes.append(
            NodeDef(
                name=paths[name],
                op=op_of(name, module),
                input=[paths[source] for source in snapshot.inputs[index] if source in paths],
                device=_band(scales["forward"][1][index]),
                attr=attributes,
            )
        )
    return GraphDef(node=nodes, versions=VersionDef(producer=22))


def node_path(name: str, module: str) -> str:
    """Return a tensor's name with slashes between modules, as the dashboard nests nodes."""
    own = name.removeprefix(f"{module}.") if module else name
    path = f"{module.replace('.', '/')}/{own}" if module else own
    # TensorBoard allows only these characters in a node's name.
    cleaned = "".join(char if char.isalnum() or char in "_./-" else "_" for char in path)
    return cleaned if cleaned[:1].isalnum() else f"n{cleaned}"


def _scale_text(true: float, stored: float) -> str:
    """Return both scales of a tensor in one line, since the panel of a node is narrow."""
    if math.isnan(stored):
        return "not measured"
    if math.isinf(stored):
        return "all zero"
    text = f"RMS 2^{true:z.2f}"
    return text if true == stored else f"{text}, stored 2^{stored:z.2f}"


def _band(value: float) -> str:
    if not math.isfinite(value):
        return ""
    power = _POWERS_PER_COLOR * round(value / _POWERS_PER_COLOR)
    return f"RMS near 2^{power}"


class FastRecordWriter(RecordWriter):
    """A version of TensorBoard's record writer that uses ``google-crc32c`` for the same bytes."""

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._file = writer

    def write(self, data: bytes) -> None:
        """Append one record."""
        header = struct.pack("<Q", len(data))
        self._file.write(header + _masked_crc(header) + data + _masked_crc(data))


def use_fast_checksums(file_writer: Any) -> bool:
    """Make an open event file compute its checksums with ``google-crc32c``."""
    try:
        worker = file_writer.event_writer._async_writer._worker
        current = worker._record_writer
        if type(current) is RecordWriter:
            # The file's thread reads the attribute for every record.
            worker._record_writer = FastRecordWriter(current._writer)
    except AttributeError as error:
        _log.info("Event file: checksums are computed in Python, which is slow: %s", error)
        return False
    return isinstance(worker._record_writer, FastRecordWriter)


def _masked_crc(data: bytes) -> bytes:
    """Return the checksum in TFRecord form: rotated, with a constant added."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _CRC_MASK) & 0xFFFF_FFFF)
