"""Start a script once for every rank of a group on this machine, with free ports."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_as_ranks(script: Path, num_ranks: int, arguments: Sequence[str]) -> int:
    """Run ``python SCRIPT ARGUMENTS`` as every rank; returns the first exit code that is not 0."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(script.resolve()), *arguments]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "WORLD_SIZE": str(num_ranks)})
        for rank in range(num_ranks)
    ]
    return next((code for one in processes if (code := one.wait())), 0)


def free_port() -> int:
    """A port that the system gives to no connection by itself.

    Otherwise a process that asks for a port before the server listens may get this one.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no port is free")
