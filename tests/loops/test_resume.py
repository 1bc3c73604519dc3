"""A killed run resumes from its last checkpoint bit-identically, in every loop."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import codes_of_ranks, results_of_ranks
from tests.helpers import assert_same_bits
from tests.loops.resumed_run import NUM_STEPS, RESUMED, RESUMED_TOGETHER, SAVE_AT, train

pytestmark = pytest.mark.distributed
_RUN = "tests.loops.resumed_run"


@pytest.mark.slow_cases
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:ScaleMonitor. the Trainer has no logger", "ignore:Checkpoint directory"
)
@pytest.mark.parametrize("loop", RESUMED)
def test_killed_run_resumes(loop: str, tmp_path: Path) -> None:
    if loop in ("accelerate", "hugging_face"):
        pytest.importorskip({"hugging_face": "transformers"}.get(loop, loop))
    _kill(loop, tmp_path, num_ranks=1)
    torch.manual_seed(9)
    resumed = train(loop, tmp_path / loop / "killed", resume=True)
    _assert_resumed(resumed, train(loop, tmp_path / loop / "whole"))


@pytest.mark.slow
def test_killed_processes_resume(tmp_path: Path) -> None:
    for loop in RESUMED_TOGETHER:
        _kill(loop, tmp_path, num_ranks=2)
        # A folder with the parts of both.
        assert any((tmp_path / loop / "killed").glob("*/.metadata"))
    runs = [f"resumed:{loop}" for loop in RESUMED_TOGETHER]
    results = results_of_ranks(_RUN, tmp_path, runs)
    for found in itertools.chain.from_iterable(map(results, runs)):
        _assert_resumed(found["resumed"], found["whole"])


def _kill(loop: str, folder: Path, num_ranks: int) -> None:
    for name in ("killed", "whole"):
        (folder / loop / name).mkdir(parents=True)
    codes, output = codes_of_ranks(_RUN, folder, f"killed:{loop}", num_ranks=num_ranks)
    # Who is still in touch with a process that is gone already ends by an error.
    assert -signal.SIGKILL in codes, output[0][-3000:]
    assert set(codes) <= {-signal.SIGKILL, 1}


def _assert_resumed(resumed: dict[str, Any], whole: dict[str, Any]) -> None:
    assert_same_bits(resumed["weights"], whole["weights"])
    assert resumed["gauge"] == whole["gauge"]
    # It has not seen the earlier steps. From then on, both have the same values.
    sampled = [SAVE_AT, SAVE_AT + 1, *range(SAVE_AT + 2, NUM_STEPS, 2)]
    assert resumed["steps"] in (sampled, [*sampled, NUM_STEPS - 1])
    both = set(resumed["steps"]) & set(whole["steps"])
    assert set(range(SAVE_AT, NUM_STEPS, 2)) <= both
    first, second = (
        [rows for step, rows in zip(run["steps"], run["rows"], strict=True) if step in both]
        for run in (resumed, whole)
    )
    assert_same_bits(first, second)
