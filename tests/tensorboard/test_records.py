"""Checksums are TensorBoard's own, and so are the bytes in the file."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as slow_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale import native
from lightning_unitscale.tensorboard import records
from lightning_unitscale.tensorboard.records import (
    FastRecordWriter,
    crc32c,
    crc32c_by_numpy,
    crc32c_of,
    speed_up,
)

SOURCE = Path(records.__file__).with_name("crc32c.c")
LENGTHS = [*range(0, 12), 63, 64, 65, 127, 128, 129, 1000, 4096, 20_001]


def test_a_known_value():
    # The check value of the catalogue of CRCs.
    assert crc32c(b"123456789") == 0xE3069283


# With the processor's instruction and without; of a kind of processor that this may not be.
TARGETS = {"native": ("-march=native",), "SSE4.2": ("-msse4.2",), "plain": ()}
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.fixture(params=["numpy", *(pytest.param(one, marks=needs_compiler) for one in TARGETS)])
def checksum(request, tmp_path_factory):
    if request.param == "numpy":
        return crc32c_by_numpy
    path = tmp_path_factory.mktemp("crc32c") / "library"
    try:
        return crc32c_of(native.compiled(["cc"], SOURCE, TARGETS[request.param], path))
    except subprocess.CalledProcessError:
        pytest.skip(f"{request.param}: another kind of processor")


def test_checksums(checksum):
    for length in LENGTHS:
        data = random.Random(length).randbytes(length)
        for one in (data, bytes(length), b"\xff" * length):
            assert checksum(one) == slow_crc32c(one), length


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(records, "_compiled", lambda: None)
    assert crc32c(b"123456789") == 0xE3069283


def test_records_are_the_same_bytes(tmp_path):
    contents = []
    for kind in (RecordWriter, FastRecordWriter):
        path = tmp_path / kind.__name__
        with path.open("wb") as file:
            writer = kind(file)
            for length in (0, 5, 900):
                writer.write(random.Random(length).randbytes(length))
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_an_open_file_is_sped_up_once_and_stays_readable(tmp_path):
    with SummaryWriter(str(tmp_path)) as experiment:
        experiment.add_scalar("before", 1.0, 0)
        for _ in range(2):
            assert speed_up(experiment._get_file_writer())
        for step in range(5):
            experiment.add_text("after", "x" * 300 * step, step)
    (path,) = tmp_path.iterdir()
    tags = [value.tag for one in EventFileLoader(str(path)).Load() for value in one.summary.value]
    assert tags == ["before"] + ["after/text_summary"] * 5


def test_another_writer_is_left_alone():
    assert not speed_up(object())
