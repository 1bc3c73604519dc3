"""One training in several layouts: ``compare`` finds no difference, but finds a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_unitscale.tensorboard.divergence import Divergence, compare_runs
from tests.distributed.launch import run_ranks, runs_of_collected
from tests.distributed.layouts_run import FAULT_STEP, FAULTY, train
from tests.helpers import sampled

LAYOUTS = sampled(["ddp", "fsdp", "pipeline"], 3)
pytestmark = pytest.mark.distributed


def _runs_of(test: str, layout: str) -> list[str]:
    """The run of two processes that a test reads."""
    if layout == "accumulated":
        return []
    return [f"{layout}:fault" if test == "test_fault_in_other_layout_is_found" else layout]


@pytest.fixture(scope="module")
def compared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Divergence]:
    """Compare a run with that of one process; two processes run all of the others."""
    folder = tmp_path_factory.mktemp("layouts")
    single = train(folder, "single")
    train(folder, "accumulated")
    if runs := runs_of_collected(request, _runs_of):
        run_ranks("tests.distributed.layouts_run", folder, *runs)
    return lambda run: compare_runs(single, folder / run)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["accumulated", *LAYOUTS])
def test_equal_trainings_in_other_layouts_do_not_diverge(
    layout: str, compared: Callable[[str], Divergence]
) -> None:
    found = compared(layout)
    assert not found.diverged, found.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fault_in_other_layout_is_found(layout: str, compared: Callable[[str], Divergence]) -> None:
    found = compared(f"{layout}:fault")
    assert (found.step, found.module, found.direction) == (FAULT_STEP, FAULTY, "forward")
