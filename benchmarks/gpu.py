"""What everything takes on a GPU: one table, and one JSON with the device's name.

A GPT in BF16 autocast, forward, backward and AdamW:

- unit scaling over the plain step, in eager mode and by Inductor, with CUDA graphs too;
- ``ScaleMonitor`` over the plain step, event file included;
- memory budgets: the time and the allocator's peak of each, and the predicted peak;
- FP8 linears over BF16 and torchao's dynamic scales, in a block of width 4,096 (``fp8_matmul.py``),
  and whether ``FP8(casts="fused")`` or ``"kernel"`` is faster under Inductor.

Run: ``make bench-gpu``, or ``python benchmarks/gpu.py``; with ``--rehearse`` in a small size on a
CPU, to see that it starts.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_step import NEVER, VOCABULARY, training_step, watched_step
from fp8_matmul import faster_casts, without_fp8
from fp8_matmul import measure as measure_fp8
from measure import RESULTS, interleaved, machine
from tabulate import tabulate
from torch import Tensor, nn

from examples.gpt import GPT
from lightning_unitscale.functional.low_precision import why_no_fp8
from lightning_unitscale.profiler import profile_graph
from lightning_unitscale.profiler.measure import PeakMeter
from lightning_unitscale.remat import remat
from lightning_unitscale.transforms import compile as compile_graphs
from lightning_unitscale.transforms import lossless_unit_scale, unit_scale

_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        **{"width": 1024, "depth": 8, "context": 512, "batch": 16, "rounds": 30, "warmup": 8},
        "budgets": (1.0, 0.85, 0.7),
    },
    "cpu": {
        **{"width": 32, "depth": 1, "context": 16, "batch": 2, "rounds": 2, "warmup": 1},
        "budgets": (1.0, 0.95),
    },
}
Step = Callable[[], object]


class Loss(nn.Module):
    """``(tokens, targets) -> loss`` in BF16 autocast."""

    def __init__(self, width: int, depth: int, context: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(width=width, depth=depth, num_heads=max(width // 64, 1), context=context)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = self.gpt(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def overheads(plain: nn.Module, batch: tuple[Tensor, Tensor], folder: str) -> dict[str, Step]:
    """Steps by name; what each is compared with is named before the comma, with "plain"."""

    def compiled(module: nn.Module, mode: str) -> nn.Module:
        return torch.compile(module, mode=mode)  # type: ignore[return-value]

    rules = unit_scale(plain)
    rules(*batch)  # decides, before it is copied
    everything = lossless_unit_scale(plain, *batch, depth="all")
    modules = {
        "eager, plain": copy.deepcopy(plain),
        "eager, plain once more": copy.deepcopy(plain),
        "eager, lossless products": lossless_unit_scale(plain, *batch),
        "eager, lossless all": everything,
        "eager, by rules": rules,
        "Inductor, plain": compiled(copy.deepcopy(plain), "default"),
        "Inductor, lossless products": compiled(lossless_unit_scale(plain, *batch), "default"),
        "Inductor, lossless all": compile_graphs(everything),
        "Inductor, by rules": compile_graphs(rules),
        "CUDA graphs, plain": compiled(copy.deepcopy(plain), "reduce-overhead"),
        "CUDA graphs, lossless products": compiled(
            lossless_unit_scale(plain, *batch), "reduce-overhead"
        ),
        "CUDA graphs, lossless all": compile_graphs(everything, "reduce-overhead"),
    }
    return {name: training_step(module, batch) for name, module in modules.items()} | {
        "eager, monitor, not sampled": watched_step(copy.deepcopy(plain), batch, NEVER, None),
        "eager, monitor, every step": watched_step(copy.deepcopy(plain), batch, 1, folder),
    }


def ratios(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each variant, with the median of the rounds' own ratios."""
    rows = []
    for name, taken in seconds.items():
        baseline = f"{name.partition(',')[0]}, plain"
        ratio = statistics.median(map(truediv, taken, seconds[baseline]))
        rows.append(
            {
                "variant": name,
                "ms per step": round(1e3 * statistics.median(taken), 3),
                "compared with": baseline,
                "ratio": round(ratio, 3),
            }
        )
    return rows


def budgets(
    plain: nn.Module,
    batch: tuple[Tensor, Tensor],
    clock: Callable[[], float],
    sizes: dict[str, Any],
) -> list[dict[str, Any]]:
    """A row for each budget: predicted and measured peak, and the time of a step."""
    device = batch[0].device
    rows = []
    for budget in sizes["budgets"]:
        module = copy.deepcopy(plain) if budget == 1.0 else remat(plain, budget)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

        def step(module: nn.Module = module, optimizer: Any = optimizer) -> None:
            module(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        meter = PeakMeter(device)
        meter.start()
        step()
        state = [dict(values) for values in optimizer.state.values()]
        meter.mark([*module.parameters(), *module.buffers(), state, *batch])
        step()
        measured = meter.stop() or 0
        taken = interleaved({"step": step}, rounds=sizes["rounds"], warmup=1, clock=clock)["step"]
        row = {"budget": budget, "measured peak, MiB": round(measured / 2**20, 1)}
        if budget == 1.0:
            profile = profile_graph(plain, *batch, device=device.type, optimizer=torch.optim.AdamW)
            row["predicted peak, MiB"] = round(profile.peak_bytes / 2**20, 1)
        rows.append({**row, "ms per step": round(1e3 * statistics.median(taken), 3)})
    return rows


def main() -> None:
    """Measure, print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="in a small size on the CPU")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; pass --rehearse to see that this starts.")
    device = torch.device("cpu" if options.rehearse else "cuda")
    if options.rehearse:
        # Torch's own kernels in what is compiled: nobody waits for a C++ compiler.
        importlib.import_module("torch._inductor.config").fallback_by_default = True
    sizes = _SIZES[device.type]

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    generator = torch.Generator().manual_seed(1)
    shape = (sizes["batch"], sizes["context"] + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    plain = Loss(sizes["width"], sizes["depth"], sizes["context"]).to(device)
    results: dict[str, Any] = {"machine": machine(), "sizes": sizes}
    with tempfile.TemporaryDirectory() as folder:
        steps = overheads(plain, batch, folder)
        results["overheads"] = ratios(
            interleaved(steps, rounds=sizes["rounds"], warmup=sizes["warmup"], clock=clock)
        )
    results["budgets"] = budgets(plain, batch, clock, sizes)
    if device.type == "cuda" and why_no_fp8(device) is None:
        results["fp8"] = measure_fp8("block", 4096, 16384)
        results["casts"] = faster_casts(results["fp8"])
    for name in ("overheads", "budgets", "fp8"):
        if name in results:
            print(f"{name}\n{tabulate(results[name], headers='keys')}\n")
    if "casts" in results:
        print(f"Under Inductor set FP8(casts={results['casts']!r}) on this GPU.\n")
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    options.output.parent.mkdir(exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    if lost := without_fp8(results.get("fp8", [])):
        parser.exit(1, f"These ran without FP8: {', '.join(lost)}.\n")


if __name__ == "__main__":
    main()
