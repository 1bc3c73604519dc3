"""Cost of a sampled step by number of tensors and elements, and its memory.

A chain of elementwise operations, so that every tensor has the same size: 10 or 1,000 tensors, with
few or many elements. Times are CPU time of the thread that trains, eager, forward and backward,
one sample every step: what else runs on the machine then counts little. A plane through all
measurements gives the cost per tensor and per element.

Run: ``python benchmarks/monitor_growth.py``
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from demo_step import DemoLoss, demo_batch, training_step
from measure import RESULTS, machine
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_unitscale.capture.graph_nodes import is_whole_view
from lightning_unitscale.capture.module_steps import captured_forward
from lightning_unitscale.monitor.probes import ScaleProbes
from lightning_unitscale.scales.layout import DIRECTIONS, RowLayout

# (tensors, elements of each)
CASES = ((10, 1_000), (10, 100_000), (10, 1_000_000), (1_000, 1_000), (1_000, 10_000))


class Chain(nn.Module):
    """One tensor after the other, all of one size."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.num_tensors = num_tensors

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_tensors - 2):
            x = torch.sin(x)
        return x.sum()


def probed(module: nn.Module) -> tuple[nn.Module, Callable[[], None], ScaleProbes]:
    """The module with probes, what has the next step sampled, and the probes."""
    probes = ScaleProbes(RowLayout(), lambda node: not is_whole_view(node))
    monitored, captured = captured_forward(module, "monitor", probes)
    captured.owner.executor = "eager"
    return monitored, lambda: captured.owner.observe("monitor", True), probes


def extra_seconds(num_tensors: int, numel: int, rounds: int) -> tuple[float, int, int]:
    """Seconds that a sample adds to a step, and how many rows and elements it has."""
    plain = Chain(num_tensors)
    monitored, sample, probes = probed(plain)
    x = torch.randn(numel, requires_grad=True)
    times: dict[str, list[float]] = {"plain": [], "sampled": []}
    rows = elements = 0
    for round_index in range(rounds + 2):
        for name in times:
            start = time.thread_time()
            if name == "plain":
                plain(x).backward()
            else:
                sample()
                monitored(x).backward()
                sent = probes.take(round_index)
                assert sent is not None
                snapshot = sent()
            if round_index > 1:
                times[name].append(time.thread_time() - start)
    counts = np.stack([snapshot.column("numel", direction) for direction in DIRECTIONS])
    rows, elements = int((counts > 0).sum()), int(np.nansum(counts))
    return min(times["sampled"]) - min(times["plain"]), rows, elements


def peak_bytes(step: Callable[[], object]) -> int:
    """Most bytes of tensors that a step holds at once, beyond those that were there before.

    As torch's allocator counts them: what the process has resident varies by tens of megabytes.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def seconds_to_read(numel: int, rounds: int = 5) -> float:
    """Seconds to read so many numbers from memory once, which no separate kernel can beat."""
    numbers = torch.randn(numel)
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        numbers.sum()
        times.append(time.thread_time() - start)
    return min(times)


def demo_elements() -> tuple[int, float]:
    """Elements that a sample of the demo's GPT reads, and seconds of its step without it."""
    module, batch = DemoLoss(), demo_batch()
    monitored, sample, probes = probed(module)
    sample()
    training_step(monitored, batch)()
    sent = probes.take(0)
    assert sent is not None
    snapshot = sent()
    plain, times = training_step(module, batch), []
    for _ in range(10):
        start = time.thread_time()
        plain()
        times.append(time.thread_time() - start)
    counts = [np.nansum(snapshot.column("numel", direction)) for direction in DIRECTIONS]
    return int(sum(counts)), min(times)


def extra_memory() -> tuple[float, float]:
    """Bytes that a step of the demo's GPT holds at its peak, and what a sample adds to them."""
    module, batch = DemoLoss(), demo_batch()
    monitored, sample, probes = probed(module)
    plain_step = training_step(module, batch)
    monitored_step = training_step(monitored, batch)

    def sampled_step() -> None:
        sample()
        monitored_step()
        if (sent := probes.take(0)) is not None:
            sent()

    for _ in range(2):
        plain_step()
        sampled_step()
    plain, sampled = peak_bytes(plain_step), peak_bytes(sampled_step)
    return float(plain), float(sampled - plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    memory, extra = extra_memory()
    demo_numel, step = demo_elements()
    cases = []
    for num_tensors, numel in CASES:
        seconds, rows, elements = extra_seconds(num_tensors, numel, options.rounds)
        cases.append((num_tensors, numel, rows, elements, seconds))
    table = np.array(cases)
    # Relative errors count: small cases show the cost per tensor, large ones per element.
    weights = 1 / table[:, 4]
    design = np.stack([table[:, 2], table[:, 3]], axis=1) * weights[:, None]
    (per_row, per_element), *_ = np.linalg.lstsq(design, np.ones(len(table)), rcond=None)
    rows = [
        {
            "tensors": case[0],
            "elements of each": case[1],
            "statistics rows": case[2],
            "extra ms per sample": round(1e3 * case[4], 3),
            "us per row": round(1e6 * case[4] / case[2], 2),
            "ns per element": round(1e9 * case[4] / case[3], 3),
            "fitted ms": round(1e3 * (per_row * case[2] + per_element * case[3]), 3),
        }
        for case in cases
    ]
    print("Scale monitor: cost of a sample by tensors and elements")
    print(tabulate(rows, headers="keys"))
    summary = {
        "microseconds_per_row": 1e6 * per_row,
        "nanoseconds_per_element": 1e9 * per_element,
        "demo_elements_per_sample": demo_numel,
        "demo_step_seconds": step,
        "seconds_to_read_the_elements_once": (read := seconds_to_read(demo_numel)),
        "reading_as_share_of_the_step": read / step,
        "demo_step_peak_bytes": memory,
        "extra_bytes_of_a_sample": extra,
        "extra_memory_ratio": extra / memory,
    }
    print(tabulate([(key, f"{value:.4g}") for key, value in summary.items()]))
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    content = {"title": "Scale monitor, growth", "machine": about, "rows": rows, **summary}
    (RESULTS / "monitor_growth.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
