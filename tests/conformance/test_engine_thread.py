"""One case of each theme with backward passes on a thread of the autograd engine."""

from __future__ import annotations

import pytest

from tests.conformance.cases import Case
from tests.conformance.harness import differences, plain, train
from tests.conformance.test_conformance import THEMES
from tests.engine_thread import backward_on_engine_thread

CASES = [theme.CASES[0] for theme in THEMES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_engine_thread_is_bit_identical(case: Case) -> None:
    expected = plain(case)
    with backward_on_engine_thread():
        record = train(case, "both")
    found = differences(record, expected)
    assert not found, "\n".join(found[:20])
    assert record.coverage.num_matmuls > 0
