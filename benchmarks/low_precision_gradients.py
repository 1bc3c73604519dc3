"""Error of low-precision gradients relative to FP32, while the demo's GPT trains.

A final loss summarizes a whole training. This measures single steps. The model is trained in FP32.
At some steps, every method of ``low_precision_training.py`` that does not change the model computes
the gradient of the same weights on the same batches. The error is the norm of the difference over
the norm of the FP32 gradient, all parameters as one vector; 1 is as bad as no gradient. "first
batch" methods keep the units that they measured before training, without recalibration.

    python benchmarks/low_precision_gradients.py --steps 0 50 200 400
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.low_precision_training import (
    CLIP,
    CONTEXT,
    METHODS,
    WEIGHT_DECAY,
    Batch,
    Loss,
    Method,
    endless_batches,
    optimizer_of,
)
from benchmarks.measure import RESULTS, machine
from examples.text import TextDataModule
from lightning_unitscale.transforms import lossless_unit_scale, simulate_format


def gradient(module: nn.Module, batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
    """The gradient of all parameters, as one vector in FP32."""
    module.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        module(*batch).backward()
    found = torch.cat([one.grad.flatten() for one in module.parameters() if one.grad is not None])
    module.zero_grad()
    return found


def mean_error(
    module: nn.Module, batches: Sequence[Batch], exact: Sequence[Tensor], dtype: torch.dtype
) -> float:
    """Mean relative error of the gradient over the batches."""
    relative = [
        float((gradient(module, batch, dtype) - one).norm() / one.norm())
        for batch, one in zip(batches, exact, strict=True)
    ]
    return statistics.fmean(relative)


def in_units_of(start: Loss, first: Batch) -> Callable[[Loss], nn.Module]:
    """E4M3/E5M2 in the units of the first batch, whatever the weights have become."""

    def make(now: Loss) -> nn.Module:
        scaled = lossless_unit_scale(copy.deepcopy(start), *first)
        scaled.load_state_dict(now.state_dict())
        return simulate_format(scaled, "E4M3FN", "E5M2")

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 50, 200, 400])
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the demo's")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches", type=int, default=4, help="on which gradients are compared")
    args = parser.parse_args()

    torch.manual_seed(1)
    trained = Loss()
    start = copy.deepcopy(trained)
    data = TextDataModule(context=CONTEXT, batch_size=args.batch_size, val_samples=1, seed=1)
    batches = endless_batches(data)
    first = next(batches)
    optimizer, schedule = optimizer_of(trained, max(args.steps), args.learning_rate, WEIGHT_DECAY)
    first_batch = Method("E4M3/E5M2", "lossless, first batch", lambda *_: trained)
    methods: list[tuple[Method, Callable[[Loss, Batch], nn.Module]]] = [
        (one, one.make) for one in METHODS[1:] if one.by_rules is None and not one.follows
    ]
    place = next(i for i, (one, _) in enumerate(methods) if one.name == "E4M3/E5M2, lossless") + 1
    stale = in_units_of(start, first)
    methods.insert(place, (first_batch, lambda now, _: stale(now)))

    rows: dict[str, dict[str, Any]] = {
        one.name: {"matmuls in": one.matmuls, "scaling": one.scaling} for one, _ in methods
    }
    batch = first
    for step in range(max(args.steps) + 1):
        if step in args.steps:
            compared = [next(batches) for _ in range(args.batches)]
            exact = [gradient(trained, one) for one in compared]
            for method, make in methods:
                module = make(copy.deepcopy(trained), compared[0])
                error = mean_error(module, compared, exact, method.dtype)
                torch._dynamo.reset()
                rows[method.name][f"step {step}"] = round(error, 4)
                print(f"step {step}  {method.name:34} {error:.4f}", flush=True)
        trained(*batch).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        batch = next(batches)
    content = {"setting": vars(args), "machine": machine(), "rows": list(rows.values())}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "low_precision_gradients.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\nRelative error of the gradient\n{tabulate(list(rows.values()), headers='keys')}")


if __name__ == "__main__":
    main()
