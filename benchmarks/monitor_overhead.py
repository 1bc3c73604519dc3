"""Step time with the scale monitor, sampled every step and every 50, against the peer's tracking.

A monitored step includes taking the snapshot to the host and writing it to a TensorBoard event
file, but for the rows that say so: the first sixteen samples of a run are the dearest to write, and
``monitor_writer.py`` has what a long run writes. Times are CPU time of the process, the thread that
writes the file included, so that what else runs on the machine counts little. The peer is
``unit_scaling.transforms.track_scales``, which always tracks every step. The plain compiled step
stands twice, so that the table shows what is noise, and its mean is what others are compared with.

Run: ``python benchmarks/monitor_overhead.py``
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable

import torch
from demo_step import DemoLoss, demo_batch, training_step
from measure import interleaved, report
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from unit_scaling.transforms import track_scales as peer_track_scales

from lightning_unitscale.capture.attach import captured_forward
from lightning_unitscale.dynamo.capture import Executor
from lightning_unitscale.graph.nodes import is_whole_view
from lightning_unitscale.scales.layout import RowLayout
from lightning_unitscale.tensorboard.writer import ScaleWriter
from lightning_unitscale.tracking.probes import ScaleProbes


def monitored_step(
    module: nn.Module,
    batch: tuple[torch.Tensor, ...],
    sampled: bool,
    executor: Executor,
    folder: str | None,
) -> Callable[[], object]:
    """One training step with what ``ScaleMonitor`` does around it when it samples, or does not.

    Without a folder, snapshots are taken to the host and not written.
    """
    probes = ScaleProbes(RowLayout(), lambda node: not is_whole_view(node))
    monitored, captured = captured_forward(module, "monitor", probes)
    captured.owner.use_executor(executor)
    experiment = None if folder is None else SummaryWriter(folder)
    writer = None if experiment is None else ScaleWriter(experiment)
    step = training_step(monitored, batch)  # type: ignore[arg-type]
    count = 0

    def run() -> None:
        nonlocal count
        captured.owner.observe("monitor", sampled)
        step()
        snapshot = probes.take(count) if sampled else None
        if snapshot is not None and writer is not None and experiment is not None:
            writer.write(snapshot)
            # Events are written by a thread: without this, during the next variant's step.
            experiment.flush()
        count += 1

    return run


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
        steps = {
            "eager, plain": training_step(plain, batch),
            "eager, not sampled": monitored_step(plain, batch, False, "eager", None),
            "eager, every step, not written": monitored_step(plain, batch, True, "eager", None),
            "eager, every step": monitored_step(plain, batch, True, "eager", f"{folder}/0"),
            "eager, unit-scaling's track_scales": training_step(
                peer_track_scales(DemoLoss()), batch
            ),
            "Inductor, plain": training_step(torch.compile(DemoLoss()), batch),
            "Inductor, plain once more": training_step(torch.compile(DemoLoss()), batch),
            "Inductor, not sampled": monitored_step(plain, batch, False, "inductor", None),
            "Inductor, every step, not written": monitored_step(
                plain, batch, True, "inductor", None
            ),
            "Inductor, every step": monitored_step(plain, batch, True, "inductor", f"{folder}/1"),
        }
        seconds = interleaved(
            steps, rounds=options.rounds, warmup=options.warmup, clock=time.process_time
        )
    for executor in ("eager", "Inductor"):
        # A median over 50 steps would not see the one that is sampled.
        both = zip(
            seconds[f"{executor}, not sampled"], seconds[f"{executor}, every step"], strict=True
        )
        seconds[f"{executor}, every 50 steps (mean)"] = [(49 * a + b) / 50 for a, b in both]
    mean = "Inductor, plain (mean)"
    twins = zip(seconds["Inductor, plain"], seconds["Inductor, plain once more"], strict=True)
    seconds[mean] = [(a + b) / 2 for a, b in twins]
    baselines = {name: mean if name.startswith("Inductor") else "eager, plain" for name in seconds}
    report("Scale monitor, demo GPT", seconds, baselines, "monitor_overhead.json")


if __name__ == "__main__":
    main()
