"""A run that was killed goes on from its last checkpoint, to the bit, in every loop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import codes_of_ranks
from tests.helpers import assert_same_bits
from tests.loops.resumed_run import NUM_STEPS, RESUMED, SAVE_AT, train


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.filterwarnings(
    "ignore:ScaleMonitor. the Trainer has no logger", "ignore:Checkpoint directory"
)
@pytest.mark.parametrize("loop", RESUMED)
def test_a_run_that_was_killed(loop: str, tmp_path: Path) -> None:
    if loop in ("accelerate", "hugging_face"):
        pytest.importorskip({"hugging_face": "transformers"}.get(loop, loop))
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    codes, output = codes_of_ranks(
        "tests.loops.resumed_run", tmp_path / "killed", loop, num_ranks=1
    )
    assert codes == [-signal.SIGKILL], output[0][-3000:]
    torch.manual_seed(9)
    weights, unit_scale, monitor = train(loop, tmp_path / "killed", resume=True)
    expected, whole, watched = train(loop, tmp_path / "whole")
    assert_same_bits(weights, expected)
    assert unit_scale.gauge.state() == whole.gauge.state()
    # It has not looked at the steps before; what it has seen since is the same.
    assert [snapshot.step for snapshot in monitor.snapshots] == [*range(SAVE_AT, NUM_STEPS, 2)]
    for ours, other in zip(monitor.snapshots, watched.snapshots[-3:], strict=True):
        assert_same_bits(torch.as_tensor(ours.forward), torch.as_tensor(other.forward))
        assert_same_bits(torch.as_tensor(ours.backward), torch.as_tensor(other.backward))
