"""Seconds of the first step of the demo's GPT, unscaled and with callbacks, eager and compiled.

Each variant has a new process each time; with Inductor once with caches that are empty, and once
with those of that run. Times are the processor's, compilers of C++ included, so that what else runs
on the machine counts little; a second step, which nothing is compiled for, is taken off. The plain
variant stands twice.

Run: ``python benchmarks/first_step.py``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings

import torch
from demo_step import DemoLoss, demo_batch
from measure import report

from lightning_unitscale import ScaleMonitor, UnitScaleCallback, attach

EXECUTORS = {"eager": ["eager"], "Inductor": ["Inductor", "Inductor again"]}
CALLBACKS = {
    "plain": "",
    "plain once more": "",
    "units": "u",
    "monitor": "m",
    "units and monitor": "um",
}


def first_step(*, is_compiled: bool, which: str) -> float:
    """Processor seconds that the first step takes longer than the second, in this process."""
    warnings.filterwarnings("ignore")
    logging.disable()
    torch.set_num_threads(1)
    callbacks = [UnitScaleCallback()] * ("u" in which) + [ScaleMonitor()] * ("m" in which)
    module, batch = DemoLoss(), demo_batch()
    if is_compiled:
        module.compile()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    seconds = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        attached = attach(module, optimizer, callbacks, log_dir=folder)
        with attached if callbacks else contextlib.nullcontext():
            for _ in range(2):
                start = sum(os.times()[:4])
                optimizer.zero_grad()
                module(*batch).backward()
                optimizer.step()
                seconds.append(sum(os.times()[:4]) - start)
    return seconds[0] - seconds[1]


def _in_a_new_process(executor: str, variant: str, folder: str) -> float:
    # Compiled in one process: only what a process has waited for counts.
    settings = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, __file__, "--measure", executor, CALLBACKS[variant]],
        env=os.environ | settings,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return float(json.loads(output.splitlines()[-1]))


def main() -> None:
    """Measure all variants in turn, and print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help="one variant, in this process")
    options = parser.parse_args()
    if options.measure is not None:
        executor, which = options.measure
        print(json.dumps(first_step(is_compiled=executor == "Inductor", which=which)))
        return
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    baselines = {}
    for _ in range(options.rounds):
        for executor, runs in EXECUTORS.items():
            for variant in CALLBACKS:
                with tempfile.TemporaryDirectory() as folder:
                    for run in runs:
                        taken = _in_a_new_process(executor, variant, folder)
                        seconds.setdefault(f"{run}, {variant}", []).append(taken)
                        baselines[f"{run}, {variant}"] = f"{run}, plain"
    report("The first step, over a later one", seconds, baselines, "first_step.json")


if __name__ == "__main__":
    main()
