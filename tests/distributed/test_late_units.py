"""Ranks agree on units of tensors that are zero at first, on some ranks for longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.late_units_run import FIRST_RUN, FIRST_TOKEN, NUM_STEPS
from tests.distributed.launch import results_of_ranks, runs_of_collected
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.distributed
Results = Callable[[str], list[dict[str, Any]]]

_METHODS = ("units", "simulated", "fp8")
_KINDS = ("ddp", "ddp:dead", "ddp:uneven", "ddp:uneven:dead", "fsdp:dead", "tensor")
# After which steps ranks meet.
_MEETINGS = (1, 2, 4, 8, 16)


def _run(kind: str, method: str) -> str:
    spread, *others = kind.split(":")
    return ":".join((spread, method, *others))


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Results of every rank. Two processes run all cases that the tests read."""
    runs = runs_of_collected(
        request, lambda test, kind, method: (_run(kind, "plain"), _run(kind, method))
    )
    module = "tests.distributed.late_units_run"
    return results_of_ranks(module, tmp_path_factory.mktemp("late"), runs)


def _starts(gauges: list[dict[str, Any]], name: str) -> int:
    """After which step a tensor has a unit."""
    return next((step for step, gauge in enumerate(gauges) if name in gauge), NUM_STEPS)


def _met(step: int) -> int:
    """After which step ranks have met that know something since a step."""
    return next((meeting for meeting in _MEETINGS if meeting >= step), NUM_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("method", _METHODS)
def test_ranks_agree_on_late_units(kind: str, method: str, results: Results) -> None:
    plain, found = results(_run(kind, "plain")), results(_run(kind, method))
    for without, ours in zip(plain, found, strict=True):
        if method == "units":
            assert_same_bits(
                (ours["losses"], ours["weights"]), (without["losses"], without["weights"])
            )
        else:
            assert not torch.equal(ours["losses"][-1], without["losses"][-1])
            torch.testing.assert_close(ours["losses"][-1], without["losses"][-1], rtol=0.05, atol=0)
    assert_same_bits(found[0]["weights"], found[1]["weights"])
    starts = {name: _starts(found[0]["gauges"], name) for name in found[0]["gauges"][-1]}
    assert starts["down.linear:input"] == 0
    assert starts["down.linear:weight"] == _met(1)
    # With tensor parallelism the gradient there belongs to no module.
    assert starts.get("up.linear", _met(1)) == _met(1)
    # With tensor parallelism no rank lacks a unit before, and all see the same tokens.
    met = FIRST_TOKEN if kind == "tensor" else _met(FIRST_TOKEN)
    assert starts["expert.linear:input"] == starts["expert.linear"] == met
    if "uneven" in kind and "dead" not in kind:
        # No unit was missing on any rank, so the ranks no longer communicated.
        assert _starts(found[1]["gauges"], "own.linear:weight") == FIRST_RUN
        assert _starts(found[1]["gauges"], "own.linear:input") == FIRST_RUN + 1
        for gauge in found[1]["gauges"]:
            for name in [name for name in gauge if name.startswith("own.")]:
                del gauge[name]
    elif "uneven" in kind:
        assert starts["own.linear:input"] == _met(FIRST_RUN)
    if method == "units" or kind != "ddp:uneven:dead":
        assert found[0]["gauges"] == found[1]["gauges"]
    # A format takes the units of what runs for the first time at once, and ranks agree on them.
    assert found[0]["gauges"][-1] == found[1]["gauges"][-1]
    for text in found[0]["texts"] + found[1]["texts"]:
        assert ("the gradient at dead.linear" in text) == ("dead" in kind)
