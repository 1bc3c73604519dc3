"""Checksums of event file records, thousands of times as fast as TensorBoard's own.

Every record of an event file ends in a CRC-32C of its bytes. TensorBoard without TensorFlow takes
it byte by byte in Python: three megabytes a second, in a thread that holds the interpreter and so
slows the training down. Here a C function does it, compiled at the first record. Without a compiler
the bytes lie in lanes of 64 that NumPy works on side by side; two neighbouring lanes become one by
what a CRC is, a linear map (Mark Adler's ``crc32_combine``).

``speed_up`` puts this into one open event file, at a private place (checked on TensorBoard 2.21);
where that place has changed, the file stays as it is, only slow.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tensorboard.summary.writer.record_writer import RecordWriter

from lightning_unitscale import native

Words = npt.NDArray[np.uint32]

_POLYNOMIAL: Final = 0x82F63B78  # of CRC-32C (Castagnoli), bits reversed
_LANE: Final = 64
_MASK_DELTA: Final = 0xA282EAD8  # of the TFRecord format
_ALL: Final = 0xFFFFFFFF
_log = logging.getLogger(__name__)


def crc32c(data: bytes) -> int:
    """CRC-32C of some bytes."""
    compiled = _compiled()
    return crc32c_by_numpy(data) if compiled is None else compiled(data)


def crc32c_by_numpy(data: bytes) -> int:
    """The same without a compiled function."""
    if len(data) < 4:
        # The initial value, which goes onto the first four bytes below, has no room here.
        register = _ALL
        for byte in data:
            register = int(_byte_table()[(register ^ byte) & 0xFF]) ^ (register >> 8)
        return register ^ _ALL
    num_lanes = 1 << max(-(-len(data) // _LANE) - 1, 0).bit_length()
    padded = np.zeros(num_lanes * _LANE, np.uint8)
    # Zeros before the data leave an empty register empty.
    start = padded.size - len(data)
    padded[start:] = np.frombuffer(data, np.uint8)
    padded[start : start + 4] ^= 0xFF
    table = _byte_table()
    registers = np.zeros(num_lanes, np.uint32)
    for column in np.ascontiguousarray(padded.reshape(num_lanes, _LANE).T):
        registers = table[(registers ^ column) & 0xFF] ^ (registers >> np.uint32(8))
    level = 0
    while registers.size > 1:
        registers = _after_zeros(_zero_tables(level), registers[0::2]) ^ registers[1::2]
        level += 1
    return int(registers[0]) ^ _ALL


class FastRecordWriter(RecordWriter):
    """TensorBoard's writer of records, with ``crc32c`` of this file: the same bytes.

    Args:
        writer: The open file.
    """

    def __init__(self, writer: Any) -> None:
        super().__init__(writer)
        self._file = writer

    def write(self, data: bytes) -> None:
        """Append one record."""
        header = struct.pack("<Q", len(data))
        self._file.write(header + _masked(header) + data + _masked(data))


def speed_up(file_writer: Any) -> bool:
    """Have an open event file take its checksums fast.

    Args:
        file_writer: What ``SummaryWriter._get_file_writer()`` returns.

    Returns:
        Whether it does now.
    """
    try:
        worker = file_writer.event_writer._async_writer._worker
        current = worker._record_writer
        if type(current) is RecordWriter:
            # The file's own thread reads the attribute anew for every record.
            worker._record_writer = FastRecordWriter(current._writer)
    except AttributeError as error:
        _log.info("Event file: checksums stay slow, %s", error)
        return False
    return isinstance(worker._record_writer, FastRecordWriter)


def _masked(data: bytes) -> bytes:
    """The checksum as the TFRecord format stores it: rotated, with a constant added."""
    crc = crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _ALL)


@functools.cache
def _compiled() -> Callable[[bytes], int] | None:
    library = native.first_that_compiles(Path(__file__).with_name("crc32c.c"), native.TARGETS)
    return None if library is None else crc32c_of(library)


def crc32c_of(library: ctypes.CDLL) -> Callable[[bytes], int]:
    """The function of the compiled C file; other threads run while it does."""
    function = library.crc32c
    function.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p)
    function.restype = ctypes.c_uint32
    table = np.ascontiguousarray(_byte_table())

    def checksum(data: bytes) -> int:
        return int(function(data, len(data), table.ctypes.data))

    return checksum


@functools.cache
def _byte_table() -> Words:
    """What one byte does to an empty register, shape ``(256,)``."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


@functools.cache
def _zero_tables(level: int) -> Words:
    """What ``64 * 2**level`` zeros do to every byte of a register, shape ``(4, 256)``."""
    if level:
        below = _zero_tables(level - 1)
        return _after_zeros(below, below)
    shifts = np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    registers = np.arange(256, dtype=np.uint32) << shifts
    for _ in range(_LANE):
        registers = _byte_table()[registers & 0xFF] ^ (registers >> np.uint32(8))
    return registers


def _after_zeros(tables: Words, registers: Words) -> Words:
    result: Words = tables[3][registers >> np.uint32(24)]
    for place in range(3):
        result = result ^ tables[place][(registers >> np.uint32(8 * place)) & 0xFF]
    return result
