"""Host time of the default method per matmul, in a step with little arithmetic.

The step is one of a GPT of width 16 with 8 layers. Its plain time is taken off, and what is left is
divided by the number of matmuls. Beside it stands a plain linear layer of width 16 that is summed
and differentiated. Each step has a process of its own, since an attached default method makes plain
steps of its process slower. Seconds are CPU time, so that other processes count for little. The
same step, compiled by Inductor, is compared with itself without callbacks.

Run: ``python benchmarks/host_time.py``
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from operator import truediv

import torch
import torch.nn.functional as F
from demo_step import DemoLoss, demo_batch, training_step
from measure import RESULTS, in_processes, machine, serve
from tabulate import tabulate
from torch import nn

from lightning_unitscale import UnitScaleCallback, attach

WIDTH = 16
REPEATS = 20
NUM_MATMULS = 115


def _linear() -> None:
    for _ in range(REPEATS):
        F.linear(_INPUT, _WEIGHT).sum().backward()


_INPUT, _WEIGHT = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)


def _plain(compiled: bool = False) -> Callable[[], object]:
    return training_step(_module(compiled), demo_batch(2, 8))


def _module(compiled: bool) -> nn.Module:
    module = DemoLoss(WIDTH, depth=8, num_heads=2)
    return torch.compile(module) if compiled else module


def _default(compiled: bool = False) -> Callable[[], object]:
    module, callback = _module(compiled), UnitScaleCallback()
    attach(module, callbacks=callback)
    step = training_step(module, demo_batch(2, 8))
    step()
    assert callback.coverage.num_in_units == NUM_MATMULS
    return step


STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "plain": _plain,
    "default": _default,
    "linear": lambda: _linear,
    "Inductor": functools.partial(_plain, compiled=True),
    "Inductor, default": functools.partial(_default, compiled=True),
}


def main() -> None:
    """Measure in turn, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--serve", choices=STEPS, help="run one step for each line of the input")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve(STEPS[options.serve](), warmup=options.warmup)
        return
    seconds = in_processes(__file__, list(STEPS), rounds=options.rounds)
    rounds = zip(seconds["plain"], seconds["default"], seconds["linear"], strict=True)
    each = [((ours - plain) / NUM_MATMULS, linear / REPEATS) for plain, ours, linear in rounds]
    row = {
        "matmuls": NUM_MATMULS,
        "plain, ms": 1e3 * statistics.median(seconds["plain"]),
        "default, ms": 1e3 * statistics.median(seconds["default"]),
        "step ratio": statistics.median(map(truediv, seconds["default"], seconds["plain"])),
        "us per matmul": 1e6 * statistics.median(own for own, _ in each),
        "us per linear": 1e6 * statistics.median(linear for _, linear in each),
        "ratio": statistics.median(own / linear for own, linear in each),
        "Inductor, ms": 1e3 * statistics.median(seconds["Inductor"]),
        "Inductor ratio": statistics.median(
            map(truediv, seconds["Inductor, default"], seconds["Inductor"])
        ),
    }
    print(tabulate([row], headers="keys", floatfmt=".3g"))
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    content = {"title": "Host time per matmul", "machine": about, "rows": [row]}
    (RESULTS / "host_time.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
