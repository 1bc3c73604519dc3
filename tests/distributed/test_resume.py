"""Sharded trainings resume from a checkpoint, whole or distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank. Two processes run all cases that the tests read."""
    runs = runs_of_collected(request, lambda test, kind: [kind])
    return results_of_ranks("tests.distributed.resume_run", tmp_path_factory.mktemp("resume"), runs)


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["distributed", "whole", "lossless"])
def test_resumed_sharded_training_is_bit_identical(kind: str, results: Results) -> None:
    for found in results(kind):
        assert found["is_folder"] == (kind != "whole")
        assert found["whole"]["gauge"]
        assert_same_bits(found["resumed"], found["whole"])
