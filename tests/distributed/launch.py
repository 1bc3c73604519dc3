"""Runs one process for each rank on this machine, waits for all, and shows their output.

The processes are forked from a server that has imported torch, Lightning and this package once for
all tests: an import takes seconds, and most ranks compute for no longer.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.ranks import free_port
from tests.process import engine_thread_if_asked

ROOT = Path(__file__).parents[2]
# None of them may start a thread: a process that has threads cannot be forked.
_PRELOADED = [
    "tests.process",
    "lightning.pytorch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "examples.gpt",
    "lightning_unitscale",
    "lightning_unitscale.callbacks",
    "lightning_unitscale.pipeline",
    "lightning_unitscale.remat",
    "lightning_unitscale.strategies",
    "tests.loops.every_loop",
    "tests.distributed.preloaded",
]
Run = TypeVar("Run", bound=Hashable)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(_PRELOADED)


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


def results_of_ranks(
    module: str, folder: Path, runs: Sequence[str], num_ranks: int = 2
) -> Callable[[str], list[dict[str, Any]]]:
    """Run ``python -m MODULE FOLDER RUN ...`` as every rank, which saves ``FOLDER/RUN-RANK.pt``.

    Returns:
        What every rank has saved of a run.
    """
    if runs:
        run_ranks(module, folder, *runs, num_ranks=num_ranks)

    def of(run: str) -> list[dict[str, Any]]:
        paths = [folder / f"{run}-{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(path, weights_only=True) for path in paths]

    return of


def runs_of_collected(
    request: pytest.FixtureRequest, runs_of: Callable[..., Iterable[Run]]
) -> list[Run]:
    """Return the runs that the collected tests of a file read, each once.

    The first tier needs few of them, and ``--cases`` leaves some out.

    Args:
        request: Of a fixture with the scope of a module.
        runs_of: Called with the name of a test function and its parameters.
    """
    items = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    runs = (
        runs_of(item.originalname, **(item.callspec.params if hasattr(item, "callspec") else {}))
        for item in items
    )
    return list(dict.fromkeys(itertools.chain.from_iterable(runs)))


def codes_of_ranks(
    module: str, folder: Path, *arguments: str, num_ranks: int = 2, timeout: float = 240
) -> tuple[list[int], list[str]]:
    """Run ranks as :func:`run_ranks`, and return each rank's exit code and output.

    Raises:
        subprocess.TimeoutExpired: If they take longer than ``timeout`` seconds.
    """
    port = free_port()
    logs = [folder / f"{rank}.txt" for rank in range(num_ranks)]
    processes = [
        _FORKS.Process(
            target=_run_rank,
            args=(module, [str(folder), *arguments], log, _environment(rank, num_ranks, port)),
        )
        for rank, log in enumerate(logs)
    ]
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(module, timeout)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    codes = [process.exitcode for process in processes]
    return [code for code in codes if code is not None], [log.read_text() for log in logs]


def _run_rank(
    module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> None:
    """Runs the module as ``python -m`` does, in a process of its own."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.chdir(log.parent)
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    with engine_thread_if_asked():
        runpy.run_module(module, run_name="__main__", alter_sys=True)


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
    """Set up a rank: show only Lightning's errors, no warnings, and use one thread."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def run_all(train: Callable[..., None], folder: str, *runs: str) -> None:
    """Train each run ``KIND:HOW``, one after the other, in one process group."""
    quiet_rank()
    for one in runs:
        train(Path(folder), *one.split(":"))


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
