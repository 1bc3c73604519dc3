"""Interleaved timing of step functions, a table of ratios, and a JSON file."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import truediv
from pathlib import Path

from tabulate import tabulate

RESULTS = Path(__file__).parent / "results"
# Settings of glibc for processes that are compared: huge pages, all that is freed is kept, and no
# tensor is mapped alone. Otherwise the position of a process's memory matters as much as units do.
ALLOCATOR = {
    "MALLOC_TRIM_THRESHOLD_": str(2**32 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every step function in every round.

    A machine's speed drifts over seconds and minutes. Running one step of each variant in turn
    exposes all of them to the same drift. A step pays too for what its predecessor left in the
    caches and gave back to the system, so that the order is another one in every round; and garbage
    is collected between rounds, not in some of the steps. What lived before the first round is left
    out of it, since walking all that torch has imported takes longer than many steps.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    dice = random.Random(0)
    gc.disable()
    gc.collect()
    gc.freeze()
    for round_index in range(warmup + rounds):
        for name in dice.sample(list(steps), len(steps)):
            start = clock()
            steps[name]()
            elapsed = clock() - start
            if round_index >= warmup:
                samples[name].append(elapsed)
        gc.collect()
    gc.unfreeze()
    gc.enable()
    return samples


def in_processes(script: str, names: Sequence[str], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of steps in every round, of which each runs in a process of its own.

    While the default method is attached to one module, torch's matmuls of all modules take a way
    through Python. A plain step in the same process is slower than a user's plain step.

    Args:
        script: The file whose ``main`` calls :func:`serve` if it is given ``--serve NAME``.
        names: Of the steps.
        rounds: How many times each runs, in turn.
    """
    dice = random.Random(0)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with contextlib.ExitStack() as stack:
        served = {name: stack.enter_context(_process(script, name)) for name in names}
        for _ in range(rounds):
            for name in dice.sample(list(names), len(names)):
                stdin, stdout = served[name].stdin, served[name].stdout
                assert stdin is not None and stdout is not None
                print(file=stdin, flush=True)
                samples[name].append(float(stdout.readline()))
    return samples


@contextlib.contextmanager
def _process(script: str, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, script, "--serve", name]
    pipe = subprocess.PIPE
    env = {**os.environ, **ALLOCATOR}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdout.readline()  # its step is warm
            yield process
        finally:
            process.stdin.close()


def serve(
    step: Callable[[], object], *, warmup: int, clock: Callable[[], float] = time.process_time
) -> None:
    """Run a step for each line of the standard input, and print its seconds."""
    to, sys.stdout = sys.stdout, sys.stderr
    for _ in range(warmup):
        step()
    gc.disable()
    gc.collect()
    gc.freeze()
    print(file=to, flush=True)
    for _ in sys.stdin:
        start = clock()
        step()
        print(clock() - start, file=to, flush=True)
        gc.collect()


def interleaved_medians(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int
) -> dict[str, float]:
    """Median seconds of every step function: those of rounds in which nothing else ran."""
    samples = interleaved(steps, rounds=rounds, warmup=warmup)
    return {name: statistics.median(values) for name, values in samples.items()}


def machine() -> dict[str, str]:
    """What the figures were measured on, without anything that names one host."""
    import torch

    device = f"{os.cpu_count()}-core {platform.machine()} CPU"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    # A machine with a GPU may have torch and little else.
    installed = versions_of(("torch", "lightning", "unit-scaling"))
    versions = {name: version for name, version in installed.items() if version is not None}
    threads = str(torch.get_num_threads())
    return {"device": device, "threads": threads, "python": platform.python_version(), **versions}


def versions_of(distributions: Iterable[str]) -> dict[str, str | None]:
    """The version of each distribution, ``None`` for those that are not installed."""
    return {name: _version(name) for name in distributions}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def report(
    title: str,
    seconds: Mapping[str, Sequence[float]],
    baseline_of: Mapping[str, str],
    file_name: str,
) -> None:
    """Print the table and write it with the machine's description to ``results/file_name``.

    A ratio is the median of the rounds' own ratios, in which what the machine was busy with at the
    time is on both sides: two copies of one step then differ by 0.2 %, and their medians by 1 %
    and more.

    Args:
        title: First line of the output.
        seconds: Seconds of every variant in every round.
        baseline_of: The variant that each is compared with.
        file_name: Name of the JSON file.
    """
    rows = []
    for name, found in seconds.items():
        ratios = map(truediv, found, seconds[baseline_of[name]])
        rows.append(
            {
                "variant": name,
                "ms per step": round(1e3 * statistics.median(found), 2),
                "compared with": baseline_of[name],
                "ratio": round(statistics.median(ratios), 3),
            }
        )
    print(f"{title}\n{tabulate(rows, headers='keys')}")
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    RESULTS.mkdir(exist_ok=True)
    content = {"title": title, "machine": about, "rows": rows}
    (RESULTS / file_name).write_text(json.dumps(content, indent=1) + "\n")
