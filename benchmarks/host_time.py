"""Host time of the default method for each matmul, in a step whose arithmetic takes next to none.

The step is one of a GPT of width 16 with 8 layers. Its plain time is taken off, and what is left is
divided by the number of matmuls. Beside it stands a plain linear layer of width 16 that is summed
and differentiated. Seconds are those of this process on a CPU, so that other processes count for
little.

Run: ``python benchmarks/host_time.py``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from demo_step import DemoLoss, demo_batch, training_step
from measure import RESULTS, interleaved, machine
from tabulate import tabulate

from lightning_unitscale import UnitScaleCallback, attach

WIDTH = 16
REPEATS = 20


def _linear() -> None:
    for _ in range(REPEATS):
        F.linear(_INPUT, _WEIGHT).sum().backward()


_INPUT, _WEIGHT = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)


def main() -> None:
    """Measure in turn, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batch = demo_batch(2, 8)
    callback = UnitScaleCallback()
    scaled = DemoLoss(WIDTH, depth=8, num_heads=2)
    with attach(scaled, callbacks=callback):
        steps = {
            "plain": training_step(DemoLoss(WIDTH, depth=8, num_heads=2), batch),
            "default": training_step(scaled, batch),
            "linear": _linear,
        }
        steps["default"]()
        seconds = interleaved(
            steps, rounds=options.rounds, warmup=options.warmup, clock=time.process_time
        )
        number = callback.coverage.num_matmuls
    rounds = zip(seconds["plain"], seconds["default"], seconds["linear"], strict=True)
    each = [((ours - plain) / number, linear / REPEATS) for plain, ours, linear in rounds]
    row = {
        "matmuls": number,
        "plain, ms": 1e3 * statistics.median(seconds["plain"]),
        "default, ms": 1e3 * statistics.median(seconds["default"]),
        "us per matmul": 1e6 * statistics.median(own for own, _ in each),
        "us per linear": 1e6 * statistics.median(linear for _, linear in each),
        "ratio": statistics.median(own / linear for own, linear in each),
    }
    print(tabulate([row], headers="keys", floatfmt=".3g"))
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    content = {"title": "Host time per matmul", "machine": about, "rows": [row]}
    (RESULTS / "host_time.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
