"""Step time of unit scaling, lossless and by rules, relative to the unscaled step.

Each variant has a process of its own, since an attached default method makes plain steps of its
process slower.

Run: ``python benchmarks/unit_scale_overhead.py``
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from demo_step import DemoLoss, demo_batch, training_step
from measure import in_processes, report, serve
from small_models import small_models

from lightning_unitscale.transforms import compile as compile_graphs
from lightning_unitscale.transforms import lossless_unit_scale, unit_scale

Make = Callable[[], Callable[[], object]]


def _demo(method: str, *, compiled: bool) -> Callable[[], object]:
    batch, module = demo_batch(), DemoLoss()
    if method == "plain":
        return training_step(torch.compile(module) if compiled else module, batch)
    if method == "lossless":
        scaled = lossless_unit_scale(module, *batch)
    else:
        scaled = unit_scale(module)
        scaled(*batch)  # decides, before it is copied
    return training_step(compile_graphs(scaled) if compiled else scaled, batch)


def _small(name: str, method: str) -> Callable[[], object]:
    module, batch = small_models()[name]
    return training_step(
        module if method == "plain" else lossless_unit_scale(module, *batch), batch
    )


METHODS = ("plain", "lossless", "by rules")
STEPS: dict[str, Make] = {
    **{f"eager, {method}": partial(_demo, method, compiled=False) for method in METHODS},
    **{f"Inductor, {method}": partial(_demo, method, compiled=True) for method in METHODS},
    **{
        f"{name}, {method}": partial(_small, name, method)
        for name in small_models()
        for method in METHODS[:2]
    },
}


def main() -> None:
    """Measure all variants in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--serve", choices=STEPS, help="run one step for each line of the input")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.serve:
        serve(STEPS[options.serve](), warmup=options.warmup, clock=time.perf_counter)
        return
    seconds = in_processes(__file__, list(STEPS), rounds=options.rounds)
    baselines = {name: f"{name.split(',')[0]}, plain" for name in seconds}
    report("Unit scaling, demo GPT", seconds, baselines, "unit_scale_overhead.json")


if __name__ == "__main__":
    main()
