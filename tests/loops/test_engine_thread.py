"""Every loop with backward passes on a thread of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_thread import backward_on_engine_thread
from tests.helpers import assert_same_bits
from tests.loops import zoo
from tests.loops.every_loop import LOOPS, Outcome
from tests.loops.methods import METHODS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:FutureWarning",
    "ignore:.*:DeprecationWarning",
    "ignore:ScaleMonitor. the Trainer has no logger",
)


def train(loop: str, method: str, folder: Path) -> Outcome:
    return LOOPS[loop](zoo.new("Tied"), zoo.batches("Tied", 8), METHODS[method](), folder)


@pytest.mark.slow_cases(6)
@pytest.mark.parametrize("method", ["both", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", LOOPS)
def test_engine_thread_is_bit_identical(loop: str, method: str, tmp_path: Path) -> None:
    expected = train(loop, method, tmp_path / "here")
    with backward_on_engine_thread():
        found = train(loop, method, tmp_path / "there")
    assert_same_bits(found, expected)
