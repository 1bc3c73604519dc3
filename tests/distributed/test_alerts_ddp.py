"""Alerts under DDP: what one rank has, all ranks know, and all of them act."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.distributed.alerts_ddp_run import NAN_STEP
from tests.distributed.test_ddp import NUM_RANKS, _environment

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alerts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.distributed.alerts_ddp_run", str(folder)]
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(NUM_RANKS):
            with (folder / f"{rank}.txt").open("w") as log:
                environment = _environment(rank, port)
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
        codes = [one.wait(timeout=120) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()
    outputs = [(folder / f"{rank}.txt").read_text()[-3000:] for rank in range(NUM_RANKS)]
    assert codes == [0] * NUM_RANKS, "\n".join(outputs)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.timeout(200)
def test_all_ranks_stop_at_the_same_step(ranks: list[dict[str, Any]]) -> None:
    for one in (rank["stop"] for rank in ranks):
        assert one["steps"] == NAN_STEP + 1
        (alert,) = one["alerts"]
        # The input of one rank: 4 of 2 x 4 x 6 elements of the joint batch.
        assert alert.startswith(f"step {NAN_STEP}: input.")
        assert "holds 4 NaN of 48 elements" in alert
    assert ranks[0]["stop"] == ranks[1]["stop"]


def test_all_ranks_raise(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["raise"] for rank in ranks)
    assert first == second
    assert first["raised"].startswith(f"step {NAN_STEP}: input.")


def test_no_rank_samples_alone(ranks: list[dict[str, Any]]) -> None:
    for one in (rank["between"] for rank in ranks):
        assert one["sampled"] == [0, 3, 6]
        (alert,) = one["alerts"]
        assert alert.startswith("step 6: first.weight")
