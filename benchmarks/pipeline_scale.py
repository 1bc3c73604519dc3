"""Simulated pipelines on 64 to 4,096 devices: schedules, imbalance, interconnect.

The order of the work is the engine's own (torch.distributed.pipelining's); when each piece starts
follows from what it waits for. Nothing is measured. Assumed:

- A decoder of 80 layers of width 8192 (64 billion parameters without its embeddings), sequences of
  4096 tokens, and 4096 of them in every step, however many devices there are: one to a microbatch,
  or as many as leave a pipeline 128 microbatches.
- A device does 400 TFLOP/s. A layer takes as long everywhere; the backward pass takes twice the
  forward pass, half of it for the inputs and half for the weights.
- An imbalance of 1.05 means that one rank in the middle has 1.05 times the mean, the others less.
- Between two stages on different ranks goes one BF16 activation, forward and backward; it takes
  10 microseconds and its bytes over the bandwidth, beside the computation, and delays only what
  waits for it. A rank sends several at once as fast as one.
- The pipelines average their BF16 gradients when all is done, by a ring over links of the same
  bandwidth, and nothing overlaps with that.
- Memory and the optimizer are not simulated.

    python benchmarks/pipeline_scale.py
    python benchmarks/pipeline_scale.py --devices 64 --imbalances 1
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tabulate import tabulate
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from benchmarks.measure import RESULTS, machine
from lightning_unitscale.pipeline.schedules import SCHEDULES, order_of_1f1b

RESULT = "pipeline_scale.json"
LAYERS, WIDTH, LENGTH, SEQUENCES, MOST_MICROBATCHES = 80, 8192, 4096, 4096, 128
FLOPS_PER_SECOND = 400e12
LATENCY_SECONDS = 10e-6
LAYER_PARAMETERS = 12 * WIDTH**2
# Matmuls with the weights, and the two of attention.
LAYER_FORWARD_SECONDS = (2 * LAYER_PARAMETERS * LENGTH + 4 * LENGTH**2 * WIDTH) / FLOPS_PER_SECOND
BOUNDARY_BYTES = 2 * LENGTH * WIDTH

_KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}

# A piece of work: stage, microbatch, and F (forward), I (inputs), W (weights) or B (I and W).
Piece = tuple[int, int, str]


@dataclass(frozen=True)
class Simulated:
    """A step.

    Attributes:
        seconds: Its length, without the average over the pipelines.
        busy_seconds: What each rank computes.
    """

    seconds: float
    busy_seconds: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time in which they wait."""
        return 1 - sum(self.busy_seconds) / (len(self.busy_seconds) * self.seconds)


def simulate(
    orders: Sequence[Sequence[Piece]],
    forward_seconds: Sequence[float],
    sending_seconds: float,
) -> Simulated:
    """When everything is done that the ranks do in their orders.

    Args:
        orders: Each rank's work.
        forward_seconds: Of one microbatch, for each stage.
        sending_seconds: From one rank to another.
    """
    rank_of = {stage: rank for rank, order in enumerate(orders) for stage, _, _ in order}
    last = max(rank_of)
    ended: dict[Piece, float] = {}
    places, free, busy = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    total = sum(map(len, orders))
    while len(ended) < total:
        before = len(ended)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                piece = order[places[rank]]
                start = _ready(piece, ended, rank_of, last, sending_seconds)
                if start is None:
                    break
                stage, _, kind = piece
                seconds = forward_seconds[stage] * (2 if kind == "B" else 1)
                free[rank] = ended[piece] = max(free[rank], start) + seconds
                busy[rank] += seconds
                places[rank] += 1
        if len(ended) == before:
            raise RuntimeError("the ranks wait for each other: the schedule cannot run")
    return Simulated(max(free), tuple(busy))


def _ready(
    piece: Piece, ended: dict[Piece, float], rank_of: dict[int, int], last: int, sending: float
) -> float | None:
    """When what the piece waits for is there, if that is known."""
    stage, microbatch, kind = piece
    if kind == "W":
        return ended.get((stage, microbatch, "I"))
    other = stage - 1 if kind == "F" else stage + 1
    if not 0 <= other <= last:
        return 0.0 if kind == "F" else ended.get((stage, microbatch, "F"))
    kinds = "F" if kind == "F" else "IB"
    found = [ended[key] for kind in kinds if (key := (other, microbatch, kind)) in ended]
    if not found:
        return None
    return found[0] + (sending if rank_of[other] != rank_of[stage] else 0.0)


