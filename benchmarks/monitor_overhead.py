"""Step time with the scale monitor, sampled every step and every 50, and of ``track_scales``.

Eager steps have ``ScaleMonitor`` attached, as any loop has it; under Inductor it probes the
captured graph, as it does beside ``UnitScaleCallback(compile=True)``. A monitored step includes
taking the snapshot to the host and writing it to a TensorBoard event file, but for the rows that
say so: the first sixteen samples of a run are the dearest to write, and ``monitor_writer.py`` has
what a long run writes. Times are CPU time of the process, the thread that writes the file included,
so that what else runs on the machine counts little. The peer is
``unit_scaling.transforms.track_scales``, which always tracks every step. Plain steps stand twice,
so that the table shows what is noise, and their mean is what others are compared with.

Run: ``python benchmarks/monitor_overhead.py``
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from demo_step import NEVER, DemoLoss, WatchedStep, demo_batch, training_step
from measure import interleaved, report
from small_models import Batch, small_models
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from unit_scaling.transforms import track_scales as peer_track_scales

from lightning_unitscale.capture.graph_nodes import is_whole_view
from lightning_unitscale.capture.module_steps import captured_forward
from lightning_unitscale.monitor.probes import ScaleProbes
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.tensorboard.writer import ScaleWriter


def probed_step(
    module: nn.Module, batch: Batch, sampled: bool, folder: str | None
) -> Callable[[], object]:
    """One compiled training step with what ``ScaleMonitor`` does around it, sampled or not."""
    probes = ScaleProbes(RowLayout(), lambda node: not is_whole_view(node))
    monitored, captured = captured_forward(module, "monitor", probes)
    captured.owner.executor = "inductor"
    experiment = None if folder is None else SummaryWriter(folder)
    writer = None if experiment is None else ScaleWriter(experiment)
    step = training_step(monitored, batch)
    count = 0

    def run() -> None:
        nonlocal count
        captured.owner.observe("monitor", sampled)
        step()
        sent = probes.take(count) if sampled else None
        snapshot = None if sent is None else sent()
        if snapshot is not None and writer is not None and experiment is not None:
            writer.write(snapshot)
            experiment.flush()
        count += 1

    return run


def watched_steps(name: str, module: nn.Module, batch: Batch, folder: str) -> dict[str, Any]:
    """The variants of one model's eager step; each has a copy of its own."""

    def watched(every_n_steps: int, to: str | None = None) -> Callable[[], object]:
        return WatchedStep(copy.deepcopy(module), batch, every_n_steps, to)

    return {
        f"{name}, plain": training_step(copy.deepcopy(module), batch),
        f"{name}, plain once more": training_step(copy.deepcopy(module), batch),
        f"{name}, not sampled": watched(NEVER),
        f"{name}, every step, not written": watched(1),
        f"{name}, every step": watched(1, folder),
    }


def main() -> None:
    """Measure all variants in one process, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    # The writer's first 16 samples have all histograms and cost more than those of a long run.
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = demo_batch()
    plain = DemoLoss()
    with tempfile.TemporaryDirectory() as folder:
        steps = watched_steps("demo", plain, batch, f"{folder}/demo")
        steps["demo, unit-scaling's track_scales"] = training_step(
            peer_track_scales(DemoLoss()), batch
        )
        for name, (module, own_batch) in small_models().items():
            steps |= watched_steps(name, module, own_batch, f"{folder}/{name}")
        steps |= {
            "Inductor, plain": training_step(torch.compile(DemoLoss()), batch),
            "Inductor, plain once more": training_step(torch.compile(DemoLoss()), batch),
            "Inductor, not sampled": probed_step(plain, batch, False, None),
            "Inductor, every step, not written": probed_step(plain, batch, True, None),
            "Inductor, every step": probed_step(plain, batch, True, f"{folder}/inductor"),
        }
        seconds = interleaved(
            steps, rounds=options.rounds, warmup=options.warmup, clock=time.process_time
        )
    baselines = {}
    for model in dict.fromkeys(name.partition(",")[0] for name in steps):
        # A median over 50 steps would not see the one that is sampled.
        both = zip(seconds[f"{model}, not sampled"], seconds[f"{model}, every step"], strict=True)
        seconds[f"{model}, every 50 steps (mean)"] = [(49 * a + b) / 50 for a, b in both]
        mean = f"{model}, plain (mean)"
        twins = zip(seconds[f"{model}, plain"], seconds[f"{model}, plain once more"], strict=True)
        seconds[mean] = [(a + b) / 2 for a, b in twins]
        baselines |= {name: mean for name in seconds if name.startswith(f"{model},")}
    report("Scale monitor", seconds, baselines, "monitor_overhead.json")


if __name__ == "__main__":
    main()
