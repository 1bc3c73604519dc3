"""Seconds that Inductor takes to compile a sampled step, with statistics as one operator.

Forward and backward graph of the demo's GPT, on a CPU, each variant in a process of its own with
empty caches. Times are the processor's, compilers of C++ included,
so that what else runs on the machine counts little; the second column is the clock's.

Run: ``python benchmarks/monitor_compile.py``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
from demo_step import DemoLoss, demo_batch, training_step
from measure import RESULTS, machine
from tabulate import tabulate

from lightning_unitscale.capture.graph_nodes import is_whole_view
from lightning_unitscale.capture.module_steps import captured_forward
from lightning_unitscale.monitor.probes import ScaleProbes
from lightning_unitscale.scales.layout import RowLayout

VARIANTS = ("plain", "sampled")


def first_step(variant: str) -> dict[str, float | str]:
    """Run the first step of a variant in this process, and the second to be taken off."""
    torch.set_num_threads(1)
    probes = ScaleProbes(RowLayout(), lambda node: not is_whole_view(node))
    module = torch.compile(DemoLoss())
    if variant != "plain":
        module, captured = captured_forward(DemoLoss(), "monitor", probes)
        captured.owner.executor = "inductor"
        # Without the variant that is not sampled.
        captured.owner.observe("monitor", True, always=True)
    step = training_step(module, demo_batch())
    seconds = []
    for _ in range(2):
        start, processor = time.perf_counter(), sum(os.times()[:4])
        step()
        seconds.append((sum(os.times()[:4]) - processor, time.perf_counter() - start))
    sent = probes.take(0)
    (first, first_wall), (second, second_wall) = seconds
    return {
        "step": variant,
        "tensors": 0 if sent is None else len(sent().names),
        "processor, s": round(first - second, 1),
        "clock, s": round(first_wall - second_wall, 1),
    }


def main() -> None:
    """Measure each variant in a new process, print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--variant", choices=VARIANTS, help="measure one, in this process")
    variant = parser.parse_args().variant
    if variant is not None:
        print(json.dumps(first_step(variant)))
        return
    rows = []
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as folder:
            # Compiled in one process: only what a process has waited for counts.
            settings = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            command = [sys.executable, __file__, "--variant", name]
            output = subprocess.run(
                command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(tabulate(rows[-1:], headers="keys"), flush=True)
    about = machine()
    print(f"\nInductor's time to compile\n{tabulate(rows, headers='keys')}")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    content = {"title": "Inductor's time to compile", "machine": about, "rows": rows}
    (RESULTS / "monitor_compile.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
