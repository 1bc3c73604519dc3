"""The bubble of 1F1B: simulated, by formula, and measured on two processes.

The formula is (stages - 1) / (microbatches + stages - 1), for stages that take equally long and
with nothing lost between them. Measured is 1 - whole / (2 * pipeline): the seconds that a process
needs for all microbatches of the whole module, while the other does the same, over the seconds of
both devices. So what the pipeline itself costs counts as bubble.

It is measured with two kinds of layers. "timed" ones hold the processor for a fixed time, so that
the bubble is that of the schedule, the transfers and the runtime. "linear" ones multiply matrices,
so that it is also that of the machine: where two cores run at changing speeds, one stage waits for
the other, and no schedule can help. The slowdown is what two processes lose by running at once; far
from 1 the machine is not idle, and the figures of linear layers say little. An exchange is what two
busy processes wait for the same bytes, sent both ways, without any pipeline: 1F1B shows one in
every slot.

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --microbatches 2 4 --rounds 5   # a short one
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F

from benchmarks.measure import RESULTS, interleaved_medians, machine
from benchmarks.ranks import run_as_ranks
from lightning_unitscale.pipeline import PipelineRunner, SplitPoint, TrivialLossWrapper, pipeline
from lightning_unitscale.pipeline.schedules import simulate_1f1b

NUM_RANKS = 2
# Of a timed layer's forward pass.
MILLISECONDS = 10.0
# Rows of a microbatch.
TOKENS = 256
RESULT = "pipeline_bubble.json"


def formula(num_stages: int, num_microbatches: int) -> float:
    """The bubble of equal stages."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def simulated() -> list[dict[str, float]]:
    """The simulation beside the formula."""
    rows = []
    for num_stages in (2, 4, 8, 64):
        for num_microbatches in (num_stages, 2 * num_stages, 8 * num_stages):
            # A backward pass takes about twice as long as a forward pass.
            timeline = simulate_1f1b([1.0] * num_stages, [2.0] * num_stages, num_microbatches)
            expected = formula(num_stages, num_microbatches)
            rows.append(
                {
                    "stages": num_stages,
                    "microbatches": num_microbatches,
                    "formula": expected,
                    "simulated": timeline.bubble,
                    "difference": timeline.bubble - expected,
                }
            )
    return rows


@torch.library.custom_op("pipeline_bubble::spend", mutates_args=())
def spend(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """A copy of ``x``, made in this time."""
    end = time.perf_counter() + seconds
    copy = x.clone()
    while time.perf_counter() < end:
        pass
    return copy


@spend.register_fake
def _(x: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.seconds = inputs[1]


def _spend_again(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    # A backward pass takes about twice as long as a forward pass.
    return spend(gradient, 2 * ctx.seconds), None


spend.register_autograd(_spend_again, setup_context=_remember)


class Timed(nn.Module):
    """Adds a learned vector, and takes a fixed time forward and twice that backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift ``x`` of shape ``(*, width)``."""
        return cast(torch.Tensor, spend(x + self.by, 1e-3 * MILLISECONDS))


class Shift(nn.Module):
    """Add a learned vector, so that the gradient of the result has to be computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift ``x`` of shape ``(*, width)``."""
        return x + self.by


def measured(
    kind: str, counts: list[int], rounds: int, width: int, depth: int
) -> list[dict[str, float | str]]:
    """This rank's part of the measurement; the rows are of use on the first one."""
    torch.manual_seed(0)
    layers = [
        Timed(width) if kind == "timed" else nn.Sequential(nn.Linear(width, width), nn.GELU())
        for _ in range(depth)
    ]
    # The formula is of stages that take equally long. A first layer that reads the data has no
    # gradient of its input to compute, a third of a layer less than the others.
    module = TrivialLossWrapper(nn.Sequential(Shift(width), *layers), F.mse_loss)
    x, y = torch.randn(2, TOKENS, width)
    cut = {f"module.{1 + depth // 2}": SplitPoint.BEGINNING}
    pipe = pipeline(module, (x, y), split_spec=cut)
    steps: dict[str, Callable[[], object]] = {}
    for count in counts:
        runner = PipelineRunner(pipe, "1F1B", num_microbatches=count)
        microbatches = [[x, y]] * count

        def whole(count: int = count, ranks: int = NUM_RANKS) -> None:
            if dist.get_rank() < ranks:
                for _ in range(count):
                    (module(x, y) / count).backward()
            dist.barrier()

        def alone(count: int = count) -> None:
            whole(count, ranks=1)

        def several(
            runner: PipelineRunner = runner, microbatches: list[list[torch.Tensor]] = microbatches
        ) -> None:
            runner.step_flat(microbatches)
            dist.barrier()

        steps |= {f"alone {count}": alone, f"whole {count}": whole, f"pipeline {count}": several}
    seconds = interleaved_medians(steps, rounds=rounds, warmup=2)
    rows: list[dict[str, float | str]] = []
    for count in counts:
        at_once, both = seconds[f"whole {count}"], seconds[f"pipeline {count}"]
        bubble = 1 - at_once / (NUM_RANKS * both)
        rows.append(
            {
                "layers": kind,
                "microbatches": count,
                "whole ms": 1e3 * at_once,
                "slowdown": at_once / seconds[f"alone {count}"],
                "pipeline ms": 1e3 * both,
                "formula": formula(NUM_RANKS, count),
                "measured": bubble,
                "difference": bubble - formula(NUM_RANKS, count),
            }
        )
    return rows


def exchange(x: torch.Tensor) -> float:
    """Median seconds in which two ranks swap a tensor of this shape, when both have been busy."""
    other, received = 1 - dist.get_rank(), torch.empty_like(x)
    seconds = []
    for _ in range(40):
        dist.barrier()
        spend(x, 0.02)
        start = time.perf_counter()
        operations = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> int:
    """Measure on two processes; the first of them prints and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        return run_as_ranks(Path(__file__), NUM_RANKS, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [
        row
        for kind in ("timed", "linear")
        for row in measured(
            kind, options.microbatches, options.rounds, options.width, options.depth
        )
    ]
    exchanged = exchange(torch.randn(TOKENS, options.width))
    if dist.get_rank() == 0:
        title = f"1F1B on {NUM_RANKS} processes of one thread, {options.depth} equal layers"
        simulation = simulated()
        print(tabulate(simulation, headers="keys", floatfmt=".4f"))
        print(f"{title}\n{tabulate(rows, headers='keys', floatfmt='.3f')}")
        print(f"exchange of {TOKENS} x {options.width} values: {1e3 * exchanged:.2f} ms")
        about = machine()
        print(", ".join(f"{key} {value}" for key, value in about.items()))
        RESULTS.mkdir(exist_ok=True)
        content = {"title": title, "machine": about, "rows": rows, "simulated": simulation}
        content["exchange ms"] = 1e3 * exchanged
        (RESULTS / RESULT).write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
