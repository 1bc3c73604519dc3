"""Cost of writing a long run: 10,000 sampled steps of 300 tensors into one event file.

The writer's share is its CPU time, the thread that writes the file included, over the time of a
training step of the demo's GPT on the same machine, one thread, every step sampled. Then
TensorBoard opens the file.

Run: ``python benchmarks/monitor_writer.py``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from dashboard import LAYOUT, OPS, scaled_rows, wait_until_loaded
from demo_step import DemoLoss, demo_batch, training_step
from measure import RESULTS, machine
from ranks import free_port
from tabulate import tabulate
from torch.utils.tensorboard import SummaryWriter

from lightning_unitscale.scales.snapshot import ScaleSnapshot
from lightning_unitscale.scales.statistics import statistics_row
from lightning_unitscale.tensorboard.writer import ScaleWriter

_DIFFERENT = 20


def snapshots(num_tensors: int, num_steps: int) -> Iterator[ScaleSnapshot]:
    """Snapshots that repeat a few different ones: to make them is no part of the measurement."""
    names = tuple(f"blocks.{k // len(OPS)}.{OPS[k % len(OPS)]}" for k in range(num_tensors))
    row = statistics_row(torch.randn(65536), LAYOUT).double().numpy()
    generator = np.random.default_rng(0)
    base = generator.normal(-3, 3, num_tensors)
    different = []
    for _ in range(_DIFFERENT):
        noise = generator.normal(0, 0.5, (2, num_tensors))
        forward, backward = scaled_rows(row, base + noise[0]), scaled_rows(row, noise[1] - 8)
        different.append(ScaleSnapshot(0, names, forward, backward, LAYOUT))
    for step in range(num_steps):
        yield dataclasses.replace(different[step % _DIFFERENT], step=step)


def write_run(folder: Path, num_tensors: int, num_steps: int) -> tuple[float, float]:
    """Writes the run; returns seconds in calls of the writer, and of CPU time that it took."""
    inside = 0.0
    series = list(snapshots(num_tensors, num_steps))
    before = time.process_time()
    with SummaryWriter(str(folder)) as experiment:
        writer = ScaleWriter(experiment)
        for snapshot in series:
            start = time.perf_counter()
            writer.write(snapshot)
            inside += time.perf_counter() - start
        writer.finish(series[-1])
    return inside, time.process_time() - before


def seconds_to_open(logdir: Path, last_step: int) -> float:
    """Seconds from TensorBoard's start until the Scales dashboard has the run's last step."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    start = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--port", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        wait_until_loaded(f"http://localhost:{port}", last_step)
        return time.perf_counter() - start
    finally:
        server.terminate()
        server.wait()


def step_seconds(rounds: int = 15) -> float:
    """CPU seconds of a step without the monitor, the fastest: the share is then the largest."""
    step = training_step(DemoLoss(), demo_batch())
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = step_seconds()
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "logs/run"
        inside, cpu = write_run(run, options.tensors, options.steps)
        size = sum(path.stat().st_size for path in run.iterdir())
        opened = seconds_to_open(run.parent, options.steps - 1)
    measured = {
        "event_file_bytes": size,
        "writer_call_seconds_per_step": inside / options.steps,
        "writer_cpu_seconds_per_step": cpu / options.steps,
        "plain_step_seconds": step,
        "share_of_step": cpu / options.steps / step,
        "seconds_until_tensorboard_has_the_last_step": opened,
    }
    title = f"Scale monitor's writer: {options.steps} sampled steps, {options.tensors} tensors"
    print(title)
    print(tabulate([(key, f"{value:.4g}") for key, value in measured.items()]))
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    content = {"title": title, "machine": about, **measured}
    (RESULTS / "monitor_writer.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
