"""Step time of unit scaling, lossless and by rules, over the plain step, eager and compiled.

Run: ``python benchmarks/unit_scale_overhead.py``
"""

from __future__ import annotations

import argparse

import torch
from demo_step import DemoLoss, demo_batch, training_step
from measure import interleaved, report
from small_models import small_models
from torch import nn

from lightning_unitscale.transforms import compile as compile_graphs
from lightning_unitscale.transforms import lossless_unit_scale, unit_scale


def main() -> None:
    """Measure all variants in one process, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    batch = demo_batch()
    plain = DemoLoss()
    lossless = lossless_unit_scale(plain, *batch)
    rules = unit_scale(plain)
    rules(*batch)  # decides, before it is copied
    modules: dict[str, nn.Module] = {
        "eager, plain": plain,
        "eager, lossless": lossless,
        "eager, by rules": rules,
        "Inductor, plain": torch.compile(DemoLoss()),
        "Inductor, lossless": compile_graphs(lossless),
        "Inductor, by rules": compile_graphs(rules),
    }
    steps = {name: training_step(module, batch) for name, module in modules.items()}
    for name, (module, own_batch) in small_models().items():
        scaled = lossless_unit_scale(module, *own_batch)
        steps[f"{name}, plain"] = training_step(module, own_batch)
        steps[f"{name}, lossless"] = training_step(scaled, own_batch)
    seconds = interleaved(steps, rounds=options.rounds, warmup=options.warmup)
    baselines = {name: f"{name.split(',')[0]}, plain" for name in seconds}
    report("Unit scaling, demo GPT", seconds, baselines, "unit_scale_overhead.json")


if __name__ == "__main__":
    main()
