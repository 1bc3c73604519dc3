"""A script that starts itself once for every rank of one group on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run_as_ranks(script: Path, num_ranks: int, arguments: Sequence[str]) -> int:
    """Run ``python SCRIPT ARGUMENTS`` as every rank; returns the first exit code that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(script.resolve()), *arguments]
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "WORLD_SIZE": str(num_ranks)})
        for rank in range(num_ranks)
    ]
    return next((code for one in processes if (code := one.wait())), 0)
