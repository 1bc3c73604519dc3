"""Checksums are TensorBoard's own, and so are the bytes in the file."""

import random

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as slow_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.tensorboard.records import FastRecordWriter, crc32c, speed_up

LENGTHS = [*range(0, 12), 63, 64, 65, 127, 128, 129, 1000, 4096, 20_001]


def test_a_known_value():
    # The check value of the catalogue of CRCs.
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("length", LENGTHS)
def test_checksums(length):
    data = random.Random(length).randbytes(length)
    assert crc32c(data) == slow_crc32c(data)
    zeros, ones = bytes(length), b"\xff" * length
    assert (crc32c(zeros), crc32c(ones)) == (slow_crc32c(zeros), slow_crc32c(ones))


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
