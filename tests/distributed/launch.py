"""Starts one process for each rank on this machine, waits for all, and shows their output."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def run_ranks(
    module: str, folder: Path, *arguments: str, num_ranks: int = 2, timeout: float = 240
) -> None:
    """Run ``python -m MODULE FOLDER ARGUMENTS`` as every rank of one group.

    Raises:
        AssertionError: If one of them fails, with the end of what each of them printed.
        subprocess.TimeoutExpired: If they take longer than ``timeout`` seconds.
    """
    codes, outputs = codes_of_ranks(
        module, folder, *arguments, num_ranks=num_ranks, timeout=timeout
    )
    assert codes == [0] * num_ranks, "\n".join(one[-3000:] for one in outputs)


def codes_of_ranks(
    module: str, folder: Path, *arguments: str, num_ranks: int = 2, timeout: float = 240
) -> tuple[list[int], list[str]]:
    """As :func:`run_ranks`; returns each rank's exit code and what it printed.

    Raises:
        subprocess.TimeoutExpired: If they take longer than ``timeout`` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, str(folder), *arguments]
    processes = []
    try:
        for rank in range(num_ranks):
            with (folder / f"{rank}.txt").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=_environment(rank, num_ranks, port),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        codes = [one.wait(timeout=timeout) for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return codes, [(folder / f"{rank}.txt").read_text() for rank in range(num_ranks)]


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def quiet_rank() -> None:
    """What every rank does first: nothing of Lightning's below errors, no warnings, one thread."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