def orders_of(schedule: str, num_ranks: int, num_microbatches: int) -> list[list[Piece]]:
    """What the engine has every rank do, in order."""
    if schedule == "1F1B":
        # Which the engine lists wrongly (torch 2.13: the last rank begins with a later microbatch
        # than it is sent).
        return [
            [
                (stage, microbatch, "F" if forward else "B")
                for microbatch, forward in order_of_1f1b(stage, num_ranks, num_microbatches)
            ]
            for stage in range(num_ranks)
        ]
    orders: list[list[Piece]] = []
    for actions in get_schedule_ops(schedule, num_ranks, num_microbatches):
        order: list[Piece] = []
        for action in actions:
            for part in () if action is None else (action.sub_actions or (action,)):
                kind = _KINDS.get(part.computation_type.name)
                if kind is not None:
                    order.append((part.stage_index, part.microbatch_index, kind))
        orders.append(order)
    return orders


def _forward_seconds(
    schedule: str, num_ranks: int, num_stages: int, imbalance: float
) -> list[float]:
    """Of each stage, with one rank that has more to do."""
    mean = LAYERS * LAYER_FORWARD_SECONDS / num_stages
    others = (num_ranks - imbalance) / (num_ranks - 1)
    slow = num_ranks // 2
    rank_of = SCHEDULES[schedule].rank_of
    return [
        mean * (imbalance if rank_of(stage, num_ranks) == slow else others)
        for stage in range(num_stages)
    ]


def rows_of(
    devices: int, num_ranks: int, imbalances: list[float], bandwidths: list[float]
) -> list[dict[str, Any]]:
    """All schedules on one division of the devices."""
    pipelines = devices // num_ranks
    num_microbatches = min(SEQUENCES // pipelines, MOST_MICROBATCHES)
    together = SEQUENCES // pipelines // num_microbatches
    rows = []
    for name, schedule in SCHEDULES.items():
        num_stages = num_ranks * (1 if schedule.placement == "single" else 2)
        try:
            schedule.check(num_stages, num_ranks, num_microbatches)
        except ValueError:
            continue  # too few microbatches for it
        orders = orders_of(name, num_ranks, num_microbatches)
        for imbalance in imbalances:
            seconds = [
                together * seconds
                for seconds in _forward_seconds(name, num_ranks, num_stages, imbalance)
            ]
            for bandwidth in bandwidths:
                sending = LATENCY_SECONDS + together * BOUNDARY_BYTES / bandwidth
                found = simulate(orders, seconds, sending)
                size = 2 * LAYERS * LAYER_PARAMETERS / num_ranks
                ring = 2 * (pipelines - 1) / pipelines * size / bandwidth
                ideal = 3 * LAYERS * LAYER_FORWARD_SECONDS * SEQUENCES / devices
                rows.append(
                    {
                        "devices": devices,
                        "ranks": num_ranks,
                        "pipelines": pipelines,
                        "microbatches": num_microbatches,
                        "schedule": name,
                        "imbalance": imbalance,
                        "GB/s": bandwidth / 1e9,
                        "bubble": found.bubble,
                        "step s": found.seconds + ring,
                        "of it averaging s": ring,
                        "efficiency": ideal / (found.seconds + ring),
                    }
                )
    return rows


def main() -> int:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--imbalances", type=float, nargs="+", default=[1.0, 1.05, 1.2])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[450.0, 50.0, 12.5])
    options = parser.parse_args()
    rows = []
    for devices in options.devices:
        for num_ranks in options.ranks:
            bandwidths = [1e9 * gigabytes for gigabytes in options.gigabytes]
            rows += rows_of(devices, num_ranks, options.imbalances, bandwidths)
    print(__doc__)
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    RESULTS.mkdir(exist_ok=True)
    content = {
        "title": __doc__.splitlines()[0],
        "assumptions": __doc__.split("Assumed:")[1].split("    python")[0].strip(),
        "machine": machine(),
        "rows": rows,
    }
    (RESULTS / RESULT).write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
