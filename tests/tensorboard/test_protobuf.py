"""Records with fast checksums are the bytes that TensorBoard writes itself."""

import random

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.tensorboard.protobuf import FastRecordWriter, use_fast_checksums


@pytest.mark.parametrize("length", [*range(12), 63, 64, 65, 1000, 20_001])
def test_fast_records_have_same_bytes(tmp_path, length):
    data = random.Random(length).randbytes(length)
    contents = []
    for kind in (RecordWriter, FastRecordWriter):
        path = tmp_path / kind.__name__
        with path.open("wb") as file:
            writer = kind(file)
            for record in (data, bytes(length), b"\xff" * length):
                writer.write(record)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_fast_checksums_in_open_file_stay_readable(tmp_path):
    with SummaryWriter(str(tmp_path)) as experiment:
        experiment.add_scalar("before", 1.0, 0)
        for _ in range(2):
            assert use_fast_checksums(experiment._get_file_writer())
        for step in range(5):
            experiment.add_text("after", "x" * 300 * step, step)
    (path,) = tmp_path.iterdir()
    events = EventFileLoader(str(path)).Load()
    tags = [value.tag for event in events for value in event.summary.value]
    assert tags == ["before"] + ["after/text_summary"] * 5


def test_other_writers_are_not_changed():
    assert not use_fast_checksums(object())
