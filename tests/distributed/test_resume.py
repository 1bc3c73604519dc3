"""Sharded trainings go on from a checkpoint, one file or a folder with the parts of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import results_of_ranks
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.distributed


def test_they_go_on_to_the_bit(tmp_path: Path) -> None:
    kinds = ("distributed", "whole", "lossless")
    results = results_of_ranks("tests.distributed.resume_run", tmp_path, kinds)
    for kind in kinds:
        for found in results(kind):
            assert found["is_folder"] == (kind != "whole")
            assert found["whole"]["gauge"]
            assert_same_bits(found["resumed"], found["whole"])
