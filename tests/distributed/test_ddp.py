"""DDP on two CPU processes: the same bits with and without the callbacks, one gauge, one batch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ddp_run import KINDS
from tests.helpers import assert_same_bits

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed


def _launch(folder: Path, how: str, kind: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **{key: value for key, value in os.environ.items() if key not in {"LOCAL_RANK", "NODE_RANK"}},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    # Lightning starts the second process itself, so all of the group is ended with the first.
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.distributed.ddp_run", str(folder), how, kind],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{how}, {kind}: no end\n{output[-3000:]}")
    assert process.returncode == 0, output[-3000:]
    return [torch.load(folder / f"{how}-{rank}.pt", weights_only=True) for rank in range(2)]


_OURS = ("gauge", "snapshots", "numel")


@pytest.mark.parametrize(("kind", "how"), [*((kind, "both") for kind in KINDS), ("plain", "both, all")])
def test_the_same_with_and_without(kind: str, how: str, tmp_path: Path) -> None:
    without = _launch(tmp_path, "without", kind)
    found = _launch(tmp_path, how, kind)
    ours = [{name: one.pop(name) for name in _OURS} for one in found]
    assert_same_bits(found, without)
    assert_same_bits(found[0]["weights"], found[1]["weights"])
    if kind != "manual":
        assert found[0]["outputs"][0]["loss"] != found[1]["outputs"][0]["loss"]
    # One gauge, and the statistics of the batches of both.
    assert ours[0]["gauge"] == ours[1]["gauge"]
    assert len(ours[0]["gauge"]) >= 4
    assert_same_bits(ours[0]["snapshots"], ours[1]["snapshots"])
    accumulated = KINDS[kind].get("accumulate_grad_batches", 1)
    assert ours[0]["numel"] == 2 * accumulated * 4 * 8
